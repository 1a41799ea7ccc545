//! One GPU: its context, its queues, its events, and how the driver's errors become ours.

use std::ffi::CStr;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::super::{EngineError, Queue};
use super::libraries;

/// CUDA 12.8: the oldest driver with every function that is called.
const OLDEST_DRIVER: i32 = 12_080;

/// What a GPU is, read without keeping anything of it open.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DeviceFacts {
    /// Ordinal among the visible GPUs.
    pub ordinal: usize,
    /// The driver's name for it.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Bytes of device memory.
    pub total_bytes: u64,
    /// Bytes nobody uses now.
    pub free_bytes: u64,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Whether the driver lets more than one process use it.
    pub shareable: bool,
}

/// The visible GPUs. Loads the driver and opens a context on each GPU for a moment, so it belongs into a
/// short-lived process, not into the launcher.
///
/// # Errors
/// When the driver's library is missing or the driver refuses.
pub fn devices() -> Result<Vec<DeviceFacts>, EngineError> {
    libraries::require_driver("the GPUs")?;
    let here = "the GPUs";
    // SAFETY: plain driver calls with valid out-pointers; the library is present.
    unsafe {
        check(here, "cuInit", sys::cuInit(0))?;
        let mut count = 0;
        check(here, "cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
        (0..count).map(|ordinal| facts(ordinal)).collect()
    }
}

/// Reads one device.
///
/// # Safety
/// `cuInit` succeeded and `ordinal` is below the device count.
unsafe fn facts(ordinal: i32) -> Result<DeviceFacts, EngineError> {
    let here = format!("GPU {ordinal}");
    let mut device = 0;
    // SAFETY: valid out-pointers; the context retained here is released before returning.
    unsafe {
        check(&here, "cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal))?;
        let name = device_name(&here, device)?;
        let mut total = 0;
        check(
            &here,
            "cuDeviceTotalMem",
            sys::cuDeviceTotalMem_v2(&mut total, device),
        )?;
        let attribute = |which| device_attribute(&here, device, which);
        use sys::CUdevice_attribute as A;
        let capability = (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shareable = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)? == 0;
        let mut context = ptr::null_mut();
        check(
            &here,
            "cuDevicePrimaryCtxRetain",
            sys::cuDevicePrimaryCtxRetain(&mut context, device),
        )?;
        let mut free = 0;
        let read = check(&here, "cuCtxSetCurrent", sys::cuCtxSetCurrent(context)).and_then(|()| {
            let mut all = 0;
            check(
                &here,
                "cuMemGetInfo",
                sys::cuMemGetInfo_v2(&mut free, &mut all),
            )
        });
        sys::cuDevicePrimaryCtxRelease_v2(device);
        read?;
        Ok(DeviceFacts {
            ordinal: ordinal as usize,
            name,
            capability,
            total_bytes: total as u64,
            free_bytes: free as u64,
            multiprocessors,
            shareable,
        })
    }
}

/// The driver's name of `device`.
///
/// # Safety
/// `cuInit` succeeded and `device` is a handle it gave.
unsafe fn device_name(here: &str, device: sys::CUdevice) -> Result<String, EngineError> {
    let mut name = [0 as std::ffi::c_char; 128];
    // SAFETY: the buffer's length is passed; the driver ends the text with a zero.
    unsafe {
        check(
            here,
            "cuDeviceGetName",
            sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device),
        )?;
        Ok(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
    }
}

/// One attribute of `device`.
///
/// # Safety
/// As for [`device_name`].
unsafe fn device_attribute(
    here: &str,
    device: sys::CUdevice,
    which: sys::CUdevice_attribute,
) -> Result<u32, EngineError> {
    let mut value = 0;
    // SAFETY: valid out-pointer.
    let result = unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) };
    check(here, "cuDeviceGetAttribute", result)?;
    Ok(value as u32)
}

/// Turns a driver result into an [`EngineError`].
pub(super) fn check(
    device: &str,
    what: &'static str,
    result: sys::CUresult,
) -> Result<(), EngineError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: the driver writes a pointer to a static text, or leaves null.
    let message = unsafe {
        sys::cuGetErrorString(result, &mut text);
        if text.is_null() {
            format!("{result:?}")
        } else {
            format!("{} ({result:?})", CStr::from_ptr(text).to_string_lossy())
        }
    };
    Err(EngineError::Device {
        device: device.to_owned(),
        what,
        message,
    })
}

