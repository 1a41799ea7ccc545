//! Typed views of a slot's payload.
//!
//! In order: captured hidden states `[tokens, K·H]`, final hidden states `[tokens, H]` where soft labels ask
//! for them, token ids `[tokens]`, loss mask `[tokens]`, document offsets `[documents + 1]` (in tokens, from 0
//! to `tokens`), document rows `[documents]` (the data's row numbers, which key the anchors).

use std::marker::PhantomData;

use bytemuck::Pod;

use super::error::{Result, ShmError};
use super::segment::Segment;
use super::slot::{SlotHeader, checksum_bytes};

/// Where the used parts of one payload lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payload {
    base: *mut u8,
    tokens: usize,
    documents: usize,
    /// Elements of the two hidden-state arrays.
    captured: usize,
    last: usize,
    element: usize,
    layout: super::geometry::PayloadLayout,
}

impl Payload {
    pub(crate) fn new(segment: &Segment, slot: u32, tokens: u32, documents: u32) -> Self {
        let geometry = segment.geometry();
        // A header that passed its checksum is within these; the bound keeps every view inside the slot.
        let tokens = tokens.min(geometry.slot_tokens) as usize;
        let documents = documents.min(geometry.slot_documents) as usize;
        let last = if geometry.final_hidden {
            geometry.hidden as usize
        } else {
            0
        };
        Self {
            base: segment.payload_of(slot),
            tokens,
            documents,
            captured: tokens * geometry.captured_width as usize,
            last: tokens * last,
            element: geometry.dtype.size(),
            layout: *segment.payload_layout(),
        }
    }

    /// `len` values of T at `offset`.
    ///
    /// # Safety
    /// Nobody writes the payload while the slice lives.
    unsafe fn slice<'a, T: Pod>(&self, offset: usize, len: usize) -> &'a [T] {
        // SAFETY: `PayloadLayout` places at least `len` aligned values here (`new` bounds the counts); any
        // bytes are a T; the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(self.base.add(offset).cast(), len) }
    }

    /// `len` values of T at `offset`, to write.
    ///
    /// # Safety
    /// Nobody else reads or writes the payload while the slice lives.
    unsafe fn slice_mut<'a, T: Pod>(&self, offset: usize, len: usize) -> &'a mut [T] {
        // SAFETY: as for `slice`; the caller keeps everyone else away.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(offset).cast(), len) }
    }

    fn element<T>(&self) -> Result<()> {
        let (asked, held) = (size_of::<T>(), self.element);
        if asked == held {
            Ok(())
        } else {
            Err(ShmError::Element { asked, held })
        }
    }

    /// Checksum of all used parts.
    ///
    /// # Safety
    /// Nobody writes the payload meanwhile.
    pub(crate) unsafe fn checksum(&self) -> u64 {
        // SAFETY: the caller keeps writers away.
        unsafe {
            checksum_bytes(&[
                self.slice(0, self.captured * self.element),
                self.slice(self.layout.final_hidden, self.last * self.element),
                self.slice(self.layout.ids, self.tokens * 4),
                self.slice(self.layout.mask, self.tokens),
                self.slice(self.layout.offsets, (self.documents + 1) * 4),
                self.slice(self.layout.rows, self.documents * 4),
            ])
        }
    }
}

/// The payload of a slot that stays as it is while the view lives.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    payload: Payload,
    keeper: PhantomData<&'a Segment>,
}

impl<'a> View<'a> {
    /// # Safety
    /// The slot is held by this process, or kept for good, for as long as `'a`.
    pub(crate) unsafe fn new(payload: Payload) -> Self {
        Self {
            payload,
            keeper: PhantomData,
        }
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.payload.tokens
    }

    /// Documents.
    pub fn documents(&self) -> usize {
        self.payload.documents
    }

    /// Captured hidden states, `[tokens, K·H]`; T has the segment's element size (`f32`, or 16 bits of
    /// bfloat16).
    ///
    /// # Errors
    /// [`ShmError::Element`] when the size differs.
    pub fn captured<T: Pod>(&self) -> Result<&'a [T]> {
        self.payload.element::<T>()?;
        // SAFETY: `new`'s contract.
        Ok(unsafe { self.payload.slice(0, self.payload.captured) })
    }

    /// Final hidden states, `[tokens, H]`; empty without soft labels.
    ///
    /// # Errors
    /// [`ShmError::Element`] when the size differs.
    pub fn final_hidden<T: Pod>(&self) -> Result<&'a [T]> {
        self.payload.element::<T>()?;
        // SAFETY: `new`'s contract.
        Ok(unsafe {
            self.payload
                .slice(self.payload.layout.final_hidden, self.payload.last)
        })
    }

    /// Token ids, `[tokens]`.
    pub fn ids(&self) -> &'a [u32] {
        // SAFETY: `new`'s contract.
        unsafe {
            self.payload
                .slice(self.payload.layout.ids, self.payload.tokens)
        }
    }

    /// Loss mask, `[tokens]`, 0 or 1.
    pub fn mask(&self) -> &'a [u8] {
        // SAFETY: `new`'s contract.
        unsafe {
            self.payload
                .slice(self.payload.layout.mask, self.payload.tokens)
        }
    }

    /// Document boundaries in tokens, `[documents + 1]`.
    pub fn offsets(&self) -> &'a [u32] {
        // SAFETY: `new`'s contract.
        unsafe {
            self.payload
                .slice(self.payload.layout.offsets, self.payload.documents + 1)
        }
    }

    /// Row numbers of the documents, `[documents]`.
    pub fn rows(&self) -> &'a [u32] {
        // SAFETY: `new`'s contract.
        unsafe {
            self.payload
                .slice(self.payload.layout.rows, self.payload.documents)
        }
    }

    pub(crate) fn checksum(&self) -> u64 {
        // SAFETY: `new`'s contract.
        unsafe { self.payload.checksum() }
    }
}

