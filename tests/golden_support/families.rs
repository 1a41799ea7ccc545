//! Every family of targets against what transformers computes: packed prefill, and decoding behind a cache.
//!
//! tests/golden/families holds a tiny random model for each, made by scripts/make-family-golden.py;
//! `FAMILY_GOLDEN_DIR` names another folder of the same form. Tensors of decoding may be absent there.

use std::path::{Path, PathBuf};

use slipstream::engine::cpu::Cpu;
use slipstream::engine::cuda::Cuda;
use slipstream::engine::{Engine, HalfView};
use slipstream::model::{Captured, Shape, Step, Target, TargetDecoder, TargetFiles, TargetNeeds};

use super::{GoldenFile, row_spread, skipped};

/// Largest relative error of a row in float32.
const FLOAT: f64 = 1e-4;
/// How many times as far as transformers itself in bf16 a GPU may be off: both round at other places, and each at
/// its own worst row.
const AS_FAR: f64 = 3.0;

/// What a pass gives: captured states of all layers, final hidden states, logits.
struct Outputs {
    states: Vec<f32>,
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

/// The cases of a folder, by name.
fn cases() -> Vec<PathBuf> {
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families");
    let folder = std::env::var_os("FAMILY_GOLDEN_DIR").map_or(committed, PathBuf::from);
    let mut cases: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect();
    cases.sort();
    assert!(!cases.is_empty(), "{} has no cases", folder.display());
    cases
}

struct Case<'a, E: Engine> {
    engine: &'a E,
    name: String,
    target: Target<E>,
    layers: usize,
    worst: f64,
}

impl<E: Engine> Case<'_, E> {
    fn hidden_size(&self) -> usize {
        self.target.config().hidden_size
    }

    fn read(&self, view: HalfView<'_, E>) -> Vec<f32> {
        self.engine.download_half(view).unwrap()
    }

    /// Packed prefill behind a document of another length, so that rows, positions and tables do not coincide.
    fn prefill(&mut self, ids: &[u32]) -> (Vec<f32>, Vec<f32>) {
        let (engine, tokens, hidden) = (self.engine, ids.len(), self.hidden_size());
        let before = tokens / 2 + 1;
        let packed = [&ids[..before], ids].concat();
        let offsets = [0, before as u32, packed.len() as u32];
        let width = self.layers * hidden;
        let mut states = engine.half(packed.len(), width).unwrap();
        let mut last = engine.half(packed.len(), hidden).unwrap();
        let out = Captured {
            states: states.view_mut(),
            final_hidden: Some(last.view_mut()),
        };
        self.target.prefill(engine, &packed, &offsets, out).unwrap();
        let of = |view: HalfView<'_, E>, cols: usize| self.read(view)[before * cols..].to_vec();
        (of(states.view(), width), of(last.view(), hidden))
    }

    fn outputs(&self, decoder: &TargetDecoder<E>, step: &Step<E>) -> Outputs {
        Outputs {
            states: self.read(step.states()),
            hidden: self.read(step.hidden()),
            logits: decoder.logits(self.engine, &self.target, step).unwrap(),
        }
    }

    /// Each of `steps` behind the cache of those before it.
    fn decode(&mut self, steps: &[&[u32]]) -> Vec<Outputs> {
        let engine = self.engine;
        let capacity = steps.iter().map(|ids| ids.len()).sum();
        let mut decoder = TargetDecoder::new(engine, &self.target, capacity).unwrap();
        steps
            .iter()
            .map(|ids| {
                let step = decoder
                    .step(engine, &mut self.target, ids, Shape::Chain)
                    .unwrap();
                let outputs = self.outputs(&decoder, &step);
                decoder
                    .keep(engine, &(0..ids.len()).collect::<Vec<_>>())
                    .unwrap();
                outputs
            })
            .collect()
    }

    /// `got [rows, cols]` against a golden tensor of as many rows.
    fn close(&mut self, what: &str, got: &[f32], want: &[f64], rows: usize, tolerance: f64) {
        let [.., off] = row_spread(got, want, want.len() / rows);
        self.worst = self.worst.max(off);
        assert!(off <= tolerance, "{}: {what} is off by {off:e}", self.name);
    }

    /// `states [rows, layers · H]` against a golden `[layers, rows, H]`.
    fn states(&mut self, what: &str, states: &[f32], want: &[f64], tolerance: f64) {
        let (hidden, layers) = (self.hidden_size(), self.layers);
        let rows = states.len() / (layers * hidden);
        for (layer, want) in want.chunks(rows * hidden).enumerate() {
            let got: Vec<f32> = states
                .chunks(layers * hidden)
                .flat_map(|row| &row[layer * hidden..][..hidden])
                .copied()
                .collect();
            self.close(
                &format!("{what} after layer {layer}"),
                &got,
                want,
                rows,
                tolerance,
            );
        }
    }

    fn all(
        &mut self,
        what: &str,
        got: &Outputs,
        expected: &GoldenFile,
        prefix: &str,
        tolerance: f64,
    ) {
        let rows = got.hidden.len() / self.hidden_size();
        let of = |key: &str| expected.get(&format!("{prefix}{key}"));
        self.states(what, &got.states, &of("layer_outputs").values, tolerance);
        let hidden = &of("final_hidden").values;
        self.close(
            &format!("{what}, final hidden state"),
            &got.hidden,
            hidden,
            rows,
            tolerance,
        );
        let logits = &of("logits").values;
        self.close(
            &format!("{what}, logits"),
            &got.logits,
            logits,
            rows,
            tolerance,
        );
    }
}

