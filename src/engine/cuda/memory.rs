//! Device memory: buffers from the driver's stream-ordered pool, and uploads and downloads through pinned
//! staging memory, so that an upload never waits for the GPU unless the staging memory is full.

use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys;

use super::super::{EngineError, Storage, View, ViewMut};
use super::device::{Device, Event};

/// An element type that device memory can hold.
pub trait Element: Copy + bytemuck::Pod + Send + Sync + 'static {}

impl Element for half::bf16 {}
impl Element for f32 {}
impl Element for u32 {}

/// Device memory for `len` elements. Dropping it frees it in stream order, after everything enqueued on the
/// compute queue and after the copies that use it.
#[derive(Debug)]
pub struct Buffer<T> {
    device: Arc<Device>,
    ptr: sys::CUdeviceptr,
    len: usize,
    /// The last copies on the copy queues that use this memory.
    copies: Mutex<Copies>,
    element: PhantomData<T>,
}

#[derive(Debug, Default)]
struct Copies {
    into: Option<Event>,
    out: Option<Event>,
}

impl<T: Element> Storage for Buffer<T> {
    fn len(&self) -> usize {
        self.len
    }
}

impl<T: Element> Buffer<T> {
    /// Uninitialised memory, usable by what is enqueued on the compute queue from now on.
    pub(super) fn new(
        device: &Arc<Device>,
        len: usize,
        what: &'static str,
    ) -> Result<Self, EngineError> {
        device.bind()?;
        let bytes = (len * size_of::<T>()).max(1);
        let mut ptr = 0;
        let mut allocate = || {
            // SAFETY: valid out-pointer; the stream is of the current context.
            unsafe { sys::cuMemAllocAsync(&mut ptr, bytes, device.compute) }
        };
        let mut result = allocate();
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            // What was freed may still be in use by what is enqueued; once that is done it can be had.
            for stream in [device.compute, device.reclaim] {
                device
                    .record(stream)?
                    .finish("waiting for freed memory", DOWNLOAD_DEADLINE)?;
            }
            result = allocate();
        }
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(EngineError::OutOfMemory {
                device: device.name.clone(),
                bytes,
                what,
            });
        }
        device.check(what, result)?;
        Ok(Self {
            device: Arc::clone(device),
            ptr,
            len,
            copies: Mutex::new(Copies::default()),
            element: PhantomData,
        })
    }

    /// Address of the first element.
    pub(super) fn address(&self) -> u64 {
        self.ptr
    }

    /// Notes a copy into this memory; `event` is right behind it on the copy-in queue.
    pub(super) fn note_copy_in(&self, event: Event) {
        self.copies().into = Some(event);
    }

    /// Notes a copy out of this memory; `event` is right behind it on the copy-out queue.
    pub(super) fn note_copy_out(&self, event: Event) {
        self.copies().out = Some(event);
    }

    /// Whether a copy into this memory was enqueued before.
    pub(super) fn has_copy_in(&self) -> bool {
        self.copies().into.is_some()
    }

    fn copies(&self) -> std::sync::MutexGuard<'_, Copies> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let copies = std::mem::take(
            self.copies
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner),
        );
        let device = &self.device;
        let free = || -> Result<(), EngineError> {
            device.bind()?;
            let stream = if copies.into.is_none() && copies.out.is_none() {
                device.compute
            } else {
                let computed = device.record(device.compute)?;
                device.wait(device.reclaim, &computed)?;
                for event in [&copies.into, &copies.out].into_iter().flatten() {
                    device.wait(device.reclaim, event)?;
                }
                device.reclaim
            };
            // SAFETY: the memory came from the pool and every use of it is ordered before this point.
            device.check("cuMemFreeAsync", unsafe {
                sys::cuMemFreeAsync(self.ptr, stream)
            })
        };
        if let Err(error) = free() {
            tracing::debug!("memory not given back: {error}");
        }
    }
}

/// Address and shape of a view, checked against its storage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Raw {
    /// Address of element (0, 0).
    pub(super) ptr: u64,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Elements from row to row.
    pub(super) stride: usize,
}

impl Raw {
    /// Whether the rows follow each other without gaps.
    pub(super) fn is_contiguous(&self) -> bool {
        self.rows <= 1 || self.stride == self.cols
    }

    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// As one row, if the rows follow each other.
    pub(super) fn flattened(self) -> Self {
        if self.is_contiguous() {
            Self {
                rows: 1,
                cols: self.len(),
                stride: self.len(),
                ..self
            }
        } else {
            self
        }
    }
}

