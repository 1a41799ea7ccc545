//! The CUDA engine's fast paths against the CPU engine: aligned matrices, the head sizes of the tensor-core
//! kernels, shapes of real models. (The conformance suite has odd shapes, gaps between rows, and every option.)
//!
//! Inputs are rounded to bf16 first, so that both engines start from the same numbers. The bound on the
//! relative error of a result, 1e-2, is what two roundings to bf16 (2^-9 each) and the rounded probabilities
//! inside attention leave room for. A test runs all its cases and names every failure.

use std::sync::LazyLock;
use std::time::Duration;

use half::bf16;
use slipstream::engine::cpu::Cpu;
use slipstream::engine::cuda::Cuda;
use slipstream::engine::{
    BlockKeys, BlockKeysGrad, BlockMask, CausalMask, Engine, EngineError, HeadLoss, HeadLossOut,
    Heads, LossOptions, Queue, Rotary, Slots,
};

static CUDA: LazyLock<Cuda> = LazyLock::new(|| Cuda::new(0).unwrap());
static CPU: LazyLock<Cpu> = LazyLock::new(|| Cpu::new(2).unwrap());

type Results = Result<Vec<(&'static str, Vec<f32>)>, EngineError>;

/// Numbers from a seed (splitmix64), rounded to bf16, between -1 and 1 times `scale`.
fn random(seed: u64, len: usize, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678;
    (0..len)
        .map(|_| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            let unit = ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
            bf16::from_f32(unit * scale).to_f32()
        })
        .collect()
}

fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let sum = |f: &dyn Fn(usize) -> f64| (0..got.len()).map(|i| f(i) * f(i)).sum::<f64>();
    let difference = sum(&|i| f64::from(got[i]) - f64::from(want[i]));
    let size = sum(&|i| f64::from(want[i]));
    if difference.is_nan() {
        return f64::INFINITY;
    }
    if size == 0.0 {
        return difference.sqrt();
    }
    (difference / size).sqrt()
}

/// The failures of one test.
#[derive(Default)]
struct Report(Vec<String>);

impl Report {
    /// Compares each result of one case.
    fn case(&mut self, name: &str, cuda: Results, cpu: Results) {
        let (cuda, cpu) = match (cuda, cpu) {
            (Ok(cuda), Ok(cpu)) => (cuda, cpu),
            (cuda, cpu) => {
                self.0
                    .push(format!("{name}: {:?} {:?}", cuda.err(), cpu.err()));
                return;
            }
        };
        for ((what, got), (_, want)) in cuda.iter().zip(&cpu) {
            let error = relative_error(got, want);
            println!("{name} {what}: {error:.2e}");
            if error > 1e-2 {
                self.0.push(format!("{name} {what}: off by {error:.2e}"));
            }
        }
    }

    fn finish(self) {
        assert!(self.0.is_empty(), "{:#?}", self.0);
    }
}

/// Runs one generic function on both engines and compares.
macro_rules! compare {
    ($report:expr, $name:expr, $function:ident ( $($argument:expr),* )) => {
        let cuda = $function(&*CUDA, $($argument),*);
        let cpu = $function(&*CPU, $($argument),*);
        $report.case(&$name, cuda, cpu);
    };
}

fn causal<E: Engine>(e: &E, heads: Heads, lengths: &[u32], window: Option<usize>) -> Results {
    let rows = lengths.iter().sum::<u32>() as usize;
    let mut offsets = vec![0];
    for length in lengths {
        offsets.push(offsets[offsets.len() - 1] + length);
    }
    let (wide, narrow) = (heads.q * heads.dim, heads.kv * heads.dim);
    // Queries, keys and values lie in one matrix, as the fused projection leaves them.
    let all = e.upload_half(
        &random(1, rows * (wide + 2 * narrow), 1.5),
        wide + 2 * narrow,
    )?;
    let part = |begin, end| all.view().col_range(begin, end);
    let mut out = e.upload_half(&vec![f32::NAN; rows * wide], wide)?;
    let offsets = e.upload_index(&offsets)?;
    e.causal_attention(
        heads,
        (heads.dim as f32).powf(-0.5),
        part(0, wide),
        part(wide, wide + narrow),
        part(wide + narrow, wide + 2 * narrow),
        &CausalMask {
            offsets: offsets.view(),
            window,
            longest: lengths.iter().copied().max().unwrap_or(0) as usize,
        },
        out.view_mut(),
    )?;
    Ok(vec![("out", e.download_half(out.view())?)])
}

