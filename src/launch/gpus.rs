//! What GPUs there are: asked of a short-lived child, since the launcher itself never loads CUDA.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::spawn::program;
use crate::control::Role;
use crate::engine::cuda;

/// The argument that makes a target worker print [`report`] and leave.
pub const ARGUMENT: &str = "--gpu-facts";
/// The argument that makes a target worker do what the launcher was asked for, on a GPU; see [`again`].
pub const AGAIN: &str = "--as-launcher-on-gpu";
/// Drivers that come up cold take seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// One visible GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its model.
    pub name: String,
    /// Bytes of memory.
    pub total: u64,
    /// Of these, free.
    pub free: u64,
    /// Several processes may use it at once.
    pub shareable: bool,
}

impl Gpu {
    /// Why it cannot be used, in one line.
    pub fn problem(&self, ordinal: u32) -> Option<String> {
        if !self.shareable {
            return Some(format!(
                "GPU {ordinal} ({}) is in exclusive or prohibited compute mode: set it to default (nvidia-smi -c 0) or choose another",
                self.name
            ));
        }
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        (self.free < self.total / 10).then(|| {
            format!(
                "GPU {ordinal} ({}) is busy: {:.1} of {:.1} GiB are free; see nvidia-smi for who holds them",
                self.name,
                gib(self.free),
                gib(self.total)
            )
        })
    }
}

type Answer = Result<Vec<Gpu>, String>;

/// The visible GPUs, in the order of their numbers.
///
/// # Errors
/// In words: no driver, or what it said.
pub fn visible() -> Result<Vec<Gpu>, String> {
    let program = program(Role::Target).map_err(|error| error.to_string())?;
    let mut child = Command::new(program)
        .arg(ARGUMENT)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("asking for GPUs: {error}"))?;
    let began = Instant::now();
    while child
        .try_wait()
        .map_err(|error| error.to_string())?
        .is_none()
    {
        if began.elapsed() > PATIENCE {
            // It may sit in the driver; init reaps it then.
            let _ = child.kill();
            return Err(format!("the driver did not answer within {PATIENCE:?}"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let mut text = String::new();
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut text)
            .map_err(|error| error.to_string())?;
    }
    let answer: Answer = serde_json::from_str(&text)
        .map_err(|_| "the process that asks the driver died".to_owned())?;
    answer
}

/// The GPU for a command that needs one: the given one, or the first visible one; none for `cpu` or where no GPU
/// is visible.
///
/// # Errors
/// In words: the given one does not exist, or the one to use cannot be used.
pub fn one(given: Option<u32>, cpu: bool) -> Result<Option<u32>, String> {
    if cpu {
        return Ok(None);
    }
    let found = match (visible(), given) {
        (Ok(found), _) => found,
        (Err(what), Some(_)) => return Err(format!("--gpu: {what}")),
        (Err(what), None) => {
            tracing::debug!("no GPU: {what}");
            return Ok(None);
        }
    };
    if given.is_none() && found.is_empty() {
        return Ok(None);
    }
    let ordinal = given.unwrap_or(0);
    let Some(gpu) = found.get(ordinal as usize) else {
        return Err(format!(
            "--gpu: there is no GPU {ordinal}: {} visible, counted from 0",
            found.len()
        ));
    };
    gpu.problem(ordinal).map_or(Ok(Some(ordinal)), Err)
}

/// Does what this process was asked for in a child that may load CUDA, and returns its exit code.
///
/// # Errors
/// In words: the child cannot be started.
pub fn again(gpu: u32) -> Result<u8, String> {
    let program = program(Role::Target).map_err(|error| error.to_string())?;
    let status = Command::new(&program)
        .arg(AGAIN)
        .arg(gpu.to_string())
        .args(std::env::args_os().skip(1))
        .env("LD_LIBRARY_PATH", library_path())
        .status()
        .map_err(|error| format!("starting {}: {error}", program.display()))?;
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// What the child prints.
pub fn report() -> String {
    let found = cuda::devices().map_err(|error| error.to_string());
    let answer: Answer = found.map(|devices| {
        let gpu = |facts: cuda::DeviceFacts| Gpu {
            name: facts.name,
            total: facts.total_bytes,
            free: facts.free_bytes,
            shareable: facts.shareable,
        };
        devices.into_iter().map(gpu).collect()
    });
    serde_json::to_string(&answer).unwrap_or_default()
}

/// `LD_LIBRARY_PATH` with which a worker finds the CUDA libraries of toolkits and of Python packages.
pub fn library_path() -> OsString {
    let mut folders = cuda::library_folders();
    if let Some(given) = std::env::var_os("LD_LIBRARY_PATH") {
        folders.splice(0..0, std::env::split_paths(&given));
    }
    std::env::join_paths(folders).unwrap_or_default()
}
    folders.extend(cuda::linked_nccl());
