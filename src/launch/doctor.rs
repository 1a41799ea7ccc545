//! `launcher doctor`: whether this machine is fit for runs. Every line is ok, a warning or a problem, and says what
//! to do.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use serde::Serialize;

use super::gpus;
use super::places::machine_threads;
use super::spawn::program;
use super::watch::stacks::runs;
use crate::control::Role;
use crate::data;
use crate::engine::cuda;

/// What `launcher doctor` was asked for.
#[derive(Clone, Debug)]
pub struct DoctorOptions {
    /// Where runs would go: its disk is tried.
    pub output: PathBuf,
    /// Print JSON.
    pub json: bool,
}

/// How a finding counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// As it should be, or of no concern.
    Ok,
    /// Runs work; something is slower or less safe than it could be.
    Warning,
    /// Runs will not work.
    Problem,
}

/// One line.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// How it counts.
    pub grade: Grade,
    /// What was looked at.
    pub what: &'static str,
    /// What was found, and what to do where it is not ok.
    pub text: String,
}

fn finding(grade: Grade, what: &'static str, text: impl Into<String>) -> Finding {
    let text = text.into();
    Finding { grade, what, text }
}

fn ok(what: &'static str, text: impl Into<String>) -> Finding {
    finding(Grade::Ok, what, text)
}

fn warning(what: &'static str, text: impl Into<String>) -> Finding {
    finding(Grade::Warning, what, text)
}

fn problem(what: &'static str, text: impl Into<String>) -> Finding {
    finding(Grade::Problem, what, text)
}

/// Examines this machine; returns the launcher's exit code: 1 when there is a problem.
pub fn doctor(options: &DoctorOptions) -> u8 {
    let found = examine(&options.output);
    if options.json {
        let text = serde_json::to_string_pretty(&found).expect("findings are plain text");
        println!("{text}");
    } else {
        for Finding { grade, what, text } in &found {
            let grade = match grade {
                Grade::Ok => "ok",
                Grade::Warning => "warning",
                Grade::Problem => "PROBLEM",
            };
            println!("{grade:<8} {what:<12} {text}");
        }
    }
    u8::from(found.iter().any(|one| one.grade == Grade::Problem))
}

/// Everything that is found.
pub fn examine(output: &Path) -> Vec<Finding> {
    let visible = gpus::visible();
    let on_gpus = visible.as_ref().is_ok_and(|gpus| !gpus.is_empty());
    let mut found = vec![
        ok("version", super::cli::version()),
        programs(),
        kernel(),
        threads(),
        numa(Path::new("/sys/devices/system/node")),
        memory(),
        shared_memory(),
        dev_shm(on_gpus),
        locked(on_gpus),
        files(),
    ];
    found.append(&mut devices(&visible));
    found.append(&mut libraries(on_gpus));
    found.push(tracing_allowed(
        fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope")
            .ok()
            .as_deref(),
    ));
    found.push(debuggers());
    found.push(slurm(&|name| std::env::var(name).ok()));
    found.push(writable("sockets", &std::env::temp_dir()));
    found.push(writable("cache", &data::default_cache_dir()));
    found.push(disk(output));
    found
}

fn programs() -> Finding {
    for role in [Role::Target, Role::Drafter] {
        if let Err(error) = program(role) {
            return problem("programs", error.to_string());
        }
    }
    ok("programs", "both workers are beside the launcher")
}

fn kernel() -> Finding {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let text = text.trim();
    let mut numbers = text
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (5, 3) {
        ok("kernel", format!("Linux {text}"))
    } else {
        problem(
            "kernel",
            format!("Linux {text}: 5.3 or newer is needed (pidfd)"),
        )
    }
}

fn threads() -> Finding {
    let usable = machine_threads();
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let all = text
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count();
    let text = format!("{usable} of {all} threads may be used");
    if usable < 2 {
        warning(
            "CPU",
            format!("{text}: a target and a drafter would take turns; give it two or more"),
        )
    } else {
        ok("CPU", text)
    }
}

fn numa(folder: &Path) -> Finding {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut nodes: Vec<String> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let number: u32 = name.strip_prefix("node")?.parse().ok()?;
            let cpus = fs::read_to_string(entry.path().join("cpulist")).ok()?;
            Some(format!("node {number}: CPUs {}", cpus.trim()))
        })
        .collect();
    nodes.sort();
    match nodes.len() {
        0 | 1 => ok("NUMA", "one node"),
        _ => ok(
            "NUMA",
            format!(
                "{} ({}): bind the launcher to the node of its GPUs (numactl -N) if copies are slow",
                nodes.len(),
                nodes.join("; ")
            ),
        ),
    }
}

