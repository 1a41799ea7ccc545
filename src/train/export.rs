//! The serving format: `config.json`, `model.safetensors` in bf16 and a record of what the drafter was made for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};

use super::disk::{Disk, DiskError, Written};
use super::tensors::{self, Source, TensorFile, TensorFileError};
use crate::engine::Engine;
use crate::model::drafter::{DrafterConfig, DrafterError, ParamLayout, Params};

/// The serving configuration.
pub const CONFIG_FILE: &str = "config.json";
/// The serving weights.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// Where the drafter comes from.
pub const PROVENANCE_FILE: &str = "provenance.json";
/// What a slot of a block stands for.
pub const SLOT_CONVENTION: &str =
    "slot 0 is the anchor and predicts nothing; slot k >= 1 predicts the token at anchor + k";

/// What a drafter was trained for; kept beside it, since a mismatch does not crash but ruins acceptance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// The target's name, as it was given.
    pub target: String,
    /// Hash of the target's configuration and weights.
    pub target_hash: String,
    /// What the target's hidden states were computed in.
    pub target_dtype: String,
    /// Hash of the chat template.
    pub template_hash: String,
    /// B.
    pub block_size: usize,
    /// What stands in slots 1..B.
    pub mask_token_id: u32,
    /// See [`SLOT_CONVENTION`].
    pub slot_convention: String,
}

/// What can go wrong with a serving directory.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// A file cannot be written.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A tensor cannot be read.
    #[error(transparent)]
    Tensors(#[from] TensorFileError),
    /// The drafter cannot be built.
    #[error("{}: {source}", path.display())]
    Drafter {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: DrafterError,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The place to export to is taken.
    #[error("{} exists already; give a directory that does not", .0.display())]
    Exists(PathBuf),
}

/// The tensors of a flat buffer, each under `prefix` + its name.
pub(super) fn sources<'a>(layout: &ParamLayout, prefix: &str, flat: &'a [f32]) -> Vec<Source<'a>> {
    layout
        .params()
        .iter()
        .map(|p| Source {
            name: format!("{prefix}{}", p.name),
            shape: p.shape(),
            values: &flat[p.window.offset..p.window.offset + p.window.len()],
        })
        .collect()
}

/// Writes the three files of the serving format into `dir`, which exists; `masters` is a flat buffer.
pub fn write_serving(
    disk: &mut Disk,
    dir: &Path,
    config: &DrafterConfig,
    masters: &[f32],
    provenance: &Provenance,
) -> Result<BTreeMap<String, Written>, DiskError> {
    let layout = ParamLayout::new(config);
    let json = format!("{:#}\n", config.to_json("bfloat16"));
    let record = serde_json::to_string_pretty(provenance)
        .expect("strings and numbers always serialise")
        + "\n";
    let mut files = BTreeMap::new();
    for (name, text) in [(CONFIG_FILE, json), (PROVENANCE_FILE, record)] {
        let written = disk.write(&dir.join(name), |out| out.write_all(text.as_bytes()))?;
        files.insert(name.to_string(), written);
    }
    let weights = disk.write(&dir.join(WEIGHTS_FILE), |out| {
        tensors::write(out, &sources(&layout, "", masters), Dtype::BF16)
    })?;
    files.insert(WEIGHTS_FILE.to_string(), weights);
    Ok(files)
}

/// Reads the configuration of a serving directory.
pub fn read_config(dir: &Path) -> Result<DrafterConfig, ExportError> {
    let path = dir.join(CONFIG_FILE);
    let text = read_text(&path)?;
    DrafterConfig::from_json(&text).map_err(|source| ExportError::Drafter { path, source })
}

/// Reads the record beside a serving directory's weights; `None` where another program wrote them.
pub fn read_provenance(dir: &Path) -> Result<Option<Provenance>, ExportError> {
    let path = dir.join(PROVENANCE_FILE);
    if !path.exists() {
        return Ok(None);
    }
    let text = read_text(&path)?;
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|e| ExportError::Read {
            path,
            source: e.into(),
        })
}

/// Loads the drafter of a serving directory: its configuration and its bf16 weights as masters.
pub fn load_serving<E: Engine>(
    engine: &E,
    dir: &Path,
) -> Result<(DrafterConfig, Params<E>), ExportError> {
    let config = read_config(dir)?;
    let file = TensorFile::open(&dir.join(WEIGHTS_FILE))?;
    let layout = ParamLayout::new(&config);
    let mut values = layout
        .params()
        .iter()
        .map(|p| file.read(&p.name, &p.shape()))
        .collect::<Result<Vec<_>, _>>()?
        .into_iter();
    let params = Params::from_values(engine, &config, |_| Ok(values.next().unwrap_or_default()))
        .map_err(|source| ExportError::Drafter {
            path: dir.to_path_buf(),
            source,
        })?;
    Ok((config, params))
}

/// Copies the serving files of a checkpoint into a new directory, which appears whole or not at all.
pub fn export(checkpoint: &Path, to: &Path) -> Result<(), ExportError> {
    if to.exists() {
        return Err(ExportError::Exists(to.to_path_buf()));
    }
    read_config(checkpoint)?;
    let mut disk = Disk::default();
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let temporary = to.with_file_name(format!(".writing-{name}"));
    if temporary.exists() {
        disk.remove_dir(&temporary)?;
    }
    disk.create_dir(&temporary)?;
    for name in [CONFIG_FILE, PROVENANCE_FILE, WEIGHTS_FILE] {
        let path = checkpoint.join(name);
        if name == PROVENANCE_FILE && !path.exists() {
            continue;
        }
        let mut file =
            std::fs::File::open(&path).map_err(|source| ExportError::Read { path, source })?;
        disk.write(&temporary.join(name), |out| {
            std::io::copy(&mut file, out).map(drop)
        })?;
    }
    disk.sync_dir(&temporary)?;
    disk.place(&temporary, to)?;
    let parent = to.parent().filter(|p| !p.as_os_str().is_empty());
    disk.sync_dir(parent.unwrap_or(Path::new(".")))?;
    Ok(())
}

fn read_text(path: &Path) -> Result<String, ExportError> {
    std::fs::read_to_string(path).map_err(|source| ExportError::Read {
        path: path.to_path_buf(),
        source,
    })
}
