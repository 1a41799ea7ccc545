//! The segment: made by the launcher, attached by workers, observed by other tools.

use std::sync::Arc;

use super::error::{Result, ShmError};
use super::geometry::{Dtype, Geometry, Layout, PayloadLayout};
use super::layout::{ABI_VERSION, Control, Header, MAGIC, Record, Seat, Slot};
use super::memory::Memory;
use super::words::{StepState, StepWord};

/// Names one run, so that a worker never attaches to another run's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RunId(pub [u8; 16]);

impl RunId {
    /// A new one, from the clock, the process and a counter.
    pub fn fresh() -> Self {
        use std::sync::atomic::{AtomicU64, Ordering};
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mut hash = blake3::Hasher::new();
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| d.as_nanos());
        hash.update(&now.to_le_bytes());
        hash.update(&std::process::id().to_le_bytes());
        hash.update(&COUNT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        let mut id = [0; 16];
        id.copy_from_slice(&hash.finalize().as_bytes()[..16]);
        Self(id)
    }
}

impl std::fmt::Display for RunId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::str::FromStr for RunId {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong = || format!("a run id is 32 hexadecimal digits, not {text:?}");
        if text.len() != 32 || !text.is_ascii() {
            return Err(wrong());
        }
        let mut id = [0; 16];
        for (byte, at) in id.iter_mut().zip((0..32).step_by(2)) {
            *byte = u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| wrong())?;
        }
        Ok(Self(id))
    }
}

/// The memory that the processes of a run share. Cloning shares the mapping.
#[derive(Clone, Debug)]
pub struct Segment(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    memory: Memory,
    geometry: Geometry,
    payload: PayloadLayout,
    run_id: RunId,
}

impl Segment {
    /// Makes a segment in which every drafter is a member and nothing has been done.
    ///
    /// The file is close-on-exec, sealed against resizing and has all its pages.
    ///
    /// # Errors
    /// [`Geometry::check`]'s; [`ShmError::NotEnoughMemory`] before anything is allocated;
    /// [`ShmError::System`].
    pub fn create(geometry: &Geometry, run_id: RunId) -> Result<Self> {
        enough_memory(geometry.total_bytes()?)?;
        Self::unchecked(geometry, run_id)
    }

    pub(crate) fn unchecked(geometry: &Geometry, run_id: RunId) -> Result<Self> {
        let total = Layout::of(geometry).total as u64;
        let memory = Memory::create(geometry, header_of(geometry, run_id, total))?;
        let segment = Self::over(memory, geometry.clone(), run_id);
        let first = StepWord {
            step: geometry.first_step,
            generation: 1,
            state: StepState::Gather,
            mask: 0,
            members: (1 << geometry.drafters) - 1,
        };
        segment.store_step(first);
        segment.mark_saved(geometry.first_step - 1);
        Ok(segment)
    }

    fn over(memory: Memory, geometry: Geometry, run_id: RunId) -> Self {
        let payload = PayloadLayout::of(&geometry);
        Self(Arc::new(Shared {
            memory,
            geometry,
            payload,
            run_id,
        }))
    }

    /// Counts and sizes.
    pub fn geometry(&self) -> &Geometry {
        &self.0.geometry
    }

    /// The run this memory belongs to.
    pub fn run_id(&self) -> RunId {
        self.0.run_id
    }

    /// Start and length in bytes of the payloads of all slots, page-aligned: the range to register for DMA.
    pub fn payload_range(&self) -> (*mut u8, usize) {
        self.memory().payload()
    }

    /// Touches every page in this process, so that no copy pays for a page fault.
    pub fn prefault(&self) {
        self.memory().prefault();
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.0.memory
    }

    pub(crate) fn payload_layout(&self) -> &PayloadLayout {
        &self.0.payload
    }

    pub(crate) fn control(&self) -> &Control {
        self.memory().control()
    }

    pub(crate) fn seat(&self, seat: u32) -> &Seat {
        &self.memory().seats()[seat as usize]
    }

    pub(crate) fn record(&self, rank: u32) -> &Record {
        &self.seat(self.geometry().drafter_seat(rank)).record
    }

    pub(crate) fn slot(&self, slot: u32) -> &Slot {
        &self.memory().slots()[slot as usize]
    }

    /// The ring's slots, without the eval units'.
    pub(crate) fn ring(&self) -> &[Slot] {
        &self.memory().slots()[..self.geometry().slots as usize]
    }

    /// Start of a slot's payload.
    pub(crate) fn payload_of(&self, slot: u32) -> *mut u8 {
        let (start, len) = self.memory().payload();
        let offset = slot as usize * self.payload_layout().stride;
        assert!(offset + self.payload_layout().stride <= len);
        // SAFETY: the payload area holds one stride per slot.
        unsafe { start.add(offset) }
    }
}

