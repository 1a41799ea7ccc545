//! `launcher report`: one HTML page about a run, complete in itself.

mod svg;

use std::collections::BTreeMap;
use std::fmt::Write;

use super::live::{duration, short};
use super::metrics::{EvaluationRecord, MetricsRecord, WorkersRecord};
use super::shares::{Shares, Spent};
use svg::{Axes, Curve, bars, curves, escaped, figure, histogram};

/// Everything that a page is made from.
#[derive(Debug, Default)]
pub struct Page {
    /// The run's name.
    pub name: String,
    /// How it ended, in a sentence.
    pub outcome: String,
    /// What else the summary and the plan say: name and value.
    pub facts: Vec<(String, String)>,
    /// Slots of the ring.
    pub slots: u32,
    /// Every step.
    pub steps: Vec<MetricsRecord>,
    /// The run once in a while.
    pub workers: Vec<WorkersRecord>,
    /// Every evaluation.
    pub evaluations: Vec<EvaluationRecord>,
}

const STYLE: &str = "
:root{--ink:#1b1b1b;--paper:#fff;--faint:#ddd;--soft:#666}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e8;--paper:#161616;--faint:#3a3a3a;--soft:#a0a0a0}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0 auto;padding:1.5rem;max-width:1360px}
h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:1.6rem 0 .4rem}h3{font-size:1rem;margin:0}
.verdict{border-left:4px solid #0072b2;padding:.4rem .9rem;margin:1rem 0}.verdict p{margin:.25rem 0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:1.2rem}
figure{margin:0;border:1px solid var(--faint);border-radius:6px;padding:.8rem}
figure p{margin:.1rem 0 .5rem;color:var(--soft);font-size:.88rem}
svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:var(--soft)}svg text.in{fill:#fff}
svg polyline{fill:none;stroke-width:1.6}.grid{stroke:var(--faint);stroke-width:.7}.axis{stroke:var(--soft)}
.legend{display:flex;flex-wrap:wrap;gap:.2rem .9rem;font-size:.85rem;margin-top:.3rem}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em}
table{border-collapse:collapse}td,th{text-align:left;padding:.15rem .9rem .15rem 0;vertical-align:top}
th{font-weight:600}.none{color:var(--soft)}";

/// Times that go on where a run was resumed, whose own clock began anew.
fn continuous(times: impl Iterator<Item = f64>) -> Vec<f64> {
    let (mut offset, mut last) = (0.0, 0.0);
    let mut all = Vec::new();
    for time in times {
        if time + offset < last {
            offset = last;
        }
        last = time + offset;
        all.push(last);
    }
    all
}

