//! Speed of the CUDA engine's operations at the shapes of Qwen3-8B and its drafter, on random data, medians of
//! repeated runs. `cargo bench --bench cuda` on a machine with a GPU; names given as arguments select.

use std::path::Path;
use std::time::{Duration, Instant};

use slipstream::engine::cuda::Cuda;
use slipstream::engine::{
    AdamW, BlockKeys, BlockKeysGrad, BlockMask, CausalMask, Engine, EngineError, Half, HeadLoss,
    HeadLossOut, Heads, LossOptions, Queue, Rotary, Slots,
};
use slipstream::model::drafter::{Document, DrafterConfig, DrafterModel, Params, Tables};
use slipstream::model::{Captured, Target, TargetFiles, TargetNeeds};
use slipstream::train::micro_step::{UnitBatch, micro_step};
use slipstream::train::optimizer::{Optimizer, StepSums};
use slipstream::train::options::OptimizerOptions;

/// Packed tokens of a prefill: 8 documents of 2048.
const DOCUMENT: usize = 2048;
const TOKENS: usize = 8 * DOCUMENT;
const HIDDEN: usize = 4096;
const MLP: usize = 12288;
const VOCABULARY: usize = 151_936;
const HEADS: Heads = Heads {
    q: 32,
    kv: 8,
    dim: 128,
};
/// Anchors of a document, slots of a block, documents of a drafter's micro-step.
const ANCHORS: usize = 512;
const BLOCK: usize = 16;
const DOCUMENTS: usize = 2;

struct Bench {
    engine: Cuda,
    wanted: Vec<String>,
}

impl Bench {
    /// Times `run` after a warm-up and prints its work per second.
    fn time(
        &self,
        name: &str,
        (work, unit): (f64, &str),
        mut run: impl FnMut() -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        if !self.is_wanted(name) {
            return Ok(());
        }
        let mut once = |repeats: usize| -> Result<f64, EngineError> {
            let begin = Instant::now();
            for _ in 0..repeats {
                run()?;
            }
            let event = self.engine.record(Queue::Compute)?;
            self.engine.finish(&event, Duration::from_secs(120))?;
            Ok(begin.elapsed().as_secs_f64() / repeats as f64)
        };
        once(2)?;
        let repeats = ((0.03 / once(3)?) as usize).clamp(1, 1000);
        let mut times = Vec::new();
        for _ in 0..5 {
            times.push(once(repeats)?);
        }
        times.sort_by(f64::total_cmp);
        println!(
            "{name:44} {:9.3} ms {:9.1} {unit}",
            times[2] * 1e3,
            work / times[2]
        );
        Ok(())
    }

    /// Random values, made on the GPU from a random row by random row gathers, so that no product sees zeros.
    fn random(&self, rows: usize, cols: usize) -> Result<Half<Cuda>, EngineError> {
        let mut state = rows as u64 * 31 + cols as u64;
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let seeds = rows.min(257);
        let values: Vec<f32> = (0..seeds * cols).map(|_| next()).collect();
        let seed = self.engine.upload_half(&values, cols)?;
        let ids: Vec<u32> = (0..rows)
            .map(|_| ((next() + 1.0) * 0.5 * seeds as f32) as u32 % seeds as u32)
            .collect();
        let ids = self.engine.upload_index(&ids)?;
        let mut out = self.engine.half(rows, cols)?;
        self.engine
            .gather(seed.view(), ids.view(), out.view_mut())?;
        Ok(out)
    }

    fn products(&self) -> Result<(), EngineError> {
        let e = &self.engine;
        for (name, inner, outer) in [
            ("qkv", HIDDEN, 6144),
            ("o", HIDDEN, HIDDEN),
            ("gate+up", HIDDEN, 2 * MLP),
            ("down", MLP, HIDDEN),
            ("fc", 5 * HIDDEN, HIDDEN),
        ] {
            let (x, w) = (self.random(TOKENS, inner)?, self.random(outer, inner)?);
            let dy = self.random(TOKENS, outer)?;
            let (mut y, mut dx) = (e.half(TOKENS, outer)?, e.half(TOKENS, inner)?);
            let mut dw = e.float(outer, inner)?;
            let work = (2e-12 * (TOKENS * inner * outer) as f64, "TFLOP/s");
            self.time(&format!("product {name}"), work, || {
                e.linear(x.view(), w.view(), y.view_mut(), false)
            })?;
            self.time(&format!("product {name} dx"), work, || {
                e.linear_dx(dy.view(), w.view(), dx.view_mut(), false)
            })?;
            self.time(&format!("product {name} dw"), work, || {
                e.linear_dw(dy.view(), x.view(), dw.view_mut())
            })?;
        }
        Ok(())
    }

