//! Speed of the CPU engine on one thread, at the demo's shapes: `cargo bench --bench engine [part]`.
//!
//! Times are the thread's own CPU time, so that other processes disturb them little; each figure is the best of
//! several runs.

use std::path::Path;

use rustix::time::{ClockId, clock_gettime};
use slipstream::engine::cpu::Cpu;
use slipstream::engine::{Engine, LossOptions};
use slipstream::model::drafter::{Document, DraftOptions, DrafterConfig, DrafterModel, Params};
use slipstream::model::{Captured, Shape, Target, TargetDecoder, TargetFiles, TargetNeeds};
use slipstream::train::micro_step::{UnitBatch, micro_step};

/// Documents of a unit and tokens of a document, as in the demo.
const DOCUMENTS: usize = 8;
const TOKENS: usize = 60;
const ANCHORS: usize = 24;
const CAPTURE: [usize; 3] = [1, 3, 5];

fn main() {
    let part = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let wanted = |name: &str| part.as_deref().is_none_or(|part| part == name);
    let engine = Cpu::new(1).expect("one thread needs none started");
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-target");
    let files = TargetFiles::open(&dir, false).expect("the demo's target");
    if wanted("products") {
        products(&engine);
    }
    if wanted("prefill") {
        prefill(&engine, &files);
    }
    if wanted("decode") {
        decode(&engine, &files);
    }
    if wanted("step") {
        step(&engine, &files);
    }
}

/// The best CPU seconds of one call over `runs` runs.
fn seconds(runs: usize, mut f: impl FnMut()) -> f64 {
    let now = || {
        let t = clock_gettime(ClockId::ThreadCPUTime);
        t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
    };
    f();
    (0..runs)
        .map(|_| {
            let start = now();
            f();
            now() - start
        })
        .fold(f64::INFINITY, f64::min)
}

fn noise(len: usize) -> Vec<f32> {
    let mut state = 1u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1u32 << 24) as f32 - 0.5
        })
        .collect()
}

fn ids(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| 4 + i * 37 % 1000).collect()
}

fn products(engine: &Cpu) {
    for (m, inner, outer) in [
        (480, 128, 256),
        (480, 128, 704),
        (480, 352, 128),
        (1536, 128, 704),
        (1536, 352, 128),
        (256, 128, 1024),
        (1, 128, 704),
        (8, 128, 704),
    ] {
        let matrix = |rows, cols| {
            engine
                .upload_half(&noise(rows * cols), cols)
                .expect("memory")
        };
        let (x, w, dy) = (matrix(m, inner), matrix(outer, inner), matrix(m, outer));
        let mut y = matrix(m, outer);
        let mut dx = matrix(m, inner);
        let mut dw = engine.float(outer, inner).expect("memory");
        let rate = |seconds: f64| 2e-9 * (m * inner * outer) as f64 / seconds;
        let forward = seconds(20, || {
            engine
                .linear(x.view(), w.view(), y.view_mut(), false)
                .expect("forward");
        });
        let by_x = seconds(20, || {
            engine
                .linear_dx(dy.view(), w.view(), dx.view_mut(), false)
                .expect("dx");
        });
        let by_w = seconds(20, || {
            engine
                .linear_dw(dy.view(), x.view(), dw.view_mut())
                .expect("dw");
        });
        println!(
            "[{m}, {inner}] x [{outer}, {inner}]: forward {:.1}, dx {:.1}, dw {:.1} GFLOP/s",
            rate(forward),
            rate(by_x),
            rate(by_w)
        );
    }
}

fn load(engine: &Cpu, files: &TargetFiles, lm_head: bool) -> Target<Cpu> {
    let needs = TargetNeeds {
        capture: CAPTURE.to_vec(),
        final_hidden: lm_head,
        lm_head,
    };
    Target::load(engine, files, needs).expect("the demo's target")
}

/// Captured states of one unit.
fn unit(engine: &Cpu, target: &mut Target<Cpu>) -> (Vec<u32>, slipstream::engine::Half<Cpu>) {
    let ids = ids(DOCUMENTS * TOKENS);
    let offsets: Vec<u32> = (0..=DOCUMENTS).map(|i| (i * TOKENS) as u32).collect();
    let width = CAPTURE.len() * target.config().hidden_size;
    let mut states = engine.half(ids.len(), width).expect("memory");
    let out = Captured {
        states: states.view_mut(),
        final_hidden: None,
    };
    target
        .prefill(engine, &ids, &offsets, out)
        .expect("prefill");
    (ids, states)
}

fn prefill(engine: &Cpu, files: &TargetFiles) {
    let mut target = load(engine, files, false);
    let took = seconds(30, || {
        unit(engine, &mut target);
    });
    let tokens = (DOCUMENTS * TOKENS) as f64;
    let flops = target.config().prefill_flops(target.layers(), TOKENS / 2) * tokens;
    println!(
        "prefill of {DOCUMENTS} x {TOKENS} tokens, {} layers: {:.2} ms, {:.0} tokens/s, {:.1} GFLOP/s",
        target.layers(),
        took * 1e3,
        tokens / took,
        flops * 1e-9 / took
    );
}

fn decode(engine: &Cpu, files: &TargetFiles) {
    let mut target = load(engine, files, true);
    let mut decoder = TargetDecoder::new(engine, &target, 128).expect("memory");
    for new in [1, 8] {
        let took = seconds(10, || {
            decoder.clear();
            for _ in 0..64 / new {
                let step = decoder
                    .step(engine, &mut target, &ids(new), Shape::Chain)
                    .expect("step");
                decoder.logits(engine, &target, &step).expect("logits");
                let rows: Vec<usize> = (0..new).collect();
                decoder.keep(engine, &rows).expect("keep");
            }
        });
        println!(
            "decode of {new} tokens a step: {:.3} ms a step",
            took * 1e3 / (64 / new) as f64
        );
    }
}

fn step(engine: &Cpu, files: &TargetFiles) {
    let mut target = load(engine, files, true);
    let (ids, states) = unit(engine, &mut target);
    let options = DraftOptions {
        layers: Some(2),
        block_size: Some(8),
        target_layers: Some(CAPTURE.to_vec()),
        ..DraftOptions::default()
    };
    let config =
        DrafterConfig::for_target(&target.config().sizes(), 3, &options).expect("a config");
    let params = Params::init(engine, &config, 1).expect("memory");
    let mut model = DrafterModel::new(engine, config, params).expect("a drafter");
    let mask = vec![1; TOKENS];
    let anchors: Vec<u32> = (0..ANCHORS)
        .map(|i| (i * (TOKENS - 2) / ANCHORS) as u32)
        .collect();
    let documents: Vec<Document<'_>> = ids
        .chunks(TOKENS)
        .map(|ids| Document {
            ids,
            mask: &mask,
            anchors: &anchors,
        })
        .collect();
    let batch = UnitBatch {
        documents: &documents,
        states: states.view(),
        teacher: None,
    };
    let took = seconds(20, || {
        let tables = target.head().expect("its head").tables();
        micro_step(engine, &mut model, tables, &batch, &LossOptions::default()).expect("a step");
    });
    println!(
        "micro-step of {DOCUMENTS} documents, {ANCHORS} anchors each: {:.1} ms, {:.0} documents/s",
        took * 1e3,
        DOCUMENTS as f64 / took
    );
}
