//! From options to a run that can start: files are read and compared, work is packed, everything is decided.
//!
//! Problems of files, model and data are collected and refused together, before anything is started.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::gpus::{self, Gpu};
use super::memory::{self, Estimate};
use super::options::Options;
use super::output::{Existing, OutputDir, OutputError, cut_after_step};
use super::places::{self, CostModel, Device, Place, RoleCost};
use super::plan::{Facts, Plan};
use super::sources::{self, Sources};
use crate::control::{Role, WorkerName};
use crate::data::split::SplitOptions;
use crate::data::units::{PackLimits, write_units};
use crate::data::{
    self, DataError, DataReport, MaskTokenRequest, ModelVocabulary, PrepareRequest,
    Prepared as TokenisedSet, Progress, TextOptions, Workload, WorkloadSpec,
};
use crate::model::drafter::{DraftOptions, DrafterConfig, ParamLayout};
use crate::model::{ModelError, TargetConfig, TargetFiles, end_token_ids};
use crate::monitor::console::Console;
use crate::shm::{Dtype, Geometry, LedgerImage, units_per_step};
use crate::train::checkpoint::newest_checkpoint;
use crate::worker::drafter::reduce_floats;
use crate::worker::target::units_at_once;
use crate::worker::{Replay, Saving, Start, WorkerPlan};

/// Bytes of a piece of state on its way to a drafter that joins.
const BROADCAST_BYTES: u64 = 4 << 20;
/// Held-out documents at least, where the set is large enough.
const HELD_OUT: usize = 16;

/// Everything that is wrong with what was given; one line each.
#[derive(Debug)]
pub struct Refusal(pub Vec<String>);

impl<E: std::error::Error> From<E> for Refusal {
    fn from(error: E) -> Self {
        Self(vec![error.to_string()])
    }
}

/// A run that can start.
pub struct Prepared {
    /// Its output directory.
    pub output: OutputDir,
    /// The resolved plan.
    pub plan: Plan,
    /// What workers are told; seat and incarnation are filled in for each.
    pub worker: WorkerPlan,
    /// Its work.
    pub work: Workload,
    /// Its shared memory.
    pub geometry: Geometry,
    /// Memory that workers on GPUs will take.
    pub estimate: Estimate,
    /// What the data held.
    pub report: DataReport,
    /// The ledger to go on from.
    pub ledger: Option<LedgerImage>,
    /// Steps that are done already.
    pub first_step: u64,
    /// The last step to train, where the data may go on.
    pub last_step: Option<u64>,
}

impl Prepared {
    /// Puts the output directory into the state from which the run goes on; nothing can refuse it any more.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn begin(&self) -> Result<(), BeginError> {
        let (output, work) = (&self.output, &self.work);
        output.begin()?;
        for name in [
            "trained.jsonl",
            "metrics.jsonl",
            "workers.jsonl",
            "evaluations.jsonl",
        ] {
            cut_after_step(&output.file(name), self.first_step as u32)?;
        }
        let units = output.file("units.jsonl");
        write_units(&units, work.set(), &work.units, &work.order)?;
        Ok(output.write_whole("plan.toml", &self.plan.to_toml())?)
    }
}

/// Why the files of a run cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    /// A file of the output directory.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The list of units.
    #[error(transparent)]
    Units(#[from] DataError),
}

