//! The one table of metrics: names, units, help, and where each value comes from. TensorBoard's event files, the
//! Prometheus endpoint and `docs/metrics.md` all follow it.

use std::fmt::Write;

use super::look::Look;
use super::metrics::{EvaluationRecord, MetricsRecord};
use super::shares::Spent;
use crate::shm::SeatState;

/// Whether a value may fall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It may rise and fall.
    Gauge,
    /// It only rises, but for a restart.
    Counter,
}

impl Kind {
    /// As Prometheus calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
        }
    }
}

/// A value, and what tells it from the others of its metric.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Label and its value.
    pub labels: Vec<(&'static str, String)>,
    /// The value.
    pub value: f64,
}

fn one(value: f64) -> Vec<Sample> {
    let labels = Vec::new();
    vec![Sample { labels, value }]
}

/// Where a metric's values come from.
pub enum Source {
    /// A committed step.
    Step(fn(&MetricsRecord) -> Vec<Sample>),
    /// An evaluation on the held-out documents.
    Evaluation(fn(&EvaluationRecord) -> Vec<Sample>),
    /// A look at the run, whenever somebody asks.
    Look(fn(&Look) -> Vec<Sample>),
}

/// One metric.
pub struct Metric {
    /// Its name for Prometheus; the part behind `slipstream_`.
    pub name: &'static str,
    /// Its tag for TensorBoard; empty where it is not written there.
    pub tag: &'static str,
    /// Gauge or counter.
    pub kind: Kind,
    /// Its unit, in words.
    pub unit: &'static str,
    /// Its labels, in words.
    pub labels: &'static str,
    /// What it is.
    pub help: &'static str,
    /// Where its values come from.
    pub source: Source,
}

const fn step(
    name: &'static str,
    tag: &'static str,
    unit: &'static str,
    help: &'static str,
    pick: fn(&MetricsRecord) -> Vec<Sample>,
) -> Metric {
    Metric {
        name,
        tag,
        kind: Kind::Gauge,
        unit,
        labels: "",
        help,
        source: Source::Step(pick),
    }
}

const fn looked(
    name: &'static str,
    kind: Kind,
    unit: &'static str,
    labels: &'static str,
    help: &'static str,
    pick: fn(&Look) -> Vec<Sample>,
) -> Metric {
    Metric {
        name,
        tag: "",
        kind,
        unit,
        labels,
        help,
        source: Source::Look(pick),
    }
}

fn each_worker(
    look: &Look,
    value: impl Fn(&super::look::WorkerLook) -> Option<f64>,
) -> Vec<Sample> {
    let sample = |worker: &super::look::WorkerLook| {
        Some(Sample {
            labels: vec![("worker", worker.name.to_string())],
            value: value(worker)?,
        })
    };
    look.workers.iter().filter_map(sample).collect()
}

fn labelled(label: &'static str, values: &[(&str, u64)]) -> Vec<Sample> {
    let sample = |(name, value): &(&str, u64)| Sample {
        labels: vec![(label, (*name).to_owned())],
        value: *value as f64,
    };
    values.iter().map(sample).collect()
}