/// The context and queues of one GPU, shared by the engine, its buffers and its events.
#[derive(Debug)]
pub(super) struct Device {
    /// `GPU 0 (NVIDIA H200)`.
    pub(super) name: String,
    /// NVRTC's name of the architecture, `sm_90a`.
    pub(super) arch: String,
    /// Whether its tensor cores take products of whole warpgroups (Hopper).
    pub(super) has_warpgroups: bool,
    /// Number of multiprocessors.
    pub(super) multiprocessors: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// All operations.
    pub(super) compute: sys::CUstream,
    copy_in: sys::CUstream,
    copy_out: sys::CUstream,
    /// Where memory that a copy still reads is freed, so that no other queue waits for the copy.
    pub(super) reclaim: sys::CUstream,
    pool: sys::CUmemoryPool,
    idle_events: Mutex<Vec<EventHandle>>,
}

/// A driver event that may move between threads.
#[derive(Debug)]
struct EventHandle(sys::CUevent);

// SAFETY: the driver's handles are not bound to a thread.
unsafe impl Send for EventHandle {}

// SAFETY: the driver's handles are not bound to a thread, and the list of events is behind a mutex.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens GPU `ordinal`.
    pub(super) fn open(ordinal: usize) -> Result<Arc<Self>, EngineError> {
        let here = format!("GPU {ordinal}");
        libraries::require_driver(&here)?;
        // SAFETY: plain driver calls with valid out-pointers, in the order that the driver asks for.
        unsafe {
            check(&here, "cuInit", sys::cuInit(0))?;
            let mut version = 0;
            check(
                &here,
                "cuDriverGetVersion",
                sys::cuDriverGetVersion(&mut version),
            )?;
            if version < OLDEST_DRIVER {
                return Err(EngineError::Device {
                    device: here,
                    what: "opening the GPU",
                    message: format!(
                        "its driver supports CUDA {}.{}; update the NVIDIA driver to 570 or later",
                        version / 1000,
                        version % 1000 / 10
                    ),
                });
            }
            let mut count = 0;
            check(&here, "cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
            if ordinal >= count as usize {
                return Err(EngineError::Device {
                    device: here,
                    what: "opening the GPU",
                    message: format!("only {count} GPUs are visible (CUDA_VISIBLE_DEVICES?)"),
                });
            }
            let mut device = 0;
            check(
                &here,
                "cuDeviceGet",
                sys::cuDeviceGet(&mut device, ordinal as i32),
            )?;
            let name = format!("{here} ({})", device_name(&here, device)?);
            use sys::CUdevice_attribute as A;
            let attribute = |which| device_attribute(&name, device, which);
            let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
            let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
            if major < 8 {
                return Err(EngineError::Device {
                    device: name,
                    what: "opening the GPU",
                    message: format!(
                        "compute capability {major}.{minor}; bf16 matrix units need 8.0 or later"
                    ),
                });
            }
            if attribute(A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? == 0 {
                return Err(EngineError::Device {
                    device: name,
                    what: "opening the GPU",
                    message: "its driver has no stream-ordered memory pools".into(),
                });
            }
            let multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
            let mut context = ptr::null_mut();
            check(
                &name,
                "opening a context",
                sys::cuDevicePrimaryCtxRetain(&mut context, device),
            )?;
            check(&name, "cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            let mut pool = ptr::null_mut();
            check(
                &name,
                "cuDeviceGetDefaultMemPool",
                sys::cuDeviceGetDefaultMemPool(&mut pool, device),
            )?;
            // Memory that was freed stays in the pool: a step allocates nothing from the driver once it
            // has run before.
            let mut keep = u64::MAX;
            check(
                &name,
                "cuMemPoolSetAttribute",
                sys::cuMemPoolSetAttribute(
                    pool,
                    sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                    (&raw mut keep).cast(),
                ),
            )?;
            let mut streams = [ptr::null_mut(); 4];
            for stream in &mut streams {
                check(
                    &name,
                    "cuStreamCreate",
                    sys::cuStreamCreate(stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32),
                )?;
            }
            let [compute, copy_in, copy_out, reclaim] = streams;
            Ok(Arc::new(Self {
                arch: if major == 9 {
                    "sm_90a".into()
                } else {
                    format!("sm_{major}{minor}")
                },
                has_warpgroups: major == 9,
                name,
                multiprocessors,
                device,
                context,
                compute,
                copy_in,
                copy_out,
                reclaim,
                pool,
                idle_events: Mutex::new(Vec::new()),
            }))
        }
    }

    /// Makes this GPU's context the calling thread's.
    pub(super) fn bind(&self) -> Result<(), EngineError> {
        // SAFETY: the context lives as long as `self`.
        self.check("cuCtxSetCurrent", unsafe {
            sys::cuCtxSetCurrent(self.context)
        })
    }

    /// [`check`] with this GPU's name.
    pub(super) fn check(
        &self,
        what: &'static str,
        result: sys::CUresult,
    ) -> Result<(), EngineError> {
        check(&self.name, what, result)
    }

    /// An error of this GPU.
    pub(super) fn error(&self, what: &'static str, message: impl Into<String>) -> EngineError {
        EngineError::Device {
            device: self.name.clone(),
            what,
            message: message.into(),
        }
    }

    /// The driver's handle of a queue.
    pub(super) fn stream(&self, queue: Queue) -> sys::CUstream {
        match queue {
            Queue::Compute => self.compute,
            Queue::CopyIn => self.copy_in,
            Queue::CopyOut => self.copy_out,
        }
    }

    /// Records a point in `stream`.
    pub(super) fn record(self: &Arc<Self>, stream: sys::CUstream) -> Result<Event, EngineError> {
        self.bind()?;
        let idle = self
            .idle_events
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let handle = match idle {
            Some(handle) => handle,
            None => {
                let mut raw = ptr::null_mut();
                let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
                // SAFETY: valid out-pointer; the context is current.
                self.check("cuEventCreate", unsafe {
                    sys::cuEventCreate(&mut raw, flags)
                })?;
                EventHandle(raw)
            }
        };
        let event = Event {
            device: Arc::clone(self),
            handle: Some(handle),
        };
        // SAFETY: event and stream are of this context.
        self.check("cuEventRecord", unsafe {
            sys::cuEventRecord(event.raw(), stream)
        })?;
        Ok(event)
    }

    /// Makes `stream` wait for `event`.
    pub(super) fn wait(&self, stream: sys::CUstream, event: &Event) -> Result<(), EngineError> {
        self.bind()?;
        // SAFETY: event and stream are of this context.
        self.check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(stream, event.raw(), 0)
        })
    }

    /// Bytes of device memory in use now, at the highest point, and held by the pool.
    pub(super) fn pool_bytes(&self) -> Result<[u64; 3], EngineError> {
        use sys::CUmemPool_attribute as A;
        self.bind()?;
        let read = |which| {
            let mut value = 0u64;
            // SAFETY: these attributes are 64-bit numbers.
            let result =
                unsafe { sys::cuMemPoolGetAttribute(self.pool, which, (&raw mut value).cast()) };
            self.check("cuMemPoolGetAttribute", result).map(|()| value)
        };
        Ok([
            read(A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            read(A::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
            read(A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
        ])
    }

    /// Bytes free on the GPU and in all.
    pub(super) fn memory_bytes(&self) -> Result<[u64; 2], EngineError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid out-pointers; the context is current.
        self.check("cuMemGetInfo", unsafe {
            sys::cuMemGetInfo_v2(&mut free, &mut total)
        })?;
        Ok([free as u64, total as u64])
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let events = std::mem::take(
            self.idle_events
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner),
        );
        // SAFETY: nothing refers to these handles any more: buffers and events hold an `Arc` of the device.
        // Results are ignored: at this point there is nobody left to act on them.
        unsafe {
            if sys::cuCtxSetCurrent(self.context) != sys::CUresult::CUDA_SUCCESS {
                return;
            }
            for event in events {
                sys::cuEventDestroy_v2(event.0);
            }
            for stream in [self.compute, self.copy_in, self.copy_out, self.reclaim] {
                sys::cuStreamDestroy_v2(stream);
            }
            sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// A point in a queue of a GPU.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    /// Always there until drop gives it back.
    handle: Option<EventHandle>,
}

impl Event {
    pub(super) fn raw(&self) -> sys::CUevent {
        self.handle.as_ref().map_or(ptr::null_mut(), |h| h.0)
    }

    /// Whether the queue got here.
    pub(super) fn is_done(&self) -> Result<bool, EngineError> {
        self.device.bind()?;
        // SAFETY: the event is live.
        match unsafe { sys::cuEventQuery(self.raw()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => self
                .device
                .check("a kernel or copy before this point", result)
                .map(|()| true),
        }
    }

    /// Waits on the host, spinning at first: most waits are short.
    pub(super) fn finish(&self, what: &'static str, deadline: Duration) -> Result<(), EngineError> {
        let begin = Instant::now();
        while !self.is_done()? {
            let waited = begin.elapsed();
            if waited > deadline {
                return Err(EngineError::Timeout {
                    device: self.device.name.clone(),
                    what,
                    after: deadline,
                });
            }
            if waited < Duration::from_micros(100) {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // A recorded event may be recorded again: waits that refer to the earlier point keep it.
        if let Some(handle) = self.handle.take() {
            self.device
                .idle_events
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(handle);
        }
    }
}