    fn rows(&self) -> Result<(), EngineError> {
        let e = &self.engine;
        let bytes = |elements: usize| (2e-9 * elements as f64, "GB/s");
        let (mut h, delta) = (self.random(TOKENS, HIDDEN)?, self.random(TOKENS, HIDDEN)?);
        let dy = self.random(TOKENS, HIDDEN)?;
        let mut y = e.half(TOKENS, HIDDEN)?;
        let w = e.upload_float(&[1.0; HIDDEN], HIDDEN)?;
        let mut dw = e.float(1, HIDDEN)?;
        let n = TOKENS * HIDDEN;
        self.time("norm with residual", bytes(4 * n), || {
            e.norm(
                h.view_mut(),
                Some(delta.view()),
                w.view(),
                1e-6,
                y.view_mut(),
            )
        })?;
        self.time("norm backward", bytes(4 * n), || {
            e.norm_backward(
                dy.view(),
                h.view(),
                w.view(),
                1e-6,
                y.view_mut(),
                dw.view_mut(),
            )
        })?;
        let angles = vec![0.5; 4096 * 64];
        let table = e.upload_float(&angles, 64)?;
        let rotary = Rotary {
            cos: table.view(),
            sin: table.view(),
        };
        let positions: Vec<u32> = (0..TOKENS).map(|i| (i % DOCUMENT) as u32).collect();
        let positions = e.upload_index(&positions)?;
        let w = e.upload_float(&[1.0; 128], 128)?;
        let mut dw = e.float(1, 128)?;
        self.time("head norm + rotary", bytes(2 * n), || {
            e.head_norm_rotary(
                h.view(),
                Some(w.view()),
                1e-6,
                128,
                positions.view(),
                rotary,
                y.view_mut(),
            )
        })?;
        self.time("head norm + rotary backward", bytes(3 * n), || {
            e.head_norm_rotary_backward(
                dy.view(),
                h.view(),
                w.view(),
                1e-6,
                positions.view(),
                rotary,
                y.view_mut(),
                dw.view_mut(),
            )
        })?;
        let gate_up = self.random(TOKENS, 2 * MLP)?;
        let mut d_gate_up = e.half(TOKENS, 2 * MLP)?;
        let mut y = self.random(TOKENS, MLP)?;
        let n = TOKENS * MLP;
        self.time("swiglu", bytes(3 * n), || {
            e.swiglu(gate_up.view(), y.view_mut())
        })?;
        self.time("swiglu backward", bytes(5 * n), || {
            e.swiglu_backward(y.view(), gate_up.view(), d_gate_up.view_mut())
        })?;
        self.time("has_non_finite", bytes(2 * n), || {
            e.has_non_finite(gate_up.view()).map(drop)
        })?;
        let count = 1 << 28;
        let grad = e.float(1, count)?;
        let (mut master, mut m, mut v) =
            (e.float(1, count)?, e.float(1, count)?, e.float(1, count)?);
        let mut weight = e.half(1, count)?;
        let update = AdamW {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.01,
            count: 3,
            grad_scale: 1.0,
        };
        self.time("adamw", (30e-9 * count as f64, "GB/s"), || {
            e.adamw(
                &update,
                grad.view(),
                master.view_mut(),
                m.view_mut(),
                v.view_mut(),
                Some(weight.view_mut()),
            )
        })?;
        let mut sum = e.float(1, 1)?;
        self.time("sum of squares", (4e-9 * count as f64, "GB/s"), || {
            e.sum_squares(master.view(), sum.view_mut())
        })
    }

