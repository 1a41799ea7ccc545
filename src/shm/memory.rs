//! Where the segment's bytes come from: a sealed memfd, or the heap under loom.

#[cfg(feature = "loom")]
pub(crate) use heap::Memory;
#[cfg(not(feature = "loom"))]
pub(crate) use mapped::Memory;

#[cfg(not(feature = "loom"))]
mod mapped {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::ptr::{self, NonNull};

    use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
    use rustix::mm::{MapFlags, ProtFlags};

    use super::super::atomics::{AtomicU64, plain};
    use super::super::error::{Result, ShmError};
    use super::super::geometry::{Geometry, Layout, PAGE};
    use super::super::layout::{Control, Header, ReduceWords, Seat, Slot};

    /// A mapping of the whole segment.
    #[derive(Debug)]
    pub(crate) struct Memory {
        base: NonNull<u8>,
        len: usize,
        layout: Layout,
        counts: Counts,
        fd: OwnedFd,
    }

    #[derive(Clone, Copy, Debug)]
    struct Counts {
        seats: usize,
        drafters: usize,
        slots: usize,
        all_slots: usize,
        words: usize,
        floats: usize,
        piece: usize,
    }

    // SAFETY: the mapping belongs to this value and stays in place until it is dropped; all that is reached
    // through `&Memory` is atomics, or raw pointers whose users follow the protocol.
    unsafe impl Send for Memory {}
    // SAFETY: as above.
    unsafe impl Sync for Memory {}

    impl Memory {
        /// Makes a memfd of the geometry's size, gives it all its pages, seals its size and writes `header`.
        pub(crate) fn create(geometry: &Geometry, header: Header) -> Result<Self> {
            let layout = Layout::of(geometry);
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let fd = rustix::fs::memfd_create("slipstream", flags)
                .map_err(|e| system("memfd_create", "the segment", e))?;
            let len = layout.total as u64;
            rustix::fs::ftruncate(&fd, len).map_err(|e| system("ftruncate", "the segment", e))?;
            rustix::io::retry_on_intr(|| {
                rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len)
            })
            .map_err(|e| system("fallocate", &format!("the segment of {len} bytes"), e))?;
            rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
                .map_err(|e| system("fcntl(F_ADD_SEALS)", "the segment", e))?;
            let memory = Self::map(fd, geometry, layout, true)?;
            memory.prefault();
            // SAFETY: the header lies at the start of the writable mapping, suitably aligned, and nobody else
            // knows of the segment yet.
            unsafe { memory.base.cast::<Header>().write(header) };
            Ok(memory)
        }

        /// Reads the header of a segment that someone else made.
        pub(crate) fn read_header(fd: BorrowedFd<'_>, what: &str) -> Result<Header> {
            let stat = rustix::fs::fstat(fd).map_err(|e| system("fstat", what, e))?;
            let mut bytes = [0u8; size_of::<Header>()];
            if (stat.st_size as u64) < bytes.len() as u64 {
                let why = format!("it is {} bytes long", stat.st_size);
                return Err(ShmError::Foreign {
                    what: what.to_owned(),
                    why,
                });
            }
            rustix::io::pread(fd, &mut bytes, 0).map_err(|e| system("pread", what, e))?;
            // SAFETY: the header consists of integers only, so that any bytes make a value.
            let header: Header = unsafe { ptr::read_unaligned(bytes.as_ptr().cast()) };
            if header.total_bytes != stat.st_size as u64 {
                let why = format!(
                    "its header says {} bytes and the file has {}",
                    header.total_bytes, stat.st_size
                );
                return Err(ShmError::Foreign {
                    what: what.to_owned(),
                    why,
                });
            }
            Ok(header)
        }

        /// Maps a segment that someone else made; `geometry` is its header's.
        pub(crate) fn attach(fd: OwnedFd, geometry: &Geometry, writable: bool) -> Result<Self> {
            Self::map(fd, geometry, Layout::of(geometry), writable)
        }

