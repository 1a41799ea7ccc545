//! The resolved plan of a run: what plan.toml holds, what workers are told, and what a resumed run must match.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::options::Options;
use super::places::Place;
use crate::train::options::{LossOptions, OptimizerOptions};

/// Why a plan could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file is not a plan of this version.
    #[error("{}: not a plan that this version wrote: {what}", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong, in one line.
        what: String,
    },
}

/// A run, resolved: nothing in it is left to be found out.
///
/// [`Plan::hash`] covers data, template, target, drafter, seed, epochs, packing, batch, loss and optimizer; and
/// there what things are, not where they lie: files count by their content.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Seed of the order, the anchors and the first weights.
    pub seed: u64,
    /// Passes over the data.
    pub epochs: u32,
    /// Documents.
    pub data: DataPlan,
    /// How conversations become text.
    pub template: TemplatePlan,
    /// The frozen model.
    pub target: TargetPlan,
    /// The model to train.
    pub drafter: DrafterPlan,
    /// How documents become units.
    pub packing: PackingPlan,
    /// What a step is.
    pub batch: BatchPlan,
    /// The loss.
    pub loss: LossOptions,
    /// The update.
    pub optimizer: OptimizerOptions,
    /// When to stop early.
    pub limits: LimitPlan,
    /// Slots.
    pub ring: RingPlan,
    /// What is left behind.
    pub output: OutputPlan,
    /// What happens after a fault.
    pub faults: FaultPlan,
    /// Who runs where.
    pub places: Vec<Place>,
}

/// Documents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataPlan {
    /// Where they lie; empty is the demo's.
    pub files: Vec<PathBuf>,
    /// Where the held-out ones lie; empty holds out a share of `files`.
    pub eval_files: Vec<PathBuf>,
    /// How often the documents of each of `files` appear in an epoch; empty: once.
    #[serde(default)]
    pub weights: Vec<f64>,
    /// Hash of the content of all of these.
    pub fingerprint: String,
    /// The share held out.
    pub eval_fraction: f64,
    /// Most tokens held out.
    pub eval_tokens: usize,
    /// Longest document in tokens.
    pub max_length: usize,
    /// Fewest supervised tokens of a document.
    pub min_loss_tokens: usize,
    /// Supervise only the last assistant turn.
    pub last_turn_only: bool,
    /// Rows hold plain text.
    pub raw_text: bool,
}

/// How conversations become text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplatePlan {
    /// A file in place of the model's template.
    pub file: Option<PathBuf>,
    /// Hash of the template's text.
    pub fingerprint: String,
    /// Variables for it, each in JSON.
    pub kwargs: BTreeMap<String, String>,
}

impl TemplatePlan {
    /// The variables, as JSON values.
    pub fn arguments(&self) -> Vec<(String, serde_json::Value)> {
        let value = |text: &String| serde_json::from_str(text).unwrap_or_default();
        let pair = |(key, text): (&String, &String)| (key.clone(), value(text));
        self.kwargs.iter().map(pair).collect()
    }
}

/// The frozen model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetPlan {
    /// Its directory; `None` is the demo model.
    pub model: Option<PathBuf>,
    /// Name and commit of a model that came from a hub, `owner/name@commit`.
    #[serde(default)]
    pub hub: Option<String>,
    /// Hash of its config and weights.
    pub fingerprint: String,
    /// The embedding is the head where nothing says that they are tied.
    pub assume_tied: bool,
    /// It has random weights.
    #[serde(default)]
    pub dummy: bool,
}

/// The model to train.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrafterPlan {
    /// Where its config came from.
    pub config_file: Option<PathBuf>,
    /// Where its first weights came from.
    pub init_from: Option<PathBuf>,
    /// L.
    pub layers: usize,
    /// B.
    pub block_size: usize,
    /// The captured target layers, from 0, rising.
    pub target_layers: Vec<u32>,
    /// Sliding-window attention of this many positions.
    pub sliding_window: Option<usize>,
    /// The token of masked slots.
    pub mask_token_id: u32,
    /// Hash of the whole of its config.json.
    pub fingerprint: String,
}

/// How documents become units.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackingPlan {
    /// Tokens at which a unit is closed.
    pub slot_tokens: usize,
    /// Anchors at which a unit is closed.
    pub unit_anchors: usize,
}

/// What a step is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchPlan {
    /// Anchors of a step, all drafters together.
    pub batch_anchors: u32,
    /// A: most anchors of a document.
    pub anchors: usize,
}

