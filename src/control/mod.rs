//! Small messages between the launcher and its workers, over ipc-channel.
//!
//! Payloads never travel here: hidden states, gradients and weights go through shared memory. Each worker has
//! one channel in each direction. The launcher offers a socket, the worker connects within a deadline and sends
//! [`FromWorker::Hello`] with the sending end for its orders ([`ToWorker`]).

mod launcher_side;
mod message;
mod sockets;
mod worker_side;

pub use launcher_side::{Door, Incoming, Orders};
pub use message::{Evaluation, FromWorker, Loaded, Role, StepReport, ToWorker, WorkerName};
pub use sockets::{SocketFolder, clean_stale};
pub use worker_side::{Reporter, WAIT_FOR_DEBUGGER, WorkerLink, worker_main};

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// What can go wrong between the launcher and a worker.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// A worker's program was started by a person.
    #[error("{program} is started by the launcher, not by hand ({what}); run `launcher --help`")]
    NotStartedByLauncher {
        /// The program.
        program: &'static str,
        /// Which argument is missing or wrong.
        what: String,
    },
    /// No place short enough for a socket.
    #[error("no directory for the control sockets: {}: {source}; set TMPDIR to a short, writable path", path.display())]
    SocketFolder {
        /// What was tried last.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The socket of one worker could not be made.
    #[error("control socket of {worker} in {}: {source}; set TMPDIR to a short, writable path", path.display())]
    Socket {
        /// Whose.
        worker: WorkerName,
        /// Where.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The launcher's socket does not answer.
    #[error("cannot reach the launcher at {path}: {source}; it may have ended")]
    Connect {
        /// The socket.
        path: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The other side is gone.
    #[error("the control channel to the {0} is closed")]
    Closed(&'static str),
    /// Nothing came in time.
    #[error("no {what} from the launcher within {} s", .after.as_secs())]
    Deadline {
        /// What was waited for.
        what: &'static str,
        /// For how long.
        after: Duration,
    },
    /// A message does not read.
    #[error("a message cannot be read: {0}; launcher and workers must come from the same build")]
    Decode(#[from] postcard::Error),
    /// An inherited descriptor is missing.
    #[error(
        "descriptor `{0}` was not passed by the launcher; launcher and workers must come from the same build"
    )]
    NoDescriptor(String),
    /// Any other refusal of the system.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}
