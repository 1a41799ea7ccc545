//! A target's `config.json` as Hugging Face writes it, for the Llama and Qwen3 families.
//!
//! Parsed once into what the forward pass needs; whatever would change its arithmetic and is not implemented
//! is refused, all problems of a file at once.

use std::path::Path;

use serde_json::{Map, Value};

use super::drafter::TargetSizes;
use super::error::{ModelError, Problems};
use super::rotary::Rope;

/// Which network a config describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama: no norm on queries and keys.
    Llama,
    /// Qwen3: RMSNorm on each head of queries and keys.
    Qwen3,
}

impl Family {
    const ALL: [Self; 2] = [Self::Llama, Self::Qwen3];

    fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen3 => "qwen3",
        }
    }
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
    /// Longest sequence it was made for.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// `[N]` sliding window of each layer.
    pub windows: Vec<Option<usize>>,
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
        let mut fields = Fields {
            map: &map,
            problems,
            sized: true,
        };
        let config = fields.config();
        fields.problems.refuse(path)?;
        Ok(config)
    }

    /// Columns of the queries.
    pub fn query_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Columns of the keys, and of the values.
    pub fn key_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// What a drafter takes from it.
    pub fn sizes(&self) -> TargetSizes {
        TargetSizes {
            hidden_size: self.hidden_size,
            intermediate_size: Some(self.intermediate_size),
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

    /// Weights of one layer that are multiplied with every token.
    pub fn layer_parameters(&self) -> usize {
        let (h, q, kv) = (self.hidden_size, self.query_size(), self.key_size());
        h * (q + 2 * kv) + q * h + 3 * h * self.intermediate_size
    }

    /// All parameters of the first `layers` layers, norms included, with the embedding, and with the head where
    /// it is another matrix.
    pub fn parameters(&self, layers: usize) -> usize {
        let norms = match self.family {
            Family::Llama => 2 * self.hidden_size,
            Family::Qwen3 => 2 * self.hidden_size + 2 * self.head_dim,
        };
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        layers * (self.layer_parameters() + norms)
            + self.hidden_size
            + tables * self.vocab_size * self.hidden_size
    }

    /// Floating-point operations of one prefilled token in the first `layers` layers, a multiply-add being two,
    /// at a mean of `context` visible positions.
    pub fn prefill_flops(&self, layers: usize, context: usize) -> f64 {
        let attention = 4 * self.query_size() * context;
        layers as f64 * (2 * self.layer_parameters() + attention) as f64
    }
}

/// The keys of a config, and what was found wrong with them.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    problems: Problems,
    /// Whether all sizes so far were read: what follows from a missing one is no problem of its own.
    sized: bool,
}

