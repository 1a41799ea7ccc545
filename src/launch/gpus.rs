//! What GPUs there are: asked of a short-lived child, since the launcher itself never loads CUDA.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::options::PlaceOptions;
use super::places::{self, Device, Place, RoleCost};
use super::spawn::program;
use crate::control::Role;
use crate::engine::cuda;

/// The argument that makes a target worker print [`report`] and leave.
pub const ARGUMENT: &str = "--gpu-facts";
/// The argument that makes a target worker print [`print_use`]'s lines until nobody reads them.
pub const USE_ARGUMENT: &str = "--gpu-use";
/// Between two of these lines.
const USE_EVERY: Duration = Duration::from_secs(1);
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

/// GPUs for a command that one process does: those that were asked for, or all visible ones; none where none is
/// visible and nobody asked for any.
///
/// # Errors
/// In words, a line for each: no driver although GPUs were asked for, numbers beyond the last GPU, GPUs that cannot
/// be used.
pub fn pick(wanted: Option<&[u32]>) -> Result<Vec<u32>, Vec<String>> {
    let visible = match (visible(), wanted) {
        (Ok(visible), _) => visible,
        (Err(what), Some(_)) => return Err(vec![format!("--gpus: {what}")]),
        (Err(what), None) => {
            tracing::debug!("no GPU: {what}");
            return Ok(Vec::new());
        }
    };
    let all = || (0..visible.len() as u32).collect();
    let chosen: Vec<u32> = wanted.map_or_else(all, <[u32]>::to_vec);
    let shown = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    if let Some(problem) = beyond("gpus", &chosen, visible.len(), shown.as_deref()) {
        return match wanted {
            Some(_) => Err(vec![problem]),
            None => Ok(Vec::new()),
        };
    }
    usable(chosen.iter().copied(), &visible)?;
    Ok(chosen)
}

/// Whether every one of these visible GPUs can be used; else a line for each that cannot.
fn usable(gpus: impl IntoIterator<Item = u32>, visible: &[Gpu]) -> Result<(), Vec<String>> {
    let problem = |gpu: u32| visible[gpu as usize].problem(gpu);
    let problems: Vec<String> = gpus.into_iter().filter_map(problem).collect();
    match problems.is_empty() {
        true => Ok(()),
        false => Err(problems),
    }
}

/// Places as the flags ask for, on what is visible; `shown` is CUDA_VISIBLE_DEVICES. Without a split, the one that is
/// predicted to be fastest at this `cost`.
///
/// # Errors
/// A line for each problem: a GPU that does not exist, cannot be used or would idle, or drafters that would share.
pub fn choose(
    wanted: &PlaceOptions,
    visible: &[Gpu],
    shown: Option<&str>,
    cost: RoleCost,
) -> Result<Vec<Place>, Vec<String>> {
    let places = match &wanted.lists {
        Some((targets, drafters)) => {
            let beyond = [("targets", targets), ("drafters", drafters)]
                .into_iter()
                .filter_map(|(flag, gpus)| beyond(flag, gpus, visible.len(), shown));
            let problems: Vec<String> = beyond.collect();
            if !problems.is_empty() {
                return Err(problems);
            }
            places::listed_places(targets, drafters)
        }
        None => {
            let gpus = match &wanted.gpus {
                Some(gpus) => gpus.clone(),
                None => (0..visible.len() as u32).collect(),
            };
            if let Some(problem) = beyond("gpus", &gpus, visible.len(), shown) {
                return Err(vec![problem]);
            }
            let (targets, drafters) = wanted
                .split
                .unwrap_or_else(|| places::best_split(gpus.len(), cost));
            places::gpu_places(&gpus, targets, drafters)
                .map_err(|what| vec![format!("--split {targets}:{drafters}: {what}")])?
        }
    };
    let used: BTreeSet<u32> = places
        .iter()
        .filter_map(|place| match place.device {
            Device::Gpu { ordinal } => Some(ordinal),
            Device::Cpu { .. } => None,
        })
        .collect();
    usable(used, visible)?;
    Ok(places)
}

