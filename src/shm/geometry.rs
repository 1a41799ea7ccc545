//! Counts and sizes of a segment, and where everything lies in it.

use super::error::{Result, ShmError};
use super::layout;
use super::words::{MAX_ANCHORS, MAX_DRAFTERS, MAX_STEP, MAX_TARGETS};

/// Elements of the hidden states in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// bfloat16, on GPUs.
    Bf16,
    /// float32, on CPUs.
    F32,
}

impl Dtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::Bf16 => 2,
            Dtype::F32 => 4,
        }
    }

    pub(crate) fn code(self) -> u32 {
        self.size() as u32
    }

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        match code {
            2 => Some(Dtype::Bf16),
            4 => Some(Dtype::F32),
            _ => None,
        }
    }
}

/// Everything that the size of a segment depends on.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Geometry {
    /// Targets; their seats are 0..targets.
    pub targets: u32,
    /// Drafters; rank r has seat targets + r.
    pub drafters: u32,
    /// Slots of the ring.
    pub slots: u32,
    /// Units of all epochs.
    pub units: u64,
    /// Held-out units, kept in slots of their own.
    pub eval_units: u32,
    /// Most tokens of a unit.
    pub slot_tokens: u32,
    /// Most documents of a unit.
    pub slot_documents: u32,
    /// Width of the captured hidden states: K·H.
    pub captured_width: u32,
    /// Hidden size H.
    pub hidden: u32,
    /// Whether the final hidden state travels too (soft labels).
    pub final_hidden: bool,
    /// Elements of both.
    pub dtype: Dtype,
    /// Anchors that a step takes, over all drafters.
    pub batch_anchors: u32,
    /// Most units that one step can hold; see [`units_per_step`].
    pub units_per_step: u32,
    /// float32 elements of each drafter's all-reduce buffer; 0 where another collective is used.
    pub reduce_floats: u64,
    /// Bytes of a piece when a newcomer is sent its weights.
    pub broadcast_bytes: u64,
    /// Checksum every payload.
    pub check_payload: bool,
    /// Number of the first step: 1, or one past the checkpoint that the run goes on from.
    pub first_step: u64,
}

/// Most units that one step of `batch_anchors` can hold, from the anchors of the units of one epoch: as many
/// of the smallest as it takes to reach the batch, each at most once per epoch.
pub fn units_per_step(
    anchors: impl IntoIterator<Item = u32>,
    epochs: u32,
    batch_anchors: u32,
) -> u32 {
    let mut sorted: Vec<u32> = anchors.into_iter().collect();
    sorted.sort_unstable();
    let mut sum = 0u64;
    let mut count = 0u32;
    for anchors in sorted {
        for _ in 0..epochs.max(1) {
            if sum >= u64::from(batch_anchors) {
                return count;
            }
            sum += u64::from(anchors);
            count += 1;
        }
    }
    count.max(1)
}

impl Geometry {
    /// Slots that the ring needs at least: units per step + drafters + 2 × targets, since slots are held
    /// until the commit.
    pub fn slots_needed(units_per_step: u32, drafters: u32, targets: u32) -> u64 {
        u64::from(units_per_step) + u64::from(drafters) + 2 * u64::from(targets)
    }

    /// Seats: targets first, then drafters.
    pub fn seats(&self) -> u32 {
        self.targets + self.drafters
    }

    /// Seat of the drafter `rank`.
    pub fn drafter_seat(&self, rank: u32) -> u32 {
        self.targets + rank
    }

    /// Bytes of the whole segment.
    ///
    /// # Errors
    /// As [`Geometry::check`].
    pub fn total_bytes(&self) -> Result<u64> {
        self.check()?;
        Ok(Layout::of(self).total as u64)
    }

    /// Bytes that one slot's payload takes.
    pub fn slot_bytes(&self) -> u64 {
        PayloadLayout::of(self).stride as u64
    }

    /// Refuses counts that the words cannot hold and rings that cannot carry a step.
    ///
    /// # Errors
    /// [`ShmError::Geometry`] with the field, [`ShmError::TooFewSlots`] with the rule's numbers.
    pub fn check(&self) -> Result<()> {
        let range = |what, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            let allowed = format!("between {low} and {high}");
            Err(ShmError::Geometry {
                what,
                value,
                allowed,
            })
        };
        range("targets", self.targets.into(), 1, MAX_TARGETS.into())?;
        range("drafters", self.drafters.into(), 1, MAX_DRAFTERS.into())?;
        range("units", self.units, 1, 1 << 40)?;
        range("slots", self.slots.into(), 1, 1 << 20)?;
        range("eval_units", self.eval_units.into(), 0, 1 << 20)?;
        range("slot_tokens", self.slot_tokens.into(), 1, 1 << 30)?;
        range(
            "slot_documents",
            self.slot_documents.into(),
            1,
            self.slot_tokens.into(),
        )?;
        range("captured_width", self.captured_width.into(), 1, 1 << 24)?;
        range("hidden", self.hidden.into(), 1, 1 << 20)?;
        range(
            "batch_anchors",
            self.batch_anchors.into(),
            1,
            MAX_ANCHORS / 2,
        )?;
        range("units_per_step", self.units_per_step.into(), 1, 1 << 20)?;
        range("reduce_floats", self.reduce_floats, 0, 1 << 36)?;
        range("broadcast_bytes", self.broadcast_bytes, 64, 1 << 36)?;
        range("first_step", self.first_step, 1, MAX_STEP)?;
        let needed = Self::slots_needed(self.units_per_step, self.drafters, self.targets);
        if u64::from(self.slots) < needed {
            return Err(ShmError::TooFewSlots {
                slots: self.slots,
                needed,
                units_per_step: self.units_per_step,
                drafters: self.drafters,
                targets: self.targets,
            });
        }
        Layout::checked(self)
            .map(|_| ())
            .ok_or_else(|| ShmError::Geometry {
                what: "total size",
                value: u64::MAX,
                allowed: "addressable".to_owned(),
            })
    }
}

