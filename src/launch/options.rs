//! What a run was asked for, typed and checked; still without any fact about models, data or machine.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::debug::DebugOptions;
use super::flags::{Mistake, Values};
use super::hub::HubName;
use super::metrics_port::read_address;
use super::places::parse_gpus;
use super::recorder::RecorderOptions;
use crate::control::{Role, WorkerName};
use crate::data::TextOptions;
use crate::train::options::{LossOptions, OptimizerOptions, Schedule};

/// The options of a training run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Neither a model nor data was given: the built-in demo.
    pub demo: bool,
    /// Who runs.
    pub places: PlaceOptions,
    /// The frozen model.
    pub target: TargetOptions,
    /// The model to train.
    pub drafter: DrafterOptions,
    /// Documents and how they are read.
    pub data: DataOptions,
    /// How long, and how large a step.
    pub training: TrainingOptions,
    /// The loss.
    pub loss: LossOptions,
    /// The update.
    pub optimizer: OptimizerOptions,
    /// Units and slots.
    pub ring: RingOptions,
    /// What is left behind, and where.
    pub output: OutputOptions,
    /// What is shown.
    pub watch: WatchOptions,
    /// What happens after a fault.
    pub faults: FaultOptions,
}

/// Who runs.
#[derive(Clone, Debug)]
pub struct PlaceOptions {
    /// Targets and drafters on CPUs.
    pub cpu: (usize, usize),
    /// Whether CPU places were asked for.
    pub cpu_given: bool,
    /// GPUs that were asked for.
    pub gpus: Option<Vec<u32>>,
    /// Targets and drafters on GPUs.
    pub split: Option<(usize, usize)>,
    /// The GPUs of targets and of drafters, one by one.
    pub lists: Option<(Vec<u32>, Vec<u32>)>,
}

/// The frozen model.
#[derive(Clone, Debug)]
pub struct TargetOptions {
    /// Its directory; `None` is the demo model.
    pub model: Option<PathBuf>,
    /// A chat template in place of the model's.
    pub chat_template: Option<PathBuf>,
    /// Take the embedding as head where nothing says that they are tied.
    pub assume_tied: bool,
    /// Random weights of its config's sizes, in place of its files.
    pub dummy: bool,
}

impl TargetOptions {
    /// Whether the model is a name on a hub.
    pub fn is_named(&self) -> bool {
        self.model
            .as_deref()
            .is_some_and(|m| HubName::parse(m).is_some())
    }
}

/// The model to train.
#[derive(Clone, Debug)]
pub struct DrafterOptions {
    /// A config.json with its sizes.
    pub config: Option<PathBuf>,
    /// L; `None` leaves it to `config`.
    pub layers: Option<usize>,
    /// B; `None` leaves it to `config`.
    pub block_size: Option<usize>,
    /// The captured target layers, rising; `None` is the default spread, or what `config` says.
    pub target_layers: Option<Vec<u32>>,
    /// Sliding-window attention of this many positions.
    pub sliding_window: Option<usize>,
    /// The token of masked slots; `None` finds an unused one.
    pub mask_token_id: Option<u32>,
    /// A checkpoint to take the first weights from.
    pub init_from: Option<PathBuf>,
}

/// Documents and how they are read.
#[derive(Clone, Debug)]
pub struct DataOptions {
    /// Conversations; empty is the demo's.
    pub files: Vec<PathBuf>,
    /// For each of `files`, how often its documents appear in an epoch; empty: once.
    pub weights: Vec<f64>,
    /// Held-out conversations; empty holds out a share of `files`.
    pub eval_files: Vec<PathBuf>,
    /// The share held out, 0..=0.5.
    pub eval_fraction: f64,
    /// Most tokens held out.
    pub eval_tokens: usize,
    /// Variables for the chat template.
    pub template_kwargs: Vec<(String, serde_json::Value)>,
    /// Longest document in tokens.
    pub max_length: usize,
    /// Fewest supervised tokens of a document.
    pub min_loss_tokens: usize,
    /// Supervise only the last assistant turn.
    pub last_turn_only: bool,
    /// Rows hold plain text.
    pub raw_text: bool,
    /// Seed of the order, the anchors and the first weights.
    pub seed: u64,
}

