//! What lies in the segment: `#[repr(C)]`, fixed-width integers, groups 128 bytes apart.
//!
//! All of it is valid when zeroed, which is how a memfd starts. A group has one writer or is changed by
//! compare-and-swap only.

use super::atomics::{AtomicU32, AtomicU64, plain};
use super::seat::Activity;

/// "SLIPSTRM" in ASCII, most significant byte first.
pub(crate) const MAGIC: u64 = 0x534c_4950_5354_524d;
/// Raised with every change of the layout or of a word's meaning.
pub(crate) const ABI_VERSION: u32 = 1;

/// Written once, before any worker starts.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Header {
    pub magic: u64,
    pub abi_version: u32,
    pub header_bytes: u32,
    pub run_id: [u8; 16],
    pub total_bytes: u64,
    pub units: u64,
    pub reduce_floats: u64,
    pub broadcast_bytes: u64,
    pub first_step: u64,
    pub targets: u32,
    pub drafters: u32,
    pub slots: u32,
    pub eval_units: u32,
    pub slot_tokens: u32,
    pub slot_documents: u32,
    pub captured_width: u32,
    pub hidden: u32,
    pub final_hidden: u32,
    pub dtype: u32,
    pub batch_anchors: u32,
    pub units_per_step: u32,
    pub check_payload: u32,
    pub reserved: u32,
}

/// One slot: its claim word and its header.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// [`super::words::SlotWord`].
    pub word: AtomicU64,
    pub unit: AtomicU64,
    /// Step that the holder takes part in with this slot; 0 = none.
    pub tag: AtomicU64,
    /// Stamp of the step and generation whose budget r5 counted this slot into; 0 = none.
    pub counted: AtomicU64,
    /// Order of publication.
    pub sequence: AtomicU64,
    pub anchors: AtomicU64,
    /// `[documents:32 | tokens:32]`
    pub size: plain::AtomicU64,
    /// `[captured width:32 | final hidden width:32]`
    pub shape: plain::AtomicU64,
    /// `[flags:32 | dtype:32]`
    pub kind: plain::AtomicU64,
    /// `[incarnation:32 | seat:32]` of the target that wrote it.
    pub producer: plain::AtomicU64,
    pub payload_sum: plain::AtomicU64,
    /// Over everything above but the word, the tag and `counted`.
    pub checksum: plain::AtomicU64,
}

/// One worker's seat. The worker is its only writer, but for `suspect`, `death_note` and the reset of
/// `state` after a recovery, which are the launcher's.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Seat {
    pub identity: Identity,
    pub record: Record,
    pub live: Live,
}

/// Who sits there.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Identity {
    /// [`super::seat::SeatState`]
    pub state: AtomicU32,
    pub incarnation: plain::AtomicU32,
    pub pid: plain::AtomicU32,
    /// Incarnation whose pipe has reached its end; 0 = none.
    pub suspect: plain::AtomicU32,
    /// Start of the process, in clock ticks since boot (field 22 of /proc/PID/stat).
    pub start_time: plain::AtomicU64,
    /// 1 while a newcomer has no weights yet.
    pub needs_state: AtomicU32,
    /// Highest incarnation whose recovery has ended.
    pub recovered: plain::AtomicU32,
}

/// What the others must know of a drafter, and what recovery must know of any worker.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Record {
    /// [`super::words::stamp`] that the fields below belong to.
    pub stamp: AtomicU64,
    pub items: AtomicU64,
    pub anchors: AtomicU64,
    /// [`super::step::Vote`] as bits.
    pub votes: AtomicU64,
    /// Hash of parameter values; 0 = none given.
    pub hash: plain::AtomicU64,
    /// Every c2 of the steps up to this one is done.
    pub c2_done: AtomicU64,
    /// 0, or `[eval:1 | unit + 1]`.
    pub current_item: AtomicU64,
    /// `[incarnation:32 | deaths before:8 | noted:1]`, written by recovery before it counts a death.
    pub death_note: plain::AtomicU64,
}

/// What people watch.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Live {
    /// Nanoseconds of the monotonic clock.
    pub heartbeat: plain::AtomicU64,
    /// [`Activity`]
    pub activity: plain::AtomicU32,
    pub reserved: plain::AtomicU32,
    pub since: plain::AtomicU64,
    /// What the activity is about: a unit, a slot or a mask of ranks.
    pub detail: plain::AtomicU64,
    pub step: plain::AtomicU64,
    pub tokens: plain::AtomicU64,
    pub units: plain::AtomicU64,
    /// Nanoseconds spent so far in each activity.
    pub time_ns: [plain::AtomicU64; Activity::COUNT],
}

/// Everything that exists once.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Control {
    pub wake: Wake,
    pub cursor: Cursor,
    pub sequence: Sequence,
    pub step: Step,
    pub budget: Budget,
    pub finish: Finish,
    pub comm: Comm,
    pub broadcast: Broadcast,
}

/// Futex words: a waiter reads one, looks at what it waits for, and sleeps while the word is unchanged.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Wake {
    /// Anything that somebody who takes or leases units looks at.
    pub items: plain::AtomicU32,
    /// A slot became free.
    pub space: plain::AtomicU32,
    /// The step word moved.
    pub step: plain::AtomicU32,
    /// A member moved on inside a collective.
    pub reduce: plain::AtomicU32,
}

/// Where targets start to look for work. Advisory: a full scan follows before "nothing" is believed.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    pub training: AtomicU64,
}

/// Drawn before every p3.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    pub next: AtomicU64,
}

/// The step word, and the last step whose checkpoint is complete.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub word: AtomicU64,
    pub saved: AtomicU64,
}

/// The budget word.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Budget {
    pub word: AtomicU64,
}

/// End of the run. The first three carry the count of roll-backs, which clears them.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Finish {
    /// `[roll-backs:16 | targets:48]`
    pub done: AtomicU64,
    /// `[roll-backs:32 | sentinels:32]`
    pub published: AtomicU64,
    /// `[roll-backs:32 | ranks:32]`
    pub taken: AtomicU64,
    /// Targets that will not come back.
    pub given_up: AtomicU64,
    /// `[why:8 | after step:56]`; 0 = no stop asked.
    pub stop: AtomicU64,
}

/// What a communicator of this generation is made from.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Comm {
    pub generation: AtomicU64,
    pub unique_id: [plain::AtomicU64; 16],
}

/// Pieces on their way to newcomers.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Broadcast {
    /// `[generation:14 | piece:50]` of the piece in the buffer.
    pub piece: AtomicU64,
    /// Bytes of that piece.
    pub bytes: plain::AtomicU64,
    /// Bytes of all pieces together.
    pub total: plain::AtomicU64,
}

/// How far one drafter is inside collectives.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct ReduceWords {
    /// [`super::words::stamp`] | number of barriers passed.
    pub barrier: AtomicU64,
    /// `[generation:14 | piece:50]` of the last piece copied out.
    pub received: AtomicU64,
}

#[cfg(not(feature = "loom"))]
const _: () = {
    assert!(size_of::<Header>() == 128 && align_of::<Header>() == 128);
    assert!(size_of::<Slot>() == 128 && align_of::<Slot>() == 128);
    assert!(size_of::<Identity>() == 128);
    assert!(size_of::<Record>() == 128);
    assert!(size_of::<Live>() == 256);
    assert!(size_of::<Seat>() == 512 && align_of::<Seat>() == 128);
    assert!(size_of::<Control>() == 9 * 128);
    assert!(size_of::<ReduceWords>() == 128);
};