/// The raw form of a view.
pub(super) fn raw<T: Element>(view: &View<'_, Buffer<T>>) -> Raw {
    assert!(
        view.rows <= 1 || view.stride >= view.cols,
        "stride {} below {} columns",
        view.stride,
        view.cols
    );
    if view.rows > 0 && view.cols > 0 {
        let end = view.offset + (view.rows - 1) * view.stride + view.cols;
        assert!(
            end <= view.storage.len(),
            "a view that ends at element {end} of {}",
            view.storage.len()
        );
    }
    Raw {
        ptr: view.storage.address() + (view.offset * size_of::<T>()) as u64,
        rows: view.rows,
        cols: view.cols,
        stride: view.stride,
    }
}

/// The raw form of a mutable view.
pub(super) fn raw_mut<T: Element>(view: &ViewMut<'_, Buffer<T>>) -> Raw {
    raw(&view.as_view())
}

/// Pinned host memory.
#[derive(Debug)]
pub(super) struct Pinned {
    device: Arc<Device>,
    base: *mut u8,
}

// SAFETY: plain memory, owned.
unsafe impl Send for Pinned {}
// SAFETY: shared access goes through raw pointers only, whose users keep order themselves.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(super) fn new(device: &Arc<Device>, len: usize) -> Result<Self, EngineError> {
        device.bind()?;
        let mut base = ptr::null_mut();
        // SAFETY: valid out-pointer; the context is current.
        device.check("allocating pinned memory", unsafe {
            sys::cuMemHostAlloc(&mut base, len, sys::CU_MEMHOSTALLOC_PORTABLE)
        })?;
        Ok(Self {
            device: Arc::clone(device),
            base: base.cast(),
        })
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated by cuMemHostAlloc; the driver waits for copies that still use it.
            unsafe { sys::cuMemFreeHost(self.base.cast()) };
        }
    }
}

/// Bytes of one part of the staging memory.
const PART: usize = 4 << 20;
/// Parts of the staging memory: how far uploads may run ahead of the GPU.
const PARTS: usize = 8;
/// How long a download waits for what is enqueued before it.
const DOWNLOAD_DEADLINE: Duration = Duration::from_secs(600);

/// Pinned staging memory, used in a circle.
#[derive(Debug)]
pub(super) struct Staging {
    device: Arc<Device>,
    memory: Pinned,
    state: Mutex<StagingState>,
}

#[derive(Debug)]
struct StagingState {
    part: usize,
    used: usize,
    /// When the copies from each part are done.
    busy: [Option<Event>; PARTS],
}

impl Staging {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, EngineError> {
        Ok(Self {
            device: Arc::clone(device),
            memory: Pinned::new(device, PART * PARTS)?,
            state: Mutex::new(StagingState {
                part: 0,
                used: 0,
                busy: [const { None }; PARTS],
            }),
        })
    }

    /// Copies `values`, converted by `convert`, to `dst` on the compute queue.
    pub(super) fn upload<S: Copy, T: Element>(
        &self,
        values: &[S],
        convert: impl Fn(S) -> T,
        dst: Raw,
    ) -> Result<(), EngineError> {
        assert_eq!(values.len(), dst.len(), "values for a {dst:?}");
        self.device.bind()?;
        for piece in pieces::<T>(dst.flattened()) {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let host = self.reserve(&mut state, piece.bytes::<T>())?;
            let from = &values[piece.begin..piece.begin + piece.rows * piece.cols];
            for (i, value) in from.iter().enumerate() {
                // SAFETY: the reserved bytes hold that many elements and nothing else uses them now.
                unsafe { host.cast::<T>().add(i).write_unaligned(convert(*value)) };
            }
            self.copy::<T>(host, piece, Direction::ToDevice)?;
        }
        Ok(())
    }

    /// Waits for what is enqueued and reads `src` back, converted by `convert`.
    pub(super) fn download<T: Element, S>(
        &self,
        src: Raw,
        convert: impl Fn(T) -> S,
    ) -> Result<Vec<S>, EngineError> {
        self.device.bind()?;
        let mut values = Vec::with_capacity(src.len());
        for piece in pieces::<T>(src.flattened()) {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let host = self.reserve(&mut state, piece.bytes::<T>())?;
            self.copy::<T>(host, piece, Direction::ToHost)?;
            self.device
                .record(self.device.compute)?
                .finish("a download", DOWNLOAD_DEADLINE)?;
            for i in 0..piece.rows * piece.cols {
                // SAFETY: the copy wrote that many elements and is done.
                values.push(convert(unsafe { host.cast::<T>().add(i).read_unaligned() }));
            }
        }
        Ok(values)
    }