/// How long a run is, and how large a step.
#[derive(Clone, Debug)]
pub struct TrainingOptions {
    /// Passes over the data.
    pub epochs: u32,
    /// Stop after this step of the run.
    pub max_steps: Option<u32>,
    /// Stop after this long.
    pub time_limit: Option<Duration>,
    /// Anchors of a step, all drafters together.
    pub batch_anchors: u32,
    /// A: most anchors of a document.
    pub anchors: usize,
}

/// Units and slots.
#[derive(Clone, Debug)]
pub struct RingOptions {
    /// Slots; `None` follows [`super::places::ring_slots`].
    pub slots: Option<usize>,
    /// Tokens at which a unit is closed.
    pub slot_tokens: usize,
    /// Anchors at which a unit is closed.
    pub unit_anchors: usize,
    /// Most tokens of one target forward.
    pub prefill_tokens: usize,
    /// Check a sum over every payload.
    pub check_payload: bool,
}

/// What is left behind, and where.
#[derive(Clone, Debug)]
pub struct OutputOptions {
    /// The output directory; `None` is the first free one under `runs`.
    pub dir: Option<PathBuf>,
    /// Remove an earlier run's files.
    pub overwrite: bool,
    /// Checkpoint every so many steps; `None` only at the end.
    pub save_every: Option<u32>,
    /// Checkpoints kept.
    pub keep: usize,
    /// Evaluate every so many steps; `None` only before and after.
    pub eval_every: Option<u32>,
    /// Go on from the latest checkpoint.
    pub resume: bool,
    /// A trained.jsonl whose distribution of units is forced.
    pub replay: Option<PathBuf>,
}

/// What is shown.
#[derive(Clone, Debug)]
pub struct WatchOptions {
    /// Only warnings and the report.
    pub quiet: bool,
    /// Workers whose logs are copied to the console.
    pub show: Vec<WorkerName>,
    /// What is recorded beside the files that every run leaves.
    pub record: RecorderOptions,
}

/// What happens after a fault.
#[derive(Clone, Debug)]
pub struct FaultOptions {
    /// Restarts of dead workers.
    pub restarts: u32,
    /// Set a unit aside after three workers died on it.
    pub quarantine: bool,
    /// Workers that start under a debugger, or wait for one.
    pub debug: DebugOptions,
}

/// Where one process computes.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// On the CPU, whatever GPUs there are.
    pub cpu: bool,
    /// GPUs that were asked for.
    pub gpus: Option<Vec<u32>>,
}

impl DeviceOptions {
    fn resolve(values: &mut Values) -> Self {
        let cpu = values.switch("cpu");
        let gpus = values.text("gpus").map(parse_gpus);
        let gpus = gpus.and_then(|list| list.map_err(|what| values.wrong("gpus", what)).ok());
        if cpu && gpus.is_some() {
            values.wrong("gpus", "and --cpu exclude each other");
        }
        Self { cpu, gpus }
    }
}

/// What `launcher eval` was asked for.
#[derive(Clone, Debug)]
pub struct EvalOptions {
    /// A run's output directory or a checkpoint.
    pub checkpoint: PathBuf,
    /// On what.
    pub device: DeviceOptions,
    /// The frozen model; `None` is the run's.
    pub target_model: Option<PathBuf>,
    /// Conversations to take prompts from, each file a set; empty is the run's held-out documents.
    pub prompts: Vec<PathBuf>,
    /// A chat template; `None` is the run's.
    pub chat_template: Option<PathBuf>,
    /// Most prompts of a set.
    pub documents: usize,
    /// Node budgets of draft trees to decode with too.
    pub trees: Vec<usize>,
    /// Longest answer in tokens.
    pub max_new_tokens: usize,
    /// 0: greedily.
    pub temperature: f64,
    /// Of the draws.
    pub seed: u64,
    /// Where eval.json and the plots go.
    pub output: Option<PathBuf>,
    /// Where to write the figures too.
    pub json: Option<PathBuf>,
    /// Print only the figures.
    pub quiet: bool,
}

