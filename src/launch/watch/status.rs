//! `launcher status`: one look at a run, for a person or as JSON.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Found, find, refuse};
use crate::launch::report::Summary;
use crate::monitor::live::{duration, short};
use crate::monitor::look::Look;
use crate::monitor::shares::Spent;
use crate::shm::{SeatState, SlotPhase, Snapshot, StepState};

/// What `launcher status` was asked for.
#[derive(Clone, Debug)]
pub struct StatusOptions {
    /// The run; `None` is the newest that is going on.
    pub run: Option<PathBuf>,
    /// Print JSON.
    pub json: bool,
}

/// Between the two looks that rates are taken from.
const WINDOW: Duration = Duration::from_millis(1000);

/// Prints it; returns the launcher's exit code.
pub fn status(options: &StatusOptions) -> u8 {
    let mut run = match find(options.run.as_deref()) {
        Ok(Found::Live(run)) => run,
        Ok(Found::Over(path)) => return over(&path, options.json),
        Err(error) => return refuse(&error),
    };
    run.look();
    std::thread::sleep(WINDOW);
    let (look, snapshot) = run.look();
    if options.json {
        #[derive(serde::Serialize)]
        struct Status<'a> {
            running: bool,
            #[serde(flatten)]
            look: &'a Look,
            slots: &'a [crate::shm::SlotView],
        }
        let status = Status {
            running: true,
            look: &look,
            slots: &snapshot.slots,
        };
        println!(
            "{}",
            serde_json::to_string_pretty(&status).expect("a look holds only what JSON can say")
        );
    } else {
        print!("{}", text(&look, &snapshot));
    }
    0
}

/// A run that has ended: what its summary says.
fn over(path: &Path, json: bool) -> u8 {
    let read = std::fs::read_to_string(path.join("summary.json"));
    let Some(text) = read.ok() else {
        let what = "its launcher was killed before it could write a summary; --resume goes on from the last checkpoint";
        if json {
            let value = serde_json::json!({"running": false, "run": path, "summary": null});
            println!("{value:#}");
        } else {
            println!("{}: not running; {what}", path.display());
        }
        return 0;
    };
    if json {
        let summary: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let value = serde_json::json!({"running": false, "run": path, "summary": summary});
        println!("{value:#}");
        return 0;
    }
    match serde_json::from_str::<Summary>(&text) {
        Ok(summary) => {
            let outcome = format!("{:?}", summary.outcome).to_lowercase();
            println!(
                "{}: not running; {outcome}: {} steps, {} of {} units, {} tokens in {}",
                path.display(),
                summary.steps,
                summary.units_done,
                summary.units_total,
                summary.tokens,
                duration(summary.wall_s)
            );
            if let Some(cause) = summary.root_cause {
                let rank = cause.rank.map_or(String::new(), |rank| format!("-{rank}"));
                let who = cause.role.unwrap_or_else(|| "the launcher".to_owned());
                println!("root cause: {who}{rank}: {}", cause.what);
            }
            0
        }
        Err(error) => refuse(&format!(
            "{}: {error}; the file is damaged",
            path.join("summary.json").display()
        )),
    }
}

/// The look in lines.
pub fn text(look: &Look, snapshot: &Snapshot) -> String {
    let mut lines = vec![
        format!(
            "{}: {}, launcher process {}",
            look.run, look.phase, look.launcher_pid
        ),
        format!("diagnosis: {}", look.diagnosis.text),
        progress(look),
        step(look),
        ring(look),
        String::new(),
    ];
    lines.append(&mut workers(look));
    let mut busy = slots(look, snapshot);
    if !busy.is_empty() {
        lines.push(String::new());
        lines.append(&mut busy);
    }
    lines.join("\n") + "\n"
}

/// Units, loss, speed, time left.
pub fn progress(look: &Look) -> String {
    let settled = look.ledger.done + look.ledger.quarantined;
    let total = settled + look.ledger.pending + look.ledger.leased;
    let mut line = format!(
        "units: {} of {total} trained ({:.0} %)",
        look.ledger.done,
        100.0 * look.progress()
    );
    if look.ledger.quarantined > 0 {
        line += &format!(", {} quarantined", look.ledger.quarantined);
    }
    if let Some(training) = &look.training {
        line += &format!(
            "; step {}, loss {:.3}, accepted {:.2}, {} tok/s",
            training.step,
            training.loss,
            training.block_accepted_length,
            short(training.tokens_per_s)
        );
        if let Some(seconds) = training.remaining_s {
            line += &format!(", {} left", duration(seconds));
        }
    }
    if let Some(stop) = look.stop {
        let last = if stop.after == 0 {
            "this step".to_owned()
        } else {
            format!("step {}", stop.after)
        };
        line += &format!("; stops after {last}");
    }
    line
}