/// Where the parts of one slot's payload lie, in bytes from its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PayloadLayout {
    pub final_hidden: usize,
    pub ids: usize,
    pub mask: usize,
    pub offsets: usize,
    pub rows: usize,
    pub stride: usize,
}

impl PayloadLayout {
    pub(crate) fn of(geometry: &Geometry) -> Self {
        Self::checked(geometry).unwrap_or(Self {
            final_hidden: 0,
            ids: 0,
            mask: 0,
            offsets: 0,
            rows: 0,
            stride: 0,
        })
    }

    fn checked(geometry: &Geometry) -> Option<Self> {
        let tokens = geometry.slot_tokens as usize;
        let documents = geometry.slot_documents as usize;
        let element = geometry.dtype.size();
        let mut end = Cursor(0);
        end.take(
            tokens
                .checked_mul(geometry.captured_width as usize)?
                .checked_mul(element)?,
            1,
        )?;
        let width = if geometry.final_hidden {
            geometry.hidden as usize
        } else {
            0
        };
        let final_hidden = end.take(tokens.checked_mul(width)?.checked_mul(element)?, GROUP)?;
        let ids = end.take(tokens * 4, GROUP)?;
        let mask = end.take(tokens, GROUP)?;
        let offsets = end.take((documents + 1) * 4, GROUP)?;
        let rows = end.take(documents * 4, GROUP)?;
        let stride = end.take(0, PAGE)?;
        Some(Self {
            final_hidden,
            ids,
            mask,
            offsets,
            rows,
            stride,
        })
    }
}

/// Groups of words that different processes write lie this far apart: two cache lines, since some
/// processors fetch them in pairs.
pub(crate) const GROUP: usize = 128;
/// Page size that payloads are aligned to.
pub(crate) const PAGE: usize = 4096;

/// Where every part of the segment lies, in bytes from its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub control: usize,
    pub seats: usize,
    pub unit_lists: usize,
    pub reduce_words: usize,
    pub slots: usize,
    pub ledger: usize,
    pub reduce: usize,
    pub broadcast: usize,
    pub payload: usize,
    pub payload_bytes: usize,
    pub total: usize,
}

impl Layout {
    /// The layout of a checked geometry.
    pub(crate) fn of(geometry: &Geometry) -> Self {
        Self::checked(geometry).expect("Geometry::check has refused sizes that overflow")
    }

    pub(crate) fn checked(geometry: &Geometry) -> Option<Self> {
        let slots = geometry.slots as usize + geometry.eval_units as usize;
        let drafters = geometry.drafters as usize;
        let words = usize::try_from(geometry.units)
            .ok()?
            .checked_add(geometry.eval_units as usize)?;
        let floats = usize::try_from(geometry.reduce_floats).ok()?;
        let piece = usize::try_from(geometry.broadcast_bytes).ok()?;
        let mut end = Cursor(0);
        end.take(size_of::<layout::Header>(), GROUP)?;
        let control = end.take(size_of::<layout::Control>(), GROUP)?;
        let seats = end.take(size_of::<layout::Seat>() * geometry.seats() as usize, GROUP)?;
        let unit_lists = end.take(drafters * geometry.slots as usize * 8, GROUP)?;
        let reduce_words = end.take(size_of::<layout::ReduceWords>() * drafters, GROUP)?;
        let slot_words = end.take(size_of::<layout::Slot>() * slots, GROUP)?;
        let ledger = end.take(words.checked_mul(8)?, GROUP)?;
        // One buffer per drafter, and one for the sum.
        let buffers = if floats == 0 { 0 } else { drafters + 1 };
        let reduce = end.take(floats.checked_mul(4)?.checked_mul(buffers)?, PAGE)?;
        let broadcast = end.take(piece, PAGE)?;
        let payload_bytes = PayloadLayout::checked(geometry)?
            .stride
            .checked_mul(slots)?;
        let payload = end.take(payload_bytes, PAGE)?;
        let total = end.take(0, PAGE)?;
        Some(Self {
            control,
            seats,
            unit_lists,
            reduce_words,
            slots: slot_words,
            ledger,
            reduce,
            broadcast,
            payload,
            payload_bytes,
            total,
        })
    }
}

/// Lays parts out one after the other.
struct Cursor(usize);

impl Cursor {
    fn take(&mut self, bytes: usize, align: usize) -> Option<usize> {
        let start = self.0.checked_next_multiple_of(align)?;
        self.0 = start.checked_add(bytes)?;
        Some(start)
    }
}
