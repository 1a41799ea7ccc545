//! `launcher stacks`: where every process of a run is, through gdb or eu-stack, else what /proc tells.

use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{find_live, refuse};
use crate::launch::process;
use crate::shm::SeatState;

/// What `launcher stacks` was asked for.
#[derive(Clone, Debug)]
pub struct StacksOptions {
    /// The run; `None` is the newest that is going on.
    pub run: Option<PathBuf>,
}

/// Most time for the stacks of one process; reading symbols takes some seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// What walks stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Walker {
    Gdb,
    EuStack,
    Proc,
}

impl Walker {
    fn find() -> Self {
        if runs("gdb") {
            Self::Gdb
        } else if runs("eu-stack") {
            Self::EuStack
        } else {
            Self::Proc
        }
    }

    /// The stacks of all threads of a process, or why there are none.
    fn walk(self, pid: u32) -> Result<String, String> {
        let process = pid.to_string();
        match self {
            Self::Gdb => {
                let mut gdb = Command::new("gdb");
                gdb.args(["-nx", "-batch", "-iex", "set debuginfod enabled off"]);
                gdb.args(["-iex", "set auto-load no"]);
                gdb.args(["-ex", "set pagination off", "-ex", "thread apply all bt 60"]);
                answer(gdb.args(["-p", &process]))
            }
            Self::EuStack => answer(Command::new("eu-stack").args(["-p", &process])),
            Self::Proc => Ok(from_proc(pid)),
        }
    }
}

/// Whether a program is installed and says its version.
pub(crate) fn runs(program: &str) -> bool {
    let quiet = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    quiet.is_ok_and(|status| status.success())
}

/// Prints the stacks of the launcher and of all workers; returns the launcher's exit code.
pub fn stacks(options: &StacksOptions) -> u8 {
    let mut run = match find_live(options.run.as_deref()) {
        Ok(run) => run,
        Err(error) => return refuse(&error),
    };
    let walker = Walker::find();
    if walker == Walker::Proc {
        println!("neither gdb nor eu-stack is installed: this is what the kernel tells");
    }
    let (look, _) = run.look();
    println!("{}: {}\n{}", look.run, look.phase, look.diagnosis.text);
    let mut all = vec![(
        "launcher".to_owned(),
        look.launcher_pid,
        "supervising".to_owned(),
    )];
    for worker in &look.workers {
        if worker.seat != SeatState::Occupied {
            println!("\n== {}: {}", worker.name, worker.doing);
            continue;
        }
        all.push((
            worker.name.to_string(),
            worker.pid,
            format!("{} for {:.1} s", worker.doing, worker.for_s),
        ));
    }
    let mut code = 0;
    for (name, pid, doing) in all {
        println!("\n== {name} (process {pid}): {doing}");
        match walker.walk(pid) {
            Ok(text) => println!("{}", text.trim_end()),
            Err(what) => {
                println!("no stacks: {what}; from /proc:\n{}", from_proc(pid));
                code = 1;
            }
        }
    }
    code
}

/// The lines of a walker's answer that are about stacks.
fn answer(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |what: &dyn std::fmt::Display| format!("{program}: {what}");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(&error))?;
    let reader = |pipe: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // What came before an error is of use all the same.
            if let Some(mut pipe) = pipe {
                let _ = pipe.read_to_end(&mut bytes);
            }
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let out = reader(child.stdout.take().map(|pipe| Box::new(pipe) as _));
    let errors = reader(child.stderr.take().map(|pipe| Box::new(pipe) as _));
    let began = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|error| failed(&error))? {
            Some(status) => break Some(status),
            None if began.elapsed() > PATIENCE => {
                // The kernel lets the process go on when its tracer dies.
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let out = out.join().unwrap_or_default();
    let errors = errors.join().unwrap_or_default();
    let lines: Vec<&str> = out
        .lines()
        .filter(|line| {
            let line = line.trim_start();
            line.starts_with('#') || line.starts_with("Thread ") || line.starts_with("TID ")
        })
        .collect();
    match status {
        None => Err(failed(&format!("no answer within {PATIENCE:?}"))),
        Some(_) if !lines.is_empty() => Ok(lines.join("\n")),
        Some(status) => {
            let last = errors.lines().rfind(|line| !line.trim().is_empty());
            Err(failed(&format!("{status}: {}", last.unwrap_or(""))))
        }
    }
}

/// Every thread of a process: name, state, and where it waits.
fn from_proc(pid: u32) -> String {
    let mut lines = Vec::new();
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let mut threads: Vec<u32> = tasks
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    threads.sort_unstable();
    for thread in threads {
        let file = |name: &str| {
            let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/{name}"));
            text.map(|text| text.trim().to_owned()).unwrap_or_default()
        };
        let state = process::state(thread).unwrap_or('?');
        let place = file("wchan");
        let place = if place.is_empty() || place == "0" {
            String::new()
        } else {
            format!(", waits in {place}")
        };
        lines.push(format!(
            "thread {thread} {}: state {state}{place}{}",
            file("comm"),
            syscall(&file("syscall"))
        ));
        // Only root may read it.
        lines.extend(file("stack").lines().map(|line| format!("    {line}")));
    }
    lines.join("\n")
}

/// The system call that a line of /proc/PID/syscall names.
fn syscall(line: &str) -> String {
    // Of x86-64, and only those in which a worker may spend long.
    const NAMES: [(i64, &str); 12] = [
        (0, "read"),
        (1, "write"),
        (7, "poll"),
        (16, "ioctl"),
        (47, "recvmsg"),
        (61, "wait4"),
        (74, "fsync"),
        (202, "futex"),
        (230, "clock_nanosleep"),
        (232, "epoll_wait"),
        (247, "waitid"),
        (271, "ppoll"),
    ];
    let number = line
        .split_whitespace()
        .next()
        .and_then(|word| word.parse::<i64>().ok());
    match number {
        Some(number) if cfg!(target_arch = "x86_64") => {
            let name = NAMES.iter().find(|(known, _)| *known == number);
            name.map_or(format!(", system call {number}"), |(_, name)| {
                format!(", in {name}")
            })
        }
        Some(number) => format!(", system call {number}"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_described_without_a_debugger() {
        let text = from_proc(std::process::id());
        assert!(text.contains("state "), "{text}");
        assert!(text.lines().any(|line| line.starts_with("thread ")));
    }

    #[test]
    fn system_calls_are_named() {
        assert_eq!(syscall("running"), "");
        assert_eq!(syscall(""), "");
        if cfg!(target_arch = "x86_64") {
            assert_eq!(syscall("202 0x7f 0x1"), ", in futex");
            assert_eq!(syscall("999 0x0"), ", system call 999");
        }
    }

    #[test]
    fn a_walker_that_fails_says_so() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo noise; echo no permission >&2; exit 3"]);
        let error = answer(&mut command).unwrap_err();
        assert!(
            error.starts_with("sh: ") && error.ends_with("no permission"),
            "{error}"
        );
        let mut command = Command::new("sh");
        command.args(["-c", "echo noise; echo 'Thread 1 x'; echo '#0 main ()'"]);
        assert_eq!(answer(&mut command).unwrap(), "Thread 1 x\n#0 main ()");
    }
}
