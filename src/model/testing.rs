//! Small random targets on disk, for tests.

use std::collections::HashMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::{Target, TargetFiles, TargetNeeds};
use crate::engine::Engine;

/// A random model: the config, and each tensor's shape and values.
pub(crate) struct Made {
    pub config: Value,
    pub tensors: HashMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Made {
    /// H 24, 3 layers, 4 query heads on 2, head size 8, vocabulary 40; with q/k norms it is a Qwen3.
    pub(crate) fn new(qwen3: bool, tied: bool) -> Self {
        let (h, inner, layers, q, kv, dim, vocab) = (24, 40, 3, 4, 2, 8, 40);
        let (architecture, kind) = if qwen3 {
            ("Qwen3ForCausalLM", "qwen3")
        } else {
            ("LlamaForCausalLM", "llama")
        };
        let config = json!({
            "architectures": [architecture], "model_type": kind, "hidden_size": h,
            "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": q,
            "num_key_value_heads": kv, "head_dim": dim, "vocab_size": vocab, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64, "rope_theta": 1000.0, "tie_word_embeddings": tied,
        });
        let mut made = Self {
            config,
            tensors: HashMap::new(),
        };
        made.add("model.embed_tokens.weight", &[vocab, h]);
        made.add("model.norm.weight", &[h]);
        if !tied {
            made.add("lm_head.weight", &[vocab, h]);
        }
        for i in 0..layers {
            let mut layer = |part: &str, shape: &[usize]| {
                made.add(&format!("model.layers.{i}.{part}.weight"), shape);
            };
            layer("input_layernorm", &[h]);
            layer("post_attention_layernorm", &[h]);
            layer("self_attn.q_proj", &[q * dim, h]);
            layer("self_attn.k_proj", &[kv * dim, h]);
            layer("self_attn.v_proj", &[kv * dim, h]);
            layer("self_attn.o_proj", &[h, q * dim]);
            layer("mlp.gate_proj", &[inner, h]);
            layer("mlp.up_proj", &[inner, h]);
            layer("mlp.down_proj", &[h, inner]);
            if qwen3 {
                layer("self_attn.q_norm", &[dim]);
                layer("self_attn.k_norm", &[dim]);
            }
        }
        made
    }

    /// A loaded one with tied embeddings that captures these layers and the final hidden state, and has a head.
    pub(crate) fn target<E: Engine>(engine: &E, qwen3: bool, capture: &[usize]) -> Target<E> {
        let dir = tempfile::tempdir().unwrap();
        Self::new(qwen3, true).write(dir.path());
        let files = TargetFiles::open(dir.path(), false).unwrap();
        let needs = TargetNeeds {
            capture: capture.to_vec(),
            final_hidden: true,
            lm_head: true,
        };
        Target::load(engine, &files, needs).unwrap()
    }

    /// Adds a tensor of noise; norms are around 1.
    pub(crate) fn add(&mut self, name: &str, shape: &[usize]) {
        let mut state = blake3::hash(name.as_bytes()).as_bytes()[0] as u32 * 77 + 1;
        let mut noise = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1u32 << 24) as f32 - 0.5
        };
        let size = shape.iter().product();
        let values = (0..size)
            .map(|_| {
                if shape.len() == 1 {
                    1.0 + noise()
                } else {
                    noise()
                }
            })
            .collect();
        self.tensors
            .insert(name.to_string(), (shape.to_vec(), values));
    }

    /// Writes `config.json`.
    pub(crate) fn write_config(&self, dir: &Path) {
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
    }

    /// Writes the tensors that `keep` names to `file`, as float32, float16 or bfloat16.
    pub(crate) fn write_shard(
        &self,
        dir: &Path,
        file: &str,
        dtype: Dtype,
        keep: impl Fn(&str) -> bool,
    ) {
        let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = self
            .tensors
            .iter()
            .filter(|(name, _)| keep(name))
            .map(|(name, (shape, values))| {
                let bytes = values.iter().flat_map(|&x| encode(dtype, x)).collect();
                (name.clone(), shape.clone(), bytes)
            })
            .collect();
        let views = bytes.iter().map(|(name, shape, bytes)| {
            (
                name.as_str(),
                TensorView::new(dtype, shape.clone(), bytes).unwrap(),
            )
        });
        safetensors::serialize_to_file(views, None, &dir.join(file)).unwrap();
    }

    /// Writes the tensors in files of their types: `types` gives that of a name, and its file.
    pub(crate) fn write_typed(&self, dir: &Path, types: impl Fn(&str) -> Dtype) {
        let mut map = serde_json::Map::new();
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F8_E4M3] {
            let file = format!("{dtype}.safetensors");
            self.write_shard(dir, &file, dtype, |name| types(name) == dtype);
            for name in self.tensors.keys().filter(|name| types(name) == dtype) {
                map.insert(name.clone(), json!(file));
            }
        }
        let index = json!({ "weight_map": map });
        std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    /// Writes the whole model in one file.
    pub(crate) fn write(&self, dir: &Path) {
        self.write_config(dir);
        self.write_shard(dir, "model.safetensors", Dtype::F32, |_| true);
    }
}

fn encode(dtype: Dtype, x: f32) -> Vec<u8> {
    match dtype {
        Dtype::F32 => x.to_le_bytes().to_vec(),
        Dtype::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
        Dtype::BF16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(x).to_le_bytes().to_vec(),
        // A whole number from 0 to 255 as it is: the bits of an 8-bit format.
        Dtype::F8_E4M3 => vec![x as u8],
        other => panic!("{other} is not written"),
    }
}
