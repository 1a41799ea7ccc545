//! Typed access to the keys of a `config.json`.

use serde_json::{Map, Value};

use super::{DrafterError, LayerType};
use crate::model::error::Problems;
use crate::model::rotary::{Rope, RopeDefaults, Ropes};

/// Keys of a serving `config.json` that change nothing here.
const WITHOUT_EFFECT: &[&str] = &[
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_window_layers",
    "model_type",
    "pad_token_id",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
];

pub(super) fn missing(key: &str) -> DrafterError {
    DrafterError::Config(format!("config.json has no {key}"))
}

/// Typed access to the keys of a `config.json`; `null` counts as absent.
pub(super) struct Fields<'a>(pub(super) &'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, DrafterError> {
        self.get(key).map(|value| as_size(key, value)).transpose()
    }

    pub(super) fn needed(&self, key: &str) -> Result<usize, DrafterError> {
        self.size(key)?.ok_or_else(|| missing(key))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, DrafterError> {
        self.get(key)
            .map(|value| {
                value
                    .as_f64()
                    .ok_or_else(|| DrafterError::Config(format!("{key} is {value}, not a number")))
            })
            .transpose()
    }

    fn object(&self, key: &str) -> Result<Option<Fields<'_>>, DrafterError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields(map))),
            Some(other) => Err(DrafterError::Config(format!(
                "{key} is {other}, not an object"
            ))),
        }
    }

    pub(super) fn mask_token_id(&self) -> Result<Option<u32>, DrafterError> {
        let Some(dflash) = self.object("dflash_config")? else {
            return Ok(None);
        };
        Ok(dflash.size("mask_token_id")?.map(|id| id as u32))
    }

    pub(super) fn target_layer_ids(&self) -> Result<Option<Vec<usize>>, DrafterError> {
        const KEY: &str = "dflash_config.target_layer_ids";
        let Some(dflash) = self.object("dflash_config")? else {
            return Ok(None);
        };
        match dflash.get("target_layer_ids") {
            None => Ok(None),
            Some(Value::Array(ids)) => ids
                .iter()
                .map(|id| as_size(KEY, id))
                .collect::<Result<_, _>>()
                .map(Some),
            Some(other) => Err(DrafterError::Config(format!(
                "{KEY} is {other}, not a list"
            ))),
        }
    }

    pub(super) fn layer_types(&self) -> Result<Option<Vec<LayerType>>, DrafterError> {
        let one = |value: &Value| match value.as_str() {
            Some("full_attention") => Ok(LayerType::Full),
            Some("sliding_attention") => Ok(LayerType::Sliding),
            _ => Err(DrafterError::Config(format!(
                "layer_types holds {value}; known are full_attention and sliding_attention"
            ))),
        };
        match self.get("layer_types") {
            None => Ok(None),
            Some(Value::Array(types)) => types.iter().map(one).collect::<Result<_, _>>().map(Some),
            Some(other) => Err(DrafterError::Config(format!(
                "layer_types is {other}, not a list"
            ))),
        }
    }

    /// The base of the rotary frequencies; a drafter has the default type.
    pub(super) fn rope_theta(&self, default: Option<f64>) -> Result<f64, DrafterError> {
        let mut problems = Problems::default();
        let defaults = RopeDefaults {
            theta: default,
            partial: true,
            positions: 1,
            ..RopeDefaults::default()
        };
        let rope = Ropes::resolve(self.0, defaults, &mut problems).full;
        if problems.0.is_empty() && rope != Rope::of_theta(rope.theta) {
            problems.add("a DFlash drafter has the default rotary type over whole heads");
        }
        if problems.0.is_empty() {
            return Ok(rope.theta);
        }
        Err(DrafterError::Config(problems.to_string()))
    }

    pub(super) fn refuse_unsupported(&self) -> Result<(), DrafterError> {
        if self.get("attention_bias") == Some(&Value::Bool(true)) {
            return Err(DrafterError::Config(
                "attention_bias is true; a DFlash drafter has no biases".to_string(),
            ));
        }
        if self.get("hidden_act").is_some_and(|act| act != "silu") {
            return Err(DrafterError::Config(format!(
                "hidden_act is {}; a DFlash drafter has silu",
                self.0["hidden_act"]
            )));
        }
        Ok(())
    }

    /// For a file that a person wrote: a misspelt key must not pass as a default.
    pub(super) fn refuse_unknown(&self) -> Result<(), DrafterError> {
        const KNOWN: &[&str] = &[
            "attention_bias",
            "block_size",
            "dflash_config",
            "head_dim",
            "hidden_act",
            "hidden_size",
            "intermediate_size",
            "layer_types",
            "max_position_embeddings",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "num_target_layers",
            "rms_norm_eps",
            "rope_parameters",
            "rope_scaling",
            "rope_theta",
            "sliding_window",
            "vocab_size",
        ];
        let unknown: Vec<_> = self
            .0
            .keys()
            .filter(|key| !KNOWN.contains(&key.as_str()) && !WITHOUT_EFFECT.contains(&key.as_str()))
            .map(String::as_str)
            .collect();
        if !unknown.is_empty() {
            return Err(DrafterError::Config(format!(
                "--draft-config has unknown keys {}; known are {}",
                unknown.join(", "),
                KNOWN.join(", ")
            )));
        }
        self.refuse_unsupported()
    }
}

fn as_size(key: &str, value: &Value) -> Result<usize, DrafterError> {
    value
        .as_u64()
        .filter(|&v| v <= u64::from(u32::MAX))
        .map(|v| v as usize)
        .ok_or_else(|| {
            DrafterError::Config(format!("{key} is {value}, not a whole number below 2^32"))
        })
}