/// Loom's segments lie on the heap of one process: there is no file to pass on.
#[cfg(feature = "loom")]
impl Segment {
    /// Always refused.
    ///
    /// # Errors
    /// [`ShmError::Foreign`].
    pub fn attach(_: std::os::fd::OwnedFd, _: Option<RunId>) -> Result<Self> {
        Err(ShmError::Foreign {
            what: "a segment built for loom".to_owned(),
            why: "it has no file".to_owned(),
        })
    }

    /// Always refused.
    ///
    /// # Errors
    /// [`ShmError::Foreign`].
    pub(crate) fn open_readonly(path: &std::path::Path) -> Result<Self> {
        Err(ShmError::Foreign {
            what: path.display().to_string(),
            why: "a segment built for loom has no file".to_owned(),
        })
    }

    /// # Panics
    /// Always.
    pub fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        panic!("a segment built for loom has no file")
    }
}

#[cfg(not(feature = "loom"))]
mod files {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::path::Path;

    use super::*;

    impl Segment {
        /// Attaches to the segment behind an inherited descriptor.
        ///
        /// # Errors
        /// [`ShmError::Foreign`] when magic, version, size, seals or `run_id` differ; [`ShmError::System`].
        pub fn attach(fd: OwnedFd, run_id: Option<RunId>) -> Result<Self> {
            Self::open(fd, "the inherited descriptor", run_id, true)
        }

        /// The segment's descriptor, to be inherited by workers.
        pub fn fd(&self) -> BorrowedFd<'_> {
            self.memory().fd()
        }

        pub(in crate::shm) fn open(
            fd: OwnedFd,
            what: &str,
            run_id: Option<RunId>,
            writable: bool,
        ) -> Result<Self> {
            let header = Memory::read_header(fd.as_fd(), what)?;
            let foreign = |why: String| ShmError::Foreign {
                what: what.to_owned(),
                why,
            };
            let (geometry, found) = geometry_of(&header).map_err(foreign)?;
            if let Some(expected) = run_id
                && expected != found
            {
                return Err(foreign(format!(
                    "it belongs to run {found}, not to {expected}"
                )));
            }
            let wanted = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
            let sealed = rustix::fs::fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(wanted));
            if !sealed {
                return Err(foreign("its size is not sealed".to_owned()));
            }
            let memory = Memory::attach(fd, &geometry, writable)?;
            Ok(Self::over(memory, geometry, found))
        }

        pub(in crate::shm) fn open_readonly(path: &Path) -> Result<Self> {
            let what = path.display().to_string();
            let fd = rustix::fs::open(
                path,
                rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC,
                rustix::fs::Mode::empty(),
            )
            .map_err(|e| ShmError::System {
                call: "open",
                what: what.clone(),
                source: e.into(),
            })?;
            Self::open(fd, &what, None, false)
        }
    }
}

fn header_of(geometry: &Geometry, run_id: RunId, total_bytes: u64) -> Header {
    Header {
        magic: MAGIC,
        abi_version: ABI_VERSION,
        header_bytes: size_of::<Header>() as u32,
        run_id: run_id.0,
        total_bytes,
        units: geometry.units,
        reduce_floats: geometry.reduce_floats,
        broadcast_bytes: geometry.broadcast_bytes,
        first_step: geometry.first_step,
        targets: geometry.targets,
        drafters: geometry.drafters,
        slots: geometry.slots,
        eval_units: geometry.eval_units,
        slot_tokens: geometry.slot_tokens,
        slot_documents: geometry.slot_documents,
        captured_width: geometry.captured_width,
        hidden: geometry.hidden,
        final_hidden: geometry.final_hidden.into(),
        dtype: geometry.dtype.code(),
        batch_anchors: geometry.batch_anchors,
        units_per_step: geometry.units_per_step,
        check_payload: geometry.check_payload.into(),
        reserved: 0,
    }
}

