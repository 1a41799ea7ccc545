//! `launcher plan`: what a run would be, cost and need, without running it.

use std::fmt::Write;

use serde::Serialize;

use super::gpus;
use super::options::Options;
use super::places::{Device, RoleCost, best_split, machine_threads, ring_slots, split_speed};
use super::prepare::{Prepared, Refusal, open_target, predicted_cost, prepare};
use crate::control::Role;
use crate::engine::cpu::measured_rate;
use crate::model::TargetConfig;
use crate::model::drafter::{DrafterConfig, ParamLayout};
use crate::monitor::console::Console;
use crate::monitor::live::{duration, short};

/// What `launcher plan` was asked for.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    /// The run.
    pub run: Box<Options>,
    /// Print JSON.
    pub json: bool,
}

/// Useful operations in a second of a GPU for this work, by a part of its name; the first that fits counts.
/// Measured on an H200; the others in proportion to their dense bf16 rates.
const GPU_RATES: [(&str, f64); 9] = [
    ("H200", 600e12),
    ("H20", 110e12),
    ("H100", 580e12),
    ("GH200", 600e12),
    ("B200", 1400e12),
    ("A100", 200e12),
    ("L40S", 220e12),
    ("4090", 140e12),
    ("A10", 70e12),
];
/// Of a GPU that is not in the list.
const OTHER_GPU: f64 = 100e12;

/// One role of a planned run.
#[derive(Clone, Debug, Serialize)]
pub struct RolePrediction {
    /// How many.
    pub workers: usize,
    /// Where the first of them runs, in words.
    pub place: String,
    /// Operations in a second of one of them.
    pub operations_per_s: f64,
    /// Operations for one token of the data, anchors included.
    pub operations_per_token: f64,
    /// Tokens in a second of all of them, if they never waited.
    pub tokens_per_s: f64,
    /// Bytes of weights and optimizer state of one of them.
    pub model_bytes: u64,
    /// Bytes of activations and staging of one of them, about.
    pub work_bytes: u64,
}

/// A planned run.
#[derive(Clone, Debug, Serialize)]
pub struct Prediction {
    /// The target in words.
    pub target: String,
    /// The drafter in words.
    pub drafter: String,
    /// Units of one epoch.
    pub units: usize,
    /// Documents of one epoch.
    pub documents: usize,
    /// Tokens of one epoch.
    pub tokens: u64,
    /// Anchors of one epoch.
    pub anchors: u64,
    /// Epochs.
    pub epochs: u32,
    /// Optimizer steps, about.
    pub steps: u64,
    /// Targets.
    pub targets: RolePrediction,
    /// Drafters.
    pub drafters: RolePrediction,
    /// Slots that the ring must have.
    pub slots_needed: usize,
    /// Slots that it gets.
    pub slots: u32,
    /// Bytes of shared memory.
    pub shared_bytes: u64,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Seconds of training, if the slower role never waits.
    pub seconds: f64,
    /// The fastest split of the same devices.
    pub best_split: (usize, usize),
    /// How much faster it is than this one, as a factor.
    pub best_gain: f64,
    /// What a person should know before starting.
    pub warnings: Vec<String>,
}

/// Prints the plan of a run; returns the launcher's exit code.
pub fn plan(options: &PlanOptions) -> u8 {
    let console = Console::new(true);
    match predict(&options.run, &console) {
        Ok(prediction) if options.json => {
            let text = serde_json::to_string_pretty(&prediction);
            println!("{}", text.expect("a prediction is numbers and text"));
            0
        }
        Ok(prediction) => {
            print!("{}", prediction.text());
            0
        }
        Err(Refusal(lines)) => {
            for line in lines {
                eprintln!("error: {line}");
            }
            2
        }
    }
}

fn predict(options: &Options, console: &Console) -> Result<Prediction, Refusal> {
    // Preparing tries an output directory; this one vanishes again.
    let folder = tempfile::tempdir()?;
    let mut options = options.clone();
    options.output.dir = Some(folder.path().join("run"));
    options.output.resume = false;
    let prepared = prepare(&options, console)?;
    let files = open_target(&options, &prepared.worker.target)?;
    let drafter = DrafterConfig::from_json(&prepared.worker.drafter)?;
    Prediction::of(&prepared, files.config(), &drafter)
}

/// Layers of the target that run.
fn layers_run(drafter: &DrafterConfig, all: usize, to_the_end: bool) -> usize {
    if to_the_end {
        return all;
    }
    let last = drafter.target_layer_ids.iter().max();
    last.map_or(0, |last| last + 1)
}

