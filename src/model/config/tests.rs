use super::*;
use crate::model::rotary::Scaling;

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
            "architecture `GPT2LMHeadModel` is not supported; supported are LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM,",
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
        (
            r#"{"quantization_config": {"quant_method": "fp8"}}"#,
            "the weights are fp8, with weight_block_size null; what works is a scale for each block",
        ),
        (
            r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}"#,
            "weight_block_size [128]",
        ),
        (
            r#"{"attention_bias": 1}"#,
            "attention_bias is 1, not true or false",
        ),
        (
            r#"{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_bias": true}"#,
            "attention_bias is true, but MistralForCausalLM has no such biases",
        ),
        (
            r#"{"use_bidirectional_attention": true}"#,
            "use_bidirectional_attention is true",
        ),
        (r#"{"text_config": 3}"#, "text_config is 3, not an object"),
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
            "factor is missing, which the rotary type `yarn` needs",
        ),
        (
            r#"{"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}"#,
            "layer_types contradicts LlamaForCausalLM, whose layers are all alike",
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
    let error = parse(r#"{"model_type": "llama", "attention_bias": 1}"#).unwrap_err();
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

#[test]
fn mistral_has_a_window_unless_its_config_takes_it_away() {
    let mistral = with(
        LLAMA,
        r#"{"architectures": ["MistralForCausalLM"], "model_type": "mistral"}"#,
    );
    assert_eq!(parse(&mistral).unwrap().windows, [Some(4096); 3]);
    let none = with(&mistral, r#"{"sliding_window": null}"#);
    assert_eq!(parse(&none).unwrap().windows, [None; 3]);
    let given = with(&mistral, r#"{"sliding_window": 7}"#);
    assert_eq!(parse(&given).unwrap().windows, [Some(7); 3]);
}

#[test]
fn qwen2_always_has_biases_and_llama_where_it_says_so() {
    let biases = |text: &str| {
        let config = parse(text).unwrap();
        (config.qkv_bias, config.output_bias, config.mlp_bias)
    };
    assert_eq!(biases(LLAMA), (false, false, false));
    let both = with(LLAMA, r#"{"attention_bias": true, "mlp_bias": true}"#);
    assert_eq!(biases(&both), (true, true, true));
    let qwen2 = with(
        LLAMA,
        r#"{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}"#,
    );
    assert_eq!(biases(&qwen2), (true, false, false));
    let biased: Vec<String> = parse(&qwen2)
        .unwrap()
        .layer_tensors(0)
        .into_iter()
        .filter_map(|tensor| Some(tensor.name.strip_suffix(".bias")?.to_string()))
        .collect();
    assert_eq!(
        biased,
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    );
}

#[test]
fn gemma2_takes_what_its_configs_leave_out() {
    let gemma2 = with(
        LLAMA,
        r#"{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}"#,
    );
    let config = parse(&gemma2).unwrap();
    assert_eq!(config.windows, [Some(4096), None, Some(4096)]);
    assert_eq!(
        (config.attention_cap, config.final_cap),
        (Some(50.0), Some(30.0))
    );
    assert_eq!((config.attention_scale, config.head_dim), (1.0 / 16.0, 256));
    assert_eq!(config.activation, Activation::GeluTanh);
    assert!(config.tie_word_embeddings);
    assert_eq!(
        (config.norm_offset(), config.embedding_scale()),
        (1.0, Some(8.0))
    );
    let uncapped = with(&gemma2, r#"{"attn_logit_softcapping": null}"#);
    assert_eq!(parse(&uncapped).unwrap().attention_cap, None);
}

/// As the text part of a model for pictures and text comes: little more than the sizes.
#[test]
fn gemma3_is_found_inside_a_wrapper() {
    let text = r#"{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {},
        "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 7, "sliding_window": 9, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}}"#;
    let config = parse(text).unwrap();
    assert_eq!(config.family, Family::Gemma3);
    assert_eq!(
        (config.vocab_size, config.num_attention_heads),
        (262_208, 8)
    );
    let mut windows = [Some(9); 7];
    windows[5] = None;
    assert_eq!(config.windows, windows);
    assert_eq!(config.rope.theta, 1e6);
    assert_eq!(config.rope.scaling, Scaling::Linear { factor: 8.0 });
    assert_eq!(config.local_rope, Some(Rope::of_theta(1e4)));
    let other = r#"{"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "mamba"}}"#;
    let error = parse(other).unwrap_err();
    assert!(
        error.contains("model_type `mamba` is not supported"),
        "{error}"
    );
}

#[test]
fn experts_come_where_the_config_puts_them() {
    let moe = with(
        QWEN3,
        r#"{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [3], "decoder_sparse_step": 2}"#,
    );
    let config = parse(&moe).unwrap();
    let experts = config.experts.clone().unwrap();
    assert_eq!(experts.layers, [false, true, false, false]);
    assert_eq!((experts.count, experts.per_token), (6, 2));
    assert!(!experts.normalised);
    assert_eq!(config.sizes().intermediate_size, None);
    // Three layers with an MLP, one whose tokens take two of six experts.
    let attention = 64 * 256 + 128 * 64;
    let mlp = 3 * 3 * 64 * 96 + 64 * 6 + 2 * 3 * 64 * 16;
    assert_eq!(config.layer_parameters(), attention + mlp / 4);
    let names: Vec<String> = config
        .layer_tensors(1)
        .into_iter()
        .map(|tensor| tensor.name)
        .collect();
    for name in ["mlp.gate.weight", "mlp.experts.5.down_proj.weight"] {
        assert!(names.iter().any(|n| n == name), "{name}: {names:?}");
    }
    for (keys, says) in [
        (
            r#"{"num_experts_per_tok": 7}"#,
            "num_experts_per_tok is 7, but there are 6 experts",
        ),
        (r#"{"mlp_only_layers": [4]}"#, "mlp_only_layers holds 4"),
        (r#"{"num_experts": null}"#, "num_experts is missing"),
    ] {
        let error = parse(&with(&moe, keys)).unwrap_err();
        assert!(error.contains(says), "{keys}: {error}");
    }
    let mixtral = with(
        LLAMA,
        r#"{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
            "num_experts_per_tok": 2}"#,
    );
    let config = parse(&mixtral).unwrap();
    assert!(config.experts.as_ref().unwrap().normalised);
    assert_eq!((config.rope.theta, config.windows), (1e6, vec![None; 3]));
}

#[test]
fn phi3_turns_heads_in_part_and_has_fused_projections() {
    let phi3 = with(
        LLAMA,
        r#"{"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75}"#,
    );
    let config = parse(&phi3).unwrap();
    assert_eq!(config.rope.partial, 0.75);
    assert_eq!(config.qkv().names, ["self_attn.qkv_proj"]);
    let scaled = with(&phi3, r#"{"rope_scaling": {"type": "yarn", "factor": 2}}"#);
    let error = parse(&scaled).unwrap_err();
    assert!(
        error.contains("scaled rotary type of Phi3ForCausalLM"),
        "{error}"
    );
}

#[test]
fn fp8_with_block_scales_is_taken() {
    let fp8 = with(
        LLAMA,
        r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64], "fmt": "e4m3"}}"#,
    );
    assert_eq!(parse(&fp8).unwrap().fp8_block, Some([128, 64]));
}