    fn attention(&self) -> Result<(), EngineError> {
        let e = &self.engine;
        let (wide, narrow) = (HEADS.q * HEADS.dim, HEADS.kv * HEADS.dim);
        let scale = (HEADS.dim as f32).powf(-0.5);
        let qkv = self.random(TOKENS, wide + 2 * narrow)?;
        let part = |begin, end| qkv.view().col_range(begin, end);
        let mut out = e.half(TOKENS, wide)?;
        let offsets: Vec<u32> = (0..=TOKENS / DOCUMENT)
            .map(|i| (i * DOCUMENT) as u32)
            .collect();
        let offsets = e.upload_index(&offsets)?;
        let pairs = (TOKENS / DOCUMENT * (DOCUMENT * (DOCUMENT + 1) / 2)) as f64;
        self.time(
            "causal attention, 8 x 2048",
            (4e-12 * pairs * wide as f64, "TFLOP/s"),
            || {
                e.causal_attention(
                    HEADS,
                    scale,
                    part(0, wide),
                    part(wide, wide + narrow),
                    part(wide + narrow, wide + 2 * narrow),
                    &CausalMask {
                        offsets: offsets.view(),
                        window: None,
                        longest: DOCUMENT,
                    },
                    out.view_mut(),
                )
            },
        )?;

        let (mut starts, mut anchors) = (vec![], vec![]);
        for document in 0..DOCUMENTS {
            for n in 0..ANCHORS {
                starts.push((document * DOCUMENT) as u32);
                anchors.push((n * DOCUMENT / ANCHORS) as u32);
            }
        }
        let seen: f64 = anchors.iter().map(|a| f64::from(*a)).sum();
        let rows = anchors.len() * BLOCK;
        let pairs = seen * BLOCK as f64 + (rows * BLOCK) as f64;
        let (starts, anchors) = (e.upload_index(&starts)?, e.upload_index(&anchors)?);
        let mask = BlockMask {
            block: BLOCK,
            context_start: starts.view(),
            anchor: anchors.view(),
            window: None,
        };
        let (q, d_out) = (self.random(rows, wide)?, self.random(rows, wide)?);
        let context = DOCUMENTS * DOCUMENT;
        let [ck, cv] = [self.random(context, narrow)?, self.random(context, narrow)?];
        let [bk, bv] = [self.random(rows, narrow)?, self.random(rows, narrow)?];
        let keys = BlockKeys {
            context_k: ck.view(),
            context_v: cv.view(),
            block_k: bk.view(),
            block_v: bv.view(),
        };
        let (mut out, mut d_q) = (e.half(rows, wide)?, e.half(rows, wide)?);
        let mut lse = e.float(rows, HEADS.q)?;
        let [mut dck, mut dcv] = [e.half(context, narrow)?, e.half(context, narrow)?];
        let [mut dbk, mut dbv] = [e.half(rows, narrow)?, e.half(rows, narrow)?];
        let work = 4e-12 * pairs * wide as f64;
        self.time("block attention", (work, "TFLOP/s"), || {
            e.block_attention(
                HEADS,
                scale,
                q.view(),
                &keys,
                &mask,
                out.view_mut(),
                lse.view_mut(),
            )
        })?;
        self.time("block attention backward", (2.5 * work, "TFLOP/s"), || {
            let gradients = BlockKeysGrad {
                context_k: dck.view_mut(),
                context_v: dcv.view_mut(),
                block_k: dbk.view_mut(),
                block_v: dbv.view_mut(),
            };
            e.block_attention_backward(
                HEADS,
                scale,
                d_out.view(),
                q.view(),
                &keys,
                &mask,
                out.view(),
                lse.view(),
                d_q.view_mut(),
                gradients,
            )
        })
    }

