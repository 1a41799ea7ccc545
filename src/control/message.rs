//! The messages, and the names of those who send them.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use ipc_channel::ipc::IpcSender;
use serde::{Deserialize, Serialize};

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Runs the frozen model and publishes hidden states.
    Target,
    /// Trains the drafter.
    Drafter,
}

impl Role {
    /// The name of the program that plays it.
    pub fn program(self) -> &'static str {
        match self {
            Self::Target => "target_worker",
            Self::Drafter => "drafter_worker",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Target => "target",
            Self::Drafter => "drafter",
        })
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "target" => Ok(Self::Target),
            "drafter" => Ok(Self::Drafter),
            other => Err(format!("`{other}` is not a role (target, drafter)")),
        }
    }
}

/// One worker: its role and its rank among those of the role. Shown as `drafter-1`, read from `drafter:1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerName {
    /// What it does.
    pub role: Role,
    /// Its number, from 0.
    pub rank: u32,
}

impl WorkerName {
    /// The worker of this role and rank.
    pub const fn new(role: Role, rank: u32) -> Self {
        Self { role, rank }
    }
}

impl fmt::Display for WorkerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.role, self.rank)
    }
}

impl FromStr for WorkerName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (role, rank) = text
            .split_once([':', '-'])
            .ok_or_else(|| format!("`{text}` is not ROLE:RANK"))?;
        Ok(Self {
            role: role.parse()?,
            rank: rank
                .parse()
                .map_err(|_| format!("`{rank}` is not a rank"))?,
        })
    }
}

/// From the launcher to a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// What to do, in postcard: the first message.
    Plan(Vec<u8>),
    /// Everybody is ready: begin.
    Start,
    /// Stop after a step that all agree on, with a checkpoint. Why, in words.
    Stop(String),
    /// Save a checkpoint at the next commit.
    Checkpoint,
    /// The run is over because of this; SIGTERM follows.
    Abort(String),
}

/// What a worker has after loading.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Loaded {
    /// Steady memory of this process in bytes.
    pub memory: u64,
    /// Hash over names, shapes and values of the drafter's parameters, in hex; equal on all drafters.
    pub parameters: Option<String>,
}

/// One committed step, told by one drafter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Number of the step in the run, from 1.
    pub step: u32,
    /// Weighted mean of the loss over the step.
    pub loss: f64,
    /// Mean over the step's blocks of 1 + length of the correct prefix.
    pub block_accepted_length: f64,
    /// Learning rate used.
    pub lr: f64,
    /// L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Tokens of the step's units, all drafters together.
    pub tokens: u64,
    /// Share of the supervised slots whose most likely token was right, slot 1 of a block first.
    pub position_accuracy: Vec<f64>,
    /// Units of each rank, in trained order: unit = epoch·U + place.
    pub units: Vec<(u32, Vec<u64>)>,
}

/// One drafter's share of the held-out documents, evaluated by the decoding walk; shares add up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// After this step; 0 is before training.
    pub step: u32,
    /// Documents walked.
    pub documents: u64,
    /// Tokens that the chain's walk produced.
    pub tokens: u64,
    /// Rounds that it took.
    pub rounds: u64,
    /// Of draft trees: budget, tokens, rounds.
    pub trees: Vec<(u32, u64, u64)>,
}

impl Evaluation {
    /// Adds another share of the same evaluation.
    pub fn add(&mut self, share: Self) {
        self.step = share.step;
        self.documents += share.documents;
        self.tokens += share.tokens;
        self.rounds += share.rounds;
        if self.trees.is_empty() {
            self.trees = share.trees;
        } else {
            for (mine, other) in self.trees.iter_mut().zip(share.trees) {
                *mine = (mine.0, mine.1 + other.1, mine.2 + other.2);
            }
        }
    }

    /// Tokens a round of the chain; `None` without rounds.
    pub fn accepted_length(&self) -> Option<f64> {
        (self.rounds > 0).then(|| self.tokens as f64 / self.rounds as f64)
    }
}

/// From a worker to the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromWorker {
    /// The first message.
    Hello {
        /// Who it is.
        worker: WorkerName,
        /// Its process.
        pid: u32,
        /// Where its orders go.
        orders: IpcSender<ToWorker>,
    },
    /// Still loading; also a sign of life while loading takes long.
    Loading {
        /// What, in a few words.
        what: String,
        /// How much of it, 0..=1.
        fraction: f32,
    },
    /// Loaded; waits for [`ToWorker::Start`].
    Ready(Loaded),
    /// A step was committed (sent by one drafter).
    Step(StepReport),
    /// A share of the held-out documents was evaluated.
    Evaluation(Evaluation),
    /// A checkpoint is complete.
    CheckpointSaved {
        /// Of which step.
        step: u32,
        /// Where.
        path: PathBuf,
    },
    /// Something a person should read; does not end the run.
    Warning(String),
    /// It cannot go on; it exits after this.
    Failed(String),
    /// Memory of its GPU, when its work is done.
    DeviceMemory {
        /// The most that its tensors held at a time, in bytes.
        peak: u64,
    },
    /// All its work is done; it exits with 0 after this.
    Done {
        /// Largest resident memory it had, in bytes.
        peak_memory: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_in_both_spellings() {
        let name = WorkerName::new(Role::Drafter, 12);
        assert_eq!("drafter:12".parse::<WorkerName>().unwrap(), name);
        assert_eq!(name.to_string().parse::<WorkerName>().unwrap(), name);
        for wrong in ["drafter", "drafter:", "drafter:-1", "worker:1", ":1", ""] {
            assert!(wrong.parse::<WorkerName>().is_err(), "{wrong}");
        }
    }
}
