//! Which checkpoint a person means.

use std::path::{Path, PathBuf};

use crate::train::checkpoint::newest_checkpoint;

/// A checkpoint itself, or the newest whole one of a run's output directory.
///
/// # Errors
/// In words: there is none.
pub fn find(path: &Path) -> Result<PathBuf, String> {
    if path.join("model.safetensors").is_file() {
        return Ok(path.to_owned());
    }
    match newest_checkpoint(&path.join("checkpoints")) {
        Ok(Some(found)) => Ok(found.checkpoint.path),
        Ok(None) => Err(format!(
            "{} is neither a checkpoint (no model.safetensors) nor a run's output directory (no checkpoints/step-N)",
            path.display()
        )),
        Err(error) => Err(error.to_string()),
    }
}