impl Prediction {
    fn of(
        prepared: &Prepared,
        target: &TargetConfig,
        drafter: &DrafterConfig,
    ) -> Result<Self, Refusal> {
        let (geometry, work) = (&prepared.geometry, &prepared.work);
        let documents: usize = work.units.iter().map(|unit| unit.documents.len()).sum();
        let (tokens, anchors) = (work.units.total_tokens(), work.units.total_anchors());
        let mean_tokens = tokens as f64 / documents.max(1) as f64;
        let cost = predicted_cost(target, drafter, work);
        let layers = layers_run(
            drafter,
            target.num_hidden_layers,
            prepared.worker.loss.use_soft_labels,
        );
        let rates = rates(prepared)?;
        let per_token = |cost: f64| cost / mean_tokens.max(1.0);
        let role = |role: Role, cost: f64| {
            let need = prepared.estimate.of(role);
            let places = prepared.plan.places.iter();
            let of_role: Vec<_> = places.filter(|place| place.worker.role == role).collect();
            let rate = of_role.first().map_or(0.0, |place| match place.device {
                Device::Cpu { threads } => rates.cpu * threads as f64 / rates.crowd,
                Device::Gpu { ordinal } => {
                    let same = prepared.plan.places.iter();
                    let sharing = same.filter(|other| other.device == place.device).count();
                    rates.gpus[ordinal as usize] / sharing.max(1) as f64
                }
            });
            RolePrediction {
                workers: of_role.len(),
                place: of_role
                    .first()
                    .map_or(String::new(), |place| place.device.to_string()),
                operations_per_s: rate,
                operations_per_token: per_token(cost),
                tokens_per_s: of_role.len() as f64 * rate / per_token(cost).max(1.0),
                model_bytes: need.model,
                work_bytes: need.work,
            }
        };
        let targets = role(Role::Target, cost.target);
        let drafters = role(Role::Drafter, cost.drafter);
        let counts = (targets.workers, drafters.workers);
        let slower = targets.tokens_per_s.min(drafters.tokens_per_s);
        let all_tokens = tokens as f64 * f64::from(prepared.plan.epochs);
        let total = counts.0 + counts.1;
        let best = best_split(total, cost);
        let best_gain = split_speed(best, cost) / split_speed(counts, cost);
        let (needed, _) = ring_slots(geometry.units_per_step as usize, counts.1, counts.0);
        let mut prediction = Self {
            target: format!(
                "{}: {} of {} layers run, hidden size {}, {} captured, {} parameters",
                prepared
                    .plan
                    .target
                    .model
                    .as_ref()
                    .map_or("the demo model".to_owned(), |path| path
                        .display()
                        .to_string()),
                layers,
                target.num_hidden_layers,
                target.hidden_size,
                drafter.captured(),
                short(target.parameters(target.num_hidden_layers) as f64)
            ),
            drafter: format!(
                "{} layers, hidden size {}, blocks of {}, {} parameters to train",
                drafter.num_hidden_layers,
                drafter.hidden_size,
                drafter.block_size,
                short(ParamLayout::new(drafter).parameter_count() as f64)
            ),
            units: work.units.len() as usize,
            documents,
            tokens,
            anchors,
            epochs: prepared.plan.epochs,
            steps: work
                .planned_anchors()
                .div_ceil(u64::from(geometry.batch_anchors).max(1)),
            targets,
            drafters,
            slots_needed: needed,
            slots: geometry.slots,
            shared_bytes: geometry.total_bytes()?,
            slot_bytes: geometry.slot_bytes(),
            seconds: if slower > 0.0 {
                all_tokens / slower
            } else {
                0.0
            },
            best_split: best,
            best_gain,
            warnings: Vec::new(),
        };
        prediction.warn(cost, &rates);
        Ok(prediction)
    }

    fn warn(&mut self, cost: RoleCost, rates: &Rates) {
        let (targets, drafters) = (self.targets.tokens_per_s, self.drafters.tokens_per_s);
        let split = (self.targets.workers, self.drafters.workers);
        if targets < 0.8 * drafters {
            self.warnings.push(format!(
                "drafters will starve: they could train on {} tok/s, targets prefill {}",
                short(drafters),
                short(targets)
            ));
        }
        if drafters < 0.5 * targets {
            self.warnings.push(format!(
                "targets will wait more than half of the time: drafters train on {} tok/s, targets could prefill {}",
                short(drafters),
                short(targets)
            ));
        }
        if !rates.gpus.is_empty() && self.best_gain > 1.05 && split != self.best_split {
            let (t, d) = self.best_split;
            self.warnings.push(format!(
                "--split {t}:{d} is predicted to be {:.0} % faster",
                100.0 * (self.best_gain - 1.0)
            ));
        }
        if self.steps < 20 {
            self.warnings.push(format!(
                "only about {} steps: --batch-anchors is large for this data",
                self.steps
            ));
        }
        if cost.drafter <= 0.0 || cost.target <= 0.0 {
            self.warnings
                .push("nothing to compute: is there any document with an anchor?".to_owned());
        }
    }

