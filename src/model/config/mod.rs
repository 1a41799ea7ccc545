//! A target's `config.json` as Hugging Face writes it.
//!
//! Parsed once into what the forward pass needs; whatever would change its arithmetic and is not implemented
//! is refused, all problems of a file at once. `family.rs` is the table of what the families differ in.

mod family;
mod fields;
mod tensors;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde_json::{Map, Value};

use super::drafter::TargetSizes;
use super::error::{ModelError, Problems};
use super::rotary::Rope;
pub use family::Family;
use family::Traits;
use fields::Fields;
pub(super) use tensors::{Mlp, Projection, Role};

/// The activation of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU in its approximation by tanh (arXiv 1606.08415).
    GeluTanh,
}

/// Which layers of a family have a sliding window, where `layer_types` does not say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Windows {
    /// None.
    Never,
    /// All, where `sliding_window` is given.
    All,
    /// All, where `use_sliding_window` is true.
    Switched,
    /// Those from `max_window_layers` on, where `use_sliding_window` is true; `layer_types` may say otherwise.
    HighLayers,
    /// All but each n-th; `layer_types` may say otherwise.
    AllButEvery(usize),
}

/// Routed experts in place of the MLP (arXiv 2101.03961).
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that a token takes.
    pub per_token: usize,
    /// Inner size of one.
    pub intermediate_size: usize,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// `[N]` which layers have them; the others have an MLP.
    pub layers: Vec<bool>,
}

/// Shape of a target.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetConfig {
    /// The network.
    pub family: Family,
    /// H.
    pub hidden_size: usize,
    /// Inner size of the MLP.
    pub intermediate_size: usize,
    /// N.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads.
    pub num_key_value_heads: usize,
    /// Size of one head.
    pub head_dim: usize,
    /// Rows of the embedding, as the config says; the weights' count once they were looked at.
    pub vocab_size: usize,
    /// Of the norms.
    pub rms_norm_eps: f64,
    /// Rotary embedding.
    pub rope: Rope,
    /// Rotary embedding of the layers with a window, where they have their own.
    pub local_rope: Option<Rope>,
    /// Longest sequence it was made for.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// `[N]` sliding window of each layer.
    pub windows: Vec<Option<usize>>,
    /// Of the MLP.
    pub activation: Activation,
    /// Multiplies q·k.
    pub attention_scale: f64,
    /// Scores are capped to ± this, smoothly, before the softmax.
    pub attention_cap: Option<f64>,
    /// Logits are capped to ± this, smoothly.
    pub final_cap: Option<f64>,
    /// Biases on queries, keys and values.
    pub qkv_bias: bool,
    /// A bias on the attention's output.
    pub output_bias: bool,
    /// Biases on the MLP.
    pub mlp_bias: bool,
    /// Routed experts.
    pub experts: Option<ExpertsConfig>,
    /// Rows and columns of a block of fp8 numbers that share a scale, where weights are stored so.
    pub fp8_block: Option<[usize; 2]>,
}

impl TargetConfig {
    /// Reads `config.json` in `dir`.
    ///
    /// # Errors
    /// A file that is missing or no JSON object, and everything in it that cannot be run.
    pub fn read(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|error| ModelError::Io {
            path: path.clone(),
            error,
        })?;
        Self::parse(&text, &path)
    }

    /// Reads the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`TargetConfig::read`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, ModelError> {
        let mut problems = Problems::default();
        let map = match serde_json::from_str(text) {
            Ok(Value::Object(map)) => map,
            Ok(_) => {
                problems.add("is JSON but not an object");
                Map::new()
            }
            Err(error) => {
                problems.add(format!("is no JSON: {error}"));
                Map::new()
            }
        };
        problems.refuse(path)?;
        let mut fields = Fields::new(map);
        let config = fields.config();
        fields.problems.refuse(path)?;
        Ok(config)
    }

    fn traits(&self) -> &'static Traits {
        self.family.traits()
    }

    /// Its name in `architectures`.
    pub fn architecture(&self) -> &'static str {
        self.traits().architecture
    }

    /// Columns of the queries.
    pub fn query_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Columns of the keys, and of the values.
    pub fn key_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// What is added to the weight of a norm before it multiplies.
    pub fn norm_offset(&self) -> f32 {
        if self.traits().gemma { 1.0 } else { 0.0 }
    }

    /// What embeddings are multiplied with.
    pub fn embedding_scale(&self) -> Option<f32> {
        let root = (self.hidden_size as f64).sqrt() as f32;
        self.traits().gemma.then_some(root)
    }

    /// What a drafter takes from it.
    pub fn sizes(&self) -> TargetSizes {
        TargetSizes {
            hidden_size: self.hidden_size,
            intermediate_size: self.experts.is_none().then_some(self.intermediate_size),
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            vocab_size: self.vocab_size,
            rms_norm_eps: self.rms_norm_eps,
            rope_theta: self.rope.theta,
            max_position_embeddings: self.max_position_embeddings,
        }
    }

    /// Experts of layer `i`, where it has them.
    pub fn experts_of(&self, i: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| experts.layers[i])
    }

    /// Weights of one layer that are multiplied with every token; where layers differ, their mean.
    pub fn layer_parameters(&self) -> usize {
        let (h, q, kv) = (self.hidden_size, self.query_size(), self.key_size());
        let attention = h * (q + 2 * kv) + q * h;
        let mlp: usize = (0..self.num_hidden_layers)
            .map(|i| match self.experts_of(i) {
                None => 3 * h * self.intermediate_size,
                Some(e) => h * e.count + e.per_token * 3 * h * e.intermediate_size,
            })
            .sum();
        attention + mlp / self.num_hidden_layers
    }

    /// All parameters of the first `layers` layers, norms included, with the embedding, and with the head where
    /// it is another matrix.
    pub fn parameters(&self, layers: usize) -> usize {
        let of_layers: usize = (0..layers)
            .flat_map(|i| self.layer_tensors(i))
            .map(|tensor| tensor.shape.iter().product::<usize>())
            .sum();
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        of_layers + self.hidden_size + tables * self.vocab_size * self.hidden_size
    }

    /// Floating-point operations of one prefilled token in the first `layers` layers, a multiply-add being two,
    /// at a mean of `context` visible positions.
    pub fn prefill_flops(&self, layers: usize, context: usize) -> f64 {
        let attention = 4 * self.query_size() * context;
        layers as f64 * (2 * self.layer_parameters() + attention) as f64
    }
}
