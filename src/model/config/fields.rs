//! Typed access to the keys of a target's `config.json`, and what was found wrong with them.

use serde_json::{Map, Value};

use super::family::{Biases, FAMILIES, Traits, supported};
use super::{Activation, ExpertsConfig, TargetConfig, Windows};
use crate::model::error::Problems;
use crate::model::rotary::{RopeDefaults, Ropes, Scaling};

/// The keys of a config.
pub(super) struct Fields {
    map: Map<String, Value>,
    pub(super) problems: Problems,
    /// Whether all sizes so far were read: what follows from a missing one is no problem of its own.
    sized: bool,
}

impl Fields {
    /// The config itself, or its text part where it has several parts.
    pub(super) fn new(mut map: Map<String, Value>) -> Self {
        let mut problems = Problems::default();
        match map.remove("text_config") {
            None | Some(Value::Null) => {}
            Some(Value::Object(mut text)) => {
                for key in [
                    "tie_word_embeddings",
                    "quantization_config",
                    "compression_config",
                ] {
                    if let Some(value) = map.remove(key) {
                        text.entry(key).or_insert(value);
                    }
                }
                map = text;
            }
            Some(other) => problems.add(format!("text_config is {other}, not an object")),
        }
        Self {
            map,
            problems,
            sized: true,
        }
    }

    pub(super) fn config(&mut self) -> TargetConfig {
        let traits = self.family();
        self.take_defaults(traits);
        let fp8_block = self.quantization();
        if self.flag("use_bidirectional_attention") {
            self.problems
                .add("use_bidirectional_attention is true, which is not implemented");
        }
        let hidden_size = self.size("hidden_size");
        let heads = self.size("num_attention_heads");
        let layers = self.size("num_hidden_layers");
        let kv = if traits.head_norms {
            self.size("num_key_value_heads")
        } else {
            self.size_or("num_key_value_heads", heads)
        };
        if self.sized && !heads.is_multiple_of(kv) {
            self.problems.add(format!(
                "num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}"
            ));
        }
        let head_dim = self.head_dim(traits, hidden_size, heads);
        let intermediate_size = self.size("intermediate_size");
        let positions = self.size("max_position_embeddings");
        let ropes = self.ropes(traits, positions);
        let (qkv_bias, output_bias, mlp_bias) = self.biases(traits);
        TargetConfig {
            family: traits.family,
            hidden_size,
            intermediate_size,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: kv,
            head_dim,
            vocab_size: self.size("vocab_size"),
            rms_norm_eps: self.positive("rms_norm_eps"),
            rope: ropes.full,
            local_rope: ropes.local,
            max_position_embeddings: positions,
            tie_word_embeddings: self.flag("tie_word_embeddings"),
            windows: self.windows(traits, layers),
            activation: self.activation(traits),
            attention_scale: if traits.gemma {
                self.positive("query_pre_attn_scalar").powf(-0.5)
            } else {
                (head_dim as f64).powf(-0.5)
            },
            attention_cap: self.optional("attn_logit_softcapping"),
            final_cap: self.optional("final_logit_softcapping"),
            qkv_bias,
            output_bias,
            mlp_bias,
            experts: self.experts(traits, layers),
            fp8_block,
        }
    }

    fn take_defaults(&mut self, traits: &Traits) {
        let Ok(Value::Object(defaults)) = serde_json::from_str(traits.defaults) else {
            unreachable!("the defaults of {} are an object", traits.architecture);
        };
        for (key, value) in defaults {
            self.map.entry(key).or_insert(value);
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

    /// A number above 0, which has to be there.
    fn positive(&mut self, key: &str) -> f64 {
        if self.get(key).is_none() {
            self.problems.add(format!("{key} is missing"));
            return 1.0;
        }
        self.optional(key).unwrap_or(1.0)
    }

    /// A number above 0.
    fn optional(&mut self, key: &str) -> Option<f64> {
        let value = self.get(key)?;
        let number = value.as_f64().filter(|&x| x.is_finite() && x > 0.0);
        if number.is_none() {
            let problem = format!("{key} is {value}, not a positive number");
            self.problems.add(problem);
        }
        number
    }

    fn family(&mut self) -> &'static Traits {
        let supported = supported();
        let named = |key: &str, value: Option<&Value>, name: fn(&Traits) -> &'static str| {
            let text = value?.as_str().unwrap_or_default();
            let found = FAMILIES.iter().find(|traits| name(traits) == text);
            Some(found.ok_or_else(|| {
                format!("{key} `{text}` is not supported; supported are {supported}")
            }))
        };
        let first = self.get("architectures").and_then(|list| list.get(0));
        let by_architecture = named("architecture", first, |traits| traits.architecture);
        let by_type = named("model_type", self.get("model_type"), |traits| {
            traits.model_type
        });
        match (by_architecture, by_type) {
            (Some(Err(problem)), _) | (None, Some(Err(problem))) => {
                self.problems.add(problem);
                &FAMILIES[0]
            }
            (Some(Ok(a)), Some(Ok(b))) if a.family != b.family => {
                self.problems.add(format!(
                    "architecture {} contradicts model_type {}",
                    a.architecture, b.model_type
                ));
                a
            }
            (Some(Ok(traits)), Some(Err(problem))) => {
                self.problems.add(problem);
                traits
            }
            (Some(Ok(traits)), _) | (None, Some(Ok(traits))) => traits,
            (None, None) => {
                self.problems.add(format!(
                    "neither architectures nor model_type is given; supported are {supported}"
                ));
                &FAMILIES[0]
            }
        }
    }