const GIB: f64 = (1_u64 << 30) as f64;

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / GIB)
}

/// Bytes that the cgroup still allows, if it limits them.
fn cgroup_room() -> Option<u64> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let cgroup = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = cgroup
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or("/");
    let own = format!("/sys/fs/cgroup{}", own.trim_end_matches('/'));
    let second = number(&format!("{own}/memory.max"))
        .zip(number(&format!("{own}/memory.current")))
        .map(|(most, now)| most.saturating_sub(now));
    let first = || {
        let most = number("/sys/fs/cgroup/memory/memory.limit_in_bytes")?;
        let now = number("/sys/fs/cgroup/memory/memory.usage_in_bytes")?;
        // Without a limit it says a number near the largest.
        (most < 1 << 60).then(|| most.saturating_sub(now))
    };
    second.or_else(first)
}

fn memory() -> Finding {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
        Some(kilobytes * 1024)
    };
    let Some((free, all)) = field("MemAvailable:").zip(field("MemTotal:")) else {
        return warning("memory", "/proc/meminfo does not read");
    };
    let limit = cgroup_room();
    let room = limit.map_or(free, |limit| limit.min(free));
    let mut text = format!("{} of {} free", gib(free), gib(all));
    if let Some(limit) = limit {
        text += &format!(", the cgroup allows {} more", gib(limit));
    }
    if room < 2 << 30 {
        warning(
            "memory",
            format!(
                "{text}: enough for the demo; a real model and its ring need more (`launcher plan` says how much)"
            ),
        )
    } else {
        ok("memory", text)
    }
}

/// Tries what a run does first: an anonymous file, allocated and sealed.
fn shared_memory() -> Finding {
    use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
    let tried = || -> rustix::io::Result<()> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("doctor", flags)?;
        rustix::fs::ftruncate(&file, 64 << 20)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 64 << 20)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)
    };
    match tried() {
        Ok(()) => ok(
            "memfd",
            "shared memory can be made, allocated and sealed (tried 64 MiB)",
        ),
        Err(error) => problem(
            "memfd",
            format!(
                "shared memory cannot be made: {error}; a seccomp filter or a memory limit may be in the way"
            ),
        ),
    }
}

/// Bytes free and in all of the file system at `path`.
fn space(path: &Path) -> Option<(u64, u64)> {
    let found = rustix::fs::statvfs(path).ok()?;
    Some((
        found.f_bavail * found.f_frsize,
        found.f_blocks * found.f_frsize,
    ))
}

fn dev_shm(on_gpus: bool) -> Finding {
    let Some((free, all)) = space(Path::new("/dev/shm")) else {
        let text = "is not there";
        return if on_gpus {
            problem(
                "/dev/shm",
                format!("{text}: NCCL needs it (docker: --shm-size=1g)"),
            )
        } else {
            ok("/dev/shm", format!("{text}; only NCCL on GPUs needs it"))
        };
    };
    let text = format!("{} of {} free", gib(free), gib(all));
    if free >= 1 << 30 {
        ok("/dev/shm", text)
    } else if on_gpus {
        warning(
            "/dev/shm",
            format!("{text}: NCCL wants 1 GiB for several drafters (docker: --shm-size=1g)"),
        )
    } else {
        ok("/dev/shm", format!("{text}; only NCCL on GPUs needs it"))
    }
}

fn locked(on_gpus: bool) -> Finding {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_MEMLOCK) else {
        return warning("memlock", "the limit does not read");
    };
    if soft == RLIM_INFINITY {
        return ok("memlock", "no limit");
    }
    let most = if hard == RLIM_INFINITY {
        "unlimited".to_owned()
    } else {
        gib(hard)
    };
    let text = format!("{} may be locked (ulimit -l; at most {most})", gib(soft));
    if on_gpus && soft < 8 << 30 {
        warning(
            "memlock",
            format!(
                "{text}: if pinning the ring is refused, copies go through a slower buffer; `ulimit -l unlimited`, docker: --ulimit memlock=-1"
            ),
        )
    } else {
        ok("memlock", text)
    }
}

