//! What a run writes down about itself beside metrics.jsonl: workers.jsonl, evaluations.jsonl, TensorBoard's event
//! files, and the page of its Prometheus endpoint.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::metrics_port::MetricsServer;
use super::output::{JsonLines, OutputDir, OutputError};
use super::places::Place;
use crate::control::Evaluation;
use crate::monitor::look::name_of;
use crate::monitor::metrics::{EvaluationRecord, MetricsRecord, WorkerRecord, WorkersRecord};
use crate::monitor::registry::{METRICS, Sample, Source, tag};
use crate::monitor::shares::Shares;
use crate::monitor::tensorboard::EventFile;
use crate::shm::{Segment, Snapshot};

/// Between two lines of workers.jsonl at first; later a thousandth of the run's age.
const EVERY: Duration = Duration::from_secs(1);

/// What was last recorded, for whoever asks the endpoint.
#[derive(Debug, Default)]
pub struct Latest {
    /// The last step.
    pub step: Option<MetricsRecord>,
    /// The last evaluation.
    pub evaluation: Option<EvaluationRecord>,
}

/// Where things are to be recorded besides the files that are always written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecorderOptions {
    /// Also as TensorBoard event files.
    pub tensorboard: bool,
    /// Also on a Prometheus endpoint at this address.
    pub metrics_port: Option<SocketAddr>,
}

/// Records one run.
pub struct Recorder {
    workers: JsonLines,
    evaluations: JsonLines,
    events: Option<EventFile>,
    latest: Arc<Mutex<Latest>>,
    server: Option<MetricsServer>,
    began: Instant,
    before: Option<(Instant, Snapshot)>,
    broken: bool,
}

impl Recorder {
    /// Opens everything that it writes to.
    ///
    /// # Errors
    /// A file that cannot be opened, or an address that cannot be listened on.
    pub fn start(
        output: &OutputDir,
        options: &RecorderOptions,
        segment: &Segment,
        places: &[Place],
    ) -> Result<Self, OutputError> {
        let failed = |what, path: std::path::PathBuf| {
            move |source| OutputError::Write { path, what, source }
        };
        let events = match options.tensorboard {
            false => None,
            true => {
                let folder = output.file("tensorboard");
                let made = EventFile::create(&folder);
                Some(made.map_err(failed("write event files", folder))?)
            }
        };
        let latest = Arc::<Mutex<Latest>>::default();
        let server = match options.metrics_port {
            None => None,
            Some(address) => {
                let run = output.path().display().to_string();
                let places = places
                    .iter()
                    .map(|place| (place.worker, place.device.to_string()))
                    .collect();
                let started = MetricsServer::start(
                    address,
                    run,
                    segment.clone(),
                    places,
                    Arc::clone(&latest),
                );
                let at = format!("--metrics-port {address}").into();
                Some(started.map_err(failed("listen there", at))?)
            }
        };
        Ok(Self {
            workers: JsonLines::append_to(&output.file("workers.jsonl"))?,
            evaluations: JsonLines::append_to(&output.file("evaluations.jsonl"))?,
            events,
            latest,
            server,
            began: Instant::now(),
            before: None,
            broken: false,
        })
    }

    /// Where the endpoint listens, if there is one.
    pub fn address(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(MetricsServer::address)
    }

    /// A step was recorded.
    pub fn step(&mut self, record: &MetricsRecord) {
        let values = |source: &Source| match source {
            Source::Step(pick) => pick(record),
            _ => Vec::new(),
        };
        self.event(record.step, values);
        self.lock().step = Some(record.clone());
    }

    /// An evaluation is complete.
    pub fn evaluation(&mut self, found: &Evaluation) {
        let Some(accepted_length) = found.accepted_length() else {
            return;
        };
        let record = EvaluationRecord {
            step: found.step,
            time_s: self.began.elapsed().as_secs_f64(),
            documents: found.documents,
            accepted_length,
            trees: found
                .trees
                .iter()
                .map(|&(nodes, tokens, rounds)| (nodes, tokens as f64 / rounds.max(1) as f64))
                .collect(),
        };
        let added = self.evaluations.add(&record);
        self.check(added.map_err(|error| error.to_string()));
        self.event(record.step, |source| match source {
            Source::Evaluation(pick) => pick(&record),
            _ => Vec::new(),
        });
        self.lock().evaluation = Some(record);
    }

    /// Called often: adds a line to workers.jsonl when it is time.
    pub fn tick(&mut self, segment: &Segment, step: u32) {
        let every = EVERY.max(self.began.elapsed() / 1000);
        if self
            .before
            .as_ref()
            .is_some_and(|(at, _)| at.elapsed() < every)
        {
            return;
        }
        let (at, now) = (Instant::now(), segment.snapshot());
        if let Some((then, before)) = &self.before {
            let record = workers(&now, before, (at - *then).as_secs_f64());
            let record = WorkersRecord {
                step,
                time_s: self.began.elapsed().as_secs_f64(),
                ..record
            };
            let added = self.workers.add(&record);
            self.check(added.map_err(|error| error.to_string()));
        }
        self.before = Some((at, now));
    }

    fn event(&mut self, step: u32, values: impl Fn(&Source) -> Vec<Sample>) {
        let Some(events) = &mut self.events else {
            return;
        };
        let tagged = METRICS.iter().filter(|metric| !metric.tag.is_empty());
        let values: Vec<(String, f64)> = tagged
            .flat_map(|metric| {
                let samples = values(&metric.source).into_iter();
                samples.map(move |sample| (tag(metric, &sample), sample.value))
            })
            .collect();
        let added = events.add(step.into(), &values);
        self.check(added.map_err(|error| format!("tensorboard: {error}")));
    }

    /// Records are a help, no condition: the first one that cannot be written is spoken of.
    fn check(&mut self, added: Result<(), String>) {
        if let Err(what) = added
            && !std::mem::replace(&mut self.broken, true)
        {
            tracing::warn!("{what}; the run goes on, its records have gaps");
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A line of workers.jsonl but for its time and step.
fn workers(now: &Snapshot, before: &Snapshot, seconds: f64) -> WorkersRecord {
    let pairs = now.seats.iter().zip(&before.seats);
    let workers = pairs.map(|(seat, earlier)| {
        let tokens = seat.tokens.saturating_sub(earlier.tokens);
        let record = WorkerRecord {
            tokens_per_s: (tokens as f64 / seconds.max(1e-3)).round(),
            restarts: seat.incarnation.saturating_sub(1),
            shares: Shares::between(earlier, seat),
        };
        (name_of(seat).to_string(), record)
    });
    let ring = now.ring;
    WorkersRecord {
        units_done: now.ledger.done + now.ledger.quarantined,
        ring: [ring.free, ring.filling, ring.ready, ring.held],
        workers: workers.collect::<BTreeMap<_, _>>(),
        ..WorkersRecord::default()
    }
}
