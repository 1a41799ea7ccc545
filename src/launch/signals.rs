//! Signals to the launcher, as bytes in a pipe that its event loop reads.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use nix::libc;
use rustix::pipe::{PipeFlags, pipe_with};

/// Those that stop a run.
const WATCHED: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1];

/// A signal by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal(pub i32);

impl Signal {
    /// Ctrl-C.
    pub const INT: Self = Self(libc::SIGINT);
    /// What cannot be refused.
    pub const KILL: Self = Self(libc::SIGKILL);
    /// A request to end.
    pub const TERM: Self = Self(libc::SIGTERM);
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match nix::sys::signal::Signal::try_from(self.0) {
            Ok(known) => f.write_str(known.as_str()),
            Err(_) => write!(f, "signal {}", self.0),
        }
    }
}

/// The writing end, for the handler; -1 while nobody listens.
static WRITE: AtomicI32 = AtomicI32::new(-1);

/// Catches SIGINT, SIGTERM, SIGHUP and SIGUSR1 for as long as it lives; then they do what they did before.
#[derive(Debug)]
pub struct Signals {
    read: OwnedFd,
    write: OwnedFd,
    before: Vec<(libc::c_int, libc::sighandler_t)>,
}

impl Signals {
    /// Begins to catch them.
    ///
    /// # Errors
    ///
    /// When the system refuses the pipe or a handler, or somebody in this process catches them already.
    pub fn catch() -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let alone =
            WRITE.compare_exchange(-1, write.as_raw_fd(), Ordering::AcqRel, Ordering::Acquire);
        if alone.is_err() {
            return Err(io::Error::from(io::ErrorKind::AlreadyExists));
        }
        let mut signals = Self {
            read,
            write,
            before: Vec::new(),
        };
        for number in WATCHED {
            // SAFETY: the handler is async-signal-safe: one atomic load and one write.
            let before =
                unsafe { libc::signal(number, on_signal as *const () as libc::sighandler_t) };
            if before == libc::SIG_ERR {
                return Err(io::Error::last_os_error());
            }
            signals.before.push((number, before));
            if number == libc::SIGHUP && before == libc::SIG_IGN {
                // Started by nohup: the end of the terminal shall not end the run.
                // SAFETY: ignoring a signal runs no code.
                unsafe { libc::signal(number, libc::SIG_IGN) };
            }
        }
        Ok(signals)
    }

    /// Readable when a signal came.
    pub fn descriptor(&self) -> &OwnedFd {
        &self.read
    }

    /// The next signal, without waiting.
    pub fn next(&self) -> Option<Signal> {
        let mut byte = [0_u8; 1];
        match rustix::io::read(&self.read, &mut byte) {
            Ok(1) => Some(Signal(i32::from(byte[0]))),
            _ => None,
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (number, before) in self.before.drain(..) {
            // SAFETY: `before` is what `signal` gave for this number.
            unsafe {
                libc::signal(number, before);
            }
        }
        debug_assert_eq!(WRITE.load(Ordering::Relaxed), self.write.as_raw_fd());
        WRITE.store(-1, Ordering::Release);
    }
}

extern "C" fn on_signal(number: libc::c_int) {
    let write = WRITE.load(Ordering::Acquire);
    if write >= 0 {
        let byte = number as u8;
        // SAFETY: errno belongs to the code that was interrupted and is put back; `write` is async-signal-safe
        // and reads one byte of this frame. A full pipe loses a signal after thousands that nobody read.
        unsafe {
            let errno = *libc::__errno_location();
            libc::write(write, (&raw const byte).cast(), 1);
            *libc::__errno_location() = errno;
        }
    }
}
