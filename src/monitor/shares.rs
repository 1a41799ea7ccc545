//! What workers spend their time on, in the few kinds that a person compares.

use serde::{Deserialize, Serialize};

use crate::shm::{Activity, SeatView};

/// A kind of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Spent {
    /// Computing and copying.
    Busy,
    /// A target waits for a free slot: drafters do not keep up.
    Slot,
    /// Waiting for work: a drafter for a ready slot, a target for a unit.
    Data,
    /// Inside an all-reduce: its own work and the wait for the others in it.
    Reduce,
    /// Waiting for the other drafters between steps.
    Peers,
    /// Nothing to do: before the start, or after the last unit.
    Idle,
    /// Starting and loading.
    Load,
}

impl Spent {
    /// All kinds, the useful one first.
    pub const ALL: [Spent; 7] = [
        Spent::Busy,
        Spent::Slot,
        Spent::Data,
        Spent::Reduce,
        Spent::Peers,
        Spent::Idle,
        Spent::Load,
    ];

    /// In one word, as column headings and keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Slot => "slot",
            Self::Data => "data",
            Self::Reduce => "reduce",
            Self::Peers => "peers",
            Self::Idle => "idle",
            Self::Load => "load",
        }
    }

    /// In a few words, for legends.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Busy => "computing",
            Self::Slot => "waiting for a free slot",
            Self::Data => "waiting for data",
            Self::Reduce => "all-reduce",
            Self::Peers => "waiting for the other drafters",
            Self::Idle => "idle",
            Self::Load => "loading",
        }
    }

    /// The kind of an activity.
    pub fn of(activity: Activity) -> Self {
        match activity {
            Activity::Prefill
            | Activity::CopyOut
            | Activity::CopyIn
            | Activity::Train
            | Activity::Optimizer
            | Activity::Evaluate
            | Activity::Checkpoint
            | Activity::Busy => Self::Busy,
            Activity::WaitSpace => Self::Slot,
            Activity::WaitUnit | Activity::WaitItem | Activity::WaitEval | Activity::WaitState => {
                Self::Data
            }
            Activity::AllReduce | Activity::WaitReduce => Self::Reduce,
            Activity::WaitMembers
            | Activity::WaitSettle
            | Activity::WaitJoin
            | Activity::WaitSave => Self::Peers,
            Activity::WaitLauncher | Activity::Parked => Self::Idle,
            Activity::Starting | Activity::Loading => Self::Load,
        }
    }
}

/// How a stretch of time was spent: shares in the order of [`Spent::ALL`] that add up to 1, or all 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares(pub [f64; Spent::ALL.len()]);

impl Shares {
    /// Of everything that a seat's record holds.
    pub fn total(seat: &SeatView) -> Self {
        Self::of(nanoseconds(seat))
    }

    /// Of the time between two looks at the same seat.
    pub fn between(before: &SeatView, now: &SeatView) -> Self {
        let (old, new) = (nanoseconds(before), nanoseconds(now));
        // The record and the running activity are read one after the other: a look may see a little less.
        Self::of(std::array::from_fn(|kind| {
            new[kind].saturating_sub(old[kind])
        }))
    }

    fn of(times: [u64; Spent::ALL.len()]) -> Self {
        let sum: u64 = times.iter().sum();
        if sum == 0 {
            return Self::default();
        }
        Self(times.map(|ns| ns as f64 / sum as f64))
    }

    /// One kind's share.
    pub fn share(&self, kind: Spent) -> f64 {
        let place = Spent::ALL.iter().position(|other| *other == kind);
        place.map_or(0.0, |place| self.0[place])
    }

    /// Every kind with its share.
    pub fn iter(&self) -> impl Iterator<Item = (Spent, f64)> + '_ {
        Spent::ALL.into_iter().zip(self.0)
    }

    /// The mean of several.
    pub fn mean<'a>(all: impl IntoIterator<Item = &'a Shares>) -> Self {
        let (mut sum, mut count) = ([0.0; Spent::ALL.len()], 0.0);
        for shares in all {
            for (sum, share) in sum.iter_mut().zip(shares.0) {
                *sum += share;
            }
            count += 1.0;
        }
        if count == 0.0 {
            return Self::default();
        }
        Self(sum.map(|sum| sum / count))
    }
}

impl Serialize for Shares {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let thousandths = |share: f64| (share * 1000.0).round() / 1000.0;
        serializer.collect_map(self.iter().map(|(kind, share)| (kind, thousandths(share))))
    }
}

impl<'de> Deserialize<'de> for Shares {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let read = std::collections::BTreeMap::<Spent, f64>::deserialize(deserializer)?;
        Ok(Self(
            Spent::ALL.map(|kind| read.get(&kind).copied().unwrap_or(0.0)),
        ))
    }
}

fn nanoseconds(seat: &SeatView) -> [u64; Spent::ALL.len()] {
    let mut times = [0; Spent::ALL.len()];
    for (activity, ns) in &seat.time_ns {
        let kind = Spent::of(*activity);
        if let Some(place) = Spent::ALL.iter().position(|other| *other == kind) {
            times[place] += ns;
        }
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_never_counted_as_busy() {
        for &activity in Activity::ALL {
            let kind = Spent::of(activity);
            if activity.is_waiting() {
                assert_ne!(kind, Spent::Busy, "{activity}");
            } else {
                let works = [Spent::Busy, Spent::Load, Spent::Reduce];
                assert!(works.contains(&kind), "{activity}");
            }
        }
    }

    #[test]
    fn shares_survive_json_and_keep_their_names() {
        let shares = Shares([0.5, 0.25, 0.0, 0.125, 0.125, 0.0, 0.0]);
        let text = serde_json::to_string(&shares).unwrap();
        assert!(
            text.starts_with(r#"{"busy":0.5,"slot":0.25,"data":0.0"#),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<Shares>(&text).unwrap(), shares);
        assert_eq!(shares.share(Spent::Reduce), 0.125);
    }
}
