//! The drafter's `config.json`: what a serving engine (SGLang, vLLM, z-lab's own loader) reads, and how a new
//! drafter takes its sizes from the target.

use serde_json::{Map, Value, json};

use super::DrafterError;
use super::fields::{Fields, missing};

/// How the queries of a layer see their surroundings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// All context before the anchor and the whole block.
    Full,
    /// The last W positions, causal inside the block.
    Sliding,
}

impl LayerType {
    fn name(self) -> &'static str {
        match self {
            Self::Full => "full_attention",
            Self::Sliding => "sliding_attention",
        }
    }
}

/// The shape of a DFlash drafter.
#[derive(Clone, Debug, PartialEq)]
pub struct DrafterConfig {
    /// H, the target's.
    pub hidden_size: usize,
    /// I of the gated MLP.
    pub intermediate_size: usize,
    /// L.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Size of one head.
    pub head_dim: usize,
    /// Rows of the target's embedding.
    pub vocab_size: usize,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// The target's, not the training length.
    pub max_position_embeddings: usize,
    /// B, rows of a block.
    pub block_size: usize,
    /// N, layers of the target.
    pub num_target_layers: usize,
    /// Captured target layers, 0-based; the residual stream after each.
    pub target_layer_ids: Vec<usize>,
    /// What stands in slots 1..B.
    pub mask_token_id: u32,
    /// One per layer.
    pub layer_types: Vec<LayerType>,
    /// W of the sliding layers.
    pub sliding_window: Option<usize>,
}

/// What a drafter takes from its target.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetSizes {
    /// Hidden size.
    pub hidden_size: usize,
    /// Inner size of the MLP; `None` for a target of experts.
    pub intermediate_size: Option<usize>,
    /// N.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads.
    pub num_key_value_heads: usize,
    /// Size of one head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Of the norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Longest sequence.
    pub max_position_embeddings: usize,
}

/// What a person may say about a new drafter; everything else comes from the target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DraftOptions {
    /// `--draft-config`: an object with keys of `config.json`.
    pub file: Option<Map<String, Value>>,
    /// `--draft-layers`; 5 by default.
    pub layers: Option<usize>,
    /// `--block-size`; 16 by default.
    pub block_size: Option<usize>,
    /// `--target-layers`.
    pub target_layers: Option<Vec<usize>>,
    /// `--sliding-window`: all layers but the last slide.
    pub sliding_window: Option<usize>,
}

/// L of a new drafter.
pub const DEFAULT_LAYERS: usize = 5;
/// B of a new drafter.
pub const DEFAULT_BLOCK: usize = 16;

/// Captured layers of a target of `n` layers for a drafter of `l`: the middle one for one layer, else spread
/// evenly from 1 to n − 3, halves rounded to even.
///
/// # Errors
/// A target too small for `l` different layers; then `--target-layers` must name them.
pub fn default_target_layer_ids(n: usize, l: usize) -> Result<Vec<usize>, DrafterError> {
    let ids: Vec<usize> = match l {
        1 => vec![n / 2],
        _ if n < 4 => vec![],
        _ => (0..l)
            .map(|i| {
                let (numerator, denominator) = (i * (n - 4), l.max(2) - 1);
                let (whole, rest) = (numerator / denominator, numerator % denominator);
                // 1 + whole is what gets rounded, so a half goes up when 1 + whole is odd.
                let up = 2 * rest > denominator || (2 * rest == denominator && whole % 2 == 0);
                1 + whole + usize::from(up)
            })
            .collect(),
    };
    if ids.len() != l || ids.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(DrafterError::Config(format!(
            "a target of {n} layers has no {l} different layers to capture by the default rule; name them with --target-layers"
        )));
    }
    Ok(ids)
}

