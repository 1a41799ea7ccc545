//! The files of tensors in a model's folder: which there are, and what their headers say.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, UncheckedAdvice};
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde_json::Value;

use super::check::list;
use crate::model::error::Problems;

/// One file of tensors.
pub(super) struct Shard {
    pub path: PathBuf,
    map: Mmap,
    /// Whether the map is of a file, which can be read again.
    of_file: bool,
}

/// Where a tensor is.
pub(super) struct Entry {
    pub shard: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub begin: usize,
    pub end: usize,
}

impl Shard {
    /// Numbers that are in no file.
    pub(super) fn made(path: PathBuf, map: Mmap) -> Self {
        Self {
            path,
            map,
            of_file: false,
        }
    }

    /// The bytes of a tensor.
    pub(super) fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.map[entry.begin..entry.end]
    }

    /// Lets go of the memory that reading a tensor took; another read takes it from the file again. Where the
    /// system does not, more memory stays in use and nothing else happens.
    pub(super) fn release(&self, entry: &Entry) {
        if !self.of_file {
            return;
        }
        // SAFETY: the map is of a file and never written, so a page that is dropped comes back as it was.
        let _ = unsafe {
            self.map.unchecked_advise_range(
                UncheckedAdvice::DontNeed,
                entry.begin,
                entry.end - entry.begin,
            )
        };
    }
}

/// The files of tensors: those of the index, or the only one.
pub(super) fn shard_paths(dir: &Path, problems: &mut Problems) -> Vec<PathBuf> {
    const INDEX: &str = "model.safetensors.index.json";
    let index = dir.join(INDEX);
    if index.exists() {
        let names = std::fs::read_to_string(&index)
            .map_err(|error| error.to_string())
            .and_then(|text| names_of_index(&text));
        let names = match names {
            Ok(names) => names,
            Err(problem) => {
                problems.add(format!("{INDEX}: {problem}"));
                return Vec::new();
            }
        };
        let (there, missing): (Vec<String>, Vec<String>) =
            names.into_iter().partition(|name| dir.join(name).exists());
        list(
            &format!("{INDEX} names files that are missing"),
            &missing,
            problems,
        );
        return there.iter().map(|name| dir.join(name)).collect();
    }
    let names: BTreeSet<String> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    let shards: Vec<&String> = names
        .iter()
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    let single = names.get("model.safetensors");
    match (single, shards.as_slice()) {
        (Some(name), _) => vec![dir.join(name)],
        (None, [name]) => vec![dir.join(name)],
        (None, []) => {
            let other = names.iter().find(|name| {
                [".bin", ".pt", ".pth", ".gguf"]
                    .iter()
                    .any(|end| name.ends_with(end))
            });
            problems.add(match other {
                Some(other) => format!(
                    "has no *.safetensors; {other} is of a format that is not read: convert it with Hugging Face transformers (save_pretrained)"
                ),
                None => "has no *.safetensors".to_string(),
            });
            Vec::new()
        }
        (None, several) => {
            problems.add(format!(
                "has {} *.safetensors but no {INDEX} that says which of them belong to the model",
                several.len()
            ));
            Vec::new()
        }
    }
}

/// The distinct file names of an index.
fn names_of_index(text: &str) -> Result<BTreeSet<String>, String> {
    let index: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let map = index
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or("has no object weight_map")?;
    map.values()
        .map(|name| match name.as_str() {
            Some(name) if !name.contains('/') && !name.is_empty() => Ok(name.to_string()),
            _ => Err(format!("weight_map names {name}, not a file of the folder")),
        })
        .collect()
}

/// Maps a file and notes its tensors.
pub(super) fn open_shard(
    path: PathBuf,
    shards: &mut Vec<Shard>,
    tensors: &mut HashMap<String, Entry>,
    problems: &mut Problems,
) {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let map = match map(&path) {
        Ok(Some(map)) => map,
        Ok(None) => {
            let dir = path.parent().unwrap_or(Path::new("."));
            return problems.add(format!(
                "{name} is a Git LFS pointer, not the weights; run `git lfs pull` in {}",
                dir.display()
            ));
        }
        Err(error) => return problems.add(format!("{name}: {error}")),
    };
    let (header, metadata) = match SafeTensors::read_metadata(&map) {
        Ok(found) => found,
        Err(SafeTensorError::MetadataIncompleteBuffer | SafeTensorError::InvalidHeaderLength) => {
            return problems.add(format!(
                "{name} is truncated: its {} bytes are not what its header announces; download it again",
                map.len()
            ));
        }
        Err(error) => {
            return problems.add(format!(
                "{name} is no safetensors file ({error}); download it again"
            ));
        }
    };
    let data = 8 + header;
    let shard = shards.len();
    for (tensor, info) in metadata.tensors() {
        let entry = Entry {
            shard,
            dtype: info.dtype,
            shape: info.shape.clone(),
            begin: data + info.data_offsets.0,
            end: data + info.data_offsets.1,
        };
        if let Some(other) = tensors.insert(tensor.clone(), entry) {
            let other: &Shard = &shards[other.shard];
            problems.add(format!(
                "{name} and {} both hold {tensor}",
                other.path.display()
            ));
        }
    }
    shards.push(Shard {
        path,
        map,
        of_file: true,
    });
}

/// The file in memory; `None` for a Git LFS pointer.
fn map(path: &Path) -> std::io::Result<Option<Mmap>> {
    const POINTER: &[u8] = b"version https://git-lfs";
    let mut file = File::open(path)?;
    let mut start = Vec::new();
    file.by_ref()
        .take(POINTER.len() as u64)
        .read_to_end(&mut start)?;
    if start == POINTER {
        return Ok(None);
    }
    // SAFETY: the map is read-only and private to this process; weights are not written while a run reads them,
    // as for every reader of memory-mapped checkpoints.
    unsafe { Mmap::map(&file) }.map(Some)
}
