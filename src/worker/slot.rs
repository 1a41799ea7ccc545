//! Between a slot's bytes and the engine's tensors, in both directions.

use crate::engine::{Engine, EngineError, Half, Queue};
use crate::shm::{Filling, Result, Segment, View};

/// Makes all payloads fit for asynchronous copies, as one range: copies across two registrations fail.
pub(super) fn register<E: Engine>(
    engine: &E,
    segment: &Segment,
) -> std::result::Result<(), EngineError> {
    if E::HALF_BYTES == 2 {
        // Registering untouched pages costs several times as much.
        segment.prefault();
    }
    let (base, len) = segment.payload_range();
    // SAFETY: the mapping lives as long as the process: the seat's handle holds the segment.
    unsafe { engine.register_host(base, len) }
}

/// Hidden states of a unit on the engine.
pub(super) struct States<E: Engine> {
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
pub(super) fn captured_mut<E: Engine>(slot: &mut Filling) -> Result<*mut u8> {
    Ok(match E::HALF_BYTES {
        4 => slot.captured::<f32>()?.as_mut_ptr().cast(),
        _ => slot.captured::<u16>()?.as_mut_ptr().cast(),
    })
}

/// Where the final states of a slot are to be written.
pub(super) fn final_hidden_mut<E: Engine>(slot: &mut Filling) -> Result<*mut u8> {
    Ok(match E::HALF_BYTES {
        4 => slot.final_hidden::<f32>()?.as_mut_ptr().cast(),
        _ => slot.final_hidden::<u16>()?.as_mut_ptr().cast(),
    })
}

/// Copies a slot's hidden states to the engine; the compute queue waits for the copy, the host does not.
///
/// # Safety
/// The slot stays as it is until the compute queue has passed this point.
pub(super) unsafe fn copy_in<E: Engine>(
    engine: &E,
    view: &View<'_>,
    width: usize,
    teacher: Option<usize>,
) -> std::result::Result<States<E>, super::WorkerError> {
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
