//! One worker process: fork and exec, with nothing inherited that is not on a list, tied to its launcher's life.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::libc;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::control::{Role, WorkerName};

/// Why a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// A worker's program is not where the launcher's is.
    #[error("{program} is not beside the launcher in {}; build all three programs with `cargo build --release`, or install them with `cargo install --path .`", folder.display())]
    NoProgram {
        /// The program.
        program: &'static str,
        /// Where it was looked for.
        folder: PathBuf,
    },
    /// The system refused.
    #[error("starting {worker} ({}): {what}: {source}", program.display())]
    System {
        /// Whom.
        worker: WorkerName,
        /// Its program.
        program: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The launcher cannot watch itself; the kernel is older than 5.3.
    #[error("opening a pidfd: {0}; Linux 5.3 or newer is needed")]
    Pidfd(io::Error),
}

/// What to start.
#[derive(Debug)]
pub struct WorkerSpec<'a> {
    /// Who it will be.
    pub worker: WorkerName,
    /// Its program; see [`program`].
    pub program: PathBuf,
    /// Arguments before those that every worker gets; none for the workers of this package.
    pub arguments: Vec<OsString>,
    /// More environment.
    pub environment: Vec<(OsString, OsString)>,
    /// Threads it may compute with.
    pub threads: usize,
    /// Descriptors that it inherits, by the name that it asks for them with.
    pub descriptors: Vec<(&'static str, BorrowedFd<'a>)>,
    /// Where its output goes.
    pub log: PathBuf,
    /// It gets this process's terminal instead, with Ctrl-C: its program is an interactive debugger.
    pub terminal: bool,
}

/// A started worker.
#[derive(Debug)]
pub struct Spawned {
    /// Who.
    pub worker: WorkerName,
    /// Its process.
    pub pid: u32,
    /// Readable once it is dead.
    pub pidfd: OwnedFd,
    /// At end-of-file as soon as it begins to die.
    pub liveness: OwnedFd,
    /// Where its output goes.
    pub log: PathBuf,
}

/// The path of a role's program: beside this process's own executable.
///
/// # Errors
///
/// [`SpawnError::NoProgram`] when it is not there.
pub fn program(role: Role) -> Result<PathBuf, SpawnError> {
    let own = std::env::current_exe().unwrap_or_default();
    let folder = own.parent().unwrap_or(Path::new("."));
    let path = folder.join(role.program());
    if path.is_file() {
        Ok(path)
    } else {
        Err(SpawnError::NoProgram {
            program: role.program(),
            folder: folder.to_owned(),
        })
    }
}

/// Starts workers. They die with the *thread* that starts them, so make it on the main thread; it cannot leave
/// the thread that made it.
#[derive(Debug)]
pub struct Spawner {
    myself: OwnedFd,
    stays_here: PhantomData<*const ()>,
}

impl Spawner {
    /// Of this thread.
    ///
    /// # Errors
    ///
    /// [`SpawnError::Pidfd`].
    pub fn new() -> Result<Self, SpawnError> {
        let myself = pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
            .map_err(|error| SpawnError::Pidfd(error.into()))?;
        Ok(Self {
            myself,
            stays_here: PhantomData,
        })
    }

    /// Starts one worker; `socket` is where it connects to.
    ///
    /// # Errors
    ///
    /// [`SpawnError::System`] with what the system refused.
    pub fn spawn(&self, spec: &WorkerSpec<'_>, socket: &str) -> Result<Spawned, SpawnError> {
        let failed = |what: &'static str| {
            move |source: io::Error| SpawnError::System {
                worker: spec.worker,
                program: spec.program.clone(),
                what,
                source,
            }
        };
        let (liveness, held) = io::pipe().map_err(failed("making a pipe"))?;
        let log = open_log(&spec.log).map_err(failed("opening its log"))?;
        let errors = log.try_clone().map_err(failed("opening its log"))?;

        let mut command = Command::new(&spec.program);
        command.args(&spec.arguments);
        command.args(["--rank", &spec.worker.rank.to_string()]);
        command.args(["--launcher", &std::process::id().to_string()]);
        command.args(["--threads", &spec.threads.to_string()]);
        command.args(["--socket", socket]);
        let mut inherited: Vec<RawFd> = Vec::new();
        let built_in = [
            ("launcher", self.myself.as_raw_fd()),
            ("liveness", held.as_raw_fd()),
        ];
        let passed = spec
            .descriptors
            .iter()
            .map(|(name, fd)| (*name, fd.as_raw_fd()));
        for (name, number) in built_in.into_iter().chain(passed) {
            command.arg("--fd").arg(format!("{name}={number}"));
            inherited.push(number);
        }
        command.env("RAYON_NUM_THREADS", spec.threads.to_string());
        command.envs(spec.environment.iter().map(|(key, value)| (key, value)));
        if !spec.terminal {
            command.stdin(Stdio::null()).stdout(log).stderr(errors);
            // A Ctrl-C at the terminal reaches the launcher alone, which decides what it means.
            command.process_group(0);
        }
        let (launcher, terminal) = (std::process::id(), spec.terminal);
        // SAFETY: the closure runs between fork and exec and makes system calls only: it neither allocates nor
        // takes a lock, and reads memory copied from the parent.
        unsafe {
            command.pre_exec(move || tie_to_launcher(launcher, &inherited, terminal));
        }
        let child = command.spawn().map_err(failed("running the program"))?;
        let pid = child.id();
        // It cannot have been reaped yet, so the number is still its own.
        let number = Pid::from_raw(pid as i32).expect("a child's pid is not zero");
        let pidfd = pidfd_open(number, PidfdFlags::empty())
            .map_err(|error| SpawnError::Pidfd(error.into()))?;
        Ok(Spawned {
            worker: spec.worker,
            pid,
            pidfd,
            liveness: liveness.into(),
            log: spec.log.clone(),
        })
    }
}

fn open_log(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    OpenOptions::new().create(true).append(true).open(path)
}

/// In the child, before exec: it dies with the launcher, ignores what a terminal or a job manager sends to
/// everybody, and keeps no descriptor but `inherited`.
fn tie_to_launcher(launcher: u32, inherited: &[RawFd], terminal: bool) -> io::Result<()> {
    // SAFETY: prctl, getppid and signal take plain numbers.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
            return Err(io::Error::last_os_error());
        }
        // The launcher may have died before prctl; then nobody would send the signal.
        if libc::getppid() as u32 != launcher {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        for signal in [libc::SIGINT, libc::SIGHUP, libc::SIGUSR1] {
            // A debugger on the terminal is interrupted by Ctrl-C.
            if signal != libc::SIGINT || !terminal {
                libc::signal(signal, libc::SIG_IGN);
            }
        }
    }
    close_all_on_exec();
    for &number in inherited {
        // SAFETY: fcntl takes plain numbers.
        if unsafe { libc::fcntl(number, libc::F_SETFD, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Marks everything above standard error to be closed by exec, also what a library opened without saying so.
fn close_all_on_exec() {
    // SAFETY: both calls take plain numbers and change only flags of this process's descriptors.
    unsafe {
        let all = libc::syscall(
            libc::SYS_close_range,
            3,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
        if all != 0 {
            // Before Linux 5.11: one by one, as far as descriptors usually go.
            for number in 3..4096 {
                libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC);
            }
        }
    }
}