/// What `launcher check-data` was asked for.
#[derive(Clone, Debug)]
pub struct CheckDataOptions {
    /// Data files, or folders of them.
    pub files: Vec<PathBuf>,
    /// Whose tokenizer and template; `None` is the built-in demo model's.
    pub target_model: Option<PathBuf>,
    /// A chat template in place of the model's.
    pub chat_template: Option<PathBuf>,
    /// How rows become tokens.
    pub text: TextOptions,
    /// Rows to show token by token; `None` shows the first few documents.
    pub rows: Option<Vec<u32>>,
    /// Print the figures as JSON.
    pub json: bool,
}

/// What `launcher generate` was asked for.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// On what.
    pub device: DeviceOptions,
    /// Who answers.
    pub answerer: Answerer,
    /// Conversations to answer; empty is the demo's.
    pub prompts: Vec<PathBuf>,
    /// Answers to each conversation.
    pub samples: usize,
    /// Only the first conversations.
    pub limit: Option<usize>,
    /// Longest answer in tokens.
    pub max_new_tokens: usize,
    /// Longest conversation in tokens.
    pub max_length: usize,
    /// 0: greedily.
    pub temperature: f64,
    /// Of the draws.
    pub seed: u64,
    /// Where the rows go.
    pub output: PathBuf,
    /// Keep what it holds.
    pub resume: bool,
    /// Replace it.
    pub overwrite: bool,
    /// Print only warnings and the result.
    pub quiet: bool,
}

/// Who answers.
#[derive(Clone, Debug)]
pub enum Answerer {
    /// A model, in this process.
    Model {
        /// Its directory and template; no model is the demo's.
        target: TargetOptions,
        /// Variables for the chat template.
        template_kwargs: Vec<(String, serde_json::Value)>,
        /// Sequences at a time on each device; `None` depends on the device.
        batch: Option<usize>,
        /// Tokens of a forward beyond which no further prompt begins in it.
        prefill_tokens: usize,
    },
    /// An OpenAI-compatible server.
    Endpoint {
        /// Its address, up to `/v1`.
        url: String,
        /// Its name of the model; `None` is the first it lists.
        model: Option<String>,
        /// Requests at a time.
        concurrency: usize,
        /// Further tries after a failure.
        retries: u32,
        /// Longest wait for an answer.
        timeout: Duration,
    },
}

/// What `launcher export` was asked for.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// A checkpoint or a run's output directory.
    pub checkpoint: PathBuf,
    /// Where to write it.
    pub to: PathBuf,
    /// Write into a directory that is not empty.
    pub overwrite: bool,
}

/// Checked by the table: every number below fits the type it is read into, and every default reads.
const IN_TABLE: &str = "the table of options gives every one of these a default";

fn size(values: &Values, name: &str) -> Option<usize> {
    values.int(name).map(|number| number as usize)
}

fn small(values: &Values, name: &str) -> Option<u32> {
    values.int(name).map(|number| number as u32)
}

fn path(values: &Values, name: &str) -> Option<PathBuf> {
    values.text(name).map(PathBuf::from)
}

fn paths(values: &Values, name: &str) -> Vec<PathBuf> {
    values.texts(name).into_iter().map(PathBuf::from).collect()
}

