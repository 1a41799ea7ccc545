//! Seats: who works here, what it is doing and what it waits for.

use super::atomics::{AcqRel, Acquire, Relaxed, Release};
use super::error::{Result, ShmError};
use super::layout::Live;
use super::segment::Segment;
use super::step::ranks;

/// State of a seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SeatState {
    /// Nobody sits here: not started yet, or recovered after a death.
    Vacant,
    /// A worker sits here, or one died here and is not recovered yet.
    Occupied,
    /// The worker left in good order.
    Left,
}

impl SeatState {
    fn code(self) -> u32 {
        match self {
            SeatState::Vacant => 0,
            SeatState::Occupied => 1,
            SeatState::Left => 2,
        }
    }

    fn from_code(code: u32) -> Self {
        match code {
            0 => SeatState::Vacant,
            1 => SeatState::Occupied,
            _ => SeatState::Left,
        }
    }
}

/// What a seat's worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Runs the frozen model and publishes its hidden states.
    Target,
    /// Trains the drafter.
    Drafter,
}

macro_rules! activities {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $waiting:literal;)*) => {
        /// What a worker is doing; the time spent in each is kept in its seat.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
        #[serde(rename_all = "snake_case")]
        #[repr(u32)]
        pub enum Activity { $($(#[$doc])* $name,)* }

        impl Activity {
            /// All of them, in the order of the seat's time record.
            pub const ALL: &'static [Activity] = &[$(Activity::$name,)*];
            /// How many there are.
            pub const COUNT: usize = Self::ALL.len();

            /// Whether the worker waits for somebody else.
            pub fn is_waiting(self) -> bool {
                match self { $(Activity::$name => $waiting,)* }
            }
        }

        impl std::fmt::Display for Activity {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self { $(Activity::$name => $text,)* })
            }
        }
    };
}

activities! {
    /// Started, nothing loaded yet.
    Starting = "starting", false;
    /// Reading weights and data.
    Loading = "loading", false;
    /// The target's forward pass.
    Prefill = "prefill", false;
    /// Copying hidden states into a slot.
    CopyOut = "copying into a slot", false;
    /// Copying hidden states out of a slot.
    CopyIn = "copying out of a slot", false;
    /// The drafter's forward and backward passes.
    Train = "training", false;
    /// A collective's own work.
    AllReduce = "all-reduce", false;
    /// The optimizer step.
    Optimizer = "optimizer", false;
    /// Held-out evaluation.
    Evaluate = "evaluating", false;
    /// Writing a checkpoint.
    Checkpoint = "writing a checkpoint", false;
    /// Anything else that is work.
    Busy = "busy", false;
    /// Waiting for the launcher.
    WaitLauncher = "waiting for the launcher", true;
    /// A target waits for a unit to prefill.
    WaitUnit = "waiting for a unit", true;
    /// A target waits for a free slot.
    WaitSpace = "waiting for a free slot", true;
    /// A drafter waits for a ready slot.
    WaitItem = "waiting for a ready slot", true;
    /// A drafter waits for the others at g1.
    WaitMembers = "waiting for the other drafters to close the step", true;
    /// A drafter waits inside a collective.
    WaitReduce = "waiting inside the all-reduce", true;
    /// A drafter waits for the step's decision.
    WaitSettle = "waiting for the step to be decided", true;
    /// A drafter waits for the next generation of the group.
    WaitJoin = "waiting for the group to form again", true;
    /// A newcomer waits for weights.
    WaitState = "waiting for weights from another drafter", true;
    /// A drafter waits for the held-out units.
    WaitEval = "waiting for the held-out units", true;
    /// Waiting for the others' c2, or for a checkpoint.
    WaitSave = "waiting for a checkpoint", true;
    /// A target has no more work and waits for the drafters to leave.
    Parked = "parked until the drafters have left", true;
}

impl Activity {
    pub(crate) fn from_code(code: u32) -> Self {
        Activity::ALL
            .get(code as usize)
            .copied()
            .unwrap_or(Activity::Busy)
    }
}