/// Reads, compares and decides everything; starts nothing.
///
/// # Errors
/// [`Refusal`]: all problems that could be seen.
pub fn prepare(options: &Options, console: &Console) -> Result<Prepared, Refusal> {
    let mut problems: Vec<String> = options
        .missing_files()
        .iter()
        .map(ToString::to_string)
        .collect();
    let path = options
        .output
        .dir
        .clone()
        .unwrap_or_else(|| OutputDir::free_name(&options.default_name()));
    let existing = match (options.output.resume, options.output.overwrite) {
        (true, _) => Existing::Resume,
        (_, true) => Existing::Overwrite,
        _ => Existing::Refuse,
    };
    if options.target.is_named() {
        // Nothing is fetched for a run that cannot start.
        let files = [
            (&options.data.files, "--data"),
            (&options.data.eval_files, "--eval-data"),
        ];
        for (files, flag) in files.into_iter().filter(|(files, _)| !files.is_empty()) {
            let found = data::check_files(files, flag, options.data.raw_text);
            problems.extend(found.iter().map(ToString::to_string));
        }
        if !problems.is_empty() {
            return Err(Refusal(problems));
        }
    }
    let source = Sources::find(options, console)?;
    let requests = requests(options, &source);
    for problem in requests.iter().flat_map(data::check) {
        let problem = problem.to_string();
        // Training and held-out data share a model.
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }
    let opened = source
        .model
        .is_dir()
        .then(|| open_target(options, &source.model));
    match &opened {
        Some(Ok(files)) => problems.extend(sources::unsupported(&options.loss, files.config())),
        Some(Err(error)) => problems.push(error.to_string()),
        // The data's check has said so.
        None => {}
    }
    if !problems.is_empty() {
        return Err(Refusal(problems));
    }
    let output = OutputDir::take(&path, existing)?;

    let files = opened.unwrap_or_else(|| open_target(options, &source.model))?;
    let target = files.config();
    let embedding_rows = target.vocab_size;
    let sets = requests
        .iter()
        .map(|request| tokenise(request, console))
        .collect::<Result<Vec<_>, _>>()?;
    let set = &sets[0];
    data::check_vocabulary(
        &set.tokenizer,
        &ModelVocabulary {
            embedding_rows,
            eos_ids: &end_token_ids(&source.model),
        },
    )?;
    let all: Vec<&data::TokenSet> = sets.iter().map(|set| &set.set).collect();
    let file = read_draft_config(options.drafter.config.as_deref())?;
    let sizes = target.sizes();
    let mask_token = data::choose_mask_token(&MaskTokenRequest {
        given: options
            .drafter
            .mask_token_id
            .or_else(|| file.as_ref().and_then(mask_token_of)),
        tokenizer: &set.tokenizer,
        embedding_rows,
        sets: &all,
        template_ids: &[],
    })?;
    let drafter = DrafterConfig::for_target(
        &sizes,
        mask_token,
        &DraftOptions {
            file,
            layers: options.drafter.layers,
            block_size: options.drafter.block_size,
            target_layers: options
                .drafter
                .target_layers
                .as_ref()
                .map(|ids| ids.iter().map(|&id| id as usize).collect()),
            sliding_window: options.drafter.sliding_window,
        },
    )?;

    let spec = WorkloadSpec {
        tokens: set.cache_path.clone(),
        eval_tokens: sets.get(1).map(|set| set.cache_path.clone()),
        weights: weights(options, &set.sources),
        split: SplitOptions {
            fraction: options.data.eval_fraction,
            at_least: HELD_OUT,
            tokens: options.data.eval_tokens as u64,
            seed: options.data.seed,
        },
        limits: PackLimits {
            slot_tokens: options.ring.slot_tokens as u32,
            unit_anchors: options.ring.unit_anchors as u32,
            anchors: options.training.anchors as u32,
        },
        epochs: options.training.epochs,
    };
    let work = Workload::open(&spec)?;

    let (places, visible) = choose_places(options, predicted_cost(target, &drafter, &work))?;
    let count = |role| {
        places
            .iter()
            .filter(|place| place.worker.role == role)
            .count()
    };
    let (targets, drafters) = (count(Role::Target), count(Role::Drafter));
    let nobody = |worker: &WorkerName| places.iter().all(|place| place.worker != *worker);
    if let Some(worker) = options.faults.debug.named().find(nobody) {
        return Err(Refusal(vec![format!(
            "--wait-for-debugger, --debugger-prefix: there is no {worker} among {targets} targets and {drafters} drafters, counted from 0"
        )]));
    }
    let on_gpus = places
        .iter()
        .any(|place| matches!(place.device, Device::Gpu { .. }));
    if on_gpus {
        sources::check_on_gpus(&source, target)?;
    }
    let per_step = units_per_step(
        work.units.iter().map(|unit| unit.anchors),
        options.training.epochs,
        options.training.batch_anchors,
    );
    let (_, default_slots) = places::ring_slots(per_step as usize, drafters, targets);
    let mut slots = options.ring.slots.unwrap_or(default_slots);
    let mut last_step = options.training.max_steps.map(u64::from);
    if let Some(path) = &options.output.replay {
        let replay = Replay::read(path, u64::from(work.order.len()), drafters as u32)?;
        console.line(&format!(
            "replaying {} steps of {}",
            replay.last(),
            path.display()
        ));
        // A unit that the record takes early may be published late: room for all that targets may hold back.
        slots *= 3;
        last_step = Some(last_step.map_or(replay.last(), |last| last.min(replay.last())));
    }

    let target_hash = files.hash();
    let template_hash = set
        .template
        .as_ref()
        .map_or("raw text".to_owned(), |template| {
            template.hash().to_string()
        });
    let config = drafter.to_json("bfloat16").to_string();
    let plan = Plan::new(
        &with_absolute_paths(options, &source),
        Facts {
            data: fingerprint(&all),
            template: template_hash.clone(),
            target: target_hash.clone(),
            hub: source.hub.clone(),
            drafter: blake3::hash(config.as_bytes()).to_string(),
            layers: drafter.num_hidden_layers,
            block_size: drafter.block_size,
            target_layers: drafter
                .target_layer_ids
                .iter()
                .map(|&id| id as u32)
                .collect(),
            sliding_window: drafter.sliding_window,
            mask_token_id: mask_token,
            ring_slots: slots,
            output: output.path().to_owned(),
            places,
        },
    );
    let (start, ledger, first_step) = beginning(options, &output, &plan, console)?;

    let geometry = Geometry {
        targets: targets as u32,
        drafters: drafters as u32,
        slots: slots as u32,
        units: u64::from(work.order.len()),
        eval_units: work.eval_units.len(),
        slot_tokens: work.slot_tokens(),
        slot_documents: work.slot_documents(),
        captured_width: (drafter.captured() * drafter.hidden_size) as u32,
        hidden: drafter.hidden_size as u32,
        final_hidden: options.loss.use_soft_labels,
        dtype: if on_gpus { Dtype::Bf16 } else { Dtype::F32 },
        batch_anchors: options.training.batch_anchors,
        units_per_step: per_step,
        reduce_floats: if drafters > 1 && !on_gpus {
            reduce_floats(&drafter)
        } else {
            1024
        },
        broadcast_bytes: BROADCAST_BYTES,
        check_payload: options.ring.check_payload,
        first_step: first_step + 1,
    };
    geometry.check()?;
    let at_once = units_at_once(options.ring.prefill_tokens, &geometry) as u64;
    let estimate = memory::Load {
        on_gpus,
        target,
        drafter: &drafter,
        soft_labels: options.loss.use_soft_labels,
        prefill_tokens: at_once * u64::from(work.units.max_tokens()),
        unit_tokens: u64::from(work.units.max_tokens()),
        unit_anchors: u64::from(work.units.max_anchors()),
    }
    .estimate();
    let problems = estimate.problems(&plan.places, &visible);
    if !problems.is_empty() {
        return Err(Refusal(problems));
    }
    let worker = WorkerPlan {
        seat: 0,
        incarnation: 1,
        gpu: None,
        run_id: String::new(),
        target: source.model.clone(),
        assume_tied: options.target.assume_tied,
        dummy: options.target.dummy,
        prefill_tokens: options.ring.prefill_tokens,
        drafter: config,
        work: spec,
        seed: options.data.seed,
        anchors: options.training.anchors,
        loss: options.loss,
        optimizer: options.optimizer.clone(),
        start,
        replay: options.output.replay.clone(),
        eval_every: options.output.eval_every.map(u64::from),
        saving: Saving {
            folder: output.checkpoints(),
            every: options.output.save_every.map(u64::from),
            keep: options.output.keep,
            plan: plan.to_toml(),
            plan_hash: plan.hash(),
            target_hash,
            template_hash,
        },
    };
    let report = sets
        .into_iter()
        .next()
        .map(|set| set.report)
        .unwrap_or_default();
    Ok(Prepared {
        output,
        plan,
        worker,
        work,
        geometry,
        estimate,
        report,
        ledger,
        first_step,
        last_step,
    })
}