impl Options {
    /// From checked values to options.
    ///
    /// # Errors
    ///
    /// Every value that could not be understood, and every combination that cannot be honoured.
    pub fn resolve(mut values: Values, demo: bool) -> Result<Self, Vec<Mistake>> {
        check_combinations(&mut values, demo);
        if !values.mistakes.is_empty() {
            return Err(values.mistakes);
        }
        let values = &values;
        let int = |name| size(values, name).expect(IN_TABLE);
        let real = |name| values.real(name).expect(IN_TABLE);
        let config = path(values, "draft-config");
        // With a config file only a flag overrides what the file says, not the table's default.
        let sized = |name| {
            if config.is_some() && !values.given(name) {
                None
            } else {
                size(values, name)
            }
        };
        let layers = sized("draft-layers");
        let block_size = sized("block-size");
        Ok(Self {
            demo,
            places: PlaceOptions {
                cpu: values.pair("cpu").expect(IN_TABLE),
                cpu_given: values.given("cpu"),
                gpus: gpu_list(values, "gpus"),
                split: values.pair("split"),
                lists: gpu_list(values, "targets").zip(gpu_list(values, "drafters")),
            },
            target: TargetOptions {
                model: path(values, "target-model"),
                chat_template: path(values, "chat-template"),
                assume_tied: values.switch("assume-tied"),
                dummy: values.text("load-format") == Some("dummy"),
            },
            drafter: DrafterOptions {
                layers,
                block_size,
                target_layers: values
                    .ints("target-layers")
                    .or_else(|| demo.then(|| vec![1, 3, 5])),
                sliding_window: size(values, "sliding-window"),
                mask_token_id: small(values, "mask-token-id"),
                init_from: path(values, "init-from"),
                config,
            },
            data: DataOptions {
                files: paths(values, "data"),
                weights: values.reals("data-weights"),
                eval_files: paths(values, "eval-data"),
                eval_fraction: real("eval-fraction"),
                eval_tokens: int("eval-tokens"),
                template_kwargs: template_kwargs(values),
                max_length: int("max-length"),
                min_loss_tokens: int("min-loss-tokens"),
                last_turn_only: values.switch("last-turn-only"),
                raw_text: values.switch("raw-text"),
                seed: values.int("seed").expect(IN_TABLE),
            },
            training: TrainingOptions {
                epochs: small(values, "epochs").expect(IN_TABLE),
                max_steps: small(values, "max-steps"),
                time_limit: values.int("time-limit").map(Duration::from_secs),
                batch_anchors: small(values, "batch-anchors").expect(IN_TABLE),
                anchors: int("anchors"),
            },
            loss: LossOptions {
                gamma: real("gamma") as f32,
                streak_alpha: real("streak-alpha") as f32,
                dpace_alpha: values.real("dpace-alpha").map(|alpha| alpha as f32),
                use_soft_labels: values.switch("use-soft-labels"),
                kl_temperature: real("kl-temperature") as f32,
                kl_weight: real("kl-weight") as f32,
                cap_lambda: real("cap-lambda") as f32,
            },
            optimizer: OptimizerOptions {
                lr: real("lr"),
                weight_decay: real("weight-decay"),
                clip: real("clip"),
                schedule: values
                    .text("schedule")
                    .and_then(|name| name.parse::<Schedule>().ok())
                    .expect(IN_TABLE),
                warmup: real("warmup"),
                ..OptimizerOptions::default()
            },
            ring: RingOptions {
                slots: size(values, "ring-slots"),
                slot_tokens: int("slot-tokens"),
                unit_anchors: unit_anchors(values),
                prefill_tokens: int("prefill-tokens"),
                check_payload: values.switch("check-payload"),
            },
            output: OutputOptions {
                dir: path(values, "output"),
                overwrite: values.switch("overwrite"),
                save_every: small(values, "save-every"),
                keep: int("keep"),
                eval_every: small(values, "eval-every"),
                resume: values.switch("resume"),
                replay: path(values, "replay"),
            },
            watch: WatchOptions {
                quiet: values.switch("quiet"),
                show: values.workers("show"),
                record: RecorderOptions {
                    tensorboard: values.switch("tensorboard"),
                    metrics_port: values
                        .text("metrics-port")
                        .and_then(|text| read_address(text).ok()),
                },
            },
            faults: FaultOptions {
                restarts: small(values, "restarts").expect(IN_TABLE),
                quarantine: !values.switch("no-quarantine"),
                debug: debug_options(values).unwrap_or_default(),
            },
        })
    }

    /// The name of a run whose output directory was not given: `demo`, or the first data file's stem.
    pub fn default_name(&self) -> String {
        let stem = self.data.files.first().and_then(|file| file.file_stem());
        stem.map_or_else(
            || "demo".to_owned(),
            |stem| stem.to_string_lossy().into_owned(),
        )
    }