fn files() -> Finding {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, _)) if soft < 256 => warning(
            "open files",
            format!("{soft} allowed: raise it for many workers (ulimit -n 1024)"),
        ),
        Ok((soft, _)) => ok("open files", format!("{soft} allowed")),
        Err(error) => warning("open files", error.to_string()),
    }
}

fn devices(visible: &Result<Vec<gpus::Gpu>, String>) -> Vec<Finding> {
    let chosen = std::env::var("CUDA_VISIBLE_DEVICES")
        .map(|list| format!(" (CUDA_VISIBLE_DEVICES={list})"))
        .unwrap_or_default();
    match visible {
        Ok(found) if found.is_empty() => {
            vec![ok("GPU", format!("none visible{chosen}: runs use CPUs"))]
        }
        Ok(found) => found
            .iter()
            .enumerate()
            .map(|(ordinal, gpu)| match gpu.problem(ordinal as u32) {
                Some(what) => problem("GPU", what),
                None => ok(
                    "GPU",
                    format!(
                        "{ordinal}: {}, {} of {} free{chosen}",
                        gpu.name,
                        gib(gpu.free),
                        gib(gpu.total)
                    ),
                ),
            })
            .collect(),
        Err(what) if Path::new("/dev/nvidiactl").exists() => vec![problem(
            "GPU",
            format!(
                "there is a GPU, but the driver does not answer: {what}; does nvidia-smi work?"
            ),
        )],
        Err(what) => vec![ok("GPU", format!("none: runs use CPUs ({what})"))],
    }
}

fn libraries(on_gpus: bool) -> Vec<Finding> {
    let all = cuda::Library::ALL.into_iter();
    all.map(|library| {
        let name = match library {
            cuda::Library::CublasLt => "cuBLASLt",
            cuda::Library::Nvrtc => "NVRTC",
            cuda::Library::Nccl => "NCCL",
        };
        match (cuda::find_library(library), on_gpus) {
            (Some(path), _) => ok(name, path.display().to_string()),
            (None, false) => ok(name, "not found; only runs on GPUs need it"),
            // The loader may know folders that were not looked into.
            (None, true) if library == cuda::Library::Nccl => warning(name, library.remedy()),
            (None, true) => warning(
                name,
                format!(
                    "not in the usual folders; unless the loader finds it: {}",
                    library.remedy()
                ),
            ),
        }
    })
    .collect()
}

fn tracing_allowed(scope: Option<&str>) -> Finding {
    match scope.map(str::trim) {
        None => ok("ptrace", "not restricted (no Yama)"),
        Some("0") => ok("ptrace", "not restricted"),
        Some("1") => ok(
            "ptrace",
            "restricted to parents; workers allow debuggers of the same user, so attach and stacks work",
        ),
        Some("2") => warning(
            "ptrace",
            "only administrators may attach: run `launcher attach` and `stacks` as root, or set /proc/sys/kernel/yama/ptrace_scope to 1",
        ),
        Some(other) => warning(
            "ptrace",
            format!("nobody may attach (ptrace_scope {other}); only a reboot changes that"),
        ),
    }
}

fn debuggers() -> Finding {
    let known = ["cuda-gdb", "rust-gdb", "gdb", "lldb", "eu-stack"];
    let there: Vec<&str> = known.into_iter().filter(|name| runs(name)).collect();
    if there.is_empty() {
        warning(
            "debuggers",
            "none: `launcher attach` needs gdb or lldb, `stacks` tells less without (apt install gdb)",
        )
    } else {
        ok("debuggers", there.join(", "))
    }
}

fn slurm(variable: &dyn Fn(&str) -> Option<String>) -> Finding {
    let Some(job) = variable("SLURM_JOB_ID") else {
        return ok("Slurm", "not inside a job");
    };
    let tasks = variable("SLURM_NTASKS_PER_NODE")
        .or_else(|| variable("SLURM_STEP_TASKS_PER_NODE"))
        .unwrap_or_else(|| "1".to_owned());
    let nodes = variable("SLURM_NNODES").unwrap_or_else(|| "1".to_owned());
    let text = format!("job {job}, {nodes} nodes, {tasks} tasks on each");
    let single = tasks.split(['(', ',']).next() == Some("1");
    if single {
        ok("Slurm", text)
    } else {
        warning(
            "Slurm",
            format!(
                "{text}: one launcher starts all workers of a node: use --ntasks-per-node=1 with as many CPUs as the node has"
            ),
        )
    }
}

/// The nearest folder above `path` that is there, itself included.
fn existing(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let found = path.ancestors().find(|part| part.is_dir());
    found.unwrap_or(Path::new("/")).to_owned()
}