impl Page {
    /// The page.
    pub fn html(&self) -> String {
        let name = escaped(&self.name);
        let mut html = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>{name}</title><style>{STYLE}</style></head><body>\n<h1>{name}</h1>\n<div class=\"verdict\">"
        );
        for sentence in std::iter::once(self.outcome.clone()).chain(self.verdict()) {
            // Writing to a String cannot fail, here and below.
            let _ = write!(html, "<p>{}</p>", escaped(&sentence));
        }
        html += "</div>\n<h2>Learning</h2>\n<div class=\"plots\">\n";
        html += &self.learning();
        html += "</div>\n<h2>Speed</h2>\n<div class=\"plots\">\n";
        html += &self.speed();
        html += "</div>\n<h2>Facts</h2>\n<table>";
        for (name, value) in &self.facts {
            let _ = write!(
                html,
                "<tr><th>{}</th><td>{}</td></tr>",
                escaped(name),
                escaped(value)
            );
        }
        html += "</table>\n</body></html>\n";
        html
    }

    /// What the figures say, in sentences.
    pub fn verdict(&self) -> Vec<String> {
        let mut all = Vec::new();
        if let (Some(first), Some(last)) = (self.evaluations.first(), self.evaluations.last())
            && self.evaluations.len() > 1
        {
            all.push(format!(
                "Held-out accepted length: {:.2} before, {:.2} after step {}.",
                first.accepted_length, last.accepted_length, last.step
            ));
        }
        let shares = self.mean_shares();
        let of_role = |role: &str| {
            let workers = shares.iter().filter(|(name, _)| name.starts_with(role));
            Shares::mean(workers.map(|(_, shares)| shares))
        };
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        if !shares.is_empty() {
            let (targets, drafters) = (of_role("target"), of_role("drafter"));
            let starved = drafters.share(Spent::Data);
            let full = targets.share(Spent::Slot);
            let together = drafters.share(Spent::Reduce) + drafters.share(Spent::Peers);
            all.push(if starved > 0.1 && starved > full {
                format!(
                    "Targets were the bottleneck: drafters waited {} of the time for data.",
                    percent(starved)
                )
            } else if full > 0.1 {
                format!(
                    "Drafters were the bottleneck: targets waited {} of the time for free slots, drafters computed {}.",
                    percent(full),
                    percent(drafters.share(Spent::Busy))
                )
            } else {
                format!(
                    "Balanced: targets computed {} of the time, drafters {}.",
                    percent(targets.share(Spent::Busy)),
                    percent(drafters.share(Spent::Busy))
                )
            });
            if together > 0.2 {
                all.push(format!(
                    "Drafters spent {} of the time in or before all-reduces: a larger --batch-anchors makes them rarer.",
                    percent(together)
                ));
            }
        }
        let times = self.step_times();
        if let Some(late) = slow_steps(&times) {
            all.push(late);
        }
        let restarts: u32 = self.restarts().values().sum();
        if restarts > 0 {
            let who: Vec<String> = self
                .restarts()
                .into_iter()
                .filter(|(_, count)| *count > 0)
                .map(|(name, count)| format!("{name} {count}"))
                .collect();
            all.push(format!("Workers were restarted: {}.", who.join(", ")));
        }
        all
    }

    fn restarts(&self) -> BTreeMap<String, u32> {
        let last = self.workers.last();
        last.map(|record| {
            let each = record.workers.iter();
            each.map(|(name, worker)| (name.clone(), worker.restarts))
                .collect()
        })
        .unwrap_or_default()
    }

    /// What each worker spent the whole run on: lines weigh as much as the time they cover.
    fn mean_shares(&self) -> Vec<(String, Shares)> {
        let times = continuous(self.workers.iter().map(|record| record.time_s));
        let mut sums: BTreeMap<&String, ([f64; Spent::ALL.len()], f64)> = BTreeMap::new();
        let mut before = 0.0;
        for (record, time) in self.workers.iter().zip(times) {
            let seconds = (time - before).max(0.0);
            before = time;
            for (name, worker) in &record.workers {
                let (sum, total) = sums.entry(name).or_default();
                for (sum, share) in sum.iter_mut().zip(worker.shares.0) {
                    *sum += seconds * share;
                }
                *total += seconds * worker.shares.0.iter().sum::<f64>();
            }
        }
        let mut all: Vec<(String, Shares)> = sums
            .into_iter()
            .filter(|(_, (_, total))| *total > 0.0)
            .map(|(name, (sum, total))| (name.clone(), Shares(sum.map(|sum| sum / total))))
            .collect();
        // Targets first, as everywhere else.
        all.sort_by_key(|(name, _)| (!name.starts_with("target"), name.len(), name.clone()));
        all
    }

    fn step_times(&self) -> Vec<f64> {
        let times = continuous(self.steps.iter().map(|step| step.time_s));
        times.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    fn learning(&self) -> String {
        let by_step = |pick: fn(&MetricsRecord) -> f64| -> Vec<(f64, f64)> {
            let point = |step: &MetricsRecord| (f64::from(step.step), pick(step));
            self.steps.iter().map(point).collect()
        };
        let one = |name: &str, points| {
            vec![Curve {
                name: name.to_owned(),
                points,
            }]
        };
        let axes = |y, from_zero| Axes {
            x: "step",
            y,
            from_zero,
        };
        let mut html = figure(
            "Loss",
            "Weighted mean over each step.",
            &curves(&one("loss", by_step(|step| step.loss)), axes("nats", true)),
        );
        let mut accepted = one(
            "training blocks",
            by_step(|step| step.block_accepted_length),
        );
        accepted[0].name = "training blocks".to_owned();
        let held_out: Vec<(f64, f64)> = self
            .evaluations
            .iter()
            .map(|found| (f64::from(found.step), found.accepted_length))
            .collect();
        if !held_out.is_empty() {
            accepted.push(Curve {
                name: "held-out walk, chain".to_owned(),
                points: held_out,
            });
        }
        let trees = self
            .evaluations
            .first()
            .map_or(0, |first| first.trees.len());
        for tree in 0..trees {
            let nodes = self.evaluations[0].trees[tree].0;
            let point = |found: &EvaluationRecord| {
                let length = found.trees.get(tree)?.1;
                Some((f64::from(found.step), length))
            };
            accepted.push(Curve {
                name: format!("held-out walk, tree of {nodes}"),
                points: self.evaluations.iter().filter_map(point).collect(),
            });
        }
        html += &figure(
            "Accepted length over time",
            "Tokens that one pass of the target yields; 1 is plain decoding.",
            &curves(&accepted, axes("tokens", true)),
        );
        html += &figure(
            "Accuracy by position",
            "Share of the supervised slots whose most likely token was right, for the first and the last slots of a block.",
            &curves(&self.positions(), axes("share", true)),
        );
        html += &figure(
            "Accuracy by position at the end",
            "The same over the last tenth of the run: how fast certainty falls with the distance from the anchor.",
            &curves(
                &one("position", self.last_positions()),
                Axes {
                    x: "slot of the block",
                    y: "share",
                    from_zero: true,
                },
            ),
        );
        html += &figure(
            "Learning rate",
            "As used by each step.",
            &curves(&one("lr", by_step(|step| step.lr)), axes("", true)),
        );
        html += &figure(
            "Gradient norm",
            "L2 norm before clipping.",
            &curves(&one("norm", by_step(|step| step.grad_norm)), axes("", true)),
        );
        html
    }

    /// A curve for some of the slots of a block.
    fn positions(&self) -> Vec<Curve> {
        let all = self.steps.iter().map(|step| step.position_accuracy.len());
        let count = all.max().unwrap_or(0);
        let mut chosen = vec![0, 1, 3, 7, 11, 15];
        chosen.retain(|slot| *slot < count);
        if count > 0 && !chosen.contains(&(count - 1)) {
            chosen.push(count - 1);
        }
        let curve = |slot: usize| Curve {
            name: format!("slot {}", slot + 1),
            points: self
                .steps
                .iter()
                .filter_map(|step| {
                    let share = step.position_accuracy.get(slot)?;
                    Some((f64::from(step.step), *share))
                })
                .collect(),
        };
        chosen.into_iter().map(curve).collect()
    }

    fn last_positions(&self) -> Vec<(f64, f64)> {
        let last = &self.steps[self.steps.len() - self.steps.len().div_ceil(10)..];
        let count = last
            .iter()
            .map(|step| step.position_accuracy.len())
            .max()
            .unwrap_or(0);
        let mean = |slot: usize| {
            let values: Vec<f64> = last
                .iter()
                .filter_map(|step| step.position_accuracy.get(slot).copied())
                .collect();
            let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
            ((slot + 1) as f64, mean)
        };
        (0..count).map(mean).collect()
    }

    fn speed(&self) -> String {
        let times = continuous(self.workers.iter().map(|record| record.time_s));
        let mut rates: BTreeMap<&String, Vec<(f64, f64)>> = BTreeMap::new();
        for (record, time) in self.workers.iter().zip(&times) {
            for (name, worker) in &record.workers {
                let points = rates.entry(name).or_default();
                points.push((*time, worker.tokens_per_s));
            }
        }
        let mut named: Vec<Curve> = rates
            .into_iter()
            .map(|(name, points)| Curve {
                name: name.clone(),
                points: smoothed(&points),
            })
            .collect();
        named.sort_by_key(|curve| !curve.name.starts_with("target"));
        let axes = |y| Axes {
            x: "seconds",
            y,
            from_zero: true,
        };
        let mut html = figure(
            "What time went to",
            "Of each worker, from the start of training to the end.",
            &bars(&self.mean_shares()),
        );
        html += &figure(
            "Tokens a second",
            "Of each worker; the last value in brackets.",
            &curves(&named, axes("tokens/s")),
        );
        let phase = |name: &str, place: usize| Curve {
            name: name.to_owned(),
            points: smoothed(
                &self
                    .workers
                    .iter()
                    .zip(&times)
                    .map(|(record, time)| (*time, f64::from(record.ring[place])))
                    .collect::<Vec<_>>(),
            ),
        };
        html += &figure(
            "Ring",
            &format!(
                "Of {} slots. Ready near 0 for long: targets are too slow; free near 0: drafters are.",
                self.slots
            ),
            &curves(
                &[phase("ready", 2), phase("free", 0), phase("held", 3)],
                axes("slots"),
            ),
        );
        html += &figure(
            "Step time",
            "How long steps took; the slowest hundredth stands at the right edge.",
            &histogram(&self.step_times(), "seconds"),
        );
        let restarts = self.restarts();
        if restarts.values().any(|count| *count > 0) {
            let curve = |name: &String| Curve {
                name: name.clone(),
                points: self
                    .workers
                    .iter()
                    .zip(&times)
                    .filter_map(|(record, time)| {
                        let worker = record.workers.get(name)?;
                        Some((*time, f64::from(worker.restarts)))
                    })
                    .collect(),
            };
            let restarted = restarts.iter().filter(|(_, count)| **count > 0);
            let all: Vec<Curve> = restarted.map(|(name, _)| curve(name)).collect();
            html += &figure(
                "Restarts",
                "Of each worker that died, counted over the run.",
                &curves(&all, axes("restarts")),
            );
        }
        html
    }
}

