//! Between a slot's bytes and the engine's tensors, in both directions.

use std::time::Duration;

use super::WorkerError;
use crate::data::Document;
use crate::engine::{Engine, EngineError, Half, Queue};
use crate::shm::{Filling, Result, Segment, View};

/// Longest copy of one slot.
const COPY_DEADLINE: Duration = Duration::from_secs(60);

/// Makes all payloads fit for asynchronous copies, as one range: copies across two registrations fail. The engine
/// must not outlive the segment's mapping.
///
/// # Errors
/// The engine's.
pub fn register<E: Engine>(engine: &E, segment: &Segment) -> std::result::Result<(), EngineError> {
    if E::HALF_BYTES == 2 {
        // Registering untouched pages costs several times as much.
        segment.prefault();
    }
    let (base, len) = segment.payload_range();
    // SAFETY: the mapping lives as long as the process: the seat's handle holds the segment.
    unsafe { engine.register_host(base, len) }
}

/// Hidden states on the engine: of a unit, or of all units of a forward.
pub struct States<E: Engine> {
    /// `[tokens, K * H]` captured layers.
    pub captured: Half<E>,
    /// `[tokens, H]` final hidden states, with soft labels.
    pub teacher: Option<Half<E>>,
}

/// Where the captured states of a published slot lie.
fn captured<E: Engine>(view: &View<'_>) -> Result<*const u8> {
    Ok(match E::HALF_BYTES {
        4 => view.captured::<f32>()?.as_ptr().cast(),
        _ => view.captured::<u16>()?.as_ptr().cast(),
    })
}

/// Where the final states of a published slot lie.
fn final_hidden<E: Engine>(view: &View<'_>) -> Result<*const u8> {
    Ok(match E::HALF_BYTES {
        4 => view.final_hidden::<f32>()?.as_ptr().cast(),
        _ => view.final_hidden::<u16>()?.as_ptr().cast(),
    })
}

/// Where the captured states of a slot are to be written.
fn captured_mut<E: Engine>(slot: &mut Filling) -> Result<*mut u8> {
    Ok(match E::HALF_BYTES {
        4 => slot.captured::<f32>()?.as_mut_ptr().cast(),
        _ => slot.captured::<u16>()?.as_mut_ptr().cast(),
    })
}

/// Where the final states of a slot are to be written.
fn final_hidden_mut<E: Engine>(slot: &mut Filling) -> Result<*mut u8> {
    Ok(match E::HALF_BYTES {
        4 => slot.final_hidden::<f32>()?.as_mut_ptr().cast(),
        _ => slot.final_hidden::<u16>()?.as_mut_ptr().cast(),
    })
}

/// Writes rows `begin..end` of `states` and their documents into a slot, after whatever the copy-out queue was made
/// to wait for; returns when the copies are complete, so that the slot may be published.
///
/// # Errors
/// A slot of another element type, or the engine's.
pub fn fill<E: Engine>(
    engine: &E,
    states: &States<E>,
    (begin, end): (usize, usize),
    documents: &[Document<'_>],
    slot: &mut Filling,
) -> std::result::Result<(), WorkerError> {
    let hidden = states.captured.rows_view(begin, end);
    // SAFETY: the slot holds that many tokens, is ours until it is published, and the event is awaited below.
    unsafe { engine.copy_out(hidden, captured_mut::<E>(slot)?)? };
    if let Some(last) = &states.teacher {
        let last = last.rows_view(begin, end);
        // SAFETY: as above.
        unsafe { engine.copy_out(last, final_hidden_mut::<E>(slot)?)? };
    }
    let copied = engine.record(Queue::CopyOut)?;
    let mut at = 0;
    slot.offsets()[0] = 0;
    for (number, document) in documents.iter().enumerate() {
        let next = at + document.ids.len();
        slot.ids()[at..next].copy_from_slice(document.ids);
        slot.mask()[at..next].copy_from_slice(document.mask);
        slot.offsets()[number + 1] = next as u32;
        slot.rows()[number] = document.row as u32;
        at = next;
    }
    engine.finish(&copied, COPY_DEADLINE)?;
    Ok(())
}

/// Copies a slot's hidden states to the engine; the compute queue waits for the copy, the host does not.
///
/// # Errors
/// A slot of another element type, or the engine's.
///
/// # Safety
/// The slot stays as it is until the compute queue has passed this point.
pub unsafe fn copy_in<E: Engine>(
    engine: &E,
    view: &View<'_>,
    width: usize,
    teacher: Option<usize>,
) -> std::result::Result<States<E>, WorkerError> {
    let tokens = view.tokens();
    let put = |cols: usize, from: *const u8| -> std::result::Result<Half<E>, EngineError> {
        let mut to = engine.half(tokens, cols)?;
        // What used this memory before was enqueued on the compute queue.
        let free = engine.record(Queue::Compute)?;
        engine.wait(Queue::CopyIn, &free)?;
        // SAFETY: the view holds `tokens * cols` elements of the compute type, kept by the caller.
        unsafe { engine.copy_in(from, to.view_mut())? };
        Ok(to)
    };
    let captured = put(width, captured::<E>(view)?)?;
    let teacher = match teacher {
        Some(hidden) => Some(put(hidden, final_hidden::<E>(view)?)?),
        None => None,
    };
    let done = engine.record(Queue::CopyIn)?;
    engine.wait(Queue::Compute, &done)?;
    Ok(States { captured, teacher })
}
