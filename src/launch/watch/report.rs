//! `launcher report`: the page of a run, from the files that it left or is still writing.

use std::fs;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::{Found, WatchError, find, refuse};
use crate::launch::plan::Plan;
use crate::launch::report::Summary;
use crate::monitor::live::duration;
use crate::monitor::page::Page;

/// What `launcher report` was asked for.
#[derive(Clone, Debug)]
pub struct ReportOptions {
    /// The run; `None` is the newest that is going on.
    pub run: Option<PathBuf>,
    /// Where the page goes; `None` is report.html in the run's directory.
    pub to: Option<PathBuf>,
}

/// Writes the page; returns the launcher's exit code.
pub fn report(options: &ReportOptions) -> u8 {
    match write(options) {
        Ok(path) => {
            println!("{}", path.display());
            0
        }
        Err(what) => refuse(&what),
    }
}

fn write(options: &ReportOptions) -> Result<PathBuf, String> {
    let (path, running) = match find(options.run.as_deref()) {
        Ok(Found::Live(run)) => (run.path.clone(), true),
        Ok(Found::Over(path)) => (path, false),
        // Its memory is of another version, its files are not.
        Err(WatchError::Memory { path, .. }) => (path, true),
        Err(error) => return Err(error.to_string()),
    };
    let page = read(&path, running)?;
    let to = options
        .to
        .clone()
        .unwrap_or_else(|| path.join("report.html"));
    fs::write(&to, page.html()).map_err(|error| format!("{}: {error}", to.display()))?;
    Ok(to)
}

/// What the files of a run say.
fn read(path: &Path, running: bool) -> Result<Page, String> {
    let plan = Plan::read(&path.join("plan.toml")).ok();
    let summary: Option<Summary> = match running {
        true => None,
        false => fs::read_to_string(path.join("summary.json"))
            .ok()
            .and_then(|text| serde_json::from_str(&text).ok()),
    };
    let mut page = Page {
        name: path.display().to_string(),
        outcome: outcome(summary.as_ref(), running),
        facts: Vec::new(),
        slots: plan.as_ref().map_or(0, |plan| plan.ring.slots as u32),
        steps: lines(&path.join("metrics.jsonl"))?,
        workers: lines(&path.join("workers.jsonl"))?,
        evaluations: lines(&path.join("evaluations.jsonl"))?,
    };
    if let Some(summary) = &summary {
        page.facts.extend(summary_facts(summary));
    }
    if let Some(plan) = &plan {
        page.facts.extend(plan_facts(plan));
    }
    Ok(page)
}

fn outcome(summary: Option<&Summary>, running: bool) -> String {
    match summary {
        Some(summary) => {
            let mut text = format!(
                "{:?}: {} steps, {} of {} units, {} tokens in {}.",
                summary.outcome,
                summary.steps,
                summary.units_done,
                summary.units_total,
                summary.tokens,
                duration(summary.wall_s)
            );
            if let Some(cause) = &summary.root_cause {
                let who = match (&cause.role, cause.rank) {
                    (Some(role), Some(rank)) => format!("{role} {rank}"),
                    _ => "no single worker".to_owned(),
                };
                text += &format!(" Root cause: {who}: {}.", cause.what);
            }
            text
        }
        None if running => "The run is going on; this is how it stands.".to_owned(),
        None => "The launcher was killed before it could write a summary.".to_owned(),
    }
}

fn summary_facts(summary: &Summary) -> Vec<(String, String)> {
    let mut facts = vec![
        ("documents".to_owned(), summary.documents.to_string()),
        ("epochs".to_owned(), summary.epochs.to_string()),
        ("restarts".to_owned(), summary.restarts.to_string()),
    ];
    if !summary.skipped.is_empty() {
        let each = summary.skipped.iter();
        let each: Vec<String> = each
            .map(|(reason, count)| format!("{reason} {count}"))
            .collect();
        facts.push(("rows skipped".to_owned(), each.join(", ")));
    }
    if !summary.quarantined.is_empty() {
        facts.push((
            "units set aside".to_owned(),
            format!("{:?}", summary.quarantined),
        ));
    }
    let mib = |bytes: &u64| *bytes as f64 / f64::from(1 << 20);
    let memory: Vec<String> = summary
        .peak_memory
        .iter()
        .map(|(name, bytes)| format!("{name} {:.0} MiB", mib(bytes)))
        .collect();
    facts.push(("largest memory".to_owned(), memory.join(", ")));
    if let Some(checkpoint) = &summary.checkpoint {
        facts.push(("checkpoint".to_owned(), checkpoint.display().to_string()));
    }
    facts
}

fn plan_facts(plan: &Plan) -> Vec<(String, String)> {
    let lines = plan.to_string();
    let mut facts: Vec<(String, String)> = lines
        .lines()
        .zip(["run", "places"])
        .map(|(line, name)| {
            let line = line.strip_prefix("places: ").unwrap_or(line);
            (name.to_owned(), line.to_owned())
        })
        .collect();
    facts.push((
        "drafter".to_owned(),
        format!(
            "{} layers, blocks of {}, target layers {:?}",
            plan.drafter.layers, plan.drafter.block_size, plan.drafter.target_layers
        ),
    ));
    facts.push((
        "step".to_owned(),
        format!(
            "{} anchors, at most {} of a document, in units of at most {} tokens",
            plan.batch.batch_anchors, plan.batch.anchors, plan.packing.slot_tokens
        ),
    ));
    facts.push(("ring".to_owned(), format!("{} slots", plan.ring.slots)));
    facts.push(("seed".to_owned(), plan.seed.to_string()));
    facts
}

/// The records of a file of lines; none if it is not there. The last line may be on its way.
fn lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, String> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(format!("{}: {error}", path.display())),
    };
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let read = |(number, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|error| {
            format!(
                "{}, line {}: {error}; the file is damaged",
                path.display(),
                number + 1
            )
        })
    };
    whole
        .lines()
        .filter(|line| !line.is_empty())
        .enumerate()
        .map(read)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_was_killed_has_a_page_and_a_damaged_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        fs::write(path.join("plan.toml"), "").unwrap();
        let options = ReportOptions {
            run: Some(path.to_owned()),
            to: None,
        };
        let page = fs::read_to_string(write(&options).unwrap()).unwrap();
        assert!(page.contains("The launcher was killed"), "{page}");
        fs::write(path.join("evaluations.jsonl"), "{}\nhalf a li").unwrap();
        let error = write(&options).unwrap_err();
        assert!(
            error.contains("evaluations.jsonl, line 1: missing field"),
            "{error}"
        );
    }
}