fn writable(what: &'static str, path: &Path) -> Finding {
    let folder = existing(path);
    match tempfile::tempfile_in(&folder) {
        Ok(_) => ok(what, format!("{} can be written", path.display())),
        Err(error) => {
            let name = if what == "cache" {
                "SLIPSTREAM_CACHE"
            } else {
                "TMPDIR"
            };
            problem(
                what,
                format!(
                    "{}: {error}; set {name} to a folder that can be written",
                    folder.display()
                ),
            )
        }
    }
}

/// Bytes of the trial write.
const TRIAL: usize = 64 << 20;

fn disk(output: &Path) -> Finding {
    let folder = existing(output);
    let place = folder.display();
    let tried = || -> std::io::Result<f64> {
        let mut file = tempfile::tempfile_in(&folder)?;
        let piece = vec![0xa5_u8; 1 << 20];
        let began = Instant::now();
        for _ in 0..TRIAL / piece.len() {
            file.write_all(&piece)?;
        }
        file.sync_all()?;
        Ok(TRIAL as f64 / 1e6 / began.elapsed().as_secs_f64().max(1e-9))
    };
    let speed = match tried() {
        Ok(speed) => speed,
        Err(error) => {
            return problem(
                "output disk",
                format!("{place}: {error}; choose another --output or make room"),
            );
        }
    };
    let free = space(&folder).map_or(0, |(free, _)| free);
    let text = format!(
        "{place}: {speed:.0} MB/s written and synced, {} free",
        gib(free)
    );
    if free < 10 << 30 {
        warning(
            "output disk",
            format!(
                "{text}: a checkpoint of an 8B model's drafter takes about 15 GiB with its training state (--keep)"
            ),
        )
    } else if speed < 50.0 {
        warning(
            "output disk",
            format!("{text}: slow; checkpoints will take long (--save-every)"),
        )
    } else {
        ok("output disk", text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_examined_without_a_problem_but_the_programs() {
        let folder = tempfile::tempdir().unwrap();
        let found = examine(&folder.path().join("runs/not-there-yet"));
        for one in &found {
            // Unit tests run from another folder than the programs.
            let expected = one.grade != Grade::Problem || one.what == "programs";
            assert!(expected, "{one:?}");
            assert!(!one.text.is_empty() && !one.text.contains('\n'), "{one:?}");
        }
        let names: Vec<&str> = found.iter().map(|one| one.what).collect();
        for name in [
            "kernel",
            "memfd",
            "memlock",
            "ptrace",
            "NCCL",
            "Slurm",
            "output disk",
        ] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert!(fs::read_dir(folder.path()).unwrap().next().is_none());
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_a_problem() {
        let found = disk(Path::new("/proc/1/here"));
        assert_eq!(found.grade, Grade::Problem, "{found:?}");
        assert!(found.text.contains("--output"), "{found:?}");
    }

    #[test]
    fn several_tasks_a_node_are_warned_of() {
        let grade = |tasks: &str| {
            let variable = |name: &str| match name {
                "SLURM_JOB_ID" => Some("77".to_owned()),
                "SLURM_NTASKS_PER_NODE" => Some(tasks.to_owned()),
                _ => None,
            };
            slurm(&variable).grade
        };
        assert_eq!(grade("1"), Grade::Ok);
        assert_eq!(grade("1(x4)"), Grade::Ok);
        assert_eq!(grade("8"), Grade::Warning);
        assert_eq!(slurm(&|_| None).grade, Grade::Ok);
    }

    #[test]
    fn yama_is_understood() {
        let grade = |scope| tracing_allowed(scope).grade;
        assert_eq!(grade(None), Grade::Ok);
        assert_eq!(grade(Some("1\n")), Grade::Ok);
        assert_eq!(grade(Some("2")), Grade::Warning);
        assert_eq!(grade(Some("3")), Grade::Warning);
    }

    #[test]
    fn nodes_of_memory_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(numa(folder.path()).text, "one node");
        for node in 0..2 {
            let path = folder.path().join(format!("node{node}"));
            fs::create_dir(&path).unwrap();
            fs::write(path.join("cpulist"), format!("{node}-{}\n", node + 3)).unwrap();
        }
        let text = numa(folder.path()).text;
        assert!(
            text.starts_with("2 (node 0: CPUs 0-3; node 1: CPUs 1-4)"),
            "{text}"
        );
    }
}
