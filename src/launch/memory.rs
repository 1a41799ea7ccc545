//! How much memory each role will take: on GPUs told before anything is loaded, and compared with what was taken.
//!
//! Bytes of tensors only: what the driver and its libraries hold beside them on a GPU, once for each process, is
//! [`BESIDE_TENSORS`].

use std::collections::BTreeMap;

use super::gpus::Gpu;
use super::places::{Device, Place};
use crate::control::Role;
use crate::engine::Engine;
use crate::engine::cpu::{self, Cpu};
use crate::engine::cuda::{self, Cuda};
use crate::model::drafter::{DrafterConfig, DrafterModel};
use crate::model::{TargetConfig, TargetNeeds};
use crate::train::optimizer::Optimizer;

/// Context, compiled kernels and libraries of one process on one GPU.
pub const BESIDE_TENSORS: u64 = 768 << 20;
/// What the engine takes of a GPU when it is opened: the workspace of matrix products.
const ENGINE: u64 = 64 << 20;
/// Blocks of a forward of the evaluation.
const EVALUATED_BLOCKS: u64 = 512;
const FLOAT: u64 = 4;

/// Tensors of one worker, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Weights and optimizer state.
    pub model: u64,
    /// Activations and staging.
    pub work: u64,
}

impl Need {
    /// Of both kinds.
    pub fn total(&self) -> u64 {
        self.model + self.work
    }
}

/// What a run's workers will take, in bytes of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Each target.
    pub target: Need,
    /// Each drafter.
    pub drafter: Need,
}

/// What the estimate depends on.
#[derive(Clone, Copy, Debug)]
pub struct Load<'a> {
    /// Workers run on GPUs.
    pub on_gpus: bool,
    /// The frozen model.
    pub target: &'a TargetConfig,
    /// The drafter.
    pub drafter: &'a DrafterConfig,
    /// The final hidden state travels too.
    pub soft_labels: bool,
    /// Most tokens of one target forward.
    pub prefill_tokens: u64,
    /// Most tokens of a unit.
    pub unit_tokens: u64,
    /// Most anchors of a unit.
    pub unit_anchors: u64,
}

impl Load<'_> {
    /// Of both roles.
    pub fn estimate(&self) -> Estimate {
        Estimate {
            target: self.of_target(),
            drafter: self.of_drafter(),
        }
    }

    /// Bytes of one number of the compute type.
    fn half(&self) -> u64 {
        match self.on_gpus {
            true => Cuda::HALF_BYTES as u64,
            false => Cpu::HALF_BYTES as u64,
        }
    }

    fn engine(&self) -> u64 {
        match self.on_gpus {
            true => ENGINE,
            false => 0,
        }
    }

    fn captured_width(&self) -> u64 {
        (self.drafter.captured() * self.drafter.hidden_size) as u64
    }

    fn teacher_width(&self) -> u64 {
        match self.soft_labels {
            true => self.drafter.hidden_size as u64,
            false => 0,
        }
    }

    fn of_target(&self) -> Need {
        let c = self.target;
        let needs = TargetNeeds {
            capture: self.drafter.target_layer_ids.clone(),
            final_hidden: self.soft_labels,
            lm_head: false,
        };
        let layers = needs.layers(c.num_hidden_layers);
        let [hidden, inner, vocabulary] =
            [c.hidden_size, c.intermediate_size, c.vocab_size].map(|n| n as u64);
        let (query, key) = (c.query_size() as u64, c.key_size() as u64);
        let weights = (layers * c.layer_parameters()) as u64 + vocabulary * hidden;
        // Stream, normalised, projections, rotated, attention, gate and up, activated: one set for all layers.
        let forward = 2 * hidden + (query + 2 * key) + query + key + query + 3 * inner;
        let states = self.captured_width() + self.teacher_width();
        Need {
            model: self.half() * weights,
            work: self.engine() + self.half() * self.prefill_tokens * (forward + states),
        }
    }

    fn of_drafter(&self) -> Need {
        let (d, tokens, blocks) = (self.drafter, self.unit_tokens, self.unit_anchors);
        let [hidden, vocabulary, block] =
            [d.hidden_size, d.vocab_size, d.block_size].map(|n| n as u64);
        let tables = match self.target.tie_word_embeddings {
            true => 1,
            false => 2,
        };
        let (state, workspace, rows) = match self.on_gpus {
            true => (
                Optimizer::<Cuda>::state_bytes(d),
                DrafterModel::<Cuda>::workspace_bytes(d, tokens as usize, blocks as usize),
                cuda::CHUNK_BYTES as u64 / (FLOAT * vocabulary),
            ),
            false => (
                Optimizer::<Cpu>::state_bytes(d),
                DrafterModel::<Cpu>::workspace_bytes(d, tokens as usize, blocks as usize),
                cpu::CHUNK_ROWS as u64,
            ),
        };
        let states = self.half() * tokens * (self.captured_width() + self.teacher_width());
        // Logits of a chunk of slots and the slots themselves; with soft labels the teacher's share the room.
        let chunk = |slots: u64| {
            let most = rows.clamp(1, slots.max(1));
            most * (FLOAT * vocabulary + self.half() * hidden)
        };
        let training = states + chunk(blocks * block.saturating_sub(1));
        let evaluation = states + chunk(EVALUATED_BLOCKS * block.saturating_sub(1));
        Need {
            model: self.half() * tables * vocabulary * hidden + state as u64,
            work: self.engine() + workspace as u64 + training.max(evaluation),
        }
    }
}

