//! All-reduce among GPUs through NCCL.
//!
//! Calls do not block: NCCL answers "in progress" and is asked again, so that every wait here has a deadline and
//! ends when the group changes. A member that dies leaves the others' queues stuck for good, without any error of
//! NCCL's; an abort gets them out, from another thread, and leaves device memory as it is but for what was being
//! summed. An abort while a thread is inside a NCCL call can lose the GPU's context: here one thread makes all calls,
//! each returns at once, and at most one sum is under way.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{self, ncclResult_t};

use super::{Collective, CollectiveError};
use crate::engine::cuda::{Cuda, Library, require_library};
use crate::engine::{Engine, EngineError, Float, FloatMut, Queue};
use crate::shm::{Activity, Drafter, Joined, Reduced};

/// Longest wait for all members to connect: half a second is usual.
const INIT_DEADLINE: Duration = Duration::from_secs(60);
/// Longest all-reduce.
const REDUCE_DEADLINE: Duration = Duration::from_secs(120);
/// Longest abort: a second is usual.
const ABORT_DEADLINE: Duration = Duration::from_secs(20);
/// Longest orderly end, for which NCCL may wait for members that still write a checkpoint.
const END_DEADLINE: Duration = Duration::from_secs(20);
/// Waits shorter than this are spun through.
const SPIN: Duration = Duration::from_millis(1);
/// Between two looks at a communicator that takes longer.
const TICK: Duration = Duration::from_micros(50);
/// Elements of the all-reduce that is checked when a communicator is new: 64 MiB.
const CHECKED: usize = 16 << 20;
/// The values of that all-reduce repeat after this many.
const PATTERN: usize = 1021;

/// NCCL's all-reduce. With one member it does nothing and does not even load the library. The communicator of a
/// generation is made by its first all-reduce, where all members are known to be.
#[derive(Debug, Default)]
pub struct Nccl {
    group: Option<Joined>,
    communicator: Option<Communicator>,
    /// Totals on the GPU.
    totals: Option<Float<Cuda>>,
}

/// Why a wait ended before NCCL was done.
#[derive(Debug)]
enum Ended {
    /// The group has changed, or is about to: a member's pipe is at its end.
    Moved,
    Failed(CollectiveError),
}

impl From<CollectiveError> for Ended {
    fn from(error: CollectiveError) -> Self {
        Self::Failed(error)
    }
}

impl From<EngineError> for Ended {
    fn from(error: EngineError) -> Self {
        Self::Failed(error.into())
    }
}

impl Collective<Cuda> for Nccl {
    fn regroup(&mut self, _: &Cuda, joined: &Joined) -> Result<(), CollectiveError> {
        self.group = Some(*joined);
        self.abort()
    }

    fn finish(&mut self) {
        if let Some(communicator) = self.communicator.take()
            && let Err(error) = communicator.end()
        {
            tracing::warn!("{error}");
        }
    }

    fn all_reduce(
        &mut self,
        engine: &Cuda,
        seat: &mut Drafter,
        gradients: &mut Float<Cuda>,
        totals: &mut [f32],
    ) -> Result<Reduced, CollectiveError> {
        let _doing = seat.live().during(Activity::AllReduce, seat.step());
        match self.sum(engine, seat, gradients, totals) {
            Ok(()) if !seat.has_moved() => Ok(Reduced::Done),
            Ok(()) => Ok(Reduced::Moved),
            Err(Ended::Moved) => {
                self.abort()?;
                Ok(Reduced::Moved)
            }
            Err(Ended::Failed(error)) => {
                // The first error says more than one of the abort.
                let _ = self.abort();
                Err(error)
            }
        }
    }
}

