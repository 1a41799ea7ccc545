//! Copies between GPU matrices and ring slots: by DMA where the host memory is registered, through a pinned
//! buffer where registering was refused.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;

use super::super::{EngineError, HalfMut, HalfView, Queue};
use super::Cuda;
use super::device::Device;
use super::memory::{Pinned, raw, raw_mut};

/// Bytes of the pinned buffer of one direction.
const BOUNCE: usize = 16 << 20;
/// Piece by piece registration, where one call for all was refused.
const REGISTER_PIECE: usize = 1 << 30;
const PAGE: usize = 4096;

/// The host memory that copies may use directly.
#[derive(Debug)]
pub(super) struct HostMemory {
    device: Arc<Device>,
    /// Registered `(address, bytes)`.
    ranges: Mutex<Vec<(usize, usize)>>,
    bounce_in: OnceLock<Pinned>,
    bounce_out: OnceLock<Pinned>,
}

impl HostMemory {
    pub(super) fn new(device: &Arc<Device>) -> Self {
        Self {
            device: Arc::clone(device),
            ranges: Mutex::new(Vec::new()),
            bounce_in: OnceLock::new(),
            bounce_out: OnceLock::new(),
        }
    }

    /// Registers `base..base + len`: whole; if refused, piece by piece; what remains goes through a pinned
    /// buffer, with one warning.
    ///
    /// # Safety
    /// The memory stays mapped while the engine lives.
    pub(super) unsafe fn register(&self, base: *mut u8, len: usize) -> Result<(), EngineError> {
        self.device.bind()?;
        // SAFETY: mapped, says the caller.
        unsafe { touch(base, len) };
        // SAFETY: mapped, says the caller.
        let Err(error) = (unsafe { self.register_range(base, len) }) else {
            return Ok(());
        };
        let mut refused = 0;
        for begin in (0..len).step_by(REGISTER_PIECE) {
            let piece = REGISTER_PIECE.min(len - begin);
            // SAFETY: inside the range.
            if unsafe { self.register_range(base.add(begin), piece) }.is_err() {
                refused += piece;
            }
        }
        if refused > 0 {
            tracing::warn!(
                "{error}; {} MiB of the ring go through a pinned buffer instead, which is slower",
                refused >> 20
            );
        }
        Ok(())
    }

    /// One call to the driver, read-write or, for a read-only mapping, read-only.
    unsafe fn register_range(&self, base: *mut u8, len: usize) -> Result<(), EngineError> {
        let call = |flags| {
            // SAFETY: mapped, says the caller of `register`.
            let result = unsafe { sys::cuMemHostRegister_v2(base.cast(), len, flags) };
            self.device.check("registering host memory", result)
        };
        let portable = sys::CU_MEMHOSTREGISTER_PORTABLE;
        call(portable).or_else(|_| call(portable | sys::CU_MEMHOSTREGISTER_READ_ONLY))?;
        self.ranges
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((base as usize, len));
        Ok(())
    }

    /// [`stretch`] of what is registered now.
    fn stretch(&self, at: usize, len: usize) -> (usize, bool) {
        stretch(
            &self.ranges.lock().unwrap_or_else(PoisonError::into_inner),
            at,
            len,
        )
    }

    fn bounce(&self, queue: Queue) -> Result<&Pinned, EngineError> {
        let cell = match queue {
            Queue::CopyOut => &self.bounce_out,
            Queue::CopyIn | Queue::Compute => &self.bounce_in,
        };
        if let Some(pinned) = cell.get() {
            return Ok(pinned);
        }
        let fresh = Pinned::new(&self.device, BOUNCE)?;
        Ok(cell.get_or_init(|| fresh))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let ranges = self
            .ranges
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if self.device.bind().is_ok() {
            for (base, _) in ranges.drain(..) {
                // SAFETY: registered by us; the memory is still mapped, as `register` demanded.
                unsafe { sys::cuMemHostUnregister(base as *mut c_void) };
            }
        }
    }
}

/// How many of the `len` bytes at `at` can be copied in one piece, and whether directly: a copy across the
/// border of a registered range fails.
fn stretch(ranges: &[(usize, usize)], at: usize, len: usize) -> (usize, bool) {
    let mut plain = len.min(BOUNCE);
    for &(base, size) in ranges {
        if (base..base + size).contains(&at) {
            return (len.min(base + size - at), true);
        }
        if base > at {
            plain = plain.min(base - at);
        }
    }
    (plain, false)
}

