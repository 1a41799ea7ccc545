//! `launcher eval`: decodes held-out prompts with a trained drafter.

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use super::checkpoints::find;
use super::cli::{self, Invocation};
use super::gpus;
use super::hub::{Hub, HubName};
use super::options::EvalOptions;
use super::places::machine_threads;
use super::plan::Plan;
use super::prepare::Refusal;
use crate::data::split::{self, SplitOptions};
use crate::data::{self, PrepareRequest, TextOptions, TokenSet, demo};
use crate::engine::Engine;
use crate::engine::cpu::Cpu;
use crate::engine::cuda::Cuda;
use crate::eval::decode::{Choice, DecodeError, Decoder, Draft, Limits};
use crate::eval::report::{EvalReport, figures, plain_figures, resolution};
use crate::model::drafter::DrafterModel;
use crate::model::{Target, TargetFiles, TargetNeeds, end_token_ids};
use crate::monitor::console::Console;
use crate::train::export::{load_serving, read_provenance};

/// Evaluates; returns the launcher's exit code: 1 when greedy output is not the target's own. On a GPU a child
/// does it: this process never loads CUDA.
pub fn evaluate(options: &EvalOptions) -> u8 {
    let done = gpus::one(options.gpu, options.cpu).and_then(|gpu| match gpu {
        Some(gpu) => gpus::again(gpu),
        None => Ok(evaluate_on(options, None)),
    });
    done.unwrap_or_else(|what| {
        eprintln!("error: {what}");
        2
    })
}

/// The child's part: `words` are the GPU and the launcher's own arguments.
pub fn on_gpu(mut words: impl Iterator<Item = OsString>) -> u8 {
    let gpu = words.next().and_then(|word| word.to_str()?.parse().ok());
    let launcher = std::iter::once(OsString::from("launcher"));
    match (gpu, cli::parse(launcher.chain(words))) {
        (Some(gpu), Ok(Invocation::Eval(options))) => evaluate_on(&options, Some(gpu)),
        (_, Err(error)) => error.report(),
        _ => {
            eprintln!("error: only the launcher gives {}", gpus::AGAIN);
            2
        }
    }
}

fn evaluate_on(options: &EvalOptions, gpu: Option<u32>) -> u8 {
    match run(options, gpu) {
        Ok(report) => {
            println!("{}", report.table());
            if report.is_lossless() {
                return 0;
            }
            eprintln!("error: speculative greedy output differs from plain greedy output");
            1
        }
        Err(Refusal(lines)) => {
            for line in lines {
                eprintln!("error: {line}");
            }
            2
        }
    }
}

fn run(options: &EvalOptions, gpu: Option<u32>) -> Result<EvalReport, Refusal> {
    let checkpoint = find(&options.checkpoint).map_err(|what| Refusal(vec![what]))?;
    let plan = Plan::read(&checkpoint.join("plan.toml")).ok();
    let model = target_dir(options, plan.as_ref())?;
    let files = TargetFiles::open(
        &model,
        plan.as_ref().is_some_and(|plan| plan.target.assume_tied),
    )?;
    if let Some(provenance) = read_provenance(&checkpoint)?
        && provenance.target_hash != files.hash()
    {
        eprintln!(
            "warning: {} was trained for another target ({}); it will accept little",
            checkpoint.display(),
            provenance.target
        );
    }
    let prompts = prompts(options, plan.as_ref(), &model)?;
    let work = Work {
        checkpoint: &checkpoint,
        files: &files,
        prompts: &prompts,
        model: &model,
        options,
    };
    let mut report = match gpu {
        None => work.on(&Cpu::new(machine_threads())?),
        Some(gpu) => work.on(&Cuda::new(gpu as usize)?),
    }?;
    report.checkpoint = checkpoint.display().to_string();
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n")
            .map_err(|error| Refusal(vec![format!("{}: {error}", path.display())]))?;
    }
    Ok(report)
}

/// What is decoded, and with what.
struct Work<'a> {
    checkpoint: &'a Path,
    files: &'a TargetFiles,
    prompts: &'a [Vec<u32>],
    model: &'a Path,
    options: &'a EvalOptions,
}

impl Work<'_> {
    /// Loads both models on `engine` and decodes.
    fn on<E: Engine>(&self, engine: &E) -> Result<EvalReport, Refusal> {
        let (config, params) = load_serving(engine, self.checkpoint)?;
        config.check_target(&self.files.config().sizes())?;
        let needs = TargetNeeds {
            capture: config.target_layer_ids.clone(),
            final_hidden: true,
            lm_head: true,
        };
        let mut target = Target::load(engine, self.files, needs)?;
        let mut drafter = DrafterModel::new(engine, config, params)?;
        Ok(decode(
            engine,
            &mut target,
            &mut drafter,
            self.prompts,
            self.model,
            self.options,
        )?)
    }
}

