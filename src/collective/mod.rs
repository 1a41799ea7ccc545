//! Sums over all drafters: shared memory on CPUs, NCCL on GPUs.
//!
//! A collective runs between [`Drafter::wait_reduce`] and [`Drafter::settle`] only, when all members are known to
//! be there; what it returns is agreed on by the step word, never by itself.

mod nccl;
mod shared;

use std::time::Duration;

pub use nccl::Nccl;
pub use shared::SharedMemory;

use crate::engine::{Engine, EngineError, Float};
use crate::shm::{Drafter, Joined, Reduced, ShmError};

/// What a collective can do wrong. A member's death is no error: see [`Reduced::Moved`].
#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    /// Shared memory.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// NCCL refused or failed.
    #[error(
        "NCCL, {what}: {message}; NCCL_DEBUG=WARN in the environment makes it say more in the worker's log"
    )]
    Nccl {
        /// What it was doing.
        what: &'static str,
        /// Its texts.
        message: String,
    },
    /// NCCL did not end in time, although nobody has died.
    #[error("NCCL: {what} did not end within {after:?}, although no drafter has died")]
    Deadline {
        /// What was awaited.
        what: &'static str,
        /// The deadline.
        after: Duration,
    },
    /// The sum of known values is wrong: the link between the GPUs or the library is broken.
    #[error(
        "NCCL: element {element} of a first all-reduce is {got}, not {want}: the link between the GPUs is broken; \
         try NCCL_P2P_DISABLE=1"
    )]
    Wrong {
        /// Which.
        element: usize,
        /// What came.
        got: f32,
        /// The sum.
        want: f32,
    },
}

/// All-reduce over the members of a step.
pub trait Collective<E: Engine> {
    /// The group formed (again): an earlier communicator is dead.
    ///
    /// # Errors
    /// The new communicator cannot be made.
    fn regroup(&mut self, engine: &E, joined: &Joined) -> Result<(), CollectiveError>;

    /// Sums the gradients `[1, P]` and the few float32 `totals` over all members, in place and in rank order. All
    /// members call it with equal lengths. On [`Reduced::Moved`] both are garbage.
    ///
    /// # Errors
    /// Anything but a change of the group.
    fn all_reduce(
        &mut self,
        engine: &E,
        seat: &mut Drafter,
        gradients: &mut Float<E>,
        totals: &mut [f32],
    ) -> Result<Reduced, CollectiveError>;

    /// The orderly end, after the last step. Whoever is dropped without it leaves at once.
    fn finish(&mut self) {}
}