impl Estimate {
    /// Of a role.
    pub fn of(&self, role: Role) -> Need {
        match role {
            Role::Target => self.target,
            Role::Drafter => self.drafter,
        }
    }

    /// What each GPU is asked for, by its number.
    fn by_gpu(&self, places: &[Place]) -> BTreeMap<u32, Vec<(String, u64)>> {
        let mut shares: BTreeMap<u32, Vec<(String, u64)>> = BTreeMap::new();
        for place in places {
            if let Device::Gpu { ordinal } = place.device {
                let share = (place.worker.to_string(), self.of(place.worker.role).total());
                shares.entry(ordinal).or_default().push(share);
            }
        }
        shares
    }

    /// A line for each GPU that is used.
    pub fn lines(&self, places: &[Place]) -> Vec<String> {
        let line = |(gpu, shares): (u32, Vec<(String, u64)>)| {
            format!("memory of GPU {gpu}, estimated: {}", words(&shares))
        };
        self.by_gpu(places).into_iter().map(line).collect()
    }

    /// A line for each GPU that has too little free.
    pub fn problems(&self, places: &[Place], visible: &[Gpu]) -> Vec<String> {
        let mut problems = Vec::new();
        for (ordinal, shares) in self.by_gpu(places) {
            let Some(gpu) = visible.get(ordinal as usize) else {
                continue;
            };
            let needed: u64 = shares.iter().map(|(_, bytes)| bytes + BESIDE_TENSORS).sum();
            if needed > gpu.free {
                problems.push(format!(
                    "GPU {ordinal} ({}) has {} free and {} are needed ({} and {} of the driver for each): \
                     choose a larger GPU, spread the roles, or lower --prefill-tokens, --slot-tokens or \
                     --unit-anchors",
                    gpu.name,
                    gib(gpu.free),
                    gib(needed),
                    words(&shares),
                    gib(BESIDE_TENSORS),
                ));
            }
        }
        problems
    }
}

/// Bytes in GiB.
pub fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

fn words(shares: &[(String, u64)]) -> String {
    let share = |(name, bytes): &(String, u64)| format!("{name} {}", gib(*bytes));
    shares.iter().map(share).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::WorkerName;

    fn place(role: Role, ordinal: u32) -> Place {
        Place {
            worker: WorkerName::new(role, 0),
            device: Device::Gpu { ordinal },
        }
    }

    fn gpu(free: u64) -> Gpu {
        Gpu {
            name: "NVIDIA H200".to_owned(),
            total: 140 << 30,
            free,
            shareable: true,
        }
    }

    #[test]
    fn a_gpu_with_too_little_memory_is_refused_with_numbers() {
        let need = |gib: u64| Need {
            model: (gib - 1) << 30,
            work: 1 << 30,
        };
        let estimate = Estimate {
            target: need(10),
            drafter: need(20),
        };
        let shared = [place(Role::Target, 0), place(Role::Drafter, 0)];
        assert!(estimate.problems(&shared, &[gpu(32 << 30)]).is_empty());
        let told = estimate.problems(&shared, &[gpu(31 << 30)]);
        assert_eq!(told.len(), 1);
        assert!(
            told[0].starts_with(
                "GPU 0 (NVIDIA H200) has 31.00 GiB free and 31.50 GiB are needed (target-0 10.00 GiB, \
                 drafter-0 20.00 GiB and 0.75 GiB of the driver for each)"
            ),
            "{}",
            told[0]
        );
        let apart = [place(Role::Target, 0), place(Role::Drafter, 1)];
        let both = [gpu(15 << 30), gpu(31 << 30)];
        assert!(estimate.problems(&apart, &both).is_empty());
        assert_eq!(estimate.lines(&apart).len(), 2);
    }
}