        fn map(fd: OwnedFd, geometry: &Geometry, layout: Layout, writable: bool) -> Result<Self> {
            let mut protection = ProtFlags::READ;
            if writable {
                protection |= ProtFlags::WRITE;
            }
            let len = layout.total;
            // SAFETY: a new shared mapping at an address of the kernel's choice replaces nothing.
            let base = unsafe {
                rustix::mm::mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, &fd, 0)
            }
            .map_err(|e| system("mmap", &format!("the segment of {len} bytes"), e))?;
            let base =
                NonNull::new(base.cast()).expect("mmap without MAP_FIXED never returns null");
            let counts = Counts {
                seats: geometry.seats() as usize,
                drafters: geometry.drafters as usize,
                slots: geometry.slots as usize,
                all_slots: (geometry.slots + geometry.eval_units) as usize,
                words: geometry.units as usize + geometry.eval_units as usize,
                floats: geometry.reduce_floats as usize,
                piece: geometry.broadcast_bytes as usize,
            };
            Ok(Self {
                base,
                len,
                layout,
                counts,
                fd,
            })
        }

        /// Gives this process every page, with several threads, so that no first use pays for it.
        pub(crate) fn prefault(&self) {
            let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
            let part = (self.len / PAGE).div_ceil(threads).max(1) * PAGE;
            std::thread::scope(|scope| {
                for start in (0..self.len).step_by(part) {
                    let len = part.min(self.len - start);
                    scope.spawn(move || self.prefault_part(start, len));
                }
            });
        }

        fn prefault_part(&self, start: usize, len: usize) {
            // SAFETY: the part lies inside the mapping; populating changes no contents.
            let populated = unsafe {
                let at = self.base.as_ptr().add(start).cast();
                rustix::mm::madvise(at, len, rustix::mm::Advice::LinuxPopulateWrite)
            };
            if populated.is_ok() {
                return;
            }
            // Before Linux 5.14: read a word of every page.
            for page in (start..start + len).step_by(PAGE) {
                let word = &self.slice::<AtomicU64>(page, 1)[0];
                std::hint::black_box(word.load(std::sync::atomic::Ordering::Relaxed));
            }
        }

        pub(crate) fn fd(&self) -> BorrowedFd<'_> {
            self.fd.as_fd()
        }

        fn slice<T>(&self, offset: usize, count: usize) -> &[T] {
            debug_assert!(offset + count * size_of::<T>() <= self.len);
            // SAFETY: `Layout` places `count` values of T here, aligned, inside the mapping; T is made of
            // atomics (or of integers written before anyone else maps the segment) and valid when zeroed.
            unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), count) }
        }

        pub(crate) fn control(&self) -> &Control {
            &self.slice(self.layout.control, 1)[0]
        }

        pub(crate) fn seats(&self) -> &[Seat] {
            self.slice(self.layout.seats, self.counts.seats)
        }

        /// Units of the drafter's record, in the order it took them: `[drafters, slots]`.
        pub(crate) fn unit_lists(&self) -> &[plain::AtomicU64] {
            self.slice(
                self.layout.unit_lists,
                self.counts.drafters * self.counts.slots,
            )
        }

        pub(crate) fn reduce_words(&self) -> &[ReduceWords] {
            self.slice(self.layout.reduce_words, self.counts.drafters)
        }

        /// The ring's slots, then the eval units'.
        pub(crate) fn slots(&self) -> &[Slot] {
            self.slice(self.layout.slots, self.counts.all_slots)
        }

        /// The eval units' words, then the training units'.
        pub(crate) fn ledger(&self) -> &[AtomicU64] {
            self.slice(self.layout.ledger, self.counts.words)
        }

        /// All-reduce buffer `index`, of `reduce_floats` elements; the last is the sum's.
        pub(crate) fn reduce_buffer(&self, index: usize) -> *mut f32 {
            assert!(index <= self.counts.drafters && self.counts.floats > 0);
            let offset = self.layout.reduce + index * self.counts.floats * 4;
            // SAFETY: `Layout` has drafters + 1 buffers of this size inside the mapping.
            unsafe { self.base.as_ptr().add(offset).cast() }
        }

        /// The broadcast buffer, of `broadcast_bytes` bytes.
        pub(crate) fn broadcast_buffer(&self) -> *mut u8 {
            debug_assert!(self.layout.broadcast + self.counts.piece <= self.len);
            // SAFETY: the buffer lies inside the mapping.
            unsafe { self.base.as_ptr().add(self.layout.broadcast) }
        }

        /// Start and length of all payloads together, page-aligned.
        pub(crate) fn payload(&self) -> (*mut u8, usize) {
            // SAFETY: the payload area lies inside the mapping.
            let start = unsafe { self.base.as_ptr().add(self.layout.payload) };
            (start, self.layout.payload_bytes)
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: the mapping was made by `map` and no reference into it outlives `self`. An error would
            // leave it mapped, which harms nothing.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        }
    }

    pub(super) fn system(call: &'static str, what: &str, error: rustix::io::Errno) -> ShmError {
        ShmError::System {
            call,
            what: what.to_owned(),
            source: error.into(),
        }
    }
}

