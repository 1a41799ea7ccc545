//! Where each worker runs, and with how many threads.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::control::{Role, WorkerName};

/// What a worker computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// This many threads of the machine.
    Cpu {
        /// At least one.
        threads: usize,
    },
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu { threads: 1 } => f.write_str("1 CPU thread"),
            Self::Cpu { threads } => write!(f, "{threads} CPU threads"),
        }
    }
}

/// One worker's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Who.
    pub worker: WorkerName,
    /// On what.
    pub device: Device,
}

/// Predicted work of each role over the same documents, in any one unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoleCost {
    /// All targets together.
    pub target: f64,
    /// All drafters together.
    pub drafter: f64,
}

/// The sizes that the cost of a document depends on.
#[derive(Clone, Copy, Debug)]
pub struct CostModel {
    /// Parameters of the target layers that run.
    pub target_parameters: f64,
    /// Parameters of the drafter's layers.
    pub drafter_parameters: f64,
    /// H.
    pub hidden: f64,
    /// K captured layers.
    pub captured: f64,
    /// L drafter layers.
    pub layers: f64,
    /// Key and value heads times head size.
    pub key_value: f64,
    /// V.
    pub vocabulary: f64,
    /// Slots of a block that are computed.
    pub block: f64,
}

impl CostModel {
    /// Operations of each role for a document of `tokens` tokens and `anchors` anchors: a forward of the target;
    /// forward and backward of the drafter's blocks and context, and its head forward and back.
    pub fn of_document(&self, tokens: f64, anchors: f64) -> RoleCost {
        let blocks = anchors * self.block;
        let context = self.captured * self.hidden * self.hidden
            + 2.0 * self.layers * self.hidden * self.key_value;
        RoleCost {
            target: 2.0 * self.target_parameters * tokens,
            drafter: 3.0 * 2.0 * (self.drafter_parameters * blocks + context * tokens)
                + 4.0 * self.hidden * self.vocabulary * blocks,
        }
    }
}

/// Threads that this process may use: what affinity and the cgroup leave of the machine.
pub fn machine_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// CPU places for `targets` and `drafters` workers, sharing `threads` so that both roles take about as long for
/// the same documents. Everybody gets one; each further thread goes to the role that is predicted to be slower,
/// to its worker with the fewest. Targets come first, each role in order of rank.
pub fn cpu_places(threads: usize, targets: usize, drafters: usize, cost: RoleCost) -> Vec<Place> {
    let mut shares = [vec![1; targets], vec![1; drafters]];
    let costs = [cost.target.max(0.0), cost.drafter.max(0.0)];
    for _ in targets + drafters..threads {
        let time = |role: usize| {
            let total: usize = shares[role].iter().sum();
            if total == 0 {
                0.0
            } else {
                costs[role] / total as f64
            }
        };
        let slower = usize::from(time(1) >= time(0));
        let Some(least) = shares[slower].iter_mut().min() else {
            break;
        };
        *least += 1;
    }
    let of_role = |role, shares: &[usize]| {
        let place = |(rank, threads): (usize, &usize)| Place {
            worker: WorkerName::new(role, rank as u32),
            device: Device::Cpu { threads: *threads },
        };
        shares.iter().enumerate().map(place).collect::<Vec<_>>()
    };
    let mut places = of_role(Role::Target, &shares[0]);
    places.append(&mut of_role(Role::Drafter, &shares[1]));
    places
}

/// Slots that a ring must have, and the number taken by default: the units of the largest step, since slots are
/// held until the commit, one prefetched for each drafter, two for each target; and a quarter more.
pub fn ring_slots(units_per_step: usize, drafters: usize, targets: usize) -> (usize, usize) {
    let needed = units_per_step + drafters + 2 * targets;
    (needed, needed + needed.div_ceil(4))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn threads(
        total: usize,
        targets: usize,
        drafters: usize,
        target: f64,
        drafter: f64,
    ) -> Vec<usize> {
        let places = cpu_places(total, targets, drafters, RoleCost { target, drafter });
        let threads = |place: &Place| match place.device {
            Device::Cpu { threads } => threads,
        };
        places.iter().map(threads).collect()
    }

    #[test]
    fn everybody_gets_a_thread_on_a_small_machine() {
        assert_eq!(threads(2, 2, 2, 1.0, 9.0), [1, 1, 1, 1]);
        assert_eq!(threads(1, 1, 1, 1.0, 1.0), [1, 1]);
    }

    #[test]
    fn threads_follow_cost_and_not_heads() {
        assert_eq!(threads(16, 2, 2, 1.0, 3.0), [2, 2, 6, 6]);
        assert_eq!(threads(16, 2, 2, 3.0, 1.0), [6, 6, 2, 2]);
        assert_eq!(threads(16, 1, 3, 1.0, 3.0), [4, 4, 4, 4]);
    }

    #[test]
    fn no_thread_is_lost_or_made_up() {
        for total in 4..40 {
            assert_eq!(threads(total, 2, 2, 1.0, 2.7).iter().sum::<usize>(), total);
        }
    }

    #[test]
    fn a_drafter_document_of_the_published_sizes_costs_what_was_counted() {
        // Qwen3-8B, five drafter layers: 69 and 30 TFLOP for 2,048 tokens and 512 anchors.
        let model = CostModel {
            target_parameters: 7.2e9,
            drafter_parameters: 5.0 * 192.9e6,
            hidden: 4096.0,
            captured: 5.0,
            layers: 5.0,
            key_value: 1024.0,
            vocabulary: 151_936.0,
            block: 16.0,
        };
        let cost = model.of_document(2048.0, 512.0);
        assert!((cost.target / 1e12 - 30.0).abs() < 1.0, "{cost:?}");
        assert!((cost.drafter / 1e12 - 69.0).abs() < 2.0, "{cost:?}");
    }

    #[test]
    fn slots_cover_a_step_and_a_quarter_more() {
        assert_eq!(ring_slots(16, 2, 2), (22, 28));
    }
}