/// All metrics.
pub static METRICS: &[Metric] = &[
    step("step", "", "steps", "Steps committed in the run", |s| {
        one(f64::from(s.step))
    }),
    step(
        "loss",
        "train/loss",
        "nats",
        "Weighted mean of the loss over the last step",
        |s| one(s.loss),
    ),
    step(
        "block_accepted_length",
        "train/block_accepted_length",
        "tokens",
        "Mean over the last step's blocks of 1 + length of the correct prefix",
        |s| one(s.block_accepted_length),
    ),
    step(
        "position_accuracy",
        "train/position_accuracy",
        "share",
        "Share of the last step's supervised slots whose most likely token was right, by slot",
        |s| {
            let sample = |(place, share): (usize, &f64)| Sample {
                labels: vec![("position", (place + 1).to_string())],
                value: *share,
            };
            s.position_accuracy.iter().enumerate().map(sample).collect()
        },
    ),
    step(
        "lr",
        "train/lr",
        "",
        "Learning rate of the last step",
        |s| one(s.lr),
    ),
    step(
        "grad_norm",
        "train/grad_norm",
        "",
        "L2 norm of the last step's gradient before clipping",
        |s| one(s.grad_norm),
    ),
    step(
        "step_tokens",
        "train/tokens",
        "tokens",
        "Tokens of the last step",
        |s| one(s.tokens as f64),
    ),
    step(
        "target_tokens_per_second",
        "speed/target_tokens_per_s",
        "tokens/s",
        "Tokens that all targets together prefill in a second",
        |s| one(s.target_tokens_per_s),
    ),
    step(
        "drafter_tokens_per_second",
        "speed/drafter_tokens_per_s",
        "tokens/s",
        "Tokens that all drafters together train on in a second",
        |s| one(s.drafter_tokens_per_s),
    ),
    step(
        "worker_busy_share",
        "busy",
        "share",
        "Share of its time over the last seconds that a worker computes",
        |s| {
            let sample = |(worker, share): (&String, &f64)| Sample {
                labels: vec![("worker", worker.clone())],
                value: *share,
            };
            s.busy.iter().map(sample).collect()
        },
    ),
    Metric {
        name: "held_out_accepted_length",
        tag: "eval/accepted_length",
        kind: Kind::Gauge,
        unit: "tokens",
        labels: "tree: nodes of the draft tree, or chain",
        help: "Tokens a target pass would yield on the held-out documents, by the decoding walk",
        source: Source::Evaluation(|evaluation| {
            let mut all = vec![Sample {
                labels: vec![("tree", "chain".to_owned())],
                value: evaluation.accepted_length,
            }];
            all.extend(evaluation.trees.iter().map(|(nodes, length)| Sample {
                labels: vec![("tree", nodes.to_string())],
                value: *length,
            }));
            all
        }),
    },
    looked(
        "units",
        Kind::Gauge,
        "units",
        "state: pending, leased, done, quarantined",
        "Units of all epochs by what the ledger says of them",
        |look| {
            let ledger = look.ledger;
            labelled(
                "state",
                &[
                    ("pending", ledger.pending),
                    ("leased", ledger.leased),
                    ("done", ledger.done),
                    ("quarantined", ledger.quarantined),
                ],
            )
        },
    ),
    looked(
        "ring_slots",
        Kind::Gauge,
        "slots",
        "phase: free, filling, ready, held",
        "Slots of the ring by phase; ready ones wait for a drafter",
        |look| {
            let ring = look.ring;
            labelled(
                "phase",
                &[
                    ("free", ring.free.into()),
                    ("filling", ring.filling.into()),
                    ("ready", ring.ready.into()),
                    ("held", ring.held.into()),
                ],
            )
        },
    ),
    looked(
        "progress_ratio",
        Kind::Gauge,
        "share",
        "",
        "Share of the units that need no more work",
        |look| one(look.progress()),
    ),
    looked(
        "trouble",
        Kind::Gauge,
        "0 or 1",
        "",
        "1 while the run does not get on: a process is stopped, dead or hung",
        |look| one(f64::from(u8::from(look.diagnosis.verdict.is_trouble()))),
    ),
    looked(
        "worker_up",
        Kind::Gauge,
        "0 or 1",
        "worker",
        "1 while the worker's process lives and is not stopped",
        |look| {
            each_worker(look, |worker| {
                let moves = worker.process.is_some() && !worker.is_stopped();
                Some(f64::from(u8::from(moves)))
            })
        },
    ),
    looked(
        "worker_tokens_total",
        Kind::Counter,
        "tokens",
        "worker",
        "Tokens that a worker has handled",
        |look| each_worker(look, |worker| Some(worker.tokens as f64)),
    ),
    looked(
        "worker_units_total",
        Kind::Counter,
        "units",
        "worker",
        "Units that a worker has handled",
        |look| each_worker(look, |worker| Some(worker.units as f64)),
    ),
    looked(
        "worker_time_share",
        Kind::Gauge,
        "share",
        "worker; kind: busy, slot, data, reduce, peers, idle, load",
        "What a worker has spent its time on since its start",
        |look| {
            let mut all = Vec::new();
            for worker in &look.workers {
                all.extend(worker.shares_total.iter().map(|(kind, value)| Sample {
                    labels: vec![
                        ("worker", worker.name.to_string()),
                        ("kind", kind.name().to_owned()),
                    ],
                    value,
                }));
            }
            all
        },
    ),
    looked(
        "worker_waiting_seconds",
        Kind::Gauge,
        "seconds",
        "worker",
        "How long a worker's present wait has lasted; 0 while it works",
        |look| {
            each_worker(look, |worker| {
                let sits = worker.seat == SeatState::Occupied;
                let waits = worker.waiting && Spent::of(worker.activity) != Spent::Idle;
                Some(if sits && waits { worker.for_s } else { 0.0 })
            })
        },
    ),
    looked(
        "worker_restarts_total",
        Kind::Counter,
        "restarts",
        "worker",
        "How often a worker was started again after a death",
        |look| each_worker(look, |worker| Some(f64::from(worker.restarts))),
    ),
    looked(
        "worker_resident_bytes",
        Kind::Gauge,
        "bytes",
        "worker",
        "Resident memory of a worker's process",
        |look| {
            each_worker(look, |worker| {
                Some(worker.process.as_ref()?.resident_memory as f64)
            })
        },
    ),
];

/// What a page of metrics is made from.
pub struct Known<'a> {
    /// The run now.
    pub look: &'a Look,
    /// Its last step.
    pub step: Option<&'a MetricsRecord>,
    /// Its last evaluation.
    pub evaluation: Option<&'a EvaluationRecord>,
}

