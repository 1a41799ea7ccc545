//! Times a micro-step of the drafter on one CPU thread, in the shape of the demo unless told otherwise:
//!
//!     cargo run --release --example micro_step [DOCUMENTS] [TOKENS] [ANCHORS] [THREADS]

use std::time::Instant;

use slipstream::engine::cpu::Cpu;
use slipstream::engine::{Engine, LossOptions};
use slipstream::model::drafter::{
    Document, DrafterConfig, DrafterModel, LayerType, Params, Tables,
};
use slipstream::train::micro_step::{UnitBatch, micro_step};
use slipstream::train::optimizer::{Optimizer, StepSums};
use slipstream::train::options::OptimizerOptions;

fn main() -> anyhow::Result<()> {
    let mut sizes = [4_usize, 60, 24, 1];
    for (size, argument) in sizes.iter_mut().zip(std::env::args().skip(1)) {
        *size = argument.parse()?;
    }
    let [documents, tokens, anchors, threads] = sizes;
    let config = DrafterConfig {
        hidden_size: 128,
        intermediate_size: 352,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 32,
        vocab_size: 1024,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        max_position_embeddings: 1024,
        block_size: 8,
        num_target_layers: 8,
        target_layer_ids: vec![1, 3, 5],
        mask_token_id: 3,
        layer_types: vec![LayerType::Full; 2],
        sliding_window: None,
    };
    let engine = Cpu::new(threads)?;
    let noise = |len: usize| -> Vec<f32> {
        (0..len as u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32 - 0.5)
            .collect()
    };
    let embedding = engine.upload_half(&noise(1024 * 128), 128)?;
    let states = engine.upload_half(&noise(documents * tokens * 3 * 128), 3 * 128)?;
    let tables = Tables {
        embedding: embedding.view(),
        lm_head: embedding.view(),
    };
    let ids: Vec<u32> = (0..tokens as u32).map(|p| 10 + p * 7 % 1000).collect();
    let mask = vec![1; tokens];
    let first = tokens.saturating_sub(anchors + 8) as u32;
    let places: Vec<u32> = (first..first + anchors as u32).collect();
    let unit_documents = vec![
        Document {
            ids: &ids,
            mask: &mask,
            anchors: &places,
        };
        documents
    ];
    let params = Params::init(&engine, &config, 1)?;
    let mut model = DrafterModel::new(&engine, config, params)?;
    let options = OptimizerOptions::default();
    let mut optimizer = Optimizer::new(&engine, model.params.layout(), options)?;
    let unit = UnitBatch {
        documents: &unit_documents,
        states: states.view(),
        teacher: None,
    };
    let mut times = Vec::new();
    let mut updates = Vec::new();
    for _ in 0..40 {
        model.params.zero_grads(&engine)?;
        let begin = Instant::now();
        let out = micro_step(&engine, &mut model, tables, &unit, &LossOptions::default())?;
        times.push(begin.elapsed().as_secs_f64() * 1e3);
        let sums = StepSums {
            loss: out.loss_sum,
            weight: out.weight_sum,
        };
        let begin = Instant::now();
        optimizer.step(&engine, &mut model.params, sums, 1e-3)?;
        updates.push(begin.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    updates.sort_by(f64::total_cmp);
    println!(
        "{documents} x {tokens} tokens, {anchors} anchors each, {threads} threads: micro-step {:.2} ms (fastest {:.2}), update {:.2} ms",
        times[times.len() / 2],
        times[0],
        updates[updates.len() / 2]
    );
    Ok(())
}