pub(super) fn open_target(options: &Options, dir: &Path) -> Result<TargetFiles, ModelError> {
    match options.target.dummy {
        true => TargetFiles::dummy(dir),
        false => TargetFiles::open(dir, options.target.assume_tied),
    }
}

/// GPUs as they were asked for, or all visible ones; CPUs where there are none, or where they were asked for. With
/// the places, all visible GPUs, or none if CPUs are used.
fn choose_places(options: &Options, cost: RoleCost) -> Result<(Vec<Place>, Vec<Gpu>), Refusal> {
    let wanted = &options.places;
    let cpu = || {
        let (targets, drafters) = wanted.cpu;
        let places = places::cpu_places(places::machine_threads(), targets, drafters, cost);
        (places, Vec::new())
    };
    if wanted.cpu_given {
        return Ok(cpu());
    }
    let asked = wanted.gpus.is_some() || wanted.split.is_some() || wanted.lists.is_some();
    let visible = match gpus::visible() {
        Ok(visible) => visible,
        Err(what) if asked => return Err(Refusal(vec![format!("no GPU can be used: {what}")])),
        Err(what) => {
            tracing::debug!("no GPU: {what}");
            return Ok(cpu());
        }
    };
    if visible.is_empty() && !asked {
        return Ok(cpu());
    }
    let shown = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    match gpus::choose(wanted, &visible, shown.as_deref(), cost) {
        Ok(places) => Ok((places, visible)),
        Err(problems) => Err(Refusal(problems)),
    }
}

