//! On what one process computes: `launcher eval` and `launcher generate`, which need no others beside them.
//!
//! The launcher never loads CUDA, and the loader finds CUDA's libraries only if their folders were on its path when
//! the process began. So for GPUs the launcher replaces itself by a target worker, which goes on with the same words.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::cli::{self, Invocation};
use super::options::DeviceOptions;
use super::places::{Device, machine_threads, parse_gpus};
use super::prepare::Refusal;
use super::spawn::program;
use super::{evaluate, generate, gpus};
use crate::control::Role;

/// The argument that makes a target worker do what the launcher was asked for. GPUs and the launcher's own words
/// follow.
pub const AS_LAUNCHER: &str = "--as-launcher-on-gpus";

/// At least one device, all of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices(Vec<Device>);

/// The CPU.
impl Default for Devices {
    fn default() -> Self {
        Self(vec![Device::Cpu {
            threads: machine_threads(),
        }])
    }
}

impl Devices {
    /// The CPU; for the GPUs that were asked for, or all visible ones, it does not return: this process becomes a
    /// worker.
    ///
    /// # Errors
    /// GPUs that were asked for and cannot be used, or a worker that cannot be started.
    pub fn choose(options: &DeviceOptions) -> Result<Self, Refusal> {
        if options.cpu {
            return Ok(Self::default());
        }
        let gpus = gpus::pick(options.gpus.as_deref()).map_err(Refusal)?;
        if gpus.is_empty() {
            return Ok(Self::default());
        }
        Err(become_worker(&gpus))
    }

    /// The first.
    pub fn first(&self) -> Device {
        self.0[0]
    }

    /// All of them.
    pub fn all(&self) -> &[Device] {
        &self.0
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.0.iter().map(Device::to_string).collect();
        f.write_str(&names.join(", "))
    }
}

/// Replaces this process by a target worker with the same words; returns only why it could not.
fn become_worker(gpus: &[u32]) -> Refusal {
    let program = match program(Role::Target) {
        Ok(program) => program,
        Err(error) => return Refusal(vec![error.to_string()]),
    };
    let list: Vec<String> = gpus.iter().map(u32::to_string).collect();
    let error = Command::new(&program)
        .arg(AS_LAUNCHER)
        .arg(list.join(","))
        .args(env::args_os().skip(1))
        .env("LD_LIBRARY_PATH", gpus::library_path())
        .exec();
    Refusal(vec![format!("starting {}: {error}", program.display())])
}

/// The worker's part: `words` are the GPUs and the launcher's own words. Returns its exit code.
pub fn as_launcher(mut words: impl Iterator<Item = OsString>) -> u8 {
    let gpus = words.next();
    let gpus = gpus.and_then(|word| parse_gpus(word.to_str()?).ok());
    let launcher = std::iter::once(OsString::from("launcher"));
    let invocation = match cli::parse(launcher.chain(words)) {
        Ok(invocation) => invocation,
        Err(error) => return error.report(),
    };
    let on = |gpus: Vec<u32>| {
        let gpus = gpus.into_iter();
        Devices(gpus.map(|ordinal| Device::Gpu { ordinal }).collect())
    };
    match (gpus, invocation) {
        (Some(gpus), Invocation::Eval(options)) => evaluate::evaluate_on(&options, &on(gpus)),
        (Some(gpus), Invocation::Generate(options)) => generate::generate_on(&options, &on(gpus)),
        _ => {
            eprintln!("error: only the launcher gives {AS_LAUNCHER}");
            2
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_taken_where_it_was_asked_for() {
        let options = DeviceOptions {
            cpu: true,
            gpus: None,
        };
        let devices = Devices::choose(&options).unwrap();
        assert_eq!(devices.all().len(), 1);
        assert!(matches!(devices.first(), Device::Cpu { threads } if threads > 0));
        assert!(devices.to_string().contains("CPU thread"));
    }
}
