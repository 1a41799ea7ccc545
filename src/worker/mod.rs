//! The loops of the two worker processes.
//!
//! A [`target`] leases units, prefills and publishes them; a [`drafter`] takes them, trains, reduces and commits.
//! Both are told what to do by a [`WorkerPlan`] and know nothing of each other but shared memory.

pub mod drafter;
mod error;
mod held_out;
mod plan;
mod replay;
mod slot;
pub mod target;

pub use error::WorkerError;
pub use plan::{Saving, Start, WorkerPlan};
pub use replay::{Replay, ReplayError};
