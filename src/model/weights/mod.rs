//! A target's files: `config.json` and safetensors, memory-mapped, checked whole before anything is loaded.

mod check;
mod dummy;
mod fp8;
mod load;
mod shards;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use safetensors::Dtype;

use super::config::TargetConfig;
use super::error::{ModelError, Problems};
use crate::engine::Encoding;
use shards::{Entry, Shard, open_shard, shard_paths};

/// Tensors up to this size go into the hash whole, larger ones by [`SAMPLES`] pieces of [`SAMPLE`] bytes.
const HASHED_WHOLE: usize = 1 << 20;
const SAMPLES: usize = 16;
const SAMPLE: usize = 1 << 16;

/// The files of a target, every tensor's place and shape checked against the config.
pub struct TargetFiles {
    dir: PathBuf,
    config: TargetConfig,
    config_text: Vec<u8>,
    shards: Vec<Shard>,
    tensors: HashMap<String, Entry>,
    /// Before `embed_tokens`, `layers` and `norm`.
    prefix: &'static str,
    /// The head's tensor, where there is one.
    head: &'static str,
}

impl TargetFiles {
    /// Looks at the files in `dir`. `assume_tied` takes the embedding as head where an untied model lacks one.
    ///
    /// # Errors
    /// Everything that is wrong with the config and the files, in one [`ModelError::Refused`].
    pub fn open(dir: &Path, assume_tied: bool) -> Result<Self, ModelError> {
        let mut problems = Problems::default();
        if !dir.is_dir() {
            problems.add("is no folder; a model folder holds config.json and *.safetensors");
            problems.refuse(dir)?;
        }
        let config = match TargetConfig::read(dir) {
            Ok(config) => Some(config),
            Err(ModelError::Refused { problems: some, .. }) => {
                for problem in some.0 {
                    problems.add(format!("config.json: {problem}"));
                }
                None
            }
            Err(ModelError::Io { error, .. }) => {
                problems.add(format!("config.json: {error}"));
                None
            }
            Err(other) => return Err(other),
        };
        let mut shards = Vec::new();
        let mut tensors = HashMap::new();
        for path in shard_paths(dir, &mut problems) {
            open_shard(path, &mut shards, &mut tensors, &mut problems);
        }
        let Some(config) = config.filter(|_| problems.0.is_empty()) else {
            problems.refuse(dir)?;
            unreachable!("a config is absent only where a problem was added");
        };
        let mut files = Self {
            dir: dir.to_path_buf(),
            config,
            config_text: read(&dir.join("config.json"))?,
            shards,
            tensors,
            prefix: "",
            head: "",
        };
        files.find_names();
        files.check(assume_tied, &mut problems);
        problems.refuse(dir)?;
        Ok(files)
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The config; its vocabulary is the embedding's rows, and `tie_word_embeddings` says what is used as head.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    fn name(&self, rest: &str) -> String {
        format!("{}{rest}", self.prefix)
    }

    /// A part of a layer, without `.weight`.
    pub(super) fn layer_name(&self, layer: usize, part: &str) -> String {
        self.name(&format!("layers.{layer}.{part}"))
    }

    /// What the files hold, in hexadecimal: BLAKE3 of the config and of every tensor's name, type, shape and
    /// numbers, the numbers of large tensors by evenly spaced samples. File names, times and the cut into
    /// shards do not matter.
    pub fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(&self.config_text);
        let sorted: BTreeMap<_, _> = self.tensors.iter().collect();
        for (name, entry) in sorted {
            part(name.as_bytes());
            part(format!("{} {:?}", entry.dtype, entry.shape).as_bytes());
            let shard = &self.shards[entry.shard];
            let bytes = shard.bytes(entry);
            if bytes.len() <= HASHED_WHOLE {
                part(bytes);
            } else {
                for i in 0..SAMPLES {
                    let begin = (bytes.len() - SAMPLE) / (SAMPLES - 1) * i;
                    part(&bytes[begin..begin + SAMPLE]);
                }
            }
            shard.release(entry);
        }
        hasher.finalize().to_hex().to_string()
    }
}

fn encoding(dtype: Dtype) -> Option<Encoding> {
    match dtype {
        Dtype::F32 => Some(Encoding::F32),
        Dtype::F16 => Some(Encoding::F16),
        Dtype::BF16 => Some(Encoding::Bf16),
        _ => None,
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ModelError> {
    std::fs::read(path).map_err(|error| ModelError::Io {
        path: path.to_path_buf(),
        error,
    })
}
