//! The built-in demo: a target of 1.6 M parameters and conversations whose answers it gave itself.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::DataError;

macro_rules! asset {
    ($name:literal) => {
        (
            $name,
            include_bytes!(concat!("../../assets/", $name)).as_slice(),
        )
    };
}

const FILES: [(&str, &[u8]); 6] = [
    asset!("tiny-target/config.json"),
    asset!("tiny-target/model.safetensors"),
    asset!("tiny-target/tokenizer.json"),
    asset!("tiny-target/tokenizer_config.json"),
    asset!("tiny-target/chat_template.jinja"),
    asset!("demo-chat.jsonl"),
];

/// Where the demo's files lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demo {
    /// The target's folder: config, weights, tokenizer, template.
    pub model_dir: PathBuf,
    /// The conversations.
    pub data: PathBuf,
}

/// Writes the demo's files into `dir`, each under a temporary name first; files that are already
/// there with the same content stay.
///
/// # Errors
/// A file cannot be written.
pub fn write(dir: &Path) -> Result<Demo, DataError> {
    for (name, bytes) in FILES {
        let path = dir.join(name);
        if fs::read(&path).is_ok_and(|there| there == bytes) {
            continue;
        }
        let folder = path.parent().expect("the name was joined to a folder");
        let put = || -> std::io::Result<()> {
            fs::create_dir_all(folder)?;
            let mut file = tempfile::NamedTempFile::new_in(folder)?;
            file.write_all(bytes)?;
            file.persist(&path).map_err(|e| e.error)?;
            Ok(())
        };
        put().map_err(|source| DataError::Write {
            path: path.clone(),
            source,
        })?;
    }
    Ok(Demo {
        model_dir: dir.join("tiny-target"),
        data: dir.join("demo-chat.jsonl"),
    })
}
