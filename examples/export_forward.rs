//! Writes what a checkpoint's drafter computes for a text, for `scripts/check-export.py` to compare with:
//!
//!     cargo run --release --example export_forward CHECKPOINT MODEL_DIR FOLDER [TEXT]
//!     scripts/check-export.py CHECKPOINT --target MODEL_DIR --inputs FOLDER/inputs.safetensors \
//!         --expect FOLDER/expected.safetensors
//!
//! The text is tokenised as it stands and run through the target; every fifth position is an anchor. FOLDER receives
//! `ids [S]`, `ctx [S, K H]` and `anchors [A]`, and `hidden [A, B, H]` and `logits [A, B, V]`, all in float32 on the CPU.

use std::path::Path;

use anyhow::Context;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use slipstream::data::ChatTokenizer;
use slipstream::engine::Engine;
use slipstream::engine::cpu::Cpu;
use slipstream::model::drafter::{BlockPlan, Document, DrafterModel, HostPlan};
use slipstream::model::{Captured, Target, TargetFiles, TargetNeeds};
use slipstream::train::export::load_serving;

const TEXT: &str = "Put these words in order: basket, river, blanket, garden. In alphabetical order the words are basket, blanket, garden, river.";

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [checkpoint, model, folder, rest @ ..] = &words[..] else {
        anyhow::bail!("usage: export_forward CHECKPOINT MODEL_DIR FOLDER [TEXT]");
    };
    let (checkpoint, model, folder) = (Path::new(checkpoint), Path::new(model), Path::new(folder));
    let text = rest.first().map_or(TEXT, String::as_str);

    let engine = Cpu::new(1)?;
    let (config, params) = load_serving(&engine, checkpoint)?;
    let tokens = ChatTokenizer::load(model)?.encode(text);
    let ids = tokens.map_err(anyhow::Error::msg)?.ids;
    let needs = TargetNeeds {
        capture: config.target_layer_ids.clone(),
        final_hidden: false,
        lm_head: true,
    };
    let mut target = Target::load(&engine, &TargetFiles::open(model, false)?, needs)?;
    let width = config.captured() * config.hidden_size;
    let mut states = engine.half(ids.len(), width)?;
    let out = Captured {
        states: states.view_mut(),
        final_hidden: None,
    };
    target.prefill(&engine, &ids, &[0, ids.len() as u32], out)?;

    let mask = vec![1; ids.len()];
    let anchors: Vec<u32> = (0..ids.len() as u32 - 1).step_by(5).collect();
    let document = Document {
        ids: &ids,
        mask: &mask,
        anchors: &anchors,
    };
    let plan = BlockPlan::upload(&engine, &config, HostPlan::new(&config, &[document])?)?;
    let mut drafter = DrafterModel::new(&engine, config.clone(), params)?;
    drafter.encode_context(&engine, &plan, states.view())?;
    let tables = target.head()?.tables();
    drafter.forward_blocks(&engine, tables, &plan, false)?;
    let mut logits = engine.float(plan.rows(), config.vocab_size)?;
    engine.logits(drafter.hidden(), tables.lm_head, logits.view_mut())?;

    let floats = |values: Vec<f32>| values.into_iter().flat_map(f32::to_le_bytes).collect();
    let integers = |values: &[u32]| -> Vec<u8> {
        let wide = values.iter().map(|&value| i64::from(value));
        wide.flat_map(i64::to_le_bytes).collect()
    };
    let (count, block) = (anchors.len(), config.block_size);
    let inputs: [(&str, Dtype, Vec<usize>, Vec<u8>); 3] = [
        ("ids", Dtype::I64, vec![ids.len()], integers(&ids)),
        (
            "ctx",
            Dtype::F32,
            vec![ids.len(), width],
            floats(engine.download_half(states.view())?),
        ),
        ("anchors", Dtype::I64, vec![count], integers(&anchors)),
    ];
    let expected = [
        (
            "hidden",
            Dtype::F32,
            vec![count, block, config.hidden_size],
            floats(engine.download_half(drafter.hidden())?),
        ),
        (
            "logits",
            Dtype::F32,
            vec![count, block, config.vocab_size],
            floats(engine.download_float(logits.view())?),
        ),
    ];
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    write(&folder.join("inputs.safetensors"), &inputs)?;
    write(&folder.join("expected.safetensors"), &expected)
}

fn write(path: &Path, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) -> anyhow::Result<()> {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            Ok((*name, TensorView::new(*dtype, shape.clone(), bytes)?))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    serialize_to_file(views, None, path).with_context(|| path.display().to_string())
}