#[test]
#[ignore = "needs a GPU"]
fn causal_attention_on_tensor_cores() {
    let mut report = Report::default();
    for (q, kv, dim) in [
        (2, 2, 64),
        (4, 1, 64),
        (6, 2, 128),
        (8, 2, 128),
        (2, 1, 256),
    ] {
        let heads = Heads { q, kv, dim };
        for window in [None, Some(1), Some(50)] {
            let name = format!("causal {heads:?} {window:?}");
            compare!(report, name, causal(heads, &[1, 70, 0, 129, 3], window));
        }
    }
    report.finish();
}

/// Documents as `(context rows before it, anchors)`.
struct Blocks<'a> {
    block: usize,
    context_rows: usize,
    documents: &'a [(u32, &'a [u32])],
    window: Option<usize>,
}

fn blocks<E: Engine>(e: &E, heads: Heads, case: &Blocks<'_>) -> Results {
    let (mut starts, mut anchors) = (vec![], vec![]);
    for (start, of_document) in case.documents {
        starts.extend(vec![*start; of_document.len()]);
        anchors.extend_from_slice(of_document);
    }
    let rows = anchors.len() * case.block;
    let (wide, narrow) = (heads.q * heads.dim, heads.kv * heads.dim);
    let input = |seed, rows, cols| e.upload_half(&random(seed, rows * cols, 1.5), cols);
    let q = input(1, rows, wide)?;
    let [context_k, context_v] = [
        input(2, case.context_rows, narrow)?,
        input(3, case.context_rows, narrow)?,
    ];
    let [block_k, block_v] = [input(4, rows, narrow)?, input(5, rows, narrow)?];
    let d_out = input(6, rows, wide)?;
    let keys = BlockKeys {
        context_k: context_k.view(),
        context_v: context_v.view(),
        block_k: block_k.view(),
        block_v: block_v.view(),
    };
    let (starts, anchors) = (e.upload_index(&starts)?, e.upload_index(&anchors)?);
    let mask = BlockMask {
        block: case.block,
        context_start: starts.view(),
        anchor: anchors.view(),
        window: case.window,
    };
    let scale = (heads.dim as f32).powf(-0.5);
    let output = |rows, cols| e.upload_half(&vec![f32::NAN; rows * cols], cols);
    let mut out = output(rows, wide)?;
    let mut lse = e.float(rows, heads.q)?;
    e.block_attention(
        heads,
        scale,
        q.view(),
        &keys,
        &mask,
        out.view_mut(),
        lse.view_mut(),
    )?;
    let mut d_q = output(rows, wide)?;
    let mut d_context_k = output(case.context_rows, narrow)?;
    let mut d_context_v = output(case.context_rows, narrow)?;
    let mut d_block_k = output(rows, narrow)?;
    let mut d_block_v = output(rows, narrow)?;
    e.block_attention_backward(
        heads,
        scale,
        d_out.view(),
        q.view(),
        &keys,
        &mask,
        out.view(),
        lse.view(),
        d_q.view_mut(),
        BlockKeysGrad {
            context_k: d_context_k.view_mut(),
            context_v: d_context_v.view_mut(),
            block_k: d_block_k.view_mut(),
            block_v: d_block_v.view_mut(),
        },
    )?;
    Ok(vec![
        ("out", e.download_half(out.view())?),
        ("lse", e.download_float(lse.view())?),
        ("d_q", e.download_half(d_q.view())?),
        ("context d_k", e.download_half(d_context_k.view())?),
        ("context d_v", e.download_half(d_context_v.view())?),
        ("block d_k", e.download_half(d_block_k.view())?),
        ("block d_v", e.download_half(d_block_v.view())?),
    ])
}

