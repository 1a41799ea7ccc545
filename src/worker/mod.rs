//! The loops of the two worker processes.
//!
//! A [`target`] leases units, prefills and publishes them; a [`drafter`] takes them, trains, reduces and commits.
//! Both are told what to do by a [`WorkerPlan`] and know nothing of each other but shared memory.

pub mod drafter;
mod error;
mod held_out;
mod plan;
mod replay;
pub mod slot;
pub mod target;

use crate::control::{FromWorker, Reporter};
use crate::engine::Engine;

/// Tells the launcher what was taken of the device.
fn report_memory<E: Engine>(engine: &E, reporter: &Reporter) -> Result<(), WorkerError> {
    if let Some(peak) = engine.peak_memory()? {
        reporter.send(FromWorker::DeviceMemory { peak })?;
    }
    Ok(())
}

pub use error::WorkerError;
pub use plan::{Saving, Start, WorkerPlan};
pub use replay::{Replay, ReplayError};