/// Why a list names GPUs that are not there, if it does.
fn beyond(flag: &str, gpus: &[u32], count: usize, shown: Option<&str>) -> Option<String> {
    let why = hidden(count, shown);
    if count == 0 {
        return Some(format!("--{flag}: no GPU is visible{why}"));
    }
    let gpu = gpus.iter().find(|&&gpu| gpu as usize >= count)?;
    Some(format!(
        "--{flag}: there is no GPU {gpu}: {count} visible, counted from 0{why}"
    ))
}

/// What CUDA_VISIBLE_DEVICES has to do with there being no more GPUs than `count`.
fn hidden(count: usize, shown: Option<&str>) -> String {
    let Some(shown) = shown else {
        return String::new();
    };
    let entries: Vec<&str> = shown.split(',').map(str::trim).collect();
    if shown.trim().is_empty() || entries[0] == "-1" || entries[0] == "NoDevFiles" {
        return format!("; CUDA_VISIBLE_DEVICES is `{shown}`, which hides all of them: unset it");
    }
    match entries.get(count) {
        // CUDA takes entries up to the first that it does not know.
        Some(entry) => format!(
            "; of CUDA_VISIBLE_DEVICES `{shown}` the entry `{entry}` names no GPU of this machine, and CUDA \
             ignores what follows"
        ),
        None => format!("; CUDA_VISIBLE_DEVICES is `{shown}`: numbers count its entries"),
    }
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

/// Prints how busy the visible GPUs are, a line of JSON a second, until nobody reads it any more.
pub fn print_use() {
    let Ok(nvml) = cuda::Nvml::open() else {
        return;
    };
    while let Ok(found) = nvml.look() {
        let line = serde_json::to_string(&found).unwrap_or_default() + "\n";
        if std::io::stdout().write_all(line.as_bytes()).is_err() {
            return;
        }
        std::thread::sleep(USE_EVERY);
    }
}

/// Follows how busy GPUs are, through a helper process that ends with this.
#[derive(Debug)]
pub struct UseWatch {
    child: std::process::Child,
    latest: Arc<Mutex<Vec<cuda::GpuUse>>>,
}

impl UseWatch {
    /// Of the GPUs that a process with this `CUDA_VISIBLE_DEVICES` sees.
    ///
    /// # Errors
    /// In words: the helper does not start.
    pub fn start(visible: Option<&str>) -> Result<Self, String> {
        let program = program(Role::Target).map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command
            .arg(USE_ARGUMENT)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // Ctrl-C is for whoever watches.
            .process_group(0);
        match visible {
            Some(list) => command.env("CUDA_VISIBLE_DEVICES", list),
            None => command.env_remove("CUDA_VISIBLE_DEVICES"),
        };
        let failed = |error: std::io::Error| format!("watching GPUs: {error}");
        let mut child = command.spawn().map_err(failed)?;
        let latest = Arc::<Mutex<Vec<cuda::GpuUse>>>::default();
        let written = Arc::clone(&latest);
        if let Some(out) = child.stdout.take() {
            let read = move || {
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    if let Ok(found) = serde_json::from_str(&line) {
                        *written.lock().unwrap_or_else(PoisonError::into_inner) = found;
                    }
                }
            };
            let thread = std::thread::Builder::new().name("gpu use".to_owned());
            thread.spawn(read).map_err(failed)?;
        }
        Ok(Self { child, latest })
    }

    /// The last figures; empty before the first have come.
    pub fn latest(&self) -> Vec<cuda::GpuUse> {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        latest.clone()
    }
}

