//! A worker's end: its arguments, its inherited descriptors, its watchdog and its channel.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::process::ExitCode;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ipc_channel::IpcError;
use ipc_channel::ipc::{self, IpcReceiver, IpcSender};
use nix::libc;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;

use super::{ControlError, FromWorker, Loaded, Role, ToWorker, WorkerName};
use crate::launch::process;

/// How long the launcher may take to open its door and to send the plan.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the watchdog looks whether a SIGTERM of somebody else is due.
const WATCH: Duration = Duration::from_millis(200);
/// How long a worker that somebody else sent SIGTERM waits for the launcher to say that all of them stop.
const GRACE: Duration = Duration::from_secs(2);

/// In the environment of a worker that shall wait for a debugger before it loads.
pub const WAIT_FOR_DEBUGGER: &str = "SLIPSTREAM_WAIT_FOR_DEBUGGER";
/// How often such a worker says that it waits, which is its sign of life.
const WAITING: Duration = Duration::from_secs(5);

/// What the launcher passes on a worker's command line.
#[derive(Debug, PartialEq, Eq)]
struct Arguments {
    rank: u32,
    launcher: i32,
    socket: String,
    threads: usize,
    descriptors: BTreeMap<String, RawFd>,
}

impl Arguments {
    fn read(
        program: &'static str,
        words: impl Iterator<Item = OsString>,
    ) -> Result<Self, ControlError> {
        let wrong = |what: &str| ControlError::NotStartedByLauncher {
            program,
            what: what.to_owned(),
        };
        let mut given = BTreeMap::new();
        let mut descriptors = BTreeMap::new();
        let mut words = words.map(|word| word.to_string_lossy().into_owned());
        while let Some(word) = words.next() {
            let value = words
                .next()
                .ok_or_else(|| wrong(&format!("{word} has no value")))?;
            match word.as_str() {
                "--fd" => {
                    let (name, number) = value
                        .split_once('=')
                        .ok_or_else(|| wrong("--fd is not NAME=N"))?;
                    let number = number.parse().map_err(|_| wrong("--fd is not NAME=N"))?;
                    descriptors.insert(name.to_owned(), number);
                }
                "--rank" | "--launcher" | "--socket" | "--threads" => {
                    given.insert(word, value);
                }
                _ => return Err(wrong(&format!("unknown argument {word}"))),
            }
        }
        let number = |name: &str| -> Result<u32, ControlError> {
            let value = given
                .get(name)
                .ok_or_else(|| wrong(&format!("no {name}")))?;
            value
                .parse()
                .map_err(|_| wrong(&format!("{name} is not a number")))
        };
        let launcher = number("--launcher")?;
        Ok(Self {
            rank: number("--rank")?,
            launcher: i32::try_from(launcher).map_err(|_| wrong("--launcher is not a process"))?,
            threads: number("--threads")?.max(1) as usize,
            socket: given
                .remove("--socket")
                .ok_or_else(|| wrong("no --socket"))?,
            descriptors,
        })
    }
}

/// Sends messages to the launcher; cheap to copy and usable from every thread.
#[derive(Clone, Debug)]
pub struct Reporter {
    sender: IpcSender<FromWorker>,
}

impl Reporter {
    /// Sends one message.
    ///
    /// # Errors
    ///
    /// [`ControlError::Closed`] when the launcher is gone; the watchdog ends this process then.
    pub fn send(&self, message: FromWorker) -> Result<(), ControlError> {
        self.sender
            .send(message)
            .map_err(|_| ControlError::Closed("launcher"))
    }

    /// Says what is being loaded and how far that is, 0..=1.
    ///
    /// # Errors
    ///
    /// As [`Reporter::send`].
    pub fn loading(&self, what: &str, fraction: f32) -> Result<(), ControlError> {
        self.send(FromWorker::Loading {
            what: what.to_owned(),
            fraction,
        })
    }

