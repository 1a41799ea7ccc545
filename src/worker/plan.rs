//! What the launcher tells a worker to do: the first message, complete.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::data::WorkloadSpec;
use crate::engine::LossOptions;
use crate::model::{ModelError, TargetFiles};
use crate::train::options::OptimizerOptions;

/// One worker's orders. The two roles read different parts of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerPlan {
    /// Its seat in shared memory.
    pub seat: u32,
    /// How often the seat was taken, this time included.
    pub incarnation: u32,
    /// The GPU that it runs on, counted among the visible ones; none for CPUs.
    pub gpu: Option<u32>,
    /// Names the run, so that no worker attaches to another run's memory.
    pub run_id: String,
    /// The frozen model's directory.
    pub target: PathBuf,
    /// Take the embedding as head where nothing says that they are tied.
    pub assume_tied: bool,
    /// Random weights of its config's sizes, in place of its files.
    pub dummy: bool,
    /// Most tokens of one target forward.
    pub prefill_tokens: usize,
    /// The drafter's config.json.
    pub drafter: String,
    /// Units and held-out units.
    pub work: WorkloadSpec,
    /// Seed of the anchors and of the first weights.
    pub seed: u64,
    /// A: most anchors of a document.
    pub anchors: usize,
    /// The loss.
    pub loss: LossOptions,
    /// The update.
    pub optimizer: OptimizerOptions,
    /// Where the drafter begins.
    pub start: Start,
    /// A trained.jsonl whose distribution of units is forced.
    pub replay: Option<PathBuf>,
    /// Evaluate every so many steps.
    pub eval_every: Option<u64>,
    /// What checkpoints hold, and where.
    pub saving: Saving,
}

impl WorkerPlan {
    /// The frozen model.
    ///
    /// # Errors
    /// What is wrong with its files.
    pub fn target_files(&self) -> Result<TargetFiles, ModelError> {
        match self.dummy {
            true => TargetFiles::dummy(&self.target),
            false => TargetFiles::open(&self.target, self.assume_tied),
        }
    }
}

/// Where a drafter's values come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Start {
    /// From the seed.
    Fresh,
    /// Weights of a checkpoint; moments, position and ledger begin anew.
    Weights(PathBuf),
    /// All of a checkpoint.
    Resume(PathBuf),
}

/// When, where and as what checkpoints are written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saving {
    /// The run's folder of checkpoints.
    pub folder: PathBuf,
    /// Every so many steps; `None` only at the end.
    pub every: Option<u64>,
    /// Checkpoints kept.
    pub keep: usize,
    /// The resolved plan, in TOML.
    pub plan: String,
    /// Its hash.
    pub plan_hash: String,
    /// Hash of the target's config and weights.
    pub target_hash: String,
    /// Hash of the chat template.
    pub template_hash: String,
}