impl DrafterConfig {
    /// A new drafter for a target: the target's sizes, then the file of `--draft-config`, then the options.
    ///
    /// # Errors
    /// A value that contradicts the target or itself, or a key in the file that is not known.
    pub fn for_target(
        target: &TargetSizes,
        mask_token_id: u32,
        options: &DraftOptions,
    ) -> Result<Self, DrafterError> {
        let empty = Map::new();
        let file = Fields(options.file.as_ref().unwrap_or(&empty));
        file.refuse_unknown()?;
        let layers = match options.layers {
            Some(layers) => layers,
            None => file.size("num_hidden_layers")?.unwrap_or(DEFAULT_LAYERS),
        };
        let target_layer_ids = match &options.target_layers {
            Some(ids) => ids.clone(),
            None => match file.target_layer_ids()? {
                Some(ids) => ids,
                None => default_target_layer_ids(target.num_hidden_layers, layers)?,
            },
        };
        let (layer_types, sliding_window) = match options.sliding_window {
            Some(window) => {
                let mut types = vec![LayerType::Sliding; layers];
                if let Some(last) = types.last_mut() {
                    *last = LayerType::Full;
                }
                (types, Some(window))
            }
            None => (
                file.layer_types()?.unwrap_or(vec![LayerType::Full; layers]),
                file.size("sliding_window")?,
            ),
        };
        let config = Self {
            hidden_size: file.size("hidden_size")?.unwrap_or(target.hidden_size),
            intermediate_size: file
                .size("intermediate_size")?
                .or(target.intermediate_size)
                .unwrap_or(3 * target.hidden_size),
            num_hidden_layers: layers,
            num_attention_heads: file
                .size("num_attention_heads")?
                .unwrap_or(target.num_attention_heads),
            num_key_value_heads: file
                .size("num_key_value_heads")?
                .unwrap_or(target.num_key_value_heads),
            head_dim: file.size("head_dim")?.unwrap_or(target.head_dim),
            vocab_size: file.size("vocab_size")?.unwrap_or(target.vocab_size),
            rms_norm_eps: file.number("rms_norm_eps")?.unwrap_or(target.rms_norm_eps),
            rope_theta: file.rope_theta(Some(target.rope_theta))?,
            max_position_embeddings: file
                .size("max_position_embeddings")?
                .unwrap_or(target.max_position_embeddings),
            block_size: match options.block_size {
                Some(block) => block,
                None => file.size("block_size")?.unwrap_or(DEFAULT_BLOCK),
            },
            num_target_layers: file
                .size("num_target_layers")?
                .unwrap_or(target.num_hidden_layers),
            target_layer_ids,
            mask_token_id,
            layer_types,
            sliding_window,
        };
        config.validate()?;
        config.check_target(target)?;
        match file.mask_token_id()? {
            Some(id) if id != mask_token_id => Err(DrafterError::Config(format!(
                "--draft-config names mask_token_id {id}, but {mask_token_id} was chosen; give --mask-token-id {id} or leave it out"
            ))),
            _ => Ok(config),
        }
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    /// A key that is missing, of the wrong type, or that asks for something this drafter kind does not have.
    pub fn from_json(text: &str) -> Result<Self, DrafterError> {
        let value: Value = serde_json::from_str(text)
            .map_err(|e| DrafterError::Config(format!("config.json is not JSON: {e}")))?;
        let Value::Object(map) = value else {
            return Err(DrafterError::Config(
                "config.json is not an object".to_string(),
            ));
        };
        let fields = Fields(&map);
        let layers = fields.needed("num_hidden_layers")?;
        let heads = fields.needed("num_attention_heads")?;
        let hidden = fields.needed("hidden_size")?;
        let config = Self {
            hidden_size: hidden,
            intermediate_size: fields.needed("intermediate_size")?,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: fields.size("num_key_value_heads")?.unwrap_or(heads),
            head_dim: fields.size("head_dim")?.unwrap_or(hidden / heads.max(1)),
            vocab_size: fields.needed("vocab_size")?,
            rms_norm_eps: fields
                .number("rms_norm_eps")?
                .ok_or_else(|| missing("rms_norm_eps"))?,
            rope_theta: fields.rope_theta(None)?,
            max_position_embeddings: fields.needed("max_position_embeddings")?,
            block_size: fields.needed("block_size")?,
            num_target_layers: fields.needed("num_target_layers")?,
            target_layer_ids: fields
                .target_layer_ids()?
                .ok_or_else(|| missing("dflash_config.target_layer_ids"))?,
            mask_token_id: fields
                .mask_token_id()?
                .ok_or_else(|| missing("dflash_config.mask_token_id"))?,
            layer_types: fields
                .layer_types()?
                .unwrap_or(vec![LayerType::Full; layers]),
            sliding_window: fields.size("sliding_window")?,
        };
        fields.refuse_unsupported()?;
        config.validate()?;
        Ok(config)
    }

    /// The `config.json` of the serving format; `dtype` as Hugging Face names it.
    pub fn to_json(&self, dtype: &str) -> Value {
        let types: Vec<_> = self.layer_types.iter().map(|t| t.name()).collect();
        json!({
            "architectures": ["DFlashDraftModel"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": self.target_layer_ids,
            },
            "dtype": dtype,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": types,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": { "rope_theta": self.rope_theta, "rope_type": "default" },
            "rope_scaling": null,
            "rope_theta": self.rope_theta,
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": false,
            "use_cache": true,
            "use_sliding_window": self.sliding_window.is_some(),
            "vocab_size": self.vocab_size,
        })
    }

    /// K, the number of captured layers.
    pub fn captured(&self) -> usize {
        self.target_layer_ids.len()
    }

    /// The window of layer `i`, if it slides.
    pub fn window(&self, i: usize) -> Option<usize> {
        match self.layer_types[i] {
            LayerType::Full => None,
            LayerType::Sliding => self.sliding_window,
        }
    }

    /// Whether the drafter's own numbers fit together.
    ///
    /// # Errors
    /// The first that does not, by its key.
    pub fn validate(&self) -> Result<(), DrafterError> {
        let refuse = |text: String| Err(DrafterError::Config(text));
        for (key, value) in [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("vocab_size", self.vocab_size),
        ] {
            if value == 0 {
                return refuse(format!("{key} is 0"));
            }
        }
        if self.block_size < 2 {
            return refuse(format!(
                "block_size is {}; a block needs the anchor and at least one slot",
                self.block_size
            ));
        }
        if !self
            .num_attention_heads
            .is_multiple_of(self.num_key_value_heads)
        {
            return refuse(format!(
                "num_attention_heads {} is no multiple of num_key_value_heads {}",
                self.num_attention_heads, self.num_key_value_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return refuse(format!(
                "head_dim {} is odd; rotary turns pairs",
                self.head_dim
            ));
        }
        if self.mask_token_id as usize >= self.vocab_size {
            return refuse(format!(
                "mask_token_id {} is no row of an embedding of {} rows",
                self.mask_token_id, self.vocab_size
            ));
        }
        if self.target_layer_ids.is_empty() {
            return refuse("target_layer_ids is empty".to_string());
        }
        if self
            .target_layer_ids
            .windows(2)
            .any(|pair| pair[0] >= pair[1])
        {
            return refuse(format!(
                "target_layer_ids {:?} do not ascend",
                self.target_layer_ids
            ));
        }
        if let Some(id) = self
            .target_layer_ids
            .iter()
            .find(|&&id| id >= self.num_target_layers)
        {
            return refuse(format!(
                "target layer {id} of target_layer_ids does not exist: the target has layers 0 to {}",
                self.num_target_layers.saturating_sub(1)
            ));
        }
        if self.layer_types.len() != self.num_hidden_layers {
            return refuse(format!(
                "layer_types names {} layers, num_hidden_layers is {}",
                self.layer_types.len(),
                self.num_hidden_layers
            ));
        }
        if self.layer_types.contains(&LayerType::Sliding)
            && self.sliding_window.is_none_or(|w| w == 0)
        {
            return refuse(
                "layer_types has sliding_attention, but sliding_window is not a positive number"
                    .to_string(),
            );
        }
        for (key, value) in [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return refuse(format!("{key} {value} is not a positive number"));
            }
        }
        Ok(())
    }

    /// Whether this drafter belongs to a target of these sizes.
    ///
    /// # Errors
    /// The sizes that must be equal and are not.
    pub fn check_target(&self, target: &TargetSizes) -> Result<(), DrafterError> {
        for (key, drafter, target) in [
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            (
                "num_target_layers",
                self.num_target_layers,
                target.num_hidden_layers,
            ),
        ] {
            if drafter != target {
                return Err(DrafterError::Config(format!(
                    "the drafter's {key} is {drafter}, the target's is {target}; this drafter belongs to another target"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A drafter small enough for any test: H 32, 2 layers, B 4, K 3, vocabulary 50.
    pub(crate) fn small_config() -> DrafterConfig {
        DrafterConfig {
            hidden_size: 32,
            intermediate_size: 48,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 8,
            vocab_size: 50,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            max_position_embeddings: 256,
            block_size: 4,
            num_target_layers: 8,
            target_layer_ids: vec![1, 3, 5],
            mask_token_id: 3,
            layer_types: vec![LayerType::Full; 2],
            sliding_window: None,
        }
    }

    fn qwen3_8b() -> TargetSizes {
        TargetSizes {
            hidden_size: 4096,
            intermediate_size: Some(12288),
            num_hidden_layers: 36,
            num_attention_heads: 32,
            num_key_value_heads: 8,
            head_dim: 128,
            vocab_size: 151_936,
            rms_norm_eps: 1e-6,
            rope_theta: 1e6,
            max_position_embeddings: 40960,
        }
    }

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn defaults_come_from_the_target() {
        let config =
            DrafterConfig::for_target(&qwen3_8b(), 151_669, &DraftOptions::default()).unwrap();
        assert_eq!(config.target_layer_ids, [1, 9, 17, 25, 33]);
        assert_eq!((config.block_size, config.num_hidden_layers), (16, 5));
        assert_eq!(config.max_position_embeddings, 40960);
        let experts = TargetSizes {
            intermediate_size: None,
            ..qwen3_8b()
        };
        let config =
            DrafterConfig::for_target(&experts, 151_669, &DraftOptions::default()).unwrap();
        assert_eq!(config.intermediate_size, 3 * 4096);
    }

    #[test]
    fn options_win_over_the_file_and_the_file_over_the_target() {
        let options = DraftOptions {
            file: Some(object(json!({
                "intermediate_size": 1000,
                "block_size": 4,
                "num_hidden_layers": 3,
                "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
            }))),
            block_size: Some(8),
            sliding_window: Some(64),
            ..DraftOptions::default()
        };
        let config = DrafterConfig::for_target(&qwen3_8b(), 0, &options).unwrap();
        assert_eq!(config.intermediate_size, 1000);
        assert_eq!(config.block_size, 8);
        assert_eq!(config.rope_theta, 5000.0);
        assert_eq!(config.target_layer_ids, [1, 17, 33]);
        assert_eq!(
            [config.window(0), config.window(1), config.window(2)],
            [Some(64), Some(64), None]
        );
    }

    #[test]
    fn config_json_is_read_as_it_was_written() {
        let mut config = small_config();
        assert_eq!(
            DrafterConfig::from_json(&config.to_json("bfloat16").to_string()).unwrap(),
            config
        );
        config.layer_types[0] = LayerType::Sliding;
        config.sliding_window = Some(10);
        let json = config.to_json("bfloat16");
        assert_eq!(json["use_sliding_window"], true);
        assert_eq!(json["dflash_config"]["target_layer_ids"], json!([1, 3, 5]));
        assert_eq!(json["rope_parameters"]["rope_theta"], json["rope_theta"]);
        assert_eq!(DrafterConfig::from_json(&json.to_string()).unwrap(), config);
    }

    #[test]
    fn refusals_name_the_key() {
        let refusal = |file: Value| {
            let options = DraftOptions {
                file: Some(object(file)),
                ..DraftOptions::default()
            };
            DrafterConfig::for_target(&qwen3_8b(), 0, &options)
                .unwrap_err()
                .to_string()
        };
        for (file, word) in [
            (json!({"intermediate_sise": 3}), "intermediate_sise"),
            (json!({"hidden_size": 2048}), "hidden_size"),
            (json!({"block_size": 1}), "block_size"),
            (json!({"block_size": "8"}), "block_size"),
            (json!({"num_key_value_heads": 5}), "num_key_value_heads"),
            (json!({"layer_types": ["full_attention"]}), "layer_types"),
            (
                json!({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
                "sliding_window",
            ),
            (
                json!({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}),
                "but rope_theta is 1",
            ),
            (json!({"rope_scaling": {"type": "yarn"}}), "yarn"),
            (json!({"attention_bias": true}), "attention_bias"),
            (
                json!({"dflash_config": {"target_layer_ids": [1, 36]}}),
                "36",
            ),
            (
                json!({"dflash_config": {"target_layer_ids": [5, 1]}}),
                "ascend",
            ),
            (
                json!({"dflash_config": {"mask_token_id": 9}}),
                "--mask-token-id 9",
            ),
        ] {
            let text = refusal(file.clone());
            assert!(text.contains(word), "{file}: {text}");
        }
        let mut json = small_config().to_json("bfloat16");
        json.as_object_mut().unwrap().remove("block_size");
        let text = DrafterConfig::from_json(&json.to_string())
            .unwrap_err()
            .to_string();
        assert!(text.contains("block_size"), "{text}");
    }

    #[test]
    fn small_targets_need_named_layers() {
        assert!(default_target_layer_ids(3, 2).is_err());
        assert!(default_target_layer_ids(4, 2).is_err());
        assert_eq!(default_target_layer_ids(3, 1).unwrap(), [1]);
        assert!(default_target_layer_ids(8, 0).is_ok_and(|ids| ids.is_empty()));
    }
}