fn step(look: &Look) -> String {
    let step = look.step;
    let arrived = match step.state {
        StepState::Gather => format!(
            "open: {} of {} drafters have closed it, {} anchors taken",
            step.mask.count_ones(),
            step.members.count_ones(),
            step.anchors
        ),
        StepState::Reduce => format!(
            "reducing: {} of {} drafters are through",
            step.mask.count_ones(),
            step.members.count_ones()
        ),
        StepState::Committed => "committed".to_owned(),
        StepState::Aborted => "aborted: a drafter died, the group forms again".to_owned(),
    };
    format!(
        "step word: step {}, generation {}, {arrived}",
        step.step, step.generation
    )
}

/// Slots by phase.
pub fn ring(look: &Look) -> String {
    let ring = look.ring;
    format!(
        "ring: {} slots: {} free, {} being filled, {} ready, {} held",
        ring.total(),
        ring.free,
        ring.filling,
        ring.ready,
        ring.held
    )
}

/// Columns of text, as wide as they must be; the last is not padded.
fn columns(rows: &[Vec<String>]) -> Vec<String> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn workers(look: &Look) -> Vec<String> {
    let mut heading: Vec<String> = ["worker", "place", "process", "is", "for", "tok/s"]
        .map(str::to_owned)
        .to_vec();
    heading.extend(Spent::ALL.map(|kind| kind.name().to_owned()));
    heading.extend(["doing", "holds"].map(str::to_owned));
    let mut rows = vec![heading];
    for worker in &look.workers {
        let restarts = if worker.restarts > 0 {
            format!(" (restart {})", worker.restarts)
        } else {
            String::new()
        };
        let here = worker.seat == SeatState::Occupied;
        let or_dash = |there: bool, text: String| if there { text } else { "-".to_owned() };
        let mut row = vec![
            format!("{}{restarts}", worker.name),
            worker.place.clone().unwrap_or_else(|| "-".to_owned()),
            or_dash(worker.pid != 0, worker.pid.to_string()),
            worker.condition().to_owned(),
            or_dash(here, format!("{:.1} s", worker.for_s)),
            or_dash(here, short(worker.tokens_per_s)),
        ];
        row.extend(
            worker
                .shares
                .iter()
                .map(|(_, share)| or_dash(here, format!("{:.0}%", 100.0 * share))),
        );
        row.push(worker.doing.clone());
        row.push(worker.holds.to_string());
        rows.push(row);
    }
    columns(&rows)
}

/// The slots that are not free, with owner and content.
fn slots(look: &Look, snapshot: &Snapshot) -> Vec<String> {
    let owner = |seat: Option<u32>| {
        let seat = seat? as usize;
        look.workers.get(seat).map(|worker| worker.name.to_string())
    };
    let mut rows = Vec::new();
    for slot in snapshot.slots.iter().take(look.ring.total() as usize) {
        if slot.phase == SlotPhase::Free {
            continue;
        }
        let phase = match slot.phase {
            SlotPhase::Free => "free",
            SlotPhase::Filling => "being filled",
            SlotPhase::Ready => "ready",
            SlotPhase::Held => "held",
        };
        let tag = slot
            .tag
            .map_or(String::new(), |step| format!(", step {step}"));
        let unit = slot
            .unit
            .map_or(String::new(), |unit| format!("unit {unit}{tag}"));
        rows.push(vec![
            format!("slot {}", slot.slot),
            phase.to_owned(),
            owner(slot.seat).unwrap_or_else(|| "-".to_owned()),
            unit,
        ]);
    }
    columns(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::look::tests::look;

    #[test]
    fn progress_holds_what_is_known() {
        let mut look = look();
        assert_eq!(
            progress(&look),
            "units: 30 of 100 trained (30 %); step 7, loss 1.250, accepted 2.50, 1000 tok/s, 1:30 left"
        );
        look.training = None;
        look.ledger.quarantined = 2;
        assert_eq!(
            progress(&look),
            "units: 30 of 102 trained (31 %), 2 quarantined"
        );
    }

    #[test]
    fn every_worker_has_a_row_with_what_it_holds() {
        let mut look = look();
        look.workers[1].holds.units = vec![3, 4];
        look.workers[3].seat = SeatState::Vacant;
        look.workers[3].pid = 0;
        let rows = workers(&look);
        assert_eq!(rows.len(), 5);
        assert!(rows[0].starts_with("worker "), "{rows:#?}");
        assert!(rows[2].ends_with("leased units 3, 4"), "{rows:#?}");
        assert!(rows[4].contains("not there"), "{rows:#?}");
        let at = rows[0].find("doing").unwrap();
        assert!(rows[1][at..].starts_with("prefill"), "{rows:#?}");
    }
}