/// A handle's own seat: writes the live record that `launcher top` shows.
#[derive(Clone, Debug)]
pub struct LiveSeat {
    segment: Segment,
    index: u32,
}

impl LiveSeat {
    /// Seat index.
    pub fn index(&self) -> u32 {
        self.index
    }

    fn live(&self) -> &Live {
        &self.segment.seat(self.index).live
    }

    /// Says that the worker is alive.
    pub fn beat(&self) {
        self.live().heartbeat.store(now_ns(), Relaxed);
    }

    /// From now on the worker does `activity`; `detail` is the unit, slot or ranks it is about.
    pub fn set(&self, activity: Activity, detail: u64) {
        let live = self.live();
        let now = now_ns();
        let before = live.activity.load(Relaxed) as usize % Activity::COUNT;
        let spent = now.saturating_sub(live.since.load(Relaxed));
        live.time_ns[before].fetch_add(spent, Relaxed);
        live.activity.store(activity as u32, Relaxed);
        live.detail.store(detail, Relaxed);
        live.since.store(now, Relaxed);
        live.heartbeat.store(now, Relaxed);
    }

    /// Does `activity` until the guard is dropped, then what it did before.
    pub fn during(&self, activity: Activity, detail: u64) -> During {
        let live = self.live();
        let before = Activity::from_code(live.activity.load(Relaxed));
        let before_detail = live.detail.load(Relaxed);
        self.set(activity, detail);
        During {
            seat: self.clone(),
            before,
            before_detail,
        }
    }

    /// Adds to the tokens and units this worker has handled.
    pub fn count(&self, tokens: u64, units: u64) {
        self.live().tokens.fetch_add(tokens, Relaxed);
        self.live().units.fetch_add(units, Relaxed);
    }

    /// The step this worker is in.
    pub fn set_step(&self, step: u64) {
        self.live().step.store(step, Relaxed);
    }
}

/// Restores a seat's earlier activity when dropped.
#[derive(Debug)]
pub struct During {
    seat: LiveSeat,
    before: Activity,
    before_detail: u64,
}

impl Drop for During {
    fn drop(&mut self) {
        self.seat.set(self.before, self.before_detail);
    }
}

/// The unit that a worker has in hand, as a word: 0, or `[eval:1 | unit + 1]`.
pub(crate) fn item_word(unit: Option<(u64, bool)>) -> u64 {
    unit.map_or(0, |(unit, eval)| (unit + 1) | (u64::from(eval) << 63))
}

/// The reverse of [`item_word`].
pub(crate) fn item_of(word: u64) -> Option<(u64, bool)> {
    let unit = (word & !(1 << 63)).checked_sub(1)?;
    Some((unit, word >> 63 == 1))
}

impl Segment {
    /// Role of a seat.
    pub fn role(&self, seat: u32) -> Role {
        if seat < self.geometry().targets {
            Role::Target
        } else {
            Role::Drafter
        }
    }

    /// State of a seat.
    pub fn seat_state(&self, seat: u32) -> SeatState {
        SeatState::from_code(self.seat(seat).identity.state.load(Acquire))
    }

    /// Takes a vacant seat for this process.
    pub(crate) fn sit(&self, seat: u32, incarnation: u32, newcomer: bool) -> Result<LiveSeat> {
        let refuse = |why: String| ShmError::Seat {
            seat,
            incarnation,
            why,
        };
        if seat >= self.geometry().seats() {
            return Err(refuse(format!(
                "there are {} seats",
                self.geometry().seats()
            )));
        }
        let identity = &self.seat(seat).identity;
        let recovered = identity.recovered.load(Acquire);
        if incarnation <= recovered {
            return Err(refuse(format!(
                "incarnation {recovered} has already been recovered"
            )));
        }
        let (vacant, occupied) = (SeatState::Vacant.code(), SeatState::Occupied.code());
        // Acquire: what recovery wrote comes before; partner: the Release store in `vacate`.
        if let Err(code) = identity
            .state
            .compare_exchange(vacant, occupied, AcqRel, Acquire)
        {
            let state = SeatState::from_code(code);
            return Err(refuse(format!("it is {state:?}")));
        }
        identity.incarnation.store(incarnation, Relaxed);
        identity.pid.store(std::process::id(), Relaxed);
        identity
            .start_time
            .store(start_time().unwrap_or(0), Relaxed);
        identity.needs_state.store(newcomer.into(), Release);
        self.set_current(seat, None);
        let live = LiveSeat {
            segment: self.clone(),
            index: seat,
        };
        live.live().since.store(now_ns(), Relaxed);
        live.live()
            .activity
            .store(Activity::Starting as u32, Relaxed);
        live.beat();
        Ok(live)
    }