    /// Every file and directory named by an option that is not there or is not what it should be; those of data,
    /// template and model aside, which say more about it themselves when they are opened.
    pub fn missing_files(&self) -> Vec<Mistake> {
        let mut mistakes = Vec::new();
        let mut file = |name: &str, path: &Path| {
            let what = match std::fs::metadata(path) {
                Err(error) => error.to_string(),
                Ok(found) if found.is_dir() => "is a directory, not a file".to_owned(),
                Ok(_) => return,
            };
            mistakes.push(Mistake(format!("--{name} {}: {what}", path.display())));
        };
        self.drafter
            .config
            .iter()
            .for_each(|path| file("draft-config", path));
        self.output
            .replay
            .iter()
            .for_each(|path| file("replay", path));
        let mut directory = |name: &str, path: &Path| {
            let what = match std::fs::metadata(path) {
                Err(error) => error.to_string(),
                Ok(found) if found.is_dir() => return,
                Ok(_) => "is a file, not a directory".to_owned(),
            };
            mistakes.push(Mistake(format!("--{name} {}: {what}", path.display())));
        };
        self.drafter
            .init_from
            .iter()
            .for_each(|path| directory("init-from", path));
        mistakes
    }
}

/// Anchors at which a unit is closed. Unless it was said, a step takes at least four units where documents allow,
/// so that drafters share it evenly; the number of drafters itself must not change how documents are packed.
fn unit_anchors(values: &Values) -> usize {
    let int = |name| size(values, name).expect(IN_TABLE);
    let unit = int("unit-anchors");
    if values.given("unit-anchors") {
        return unit;
    }
    unit.min((int("batch-anchors") / 4).max(int("anchors")))
}

/// `V` of a template variable is JSON where it reads as JSON, else text.
fn template_kwargs(values: &Values) -> Vec<(String, serde_json::Value)> {
    let pairs = values.key_values("template-kwarg").into_iter();
    pairs
        .map(|(key, value)| {
            let value = serde_json::from_str(&value).unwrap_or(serde_json::Value::String(value));
            (key, value)
        })
        .collect()
}

fn gpu_list(values: &Values, name: &str) -> Option<Vec<u32>> {
    parse_gpus(values.text(name)?).ok()
}

/// Flags about GPUs, each by itself and against the others.
fn check_gpus(values: &mut Values) {
    for name in ["gpus", "targets", "drafters"] {
        let Some(list) = values.text(name).map(ToOwned::to_owned) else {
            continue;
        };
        match parse_gpus(&list) {
            Err(what) if name == "drafters" && what.ends_with("twice") => {
                let why = "two drafters on one GPU would only take turns";
                values.wrong(name, format!("{what}: {why}"));
            }
            Err(what) => values.wrong(name, what),
            Ok(_) => {}
        }
        if values.given("cpu") {
            values.wrong(name, "and --cpu exclude each other");
        }
    }
    if values.given("split") && values.given("cpu") {
        values.wrong("split", "is for GPUs; --cpu T:D already says how many");
    }
    for (name, other) in [("targets", "drafters"), ("drafters", "targets")] {
        if !values.given(name) {
            continue;
        }
        if !values.given(other) {
            values.wrong(name, format!("needs --{other} beside it"));
        }
        for whole in ["gpus", "split"] {
            if values.given(whole) {
                values.wrong(
                    whole,
                    format!("and --{name} exclude each other: the lists say all"),
                );
            }
        }
    }
}

fn debug_options(values: &Values) -> Result<DebugOptions, Vec<(&'static str, String)>> {
    DebugOptions::read(
        &values.texts("wait-for-debugger"),
        &values.key_values("debugger-prefix"),
    )
}

