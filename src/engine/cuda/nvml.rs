//! How busy GPUs are, from the driver's management library (NVML), which needs no context on them. It belongs into
//! a helper process all the same: it loads the driver.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};

use cudarc::driver::sys;
use libloading::{Library, Symbol};

use super::libraries;

/// One GPU at one moment.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GpuUse {
    /// Its ordinal among the visible ones.
    pub ordinal: u32,
    /// Share of the last moments in which a kernel ran, 0..=1.
    pub busy: f64,
    /// Bytes of memory in use, by all processes.
    pub used: u64,
    /// Bytes of memory.
    pub total: u64,
}

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlDevice_t`.
type Handle = *mut c_void;

/// The visible GPUs as NVML knows them.
pub struct Nvml {
    library: Library,
    gpus: Vec<(u32, Handle)>,
}

impl Nvml {
    /// Opens the library and finds the visible GPUs by their unique ids.
    ///
    /// # Errors
    /// In words: no driver, or a call that fails.
    pub fn open() -> Result<Self, String> {
        libraries::require_driver("the GPUs").map_err(|error| error.to_string())?;
        // SAFETY: the driver's own library, whose initialisers only set themselves up.
        let library = unsafe { Library::new("libnvidia-ml.so.1") }
            .map_err(|error| format!("libnvidia-ml.so.1: {error}"))?;
        let mut nvml = Self {
            library,
            gpus: Vec::new(),
        };
        nvml.call("nvmlInit_v2", |name| {
            // SAFETY: the function takes nothing and returns a code.
            let init = unsafe { nvml.symbol::<unsafe extern "C" fn() -> c_int>(name) }?;
            // SAFETY: as above.
            Ok(unsafe { init() })
        })?;
        for (ordinal, id) in unique_ids()?.into_iter().enumerate() {
            // One that NVML does not know under this id, such as a slice of a GPU, has no figures.
            if let Ok(handle) = nvml.handle(&id) {
                nvml.gpus.push((ordinal as u32, handle));
            }
        }
        Ok(nvml)
    }

    /// A function of the library.
    ///
    /// # Safety
    /// `F` is its type.
    unsafe fn symbol<F>(&self, name: &str) -> Result<Symbol<'_, F>, String> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.library.get(name.as_bytes()) }.map_err(|error| format!("{name}: {error}"))
    }

    fn call(
        &self,
        name: &str,
        call: impl FnOnce(&str) -> Result<c_int, String>,
    ) -> Result<(), String> {
        match call(name)? {
            0 => Ok(()),
            code => Err(format!("{name} failed with code {code}")),
        }
    }

    fn handle(&self, id: &str) -> Result<Handle, String> {
        let id = CString::new(id).map_err(|error| error.to_string())?;
        let mut handle: Handle = std::ptr::null_mut();
        self.call("nvmlDeviceGetHandleByUUID", |name| {
            type Get = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
            // SAFETY: the function's type as NVML documents it.
            let get = unsafe { self.symbol::<Get>(name) }?;
            // SAFETY: a text that ends with zero, and a valid out-pointer.
            Ok(unsafe { get(id.as_ptr(), &mut handle) })
        })?;
        Ok(handle)
    }

    /// All GPUs now.
    ///
    /// # Errors
    /// In words: a call that fails.
    pub fn look(&self) -> Result<Vec<GpuUse>, String> {
        self.gpus
            .iter()
            .map(|&(ordinal, handle)| {
                let (mut utilization, mut memory) = (Utilization::default(), Memory::default());
                self.call("nvmlDeviceGetUtilizationRates", |name| {
                    type Get = unsafe extern "C" fn(Handle, *mut Utilization) -> c_int;
                    // SAFETY: the function's type as NVML documents it.
                    let get = unsafe { self.symbol::<Get>(name) }?;
                    // SAFETY: a handle of this library, and a valid out-pointer.
                    Ok(unsafe { get(handle, &mut utilization) })
                })?;
                self.call("nvmlDeviceGetMemoryInfo", |name| {
                    type Get = unsafe extern "C" fn(Handle, *mut Memory) -> c_int;
                    // SAFETY: the function's type as NVML documents it.
                    let get = unsafe { self.symbol::<Get>(name) }?;
                    // SAFETY: as above.
                    Ok(unsafe { get(handle, &mut memory) })
                })?;
                Ok(GpuUse {
                    ordinal,
                    busy: f64::from(utilization.gpu) / 100.0,
                    used: memory.used,
                    total: memory.total,
                })
            })
            .collect()
    }
}

/// The ids of the visible GPUs, in the order of their ordinals, as NVML writes them.
fn unique_ids() -> Result<Vec<String>, String> {
    let check = |call: &str, result: sys::CUresult| match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(format!("{call} failed: {other:?}")),
    };
    // SAFETY: plain driver calls with valid out-pointers; the library is present.
    unsafe {
        check("cuInit", sys::cuInit(0))?;
        let mut count = 0;
        check("cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
        (0..count)
            .map(|ordinal| {
                let (mut device, mut id) = (0, sys::CUuuid { bytes: [0; 16] });
                check("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal))?;
                check("cuDeviceGetUuid", sys::cuDeviceGetUuid_v2(&mut id, device))?;
                Ok(unique_id(&id.bytes.map(|byte| byte as u8)))
            })
            .collect()
    }
}

/// `GPU-` and the bytes in hexadecimal, in groups of 4, 2, 2, 2 and 6.
fn unique_id(bytes: &[u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (place, byte) in bytes.iter().enumerate() {
        if matches!(place, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_written_as_nvml_writes_them() {
        let bytes = std::array::from_fn(|place| place as u8 * 16 + 1);
        assert_eq!(
            unique_id(&bytes),
            "GPU-01112131-4151-6171-8191-a1b1c1d1e1f1"
        );
    }
}
