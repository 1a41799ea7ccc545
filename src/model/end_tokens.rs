//! Which tokens end an answer, by a model's own files.

use std::path::Path;

use serde::Deserialize;

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Several(Vec<u32>),
}

#[derive(Deserialize)]
struct EndTokens {
    eos_token_id: Option<Ids>,
    /// The text part of a model with more parts.
    text_config: Option<Box<EndTokens>>,
}

/// `eos_token_id` of generation_config.json, else of config.json; none where neither names any.
pub fn end_token_ids(dir: &Path) -> Vec<u32> {
    let read = |name: &str| -> Option<Vec<u32>> {
        let text = std::fs::read(dir.join(name)).ok()?;
        let found: EndTokens = serde_json::from_slice(&text).ok()?;
        let of_text = || found.text_config?.eos_token_id;
        Some(match found.eos_token_id.or_else(of_text)? {
            Ids::One(id) => vec![id],
            Ids::Several(ids) => ids,
        })
    };
    read("generation_config.json")
        .or_else(|| read("config.json"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generation_config_wins() {
        let dir = tempfile::tempdir().unwrap();
        assert!(end_token_ids(dir.path()).is_empty());
        std::fs::write(dir.path().join("config.json"), r#"{"eos_token_id": 2}"#).unwrap();
        assert_eq!(end_token_ids(dir.path()), [2]);
        let wrapped = r#"{"text_config": {"eos_token_id": [5]}}"#;
        std::fs::write(dir.path().join("config.json"), wrapped).unwrap();
        assert_eq!(end_token_ids(dir.path()), [5]);
        let both = r#"{"eos_token_id": [7, 2]}"#;
        std::fs::write(dir.path().join("generation_config.json"), both).unwrap();
        assert_eq!(end_token_ids(dir.path()), [7, 2]);
    }
}