/// When to stop early.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitPlan {
    /// After this step of the run.
    pub max_steps: Option<u32>,
    /// After this many seconds.
    pub time_limit_s: Option<u64>,
}

/// Slots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RingPlan {
    /// How many.
    pub slots: usize,
    /// Most tokens of one target forward.
    pub prefill_tokens: usize,
    /// Check a sum over every payload.
    pub check_payload: bool,
}

/// What is left behind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputPlan {
    /// The output directory.
    pub dir: PathBuf,
    /// Checkpoint every so many steps.
    pub save_every: Option<u32>,
    /// Checkpoints kept.
    pub keep: usize,
    /// Evaluate every so many steps.
    pub eval_every: Option<u32>,
    /// A trained.jsonl whose distribution of units is forced.
    pub replay: Option<PathBuf>,
}

/// What happens after a fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultPlan {
    /// Restarts of dead workers.
    pub restarts: u32,
    /// Set a unit aside after three workers died on it.
    pub quarantine: bool,
}

/// What options alone do not say.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Hash of the content of all data files.
    pub data: String,
    /// Hash of the chat template's text.
    pub template: String,
    /// Hash of the target's config and weights.
    pub target: String,
    /// Name and commit of a target that came from a hub.
    pub hub: Option<String>,
    /// Hash of the whole of the drafter's config.json.
    pub drafter: String,
    /// L.
    pub layers: usize,
    /// B.
    pub block_size: usize,
    /// The captured target layers.
    pub target_layers: Vec<u32>,
    /// Sliding-window attention of this many positions.
    pub sliding_window: Option<usize>,
    /// The token of masked slots.
    pub mask_token_id: u32,
    /// Slots of the ring.
    pub ring_slots: usize,
    /// The output directory.
    pub output: PathBuf,
    /// Who runs where.
    pub places: Vec<Place>,
}

/// The parts that the hash covers.
const HASHED: [&str; 10] = [
    "seed",
    "epochs",
    "data",
    "template",
    "target",
    "drafter",
    "packing",
    "batch",
    "loss",
    "optimizer",
];

/// Inside these parts, what only says where something lies or how it began.
const PLACES_ONLY: [&str; 7] = [
    "data.files",
    "data.eval_files",
    "template.file",
    "target.model",
    "target.hub",
    "drafter.config_file",
    "drafter.init_from",
];

impl Plan {
    /// Options together with what was found out about models, data and machine.
    pub fn new(options: &Options, facts: Facts) -> Self {
        let kwarg = |(key, value): &(String, serde_json::Value)| (key.clone(), value.to_string());
        Self {
            seed: options.data.seed,
            epochs: options.training.epochs,
            data: DataPlan {
                files: options.data.files.clone(),
                eval_files: options.data.eval_files.clone(),
                weights: options.data.weights.clone(),
                fingerprint: facts.data,
                eval_fraction: options.data.eval_fraction,
                eval_tokens: options.data.eval_tokens,
                max_length: options.data.max_length,
                min_loss_tokens: options.data.min_loss_tokens,
                last_turn_only: options.data.last_turn_only,
                raw_text: options.data.raw_text,
            },
            template: TemplatePlan {
                file: options.target.chat_template.clone(),
                fingerprint: facts.template,
                kwargs: options.data.template_kwargs.iter().map(kwarg).collect(),
            },
            target: TargetPlan {
                model: options.target.model.clone(),
                hub: facts.hub,
                fingerprint: facts.target,
                assume_tied: options.target.assume_tied,
                dummy: options.target.dummy,
            },
            drafter: DrafterPlan {
                config_file: options.drafter.config.clone(),
                init_from: options.drafter.init_from.clone(),
                layers: facts.layers,
                block_size: facts.block_size,
                target_layers: facts.target_layers,
                sliding_window: facts.sliding_window,
                mask_token_id: facts.mask_token_id,
                fingerprint: facts.drafter,
            },
            packing: PackingPlan {
                slot_tokens: options.ring.slot_tokens,
                unit_anchors: options.ring.unit_anchors,
            },
            batch: BatchPlan {
                batch_anchors: options.training.batch_anchors,
                anchors: options.training.anchors,
            },
            loss: options.loss,
            optimizer: options.optimizer.clone(),
            limits: LimitPlan {
                max_steps: options.training.max_steps,
                time_limit_s: options.training.time_limit.map(|limit| limit.as_secs()),
            },
            ring: RingPlan {
                slots: facts.ring_slots,
                prefill_tokens: options.ring.prefill_tokens,
                check_payload: options.ring.check_payload,
            },
            output: OutputPlan {
                dir: facts.output,
                save_every: options.output.save_every,
                keep: options.output.keep,
                eval_every: options.output.eval_every,
                replay: options.output.replay.clone(),
            },
            faults: FaultPlan {
                restarts: options.faults.restarts,
                quarantine: options.faults.quarantine,
            },
            places: facts.places,
        }
    }