    /// Names the unit that the seat has in hand, which a death counts against.
    pub(crate) fn set_current(&self, seat: u32, unit: Option<(u64, bool)>) {
        // Release: nothing of importance precedes it; recovery reads it after waitid.
        self.seat(seat)
            .record
            .current_item
            .store(item_word(unit), Release);
    }

    /// The worker leaves in good order.
    pub(crate) fn mark_left(&self, seat: u32) {
        // Release: partner: `seat_state`.
        self.seat(seat)
            .identity
            .state
            .store(SeatState::Left.code(), Release);
    }

    /// Ends a recovery: the seat may be taken by a later incarnation.
    pub(crate) fn vacate(&self, seat: u32) {
        let identity = &self.seat(seat).identity;
        self.set_current(seat, None);
        identity.suspect.store(0, Relaxed);
        identity.needs_state.store(0, Relaxed);
        identity
            .recovered
            .store(identity.incarnation.load(Relaxed), Release);
        // Release: partner: the CAS in `sit`.
        identity.state.store(SeatState::Vacant.code(), Release);
    }

    /// Members that have weights, as a mask of ranks. 0 with members left: all who had them have died, the
    /// others end with [`ShmError::Orphaned`], and the run goes back to a checkpoint.
    pub fn members_with_state(&self) -> u32 {
        let holds = |rank: &u32| {
            let seat = self.seat(self.geometry().drafter_seat(*rank));
            // Acquire: partner: the Release at the end of `receive_state`.
            seat.identity.needs_state.load(Acquire) == 0
        };
        let members = ranks(self.step_word().members).filter(holds);
        members.fold(0, |mask, rank| mask | 1 << rank)
    }

    /// The launcher saw the end of the worker's pipe: the others may abort their communicator, nothing else.
    pub fn mark_suspect(&self, seat: u32) {
        let identity = &self.seat(seat).identity;
        identity
            .suspect
            .store(identity.incarnation.load(Relaxed).max(1), Release);
        self.wake_all();
    }

    /// Whether a debugger holds any worker now.
    pub(crate) fn is_debugged(&self) -> bool {
        let traced = |seat: u32| {
            let pid = self.seat(seat).identity.pid.load(Relaxed);
            // A number that was reused meanwhile only lengthens a wait.
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let tracer = status
                .lines()
                .find_map(|line| line.strip_prefix("TracerPid:"));
            tracer.is_some_and(|tracer| tracer.trim() != "0")
        };
        (0..self.geometry().seats())
            .any(|seat| self.seat_state(seat) == SeatState::Occupied && traced(seat))
    }

    /// Ranks of drafters whose pipe has reached its end, as a mask.
    pub fn suspects(&self) -> u32 {
        (0..self.geometry().drafters)
            .filter(|&rank| {
                let seat = self.geometry().drafter_seat(rank);
                self.seat(seat).identity.suspect.load(Acquire) != 0
            })
            .fold(0, |mask, rank| mask | 1 << rank)
    }
}

/// Nanoseconds of the monotonic clock, the same for all processes of the machine.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// This process's start, in clock ticks since boot.
fn start_time() -> Option<u64> {
    // loom sits down thousands of times.
    if cfg!(feature = "loom") {
        return None;
    }
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name (field 2) may hold spaces and parentheses; field 22 is the 20th after its last ')'.
    text.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(19)?
        .parse()
        .ok()
}