    /// How weights are stored where they are not plain numbers: rows and columns of a block of fp8 numbers with
    /// one scale. Every other format is a problem.
    fn quantization(&mut self) -> Option<[usize; 2]> {
        let mut found = None;
        for key in ["quantization_config", "compression_config"] {
            let Some(quantization) = self.get(key) else {
                continue;
            };
            let method = quantization.get("quant_method").and_then(Value::as_str);
            let method = method.unwrap_or("of an unnamed method").to_string();
            let block = quantization.get("weight_block_size").cloned();
            let sizes = block.as_ref().and_then(Value::as_array).and_then(|sizes| {
                let size = |i: usize| sizes.get(i)?.as_u64().filter(|&n| n > 0);
                Some([size(0)? as usize, size(1)? as usize])
            });
            match (method.as_str(), block, sizes) {
                ("fp8", Some(_), Some(sizes)) => found = Some(sizes),
                ("fp8", block, _) => {
                    let block = block.unwrap_or(Value::Null);
                    self.problems.add(format!(
                        "{key} says the weights are fp8, with weight_block_size {block}; what works is a scale for each block, as [128, 128]"
                    ));
                }
                _ => self.problems.add(format!(
                    "{key} says the weights are quantised ({method}), which is not implemented; use the float32, float16 or bfloat16 model, or fp8 with block scales"
                )),
            }
        }
        found
    }

    fn head_dim(&mut self, traits: &Traits, hidden_size: usize, heads: usize) -> usize {
        let head_dim = match (self.get("head_dim"), traits.head_dim) {
            (Some(_), _) => self.size("head_dim"),
            (None, Some(dim)) => dim,
            (None, None) => {
                if self.sized && !hidden_size.is_multiple_of(heads) {
                    self.problems.add(format!(
                        "head_dim is missing and num_attention_heads {heads} does not divide hidden_size {hidden_size}"
                    ));
                }
                hidden_size / heads
            }
        };
        if self.sized && (!head_dim.is_multiple_of(2) || head_dim > 512) {
            self.problems.add(format!(
                "head_dim {head_dim} is not an even number up to 512"
            ));
        }
        head_dim
    }

    fn ropes(&mut self, traits: &Traits, positions: usize) -> Ropes {
        let defaults = RopeDefaults {
            theta: traits.rope_theta,
            local_theta: traits.local_rope_theta,
            partial: traits.partial_rotary,
            positions,
        };
        let ropes = Ropes::resolve(&self.map, defaults, &mut self.problems);
        if traits.partial_rotary && ropes.full.scaling != Scaling::Default {
            self.problems.add(format!(
                "a scaled rotary type of {} is not implemented; what works is default",
                traits.architecture
            ));
        }
        ropes
    }

    /// On queries, keys and values; on the attention's output; on the MLP.
    fn biases(&mut self, traits: &Traits) -> (bool, bool, bool) {
        let attention = self.flag("attention_bias");
        let mlp = self.flag("mlp_bias");
        let (qkv, output) = match traits.biases {
            Biases::None => (false, false),
            Biases::Qkv => (true, false),
            Biases::Attention | Biases::AttentionAndMlp => (attention, attention),
        };
        for (key, given, works) in [
            ("attention_bias", attention, qkv),
            ("mlp_bias", mlp, traits.biases == Biases::AttentionAndMlp),
        ] {
            if given && !works {
                self.problems.add(format!(
                    "{key} is true, but {} has no such biases",
                    traits.architecture
                ));
            }
        }
        (qkv, output, mlp)
    }