/// # Safety
/// The slot keeps its payload for as long as `'a`.
pub(crate) unsafe fn view_of<'a>(segment: &'a Segment, slot: u32, header: &SlotHeader) -> View<'a> {
    let payload = Payload::new(segment, slot, header.tokens, header.documents);
    // SAFETY: the caller's.
    unsafe { View::new(payload) }
}

/// The view, once its bytes match the published checksum (when payloads are checked).
pub(crate) fn checked<'a>(
    segment: &Segment,
    slot: u32,
    header: &SlotHeader,
    view: View<'a>,
) -> Result<View<'a>> {
    if !segment.geometry().check_payload {
        return Ok(view);
    }
    let (found, expected) = (view.checksum(), header.payload_sum);
    if found == expected {
        return Ok(view);
    }
    let (what, unit, producer) = ("the payload", header.unit, header.producer);
    Err(ShmError::Corrupt {
        what,
        slot,
        unit,
        producer,
        found,
        expected,
    })
}

/// A slot that this target is filling: nobody else looks at it until it is published.
#[derive(Debug)]
pub struct Filling {
    pub(crate) segment: Segment,
    pub(crate) payload: Payload,
    pub(crate) slot: u32,
    pub(crate) generation: u64,
    pub(crate) unit: u64,
    pub(crate) eval: bool,
    pub(crate) tokens: u32,
    pub(crate) documents: u32,
}

// SAFETY: the raw pointer leads into the segment's mapping, which `segment` keeps in place, and the claim
// belongs to this value alone.
unsafe impl Send for Filling {}

impl Filling {
    /// Slot index.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Unit, or eval unit.
    pub fn unit(&self) -> u64 {
        self.unit
    }

    /// Whether it is a held-out unit.
    pub fn is_eval(&self) -> bool {
        self.eval
    }

    /// Captured hidden states, `[tokens, K·H]`, to write; T as in [`View::captured`].
    ///
    /// # Errors
    /// [`ShmError::Element`] when the size differs.
    pub fn captured<T: Pod>(&mut self) -> Result<&mut [T]> {
        self.payload.element::<T>()?;
        // SAFETY: the claim word keeps everyone else out of the slot.
        Ok(unsafe { self.payload.slice_mut(0, self.payload.captured) })
    }

    /// Final hidden states, `[tokens, H]`, to write; empty without soft labels.
    ///
    /// # Errors
    /// [`ShmError::Element`] when the size differs.
    pub fn final_hidden<T: Pod>(&mut self) -> Result<&mut [T]> {
        self.payload.element::<T>()?;
        // SAFETY: as for `captured`.
        Ok(unsafe {
            self.payload
                .slice_mut(self.payload.layout.final_hidden, self.payload.last)
        })
    }

    /// Token ids, `[tokens]`, to write.
    pub fn ids(&mut self) -> &mut [u32] {
        // SAFETY: as for `captured`.
        unsafe {
            self.payload
                .slice_mut(self.payload.layout.ids, self.payload.tokens)
        }
    }

    /// Loss mask, `[tokens]`, to write.
    pub fn mask(&mut self) -> &mut [u8] {
        // SAFETY: as for `captured`.
        unsafe {
            self.payload
                .slice_mut(self.payload.layout.mask, self.payload.tokens)
        }
    }

    /// Document boundaries in tokens, `[documents + 1]`, to write.
    pub fn offsets(&mut self) -> &mut [u32] {
        // SAFETY: as for `captured`.
        unsafe {
            self.payload
                .slice_mut(self.payload.layout.offsets, self.payload.documents + 1)
        }
    }

    /// Row numbers of the documents, `[documents]`, to write.
    pub fn rows(&mut self) -> &mut [u32] {
        // SAFETY: as for `captured`.
        unsafe {
            self.payload
                .slice_mut(self.payload.layout.rows, self.payload.documents)
        }
    }
}
