//! Why a worker cannot go on.

use crate::collective::CollectiveError;
use crate::control::ControlError;
use crate::data::DataError;
use crate::engine::EngineError;
use crate::model::ModelError;
use crate::model::drafter::DrafterError;
use crate::shm::ShmError;
use crate::train::checkpoint::CheckpointError;
use crate::train::export::ExportError;

use super::ReplayError;

/// Why a worker cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The launcher cannot be reached, or sent what cannot be read.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// Shared memory.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// The tokenised set.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The device.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The frozen model.
    #[error(transparent)]
    Target(#[from] ModelError),
    /// The drafter.
    #[error(transparent)]
    Drafter(#[from] DrafterError),
    /// The all-reduce.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Weights to begin with.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The recorded run.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The launcher's plan does not fit what is there.
    #[error("the plan does not hold here: {0}")]
    Plan(String),
    /// The drafters' parameters have diverged.
    #[error(
        "step {step}: the drafters' parameters differ ({}); they must be equal bit for bit",
        hashes.iter().map(|(rank, hash)| format!("drafter-{rank} {hash:016x}")).collect::<Vec<_>>().join(", ")
    )]
    Diverged {
        /// At which step it was seen.
        step: u64,
        /// Rank and hash of each.
        hashes: Vec<(u32, u64)>,
    },
    /// Loss or gradient were not finite too often.
    #[error(
        "step {step}: loss or gradient was NaN or infinite in {in_a_row} steps in a row; last units {units:?}"
    )]
    NonFinite {
        /// The last of them.
        step: u64,
        /// How many.
        in_a_row: u32,
        /// Units of the last one.
        units: Vec<u64>,
    },
    /// The target produced too many non-finite hidden states.
    #[error(
        "{bad} of {units} units had NaN or infinite hidden states, more than 0.1 %; check the target's weights"
    )]
    BadStates {
        /// Units with such states.
        bad: u64,
        /// Units prefilled.
        units: u64,
    },
}
