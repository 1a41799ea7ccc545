//! Our kernels: sources in `kernels/`, compiled by NVRTC for the device at first use and kept on disk by the
//! hash of what went into them.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use cudarc::nvrtc::{result as nvrtc, sys as nvrtc_sys};

use super::super::EngineError;
use super::device::Device;
use super::libraries::{self, Library};

/// A source file and the constants it is compiled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Program {
    /// The file's name, for messages.
    pub(super) file: &'static str,
    /// What the file says.
    pub(super) text: &'static str,
    /// Macros.
    pub(super) defines: Defines,
}

impl Program {
    /// All that is compiled.
    fn source(&self) -> String {
        [PRELUDE[0], PRELUDE[1], self.text].concat()
    }

    /// The compiler's options.
    fn options(&self, arch: &str) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={arch}"),
            "--std=c++17".to_owned(),
            "-lineinfo".to_owned(),
        ];
        let defines = self.defines.iter().filter(|(name, _)| !name.is_empty());
        options.extend(defines.map(|(name, value)| format!("-D{name}={value}")));
        options
    }
}

/// Names and values of macros; unused places have no name.
pub(super) type Defines = [(&'static str, u32); 8];

/// A program's macros, at most eight.
pub(super) const fn defines<const N: usize>(of: [(&'static str, u32); N]) -> Defines {
    let mut all = [("", 0); 8];
    let mut i = 0;
    while i < N {
        all[i] = of[i];
        i += 1;
    }
    all
}

/// Put before each source: there are no includes.
const PRELUDE: [&str; 2] = [
    include_str!("kernels/machine.cu"),
    include_str!("kernels/common.cu"),
];

/// An argument of a kernel, as the 8 bytes that the driver reads it from. A `usize` is a kernel's `i64`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arg(u64);

impl From<u64> for Arg {
    fn from(address: u64) -> Self {
        Self(address)
    }
}

impl From<usize> for Arg {
    fn from(value: usize) -> Self {
        Self(value as u64)
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Self {
        Self(u64::from(value))
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self(u64::from(value.to_bits()))
    }
}

/// The arguments of a kernel, each converted to an [`Arg`].
macro_rules! args {
    ($($value:expr),* $(,)?) => {
        [$($crate::engine::cuda::kernels::Arg::from($value)),*]
    };
}
pub(super) use args;

/// How a kernel is started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    /// Thread blocks along x, y, z.
    pub(super) grid: [usize; 3],
    /// Threads of a block.
    pub(super) threads: usize,
    /// Bytes of dynamic shared memory.
    pub(super) shared: usize,
}

impl Launch {
    /// `blocks` in a row, no dynamic shared memory.
    pub(super) fn line(blocks: usize, threads: usize) -> Self {
        Self {
            grid: [blocks, 1, 1],
            threads,
            shared: 0,
        }
    }
}

#[derive(Debug)]
struct Module(sys::CUmodule);

// SAFETY: the driver's handles are not bound to a thread.
unsafe impl Send for Module {}

#[derive(Clone, Copy, Debug)]
struct Function {
    raw: sys::CUfunction,
    /// Bytes of dynamic shared memory allowed so far.
    shared: usize,
}

// SAFETY: the driver's handles are not bound to a thread.
unsafe impl Send for Function {}

#[derive(Debug, Default)]
struct Loaded {
    modules: HashMap<Program, Module>,
    functions: HashMap<(Program, &'static str), Function>,
}

/// The compiled kernels of one device.
#[derive(Debug)]
pub(super) struct Kernels {
    device: Arc<Device>,
    cache: Option<PathBuf>,
    loaded: Mutex<Loaded>,
}

impl Kernels {
    pub(super) fn new(device: &Arc<Device>) -> Self {
        Self {
            device: Arc::clone(device),
            cache: cache_folder().map(|folder| folder.join("kernels")),
            loaded: Mutex::new(Loaded::default()),
        }
    }

    /// Enqueues kernel `name` of `program` on the compute queue.
    ///
    /// # Safety
    /// The arguments are those of the kernel, in order, and every address is good for what the kernel does.
    pub(super) unsafe fn launch(
        &self,
        program: &Program,
        name: &'static str,
        launch: Launch,
        args: &[Arg],
    ) -> Result<(), EngineError> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        self.device.bind()?;
        let function = self.function(program, name, launch.shared)?;
        let mut params: Vec<*mut c_void> = args
            .iter()
            .map(|arg| ptr::from_ref(&arg.0).cast_mut().cast())
            .collect();
        let [x, y, z] = launch.grid.map(|n| n as u32);
        // SAFETY: the caller vouches for the arguments; the driver copies them before it returns.
        let result = unsafe {
            sys::cuLaunchKernel(
                function.raw,
                x,
                y,
                z,
                launch.threads as u32,
                1,
                1,
                launch.shared as u32,
                self.device.compute,
                params.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.device.check(name, result)
    }

    /// The kernel's handle, ready for `shared` bytes of dynamic shared memory.
    fn function(
        &self,
        program: &Program,
        name: &'static str,
        shared: usize,
    ) -> Result<Function, EngineError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (*program, name);
        let mut function = match loaded.functions.get(&key) {
            Some(function) => *function,
            None => {
                if !loaded.modules.contains_key(program) {
                    let module = self.load(program)?;
                    loaded.modules.insert(*program, module);
                }
                let c_name = CString::new(name).expect("kernel names hold no zero");
                let mut raw = ptr::null_mut();
                // SAFETY: the module stays loaded as long as the context.
                self.device.check(name, unsafe {
                    sys::cuModuleGetFunction(&mut raw, loaded.modules[program].0, c_name.as_ptr())
                })?;
                Function {
                    raw,
                    shared: 32 << 10,
                }
            }
        };
        if shared > function.shared {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is live.
            self.device.check(name, unsafe {
                sys::cuFuncSetAttribute(function.raw, attribute, shared as i32)
            })?;
            function.shared = shared;
        }
        loaded.functions.insert(key, function);
        Ok(function)
    }

    /// Loads a program from the disk cache, or compiles it and puts it there.
    fn load(&self, program: &Program) -> Result<Module, EngineError> {
        let (source, options) = (program.source(), program.options(&self.device.arch));
        let file = self.cache.as_ref().map(|folder| {
            let mut hash = blake3::Hasher::new();
            for part in options.iter().chain([&source]) {
                hash.update(part.as_bytes());
                hash.update(&[0]);
            }
            let stem = program.file.trim_end_matches(".cu");
            folder.join(format!("{stem}-{}.cubin", &hash.finalize().to_hex()[..32]))
        });
        if let Some(image) = file.as_deref().and_then(|f| std::fs::read(f).ok())
            && let Ok(module) = self.load_image(program, &image)
        {
            return Ok(module);
        }
        let image = compile(&self.device.name, program, &source, &options)?;
        if let Some(file) = &file {
            // A cache that cannot be written costs the next start a compilation, nothing else.
            if let Err(error) = write_whole(file, &image) {
                tracing::debug!("kernel cache {}: {error}", file.display());
            }
        }
        self.load_image(program, &image)
    }

    fn load_image(&self, program: &Program, image: &[u8]) -> Result<Module, EngineError> {
        let mut module = ptr::null_mut();
        // SAFETY: the driver checks the image and copies it.
        self.device.check(program.file, unsafe {
            sys::cuModuleLoadData(&mut module, image.as_ptr().cast())
        })?;
        Ok(Module(module))
    }
}

/// Compiles to machine code; `device` is named when that fails.
fn compile(
    device: &str,
    program: &Program,
    source: &str,
    options: &[String],
) -> Result<Vec<u8>, EngineError> {
    libraries::require(device, Library::Nvrtc)?;
    let fail = |message: String| EngineError::Device {
        device: device.to_owned(),
        what: "compiling kernels",
        message,
    };
    let source = CString::new(source).expect("sources hold no zero");
    let file = CString::new(program.file).expect("names hold no zero");
    let handle = nvrtc::create_program(&source, Some(&file))
        .map_err(|e| fail(format!("{}: {e}", program.file)))?;
    // SAFETY: the program is live until it is destroyed below, and the source outlives it.
    unsafe {
        let compiled = nvrtc::compile_program(handle, options);
        let image = compiled.map_err(|e| {
            let log = nvrtc::get_program_log(handle).unwrap_or_default();
            let log = if log.is_empty() {
                String::new()
            } else {
                CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned()
            };
            fail(format!("{}: {e}\n{log}", program.file))
        });
        let image = image.and_then(|()| {
            let mut size = 0;
            let mut image = Vec::new();
            let mut result = nvrtc_sys::nvrtcGetCUBINSize(handle, &mut size).result();
            if result.is_ok() {
                image.resize(size, 0u8);
                result = nvrtc_sys::nvrtcGetCUBIN(handle, image.as_mut_ptr().cast()).result();
            }
            result.map_err(|e| fail(format!("{}: {e}", program.file)))?;
            Ok(image)
        });
        // A failure to free the compiler's memory changes nothing for us.
        let _ = nvrtc::destroy_program(handle);
        image
    }
}

/// Compiles a program for an architecture that need not be here, if NVRTC is; panics with what it says.
#[cfg(test)]
pub(super) fn check_compiles(program: &Program, arch: &str) {
    use std::io::Write;
    static SKIPPED: std::sync::Once = std::sync::Once::new();
    let (source, options) = (program.source(), program.options(arch));
    match compile(arch, program, &source, &options) {
        Ok(image) => assert!(!image.is_empty(), "{}", program.file),
        Err(EngineError::Device { message, .. }) if message == Library::Nvrtc.remedy() => {
            // Past the harness, which hides what passing tests print.
            SKIPPED.call_once(|| {
                let _ = writeln!(std::io::stderr(), "SKIPPED: no kernel compiled: {message}");
            });
        }
        Err(error) => panic!("{:?} for {arch}: {error}", program.defines),
    }
}

/// Where compiled kernels and measured choices are kept between runs: `$XDG_CACHE_HOME/slipstream`, or
/// `~/.cache/slipstream`.
pub(super) fn cache_folder() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    Some(base.join("slipstream"))
}

/// Writes a file under another name and renames it, so that another process never reads half of it.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().expect("cache files lie in a folder");
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    std::io::Write::write_all(&mut file, bytes)?;
    file.persist(path)?;
    Ok(())
}