impl Nccl {
    fn sum(
        &mut self,
        engine: &Cuda,
        seat: &Drafter,
        gradients: &mut Float<Cuda>,
        totals: &mut [f32],
    ) -> Result<(), Ended> {
        let group = self.group.ok_or(Ended::Moved)?;
        if group.members.count_ones() < 2 {
            return Ok(());
        }
        if self.communicator.is_none() {
            self.communicator = Some(connect(engine, seat, &group)?);
            self.try_out(engine, seat, &group)?;
        }
        let on_gpu = match self.totals.take() {
            Some(buffer) if buffer.cols() == totals.len() => buffer,
            _ => engine.float(1, totals.len())?,
        };
        let on_gpu = self.totals.insert(on_gpu);
        engine.write_float(on_gpu.view_mut(), totals)?;
        let communicator = self.communicator.as_mut().expect("made above");
        let parts = [gradients.view_mut(), on_gpu.view_mut()];
        communicator.all_reduce(engine, seat, &parts)?;
        totals.copy_from_slice(&engine.download_float(on_gpu.view())?);
        Ok(())
    }

    /// An all-reduce whose result is known, and how fast it is.
    fn try_out(&mut self, engine: &Cuda, seat: &Drafter, group: &Joined) -> Result<(), Ended> {
        let size = group.members.count_ones();
        let factor = (1 + place_of(seat.rank(), group)) as f32;
        let pattern = |factor: f32| (0..CHECKED).map(move |i| factor * (1 + i % PATTERN) as f32);
        let values: Vec<f32> = pattern(factor).collect();
        let mut buffer = engine.upload_float(&values, CHECKED)?;
        let communicator = self.communicator.as_mut().expect("it is tried out");
        communicator.all_reduce(engine, seat, &[buffer.view_mut()])?;
        let sums = engine.download_float(buffer.view())?;
        let wanted = pattern((size * (size + 1) / 2) as f32);
        if let Some((element, (&got, want))) = sums
            .iter()
            .zip(wanted)
            .enumerate()
            .find(|(_, (got, want))| *got != want)
        {
            let error = CollectiveError::Wrong { element, got, want };
            return Err(Ended::Failed(error));
        }
        let mut best = Duration::MAX;
        for _ in 0..5 {
            let begin = Instant::now();
            communicator.all_reduce(engine, seat, &[buffer.view_mut()])?;
            best = best.min(begin.elapsed());
        }
        let moved = 2.0 * f64::from(size - 1) / f64::from(size) * (4 * CHECKED) as f64;
        tracing::info!(
            "NCCL {}: an all-reduce of 64 MiB among {size} members is right, {:.0} GB/s of bus bandwidth",
            version(),
            1e-9 * moved / best.as_secs_f64(),
        );
        Ok(())
    }

    fn abort(&mut self) -> Result<(), CollectiveError> {
        self.communicator.take().map_or(Ok(()), Communicator::abort)
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // Not in order, or `finish` would have been called: the others are not to be waited for.
        if let Err(error) = self.abort() {
            tracing::warn!("{error}");
        }
    }
}

/// The number of a rank among the members.
fn place_of(rank: u32, group: &Joined) -> u32 {
    (group.members & ((1 << rank) - 1)).count_ones()
}

/// Connects all members of a group. The lowest makes the id that all need and writes it to shared memory.
fn connect(engine: &Cuda, seat: &Drafter, group: &Joined) -> Result<Communicator, Ended> {
    require_library(engine.name(), Library::Nccl)?;
    engine.make_current()?;
    let (segment, begin) = (seat.segment(), Instant::now());
    let wait = Wait {
        seat,
        what: "connecting all drafters",
        begin,
        deadline: INIT_DEADLINE,
    };
    let place = place_of(seat.rank(), group);
    let id = if place == 0 {
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: valid out-pointer; the library is there.
        let made = unsafe { sys::ncclGetUniqueId(&mut id) };
        check("making an id", None, made)?;
        segment.write_unique_id(group.generation, &bytemuck::cast(id.internal));
        id
    } else {
        loop {
            if let Some(bytes) = segment.unique_id(group.generation) {
                break sys::ncclUniqueId {
                    internal: bytemuck::cast(bytes),
                };
            }
            wait.look()?;
        }
    };
    let mut config = configuration();
    let mut raw = std::ptr::null_mut();
    let size = group.members.count_ones() as c_int;
    // SAFETY: valid pointers; the GPU is this thread's; the id is one of NCCL's.
    let result =
        unsafe { sys::ncclCommInitRankConfig(&mut raw, size, id, place as c_int, &mut config) };
    if raw.is_null() {
        check("connecting", None, result)?;
        return Err(Ended::Failed(CollectiveError::Nccl {
            what: "connecting",
            message: "no communicator was made".to_owned(),
        }));
    }
    let communicator = Communicator(raw);
    if let Err(ended) = communicator.settle(&wait, result) {
        communicator.abort()?;
        return Err(ended);
    }
    tracing::info!(
        "connected {size} drafters in {:.2} s",
        begin.elapsed().as_secs_f64()
    );
    Ok(communicator)
}

