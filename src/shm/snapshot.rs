//! One look at everything, for `launcher top` and `status`: reads only, never waits, also of a hung run.

use super::atomics::{Acquire, Relaxed};
use super::finish::FinishView;
use super::geometry::Geometry;
use super::ledger::LedgerCounts;
use super::seat::{Activity, Role, SeatState, item_of, now_ns};
use super::segment::Segment;
use super::words::{BudgetWord, LedgerWord, SlotPhase, StepState, UnitState};

/// The step word, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct StepView {
    /// Step being worked on.
    pub step: u64,
    /// Generation of the group.
    pub generation: u32,
    /// State.
    pub state: StepState,
    /// Ranks that have arrived.
    pub mask: u32,
    /// Ranks that must.
    pub members: u32,
    /// Anchors reserved for it.
    pub anchors: u64,
    /// Step of the last complete checkpoint; 0 = none.
    pub saved: u64,
}

/// Slots by phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RingCounts {
    /// Nobody's.
    pub free: u32,
    /// Being written.
    pub filling: u32,
    /// Published: the ring's depth.
    pub ready: u32,
    /// Taken.
    pub held: u32,
}

impl RingCounts {
    /// All slots.
    pub fn total(self) -> u32 {
        self.free + self.filling + self.ready + self.held
    }
}

/// One slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct SlotView {
    /// Slot index; from `slots` on they are the held-out units'.
    pub slot: u32,
    /// Phase.
    pub phase: SlotPhase,
    /// Owning seat in `filling` and `held`.
    pub seat: Option<u32>,
    /// Unit in `ready` and `held`.
    pub unit: Option<u64>,
    /// Step that the holder takes part in with it.
    pub tag: Option<u64>,
    /// Order of publication.
    pub sequence: u64,
    /// Claims so far.
    pub generation: u64,
}

/// A unit that a target has in its hands: leased, and in no slot yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LeaseView {
    /// The unit.
    pub unit: u64,
    /// Whether it is a held-out one.
    pub eval: bool,
    /// The target's seat.
    pub seat: u32,
}

/// A drafter's last record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RecordView {
    /// Step.
    pub step: u64,
    /// Generation.
    pub generation: u32,
    /// Units.
    pub items: u64,
    /// Anchors.
    pub anchors: u64,
}

/// One seat.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct SeatView {
    /// Seat index.
    pub seat: u32,
    /// Role.
    pub role: Role,
    /// Index among the targets, or rank among the drafters.
    pub rank: u32,
    /// State.
    pub state: SeatState,
    /// Incarnation.
    pub incarnation: u32,
    /// Process id.
    pub pid: u32,
    /// Start of the process, in clock ticks since boot.
    pub start_time: u64,
    /// The launcher saw the end of its pipe.
    pub suspect: bool,
    /// A newcomer without weights.
    pub needs_state: bool,
    /// What it does.
    pub activity: Activity,
    /// Whether that is waiting for somebody else.
    pub waiting: bool,
    /// Nanoseconds that it has been at it.
    pub for_ns: u64,
    /// Unit, slot or mask of ranks that it is about.
    pub detail: u64,
    /// Nanoseconds since its last sign of life.
    pub heartbeat_age_ns: u64,
    /// Its step.
    pub step: u64,
    /// Tokens handled.
    pub tokens: u64,
    /// Units handled.
    pub units: u64,
    /// Unit in hand, and whether it is a held-out one.
    pub current: Option<(u64, bool)>,
    /// Last step closed (drafters).
    pub record: Option<RecordView>,
    /// Last step whose c2 are all done (drafters).
    pub c2_done: u64,
    /// Nanoseconds by activity, with the present one up to now; zeros left out.
    pub time_ns: Vec<(Activity, u64)>,
}

impl SeatView {
    /// Nanoseconds spent working and waiting.
    pub fn busy_and_waiting_ns(&self) -> (u64, u64) {
        let sum = |waiting| {
            let chosen = self
                .time_ns
                .iter()
                .filter(|(kind, _)| kind.is_waiting() == waiting);
            chosen.map(|(_, ns)| ns).sum()
        };
        (sum(false), sum(true))
    }
}

/// Everything at (about) one moment; the parts are read one after the other while the run goes on.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Snapshot {
    /// Nanoseconds of the monotonic clock.
    pub taken_ns: u64,
    /// Run, in hexadecimal.
    pub run: String,
    /// Counts and sizes.
    pub geometry: Geometry,
    /// The step word.
    pub step: StepView,
    /// The ring's slots by phase.
    pub ring: RingCounts,
    /// Units published so far.
    pub published: u64,
    /// Every slot, the held-out units' last.
    pub slots: Vec<SlotView>,
    /// Units that targets have leased and not published.
    pub leases: Vec<LeaseView>,
    /// Training units by state.
    pub ledger: LedgerCounts,
    /// Held-out units by state of their ledger words.
    pub eval: LedgerCounts,
    /// End of the run.
    pub finish: FinishView,
    /// Every seat.
    pub seats: Vec<SeatView>,
}

/// A read-only look at somebody else's segment.
#[derive(Clone, Debug)]
pub struct Observer(Segment);

impl Observer {
    /// Opens `/proc/PID/fd/N`.
    ///
    /// # Errors
    /// As [`Segment::attach`].
    pub fn open(path: &std::path::Path) -> super::error::Result<Self> {
        Segment::open_readonly(path).map(Self)
    }

    /// Run that the segment belongs to.
    pub fn run_id(&self) -> super::segment::RunId {
        self.0.run_id()
    }