/// Reads a byte of each page, from many threads: registering pages that were never touched takes several
/// times as long.
///
/// # Safety
/// `base..base + len` is mapped.
unsafe fn touch(base: *const u8, len: usize) {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
    let share = len.div_ceil(threads).next_multiple_of(PAGE);
    let start = base as usize;
    std::thread::scope(|scope| {
        for begin in (0..len).step_by(share.max(PAGE)) {
            let end = len.min(begin + share);
            scope.spawn(move || {
                for at in (begin..end).step_by(PAGE) {
                    // SAFETY: mapped; a volatile read of one byte, whose value is not used.
                    unsafe { ((start + at) as *const u8).read_volatile() };
                }
            });
        }
    });
}

/// A copy within host memory that a queue runs when it gets there.
struct HostCopy {
    from: *const u8,
    to: *mut u8,
    len: usize,
}

/// Runs a [`HostCopy`]; calls no CUDA function, as the driver demands.
unsafe extern "C" fn run_host_copy(data: *mut c_void) {
    // SAFETY: made by `Box::into_raw` in `host_copy`, and run once.
    let copy = unsafe { Box::from_raw(data.cast::<HostCopy>()) };
    // SAFETY: both sides hold the bytes: one is a pinned buffer, the other the caller's memory.
    unsafe { std::ptr::copy_nonoverlapping(copy.from, copy.to, copy.len) };
}

impl Cuda {
    /// Enqueues a copy within host memory on `queue`.
    fn host_copy(&self, queue: Queue, copy: HostCopy) -> Result<(), EngineError> {
        let data = Box::into_raw(Box::new(copy));
        // SAFETY: the function takes `data` back.
        let result = unsafe {
            sys::cuLaunchHostFunc(self.device.stream(queue), Some(run_host_copy), data.cast())
        };
        self.device.check("a copy through a pinned buffer", result)
    }

    /// See [`super::super::Engine::copy_out`].
    pub(super) unsafe fn copy_out_impl(
        &self,
        src: HalfView<'_, Self>,
        dst: *mut u8,
    ) -> Result<(), EngineError> {
        let from = raw(&src);
        assert!(from.is_contiguous(), "copy_out of a strided matrix");
        self.device.bind()?;
        let stream = self.device.stream(Queue::CopyOut);
        let bytes = from.len() * 2;
        let mut done = 0;
        while done < bytes {
            let to = dst.wrapping_add(done);
            let (len, direct) = self.host.stretch(to as usize, bytes - done);
            let at = from.ptr + done as u64;
            let target = if direct {
                to
            } else {
                self.host.bounce(Queue::CopyOut)?.base()
            };
            // SAFETY: the view holds the bytes, and so does the target: the caller's memory or the buffer.
            self.device.check("copying out", unsafe {
                sys::cuMemcpyDtoHAsync_v2(target.cast(), at, len, stream)
            })?;
            if !direct {
                self.host_copy(
                    Queue::CopyOut,
                    HostCopy {
                        from: target,
                        to,
                        len,
                    },
                )?;
            }
            done += len;
        }
        src.storage.note_copy_out(self.device.record(stream)?);
        Ok(())
    }

    /// See [`super::super::Engine::copy_in`].
    pub(super) unsafe fn copy_in_impl(
        &self,
        src: *const u8,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        let to = raw_mut(&dst);
        assert!(to.is_contiguous(), "copy_in to a strided matrix");
        self.device.bind()?;
        let stream = self.device.stream(Queue::CopyIn);
        if !dst.storage.has_copy_in() {
            // Fresh memory belongs to the compute queue, which may still use what it was before.
            let ready = self.device.record(self.device.compute)?;
            self.device.wait(stream, &ready)?;
        }
        let bytes = to.len() * 2;
        let mut done = 0;
        while done < bytes {
            let from = src.wrapping_add(done);
            let (len, direct) = self.host.stretch(from as usize, bytes - done);
            let source = if direct {
                from
            } else {
                let bounce = self.host.bounce(Queue::CopyIn)?.base();
                self.host_copy(
                    Queue::CopyIn,
                    HostCopy {
                        from,
                        to: bounce,
                        len,
                    },
                )?;
                bounce.cast_const()
            };
            // SAFETY: the view holds the bytes, and so does the source.
            self.device.check("copying in", unsafe {
                sys::cuMemcpyHtoDAsync_v2(to.ptr + done as u64, source.cast(), len, stream)
            })?;
            done += len;
        }
        dst.storage.note_copy_in(self.device.record(stream)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_cut_at_the_borders_of_registered_ranges() {
        let ranges = [(1000, 500), (1500, 500), (5000, 100)];
        assert_eq!(stretch(&ranges, 1100, 200), (200, true));
        assert_eq!(stretch(&ranges, 1400, 200), (100, true));
        assert_eq!(stretch(&ranges, 1500, 600), (500, true));
        assert_eq!(stretch(&ranges, 4000, 5000), (1000, false));
        assert_eq!(stretch(&ranges, 5100, 50), (50, false));
        assert_eq!(stretch(&ranges, 9000, 2 * BOUNCE), (BOUNCE, false));
    }
}
