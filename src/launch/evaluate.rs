//! `launcher eval`: decodes prompts with a trained drafter.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::checkpoints::find;
use super::devices::Devices;
use super::options::EvalOptions;
use super::places::Device;
use super::plan::Plan;
use super::prepare::Refusal;
use super::sources::locate;
use crate::data::split::{self, SplitOptions};
use crate::data::{
    self, ChatTemplate, ChatTokenizer, PrepareRequest, TextOptions, TokenSet, demo, read_prompts,
};
use crate::engine::Engine;
use crate::engine::cpu::Cpu;
use crate::engine::cuda::Cuda;
use crate::eval::decode::{Choice, DecodeError, Decoder, Draft, DrawKeys, Limits};
use crate::eval::plots;
use crate::eval::report::{Drafted, EvalReport, SetFigures, figures, plain_figures, row};
use crate::model::drafter::DrafterModel;
use crate::model::{Target, TargetFiles, TargetNeeds, end_token_ids};
use crate::monitor::console::Console;
use crate::train::export::{load_serving, read_provenance};

/// How often progress is told.
const TOLD: Duration = Duration::from_secs(5);

/// Evaluates; returns the launcher's exit code: 1 when output is not the target's own.
pub fn evaluate(options: &EvalOptions) -> u8 {
    finish(Devices::choose(&options.device).and_then(|devices| run(options, &devices)))
}

/// The same where the devices are chosen already.
pub fn evaluate_on(options: &EvalOptions, devices: &Devices) -> u8 {
    finish(run(options, devices))
}