#[test]
#[ignore = "needs a GPU"]
fn block_attention_on_tensor_cores() {
    let mut report = Report::default();
    for (q, kv, dim) in [
        (2, 2, 64),
        (6, 2, 64),
        (4, 1, 128),
        (8, 1, 128),
        (2, 1, 256),
    ] {
        let heads = Heads { q, kv, dim };
        for (block, window) in [(16, None), (8, None), (5, Some(40)), (16, Some(4))] {
            let case = Blocks {
                block,
                context_rows: 300,
                // The second document of the batch has no blocks; the last lies before the others.
                documents: &[(20, &[0, 3, 64, 100]), (230, &[1, 65, 70]), (2, &[9])],
                window,
            };
            let name = format!("blocks of {block} {heads:?} {window:?}");
            compare!(report, name, blocks(heads, &case));
        }
    }
    report.finish();
}

fn layers<E: Engine>(e: &E, rows: usize, heads: usize, dim: usize) -> Results {
    let cols = heads * dim;
    let input = |seed, cols| e.upload_half(&random(seed, rows * cols, 1.0), cols);
    let (x, dy, delta) = (input(1, cols)?, input(2, cols)?, input(3, cols)?);
    let (mut h, mut dx) = (input(4, cols)?, input(5, cols)?);
    let mut y = e.half(rows, cols)?;
    let w = e.upload_float(&random(6, cols, 1.0), cols)?;
    let mut dw = e.upload_float(&random(7, cols, 1.0), cols)?;
    let mut results = vec![];
    e.norm(
        h.view_mut(),
        Some(delta.view()),
        w.view(),
        1e-6,
        y.view_mut(),
    )?;
    results.push(("residual", e.download_half(h.view())?));
    results.push(("norm", e.download_half(y.view())?));
    e.norm_backward(
        dy.view(),
        h.view(),
        w.view(),
        1e-6,
        dx.view_mut(),
        dw.view_mut(),
    )?;
    results.push(("norm dx", e.download_half(dx.view())?));
    results.push(("norm dw", e.download_float(dw.view())?));

    let angles = random(8, 50 * dim / 2, 3.0);
    let table = |f: fn(f32) -> f32| {
        e.upload_float(&angles.iter().map(|a| f(*a)).collect::<Vec<_>>(), dim / 2)
    };
    let (cos, sin) = (table(f32::cos)?, table(f32::sin)?);
    let rotary = Rotary {
        cos: cos.view(),
        sin: sin.view(),
    };
    let positions: Vec<u32> = (0..rows as u32).map(|r| r * 7 % 50).collect();
    let positions = e.upload_index(&positions)?;
    let w = e.upload_float(&random(9, dim, 1.0), dim)?;
    let mut dw = e.upload_float(&random(10, dim, 1.0), dim)?;
    for (what, w) in [("rotary", None), ("head norm", Some(w.view()))] {
        e.head_norm_rotary(
            x.view(),
            w,
            1e-6,
            dim,
            positions.view(),
            rotary,
            y.view_mut(),
        )?;
        results.push((what, e.download_half(y.view())?));
    }
    e.head_norm_rotary_backward(
        dy.view(),
        x.view(),
        w.view(),
        1e-6,
        positions.view(),
        rotary,
        dx.view_mut(),
        dw.view_mut(),
    )?;
    results.push(("head norm dx", e.download_half(dx.view())?));
    results.push(("head norm dw", e.download_float(dw.view())?));

    let gate_up = input(11, 2 * cols)?;
    let mut d_gate_up = e.half(rows, 2 * cols)?;
    e.swiglu(gate_up.view(), y.view_mut())?;
    e.swiglu_backward(dy.view(), gate_up.view(), d_gate_up.view_mut())?;
    results.push(("swiglu", e.download_half(y.view())?));
    results.push(("swiglu gradient", e.download_half(d_gate_up.view())?));

    let ids: Vec<u32> = (0..rows as u32).map(|r| r * 3 % rows as u32).collect();
    let ids = e.upload_index(&ids)?;
    e.gather(x.view(), ids.view(), y.view_mut())?;
    let bias = e.upload_float(&random(12, cols, 1.0), cols)?;
    e.add_bias(bias.view(), y.view_mut())?;
    results.push(("gather and bias", e.download_half(y.view())?));
    let mut floats = e.float(rows, cols)?;
    e.widen(y.view(), floats.view_mut())?;
    e.round(floats.view(), dx.view_mut())?;
    results.push(("widen and round", e.download_half(dx.view())?));
    Ok(results)
}