impl Drop for UseWatch {
    fn drop(&mut self) {
        // One that has ended already needs nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `LD_LIBRARY_PATH` with which a worker finds the CUDA libraries of toolkits and of Python packages.
pub fn library_path() -> OsString {
    let mut folders = cuda::library_folders();
    folders.extend(cuda::linked_nccl());
    if let Some(given) = std::env::var_os("LD_LIBRARY_PATH") {
        folders.splice(0..0, std::env::split_paths(&given));
    }
    std::env::join_paths(folders).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::places::parse_gpus;

    fn gpu(free: u64, shareable: bool) -> Gpu {
        Gpu {
            name: "NVIDIA H200".to_owned(),
            total: 140 << 30,
            free: free << 30,
            shareable,
        }
    }

    /// `--gpus`, `--split` and the lists of `--targets` and `--drafters`.
    type Asked = (
        Option<&'static str>,
        Option<(usize, usize)>,
        Option<[&'static str; 2]>,
    );

    fn chosen(asked: Asked, visible: &[Gpu], shown: Option<&str>) -> Result<String, String> {
        let (gpus, split, lists) = asked;
        let list = |text| parse_gpus(text).unwrap();
        let wanted = PlaceOptions {
            cpu: (2, 2),
            cpu_given: false,
            gpus: gpus.map(list),
            split,
            lists: lists.map(|[targets, drafters]| (list(targets), list(drafters))),
        };
        let cost = RoleCost {
            target: 3.0,
            drafter: 1.0,
        };
        let places =
            choose(&wanted, visible, shown, cost).map_err(|problems| problems.join("\n"))?;
        let word = |place: &Place| format!("{} {}", place.worker, place.device);
        Ok(places.iter().map(word).collect::<Vec<_>>().join(", "))
    }

    #[test]
    fn gpus_are_given_to_workers() {
        let four = vec![gpu(139, true); 4];
        for (asked, places) in [
            (
                (None, None, None),
                "target-0 GPU 0, target-1 GPU 1, target-2 GPU 2, drafter-0 GPU 3",
            ),
            ((Some("2"), None, None), "target-0 GPU 2, drafter-0 GPU 2"),
            (
                (Some("1,3"), Some((2, 2)), None),
                "target-0 GPU 1, target-1 GPU 3, drafter-0 GPU 1, drafter-1 GPU 3",
            ),
            (
                (None, None, Some(["3,0", "0-1"])),
                "target-0 GPU 3, target-1 GPU 0, drafter-0 GPU 0, drafter-1 GPU 1",
            ),
        ] {
            assert_eq!(chosen(asked, &four, None).unwrap(), places, "{asked:?}");
        }
    }

    #[test]
    fn every_wrong_form_has_its_own_line() {
        let two = vec![gpu(139, true); 2];
        for (asked, shown, line) in [
            (
                (Some("0-99"), None, None),
                None,
                "--gpus: there is no GPU 2: 2 visible, counted from 0",
            ),
            (
                (Some("0-3"), None, None),
                Some("4,7"),
                "--gpus: there is no GPU 2: 2 visible, counted from 0; CUDA_VISIBLE_DEVICES is `4,7`: numbers count \
                 its entries",
            ),
            (
                (Some("2"), None, None),
                Some("0,1,9,2"),
                "--gpus: there is no GPU 2: 2 visible, counted from 0; of CUDA_VISIBLE_DEVICES `0,1,9,2` the entry \
                 `9` names no GPU of this machine, and CUDA ignores what follows",
            ),
            (
                (None, None, Some(["0", "1-2"])),
                None,
                "--drafters: there is no GPU 2: 2 visible, counted from 0",
            ),
            (
                (Some("0"), Some((1, 2)), None),
                None,
                "--split 1:2: 2 drafters on 1 GPUs: two drafters on one GPU would only take turns; use at most one \
                 each",
            ),
            (
                (Some("0,1"), Some((1, 0)), None),
                None,
                "--split 1:0: 1 targets and 0 drafters leave 1 of 2 GPUs idle",
            ),
        ] {
            assert_eq!(chosen(asked, &two, shown).unwrap_err(), line);
        }
        for (shown, why) in [
            ("", "hides all"),
            ("-1", "hides all"),
            ("MIG-1,0", "`MIG-1`"),
        ] {
            let error = chosen((Some("0"), None, None), &[], Some(shown)).unwrap_err();
            assert!(error.starts_with("--gpus: no GPU is visible; "), "{error}");
            assert!(error.contains(why), "{shown}: {error}");
        }
        let mixed = [gpu(139, false), gpu(3, true), gpu(139, true)];
        let error = chosen((Some("0-2"), None, None), &mixed, None).unwrap_err();
        let lines: Vec<&str> = error.lines().collect();
        assert_eq!(lines.len(), 2, "{error}");
        assert!(lines[0].contains("GPU 0 (NVIDIA H200) is in exclusive"));
        assert!(lines[1].contains("GPU 1 (NVIDIA H200) is busy: 3.0 of 140.0 GiB"));
        assert!(chosen((Some("2"), None, None), &mixed, None).is_ok());
    }
}