fn finish(result: Result<EvalReport, Refusal>) -> u8 {
    match result {
        Ok(report) if report.is_lossless() => 0,
        Ok(_) => {
            eprintln!("error: speculative output differs from plain output");
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

/// Prompts that are reported together.
struct PromptSet {
    name: String,
    prompts: Vec<Vec<u32>>,
}

/// What is decoded with.
struct Models {
    /// The target's directory.
    dir: PathBuf,
    files: TargetFiles,
    checkpoint: PathBuf,
}

fn run(options: &EvalOptions, devices: &Devices) -> Result<EvalReport, Refusal> {
    let checkpoint = find(&options.checkpoint).map_err(|what| Refusal(vec![what]))?;
    let plan = Plan::read(&checkpoint.join("plan.toml")).ok();
    let dir = target_dir(options, plan.as_ref())?;
    let files = TargetFiles::open(
        &dir,
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
    let sets = match options.prompts.is_empty() {
        true => vec![held_out(options, plan.as_ref(), &dir)?],
        false => given(options, plan.as_ref(), &dir)?,
    };
    let models = Models {
        dir,
        files,
        checkpoint,
    };
    let mut report = match devices.first() {
        Device::Cpu { threads } => decode_all(&Cpu::new(threads)?, &models, &sets, options)?,
        Device::Gpu { ordinal } => {
            decode_all(&Cuda::new(ordinal as usize)?, &models, &sets, options)?
        }
    };
    report.checkpoint = models.checkpoint.display().to_string();
    leave(&report, options)?;
    Ok(report)
}

/// Writes the figures and the plots. Where nobody said where they go, a place that cannot be written is no error.
fn leave(report: &EvalReport, options: &EvalOptions) -> Result<(), Refusal> {
    let text = serde_json::to_string_pretty(report)? + "\n";
    let write = |path: &Path| {
        std::fs::write(path, &text).map_err(|error| format!("{}: {error}", path.display()))
    };
    if let Some(path) = &options.json {
        write(path).map_err(|what| Refusal(vec![what]))?;
    }
    let default = options.checkpoint.join("eval");
    let dir = options.output.as_ref().unwrap_or(&default);
    let left = std::fs::create_dir_all(dir)
        .map_err(|error| format!("{}: {error}", dir.display()))
        .and_then(|()| write(&dir.join("eval.json")))
        .and_then(|()| plots::write(report, dir));
    match left {
        Err(what) if options.output.is_some() => Err(Refusal(vec![what])),
        Err(what) => {
            eprintln!("warning: figures and plots are not kept: {what}");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Decodes every prompt plainly and with every kind of draft, and prints each row of the table when it is known.
fn decode_all<E: Engine>(
    engine: &E,
    models: &Models,
    sets: &[PromptSet],
    options: &EvalOptions,
) -> Result<EvalReport, Refusal> {
    let (config, params) = load_serving(engine, &models.checkpoint)?;
    config.check_target(&models.files.config().sizes())?;
    let needs = TargetNeeds {
        capture: config.target_layer_ids.clone(),
        final_hidden: true,
        lm_head: true,
    };
    let mut target = Target::load(engine, &models.files, needs)?;
    let mut drafter = DrafterModel::new(engine, config, params)?;

    let end = end_token_ids(&models.dir);
    let limits = Limits {
        new_tokens: options.max_new_tokens,
        end: &end,
    };
    let prompts = || sets.iter().flat_map(|set| &set.prompts);
    let longest = prompts().map(Vec::len).max().unwrap_or(0);
    let chain = drafter.config().block_size - 1;
    let nodes = options.trees.iter().copied().fold(chain, usize::max);
    let capacity = longest + options.max_new_tokens;
    let mut decoder = Decoder::new(engine, &mut target, &mut drafter, capacity, nodes)?;

    let trees = options.trees.iter().copied();
    let drafts: Vec<Draft> = std::iter::once(Draft::CHAIN)
        .chain(trees.map(Draft::Tree))
        .collect();
    // First calls compile kernels and choose algorithms; what is timed comes after.
    if let Some(first) = prompts().next() {
        let limits = Limits {
            new_tokens: options.max_new_tokens.min(8),
            ..limits
        };
        decoder.plain(first, limits, &mut Choice::Greedy)?;
        for &draft in &drafts {
            decoder.speculative(first, draft, limits, &mut Choice::Greedy)?;
        }
    }

    let mut report = EvalReport {
        device: engine.name().to_owned(),
        temperature: options.temperature,
        max_new_tokens: options.max_new_tokens,
        ..EvalReport::default()
    };
    let console = Console::new(options.quiet);
    let mut told = Instant::now();
    let mut tell = |set: &PromptSet, what: &str, done: usize| {
        if told.elapsed() > TOLD {
            told = Instant::now();
            let (name, all) = (&set.name, set.prompts.len());
            console.line(&format!("{name}, {what}: {done} of {all} prompts"));
        }
    };
    let mut all_plain = Vec::new();
    let mut all_drafted = vec![Drafted::default(); drafts.len()];
    for set in sets {
        // Of the answers over all sets.
        let first = all_plain.len();
        let mut plain = Vec::with_capacity(set.prompts.len());
        for (at, prompt) in set.prompts.iter().enumerate() {
            tell(set, "plain", at);
            plain.push(with_choice(options, first + at, |choice| {
                decoder.plain(prompt, limits, choice)
            })?);
        }
        let of_plain = plain_figures(&plain);
        println!("{}", report.head(&set.name, &of_plain));
        let mut drafted = Vec::with_capacity(drafts.len());
        for &draft in &drafts {
            let mut found = Drafted {
                nodes: draft.nodes(),
                ..Drafted::default()
            };
            for (at, (prompt, plain)) in set.prompts.iter().zip(&plain).enumerate() {
                tell(set, &found.name(), at);
                let (answer, agreement) = with_choice(options, first + at, |choice| {
                    let answer = decoder.speculative(prompt, draft, limits, choice)?;
                    let agreement =
                        decoder.compare(prompt, &plain.tokens, &answer.tokens, choice)?;
                    Ok((answer, agreement))
                })?;
                found.answers.push(answer);
                found.agreements.push(agreement);
            }
            println!("{}", row(&figures(&of_plain, &found)));
            drafted.push(found);
        }
        let found = SetFigures::new(&set.name, &plain, &drafted);
        println!("{}", report.foot(&found));
        report.sets.push(found);
        all_plain.append(&mut plain);
        for (all, drafted) in all_drafted.iter_mut().zip(drafted) {
            all.nodes = drafted.nodes;
            all.answers.extend(drafted.answers);
            all.agreements.extend(drafted.agreements);
        }
    }
    report.all = SetFigures::new("all", &all_plain, &all_drafted);
    if report.sets.len() > 1 {
        println!("{}", report.part(&report.all));
    }
    Ok(report)
}

/// Decodes answer `number` of the evaluation with the options' way of choosing tokens. Its draws are the same each
/// time.
fn with_choice<T>(
    options: &EvalOptions,
    number: usize,
    decode: impl FnOnce(&mut Choice<'_>) -> Result<T, DecodeError>,
) -> Result<T, DecodeError> {
    let mut keys = DrawKeys::new(options.seed, number as u64);
    decode(&mut match options.temperature as f32 {
        0.0 => Choice::Greedy,
        temperature => Choice::Sampled {
            temperature,
            keys: &mut keys,
        },
    })
}

/// The target: given, or the one of the run that made the checkpoint.
fn target_dir(options: &EvalOptions, plan: Option<&Plan>) -> Result<PathBuf, Refusal> {
    if let Some(given) = &options.target_model {
        return Ok(locate(given, &Console::new(options.quiet))?.0);
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

/// The chat template: given, or the run's.
fn template_file(options: &EvalOptions, plan: Option<&Plan>) -> Option<PathBuf> {
    let given = options.chat_template.clone();
    given.or_else(|| plan.and_then(|plan| plan.template.file.clone()))
}

/// The prompts of the given files, each a set: what is said before the first answer.
fn given(
    options: &EvalOptions,
    plan: Option<&Plan>,
    dir: &Path,
) -> Result<Vec<PromptSet>, Refusal> {
    let tokenizer = ChatTokenizer::load(dir)?;
    let template = ChatTemplate::load(
        dir,
        template_file(options, plan).as_deref(),
        &tokenizer,
        &plan
            .map(|plan| plan.template.arguments())
            .unwrap_or_default(),
    )?;
    let of_file = |path: &PathBuf| {
        let read = read_prompts(std::slice::from_ref(path), "--prompts")?;
        let conversations = read.conversations.iter().take(options.documents);
        let prompt = |conversation: &data::Conversation| {
            let text = template.render(&conversation.messages(&[]), None, true)?;
            Ok(tokenizer.encode(&text)?.ids)
        };
        let prompts = conversations
            .map(prompt)
            .collect::<Result<Vec<_>, String>>()
            .map_err(|what| Refusal(vec![format!("--prompts {}: {what}", path.display())]))?;
        let name = path.file_stem().unwrap_or(path.as_os_str());
        Ok(PromptSet {
            name: name.to_string_lossy().into_owned(),
            prompts,
        })
    };
    options.prompts.iter().map(of_file).collect()
}

/// The documents that the run held out, each up to its first supervised token.
fn held_out(options: &EvalOptions, plan: Option<&Plan>, dir: &Path) -> Result<PromptSet, Refusal> {
    let Some(plan) = plan else {
        return Err(Refusal(vec![
            "--prompts is missing: the checkpoint has no plan.toml that names its held-out documents"
                .to_owned(),
        ]));
    };
    let (files, share) = if !plan.data.eval_files.is_empty() {
        (plan.data.eval_files.clone(), false)
    } else if plan.data.files.is_empty() {
        let demo = demo::write(&data::default_cache_dir().join("demo"))?;
        (vec![demo.data], true)
    } else {
        (plan.data.files.clone(), true)
    };
    let prepared = data::prepare(
        &PrepareRequest {
            data: files,
            flag: "--prompts",
            model_dir: dir.to_owned(),
            chat_template: template_file(options, Some(plan)),
            options: TextOptions {
                max_length: plan.data.max_length,
                min_loss_tokens: plan.data.min_loss_tokens,
                last_turn_only: plan.data.last_turn_only,
                raw_text: plan.data.raw_text,
                template_kwargs: plan.template.arguments(),
            },
            cache_dir: data::default_cache_dir(),
        },
        &mut |_| ControlFlow::Continue(()),
    )?;
    let set = &prepared.set;
    let chosen = match share {
        true => {
            let split = SplitOptions {
                fraction: plan.data.eval_fraction,
                tokens: plan.data.eval_tokens as u64,
                seed: plan.seed,
                ..SplitOptions::default()
            };
            split::split(set, &split).eval
        }
        false => (0..set.len() as u32).collect(),
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
    Ok(PromptSet {
        name: "held-out".to_owned(),
        prompts,
    })
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
