//! What can be wrong with a target model's files.

use std::fmt;
use std::path::PathBuf;

use crate::engine::EngineError;

/// What can be wrong with a target.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Files that cannot be used, with everything that is wrong with them.
    #[error("{}: {problems}", path.display())]
    Refused {
        /// The file or folder.
        path: PathBuf,
        /// All of it.
        problems: Problems,
    },
    /// A file that cannot be read.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// What was asked of a model is not what it was loaded for, or does not fit it.
    #[error("target: {0}")]
    Request(String),
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Problems found together; one reads as a sentence, several as a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(pub Vec<String>);

impl Problems {
    pub(super) fn add(&mut self, problem: impl Into<String>) {
        self.0.push(problem.into());
    }

    /// An error with all of them where there is any.
    pub(super) fn refuse(&mut self, path: impl Into<PathBuf>) -> Result<(), ModelError> {
        if self.0.is_empty() {
            return Ok(());
        }
        Err(ModelError::Refused {
            path: path.into(),
            problems: std::mem::take(self),
        })
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [one] => f.write_str(one),
            several => {
                write!(f, "{} problems", several.len())?;
                several.iter().try_for_each(|p| write!(f, "\n  {p}"))
            }
        }
    }
}