    /// Counts and sizes.
    pub fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    /// Everything now.
    pub fn snapshot(&self) -> Snapshot {
        self.0.snapshot()
    }
}

impl Segment {
    /// The ring's slots by phase.
    pub fn ring_counts(&self) -> RingCounts {
        let mut counts = RingCounts::default();
        for cell in self.ring() {
            match cell.occupant().0.phase {
                SlotPhase::Free => counts.free += 1,
                SlotPhase::Filling => counts.filling += 1,
                SlotPhase::Ready => counts.ready += 1,
                SlotPhase::Held => counts.held += 1,
            }
        }
        counts
    }

    /// Everything now.
    pub fn snapshot(&self) -> Snapshot {
        let word = self.step_word();
        let slots: Vec<SlotView> = (0..self.memory().slots().len() as u32)
            .map(|slot| self.slot_view(slot))
            .collect();
        Snapshot {
            taken_ns: now_ns(),
            run: self.run_id().to_string(),
            geometry: self.geometry().clone(),
            step: StepView {
                step: word.step,
                generation: word.generation,
                state: word.state,
                mask: word.mask,
                members: word.members,
                anchors: self.reserved(word.step, word.generation),
                saved: self.saved(),
            },
            ring: self.ring_counts(),
            published: self.control().sequence.next.load(Relaxed),
            leases: self.leases(&slots),
            slots,
            ledger: self.ledger_counts(),
            eval: LedgerCounts::of(self.eval_ledger()),
            finish: self.finish_view(),
            seats: (0..self.geometry().seats())
                .map(|seat| self.seat_view(seat))
                .collect(),
        }
    }

    fn reserved(&self, step: u64, generation: u32) -> u64 {
        let budget = self.budget();
        let same = (budget.step, budget.generation) == (step, generation);
        if same { budget.anchors } else { 0 }
    }

    /// Leases of both ledgers that none of `slots` has published.
    fn leases(&self, slots: &[SlotView]) -> Vec<LeaseView> {
        let ring = self.geometry().slots;
        let published: std::collections::BTreeSet<(bool, u64)> = slots
            .iter()
            .filter_map(|slot| Some((slot.slot >= ring, slot.unit?)))
            .collect();
        let of = |words: &[super::atomics::AtomicU64], eval| -> Vec<LeaseView> {
            let leased = |(unit, word): (usize, &super::atomics::AtomicU64)| {
                let word = LedgerWord::unpack(word.load(Acquire));
                (word.state == UnitState::Leased).then_some(LeaseView {
                    unit: unit as u64,
                    eval,
                    seat: word.seat,
                })
            };
            words.iter().enumerate().filter_map(leased).collect()
        };
        let mut leases = of(self.eval_ledger(), true);
        leases.append(&mut of(self.ledger(), false));
        leases.retain(|lease| !published.contains(&(lease.eval, lease.unit)));
        leases
    }

    fn slot_view(&self, slot: u32) -> SlotView {
        let cell = self.slot(slot);
        let (word, unit) = cell.occupant();
        let owned = matches!(word.phase, SlotPhase::Filling | SlotPhase::Held);
        let tag = cell.tag.load(Acquire);
        SlotView {
            slot,
            phase: word.phase,
            seat: owned.then_some(word.seat),
            unit,
            tag: (word.phase == SlotPhase::Held && tag != 0).then_some(tag),
            sequence: cell.sequence.load(Acquire),
            generation: word.generation,
        }
    }

    fn seat_view(&self, seat: u32) -> SeatView {
        let cell = self.seat(seat);
        let (identity, record, live) = (&cell.identity, &cell.record, &cell.live);
        let role = self.role(seat);
        let now = now_ns();
        let activity = Activity::from_code(live.activity.load(Relaxed));
        let state = self.seat_state(seat);
        let since = live.since.load(Relaxed);
        let running = state == SeatState::Occupied;
        let for_ns = if running {
            now.saturating_sub(since)
        } else {
            0
        };
        let times = Activity::ALL.iter().zip(&live.time_ns).map(|(&kind, ns)| {
            let extra = if kind == activity { for_ns } else { 0 };
            (kind, ns.load(Relaxed) + extra)
        });
        // Only the stamp's fields: anchors are not part of it.
        let closed = BudgetWord::unpack(record.stamp.load(Acquire));
        let record_view = (role == Role::Drafter && closed.step != 0).then(|| RecordView {
            step: closed.step,
            generation: closed.generation,
            items: record.items.load(Acquire),
            anchors: record.anchors.load(Acquire),
        });
        SeatView {
            seat,
            role,
            rank: if role == Role::Target {
                seat
            } else {
                seat - self.geometry().targets
            },
            state,
            incarnation: identity.incarnation.load(Relaxed),
            pid: identity.pid.load(Relaxed),
            start_time: identity.start_time.load(Relaxed),
            suspect: identity.suspect.load(Relaxed) != 0,
            needs_state: identity.needs_state.load(Acquire) == 1,
            activity,
            waiting: activity.is_waiting(),
            for_ns,
            detail: live.detail.load(Relaxed),
            heartbeat_age_ns: now.saturating_sub(live.heartbeat.load(Relaxed)),
            step: live.step.load(Relaxed),
            tokens: live.tokens.load(Relaxed),
            units: live.units.load(Relaxed),
            current: item_of(record.current_item.load(Acquire)),
            record: record_view,
            c2_done: record.c2_done.load(Acquire),
            time_ns: times.filter(|(_, ns)| *ns > 0).collect(),
        }
    }
}