fn check<E: Engine>(engine: &E, dir: &Path) {
    let expected = GoldenFile::read(&dir.join("expected.safetensors"));
    let tolerance = match E::HALF_BYTES {
        4 => FLOAT,
        _ => AS_FAR * expected.meta("bf16").as_f64().unwrap(),
    };
    let files = TargetFiles::open(&dir.join("model"), false).unwrap();
    let layers: Vec<usize> = serde_json::from_value(expected.meta("layers").clone()).unwrap();
    let needs = TargetNeeds {
        capture: layers.clone(),
        final_hidden: true,
        lm_head: true,
    };
    let mut case = Case {
        engine,
        name: dir.file_name().unwrap().to_string_lossy().into_owned(),
        target: Target::load(engine, &files, needs).unwrap(),
        layers: layers.len(),
        worst: 0.0,
    };
    let ids = expected.get("ids").u32();
    let (states, hidden) = case.prefill(&ids);
    case.states(
        "prefill",
        &states,
        &expected.get("layer_outputs").values,
        tolerance,
    );
    let last = &expected.get("final_hidden").values;
    case.close(
        "prefill, final hidden state",
        &hidden,
        last,
        ids.len(),
        tolerance,
    );
    let whole = case.decode(&[&ids]).remove(0);
    case.all("one pass into the cache", &whole, &expected, "", tolerance);

    if expected.with_prefix("decode_").is_empty() {
        skipped(&format!("{}: no tensors of decoding", case.name));
    } else {
        let first: usize = serde_json::from_value(expected.meta("first").clone()).unwrap();
        let singles: Vec<&[u32]> = ids[first..].chunks(1).collect();
        let groups: Vec<&[u32]> = ids[first..].chunks(5).collect();
        for (what, steps) in [("decoding", singles), ("decoding by fives", groups)] {
            let steps: Vec<&[u32]> = [&ids[..first]].into_iter().chain(steps).collect();
            let mut got = case.decode(&steps).into_iter().skip(1);
            let mut joined = got.next().unwrap();
            for step in got {
                joined.states.extend(step.states);
                joined.hidden.extend(step.hidden);
                joined.logits.extend(step.logits);
            }
            case.all(what, &joined, &expected, "decode_", tolerance);
        }
    }
    println!(
        "{}: off by {:.1e} in its worst row, {tolerance:.1e} allowed",
        case.name, case.worst
    );
}

#[test]
fn every_family_computes_what_transformers_does() {
    let engine = Cpu::new(1).unwrap();
    for dir in cases() {
        check(&engine, &dir);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_family_on_cuda_is_as_near_as_transformers_in_bf16() {
    let engine = Cuda::new(0).unwrap();
    for dir in cases() {
        check(&engine, &dir);
    }
}