#[cfg_attr(
    feature = "loom",
    allow(dead_code, reason = "nothing attaches under loom")
)]
fn geometry_of(header: &Header) -> std::result::Result<(Geometry, RunId), String> {
    if header.magic != MAGIC {
        return Err(format!(
            "it starts with {:#018x}, not {MAGIC:#018x}",
            header.magic
        ));
    }
    if header.abi_version != ABI_VERSION || header.header_bytes as usize != size_of::<Header>() {
        return Err(format!(
            "its layout is version {} and this program's is {ABI_VERSION}; use binaries of one build",
            header.abi_version
        ));
    }
    let dtype = Dtype::from_code(header.dtype)
        .ok_or_else(|| format!("its elements have the unknown kind {}", header.dtype))?;
    let geometry = Geometry {
        targets: header.targets,
        drafters: header.drafters,
        slots: header.slots,
        units: header.units,
        eval_units: header.eval_units,
        slot_tokens: header.slot_tokens,
        slot_documents: header.slot_documents,
        captured_width: header.captured_width,
        hidden: header.hidden,
        final_hidden: header.final_hidden != 0,
        dtype,
        batch_anchors: header.batch_anchors,
        units_per_step: header.units_per_step,
        reduce_floats: header.reduce_floats,
        broadcast_bytes: header.broadcast_bytes,
        check_payload: header.check_payload != 0,
        first_step: header.first_step,
    };
    let total = geometry.total_bytes().map_err(|e| e.to_string())?;
    if total != header.total_bytes {
        return Err(format!(
            "its counts make {total} bytes, but it has {}",
            header.total_bytes
        ));
    }
    Ok((geometry, RunId(header.run_id)))
}

/// Refuses a segment that the machine or the control group cannot hold, before it is allocated.
fn enough_memory(needed: u64) -> Result<()> {
    let machine = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo_available(&text))
        .map(|bytes| (bytes, "MemAvailable of /proc/meminfo".to_owned()));
    let group = cgroup_available();
    match machine.into_iter().chain(group).min() {
        Some((available, limit)) if available < needed => Err(ShmError::NotEnoughMemory {
            needed,
            available,
            limit,
        }),
        _ => Ok(()),
    }
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// The tightest limit among this process's control group (version 2) and its parents, less what is used.
fn cgroup_available() -> Option<(u64, String)> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mut folder = std::path::PathBuf::from(format!("/sys/fs/cgroup{path}"));
    let mut tightest: Option<(u64, String)> = None;
    while folder.starts_with("/sys/fs/cgroup") {
        let read = |name| -> Option<u64> {
            std::fs::read_to_string(folder.join(name))
                .ok()?
                .trim()
                .parse()
                .ok()
        };
        if let (Some(most), Some(used)) = (read("memory.max"), read("memory.current")) {
            let reclaimable = reclaimable(&folder);
            let free = most.saturating_sub(used.saturating_sub(reclaimable));
            let found = (free, format!("memory.max of {}", folder.display()));
            tightest = Some(tightest.map_or(found.clone(), |t| t.min(found)));
        }
        if !folder.pop() {
            break;
        }
    }
    tightest
}

/// File pages that the kernel can drop: they count as used, but do not stand in the way.
fn reclaimable(folder: &std::path::Path) -> u64 {
    let Ok(text) = std::fs::read_to_string(folder.join("memory.stat")) else {
        return 0;
    };
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| matches!(*name, "inactive_file" | "active_file"))
        .filter_map(|(_, bytes)| bytes.parse::<u64>().ok())
        .sum()
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use crate::shm::testing::geometry;

    #[test]
    fn a_segment_is_sealed_and_keeps_its_geometry() {
        let made = geometry(2, 2, 12, 40);
        let id = RunId::fresh();
        let segment = Segment::create(&made, id).unwrap();
        let fd = segment.fd().try_clone_to_owned().unwrap();
        let again = Segment::attach(fd, Some(id)).unwrap();
        assert_eq!(again.geometry(), &made);
        let error = rustix::fs::ftruncate(segment.fd(), 4096).unwrap_err();
        assert_eq!(error, rustix::io::Errno::PERM);
        let flags = rustix::io::fcntl_getfd(segment.fd()).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn another_runs_memory_is_refused() {
        let segment = Segment::create(&geometry(1, 1, 8, 4), RunId::fresh()).unwrap();
        let fd = segment.fd().try_clone_to_owned().unwrap();
        let error = Segment::attach(fd, Some(RunId::fresh())).unwrap_err();
        assert!(error.to_string().contains("it belongs to run"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_segment_is_refused() {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let error = Segment::attach(file.into(), None).unwrap_err();
        assert!(matches!(error, ShmError::Foreign { .. }), "{error}");
    }

    #[test]
    fn too_little_memory_is_refused_with_the_numbers() {
        let mut made = geometry(1, 1, 8, 4);
        made.slot_tokens = 1 << 28;
        made.captured_width = 1 << 12;
        let error = Segment::create(&made, RunId::fresh()).unwrap_err();
        assert!(matches!(error, ShmError::NotEnoughMemory { .. }), "{error}");
    }

    #[test]
    fn available_memory_is_read_in_bytes() {
        let text = "MemTotal: 9 kB\nMemAvailable:   3 kB\n";
        assert_eq!(meminfo_available(text), Some(3072));
    }

    #[test]
    fn run_ids_survive_text() {
        let id = RunId::fresh();
        assert_eq!(id.to_string().parse(), Ok(id));
        assert!("xyz".parse::<RunId>().is_err());
    }
}