    /// Says that loading is over.
    ///
    /// # Errors
    ///
    /// As [`Reporter::send`].
    pub fn ready(&self, loaded: Loaded) -> Result<(), ControlError> {
        self.send(FromWorker::Ready(loaded))
    }

    /// Logs a warning and shows it to the person at the console.
    pub fn warn(&self, what: impl Into<String>) {
        let what = what.into();
        tracing::warn!("{what}");
        // If the launcher is gone nobody reads it.
        let _ = self.send(FromWorker::Warning(what));
    }
}

/// What the launcher has ordered so far.
#[derive(Debug, Default)]
struct Ordered {
    plan: Option<Vec<u8>>,
    start: bool,
    stop: Option<String>,
    checkpoint: bool,
    closed: bool,
}

#[derive(Debug, Default)]
struct Mailbox {
    ordered: Mutex<Ordered>,
    changed: Condvar,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Ordered> {
        self.ordered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads orders until the launcher lets go.
    fn fill(&self, orders: &IpcReceiver<ToWorker>) {
        loop {
            let order = orders.recv();
            let mut ordered = self.lock();
            match order {
                Ok(ToWorker::Plan(plan)) => ordered.plan = Some(plan),
                Ok(ToWorker::Start) => ordered.start = true,
                Ok(ToWorker::Stop(why)) => {
                    tracing::info!("told to stop: {why}");
                    ordered.stop = Some(why);
                }
                Ok(ToWorker::Checkpoint) => ordered.checkpoint = true,
                Ok(ToWorker::Abort(why)) => {
                    tracing::warn!("the launcher ends the run: {why}");
                    ordered.stop = Some(why);
                }
                Err(IpcError::Io(error)) if error.kind() == std::io::ErrorKind::Interrupted => {
                    continue;
                }
                Err(_) => {
                    ordered.closed = true;
                    self.changed.notify_all();
                    return;
                }
            }
            self.changed.notify_all();
        }
    }

    /// Waits until `ready` gives something.
    fn wait<T>(
        &self,
        what: &'static str,
        patience: Option<Duration>,
        mut ready: impl FnMut(&mut Ordered) -> Option<T>,
    ) -> Result<T, ControlError> {
        let since = Instant::now();
        let mut ordered = self.lock();
        loop {
            if let Some(value) = ready(&mut ordered) {
                return Ok(value);
            }
            if ordered.closed {
                return Err(ControlError::Closed("launcher"));
            }
            ordered = match patience {
                None => self
                    .changed
                    .wait(ordered)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(patience) => {
                    let left = patience.saturating_sub(since.elapsed());
                    if left.is_zero() {
                        return Err(ControlError::Deadline {
                            what,
                            after: patience,
                        });
                    }
                    let waited = self.changed.wait_timeout(ordered, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

/// A worker's link to its launcher.
#[derive(Debug)]
pub struct WorkerLink {
    name: WorkerName,
    threads: usize,
    descriptors: Mutex<BTreeMap<String, OwnedFd>>,
    reporter: Reporter,
    mailbox: Arc<Mailbox>,
}

impl WorkerLink {
    /// Reads this process's arguments, starts the watchdog on the launcher and says Hello to it.
    ///
    /// # Errors
    ///
    /// [`ControlError::NotStartedByLauncher`] on wrong arguments; [`ControlError::Connect`],
    /// [`ControlError::Deadline`] and [`ControlError::System`] when the launcher cannot be reached.
    pub fn connect(role: Role) -> Result<Self, ControlError> {
        let arguments = Arguments::read(role.program(), std::env::args_os().skip(1))?;
        let name = WorkerName::new(role, arguments.rank);
        let mut descriptors = BTreeMap::new();
        for (name, number) in arguments.descriptors {
            descriptors.insert(name, inherited(number)?);
        }
        if let Some(liveness) = descriptors.remove("liveness") {
            // Kept open to the very end of the process, whatever happens to this link: its end-of-file is
            // how the launcher notices a death first.
            let _: RawFd = liveness.into_raw_fd();
        }
        let launcher = descriptors
            .remove("launcher")
            .ok_or_else(|| ControlError::NoDescriptor("launcher".to_owned()))?;

        let mailbox = Arc::new(Mailbox::default());
        obey_only_launcher(arguments.launcher)?;
        let watched = Arc::clone(&mailbox);
        start_thread("watchdog", move || watch(&launcher, &watched))?;

        let sender = connect(arguments.socket)?;
        let (orders, receiver) = ipc::channel().map_err(|source| ControlError::System {
            what: "making the channel for orders",
            source,
        })?;
        let reporter = Reporter { sender };
        reporter.send(FromWorker::Hello {
            worker: name,
            pid: std::process::id(),
            orders,
        })?;
        let filled = Arc::clone(&mailbox);
        start_thread("orders", move || filled.fill(&receiver))?;
        Ok(Self {
            name,
            threads: arguments.threads,
            descriptors: Mutex::new(descriptors),
            reporter,
            mailbox,
        })
    }

    /// Who this is.
    pub fn name(&self) -> WorkerName {
        self.name
    }

    /// Threads that this worker may compute with.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// For messages to the launcher.
    pub fn reporter(&self) -> Reporter {
        self.reporter.clone()
    }

    /// Takes an inherited descriptor by the name that the launcher passed it under.
    ///
    /// # Errors
    ///
    /// [`ControlError::NoDescriptor`] when there is none, or it was taken before.
    pub fn descriptor(&self, name: &str) -> Result<OwnedFd, ControlError> {
        let mut descriptors = self
            .descriptors
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        descriptors
            .remove(name)
            .ok_or_else(|| ControlError::NoDescriptor(name.to_owned()))
    }

    /// Waits for the plan.
    ///
    /// # Errors
    ///
    /// [`ControlError::Deadline`] and [`ControlError::Closed`] when none comes, [`ControlError::Decode`] when
    /// it is not a `P`.
    pub fn plan<P: DeserializeOwned>(&self) -> Result<P, ControlError> {
        let bytes = self
            .mailbox
            .wait("plan", Some(PATIENCE), |ordered| ordered.plan.take())?;
        Ok(postcard::from_bytes(&bytes)?)
    }

    /// Waits until everybody is ready: true to begin, false when the run is stopped before its first step.
    /// Others may load for long, so there is no deadline; the watchdog ends this process with the launcher.
    ///
    /// # Errors
    ///
    /// [`ControlError::Closed`].
    pub fn wait_start(&self) -> Result<bool, ControlError> {
        self.mailbox.wait("start", None, |ordered| {
            if ordered.start {
                Some(true)
            } else {
                ordered.stop.is_some().then_some(false)
            }
        })
    }

    /// Why the launcher asked to stop, if it did.
    pub fn stop_asked(&self) -> Option<String> {
        self.mailbox.lock().stop.clone()
    }

    /// Whether a checkpoint was asked for since the last time this was called.
    pub fn take_checkpoint_request(&self) -> bool {
        std::mem::take(&mut self.mailbox.lock().checkpoint)
    }
}

/// Runs a worker: links to the launcher, logs to standard error (which the launcher pointed at the worker's log
/// file), tells the launcher how it ended, and gives the process's exit code: 0 done, 1 failed, 2 not started by
/// a launcher. A panic on any thread is told too and ends the process with 101: the others would wait for a
/// thread that no longer works.
pub fn worker_main<E: fmt::Display>(
    role: Role,
    body: impl FnOnce(&WorkerLink) -> Result<(), E>,
) -> ExitCode {
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == "--version" || word == "-V")
    {
        println!("{} {}", role.program(), crate::launch::cli::version());
        return ExitCode::SUCCESS;
    }
    crate::monitor::logs::start_worker();
    let link = match WorkerLink::connect(role) {
        Ok(link) => link,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    report_panics(link.reporter());
    process::allow_debuggers();
    if std::env::var_os(WAIT_FOR_DEBUGGER).is_some() {
        wait_for_debugger(&link);
    }
    match body(&link) {
        Ok(()) => {
            let peak_memory = process::peak_memory(std::process::id()).unwrap_or(0);
            // Without a launcher nobody needs to know.
            let _ = link.reporter.send(FromWorker::Done { peak_memory });
            ExitCode::SUCCESS
        }
        Err(error) => {
            let what = format!("{error:#}");
            tracing::error!("{what}");
            let _ = link.reporter.send(FromWorker::Failed(what));
            ExitCode::FAILURE
        }
    }
}

/// Waits until a debugger holds this process, or the run is stopped; the launcher hears of it meanwhile.
fn wait_for_debugger(link: &WorkerLink) {
    let (name, pid) = (link.name(), std::process::id());
    link.reporter().warn(format!(
        "waits for a debugger: `launcher attach RUN {}:{}` or `gdb -p {pid}`, then `continue`",
        name.role, name.rank
    ));
    let mut said = Instant::now();
    while process::Status::of(pid).is_some_and(|status| !status.is_traced)
        && link.stop_asked().is_none()
    {
        if said.elapsed() > WAITING {
            said = Instant::now();
            // Without a launcher the watchdog ends this process.
            let _ = link.reporter().loading("waits for a debugger", 0.0);
        }
        thread::sleep(WATCH);
    }
    tracing::info!("goes on");
}

fn report_panics(reporter: Reporter) {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        let what = match (
            panic.payload().downcast_ref::<&str>(),
            panic.payload().downcast_ref::<String>(),
        ) {
            (Some(text), _) => (*text).to_owned(),
            (_, Some(text)) => text.clone(),
            _ => "no message".to_owned(),
        };
        let place = panic
            .location()
            .map_or(String::new(), |place| format!(" at {place}"));
        let _ = reporter.send(FromWorker::Failed(format!("panicked{place}: {what}")));
        leave(101);
    }));
}

/// Ends the process at once, running nothing: other threads may be in any state.
fn leave(code: i32) -> ! {
    // SAFETY: _exit takes any value and touches no memory of this process.
    unsafe { libc::_exit(code) }
}

/// Owns a descriptor that the launcher left open over exec, closed again at the next one.
fn inherited(number: RawFd) -> Result<OwnedFd, ControlError> {
    // SAFETY: F_GETFD only looks whether the number is an open descriptor.
    if number < 3 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(ControlError::NoDescriptor(number.to_string()));
    }
    // SAFETY: the descriptor is open, was passed to this process for this purpose, and is wrapped only here.
    let owned = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&owned, rustix::io::FdFlags::CLOEXEC).map_err(|error| {
        ControlError::System {
            what: "marking an inherited descriptor",
            source: error.into(),
        }
    })?;
    Ok(owned)
}

fn start_thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), ControlError> {
    let started = thread::Builder::new().name(name.to_owned()).spawn(body);
    started.map(drop).map_err(|source| ControlError::System {
        what: "starting a thread",
        source,
    })
}

/// Connects to the launcher's socket within [`PATIENCE`]; `connect` itself has no deadline.
fn connect(path: String) -> Result<IpcSender<FromWorker>, ControlError> {
    let (done, waiting) = mpsc::channel();
    let socket = path.clone();
    start_thread("connect", move || {
        // The other side gave up waiting when this fails.
        let _ = done.send(IpcSender::connect(socket));
    })?;
    match waiting.recv_timeout(PATIENCE) {
        Ok(connected) => connected.map_err(|source| ControlError::Connect { path, source }),
        Err(_) => Err(ControlError::Deadline {
            what: "connection",
            after: PATIENCE,
        }),
    }
}

/// The launcher's process, for the signal handler.
static LAUNCHER: AtomicI32 = AtomicI32::new(0);
/// Signals of other senders than the launcher.
static FOREIGN_TERMS: AtomicU64 = AtomicU64::new(0);

/// The launcher's SIGTERM ends this process at once. One from elsewhere (a job manager signals every process of
/// a job) is only counted: the launcher gets it too and has the run saved first.
fn obey_only_launcher(launcher: i32) -> Result<(), ControlError> {
    LAUNCHER.store(launcher, Ordering::Relaxed);
    // SAFETY: all zero bytes are a valid sigaction; its fields are set below before use.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_term as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and is async-signal-safe.
    if unsafe { libc::sigaction(libc::SIGTERM, &action, std::ptr::null_mut()) } != 0 {
        return Err(ControlError::System {
            what: "handling SIGTERM",
            source: std::io::Error::last_os_error(),
        });
    }
    Ok(())
}

extern "C" fn on_term(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo, and SIGTERM sent by kill or pidfd_send_signal carries a pid.
    let sender = unsafe { (*info).si_pid() };
    if sender == LAUNCHER.load(Ordering::Relaxed) {
        die_of_term();
    }
    FOREIGN_TERMS.fetch_add(1, Ordering::Relaxed);
}

/// Ends this process by SIGTERM itself, so that its exit status says so.
fn die_of_term() {
    // SAFETY: all of these are async-signal-safe and take plain numbers or a local set.
    unsafe {
        libc::signal(libc::SIGTERM, libc::SIG_DFL);
        let mut only: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut only);
        libc::sigaddset(&mut only, libc::SIGTERM);
        libc::raise(libc::SIGTERM);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &only, std::ptr::null_mut());
        libc::_exit(143);
    }
}