    /// For a person.
    fn text(&self) -> String {
        let mib = |bytes: u64| {
            let mib = bytes as f64 / f64::from(1 << 20);
            if mib < 10_240.0 {
                format!("{mib:.1} MiB")
            } else {
                format!("{:.1} GiB", mib / 1024.0)
            }
        };
        let mut text = String::new();
        let mut line = |name: &str, what: String| {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{name:<15}{what}");
        };
        line("target", self.target.clone());
        line("drafter", self.drafter.clone());
        line(
            "work",
            format!(
                "{} documents in {} units: {} tokens, {} anchors an epoch; {} epochs, about {} steps",
                self.documents, self.units, self.tokens, self.anchors, self.epochs, self.steps
            ),
        );
        for (name, role) in [("targets", &self.targets), ("drafters", &self.drafters)] {
            line(
                name,
                format!(
                    "{} on {}: {} operations a token, {} operations/s each -> {} tok/s together; memory each {} + about {} of work",
                    role.workers,
                    role.place,
                    short(role.operations_per_token),
                    engineering(role.operations_per_s),
                    short(role.tokens_per_s),
                    mib(role.model_bytes),
                    mib(role.work_bytes)
                ),
            );
        }
        line(
            "ring",
            format!(
                "{} slots of {} ({} needed: the units of the largest step, one prefetched for each drafter, two for each target); {} of shared memory",
                self.slots,
                mib(self.slot_bytes),
                self.slots_needed,
                mib(self.shared_bytes)
            ),
        );
        let (t, d) = self.best_split;
        let reason = format!(
            "a token costs drafters {:.1} times what it costs targets, so of {} workers {t} targets and {d} drafters keep both busy",
            self.drafters.operations_per_token / self.targets.operations_per_token.max(1.0),
            t + d
        );
        line(
            "best split",
            if self.best_gain > 1.005 {
                format!(
                    "{t}:{d}, {:.0} % faster than {}:{}: {reason}",
                    100.0 * (self.best_gain - 1.0),
                    self.targets.workers,
                    self.drafters.workers
                )
            } else {
                format!(
                    "{}:{}: {reason}",
                    self.targets.workers, self.drafters.workers
                )
            },
        );
        line(
            "time",
            format!(
                "about {} of training at the slower role's rate; loading and evaluation come on top",
                duration(self.seconds)
            ),
        );
        for warning in &self.warnings {
            line("warning", warning.clone());
        }
        text
    }
}

fn engineering(rate: f64) -> String {
    match rate {
        rate if rate >= 1e12 => format!("{:.0} T", rate / 1e12),
        rate => format!("{:.1} G", rate / 1e9),
    }
}

/// What devices of this machine do.
struct Rates {
    /// Operations in a second of one CPU thread.
    cpu: f64,
    /// Workers' threads to each thread of the machine, at least 1.
    crowd: f64,
    /// Operations in a second of each visible GPU; empty when the run uses CPUs.
    gpus: Vec<f64>,
}

fn rates(prepared: &Prepared) -> Result<Rates, Refusal> {
    let places = &prepared.plan.places;
    let on_gpus = places
        .iter()
        .any(|place| matches!(place.device, Device::Gpu { .. }));
    if on_gpus {
        let visible = gpus::visible().map_err(|what| Refusal(vec![what]))?;
        return Ok(Rates {
            cpu: 0.0,
            crowd: 1.0,
            gpus: visible.iter().map(|gpu| gpu_rate(&gpu.name)).collect(),
        });
    }
    let wanted: usize = places.iter().map(|place| place.device.threads()).sum();
    Ok(Rates {
        cpu: measured_rate(),
        crowd: (wanted as f64 / machine_threads() as f64).max(1.0),
        gpus: Vec::new(),
    })
}

fn gpu_rate(name: &str) -> f64 {
    let known = GPU_RATES.iter().find(|(part, _)| name.contains(part));
    known.map_or(OTHER_GPU, |(_, rate)| *rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_known_by_its_name() {
        assert_eq!(gpu_rate("NVIDIA H200"), 600e12);
        assert_eq!(gpu_rate("NVIDIA H20"), 110e12);
        assert_eq!(gpu_rate("NVIDIA A100-SXM4-80GB"), 200e12);
        assert_eq!(gpu_rate("Something Else"), OTHER_GPU);
    }
}