impl Known<'_> {
    /// The values of a metric; none where its source has not come yet.
    fn samples(&self, metric: &Metric) -> Vec<Sample> {
        match metric.source {
            Source::Step(pick) => self.step.map(pick).unwrap_or_default(),
            Source::Evaluation(pick) => self.evaluation.map(pick).unwrap_or_default(),
            Source::Look(pick) => pick(self.look),
        }
    }

    /// All of it in Prometheus' text format, version 0.0.4.
    pub fn page(&self) -> String {
        let mut page = String::new();
        for metric in METRICS {
            let samples = self.samples(metric);
            if samples.is_empty() {
                continue;
            }
            let name = format!("slipstream_{}", metric.name);
            // Writing to a String cannot fail.
            let _ = writeln!(page, "# HELP {name} {}", escaped(metric.help));
            let _ = writeln!(page, "# TYPE {name} {}", metric.kind.name());
            for sample in samples {
                let labels: Vec<String> = sample
                    .labels
                    .iter()
                    .map(|(label, value)| format!("{label}=\"{}\"", escaped(value)))
                    .collect();
                let labels = if labels.is_empty() {
                    String::new()
                } else {
                    format!("{{{}}}", labels.join(","))
                };
                let _ = writeln!(page, "{name}{labels} {}", number(sample.value));
            }
        }
        page
    }
}

fn number(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned()
    } else {
        value.to_string()
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

/// A value's tag for TensorBoard: the metric's, and its labels' values behind it.
pub fn tag(metric: &Metric, sample: &Sample) -> String {
    let mut tag = metric.tag.to_owned();
    for (_, value) in &sample.labels {
        tag.push('/');
        tag.push_str(value);
    }
    tag
}

/// `docs/metrics.md`.
pub fn document() -> String {
    let mut text = String::from(
        "# Metrics\n\n\
         `--metrics-port PORT` serves all of these for Prometheus, each name with `slipstream_` before it; \
         `docs/grafana.json` is a dashboard over them. `--tensorboard` writes those with a tag to the run's \
         `tensorboard/` folder. `metrics.jsonl` holds what comes from steps.\n\n\
         | name | kind | unit | labels | tag | what it is |\n|---|---|---|---|---|---|\n",
    );
    for metric in METRICS {
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} | {} | {} |",
            metric.name,
            metric.kind.name(),
            metric.unit,
            metric.labels,
            if metric.tag.is_empty() {
                String::new()
            } else {
                format!("`{}`", metric.tag)
            },
            metric.help
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::look::tests::look;
    use super::*;

    fn repository(name: &str) -> String {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    #[test]
    fn names_are_unique_and_of_the_form_that_prometheus_takes() {
        let mut names: Vec<&str> = METRICS.iter().map(|metric| metric.name).collect();
        for name in &names {
            assert!(
                name.bytes()
                    .all(|b| b.is_ascii_lowercase() || b == b'_' || b.is_ascii_digit()),
                "{name}"
            );
        }
        for metric in METRICS {
            let counts = metric.name.ends_with("_total");
            assert_eq!(counts, metric.kind == Kind::Counter, "{}", metric.name);
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), METRICS.len());
    }

    #[test]
    fn a_page_holds_every_metric_whose_source_is_there() {
        let look = look();
        let step = MetricsRecord {
            step: 7,
            loss: 1.5,
            position_accuracy: vec![0.5, 0.25],
            busy: [("drafter-0".to_owned(), 0.75)].into(),
            ..MetricsRecord::default()
        };
        let page = Known {
            look: &look,
            step: Some(&step),
            evaluation: None,
        }
        .page();
        for line in [
            "# TYPE slipstream_loss gauge",
            "slipstream_loss 1.5",
            "slipstream_position_accuracy{position=\"2\"} 0.25",
            "slipstream_worker_busy_share{worker=\"drafter-0\"} 0.75",
            "slipstream_units{state=\"done\"} 30",
            "slipstream_ring_slots{phase=\"ready\"} 3",
            "# TYPE slipstream_worker_tokens_total counter",
            "slipstream_worker_tokens_total{worker=\"target-1\"} 1000",
            "slipstream_worker_up{worker=\"drafter-1\"} 1",
            "slipstream_trouble 0",
        ] {
            assert!(page.lines().any(|found| found == line), "{line}\n{page}");
        }
        assert!(!page.contains("held_out"), "nothing was evaluated yet");
        assert_eq!(number(f64::INFINITY), "+Inf");
        assert_eq!(escaped("a\"b\\c\n"), "a\\\"b\\\\c\\n");
    }

    #[test]
    fn the_document_follows_the_table() {
        assert_eq!(repository("docs/metrics.md"), document());
    }

    #[test]
    fn the_dashboard_asks_only_for_metrics_that_there_are() {
        let dashboard: serde_json::Value =
            serde_json::from_str(&repository("docs/grafana.json")).unwrap();
        let text = dashboard.to_string();
        let mut asked = 0;
        for part in text.split("slipstream_").skip(1) {
            let end = part
                .find(|c: char| !(c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit()))
                .unwrap_or(part.len());
            let name = &part[..end];
            assert!(METRICS.iter().any(|metric| metric.name == name), "{name}");
            asked += 1;
        }
        assert!(asked >= 10, "{asked}");
    }
}