/// What no single option can know.
fn check_combinations(values: &mut Values, demo: bool) {
    if let Some(Err(what)) = values.text("metrics-port").map(read_address) {
        values.wrong("metrics-port", what);
    }
    for (name, what) in debug_options(values).err().into_iter().flatten() {
        values.wrong(name, what);
    }
    let has_data = !values.texts("data").is_empty();
    let has_model = values.text("target-model").is_some();
    check_gpus(values);
    if !demo && has_model && !has_data {
        values.wrong("data", "is missing: which conversations to train on (only the demo, without a model, brings its own)");
    }
    if !demo && has_data && !has_model {
        values.wrong("target-model", "is missing: which model to train a drafter for (only the demo, without data, brings its own)");
    }
    let weights = values.reals("data-weights").len();
    let files = values.texts("data").len();
    if weights > 0 && weights != files {
        values.wrong(
            "data-weights",
            format!("{weights} weights for {files} paths of --data; give one for each"),
        );
    }
    if let Some(layers) = values.ints("target-layers")
        && !layers.is_sorted_by(|a, b| a < b)
    {
        values.wrong("target-layers", "must rise, each layer once");
    }
    check_raw_text(values);
    if values.switch("resume") {
        if values.switch("overwrite") {
            values.wrong("overwrite", "would remove what --resume goes on from");
        }
        if values.text("output").is_none() {
            values.wrong(
                "output",
                "is missing: --resume goes on in a run's own output directory",
            );
        }
        if values.given("init-from") {
            values.wrong(
                "init-from",
                "the weights come from the checkpoint with --resume",
            );
        }
        if values.given("replay") {
            values.wrong(
                "replay",
                "begins with a run's first step; it cannot go on from a checkpoint",
            );
        }
    }
    let lists = gpu_list(values, "targets").zip(gpu_list(values, "drafters"));
    let counts = lists.map(|(targets, drafters)| (targets.len(), drafters.len()));
    if let Some((targets, drafters)) = counts
        .or_else(|| values.pair("split"))
        .or_else(|| values.pair("cpu"))
    {
        for name in values.workers("show") {
            let count = match name.role {
                Role::Target => targets,
                Role::Drafter => drafters,
            };
            if name.rank as usize >= count {
                values.wrong(
                    "show",
                    format!(
                        "there is no {}:{} (ranks 0 to {})",
                        name.role,
                        name.rank,
                        count - 1
                    ),
                );
            }
        }
    }
}

fn check_raw_text(values: &mut Values) {
    if values.switch("raw-text") {
        for name in ["chat-template", "last-turn-only", "template-kwarg"] {
            if values.given(name) {
                values.wrong(name, "has no meaning with --raw-text");
            }
        }
    }
}

impl CheckDataOptions {
    /// From checked values to options.
    ///
    /// # Errors
    ///
    /// Every value that could not be understood, and every combination that cannot be honoured.
    pub fn resolve(files: Vec<PathBuf>, mut values: Values) -> Result<Self, Vec<Mistake>> {
        check_raw_text(&mut values);
        if !values.mistakes.is_empty() {
            return Err(values.mistakes);
        }
        Ok(Self {
            files,
            target_model: path(&values, "target-model"),
            chat_template: path(&values, "chat-template"),
            text: TextOptions {
                max_length: size(&values, "max-length").expect(IN_TABLE),
                min_loss_tokens: size(&values, "min-loss-tokens").expect(IN_TABLE),
                last_turn_only: values.switch("last-turn-only"),
                raw_text: values.switch("raw-text"),
                template_kwargs: template_kwargs(&values),
            },
            rows: values.ints("rows"),
            json: values.switch("json"),
        })
    }
}

impl EvalOptions {
    /// From checked values to options.
    ///
    /// # Errors
    ///
    /// Every value that could not be understood.
    pub fn resolve(checkpoint: PathBuf, mut values: Values) -> Result<Self, Vec<Mistake>> {
        let trees = values.ints("tree").unwrap_or_default();
        if trees.iter().any(|nodes| !(1..=4096).contains(nodes)) {
            values.wrong("tree", "must be numbers of nodes from 1 to 4096");
        }
        let device = DeviceOptions::resolve(&mut values);
        if !values.mistakes.is_empty() {
            return Err(values.mistakes);
        }
        Ok(Self {
            checkpoint,
            device,
            target_model: path(&values, "target-model"),
            prompts: paths(&values, "prompts"),
            chat_template: path(&values, "chat-template"),
            documents: size(&values, "documents").expect(IN_TABLE),
            trees: trees.into_iter().map(|nodes| nodes as usize).collect(),
            max_new_tokens: size(&values, "max-new-tokens").expect(IN_TABLE),
            temperature: values.real("temperature").expect(IN_TABLE),
            seed: values.int("seed").expect(IN_TABLE),
            output: path(&values, "output"),
            json: path(&values, "json"),
            quiet: values.switch("quiet"),
        })
    }
}