    /// `bytes` of staging memory that no copy uses, until the next call.
    fn reserve(&self, state: &mut StagingState, bytes: usize) -> Result<*mut u8, EngineError> {
        let bytes = bytes.next_multiple_of(16);
        if state.used + bytes > PART {
            state.busy[state.part] = Some(self.device.record(self.device.compute)?);
            state.part = (state.part + 1) % PARTS;
            state.used = 0;
            if let Some(event) = state.busy[state.part].take() {
                event.finish("uploads before this one", DOWNLOAD_DEADLINE)?;
            }
        }
        let offset = state.part * PART + state.used;
        state.used += bytes;
        // SAFETY: inside the staging memory.
        Ok(unsafe { self.memory.base().add(offset) })
    }

    /// Enqueues the copy of one piece.
    fn copy<T: Element>(
        &self,
        host: *mut u8,
        piece: Piece,
        direction: Direction,
    ) -> Result<(), EngineError> {
        use sys::CUmemorytype as M;
        let width = piece.cols * size_of::<T>();
        let device_pitch = if piece.rows > 1 {
            piece.stride * size_of::<T>()
        } else {
            width
        };
        let to_device = matches!(direction, Direction::ToDevice);
        let kind = |is_device| {
            if is_device {
                M::CU_MEMORYTYPE_DEVICE
            } else {
                M::CU_MEMORYTYPE_HOST
            }
        };
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: kind(!to_device),
            srcHost: host.cast(),
            srcDevice: piece.ptr,
            srcArray: ptr::null_mut(),
            srcPitch: if to_device { width } else { device_pitch },
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: kind(to_device),
            dstHost: host.cast(),
            dstDevice: piece.ptr,
            dstArray: ptr::null_mut(),
            dstPitch: if to_device { device_pitch } else { width },
            WidthInBytes: width,
            Height: piece.rows,
        };
        let stream = self.device.compute;
        // SAFETY: both sides hold the bytes; the host side is pinned and stays reserved until the copy is done.
        let result = unsafe {
            if piece.rows > 1 {
                sys::cuMemcpy2DAsync_v2(&copy, stream)
            } else if to_device {
                sys::cuMemcpyHtoDAsync_v2(piece.ptr, host.cast(), width, stream)
            } else {
                sys::cuMemcpyDtoHAsync_v2(host.cast(), piece.ptr, width, stream)
            }
        };
        self.device.check("copying through staging memory", result)
    }
}

enum Direction {
    ToDevice,
    ToHost,
}

/// A part of a matrix that fits into a part of the staging memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// First element, counted in rows without gaps.
    begin: usize,
    ptr: u64,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl Piece {
    fn bytes<T>(&self) -> usize {
        self.rows * self.cols * size_of::<T>()
    }
}

/// Cuts a matrix into pieces: whole rows, or parts of a row where a row is too long.
fn pieces<T>(matrix: Raw) -> Vec<Piece> {
    let most = PART / size_of::<T>();
    let mut pieces = Vec::new();
    if matrix.len() == 0 {
        return pieces;
    }
    let rows_at_once = (most / matrix.cols).max(1);
    let cols_at_once = matrix.cols.min(most);
    for row in (0..matrix.rows).step_by(rows_at_once) {
        for col in (0..matrix.cols).step_by(cols_at_once) {
            pieces.push(Piece {
                begin: row * matrix.cols + col,
                ptr: matrix.ptr + ((row * matrix.stride + col) * size_of::<T>()) as u64,
                rows: rows_at_once.min(matrix.rows - row),
                cols: cols_at_once.min(matrix.cols - col),
                stride: matrix.stride,
            });
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(rows: usize, cols: usize, stride: usize) -> Raw {
        Raw {
            ptr: 1 << 20,
            rows,
            cols,
            stride,
        }
    }

    #[test]
    fn pieces_cover_each_element_once() {
        let most = PART / size_of::<f32>();
        for m in [
            matrix(1, 3 * most + 5, 3 * most + 5),
            matrix(1000, 3000, 4096),
            matrix(2, most + 1, most + 7),
            matrix(3, 0, 0),
        ] {
            let mut next = 0;
            for p in pieces::<f32>(m) {
                assert_eq!(p.begin, next);
                assert!(p.bytes::<f32>() <= PART && (p.rows == 1 || p.cols == m.cols));
                let (row, col) = (p.begin / m.cols, p.begin % m.cols);
                assert_eq!(p.ptr, m.ptr + ((row * m.stride + col) * 4) as u64);
                next += p.rows * p.cols;
            }
            assert_eq!(next, m.len());
        }
    }
}