/// One communicator; it is of one generation of the group.
#[derive(Debug)]
struct Communicator(sys::ncclComm_t);

// SAFETY: a communicator may be used from any thread, one at a time, and this value is its only owner.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Waits until NCCL is through with a call that answered `result`.
    fn settle(&self, wait: &Wait<'_>, mut result: ncclResult_t) -> Result<(), Ended> {
        while result == ncclResult_t::ncclInProgress {
            wait.look()?;
            result = self.state()?;
        }
        Ok(check(wait.what, Some(self), result)?)
    }

    /// Success, in progress, or what went wrong meanwhile.
    fn state(&self) -> Result<ncclResult_t, CollectiveError> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is live; valid out-pointer.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.0, &mut state) };
        check("asking for its state", Some(self), asked)?;
        Ok(state)
    }

    /// Sums each of `parts`, in place, over all members, behind what is enqueued on the compute queue, and waits.
    fn all_reduce(
        &mut self,
        engine: &Cuda,
        seat: &Drafter,
        parts: &[FloatMut<'_, Cuda>],
    ) -> Result<(), Ended> {
        engine.make_current()?;
        let wait = Wait {
            seat,
            what: "an all-reduce",
            begin: Instant::now(),
            deadline: REDUCE_DEADLINE,
        };
        let stream = engine.stream_handle(Queue::Compute).cast();
        // SAFETY: begins a group of calls, which is ended below whatever they answer.
        check("beginning an all-reduce", Some(self), unsafe {
            sys::ncclGroupStart()
        })?;
        let mut enqueued = ncclResult_t::ncclSuccess;
        for part in parts {
            let at = engine.float_address(part) as *mut c_void;
            // SAFETY: the view holds the elements; queue and communicator are live and of this GPU.
            let result = unsafe {
                sys::ncclAllReduce(
                    at,
                    at,
                    part.rows * part.cols,
                    sys::ncclDataType_t::ncclFloat32,
                    sys::ncclRedOp_t::ncclSum,
                    self.0,
                    stream,
                )
            };
            if !is_under_way(result) {
                enqueued = result;
            }
        }
        // SAFETY: ends the group.
        let result = unsafe { sys::ncclGroupEnd() };
        check("enqueueing an all-reduce", Some(self), enqueued)?;
        self.settle(&wait, result)?;
        let done = engine.record(Queue::Compute)?;
        while !engine.is_done(&done)? {
            wait.look()?;
            check(wait.what, Some(self), self.state()?)?;
        }
        Ok(())
    }

    /// Ends it, whatever it does: a thread of its own does that, because it may never return. Device memory stays
    /// intact but for what was being summed.
    fn abort(self) -> Result<(), CollectiveError> {
        self.apart("NCCL's abort", ABORT_DEADLINE, |communicator| {
            // SAFETY: the communicator is live, no thread is inside a call with it, and nobody has it any more.
            unsafe { sys::ncclCommAbort(communicator.0) }
        })
    }

    /// The orderly end of a communicator with nothing under way.
    fn end(self) -> Result<(), CollectiveError> {
        self.apart("NCCL's end", END_DEADLINE, |communicator| {
            // SAFETY: as for an abort.
            let mut result = unsafe { sys::ncclCommFinalize(communicator.0) };
            while result == ncclResult_t::ncclInProgress {
                std::thread::sleep(TICK);
                result = match communicator.state() {
                    Ok(state) => state,
                    Err(_) => break,
                };
            }
            // SAFETY: as for an abort.
            unsafe { sys::ncclCommDestroy(communicator.0) }
        })
    }

    /// Does the last thing with it in a thread of its own, which is left alone when it takes too long.
    fn apart(
        self,
        what: &'static str,
        deadline: Duration,
        end: impl FnOnce(Communicator) -> ncclResult_t + Send + 'static,
    ) -> Result<(), CollectiveError> {
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            // Nobody listens once the deadline is over.
            let _ = tell.send(end(self));
        });
        match told.recv_timeout(deadline) {
            Ok(result) => check(what, None, result),
            Err(_) => Err(CollectiveError::Deadline {
                what,
                after: deadline,
            }),
        }
    }
}

