//! What /proc tells about a process.

/// The state of a process as the kernel names it in /proc/PID/stat: `R` running, `S` asleep, `D` in an
/// uninterruptible wait, `T` stopped, `t` stopped by a tracer, `Z` dead and not yet reaped.
pub fn state(pid: u32) -> Option<char> {
    stat_field(pid, 3)?.chars().next()
}

/// When a process began, in clock ticks since the machine did. With the pid it names a process for good.
pub fn start_time(pid: u32) -> Option<u64> {
    stat_field(pid, 22)?.parse().ok()
}

/// Whether the process with this pid is the one that began then, and is not a zombie.
pub fn is_alive(pid: u32, started: u64) -> bool {
    start_time(pid) == Some(started) && state(pid) != Some('Z')
}

/// Largest resident memory so far, in bytes.
pub fn peak_memory(pid: u32) -> Option<u64> {
    Status::of(pid).map(|status| status.peak_memory)
}

/// Resident memory now, in bytes.
pub fn resident_memory(pid: u32) -> Option<u64> {
    Status::of(pid).map(|status| status.resident_memory)
}

/// What /proc/PID/status tells in one look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Largest resident memory so far, in bytes.
    pub peak_memory: u64,
    /// Resident memory now, in bytes.
    pub resident_memory: u64,
    /// A debugger or strace holds the process.
    pub is_traced: bool,
    /// It is stopped by a signal.
    pub is_stopped: bool,
}

impl Status {
    /// Of this process; `None` when it is gone, or dead and not yet reaped.
    pub fn of(pid: u32) -> Option<Self> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name| {
            text.lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        let bytes = |name| {
            let kilobytes: u64 = field(name)?.split_whitespace().next()?.parse().ok()?;
            Some(kilobytes * 1024)
        };
        Some(Self {
            peak_memory: bytes("VmHWM:")?,
            resident_memory: bytes("VmRSS:")?,
            is_traced: field("TracerPid:").is_some_and(|tracer| tracer != "0"),
            is_stopped: field("State:").is_some_and(|state| state.starts_with('T')),
        })
    }
}

/// How a process stands, as far as a person may read it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Standing {
    /// As in [`state`].
    pub state: char,
    /// The debugger or strace that holds it.
    pub tracer: Option<u32>,
    /// Resident memory now, in bytes.
    pub resident_memory: u64,
    /// Where in the kernel it waits.
    pub waits_in: Option<String>,
    /// Seconds of processor time that it has used, all threads together.
    pub cpu_s: f64,
}

impl Standing {
    /// Of the process with this pid that began then; `None` when it is gone, or dead and not yet reaped.
    pub fn of(pid: u32, started: u64) -> Option<Self> {
        if !is_alive(pid, started) {
            return None;
        }
        let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()
        };
        let kilobytes: u64 = field("VmRSS:")?.parse().ok()?;
        Some(Self {
            state: field("State:")?.chars().next()?,
            tracer: field("TracerPid:")
                .and_then(|pid| pid.parse().ok())
                .filter(|pid| *pid != 0),
            resident_memory: kilobytes * 1024,
            waits_in: waits_in(pid),
            cpu_s: cpu_seconds(pid)?,
        })
    }

    /// Stopped by SIGSTOP or Ctrl-Z, and not by a debugger.
    pub fn is_stopped(&self) -> bool {
        self.state == 'T' && self.tracer.is_none()
    }
}

/// Lets any process of the same user attach a debugger to this one, where the kernel's Yama module would only let
/// its parents do so.
pub fn allow_debuggers() {
    // SAFETY: prctl takes plain numbers. Without Yama it fails, and nothing is needed.
    unsafe {
        nix::libc::prctl(
            nix::libc::PR_SET_PTRACER,
            nix::libc::PR_SET_PTRACER_ANY,
            0,
            0,
            0,
        );
    }
}

/// Processor time of all threads of a process, in seconds.
fn cpu_seconds(pid: u32) -> Option<f64> {
    let ticks: u64 = [14, 15]
        .into_iter()
        .map(|field| stat_field(pid, field)?.parse::<u64>().ok())
        .sum::<Option<u64>>()?;
    // SAFETY: sysconf takes a plain number.
    let a_second = unsafe { nix::libc::sysconf(nix::libc::_SC_CLK_TCK) };
    Some(ticks as f64 / a_second.max(1) as f64)
}

/// Where in the kernel a process waits, if that can be read.
pub fn waits_in(pid: u32) -> Option<String> {
    let place = std::fs::read_to_string(format!("/proc/{pid}/wchan")).ok()?;
    (!place.is_empty() && place != "0").then_some(place)
}

/// How many processes the out-of-memory killer has ended since the machine began.
pub fn oom_kills() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/vmstat").ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill "))?
        .trim()
        .parse()
        .ok()
}

/// A field of /proc/PID/stat, counted from 1 as in proc(5). The second holds any text in parentheses.
fn stat_field(pid: u32, number: usize) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    rest.split_whitespace()
        .nth(number.checked_sub(3)?)
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_read() {
        let me = std::process::id();
        let began = start_time(me).unwrap();
        assert!(is_alive(me, began));
        assert!(!is_alive(me, began + 1));
        assert!(peak_memory(me).unwrap() > 1 << 20);
        assert!(matches!(state(me), Some('R' | 'S')));
    }

    #[test]
    fn nobody_is_dead() {
        assert_eq!(state(u32::MAX), None);
        assert!(!is_alive(u32::MAX, 0));
    }
}