/// Ends this process when the launcher ends, and on a SIGTERM that was meant for this worker alone.
fn watch(launcher: &OwnedFd, mailbox: &Mailbox) {
    let mut term: Option<Instant> = None;
    let pause = Timespec::try_from(WATCH).expect("a fifth of a second is a time");
    loop {
        let mut ends = [PollFd::from_borrowed_fd(launcher.as_fd(), PollFlags::IN)];
        let seen = poll(&mut ends, Some(&pause));
        if seen.is_ok() && !ends[0].revents().is_empty() {
            eprintln!("error: the launcher has ended; leaving");
            leave(1);
        }
        if FOREIGN_TERMS.load(Ordering::Relaxed) > 0 && mailbox.lock().stop.is_none() {
            let since = *term.get_or_insert_with(Instant::now);
            if since.elapsed() > GRACE {
                eprintln!("error: SIGTERM from another process than the launcher; leaving");
                die_of_term();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> Result<Arguments, String> {
        let words = words.iter().map(OsString::from);
        Arguments::read("target_worker", words).map_err(|error| error.to_string())
    }

    #[test]
    fn arguments_of_the_launcher_are_read() {
        let words = [
            "--rank",
            "3",
            "--launcher",
            "77",
            "--threads",
            "2",
            "--socket",
            "/tmp/s",
            "--fd",
            "memfd=5",
        ];
        let arguments = read(&words).unwrap();
        assert_eq!(
            (arguments.rank, arguments.launcher, arguments.threads),
            (3, 77, 2)
        );
        assert_eq!(arguments.descriptors["memfd"], 5);
    }

    #[test]
    fn a_person_is_told_what_starts_workers() {
        for words in [
            &[][..],
            &["--help"],
            &["--rank", "x"],
            &["--fd", "5"],
            &["--what", "1"],
        ] {
            let what = read(words).unwrap_err();
            assert!(
                what.contains("target_worker is started by the launcher"),
                "{what}"
            );
        }
    }

    #[test]
    fn a_plan_that_never_comes_meets_its_deadline() {
        let mailbox = Mailbox::default();
        let waited = mailbox.wait("plan", Some(Duration::from_millis(20)), |ordered| {
            ordered.plan.take()
        });
        assert!(matches!(
            waited,
            Err(ControlError::Deadline { what: "plan", .. })
        ));
    }
}