/// The plan is also read from elsewhere, by `launcher eval` for one.
fn with_absolute_paths(options: &Options, source: &Sources) -> Options {
    let mut options = options.clone();
    if source.hub.is_some() {
        options.target.model = Some(source.model.clone());
    }
    let lists = [&mut options.data.files, &mut options.data.eval_files];
    let single = [
        &mut options.target.model,
        &mut options.target.chat_template,
        &mut options.drafter.config,
        &mut options.drafter.init_from,
        &mut options.output.replay,
    ];
    let paths = lists
        .into_iter()
        .flatten()
        .chain(single.into_iter().flatten());
    for path in paths {
        // It fails for an empty path only, which no option may be.
        if let Ok(absolute) = std::path::absolute(&*path) {
            *path = absolute;
        }
    }
    options
}

fn requests(options: &Options, source: &Sources) -> Vec<PrepareRequest> {
    let request = |files: &[PathBuf], flag| PrepareRequest {
        data: files.to_vec(),
        flag,
        model_dir: source.model.clone(),
        chat_template: options.target.chat_template.clone(),
        options: TextOptions {
            max_length: options.data.max_length,
            min_loss_tokens: options.data.min_loss_tokens,
            last_turn_only: options.data.last_turn_only,
            raw_text: options.data.raw_text,
            template_kwargs: options.data.template_kwargs.clone(),
        },
        cache_dir: data::default_cache_dir(),
    };
    let mut requests = vec![request(&source.data, "--data")];
    if !options.data.eval_files.is_empty() {
        requests.push(request(&options.data.eval_files, "--eval-data"));
    }
    requests
}

/// Says now and then how far tokenising has come: on the live line of a terminal, else on lines.
pub(super) fn say_progress(console: &Console) -> impl FnMut(Progress) {
    let began = Instant::now();
    let mut spoken = began;
    let pause = match console.is_live() {
        true => Duration::from_millis(200),
        false => Duration::from_secs(5),
    };
    move |now: Progress| {
        if spoken.elapsed() < pause {
            return;
        }
        spoken = Instant::now();
        let share = 100.0 * now.bytes as f64 / now.total_bytes.max(1) as f64;
        let speed = now.bytes as f64 / 1e6 / began.elapsed().as_secs_f64();
        let text = format!(
            "tokenising: {share:.0} %, {} rows, {} tokens, {speed:.1} MB/s",
            now.rows, now.tokens
        );
        match console.is_live() {
            true => console.set_live(&text),
            false => console.line(&text),
        }
    }
}

fn tokenise(request: &PrepareRequest, console: &Console) -> Result<TokenisedSet, Refusal> {
    let mut say = say_progress(console);
    let mut progress = |now: Progress| {
        say(now);
        ControlFlow::Continue(())
    };
    let set = data::prepare(request, &mut progress)?;
    let report = &set.report;
    let again = if set.reused {
        ", tokenised earlier"
    } else {
        ""
    };
    console.line(&format!(
        "data: {} rows, {} documents, {} tokens of which {} supervised{again}",
        report.rows, report.documents, report.tokens, report.supervised
    ));
    for line in report.notes().iter().chain(&report.example_lines()) {
        console.line(&format!("  {line}"));
    }
    Ok(set)
}