    fn activation(&mut self, traits: &Traits) -> Activation {
        let key = if traits.gemma {
            "hidden_activation"
        } else {
            "hidden_act"
        };
        match self.get(key) {
            None => traits.activation,
            Some(Value::String(name)) if name == "silu" => Activation::Silu,
            Some(Value::String(name)) if name == "gelu_pytorch_tanh" => Activation::GeluTanh,
            Some(other) => {
                let problem = format!(
                    "{key} is {other}, which is not implemented; what works is \"silu\" and \"gelu_pytorch_tanh\""
                );
                self.problems.add(problem);
                traits.activation
            }
        }
    }

    fn experts(&mut self, traits: &Traits, layers: usize) -> Option<ExpertsConfig> {
        let names = traits.experts?;
        let [first, second] = names.count;
        let count = match (self.get(first), self.get(second)) {
            (None, Some(_)) => self.size(second),
            _ => self.size(first),
        };
        let per_token = self.size("num_experts_per_tok");
        if self.sized && per_token > count {
            self.problems.add(format!(
                "num_experts_per_tok is {per_token}, but there are {count} experts"
            ));
        }
        let every = self.size_or("decoder_sparse_step", 1);
        let mut with: Vec<bool> = (1..=layers).map(|n| n.is_multiple_of(every)).collect();
        match self.get("mlp_only_layers").cloned() {
            None => {}
            Some(Value::Array(ids)) => {
                for id in &ids {
                    match id.as_u64().and_then(|id| with.get_mut(id as usize)) {
                        Some(with) => *with = false,
                        None => self
                            .problems
                            .add(format!("mlp_only_layers holds {id}, which is no layer")),
                    }
                }
            }
            Some(other) => self
                .problems
                .add(format!("mlp_only_layers is {other}, not a list")),
        }
        Some(ExpertsConfig {
            count,
            per_token,
            intermediate_size: self.size(names.size),
            normalised: !names.may_keep_weights || self.flag("norm_topk_prob"),
            layers: with,
        })
    }

    /// Sliding windows by `layer_types`, or by the family's rule.
    fn windows(&mut self, traits: &Traits, layers: usize) -> Vec<Option<usize>> {
        let by_types = self.layer_types(layers);
        let by_rule = |fields: &mut Self| -> Vec<Option<usize>> {
            let window = |fields: &mut Self, on: bool| on.then(|| fields.size("sliding_window"));
            match traits.windows {
                Windows::Never => vec![None; layers],
                Windows::All => {
                    let given = fields.get("sliding_window").is_some();
                    vec![window(fields, given); layers]
                }
                Windows::Switched => {
                    let on = fields.flag("use_sliding_window");
                    vec![window(fields, on); layers]
                }
                Windows::HighLayers => {
                    let on = fields.flag("use_sliding_window");
                    let window = window(fields, on);
                    let full = fields.size_or("max_window_layers", 28);
                    (0..layers).map(|i| window.filter(|_| i >= full)).collect()
                }
                Windows::AllButEvery(default) => {
                    let every = fields.size_or("sliding_window_pattern", default);
                    let window = window(fields, true);
                    (1..=layers)
                        .map(|n| window.filter(|_| !n.is_multiple_of(every)))
                        .collect()
                }
            }
        };
        let fixed = matches!(
            traits.windows,
            Windows::Never | Windows::All | Windows::Switched
        );
        match by_types {
            None => by_rule(self),
            Some(windows) if fixed && self.problems.0.is_empty() => {
                if windows != by_rule(self) {
                    self.problems.add(format!(
                        "layer_types contradicts {}, whose layers are all alike",
                        traits.architecture
                    ));
                }
                windows
            }
            Some(windows) => windows,
        }
    }

    fn layer_types(&mut self, layers: usize) -> Option<Vec<Option<usize>>> {
        let types = match self.get("layer_types").cloned()? {
            Value::Array(types) => types,
            other => {
                self.problems
                    .add(format!("layer_types is {other}, not a list"));
                return None;
            }
        };
        if types.len() != layers {
            self.problems.add(format!(
                "layer_types has {} entries for {layers} layers",
                types.len()
            ));
        }
        let mut windows = vec![None; layers];
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
        Some(windows)
    }
}
