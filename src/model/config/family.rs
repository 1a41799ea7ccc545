//! The families of targets: everything in which their networks differ, in one table.

use super::{Activation, Windows};

/// Which network a config describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 2, 3, 3.1 and 3.2.
    Llama,
    /// Mistral: a sliding window in all layers.
    Mistral,
    /// Mixtral: Mistral with routed experts.
    Mixtral,
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3: RMSNorm on each head of queries and keys.
    Qwen3,
    /// Qwen3 with routed experts.
    Qwen3Moe,
    /// Gemma 2: capped scores and logits, norms around attention and MLP, alternating windows.
    Gemma2,
    /// Gemma 3, its text part: norms on heads, five layers with a window for each one without.
    Gemma3,
    /// Phi-3 and Phi-4: fused projections, heads that turn in part.
    Phi3,
}

/// Where a layer has biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Biases {
    /// Nowhere.
    None,
    /// On queries, keys and values.
    Qkv,
    /// On all four products of the attention where `attention_bias` says so.
    Attention,
    /// As [`Biases::Attention`], and on the MLP where `mlp_bias` says so.
    AttentionAndMlp,
}

/// What a family's routed experts are called.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertNames {
    /// Key of their number, by its names in older and newer configs.
    pub count: [&'static str; 2],
    /// Key of the inner size of one.
    pub size: &'static str,
    /// Whether `norm_topk_prob` decides that the weights of the chosen sum to 1; else they do.
    pub may_keep_weights: bool,
    /// The router's and the experts' tensors: the block, then gate, up and down.
    pub block: &'static str,
    pub parts: [&'static str; 3],
}

/// Where a family differs from the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits {
    pub family: Family,
    /// In `architectures`.
    pub architecture: &'static str,
    /// In `model_type`.
    pub model_type: &'static str,
    /// Values of keys that this family's configs leave out, as JSON. A key that is there and null stays null.
    pub defaults: &'static str,
    /// Rotary base where the config has none.
    pub rope_theta: Option<f64>,
    /// Rotary base of layers with a window, where they have their own.
    pub local_rope_theta: Option<f64>,
    /// Whether heads may turn in part.
    pub partial_rotary: bool,
    /// Head size where the config has none; else the hidden size by the number of heads.
    pub head_dim: Option<usize>,
    /// RMSNorm on each head of queries and keys.
    pub head_norms: bool,
    /// Norms multiply with 1 + weight; there are norms behind attention and MLP too; embeddings are scaled by
    /// the root of the hidden size; the attention's scale comes from `query_pre_attn_scalar`.
    pub gemma: bool,
    pub biases: Biases,
    /// Queries, keys and values are one tensor, and gate and up another.
    pub fused: bool,
    pub windows: Windows,
    /// Activation where the config names none.
    pub activation: Activation,
    pub experts: Option<ExpertNames>,
}

const LLAMA: Traits = Traits {
    family: Family::Llama,
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    defaults: "{}",
    rope_theta: Some(10_000.0),
    local_rope_theta: None,
    partial_rotary: false,
    head_dim: None,
    head_norms: false,
    gemma: false,
    biases: Biases::AttentionAndMlp,
    fused: false,
    windows: Windows::Never,
    activation: Activation::Silu,
    experts: None,
};

const MISTRAL: Traits = Traits {
    family: Family::Mistral,
    architecture: "MistralForCausalLM",
    model_type: "mistral",
    defaults: r#"{"sliding_window": 4096}"#,
    biases: Biases::None,
    windows: Windows::All,
    ..LLAMA
};

const QWEN3: Traits = Traits {
    family: Family::Qwen3,
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    rope_theta: None,
    head_dim: Some(128),
    head_norms: true,
    biases: Biases::Attention,
    windows: Windows::HighLayers,
    ..LLAMA
};

const GEMMA2: Traits = Traits {
    family: Family::Gemma2,
    architecture: "Gemma2ForCausalLM",
    model_type: "gemma2",
    defaults: r#"{"tie_word_embeddings": true, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "head_dim": 256, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}"#,
    gemma: true,
    biases: Biases::Attention,
    windows: Windows::AllButEvery(2),
    activation: Activation::GeluTanh,
    ..LLAMA
};

/// All families.
pub(super) const FAMILIES: [Traits; 9] = [
    LLAMA,
    MISTRAL,
    Traits {
        family: Family::Mixtral,
        architecture: "MixtralForCausalLM",
        model_type: "mixtral",
        defaults: "{}",
        rope_theta: Some(1e6),
        experts: Some(ExpertNames {
            count: ["num_local_experts", "num_experts"],
            size: "intermediate_size",
            may_keep_weights: false,
            block: "block_sparse_moe",
            parts: ["w1", "w3", "w2"],
        }),
        ..MISTRAL
    },
    Traits {
        family: Family::Qwen2,
        architecture: "Qwen2ForCausalLM",
        model_type: "qwen2",
        biases: Biases::Qkv,
        windows: Windows::HighLayers,
        ..LLAMA
    },
    QWEN3,
    Traits {
        family: Family::Qwen3Moe,
        architecture: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        windows: Windows::Switched,
        experts: Some(ExpertNames {
            count: ["num_experts", "num_local_experts"],
            size: "moe_intermediate_size",
            may_keep_weights: true,
            block: "mlp",
            parts: ["gate_proj", "up_proj", "down_proj"],
        }),
        ..QWEN3
    },
    GEMMA2,
    Traits {
        family: Family::Gemma3,
        architecture: "Gemma3ForCausalLM",
        model_type: "gemma3_text",
        defaults: r#"{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096}"#,
        rope_theta: Some(1e6),
        local_rope_theta: Some(1e4),
        head_norms: true,
        windows: Windows::AllButEvery(6),
        ..GEMMA2
    },
    Traits {
        family: Family::Phi3,
        architecture: "Phi3ForCausalLM",
        model_type: "phi3",
        partial_rotary: true,
        biases: Biases::None,
        fused: true,
        windows: Windows::All,
        ..LLAMA
    },
];

impl Family {
    pub(super) fn traits(self) -> &'static Traits {
        FAMILIES
            .iter()
            .find(|traits| traits.family == self)
            .expect("every family is in the table")
    }
}

/// The architectures that work, for a message.
pub(super) fn supported() -> String {
    FAMILIES.map(|traits| traits.architecture).join(", ")
}