/// Decodes every prompt plainly and with every kind of draft.
fn decode<E: Engine>(
    engine: &E,
    target: &mut Target<E>,
    drafter: &mut DrafterModel<E>,
    prompts: &[Vec<u32>],
    model: &Path,
    options: &EvalOptions,
) -> Result<EvalReport, DecodeError> {
    let end = end_token_ids(model);
    let limits = Limits {
        new_tokens: options.max_new_tokens,
        end: &end,
    };
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let chain = drafter.config().block_size - 1;
    let nodes = options.trees.iter().copied().fold(chain, usize::max);
    let capacity = longest + options.max_new_tokens;
    let mut decoder = Decoder::new(engine, target, drafter, capacity, nodes)?;
    let mut plain = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        plain.push(decoder.plain(prompt, limits, &mut Choice::Greedy)?);
    }
    let drafts = std::iter::once(Draft::Chain).chain(options.trees.iter().map(|&n| Draft::Tree(n)));
    let mut report = EvalReport {
        plain: plain_figures(&plain),
        ..EvalReport::default()
    };
    for draft in drafts {
        let mut answers = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            answers.push(decoder.speculative(prompt, draft, limits, &mut Choice::Greedy)?);
        }
        let name = match draft {
            Draft::Chain => "chain".to_owned(),
            Draft::Tree(nodes) => format!("tree {nodes}"),
        };
        let resolution = resolution(E::HALF_BYTES);
        report
            .drafts
            .push(figures(name, &plain, &answers, resolution));
    }
    Ok(report)
}

/// The target: given, or the one of the run that made the checkpoint.
fn target_dir(options: &EvalOptions, plan: Option<&Plan>) -> Result<PathBuf, Refusal> {
    if let Some(given) = &options.target_model {
        let Some(name) = HubName::parse(given) else {
            return Ok(given.clone());
        };
        let console = Console::new(options.quiet);
        let fetched = Hub::from_env()?.fetch(&name, &|line| console.line(line))?;
        return Ok(fetched.dir);
    }
    let Some(plan) = plan else {
        return Err(Refusal(vec![
            "--target-model is missing: the checkpoint has no plan.toml that names its target"
                .to_owned(),
        ]));
    };
    match &plan.target.model {
        Some(model) => Ok(model.clone()),
        None => Ok(demo::write(&data::default_cache_dir().join("demo"))?.model_dir),
    }
}

/// The prompts: each document up to its first supervised token.
fn prompts(
    options: &EvalOptions,
    plan: Option<&Plan>,
    model: &Path,
) -> Result<Vec<Vec<u32>>, Refusal> {
    let (files, held_out) = match (options.data.as_slice(), plan) {
        ([], None) => {
            return Err(Refusal(vec![
                "--data is missing: the checkpoint has no plan.toml that names its held-out documents".to_owned(),
            ]));
        }
        ([], Some(plan)) if !plan.data.eval_files.is_empty() => {
            (plan.data.eval_files.clone(), false)
        }
        ([], Some(plan)) if plan.data.files.is_empty() => (
            vec![demo::write(&data::default_cache_dir().join("demo"))?.data],
            true,
        ),
        ([], Some(plan)) => (plan.data.files.clone(), true),
        (given, _) => (given.to_vec(), false),
    };
    let mut text = TextOptions::default();
    if let Some(plan) = plan {
        text = TextOptions {
            max_length: plan.data.max_length,
            min_loss_tokens: plan.data.min_loss_tokens,
            last_turn_only: plan.data.last_turn_only,
            raw_text: plan.data.raw_text,
            template_kwargs: plan.template.arguments(),
        };
    }
    let prepared = data::prepare(
        &PrepareRequest {
            data: files,
            flag: "--data",
            model_dir: model.to_owned(),
            chat_template: options
                .chat_template
                .clone()
                .or_else(|| plan.and_then(|plan| plan.template.file.clone())),
            options: text,
            cache_dir: data::default_cache_dir(),
        },
        &mut |_| ControlFlow::Continue(()),
    )?;
    let set = &prepared.set;
    let chosen = match plan.filter(|_| held_out) {
        Some(plan) => {
            let split = SplitOptions {
                fraction: plan.data.eval_fraction,
                tokens: plan.data.eval_tokens as u64,
                seed: plan.seed,
                ..SplitOptions::default()
            };
            split::split(set, &split).eval
        }
        None => (0..set.len() as u32).collect(),
    };
    let prompts: Vec<Vec<u32>> = chosen
        .iter()
        .filter_map(|&document| prompt(set, document))
        .take(options.documents)
        .collect();
    if prompts.is_empty() {
        return Err(Refusal(vec![
            "there is no document to take a prompt from".to_owned(),
        ]));
    }
    Ok(prompts)
}

/// A document up to its first supervised token; `None` where nothing stands before it.
fn prompt(set: &TokenSet, document: u32) -> Option<Vec<u32>> {
    let document = set.document(document as usize);
    let first = document
        .mask
        .iter()
        .position(|&supervised| supervised != 0)?;
    (first > 0).then(|| document.ids[..first].to_vec())
}