#[cfg(feature = "loom")]
mod heap {
    use std::cell::UnsafeCell;

    use super::super::atomics::{AtomicU64, plain};
    use super::super::error::Result;
    use super::super::geometry::{Geometry, Layout};
    use super::super::layout::{Control, Header, ReduceWords, Seat, Slot};

    /// The same parts on the heap: loom's atomics are not plain integers, so no mapping can hold them.
    pub(crate) struct Memory {
        control: Control,
        seats: Vec<Seat>,
        unit_lists: Vec<plain::AtomicU64>,
        reduce_words: Vec<ReduceWords>,
        slots: Vec<Slot>,
        ledger: Vec<AtomicU64>,
        reduce: Vec<UnsafeCell<f32>>,
        floats: usize,
        broadcast: Vec<UnsafeCell<u8>>,
        payload: Vec<UnsafeCell<u64>>,
        /// One cell per slot that loom watches for unordered accesses, in place of the payload.
        probes: Vec<loom::cell::UnsafeCell<u64>>,
    }

    // SAFETY: as for the mapping; buffers are reached through raw pointers whose users follow the protocol.
    unsafe impl Send for Memory {}
    // SAFETY: as above.
    unsafe impl Sync for Memory {}

    fn many<T: Default>(count: usize) -> Vec<T> {
        (0..count).map(|_| T::default()).collect()
    }

    impl std::fmt::Debug for Memory {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Memory").finish_non_exhaustive()
        }
    }

    impl Memory {
        pub(crate) fn create(geometry: &Geometry, _header: Header) -> Result<Self> {
            let drafters = geometry.drafters as usize;
            let slots = (geometry.slots + geometry.eval_units) as usize;
            let floats = geometry.reduce_floats as usize;
            let layout = Layout::of(geometry);
            Ok(Self {
                control: Control::default(),
                seats: many(geometry.seats() as usize),
                unit_lists: many(drafters * geometry.slots as usize),
                reduce_words: many(drafters),
                slots: many(slots),
                ledger: many(geometry.units as usize + geometry.eval_units as usize),
                reduce: many(floats * (drafters + 1)),
                floats,
                broadcast: many(geometry.broadcast_bytes as usize),
                payload: many(layout.payload_bytes / 8),
                probes: many(slots),
            })
        }

        pub(crate) fn prefault(&self) {}

        pub(crate) fn control(&self) -> &Control {
            &self.control
        }

        pub(crate) fn seats(&self) -> &[Seat] {
            &self.seats
        }

        pub(crate) fn unit_lists(&self) -> &[plain::AtomicU64] {
            &self.unit_lists
        }

        pub(crate) fn reduce_words(&self) -> &[ReduceWords] {
            &self.reduce_words
        }

        pub(crate) fn slots(&self) -> &[Slot] {
            &self.slots
        }

        pub(crate) fn ledger(&self) -> &[AtomicU64] {
            &self.ledger
        }

        pub(crate) fn reduce_buffer(&self, index: usize) -> *mut f32 {
            self.reduce[index * self.floats].get()
        }

        pub(crate) fn broadcast_buffer(&self) -> *mut u8 {
            self.broadcast[0].get()
        }

        pub(crate) fn payload(&self) -> (*mut u8, usize) {
            (self.payload[0].get().cast(), self.payload.len() * 8)
        }

        pub(crate) fn probe(&self, slot: usize) -> &loom::cell::UnsafeCell<u64> {
            &self.probes[slot]
        }
    }
}