    fn head(&self) -> Result<(), EngineError> {
        let e = &self.engine;
        let blocks = DOCUMENTS * ANCHORS;
        let hidden = self.random(blocks * BLOCK, HIDDEN)?;
        let lm_head = self.random(VOCABULARY, HIDDEN)?;
        let row: Vec<u32> = (0..blocks * BLOCK)
            .filter(|r| r % BLOCK > 0)
            .map(|r| r as u32)
            .collect();
        let label: Vec<u32> = row
            .iter()
            .map(|r| r.wrapping_mul(2_654_435_761) % VOCABULARY as u32)
            .collect();
        let slot: Vec<u32> = row.iter().map(|r| r % BLOCK as u32).collect();
        let block_begin: Vec<u32> = (0..=blocks).map(|n| (n * (BLOCK - 1)) as u32).collect();
        let count = row.len();
        let (row, label) = (e.upload_index(&row)?, e.upload_index(&label)?);
        let slot = e.upload_index(&slot)?;
        let mut d_hidden = e.half(blocks * BLOCK, HIDDEN)?;
        let mut sums = e.float(1, 2)?;
        let mut correct = e.upload_index(&vec![0; count])?;
        let options = LossOptions::default();
        let work = 4e-12 * (count * HIDDEN * VOCABULARY) as f64;
        self.time("head and loss", (work, "TFLOP/s"), || {
            let input = HeadLoss {
                hidden: hidden.view(),
                lm_head: lm_head.view(),
                slots: Slots {
                    row: row.view(),
                    label: label.view(),
                    slot: slot.view(),
                    teacher_row: row.view(),
                    block_begin: &block_begin,
                },
                teacher: None,
                options: &options,
            };
            let out = HeadLossOut {
                d_hidden: d_hidden.view_mut(),
                sums: sums.view_mut(),
                correct: correct.view_mut(),
            };
            e.head_loss(&input, out)
        })
    }

    fn copies(&self) -> Result<(), EngineError> {
        let e = &self.engine;
        let mut hidden = self.random(TOKENS, 5 * HIDDEN)?;
        let bytes = TOKENS * 5 * HIDDEN * 2;
        let mut slot = vec![0u8; bytes];
        let begin = Instant::now();
        // SAFETY: the slot outlives all copies, which are awaited below; it is leaked with the engine.
        unsafe { e.register_host(slot.as_mut_ptr(), bytes)? };
        println!(
            "registering {} MiB: {:.0} ms",
            bytes >> 20,
            begin.elapsed().as_secs_f64() * 1e3
        );
        for name in ["copy out to a slot", "copy in from a slot"] {
            let queue = if name.contains("out") {
                Queue::CopyOut
            } else {
                Queue::CopyIn
            };
            self.time(name, (1e-9 * bytes as f64, "GB/s"), || {
                // SAFETY: the slot holds the bytes, and each copy is done before the next touches it.
                unsafe {
                    match queue {
                        Queue::CopyOut => e.copy_out(hidden.view(), slot.as_mut_ptr())?,
                        _ => e.copy_in(slot.as_ptr(), hidden.view_mut())?,
                    }
                }
                let done = e.record(queue)?;
                e.wait(Queue::Compute, &done)
            })?;
        }
        std::mem::forget(slot);
        Ok(())
    }
}

