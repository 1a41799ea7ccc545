//! `launcher attach`: a debugger on one worker.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use super::stacks::runs;
use super::{WatchError, find_live, refuse};
use crate::control::WorkerName;

/// What `launcher attach` was asked for.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// The run; `None` is the newest that is going on.
    pub run: Option<PathBuf>,
    /// Whom.
    pub worker: WorkerName,
    /// The debugger's program; `None` takes what is there.
    pub debugger: Option<String>,
    /// Only print the command.
    pub print: bool,
}

/// Becomes the debugger; returns the launcher's exit code if that cannot be, or after printing.
pub fn attach(options: &AttachOptions) -> u8 {
    let (program, pid) = match choose(options) {
        Ok(chosen) => chosen,
        Err(error) => return refuse(&error),
    };
    if options.print {
        println!("{program} -p {pid}");
        return 0;
    }
    eprintln!(
        "{program} on {} (process {pid}); it stands still until `continue` or `detach`, and deadlines wait for it",
        options.worker
    );
    let source = Command::new(&program).args(["-p", &pid.to_string()]).exec();
    refuse(&WatchError::Debugger { program, source })
}

fn choose(options: &AttachOptions) -> Result<(String, u32), WatchError> {
    let mut run = find_live(options.run.as_deref())?;
    let (look, _) = run.look();
    let found = look
        .workers
        .iter()
        .find(|worker| worker.name == options.worker);
    let Some(worker) = found else {
        let present: Vec<String> = look
            .workers
            .iter()
            .map(|worker| worker.name.to_string())
            .collect();
        return Err(WatchError::NoWorker {
            path: run.path.clone(),
            worker: options.worker,
            present: present.join(", "),
        });
    };
    if worker.process.is_none() {
        return Err(WatchError::NoProcess {
            path: run.path.clone(),
            worker: options.worker,
            why: worker.doing.clone(),
        });
    }
    let on_gpu = worker
        .place
        .as_deref()
        .is_some_and(|place| place.starts_with("GPU"));
    let program = match &options.debugger {
        Some(program) => program.clone(),
        None => preferred(on_gpu)
            .find(|program| runs(program))
            .ok_or(WatchError::NoDebugger)?
            .to_owned(),
    };
    Ok((program, worker.pid))
}

/// Debuggers, the most telling first: all of them take `-p PID`.
fn preferred(on_gpu: bool) -> impl Iterator<Item = &'static str> {
    let first = if on_gpu { Some("cuda-gdb") } else { None };
    first
        .into_iter()
        .chain(["rust-gdb", "gdb", "rust-lldb", "lldb"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_worker_gets_the_debugger_that_sees_kernels() {
        assert_eq!(preferred(true).next(), Some("cuda-gdb"));
        assert_eq!(preferred(false).next(), Some("rust-gdb"));
    }
}