/// Means over a few neighbours: single seconds of a short run hold only a few steps.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    const REACH: usize = 2;
    let mean = |place: usize| {
        let from = place.saturating_sub(REACH);
        let to = (place + REACH + 1).min(points.len());
        let part = &points[from..to];
        let sum: f64 = part.iter().map(|point| point.1).sum();
        (points[place].0, sum / part.len() as f64)
    };
    (0..points.len()).map(mean).collect()
}

/// A sentence when some steps took much longer than most.
fn slow_steps(times: &[f64]) -> Option<String> {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let median = *sorted.get(sorted.len() / 2)?;
    let slow: Vec<&f64> = times.iter().filter(|time| **time > 10.0 * median).collect();
    let lost: f64 = slow.iter().map(|time| **time - median).sum();
    let total: f64 = times.iter().sum();
    (lost > 0.05 * total).then(|| {
        format!(
            "{} of {} steps took over ten times the median of {median:.3} s, {} in all: look for stops, checkpoints and evaluations there.",
            slow.len(),
            short(times.len() as f64),
            duration(lost)
        )
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::monitor::metrics::WorkerRecord;

    /// A run of a minute that a test then changes.
    pub(crate) fn page() -> Page {
        let worker = |rate, busy: f64, slot, data| WorkerRecord {
            tokens_per_s: rate,
            restarts: 0,
            shares: Shares([busy, slot, data, 0.0, 0.0, 0.0, 0.0]),
        };
        Page {
            name: "runs/<a>".to_owned(),
            outcome: "complete: 60 steps".to_owned(),
            facts: vec![("units".to_owned(), "60 of 60".to_owned())],
            slots: 13,
            steps: (1..=60)
                .map(|step| MetricsRecord {
                    step,
                    time_s: f64::from(step),
                    loss: 10.0 / f64::from(step),
                    block_accepted_length: 1.0 + f64::from(step) / 20.0,
                    lr: 1e-3,
                    grad_norm: 1.0,
                    position_accuracy: (0..7).map(|slot| 0.9 / f64::from(slot + 1)).collect(),
                    ..MetricsRecord::default()
                })
                .collect(),
            workers: (1..=60)
                .map(|second| WorkersRecord {
                    step: second,
                    time_s: f64::from(second),
                    units_done: u64::from(second),
                    ring: [4, 2, 3, 4],
                    workers: BTreeMap::from([
                        ("target-0".to_owned(), worker(900.0, 0.25, 0.75, 0.0)),
                        ("drafter-0".to_owned(), worker(450.0, 1.0, 0.0, 0.0)),
                    ]),
                })
                .collect(),
            evaluations: vec![
                EvaluationRecord {
                    step: 0,
                    accepted_length: 1.0,
                    trees: vec![(16, 1.1)],
                    ..EvaluationRecord::default()
                },
                EvaluationRecord {
                    step: 60,
                    accepted_length: 4.0,
                    trees: vec![(16, 4.5)],
                    ..EvaluationRecord::default()
                },
            ],
        }
    }

    #[test]
    fn the_page_is_complete_in_itself() {
        let html = page().html();
        assert!(html.starts_with("<!doctype html>"));
        for wanted in [
            "runs/&lt;a&gt;",
            "complete: 60 steps",
            "Held-out accepted length: 1.00 before, 4.00 after step 60.",
            "Drafters were the bottleneck: targets waited 75 %",
            "held-out walk, tree of 16",
            "Step time",
            "60 of 60",
        ] {
            assert!(html.contains(wanted), "{wanted}");
        }
        for foreign in ["http://", "https://", "<script", "src=", "@import", "url("] {
            assert!(!html.contains(foreign), "{foreign}");
        }
        assert_eq!(html.matches("<svg").count(), html.matches("</svg>").count());
        assert_eq!(html.matches("<figure").count(), 10);
    }

    #[test]
    fn an_empty_run_has_a_page_too() {
        let html = Page::default().html();
        assert!(html.contains("nothing was recorded"));
    }

    #[test]
    fn times_go_on_over_a_resume() {
        let times = [1.0, 2.0, 3.0, 0.5, 1.5].into_iter();
        assert_eq!(continuous(times), [1.0, 2.0, 3.0, 3.5, 4.5]);
    }

    #[test]
    fn starvation_restarts_and_slow_steps_are_spoken_of() {
        let mut page = page();
        for record in &mut page.workers {
            let drafter = record.workers.get_mut("drafter-0").unwrap();
            drafter.shares = Shares([0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]);
            drafter.restarts = 2;
            let target = record.workers.get_mut("target-0").unwrap();
            target.shares = Shares([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        }
        for step in &mut page.steps[30..] {
            step.time_s += 25.0;
        }
        let verdict = page.verdict().join("\n");
        assert!(
            verdict.contains(
                "Targets were the bottleneck: drafters waited 50 % of the time for data."
            ),
            "{verdict}"
        );
        assert!(
            verdict.contains("Workers were restarted: drafter-0 2."),
            "{verdict}"
        );
        assert!(
            verdict.contains("1 of 59 steps took over ten times the median"),
            "{verdict}"
        );
        assert!(page.html().contains("<h3>Restarts</h3>"));
    }
}
