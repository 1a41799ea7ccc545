use serde_json::Value;
use tempfile::TempDir;

use super::*;
use crate::engine::Engine;
use crate::engine::cpu::Cpu;
use crate::model::testing::Made;

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn refusal(dir: &Path) -> String {
    let error = TargetFiles::open(dir, false)
        .map(|_| ())
        .unwrap_err()
        .to_string();
    let start = format!("{}: ", dir.display());
    error
        .strip_prefix(&start)
        .unwrap_or_else(|| panic!("{error}"))
        .to_string()
}

#[test]
fn one_file_and_shards_hold_the_same_model() {
    let made = Made::new(true, false);
    let (one, cut, bare) = (folder(), folder(), folder());
    made.write(one.path());
    made.write_config(cut.path());
    made.write_shard(cut.path(), "a.safetensors", Dtype::F32, |name| {
        name.contains("layers.1")
    });
    made.write_shard(cut.path(), "b.safetensors", Dtype::F32, |name| {
        !name.contains("layers.1")
    });
    let map: Value = made
        .tensors
        .keys()
        .map(|name| {
            let file = if name.contains("layers.1") { "a" } else { "b" };
            (name.clone(), Value::String(format!("{file}.safetensors")))
        })
        .collect::<serde_json::Map<_, _>>()
        .into();
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    std::fs::write(
        cut.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    let mut without = Made::new(true, false);
    without.tensors = without
        .tensors
        .into_iter()
        .map(|(name, tensor)| {
            (
                name.strip_prefix("model.").unwrap_or(&name).to_string(),
                tensor,
            )
        })
        .collect();
    without.write_config(bare.path());
    without.write_shard(bare.path(), "weights.safetensors", Dtype::F32, |_| true);

    let engine = Cpu::new(1).unwrap();
    let load = |dir: &TempDir| {
        let files = TargetFiles::open(dir.path(), false).unwrap();
        let names = ["self_attn.q_proj", "self_attn.k_proj"].map(|part| files.layer_name(1, part));
        let stacked = files.stacked(&engine, &names).unwrap();
        (engine.download_half(stacked.view()).unwrap(), files.hash())
    };
    let of = |name: &str| {
        made.tensors[&format!("model.layers.1.self_attn.{name}.weight")]
            .1
            .clone()
    };
    let expected = [of("q_proj"), of("k_proj")].concat();
    let (one, cut, bare) = (load(&one), load(&cut), load(&bare));
    assert_eq!(one.0, expected);
    assert_eq!(one, cut, "shards do not matter, to the hash neither");
    assert_eq!(bare.0, expected);
}

#[test]
fn half_precision_is_widened() {
    let made = Made::new(false, true);
    let engine = Cpu::new(1).unwrap();
    for dtype in [Dtype::F16, Dtype::BF16] {
        let dir = folder();
        made.write_config(dir.path());
        made.write_shard(dir.path(), "model.safetensors", dtype, |_| true);
        let files = TargetFiles::open(dir.path(), false).unwrap();
        let got = engine
            .download_half(files.embedding(&engine).unwrap().view())
            .unwrap();
        let norm = engine
            .download_float(files.final_norm(&engine).unwrap().view())
            .unwrap();
        for (got, name) in [
            (got, "model.embed_tokens.weight"),
            (norm, "model.norm.weight"),
        ] {
            for (got, want) in got.iter().zip(&made.tensors[name].1) {
                assert!(
                    (got - want).abs() <= want.abs() / 200.0,
                    "{dtype}: {got} {want}"
                );
            }
        }
    }
}

#[test]
fn the_vocabulary_is_the_embeddings_rows() {
    let dir = folder();
    let mut made = Made::new(false, true);
    made.add("model.embed_tokens.weight", &[48, 24]);
    made.write(dir.path());
    assert_eq!(
        TargetFiles::open(dir.path(), false)
            .unwrap()
            .config()
            .vocab_size,
        48
    );
}

#[test]
fn the_hash_follows_every_number_and_the_config() {
    let hash = |made: &Made| {
        let dir = folder();
        made.write(dir.path());
        TargetFiles::open(dir.path(), false).unwrap().hash()
    };
    let mut made = Made::new(false, true);
    let first = hash(&made);
    assert_eq!(hash(&made), first);
    assert_eq!(first.len(), 64);
    made.tensors.get_mut("model.norm.weight").unwrap().1[3] += 1e-3;
    let second = hash(&made);
    assert_ne!(second, first);
    made.config["rms_norm_eps"] = serde_json::json!(1e-6);
    assert_ne!(hash(&made), second);
}

#[test]
fn a_missing_head_needs_a_flag() {
    let dir = folder();
    let mut made = Made::new(false, false);
    made.tensors.remove("lm_head.weight");
    made.write(dir.path());
    assert_eq!(
        refusal(dir.path()),
        "has no lm_head.weight though tie_word_embeddings is false; --assume-tied uses the embedding as head"
    );
    let files = TargetFiles::open(dir.path(), true).unwrap();
    assert!(files.config().tie_word_embeddings);
    assert!(files.lm_head(&Cpu::new(1).unwrap()).unwrap().is_none());
}

#[test]
fn folders_without_weights_are_refused() {
    assert!(refusal(Path::new("/nowhere")).starts_with("is no folder"));
    let dir = folder();
    let error = refusal(dir.path());
    assert!(
        error.contains("config.json: No such file") && error.contains("has no *.safetensors"),
        "{error}"
    );
    let made = Made::new(false, true);
    made.write_config(dir.path());
    std::fs::write(dir.path().join("pytorch_model.bin"), "x").unwrap();
    assert!(refusal(dir.path()).contains("pytorch_model.bin is of a format that is not read"));
    for name in ["a.safetensors", "b.safetensors"] {
        made.write_shard(dir.path(), name, Dtype::F32, |_| true);
    }
    assert!(
        refusal(dir.path()).contains("has 2 *.safetensors but no model.safetensors.index.json")
    );
}

#[test]
fn all_missing_and_unfetched_shards_are_named() {
    let dir = folder();
    let mut made = Made::new(false, true);
    made.config["quantization_config"] = serde_json::json!({"quant_method": "gptq"});
    made.write_config(dir.path());
    let map = serde_json::json!({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"}});
    std::fs::write(
        dir.path().join("model.safetensors.index.json"),
        map.to_string(),
    )
    .unwrap();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n";
    std::fs::write(dir.path().join("2.safetensors"), pointer).unwrap();
    let error = refusal(dir.path());
    assert!(error.starts_with("3 problems\n"), "{error}");
    assert!(error.contains("quantised (gptq)"), "{error}");
    assert!(
        error.contains("names files that are missing: 1.safetensors, 3.safetensors"),
        "{error}"
    );
    let hint = format!(
        "2.safetensors is a Git LFS pointer, not the weights; run `git lfs pull` in {}",
        dir.path().display()
    );
    assert!(error.contains(&hint), "{error}");
    for (text, says) in [
        ("{", "EOF"),
        ("{}", "has no object weight_map"),
        (
            r#"{"weight_map": {"a": "../x"}}"#,
            "not a file of the folder",
        ),
    ] {
        std::fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        assert!(refusal(dir.path()).contains(says), "{text}");
    }
}

#[test]
fn damaged_files_are_refused() {
    let dir = folder();
    let made = Made::new(false, true);
    made.write(dir.path());
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    for (bytes, says) in [
        (&whole[..whole.len() - 1], "model.safetensors is truncated"),
        (&whole[..100], "model.safetensors is truncated"),
        (&whole[..3], "model.safetensors is no safetensors file"),
        (&b""[..], "model.safetensors"),
        (
            &b"PK\x03\x04 something else entirely"[..],
            "model.safetensors is no safetensors file",
        ),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let error = refusal(dir.path());
        assert!(error.contains(says) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn tensors_that_do_not_fit_the_config_are_refused() {
    let says = |change: &dyn Fn(&mut Made)| {
        let dir = folder();
        let mut made = Made::new(false, false);
        change(&mut made);
        made.write(dir.path());
        refusal(dir.path())
    };
    let error = says(&|made| {
        made.tensors.remove("model.layers.2.mlp.up_proj.weight");
    });
    assert_eq!(error, "lacks tensors: model.layers.2.mlp.up_proj.weight");
    let error = says(&|made| made.add("model.layers.0.self_attn.k_proj.weight", &[32, 24]));
    assert!(
        error.contains("another shape")
            && error.contains("k_proj.weight is [32, 24], not [16, 24]"),
        "{error}"
    );
    let error = says(&|made| made.add("lm_head.weight", &[41, 24]));
    assert!(
        error.contains("lm_head.weight is [41, 24], not [40, 24]"),
        "{error}"
    );
    let error = says(&|made| made.add("model.layers.0.self_attn.q_proj.bias", &[32]));
    assert_eq!(
        error,
        "has tensors that LlamaForCausalLM with this config.json does not have: model.layers.0.self_attn.q_proj.bias"
    );
    let error = says(&|made| made.add("model.layers.0.mlp.up_proj.qweight", &[40, 24]));
    assert_eq!(
        error,
        "has packed or quantised weights, which are not implemented: model.layers.0.mlp.up_proj.qweight"
    );
    let error = says(&|made| {
        made.tensors.retain(|name, _| !name.contains("mlp"));
    });
    assert!(error.ends_with("and 1 more"), "{error}");

    let dir = folder();
    let made = Made::new(false, true);
    made.write_config(dir.path());
    made.write_shard(dir.path(), "model.safetensors", Dtype::F64, |_| true);
    let error = refusal(dir.path());
    assert!(
        error.contains("are no float32, float16 or bfloat16: model.embed_tokens.weight (F64)"),
        "{error}"
    );
}

#[test]
fn what_a_forward_pass_does_not_need_may_be_there() {
    let dir = folder();
    let mut made = Made::new(false, false);
    made.add("model.layers.0.self_attn.rotary_emb.inv_freq", &[4]);
    made.add("model.layers.3.mlp.up_proj.weight", &[40, 24]);
    made.add("vision_tower.layers.0.bias", &[4]);
    made.write(dir.path());
    TargetFiles::open(dir.path(), false).unwrap();
}

#[test]
fn the_text_part_of_a_wrapper_is_found_under_its_prefixes() {
    let engine = Cpu::new(1).unwrap();
    for (body, head) in [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("", "lm_head.weight"),
    ] {
        let dir = folder();
        let mut made = Made::new(true, false);
        let expected = made.tensors["lm_head.weight"].1.clone();
        made.tensors = made
            .tensors
            .into_iter()
            .map(|(name, tensor)| match name.strip_prefix("model.") {
                Some(rest) => (format!("{body}{rest}"), tensor),
                None => (head.to_string(), tensor),
            })
            .collect();
        made.add("vision_tower.patch_embed.weight", &[2, 2]);
        let text = made.config.take();
        made.config = serde_json::json!({"architectures": ["SomeForConditionalGeneration"], "text_config": text});
        made.write(dir.path());
        let files = TargetFiles::open(dir.path(), false).unwrap();
        let got = files.lm_head(&engine).unwrap().unwrap();
        assert_eq!(
            engine.download_half(got.view()).unwrap(),
            expected,
            "{body}"
        );
        assert_eq!(
            files.layer_name(1, "mlp.up_proj"),
            format!("{body}layers.1.mlp.up_proj")
        );
    }
}

/// A Qwen3 whose matrices are 8-bit numbers with a scale for each block of 16 by 10.
fn fp8() -> Made {
    let mut made = Made::new(true, true);
    made.config["quantization_config"] =
        serde_json::json!({"quant_method": "fp8", "weight_block_size": [16, 10]});
    let matrices: Vec<(String, Vec<usize>)> = made
        .tensors
        .iter()
        .filter(|(name, _)| is_fp8(name))
        .map(|(name, (shape, _))| (name.clone(), shape.clone()))
        .collect();
    for (name, shape) in matrices {
        made.add(
            &format!("{name}_scale_inv"),
            &[shape[0].div_ceil(16), shape[1].div_ceil(10)],
        );
        // Bits of numbers between 0.5 and 2, both signs.
        let bits = &mut made.tensors.get_mut(&name).unwrap().1;
        for (i, bits) in bits.iter_mut().enumerate() {
            *bits = (0x30 + i % 16 + if i % 3 == 0 { 0x80 } else { 0 }) as f32;
        }
    }
    made
}

fn is_fp8(name: &str) -> bool {
    name.contains("_proj.weight") && !name.ends_with("scale_inv")
}

fn fp8_type(name: &str) -> Dtype {
    match name {
        name if is_fp8(name) => Dtype::F8_E4M3,
        name if name.ends_with("scale_inv") && name.contains("layers.1") => Dtype::BF16,
        _ => Dtype::F32,
    }
}

#[test]
fn fp8_blocks_are_multiplied_with_their_scales() {
    let engine = Cpu::new(1).unwrap();
    let dir = folder();
    let made = fp8();
    made.write_config(dir.path());
    made.write_typed(dir.path(), fp8_type);
    let files = TargetFiles::open(dir.path(), false).unwrap();
    for layer in [0, 1] {
        let names = ["k_proj", "o_proj"].map(|part| format!("self_attn.{part}"));
        for part in &names {
            let name = format!("model.layers.{layer}.{part}.weight");
            let (shape, bits) = &made.tensors[&name];
            let scales = &made.tensors[&format!("{name}_scale_inv")].1;
            let got = files
                .stacked(&engine, &[files.layer_name(layer, part)])
                .unwrap();
            let got = engine.download_half(got.view()).unwrap();
            for (i, (got, bits)) in got.iter().zip(bits).enumerate() {
                let (row, col) = (i / shape[1], i % shape[1]);
                let bits = *bits as u8;
                let size =
                    2f32.powi(i32::from(bits >> 3 & 15) - 7) * (1.0 + f32::from(bits & 7) / 8.0);
                let number = if bits & 0x80 == 0 { size } else { -size };
                let want = number * scales[row / 16 * shape[1].div_ceil(10) + col / 10];
                assert!(
                    (got - want).abs() <= want.abs() / 200.0,
                    "{name} [{row}, {col}]: {got} {want}"
                );
            }
        }
    }
}

#[test]
fn fp8_without_its_scales_is_refused() {
    let says = |change: &dyn Fn(&mut Made)| {
        let dir = folder();
        let mut made = fp8();
        change(&mut made);
        made.write_config(dir.path());
        made.write_typed(dir.path(), fp8_type);
        refusal(dir.path())
    };
    let scales = "model.layers.0.self_attn.k_proj.weight_scale_inv";
    let error = says(&|made| {
        made.tensors.remove(scales);
    });
    assert_eq!(error, format!("lacks tensors: {scales}"));
    let error = says(&|made| made.add(scales, &[1, 2]));
    assert!(
        error.contains(&format!("{scales} is [1, 2], not [1, 3]")),
        "{error}"
    );
    let error = says(&|made| made.config["quantization_config"] = Value::Null);
    assert!(error.contains("k_proj.weight (F8_E4M3)"), "{error}");
    assert!(error.contains("packed or quantised weights"), "{error}");
}

/// Bytes of a file that are in this process's memory.
fn resident(path: &Path) -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut within = false;
    let mut kilobytes = 0;
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        if !first.ends_with(':') {
            within = line.ends_with(path.to_str().unwrap());
        } else if within && first == "Rss:" {
            let size = line.split_whitespace().nth(1).unwrap();
            kilobytes += size.parse::<usize>().unwrap();
        }
    }
    kilobytes << 10
}

#[test]
fn what_was_read_does_not_stay_in_memory() {
    const ROWS: usize = 40_000;
    let dir = folder();
    let mut made = Made::new(false, true);
    made.add("model.embed_tokens.weight", &[ROWS, 24]);
    made.write(dir.path());
    let files = TargetFiles::open(dir.path(), false).unwrap();
    let path = dir.path().join("model.safetensors");
    let size = std::fs::metadata(&path).unwrap().len() as usize;
    files.hash();
    assert!(
        resident(&path) < size / 4,
        "after the hash: {} of {size}",
        resident(&path)
    );
    files.embedding(&Cpu::new(1).unwrap()).unwrap();
    assert!(
        resident(&path) < size / 4,
        "after loading: {} of {size}",
        resident(&path)
    );
}