#[test]
#[ignore = "needs a GPU"]
fn layers_on_aligned_rows() {
    let mut report = Report::default();
    for (rows, heads, dim) in [
        (1, 2, 64),
        (300, 8, 128),
        (37, 3, 96),
        (40, 32, 128),
        (9, 80, 128),
    ] {
        let name = format!("{rows} rows of {heads} x {dim}:");
        compare!(report, name, layers(rows, heads, dim));
    }
    report.finish();
}

fn products<E: Engine>(e: &E, m: usize, inner: usize, outer: usize) -> Results {
    let input = |seed, rows, cols| e.upload_half(&random(seed, rows * cols, 1.0), cols);
    let (x, w, dy) = (
        input(1, m, inner)?,
        input(2, outer, inner)?,
        input(3, m, outer)?,
    );
    let (mut y, mut dx) = (input(4, m, outer)?, input(5, m, inner)?);
    let mut dw = e.upload_float(&random(6, outer * inner, 1.0), inner)?;
    e.linear(x.view(), w.view(), y.view_mut(), true)?;
    e.linear_dx(dy.view(), w.view(), dx.view_mut(), false)?;
    e.linear_dw(dy.view(), x.view(), dw.view_mut())?;
    Ok(vec![
        ("y", e.download_half(y.view())?),
        ("dx", e.download_half(dx.view())?),
        ("dw", e.download_float(dw.view())?),
    ])
}

#[test]
#[ignore = "needs a GPU"]
fn products_small_and_timed() {
    let mut report = Report::default();
    // The last is large enough to be timed; a neighbour uses its choice.
    for (m, inner, outer) in [
        (64, 128, 192),
        (100, 96, 40),
        (1024, 1024, 1024),
        (1000, 1024, 1024),
    ] {
        let name = format!("product [{m}, {inner}, {outer}]");
        compare!(report, name, products(m, inner, outer));
    }
    report.finish();
}

fn loss<E: Engine>(e: &E, options: &LossOptions) -> Results {
    let (blocks, block, width, vocabulary, context) = (11, 8, 64, 512, 50);
    let hidden = e.upload_half(&random(1, blocks * block * width, 1.0), width)?;
    let lm_head = e.upload_half(&random(2, vocabulary * width, 1.0), width)?;
    let teacher = e.upload_half(&random(3, context * width, 1.0), width)?;
    let (mut row, mut slot, mut block_begin) = (vec![], vec![], vec![0u32]);
    for n in 0..blocks {
        for k in 1..block {
            if n != 4 && (n + k) % 5 != 0 {
                row.push((n * block + k) as u32);
                slot.push(k as u32);
            }
        }
        block_begin.push(row.len() as u32);
    }
    let label: Vec<u32> = row.iter().map(|r| r * 37 % vocabulary as u32).collect();
    let teacher_row: Vec<u32> = row.iter().map(|r| r * 11 % context as u32).collect();
    let index = |v: &[u32]| e.upload_index(v);
    let (row, label, slot) = (index(&row)?, index(&label)?, index(&slot)?);
    let teacher_row = index(&teacher_row)?;
    let mut d_hidden = e.half(blocks * block, width)?;
    let mut sums = e.float(1, 2)?;
    let mut correct = index(&vec![7; label.cols()])?;
    e.head_loss(
        &HeadLoss {
            hidden: hidden.view(),
            lm_head: lm_head.view(),
            slots: Slots {
                row: row.view(),
                label: label.view(),
                slot: slot.view(),
                teacher_row: teacher_row.view(),
                block_begin: &block_begin,
            },
            teacher: Some(teacher.view()),
            options,
        },
        HeadLossOut {
            d_hidden: d_hidden.view_mut(),
            sums: sums.view_mut(),
            correct: correct.view_mut(),
        },
    )?;
    let correct = e.download_index(correct.view())?;
    Ok(vec![
        ("d_hidden", e.download_half(d_hidden.view())?),
        ("sums", e.download_float(sums.view())?),
        ("correct", correct.iter().map(|c| *c as f32).collect()),
    ])
}

#[test]
#[ignore = "needs a GPU"]
fn loss_over_aligned_logits() {
    let mut report = Report::default();
    let hard = LossOptions::default();
    let all = LossOptions {
        streak_alpha: 0.5,
        dpace_alpha: Some(0.2),
        use_soft_labels: true,
        kl_temperature: 2.0,
        cap_lambda: 0.3,
        ..hard
    };
    for (name, options) in [("hard", hard), ("every option", all)] {
        compare!(report, format!("loss {name}"), loss(&options));
    }
    report.finish();
}

