//! The configs of well-known models under `models/configs` are read as they stand, and their drafters fit them.

use std::path::{Path, PathBuf};

use slipstream::model::drafter::{DrafterConfig, default_target_layer_ids};

fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/configs");
    let mut found: Vec<PathBuf> = std::fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    found.sort();
    found
}

#[test]
fn every_target_has_a_drafter_of_its_shape() {
    let folders = folders();
    assert!(folders.len() >= 3);
    for folder in folders {
        let json = |file: &str| -> serde_json::Value {
            serde_json::from_slice(&std::fs::read(folder.join(file)).unwrap()).unwrap()
        };
        let target = json("config.json");
        let size = |field: &str| target[field].as_u64().unwrap() as usize;
        let text = std::fs::read_to_string(folder.join("dflash.json")).unwrap();
        let drafter = DrafterConfig::from_json(&text).unwrap();
        let name = folder.display();
        for (of_drafter, field) in [
            (drafter.hidden_size, "hidden_size"),
            (drafter.intermediate_size, "intermediate_size"),
            (drafter.vocab_size, "vocab_size"),
            (drafter.num_attention_heads, "num_attention_heads"),
            (drafter.num_key_value_heads, "num_key_value_heads"),
            (drafter.num_target_layers, "num_hidden_layers"),
        ] {
            assert_eq!(of_drafter, size(field), "{name}: {field}");
        }
        assert!(
            (drafter.mask_token_id as usize) < size("vocab_size"),
            "{name}"
        );
        let ids = default_target_layer_ids(size("num_hidden_layers"), 5).unwrap();
        assert_eq!(drafter.target_layer_ids, ids, "{name}");
        // The file is what an export of this drafter would say.
        assert_eq!(drafter.to_json("bfloat16"), json("dflash.json"), "{name}");
    }
}
