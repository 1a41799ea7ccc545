//! The checkpoint with the best held-out figure: the link `best` beside `latest`, and `best.json`, which says what it
//! stands for.
//!
//! The figure is the accepted length of the decoding walk with the chain over all held-out documents, that of
//! summary.json, compared exactly as tokens ÷ rounds. The later of two equal ones is the better: it was trained longer.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::checkpoint::step_name;
use super::disk::{Disk, DiskError};

/// The link to the best checkpoint.
pub const BEST: &str = "best";
/// What it stands for.
const FILE: &str = "best.json";

/// What is known of the best checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Its step.
    pub step: u64,
    /// Its figure.
    pub accepted_length: f64,
    /// Tokens of the walk.
    pub tokens: u64,
    /// Rounds of the walk; not 0.
    pub rounds: u64,
}

impl Best {
    /// A candidate; none where nothing was walked.
    pub fn new(step: u64, tokens: u64, rounds: u64) -> Option<Self> {
        (rounds > 0).then(|| Self {
            step,
            accepted_length: tokens as f64 / rounds as f64,
            tokens,
            rounds,
        })
    }

    /// The one under `root`, if link, file and checkpoint are there and agree.
    pub fn read(root: &Path) -> Option<Self> {
        let found: Self = serde_json::from_slice(&fs::read(root.join(FILE)).ok()?).ok()?;
        let linked = linked(root)?;
        let whole = linked == step_name(found.step) && found.rounds > 0;
        (whole && root.join(linked).is_dir()).then_some(found)
    }

    /// Whether `other` takes its place.
    pub fn is_beaten_by(&self, other: &Self) -> bool {
        let product = |a: u64, b: u64| u128::from(a) * u128::from(b);
        let (mine, others) = (
            product(self.tokens, other.rounds),
            product(other.tokens, self.rounds),
        );
        (others, other.step) >= (mine, self.step)
    }

    /// Moves the link to it. Interrupted in between, the link is old or new, and the file may not go with it, which
    /// [`Best::read`] then sees.
    ///
    /// # Errors
    /// The file system's.
    pub fn keep(&self, root: &Path) -> Result<(), DiskError> {
        let mut disk = Disk::default();
        let part = root.join(format!(".writing-{FILE}"));
        let json = serde_json::to_vec_pretty(self).expect("numbers always serialise");
        disk.write(&part, |out| out.write_all(&json))?;
        disk.place(&part, &root.join(FILE))?;
        let temporary = root.join(format!(".writing-{BEST}"));
        disk.link(&step_name(self.step), &root.join(BEST), &temporary)?;
        disk.sync_dir(root)
    }
}

/// Name of the checkpoint that `best` leads to.
pub(super) fn linked(root: &Path) -> Option<String> {
    let target: io::Result<PathBuf> = fs::read_link(root.join(BEST));
    Some(target.ok()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(step: u64, tokens: u64, rounds: u64) -> Best {
        Best::new(step, tokens, rounds).unwrap()
    }

    #[test]
    fn the_larger_quotient_wins_and_the_later_of_two_equal_ones() {
        assert_eq!(Best::new(1, 0, 0), None);
        let first = best(10, 300, 200);
        assert!(first.is_beaten_by(&best(5, 301, 200)));
        assert!(!first.is_beaten_by(&best(20, 299, 200)));
        assert!(first.is_beaten_by(&best(20, 3, 2)));
        assert!(!first.is_beaten_by(&best(5, 3, 2)));
        // Closer than float64 tells apart.
        let large = best(10, (1 << 60) + 1, 1 << 60);
        assert!(!large.is_beaten_by(&best(20, 1 << 60, 1 << 60)));
    }

    #[test]
    fn link_and_file_must_agree() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(Best::read(root), None);
        let kept = best(10, 3, 2);
        kept.keep(root).unwrap();
        assert_eq!(Best::read(root), None, "there is no such checkpoint");
        fs::create_dir(root.join("step-10")).unwrap();
        assert_eq!(Best::read(root), Some(kept));
        fs::create_dir(root.join("step-20")).unwrap();
        best(20, 4, 2).keep(root).unwrap();
        assert_eq!(Best::read(root).unwrap().step, 20);
        fs::remove_file(root.join(BEST)).unwrap();
        std::os::unix::fs::symlink("step-10", root.join(BEST)).unwrap();
        assert_eq!(Best::read(root), None, "the file is of another step");
    }
}