    /// The plan hash, in hex.
    pub fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for (key, value) in self.hashed() {
            hasher.update(format!("{key} = {value}\n").as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// What a resumed run of `other` would change in the parts that the hash covers, one line each.
    pub fn diff(&self, other: &Self) -> Vec<String> {
        let (mine, theirs) = (self.hashed(), other.hashed());
        let keys: std::collections::BTreeSet<&String> = mine.keys().chain(theirs.keys()).collect();
        let shown = |value: Option<&String>| value.map_or("not set", String::as_str).to_owned();
        keys.into_iter()
            .filter(|key| mine.get(*key) != theirs.get(*key))
            .map(|key| {
                format!(
                    "{key}: {} then, {} now",
                    shown(mine.get(key)),
                    shown(theirs.get(key))
                )
            })
            .collect()
    }

    /// Every value that the hash covers, by its path in plan.toml.
    fn hashed(&self) -> BTreeMap<String, String> {
        let table = toml::Table::try_from(self).expect("a plan holds only what TOML can say");
        let mut values = BTreeMap::new();
        for part in HASHED {
            if let Some(value) = table.get(part) {
                flatten(part, value, &mut values);
            }
        }
        values.retain(|key, _| !PLACES_ONLY.contains(&key.as_str()));
        values
    }

    /// The text of plan.toml: the hash, then everything.
    pub fn to_toml(&self) -> String {
        let body = toml::to_string(self).expect("a plan holds only what TOML can say");
        format!("# plan hash {}\n{body}", self.hash())
    }

    /// Reads a plan.toml.
    ///
    /// # Errors
    ///
    /// [`PlanError`]: the file cannot be read, or is no plan.
    pub fn read(path: &Path) -> Result<Self, PlanError> {
        let text = std::fs::read_to_string(path).map_err(|source| PlanError::File {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    /// Understands the text of a plan.toml that lies at `path`.
    ///
    /// # Errors
    ///
    /// [`PlanError::Form`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, PlanError> {
        toml::from_str(text).map_err(|error| PlanError::Form {
            path: path.to_owned(),
            what: error.message().to_owned(),
        })
    }
}

fn flatten(key: &str, value: &toml::Value, into: &mut BTreeMap<String, String>) {
    match value {
        toml::Value::Table(table) => {
            for (name, value) in table {
                flatten(&format!("{key}.{name}"), value, into);
            }
        }
        toml::Value::Float(number) => {
            // Options in single precision are shown, and hashed, with the digits that they were given in.
            let single = *number as f32;
            let text = if f64::from(single) == *number {
                single.to_string()
            } else {
                number.to_string()
            };
            into.insert(key.to_owned(), text);
        }
        other => {
            into.insert(key.to_owned(), other.to_string());
        }
    }
}

impl fmt::Display for Plan {
    /// The few lines that a run begins with.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let model = self
            .target
            .model
            .as_ref()
            .map_or("the demo model".to_owned(), |path| {
                path.display().to_string()
            });
        let data = match self.data.files.as_slice() {
            [] => "the demo conversations".to_owned(),
            [one] => one.display().to_string(),
            [first, rest @ ..] => format!("{} and {} more", first.display(), rest.len()),
        };
        writeln!(
            f,
            "target {model}, data {data}, {} epoch(s), output {}",
            self.epochs,
            self.output.dir.display()
        )?;
        write!(f, "places:")?;
        for (number, place) in self.places.iter().enumerate() {
            let comma = if number == 0 { "" } else { "," };
            write!(f, "{comma} {} on {}", place.worker, place.device)?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::cli::{self, Invocation};
    use super::super::places::{RoleCost, cpu_places};
    use super::*;

    pub(crate) fn plan(words: &[&str]) -> Plan {
        let words = ["launcher"].into_iter().chain(words.iter().copied());
        let Ok(Invocation::Train(options)) = cli::parse(words) else {
            panic!("not a run")
        };
        let cost = RoleCost {
            target: 1.0,
            drafter: 1.0,
        };
        let facts = Facts {
            data: "d".to_owned(),
            template: "t".to_owned(),
            target: "m".to_owned(),
            hub: None,
            drafter: "c".to_owned(),
            layers: options.drafter.layers.unwrap(),
            block_size: options.drafter.block_size.unwrap(),
            target_layers: vec![1, 3, 5],
            sliding_window: None,
            mask_token_id: 3,
            ring_slots: 28,
            output: options.output.dir.clone().unwrap_or_default(),
            places: cpu_places(4, options.places.cpu.0, options.places.cpu.1, cost),
        };
        Plan::new(&options, facts)
    }

    #[test]
    fn a_plan_survives_its_file_and_the_control_channel() {
        let plan = plan(&[
            "--dpace-alpha",
            "0.3",
            "--template-kwarg",
            "x={\"a\":1}",
            "--max-steps",
            "7",
        ]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.toml");
        std::fs::write(&path, plan.to_toml()).unwrap();
        let read = Plan::read(&path).unwrap();
        assert_eq!(read, plan);
        assert_eq!(read.hash(), plan.hash());
        let bytes = postcard::to_allocvec(&plan).unwrap();
        assert_eq!(postcard::from_bytes::<Plan>(&bytes).unwrap(), plan);
    }

    #[test]
    fn the_hash_covers_what_is_learned_and_nothing_else() {
        let base = plan(&[]);
        for same in [
            &["--cpu", "1:3"][..],
            &["--prefill-tokens", "99"],
            &["--output", "elsewhere"],
            &["--save-every", "5", "--keep", "9", "--eval-every", "3"],
            &["--max-steps", "9", "--time-limit", "5m"],
            &["--quiet", "--check-payload", "--no-quarantine"],
        ] {
            assert_eq!(plan(same).hash(), base.hash(), "{same:?}");
            assert!(base.diff(&plan(same)).is_empty());
        }
        for (other, names) in [
            (&["--seed", "1"][..], "seed"),
            (&["--epochs", "2"], "epochs"),
            (&["--slot-tokens", "777"], "packing.slot_tokens"),
            (&["--unit-anchors", "77"], "packing.unit_anchors"),
            (&["--anchors", "7"], "batch.anchors"),
            (&["--batch-anchors", "7"], "batch.batch_anchors"),
            (&["--lr", "1e-4"], "optimizer.lr"),
            (&["--schedule", "wsd"], "optimizer.schedule"),
            (&["--gamma", "3"], "loss.gamma"),
            (&["--dpace-alpha", "0.5"], "loss.dpace_alpha"),
            (&["--block-size", "4"], "drafter.block_size"),
            (&["--max-length", "99"], "data.max_length"),
            (&["--eval-fraction", "0.1"], "data.eval_fraction"),
            (&["--template-kwarg", "a=b"], "template.kwargs.a"),
        ] {
            let other = plan(other);
            assert_ne!(other.hash(), base.hash(), "{names}");
            let diff = base.diff(&other);
            assert!(
                diff.len() == 1 && diff[0].starts_with(&format!("{names}: ")),
                "{diff:?}"
            );
        }
        let mut moved = base.clone();
        moved.target.model = Some("elsewhere".into());
        moved.target.hub = Some("some-lab/model@0123".into());
        moved.data.files = vec!["there.jsonl".into()];
        assert_eq!(moved.hash(), base.hash());
        let mut other = base.clone();
        other.data.fingerprint = "e".to_owned();
        assert_eq!(
            base.diff(&other),
            ["data.fingerprint: \"d\" then, \"e\" now"]
        );
    }

    #[test]
    fn a_difference_says_both_values() {
        let diff = plan(&[]).diff(&plan(&["--dpace-alpha", "0.3", "--lr", "0.1"]));
        assert_eq!(
            diff,
            [
                "loss.dpace_alpha: not set then, 0.3 now",
                "optimizer.lr: 0.003 then, 0.1 now"
            ]
        );
    }

    #[test]
    fn a_file_of_another_form_is_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.toml");
        std::fs::write(&path, "seed = 1\n").unwrap();
        let error = Plan::read(&path).unwrap_err().to_string();
        assert!(
            error.contains("not a plan") && !error.contains('\n'),
            "{error}"
        );
    }
}