impl GenerateOptions {
    /// From checked values to options.
    ///
    /// # Errors
    ///
    /// Every value that could not be understood, and every combination that cannot be honoured.
    pub fn resolve(mut values: Values) -> Result<Self, Vec<Mistake>> {
        let endpoint = values.text("endpoint").map(str::to_owned);
        let (of_model, of_endpoint) = (
            [
                "target-model",
                "chat-template",
                "template-kwarg",
                "assume-tied",
                "batch",
                "prefill-tokens",
                "cpu",
                "gpus",
            ],
            ["model", "concurrency", "retries", "timeout"],
        );
        let (idle, when): (&[&str], _) = match endpoint {
            Some(_) => (
                &of_model,
                "has no meaning with --endpoint: the server has its own",
            ),
            None => (
                &of_endpoint,
                "is for a server: give its address with --endpoint",
            ),
        };
        for name in idle {
            if values.given(name) {
                values.wrong(name, when);
            }
        }
        if endpoint.is_some() && values.texts("prompts").is_empty() {
            values.wrong("prompts", "is missing: which conversations to answer");
        }
        if values.text("target-model").is_some() && values.texts("prompts").is_empty() {
            values.wrong("prompts", "is missing: which conversations to answer (only the demo, without a model, brings its own)");
        }
        let samples = size(&values, "samples").unwrap_or(1);
        if samples > 1 && values.real("temperature") == Some(0.0) {
            values.wrong("samples", "would all be the same without --temperature");
        }
        if values.switch("resume") && values.switch("overwrite") {
            values.wrong("overwrite", "would remove what --resume goes on from");
        }
        let mut device = DeviceOptions::resolve(&mut values);
        // Somebody else computes then.
        device.cpu |= endpoint.is_some();
        if !values.mistakes.is_empty() {
            return Err(values.mistakes);
        }
        let values = &values;
        let answerer = match endpoint {
            Some(url) => Answerer::Endpoint {
                url,
                model: values.text("model").map(str::to_owned),
                concurrency: size(values, "concurrency").expect(IN_TABLE),
                retries: small(values, "retries").expect(IN_TABLE),
                timeout: Duration::from_secs(values.int("timeout").expect(IN_TABLE)),
            },
            None => Answerer::Model {
                target: TargetOptions {
                    model: path(values, "target-model"),
                    chat_template: path(values, "chat-template"),
                    assume_tied: values.switch("assume-tied"),
                    dummy: false,
                },
                template_kwargs: template_kwargs(values),
                batch: size(values, "batch"),
                prefill_tokens: size(values, "prefill-tokens").expect(IN_TABLE),
            },
        };
        Ok(Self {
            device,
            answerer,
            prompts: paths(values, "prompts"),
            samples,
            limit: size(values, "limit"),
            max_new_tokens: size(values, "max-new-tokens").expect(IN_TABLE),
            max_length: size(values, "max-length").expect(IN_TABLE),
            temperature: values.real("temperature").expect(IN_TABLE),
            seed: values.int("seed").expect(IN_TABLE),
            output: path(values, "output").unwrap_or_else(|| PathBuf::from("generated.jsonl")),
            resume: values.switch("resume"),
            overwrite: values.switch("overwrite"),
            quiet: values.switch("quiet"),
        })
    }
}

impl ExportOptions {
    /// From checked values to options.
    ///
    /// # Errors
    ///
    /// Every value that could not be understood.
    pub fn resolve(checkpoint: PathBuf, to: PathBuf, values: Values) -> Result<Self, Vec<Mistake>> {
        if !values.mistakes.is_empty() {
            return Err(values.mistakes);
        }
        Ok(Self {
            checkpoint,
            to,
            overwrite: values.switch("overwrite"),
        })
    }
}