/// A wait for NCCL, which is one for the others.
struct Wait<'a> {
    seat: &'a Drafter,
    what: &'static str,
    begin: Instant,
    deadline: Duration,
}

impl Wait<'_> {
    /// A look at the others: whether to go on waiting. Pauses a little.
    fn look(&self) -> Result<(), Ended> {
        let segment = self.seat.segment();
        if self.seat.has_moved() || segment.suspects() & segment.step_word().members != 0 {
            return Err(Ended::Moved);
        }
        let waited = self.begin.elapsed();
        if waited > self.deadline {
            return Err(Ended::Failed(CollectiveError::Deadline {
                what: self.what,
                after: self.deadline,
            }));
        }
        self.seat.live().beat();
        if waited > SPIN {
            std::thread::sleep(TICK);
        } else {
            std::hint::spin_loop();
        }
        Ok(())
    }
}

/// Calls do not block; everything else is NCCL's default.
fn configuration() -> sys::ncclConfig_t {
    const UNSET: c_int = c_int::MIN;
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: 0xcafe_beef,
        // NCCL takes a version it does not know for one with no way not to block.
        version: 23_000,
        blocking: 0,
        cgaClusterSize: UNSET,
        minCTAs: UNSET,
        maxCTAs: UNSET,
        netName: std::ptr::null(),
        splitShare: UNSET,
        trafficClass: UNSET,
        commName: std::ptr::null(),
        collnetEnable: UNSET,
        CTAPolicy: UNSET,
        shrinkShare: UNSET,
        nvlsCTAs: UNSET,
        nChannelsPerNetPeer: UNSET,
        nvlinkCentricSched: UNSET,
        graphUsageMode: UNSET,
        numRmaCtx: UNSET,
        maxP2pPeers: UNSET,
    }
}

/// NCCL's version as it is written.
fn version() -> String {
    let mut version = 0;
    // SAFETY: valid out-pointer; the library is there.
    unsafe { sys::ncclGetVersion(&mut version) };
    format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    )
}

fn is_under_way(result: ncclResult_t) -> bool {
    matches!(
        result,
        ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress
    )
}

/// Turns an answer of NCCL's into an error with all that it says.
fn check(
    what: &'static str,
    communicator: Option<&Communicator>,
    result: ncclResult_t,
) -> Result<(), CollectiveError> {
    if is_under_way(result) {
        return Ok(());
    }
    let text = |text: *const c_char| {
        (!text.is_null()).then(|| {
            // SAFETY: what NCCL gives is a text that stays, unless it is null.
            let text = unsafe { CStr::from_ptr(text) };
            text.to_string_lossy().into_owned()
        })
    };
    let raw = communicator.map_or(std::ptr::null_mut(), |communicator| communicator.0);
    // SAFETY: plain calls; the communicator is live, or null, which they allow.
    let texts = unsafe {
        [
            text(sys::ncclGetErrorString(result)),
            text(sys::ncclGetLastError(raw)),
        ]
    };
    let said = texts.into_iter().flatten().filter(|text| !text.is_empty());
    Err(CollectiveError::Nccl {
        what,
        message: said.collect::<Vec<_>>().join(": "),
    })
}