impl Fields<'_> {
    fn config(&mut self) -> TargetConfig {
        let family = self.family();
        self.refuse_unsupported();
        let hidden_size = self.size("hidden_size");
        let heads = self.size("num_attention_heads");
        let layers = self.size("num_hidden_layers");
        let kv = match family {
            Family::Llama => self.size_or("num_key_value_heads", heads),
            Family::Qwen3 => self.size("num_key_value_heads"),
        };
        if self.sized && !heads.is_multiple_of(kv) {
            self.problems.add(format!(
                "num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}"
            ));
        }
        let head_dim = match (family, self.get("head_dim")) {
            (Family::Llama, None) => {
                if self.sized && !hidden_size.is_multiple_of(heads) {
                    self.problems.add(format!(
                        "head_dim is missing and num_attention_heads {heads} does not divide hidden_size {hidden_size}"
                    ));
                }
                hidden_size / heads
            }
            (Family::Qwen3, None) => 128,
            (_, Some(_)) => self.size("head_dim"),
        };
        if self.sized && (!head_dim.is_multiple_of(2) || head_dim > 512) {
            self.problems.add(format!(
                "head_dim {head_dim} is not an even number up to 512"
            ));
        }
        let default_theta = (family == Family::Llama).then_some(10_000.0);
        TargetConfig {
            family,
            hidden_size,
            intermediate_size: self.size("intermediate_size"),
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: kv,
            head_dim,
            vocab_size: self.size("vocab_size"),
            rms_norm_eps: self.eps(),
            rope: Rope::resolve(self.map, default_theta, &mut self.problems),
            max_position_embeddings: self.size("max_position_embeddings"),
            tie_word_embeddings: self.flag("tie_word_embeddings"),
            windows: self.windows(layers),
        }
    }

    /// A value that is there and not null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// A whole number from 1; 1 after a problem.
    fn size(&mut self, key: &str) -> usize {
        let Some(value) = self.get(key) else {
            self.problems.add(format!("{key} is missing"));
            self.sized = false;
            return 1;
        };
        match value
            .as_u64()
            .filter(|n| (1..=u64::from(u32::MAX)).contains(n))
        {
            Some(n) => n as usize,
            None => {
                let problem = format!("{key} is {value}, not a whole number from 1 to 2^32");
                self.problems.add(problem);
                self.sized = false;
                1
            }
        }
    }

    fn size_or(&mut self, key: &str, default: usize) -> usize {
        if self.get(key).is_none() {
            default
        } else {
            self.size(key)
        }
    }

    fn flag(&mut self, key: &str) -> bool {
        match self.get(key) {
            None => false,
            Some(Value::Bool(flag)) => *flag,
            Some(other) => {
                let problem = format!("{key} is {other}, not true or false");
                self.problems.add(problem);
                false
            }
        }
    }

    fn eps(&mut self) -> f64 {
        let Some(value) = self.get("rms_norm_eps") else {
            self.problems.add("rms_norm_eps is missing");
            return 1.0;
        };
        match value.as_f64().filter(|&eps| eps.is_finite() && eps > 0.0) {
            Some(eps) => eps,
            None => {
                let problem = format!("rms_norm_eps is {value}, not a positive number");
                self.problems.add(problem);
                1.0
            }
        }
    }

    fn family(&mut self) -> Family {
        let supported = Family::ALL.map(Family::architecture).join(", ");
        let named = |key: &str, value: Option<&Value>, name: fn(Family) -> &'static str| {
            let text = value?.as_str().unwrap_or_default();
            let found = Family::ALL.into_iter().find(|&family| name(family) == text);
            Some(found.ok_or_else(|| {
                format!("{key} `{text}` is not supported; supported are {supported}")
            }))
        };
        let first = self.get("architectures").and_then(|list| list.get(0));
        let by_architecture = named("architecture", first, Family::architecture);
        let by_type = named("model_type", self.get("model_type"), Family::model_type);
        match (by_architecture, by_type) {
            (Some(Err(problem)), _) | (None, Some(Err(problem))) => {
                self.problems.add(problem);
                Family::Llama
            }
            (Some(Ok(a)), Some(Ok(b))) if a != b => {
                self.problems.add(format!(
                    "architecture {} contradicts model_type {}",
                    a.architecture(),
                    b.model_type()
                ));
                a
            }
            (Some(Ok(family)), Some(Err(problem))) => {
                self.problems.add(problem);
                family
            }
            (Some(Ok(family)), _) | (None, Some(Ok(family))) => family,
            (None, None) => {
                self.problems.add(format!(
                    "neither architectures nor model_type is given; supported are {supported}"
                ));
                Family::Llama
            }
        }
    }

    /// What would change the arithmetic and is not implemented.
    fn refuse_unsupported(&mut self) {
        for key in ["quantization_config", "compression_config"] {
            if let Some(quantization) = self.get(key) {
                let method = quantization.get("quant_method").and_then(Value::as_str);
                let method = method.unwrap_or("of an unnamed method").to_string();
                self.problems.add(format!(
                    "{key} says the weights are quantised ({method}), which is not implemented; use the float32, float16 or bfloat16 model"
                ));
            }
        }
        for key in ["attention_bias", "mlp_bias"] {
            if self.flag(key) {
                self.problems
                    .add(format!("{key} is true, which is not implemented"));
            }
        }
        if let Some(act) = self.get("hidden_act").filter(|act| *act != "silu") {
            let problem =
                format!("hidden_act is {act}, which is not implemented; what works is \"silu\"");
            self.problems.add(problem);
        }
    }

    /// Sliding windows by `layer_types`, or by `use_sliding_window` with `max_window_layers`.
    fn windows(&mut self, layers: usize) -> Vec<Option<usize>> {
        let none = vec![None; layers];
        match self.get("layer_types").cloned() {
            None => {
                if !self.flag("use_sliding_window") {
                    return none;
                }
                let window = self.size("sliding_window");
                let full = self.size_or("max_window_layers", layers);
                (0..layers).map(|i| (i >= full).then_some(window)).collect()
            }
            Some(Value::Array(types)) => {
                if types.len() != layers {
                    self.problems.add(format!(
                        "layer_types has {} entries for {layers} layers",
                        types.len()
                    ));
                }
                let mut windows = none;
                for (slot, kind) in windows.iter_mut().zip(&types) {
                    match kind.as_str() {
                        Some("full_attention") => {}
                        Some("sliding_attention") => *slot = Some(self.size("sliding_window")),
                        _ => {
                            self.problems.add(format!(
                                "layer_types holds {kind}; what works is full_attention and sliding_attention"
                            ));
                            break;
                        }
                    }
                }
                windows
            }
            Some(other) => {
                self.problems
                    .add(format!("layer_types is {other}, not a list"));
                none
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512}"#;
    const QWEN3: &str = r#"{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 100, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "rope_theta": 1000000, "rope_scaling": null, "attention_bias": false, "hidden_act": "silu",
        "tie_word_embeddings": true, "sliding_window": null, "use_sliding_window": false, "max_window_layers": 4}"#;

    fn parse(text: &str) -> Result<TargetConfig, String> {
        TargetConfig::parse(text, Path::new("m/config.json")).map_err(|e| e.to_string())
    }

    /// `text` with some keys set; null takes a key away.
    fn with(text: &str, keys: &str) -> String {
        let mut map: Map<String, Value> = serde_json::from_str(text).unwrap();
        let more: Map<String, Value> = serde_json::from_str(keys).unwrap();
        map.extend(more);
        Value::Object(map).to_string()
    }

    #[test]
    fn llama_takes_its_defaults() {
        let config = parse(LLAMA).unwrap();
        assert_eq!(config.family, Family::Llama);
        assert_eq!((config.head_dim, config.num_key_value_heads), (16, 4));
        assert_eq!(config.rope.theta, 10_000.0);
        assert!(!config.tie_word_embeddings);
        assert_eq!(config.windows, [None; 3]);
        assert_eq!(config.layer_parameters(), 4 * 64 * 64 + 3 * 64 * 96);
        assert_eq!(
            config.parameters(2),
            2 * (4 * 64 * 64 + 3 * 64 * 96 + 128) + 64 + 2 * 6400
        );
        assert_eq!(
            config.prefill_flops(1, 10),
            (2 * (4 * 64 * 64 + 3 * 64 * 96) + 4 * 64 * 10) as f64
        );
    }

    #[test]
    fn qwen3_takes_its_own_fields() {
        let config = parse(QWEN3).unwrap();
        assert_eq!(config.family, Family::Qwen3);
        assert_eq!((config.query_size(), config.key_size()), (128, 64));
        assert_eq!(config.rope.theta, 1e6);
        assert!(config.tie_word_embeddings);
        assert_eq!(config.sizes().rope_theta, 1e6);
        let sliding = with(
            QWEN3,
            r#"{"use_sliding_window": true, "sliding_window": 7, "max_window_layers": 3}"#,
        );
        assert_eq!(
            parse(&sliding).unwrap().windows,
            [None, None, None, Some(7)]
        );
        let types = r#"{"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]}"#;
        assert_eq!(
            parse(&with(QWEN3, types)).unwrap().windows,
            [Some(7), None, None, Some(7)]
        );
        assert_eq!(
            parse(&with(QWEN3, r#"{"head_dim": null}"#))
                .unwrap()
                .head_dim,
            128
        );
    }

    #[test]
    fn what_cannot_be_run_is_refused() {
        for (keys, says) in [
            (
                r#"{"architectures": ["GPT2LMHeadModel"]}"#,
                "architecture `GPT2LMHeadModel` is not supported; supported are LlamaForCausalLM, Qwen3ForCausalLM",
            ),
            (
                r#"{"architectures": null, "model_type": "mamba"}"#,
                "model_type `mamba` is not supported",
            ),
            (
                r#"{"architectures": null, "model_type": null}"#,
                "neither architectures nor model_type",
            ),
            (
                r#"{"model_type": "qwen3"}"#,
                "architecture LlamaForCausalLM contradicts model_type qwen3",
            ),
            (
                r#"{"quantization_config": {"quant_method": "awq", "bits": 4}}"#,
                "quantised (awq)",
            ),
            (r#"{"attention_bias": true}"#, "attention_bias is true"),
            (r#"{"mlp_bias": true}"#, "mlp_bias is true"),
            (r#"{"hidden_act": "gelu"}"#, "hidden_act is \"gelu\""),
            (
                r#"{"num_key_value_heads": 3}"#,
                "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
            ),
            (
                r#"{"num_attention_heads": 5}"#,
                "num_attention_heads 5 does not divide hidden_size 64",
            ),
            (r#"{"head_dim": 17}"#, "head_dim 17 is not an even number"),
            (r#"{"hidden_size": null}"#, "hidden_size is missing"),
            (
                r#"{"hidden_size": 1.5}"#,
                "hidden_size is 1.5, not a whole number",
            ),
            (r#"{"vocab_size": 0}"#, "vocab_size is 0"),
            (r#"{"rms_norm_eps": -1}"#, "rms_norm_eps is -1"),
            (
                r#"{"tie_word_embeddings": "yes"}"#,
                "tie_word_embeddings is \"yes\"",
            ),
            (
                r#"{"rope_scaling": {"rope_type": "yarn"}}"#,
                "`yarn`, which is not implemented",
            ),
            (
                r#"{"layer_types": ["full_attention"]}"#,
                "layer_types has 1 entries for 3 layers",
            ),
            (
                r#"{"layer_types": ["x", "x", "x"]}"#,
                "layer_types holds \"x\"",
            ),
        ] {
            let error = parse(&with(LLAMA, keys)).unwrap_err();
            assert!(error.starts_with("m/config.json: "), "{error}");
            assert!(error.contains(says), "{keys}: {error}");
            assert!(!error.contains('\n'), "{keys}: {error}");
        }
        let error = parse(&with(QWEN3, r#"{"rope_theta": null}"#)).unwrap_err();
        assert!(error.contains("rope_theta is missing"), "{error}");
    }

    #[test]
    fn all_problems_are_told_together() {
        let error = parse(r#"{"model_type": "llama", "attention_bias": true}"#).unwrap_err();
        for key in [
            "attention_bias",
            "hidden_size",
            "num_hidden_layers",
            "vocab_size",
            "rms_norm_eps",
        ] {
            assert!(error.contains(key), "{key}: {error}");
        }
        assert!(
            error.starts_with("m/config.json: 8 problems\n  "),
            "{error}"
        );
    }

    #[test]
    fn no_json_is_one_line() {
        assert_eq!(
            parse("[]").unwrap_err(),
            "m/config.json: is JSON but not an object"
        );
        assert!(
            parse("{")
                .unwrap_err()
                .starts_with("m/config.json: is no JSON: ")
        );
        let error = TargetConfig::read(Path::new("/nowhere"))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("/nowhere/config.json: No such file"),
            "{error}"
        );
    }
}