/// The weight of each data file, from those of the paths that were given.
fn weights(options: &Options, sources: &[u32]) -> Vec<f64> {
    let given = &options.data.weights;
    let weight = |&path: &u32| given.get(path as usize).copied();
    sources.iter().filter_map(weight).collect()
}

fn fingerprint(sets: &[&data::TokenSet]) -> String {
    let mut hasher = blake3::Hasher::new();
    for set in sets {
        hasher.update(set.content_hash().as_bytes());
    }
    hasher.finalize().to_string()
}

type DraftFile = serde_json::Map<String, serde_json::Value>;

fn read_draft_config(path: Option<&Path>) -> Result<Option<DraftFile>, Refusal> {
    let Some(path) = path else {
        return Ok(None);
    };
    let refuse = |what: String| Refusal(vec![format!("--draft-config {}: {what}", path.display())]);
    let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| refuse(error.to_string()))
}

fn mask_token_of(file: &DraftFile) -> Option<u32> {
    let id = file.get("dflash_config")?.get("mask_token_id")?.as_u64()?;
    u32::try_from(id).ok()
}

/// Predicted operations of both roles over an average document.
pub(super) fn predicted_cost(
    target: &TargetConfig,
    drafter: &DrafterConfig,
    work: &Workload,
) -> RoleCost {
    let documents: f64 = work
        .units
        .iter()
        .map(|unit| unit.documents.len() as f64)
        .sum();
    let documents = documents.max(1.0);
    let layers = drafter
        .target_layer_ids
        .iter()
        .max()
        .map_or(0, |last| last + 1);
    let context = drafter.captured() * drafter.hidden_size * drafter.hidden_size
        + 2 * drafter.num_hidden_layers
            * drafter.hidden_size
            * drafter.num_key_value_heads
            * drafter.head_dim;
    let model = CostModel {
        target_parameters: target.layer_parameters() as f64 * layers as f64,
        drafter_parameters: (ParamLayout::new(drafter).len() - context) as f64,
        hidden: drafter.hidden_size as f64,
        captured: drafter.captured() as f64,
        layers: drafter.num_hidden_layers as f64,
        key_value: (drafter.num_key_value_heads * drafter.head_dim) as f64,
        vocabulary: drafter.vocab_size as f64,
        block: drafter.block_size as f64,
    };
    model.of_document(
        work.units.total_tokens() as f64 / documents,
        work.units.total_anchors() as f64 / documents,
    )
}

/// Where the drafter's values come from: the seed, another checkpoint's weights, or this run's checkpoint.
fn beginning(
    options: &Options,
    output: &OutputDir,
    plan: &Plan,
    console: &Console,
) -> Result<(Start, Option<LedgerImage>, u64), Refusal> {
    if !options.output.resume {
        let start = match &options.drafter.init_from {
            Some(path) => Start::Weights(path.clone()),
            None => Start::Fresh,
        };
        return Ok((start, None, 0));
    }
    let Some(found) = newest_checkpoint(&output.checkpoints())? else {
        let path = output.checkpoints();
        let what = format!("{} holds no checkpoint to resume from", path.display());
        return Err(Refusal(vec![what]));
    };
    for error in &found.passed_over {
        console.warn(&error.to_string());
    }
    let checkpoint = found.checkpoint;
    if checkpoint.record.plan_hash != plan.hash() {
        let then = Plan::parse(&checkpoint.record.plan, &checkpoint.path)?;
        let mut lines = vec![format!(
            "{} was made under another plan; start anew, or go on with what it was made with:",
            checkpoint.path.display()
        )];
        lines.extend(then.diff(plan));
        return Err(Refusal(lines));
    }
    let step = checkpoint.state.progress.step;
    let ledger = LedgerImage::from_bytes(&checkpoint.record.ledger).ok_or_else(|| {
        Refusal(vec![format!(
            "{}: its ledger cannot be read",
            checkpoint.path.display()
        )])
    })?;
    console.line(&format!(
        "resuming from {}, after step {step}",
        checkpoint.path.display()
    ));
    Ok((Start::Resume(checkpoint.path), Some(ledger), step))
}
