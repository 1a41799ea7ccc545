//! Errors of the shared memory.

/// Result of a shared-memory operation.
pub type Result<T> = std::result::Result<T, ShmError>;

/// What can go wrong with the segment or with the protocol on it.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// A count or size is outside what the layout's words can hold.
    #[error("shared memory: {what} is {value}, but must be {allowed}")]
    Geometry {
        /// The field, by its name in [`super::Geometry`].
        what: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed, in words.
        allowed: String,
    },
    /// The ring has fewer slots than a step can hold at once.
    #[error(
        "shared memory: {slots} ring slots cannot carry a step: at least {needed} are needed \
         (units per step {units_per_step} + drafters {drafters} + 2 x targets {targets}); \
         raise --ring-slots or lower --batch-anchors"
    )]
    TooFewSlots {
        /// Slots asked for.
        slots: u32,
        /// Slots that the rule asks for.
        needed: u64,
        /// Most units that one step can hold.
        units_per_step: u32,
        /// Drafters, each with one prefetched unit.
        drafters: u32,
        /// Targets, each with two slots in the making.
        targets: u32,
    },
    /// The machine or the control group has too little memory.
    #[error(
        "shared memory: {needed} bytes are needed but only {available} are available ({limit}); \
         lower --ring-slots, --slot-tokens or --eval-tokens"
    )]
    NotEnoughMemory {
        /// Bytes of the segment.
        needed: u64,
        /// Bytes that may still be used.
        available: u64,
        /// Where the figure comes from.
        limit: String,
    },
    /// A system call on the segment failed.
    #[error("shared memory: {call} failed on {what}: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// What it was called on.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not a segment of this program and version.
    #[error("shared memory: {what} is not a segment this program can use: {why}")]
    Foreign {
        /// The file.
        what: String,
        /// What differs, with both values.
        why: String,
    },
    /// The seat cannot be taken.
    #[error(
        "shared memory: seat {seat} cannot be taken by incarnation {incarnation}: {why}; \
         a seat is reused only after its recovery ended"
    )]
    Seat {
        /// Seat index.
        seat: u32,
        /// Incarnation that asked.
        incarnation: u32,
        /// Why not.
        why: String,
    },
    /// A worker called the protocol's lines in the wrong order.
    #[error("shared memory: seat {seat}: {called} called while {state}")]
    OutOfOrder {
        /// Seat index.
        seat: u32,
        /// The call.
        called: &'static str,
        /// What the seat was doing.
        state: String,
    },
    /// A unit or a batch does not fit where it should go.
    #[error("shared memory: unit {unit}: {what} is {value}, but the slot holds at most {most}")]
    TooLarge {
        /// Unit number.
        unit: u64,
        /// The quantity.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What fits.
        most: u64,
    },
    /// A word changed although only this process may change it.
    #[error(
        "shared memory: {what} of seat {seat} changed under it (word {word:#018x}); \
         was a living process recovered, or does another process use seat {seat}?"
    )]
    Stolen {
        /// Seat index.
        seat: u32,
        /// The word, by name and index.
        what: String,
        /// Its value now.
        word: u64,
    },
    /// A header or a payload does not match its checksum.
    #[error(
        "shared memory: {what} of slot {slot} (unit {unit}, written by seat {producer}) does not match its \
         checksum: {found:#018x} where {expected:#018x} was published"
    )]
    Corrupt {
        /// Header or payload.
        what: &'static str,
        /// Slot index.
        slot: u32,
        /// Unit number.
        unit: u64,
        /// Producing seat.
        producer: u32,
        /// Checksum of what is there.
        found: u64,
        /// Checksum published.
        expected: u64,
    },
    /// The element type of a view is not the segment's.
    #[error(
        "shared memory: a view with elements of {asked} bytes was asked for; the segment holds {held}"
    )]
    Element {
        /// Bytes of the type asked for.
        asked: usize,
        /// Element size of the segment.
        held: usize,
    },
    /// A held-out unit is not there.
    #[error(
        "shared memory: held-out unit {unit} of {units} is not written; wait_eval names those that are"
    )]
    NotWritten {
        /// Eval unit.
        unit: u32,
        /// How many there are.
        units: u32,
    },
    /// The launcher no longer counts this drafter as a member.
    #[error(
        "shared memory: drafter {rank} is not a member of generation {generation}; \
         it was taken for dead and must end"
    )]
    Evicted {
        /// Rank.
        rank: u32,
        /// Generation that left it out.
        generation: u32,
    },
    /// A replacement has nobody to get weights from.
    #[error(
        "shared memory: drafter {rank} cannot be sent weights in generation {generation}: every member that \
         had them has died; it must end, and the run goes back to its last checkpoint"
    )]
    Orphaned {
        /// Rank.
        rank: u32,
        /// Generation without weights.
        generation: u32,
    },
    /// A wait was cut short through the handle's interrupt.
    #[error("shared memory: seat {seat} was interrupted while {activity}")]
    Interrupted {
        /// Seat index.
        seat: u32,
        /// What it waited for.
        activity: String,
    },
    /// A deadline for reducing has passed.
    #[error(
        "shared memory: seat {seat} waited {waited_s:.1} s for {what}; \
         waiting for ranks {ranks:?}"
    )]
    Deadline {
        /// Seat index.
        seat: u32,
        /// What it waited for.
        what: &'static str,
        /// Seconds waited.
        waited_s: f64,
        /// Ranks that did not come.
        ranks: Vec<u32>,
    },
    /// More changes of the group than the step word can number.
    #[error(
        "shared memory: the group of drafters changed {0} times, the most that the step word can number; \
         end the run and resume it"
    )]
    GenerationsExhausted(u32),
    /// A saved ledger does not fit this segment.
    #[error("shared memory: the saved ledger holds {saved} units but this run has {units}")]
    LedgerSize {
        /// Words saved.
        saved: u64,
        /// Units of this segment.
        units: u64,
    },
}
