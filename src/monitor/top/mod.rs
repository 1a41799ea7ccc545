//! `launcher top`: what is kept between looks, how rows are sorted, and the frame (`draw`).

mod draw;

use std::collections::{BTreeMap, VecDeque};

use crate::control::{Role, WorkerName};
use crate::engine::cuda::GpuUse;
use crate::monitor::look::{Look, WorkerLook};
use crate::monitor::metrics::MetricsRecord;
use crate::monitor::shares::{Shares, Spent};
use crate::shm::{RingCounts, SlotView, Snapshot};

pub use draw::{draw, once};

/// Looks kept: what sparklines show.
const KEPT: usize = 240;
/// Looks that shares are averaged over: single ones of a short interval jump.
const AVERAGED: usize = 10;

/// How rows are sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Targets, then drafters, each by rank.
    #[default]
    Role,
    /// The least busy first.
    Idle,
    /// The slowest in tokens a second first.
    Slow,
}

impl Order {
    /// The next one.
    pub fn next(self) -> Self {
        match self {
            Self::Role => Self::Idle,
            Self::Idle => Self::Slow,
            Self::Slow => Self::Role,
        }
    }

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Role => "by role",
            Self::Idle => "least busy first",
            Self::Slow => "slowest first",
        }
    }
}

/// The past of one worker.
#[derive(Debug, Default)]
struct Past {
    shares: VecDeque<Shares>,
    tokens_per_s: VecDeque<f64>,
}

/// Everything that a frame is drawn from.
#[derive(Debug)]
pub struct View {
    look: Look,
    slots: Vec<SlotView>,
    pasts: BTreeMap<WorkerName, Past>,
    ring: VecDeque<RingCounts>,
    steps: Vec<MetricsRecord>,
    gpus: BTreeMap<u32, GpuUse>,
    /// How rows are sorted.
    pub order: Order,
    /// No new looks are taken.
    pub paused: bool,
    /// The keys are shown.
    pub help: bool,
    /// Seconds between looks.
    pub every_s: f64,
}

fn push<T>(past: &mut VecDeque<T>, value: T) {
    past.push_back(value);
    if past.len() > KEPT {
        past.pop_front();
    }
}

impl View {
    /// Of a first look.
    pub fn new(look: Look, snapshot: &Snapshot, steps: &VecDeque<MetricsRecord>) -> Self {
        let mut view = Self {
            look: look.clone(),
            slots: Vec::new(),
            pasts: BTreeMap::new(),
            ring: VecDeque::new(),
            steps: Vec::new(),
            gpus: BTreeMap::new(),
            order: Order::default(),
            paused: false,
            help: false,
            every_s: 1.0,
        };
        view.add(look, snapshot, steps);
        view
    }

    /// Takes another look in.
    pub fn add(&mut self, look: Look, snapshot: &Snapshot, steps: &VecDeque<MetricsRecord>) {
        for worker in &look.workers {
            let past = self.pasts.entry(worker.name).or_default();
            push(&mut past.shares, worker.shares);
            push(&mut past.tokens_per_s, worker.tokens_per_s);
        }
        push(&mut self.ring, look.ring);
        let ring = look.ring.total() as usize;
        self.slots = snapshot.slots.iter().take(ring).copied().collect();
        self.steps = steps.iter().cloned().collect();
        self.look = look;
        // The line judges the same stretch of time as the columns.
        let mut averaged = self.look.clone();
        for worker in &mut averaged.workers {
            worker.shares = self.shares(worker);
        }
        self.look.diagnosis = crate::monitor::diagnose::diagnose(&averaged);
    }

    /// What GPUs do now.
    pub fn set_gpus(&mut self, gpus: &[GpuUse]) {
        self.gpus = gpus.iter().map(|gpu| (gpu.ordinal, *gpu)).collect();
    }

    /// The last look.
    pub fn look(&self) -> &Look {
        &self.look
    }

    /// What a worker spent its time on over the last looks.
    fn shares(&self, worker: &WorkerLook) -> Shares {
        match self.pasts.get(&worker.name) {
            Some(past) => Shares::mean(past.shares.iter().rev().take(AVERAGED)),
            None => worker.shares,
        }
    }

    fn tokens_per_s(&self, worker: &WorkerLook) -> f64 {
        let Some(past) = self.pasts.get(&worker.name) else {
            return worker.tokens_per_s;
        };
        let last = past.tokens_per_s.iter().rev().take(AVERAGED);
        let (sum, count) = last.fold((0.0, 0), |(sum, count), rate| (sum + rate, count + 1));
        sum / f64::from(count.max(1))
    }

    /// Tokens in a second of a role, over the last looks.
    fn role_tokens_per_s(&self, role: Role) -> f64 {
        let all = self.look.of_role(role);
        all.map(|worker| self.tokens_per_s(worker)).sum()
    }

    /// Workers in the order of the rows.
    fn rows(&self) -> Vec<&WorkerLook> {
        let mut rows: Vec<&WorkerLook> = self.look.workers.iter().collect();
        match self.order {
            Order::Role => {}
            Order::Idle => rows.sort_by(|a, b| {
                let busy = |worker| self.shares(worker).share(Spent::Busy);
                busy(a).total_cmp(&busy(b))
            }),
            Order::Slow => {
                rows.sort_by(|a, b| self.tokens_per_s(a).total_cmp(&self.tokens_per_s(b)))
            }
        }
        rows
    }

    /// The GPU that a worker runs on, if its use is known.
    fn gpu(&self, worker: &WorkerLook) -> Option<&GpuUse> {
        let ordinal = worker.place.as_deref()?.strip_prefix("GPU ")?;
        self.gpus.get(&ordinal.parse().ok()?)
    }
}

/// The last `width` values as bars of eighths, the largest possible value being `most`.
fn spark(values: impl ExactSizeIterator<Item = f64>, most: f64, width: usize) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let skip = values.len().saturating_sub(width);
    let bar = |value: f64| {
        let share = if most > 0.0 {
            (value / most).clamp(0.0, 1.0)
        } else {
            0.0
        };
        BARS[((share * 8.0) as usize).min(7)]
    };
    values.skip(skip).map(bar).collect()
}

/// A bar of `width` letters, one kind's first letter for each part of its share.
fn stacked(shares: &Shares, width: usize) -> Vec<(Spent, usize)> {
    let mut parts = Vec::new();
    let (mut sum, mut drawn) = (0.0, 0);
    for (kind, share) in shares.iter() {
        sum += share;
        let end = ((sum * width as f64).round() as usize).min(width);
        if end > drawn {
            parts.push((kind, end - drawn));
            drawn = end;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparks_show_the_newest_values() {
        let values = [0.0, 0.5, 1.0, 2.0];
        assert_eq!(spark(values.into_iter(), 1.0, 10), "▁▅██");
        assert_eq!(spark(values.into_iter(), 1.0, 2), "██");
        assert_eq!(spark([3.0].into_iter(), 0.0, 2), "▁");
    }

    #[test]
    fn a_bar_is_full_and_in_the_order_of_kinds() {
        let shares = Shares([0.5, 0.0, 0.3, 0.0, 0.2, 0.0, 0.0]);
        assert_eq!(
            stacked(&shares, 20),
            [(Spent::Busy, 10), (Spent::Data, 6), (Spent::Peers, 4)]
        );
        assert!(stacked(&Shares::default(), 20).is_empty());
        let thirds = Shares([1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 0.0, 0.0, 0.0, 0.0]);
        let drawn: usize = stacked(&thirds, 20).iter().map(|(_, count)| count).sum();
        assert_eq!(drawn, 20);
    }
}