/// The same calls give the same bits, whatever else the GPU does.
#[test]
#[ignore = "needs a GPU"]
fn repetition_changes_no_bit() {
    let heads = Heads {
        q: 8,
        kv: 2,
        dim: 128,
    };
    let case = Blocks {
        block: 16,
        context_rows: 300,
        documents: &[(0, &[10, 100, 180, 200]), (210, &[5, 60, 89])],
        window: None,
    };
    let once = || {
        [
            blocks(&*CUDA, heads, &case).unwrap(),
            layers(&*CUDA, 300, 8, 128).unwrap(),
            loss(&*CUDA, &LossOptions::default()).unwrap(),
        ]
        .concat()
    };
    let first = once();
    for _ in 0..3 {
        for ((what, a), (_, b)) in first.iter().zip(once()) {
            assert!(
                a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{what} differs"
            );
        }
    }
}

/// Slots are copied out and in while the compute queue is busy with something else, and arrive whole; memory
/// that a copy still reads is not given to anyone before the copy is done.
#[test]
#[ignore = "needs a GPU"]
fn copies_overlap_with_computing_and_arrive_whole() {
    let e = &*CUDA;
    let (rows, cols, slots) = (1024, 1024, 4);
    let bytes = rows * cols * 2;
    let mut ring = vec![0u8; bytes * slots];
    // SAFETY: the ring outlives this test's copies; it is leaked below, as the engine may outlive the test.
    unsafe { e.register_host(ring.as_mut_ptr(), ring.len()).unwrap() };
    let busy = e.upload_half(&random(1, 2048 * 2048, 1.0), 2048).unwrap();
    let mut sink = e.half(2048, 2048).unwrap();
    let mut landing = [e.half(rows, cols).unwrap(), e.half(rows, cols).unwrap()];
    let mut kept = e.half(rows, cols).unwrap();
    for round in 0..8 {
        let slot = ring[round % slots * bytes..].as_mut_ptr();
        let values = random(100 + round as u64, rows * cols, 1.0);
        // Delay what the copy waits for.
        for _ in 0..20 {
            e.linear(busy.view(), busy.view(), sink.view_mut(), false)
                .unwrap();
        }
        let out = e.upload_half(&values, cols).unwrap();
        let written = e.record(Queue::Compute).unwrap();
        e.wait(Queue::CopyOut, &written).unwrap();
        // SAFETY: the slot holds the bytes and is read only after the event below.
        unsafe { e.copy_out(out.view(), slot).unwrap() };
        let published = e.record(Queue::CopyOut).unwrap();
        // Given back while the copy may still be waiting; its memory must not be overwritten by this:
        drop(out);
        let overwrite = e.upload_half(&vec![7.0; rows * cols], cols).unwrap();
        e.finish(&published, Duration::from_secs(60)).unwrap();

        let target = &mut landing[round % 2];
        // SAFETY: as above; nobody writes the slot until the copy's event is done.
        unsafe { e.copy_in(slot, target.view_mut()).unwrap() };
        let landed = e.record(Queue::CopyIn).unwrap();
        e.wait(Queue::Compute, &landed).unwrap();
        e.copy_half(target.view(), kept.view_mut()).unwrap();
        let used = e.record(Queue::Compute).unwrap();
        e.wait(Queue::CopyIn, &used).unwrap();
        assert!(
            e.download_half(kept.view()).unwrap() == values,
            "round {round}"
        );
        drop(overwrite);
    }
    std::mem::forget(ring);
}

#[test]
#[ignore = "needs a GPU"]
fn too_much_memory_is_an_error_and_nothing_worse() {
    let e = &*CUDA;
    let error = e.half(1 << 20, 1 << 21).unwrap_err();
    assert!(
        matches!(error, EngineError::OutOfMemory { bytes, .. } if bytes == 1 << 42),
        "{error}"
    );
    let four = e.upload_half(&[1.0, 2.0, 3.0, 4.0], 2).unwrap();
    assert_eq!(e.download_half(four.view()).unwrap(), [1.0, 2.0, 3.0, 4.0]);
    let after = e.memory_use().unwrap();
    assert!(after.peak >= after.used && after.total > after.free);
}
