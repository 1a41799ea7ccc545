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
    /// One GPU; a target and a drafter may share it.
    Gpu {
        /// Its number among the visible ones.
        ordinal: u32,
    },
}

impl Device {
    /// Host threads that the worker may compute with.
    pub fn threads(self) -> usize {
        match self {
            Self::Cpu { threads } => threads,
            Self::Gpu { .. } => 1,
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu { threads: 1 } => f.write_str("1 CPU thread"),
            Self::Cpu { threads } => write!(f, "{threads} CPU threads"),
            Self::Gpu { ordinal } => write!(f, "GPU {ordinal}"),
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

/// Documents in a unit of time that a split gets through, by the slower role's measure; any unit.
pub fn split_speed((targets, drafters): (usize, usize), cost: RoleCost) -> f64 {
    let speed = |workers: usize, cost: f64| workers as f64 / cost.max(f64::MIN_POSITIVE);
    speed(targets, cost.target).min(speed(drafters, cost.drafter))
}

/// The fastest split of so many equal devices by predicted cost, the one with more targets where several are: a
/// drafter that never waits keeps every all-reduce short. One device runs one of each.
pub fn best_split(devices: usize, cost: RoleCost) -> (usize, usize) {
    let splits = (1..devices).map(|targets| (targets, devices - targets));
    let faster = |a: &(usize, usize), b: &(usize, usize)| {
        split_speed(*a, cost).total_cmp(&split_speed(*b, cost))
    };
    splits.max_by(faster).unwrap_or((1, 1))
}

/// GPU places: targets on the first GPUs, drafters on the last. Where there are fewer GPUs than workers the roles
/// share, and targets share with each other; two drafters never share one.
///
/// # Errors
/// In words: more drafters than GPUs, or a GPU that would stay idle.
pub fn gpu_places(gpus: &[u32], targets: usize, drafters: usize) -> Result<Vec<Place>, String> {
    if drafters > gpus.len() {
        return Err(format!(
            "{drafters} drafters on {} GPUs: two drafters on one GPU would only take turns; use at most one each",
            gpus.len()
        ));
    }
    if targets + drafters < gpus.len() {
        return Err(format!(
            "{targets} targets and {drafters} drafters leave {} of {} GPUs idle",
            gpus.len() - targets - drafters,
            gpus.len()
        ));
    }
    let place = |role, rank: usize, ordinal| Place {
        worker: WorkerName::new(role, rank as u32),
        device: Device::Gpu { ordinal },
    };
    let mut places: Vec<Place> = (0..targets)
        .map(|rank| place(Role::Target, rank, gpus[rank % gpus.len()]))
        .collect();
    let first = gpus.len() - drafters;
    places.extend((0..drafters).map(|rank| place(Role::Drafter, rank, gpus[first + rank])));
    Ok(places)
}

/// A list of GPUs such as `0-3,6`.
///
/// # Errors
/// In words: what part of it is no number or range, runs backwards, or names a GPU twice.
pub fn parse_gpus(text: &str) -> Result<Vec<u32>, String> {
    if text.trim().is_empty() {
        return Err("the list is empty: name GPUs such as 0-3,6, or leave the flag out".to_owned());
    }
    let mut gpus = Vec::new();
    for part in text.split(',') {
        let number = |text: &str| {
            text.trim()
                .parse::<u32>()
                .map_err(|_| format!("`{part}` is no GPU number and no range such as 0-3"))
        };
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if first > last {
            return Err(format!("`{part}` runs backwards; write {last}-{first}"));
        }
        if last - first >= 1024 {
            return Err(format!("`{part}` names more GPUs than any machine has"));
        }
        for gpu in first..=last {
            if gpus.contains(&gpu) {
                return Err(format!("GPU {gpu} is named twice"));
            }
            gpus.push(gpu);
        }
    }
    Ok(gpus)
}

/// GPU places from a list for each role; a GPU may be in both.
pub fn listed_places(targets: &[u32], drafters: &[u32]) -> Vec<Place> {
    let of_role = |role, gpus: &[u32]| {
        let place = |(rank, &ordinal): (usize, &u32)| Place {
            worker: WorkerName::new(role, rank as u32),
            device: Device::Gpu { ordinal },
        };
        gpus.iter().enumerate().map(place).collect::<Vec<_>>()
    };
    let mut places = of_role(Role::Target, targets);
    places.append(&mut of_role(Role::Drafter, drafters));
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
        let threads = |place: &Place| place.device.threads();
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

    #[test]
    fn gpu_lists_are_understood_or_refused() {
        assert_eq!(parse_gpus("0-2,5").unwrap(), [0, 1, 2, 5]);
        assert_eq!(parse_gpus("3").unwrap(), [3]);
        for (text, what) in [
            ("0,0", "named twice"),
            ("7-0", "runs backwards"),
            ("", "the list is empty"),
            (" ", "the list is empty"),
            ("0,", "no GPU number"),
            ("-1", "no GPU number"),
            ("0-", "no GPU number"),
            ("a", "no GPU number"),
            ("0-9999", "more GPUs"),
        ] {
            let error = parse_gpus(text).unwrap_err();
            assert!(error.contains(what), "{text}: {error}");
        }
    }

    #[test]
    fn devices_are_split_so_that_both_roles_take_about_as_long() {
        let split = |devices, target, drafter| best_split(devices, RoleCost { target, drafter });
        assert_eq!(split(8, 30.0, 69.0), (3, 5));
        assert_eq!(split(8, 5.0, 3.0), (5, 3));
        assert_eq!(split(8, 1.0, 1.0), (4, 4));
        assert_eq!(split(2, 1.0, 9.0), (1, 1));
        assert_eq!(split(1, 1.0, 1.0), (1, 1));
        assert_eq!(split(4, 1e9, 1.0), (3, 1));
    }

    #[test]
    fn drafters_never_share_a_gpu() {
        let on = |gpus: &[u32], targets, drafters| -> Vec<(String, Device)> {
            let places = gpu_places(gpus, targets, drafters).unwrap();
            places
                .iter()
                .map(|p| (p.worker.to_string(), p.device))
                .collect()
        };
        let gpu = |ordinal| Device::Gpu { ordinal };
        assert_eq!(
            on(&[0], 1, 1),
            [("target-0".into(), gpu(0)), ("drafter-0".into(), gpu(0))]
        );
        assert_eq!(
            on(&[2, 3], 1, 1),
            [("target-0".into(), gpu(2)), ("drafter-0".into(), gpu(3))]
        );
        let shared = on(&[0, 1], 2, 2);
        assert_eq!(shared[2], ("drafter-0".into(), gpu(0)));
        assert_eq!(shared[3], ("drafter-1".into(), gpu(1)));
        assert!(
            gpu_places(&[0], 1, 2)
                .unwrap_err()
                .contains("at most one each")
        );
        assert!(gpu_places(&[0, 1, 2], 1, 1).unwrap_err().contains("idle"));
    }
}