/// Whole models, by the code that trains them.
impl Bench {
    fn is_wanted(&self, name: &str) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|w| name.contains(w.as_str()))
    }

    /// Prefill of 8 documents of 2048 tokens, 5 layers captured; only the layers up to the highest captured one.
    fn prefill(&self) -> anyhow::Result<()> {
        if !self.is_wanted("prefill") {
            return Ok(());
        }
        let e = &self.engine;
        let files = TargetFiles::dummy(Path::new("models/configs/qwen3-8b"))?;
        let ids: Vec<u32> = (0..TOKENS as u32)
            .map(|i| i.wrapping_mul(2_654_435_761) % VOCABULARY as u32)
            .collect();
        let offsets: Vec<u32> = (0..=TOKENS / DOCUMENT)
            .map(|i| (i * DOCUMENT) as u32)
            .collect();
        let mut states = e.half(TOKENS, 5 * HIDDEN)?;
        let mut last = e.half(TOKENS, HIDDEN)?;
        for all in [false, true] {
            let needs = TargetNeeds {
                capture: vec![1, 9, 17, 25, 33],
                final_hidden: all,
                lm_head: false,
            };
            let begin = Instant::now();
            let mut target = Target::load(e, &files, needs)?;
            println!("loading: {:.1} s", begin.elapsed().as_secs_f64());
            let name = format!("prefill, {} layers", target.layers());
            self.time(&name, (TOKENS as f64, "tokens/s"), || {
                let out = Captured {
                    states: states.view_mut(),
                    final_hidden: all.then(|| last.view_mut()),
                };
                target
                    .prefill(&self.engine, &ids, &offsets, out)
                    .map_err(|error| EngineError::Device {
                        device: e.name().to_owned(),
                        what: "prefill",
                        message: error.to_string(),
                    })
            })?;
        }
        Ok(())
    }

    /// A micro-step and an update of the drafter, as `(anchors, tokens of a document, documents)`.
    fn drafter(&self) -> anyhow::Result<()> {
        if !self.is_wanted("drafter") {
            return Ok(());
        }
        let e = &self.engine;
        let text = std::fs::read_to_string("models/configs/qwen3-8b/dflash.json")?;
        let config = DrafterConfig::from_json(&text)?;
        let mut state = 1u64;
        let params = Params::from_values(e, &config, |p| {
            let scale = if p.vector { 0.0 } else { 0.03 };
            let offset = if p.vector { 1.0 } else { 0.0 };
            Ok((0..p.window.len())
                .map(|_| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    offset + scale * ((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
                })
                .collect())
        })?;
        let mut optimizer = Optimizer::new(e, params.layout(), OptimizerOptions::default())?;
        let mut model = DrafterModel::new(e, config, params)?;
        let (embedding, lm_head) = (
            self.random(VOCABULARY, HIDDEN)?,
            self.random(VOCABULARY, HIDDEN)?,
        );
        let tables = Tables {
            embedding: embedding.view(),
            lm_head: lm_head.view(),
        };
        for (anchors, length, documents) in [(512, 2048, 2), (256, 550, 4)] {
            let ids: Vec<u32> = (0..length as u32)
                .map(|i| i.wrapping_mul(2_654_435_761) % 150_000)
                .collect();
            let mask = vec![1u8; length];
            let chosen: Vec<u32> = (0..anchors)
                .map(|n| (n * (length - 1) / anchors) as u32)
                .collect();
            let document = Document {
                ids: &ids,
                mask: &mask,
                anchors: &chosen,
            };
            let documents = vec![document; documents];
            let states = self.random(length * documents.len(), 5 * HIDDEN)?;
            let options = LossOptions::default();
            let name = format!(
                "drafter, {anchors} anchors, {length} tokens, {} documents",
                documents.len()
            );
            model.reserve(
                e,
                length * documents.len(),
                anchors * documents.len(),
                length,
            )?;
            let work = (documents.len() as f64, "samples/s");
            let failed = |error: &dyn std::fmt::Display| EngineError::Device {
                device: e.name().to_owned(),
                what: "a training step",
                message: error.to_string(),
            };
            let mut loss = 0.0;
            self.time(&name, work, || {
                let unit = UnitBatch {
                    documents: &documents,
                    states: states.view(),
                    teacher: None,
                };
                model.params.zero_grads(e)?;
                let out =
                    micro_step(e, &mut model, tables, &unit, &options).map_err(|x| failed(&x))?;
                loss = out.loss_sum / out.weight_sum;
                let sums = StepSums {
                    loss: out.loss_sum,
                    weight: out.weight_sum,
                };
                optimizer.step(e, &mut model.params, sums, 1e-5)?;
                Ok(())
            })?;
            println!("loss {loss:.3}");
        }
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    let wanted = std::env::args().skip(1).filter(|a| !a.starts_with('-'));
    let bench = Bench {
        engine: Cuda::new(0)?,
        wanted: wanted.collect(),
    };
    println!("{}", bench.engine.name());
    bench.products()?;
    bench.rows()?;
    bench.attention()?;
    bench.head()?;
    bench.copies()?;
    bench.prefill()?;
    bench.drafter()?;
    println!("{:?}", bench.engine.memory_use()?);
    Ok(())
}
