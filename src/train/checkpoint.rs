//! Checkpoints: everything that training needs to go on, in one directory that is whole or absent.
//!
//! `checkpoints/step-N` is written under a temporary name, every file is synced, the directory is renamed and
//! synced, and only then does the link `latest` move to it. A kill or a full disk at any point leaves the
//! earlier checkpoint as it was. Every file's length and hash stand in `state.json`, so that reading takes the
//! newest checkpoint that is really whole and says which it is.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};

use super::best;
use super::disk::{Disk, DiskError, Written};
use super::export::{self, ExportError, Provenance, sources};
use super::optimizer::Optimizer;
use super::options::OptimizerOptions;
use super::tensors::{self, TensorFile, TensorFileError};
use crate::engine::{Engine, EngineError};
use crate::model::drafter::{
    DrafterConfig, DrafterError, DrafterModel, Param, ParamLayout, Params, ValueHasher,
};

/// Masters and moments, float32.
pub const TENSORS_FILE: &str = "training.safetensors";
/// [`TrainState`].
pub const STATE_FILE: &str = "state.json";
/// The ledger's words, as `shm` keeps them.
pub const LEDGER_FILE: &str = "ledger.bin";
/// The resolved plan.
pub const PLAN_FILE: &str = "plan.toml";
/// The link to the newest checkpoint.
pub const LATEST: &str = "latest";

const FORMAT: u32 = 1;
const STEP: &str = "step-";
const WRITING: &str = ".writing-";
const REMOVING: &str = ".removing-";

/// Where a run stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The last committed step.
    pub step: u64,
    /// Anchors of all committed steps.
    pub anchors_committed: u64,
    /// Anchors of the whole run.
    pub anchors_planned: u64,
}

impl Progress {
    /// Position of the schedule, anchors committed ÷ anchors planned.
    pub fn position(&self) -> f64 {
        self.anchors_committed as f64 / self.anchors_planned.max(1) as f64
    }
}

/// `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// Version of this layout.
    pub format: u32,
    /// Where the run stands.
    pub progress: Progress,
    /// Updates of the optimizer, for its bias correction.
    pub optimizer_count: u64,
    /// Non-finite steps since the last good one.
    pub non_finite_in_a_row: u32,
    /// Hash of what the plan fixes; a run with another plan does not resume.
    pub plan_hash: String,
    /// Hash of the masters' values.
    pub parameter_hash: String,
    /// Every other file of the checkpoint.
    pub files: BTreeMap<String, Written>,
}

/// What a checkpoint carries for others than the drafter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunRecord {
    /// The ledger's words.
    pub ledger: Vec<u8>,
    /// The resolved plan.
    pub plan: String,
    /// Its hash.
    pub plan_hash: String,
    /// What the drafter is for.
    pub provenance: Provenance,
}

/// A checkpoint in host memory: taken between two steps, written by a thread meanwhile.
#[derive(Clone, Debug)]
pub struct Snapshot {
    config: DrafterConfig,
    masters: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
    optimizer_count: u64,
    non_finite_in_a_row: u32,
    progress: Progress,
    record: RunRecord,
}

/// What can go wrong with checkpoints.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file cannot be written; the earlier checkpoint is untouched.
    #[error("checkpoint not written: {0}; the earlier checkpoint is untouched")]
    Disk(#[from] DiskError),
    /// The serving files are not usable.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// A tensor cannot be read.
    #[error(transparent)]
    Tensors(#[from] TensorFileError),
    /// The drafter cannot be built from it.
    #[error(transparent)]
    Drafter(#[from] DrafterError),
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The directory cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The checkpoint is not whole.
    #[error("{} is no whole checkpoint: {what}", path.display())]
    Broken {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

impl Snapshot {
    /// Copies masters and moments to the host.
    pub fn take<E: Engine>(
        engine: &E,
        model: &DrafterModel<E>,
        optimizer: &Optimizer<E>,
        progress: Progress,
        record: RunRecord,
    ) -> Result<Self, EngineError> {
        Ok(Self {
            config: model.config().clone(),
            masters: engine.download_float(model.params.masters.view())?,
            m: engine.download_float(optimizer.m.view())?,
            v: engine.download_float(optimizer.v.view())?,
            optimizer_count: optimizer.count,
            non_finite_in_a_row: optimizer.non_finite_in_a_row,
            progress,
            record,
        })
    }
}

/// Writes `root/step-N`, moves `latest` to it and removes all but the `keep` newest and the best. Returns
/// its path.
///
/// # Errors
/// Any operation of the file system before `latest` has moved, which then still leads to the earlier
/// checkpoint. Old checkpoints that cannot be removed are only logged.
pub fn write_checkpoint(
    root: &Path,
    snapshot: &Snapshot,
    keep: usize,
) -> Result<PathBuf, CheckpointError> {
    write_on(&mut Disk::default(), root, snapshot, keep)
}

fn write_on(
    disk: &mut Disk,
    root: &Path,
    snapshot: &Snapshot,
    keep: usize,
) -> Result<PathBuf, CheckpointError> {
    let name = step_name(snapshot.progress.step);
    let temporary = root.join(format!("{WRITING}{name}"));
    let place = root.join(&name);
    disk.create_dir(root)?;
    remove_leftovers(disk, root)?;
    let written = write_files(disk, &temporary, snapshot)
        .and_then(|()| disk.place(&temporary, &place))
        .and_then(|()| disk.sync_dir(root));
    if let Err(error) = written {
        if temporary.exists() {
            // The failure that led here is the one to report.
            let _ = disk.remove_dir(&temporary);
        }
        return Err(error.into());
    }
    disk.link(
        &name,
        &root.join(LATEST),
        &root.join(format!("{WRITING}{LATEST}")),
    )?;
    disk.sync_dir(root)?;
    if let Err(error) = tidy(disk, root, snapshot.progress.step, keep) {
        tracing::warn!(
            "{} is written, but old ones remain: {error}",
            place.display()
        );
    }
    Ok(place)
}

/// Removes what `step` replaced and all but the `keep` newest and the best.
fn tidy(disk: &mut Disk, root: &Path, step: u64, keep: usize) -> Result<(), CheckpointError> {
    // Where this step existed before, it has changed places with the new one.
    remove_leftovers(disk, root)?;
    let best = best::linked(root);
    let old: Vec<_> = steps(root)?.into_iter().skip(keep.max(1)).collect();
    let stays = |old: u64| old == step || best.as_ref() == Some(&step_name(old));
    for old in old.into_iter().filter(|&old| !stays(old)) {
        remove(disk, root, old)?;
    }
    Ok(())
}

fn write_files(disk: &mut Disk, dir: &Path, snapshot: &Snapshot) -> Result<(), DiskError> {
    let layout = ParamLayout::new(&snapshot.config);
    disk.create_dir(dir)?;
    let record = &snapshot.record;
    let mut files = export::write_serving(
        disk,
        dir,
        &snapshot.config,
        &snapshot.masters,
        &record.provenance,
    )?;
    let parts = [
        ("master.", &snapshot.masters),
        ("m.", &snapshot.m),
        ("v.", &snapshot.v),
    ];
    let all: Vec<_> = parts
        .iter()
        .flat_map(|(prefix, flat)| sources(&layout, prefix, flat))
        .collect();
    let written = disk.write(&dir.join(TENSORS_FILE), |out| {
        tensors::write(out, &all, Dtype::F32)
    })?;
    files.insert(TENSORS_FILE.to_string(), written);
    for (name, bytes) in [
        (LEDGER_FILE, record.ledger.as_slice()),
        (PLAN_FILE, record.plan.as_bytes()),
    ] {
        let written = disk.write(&dir.join(name), |out| out.write_all(bytes))?;
        files.insert(name.to_string(), written);
    }
    let state = TrainState {
        format: FORMAT,
        progress: snapshot.progress,
        optimizer_count: snapshot.optimizer_count,
        non_finite_in_a_row: snapshot.non_finite_in_a_row,
        plan_hash: record.plan_hash.clone(),
        parameter_hash: hash_flat(&layout, &snapshot.masters).to_hex().to_string(),
        files,
    };
    let json = serde_json::to_string_pretty(&state).expect("strings and numbers always serialise");
    disk.write(&dir.join(STATE_FILE), |out| {
        out.write_all(json.as_bytes())?;
        out.write_all(b"\n")
    })?;
    disk.sync_dir(dir)
}

/// The hash that [`Params::value_hash`] would give.
fn hash_flat(layout: &ParamLayout, flat: &[f32]) -> blake3::Hash {
    let mut hasher = ValueHasher::default();
    for p in layout.params() {
        let begin = p.window.offset;
        hasher.add(&p.name, &p.shape(), &flat[begin..begin + p.window.len()]);
    }
    hasher.finish()
}

/// Removes what a killed writer left, and what was replaced.
fn remove_leftovers(disk: &mut Disk, root: &Path) -> Result<(), CheckpointError> {
    for name in names(root)? {
        if (name.starts_with(WRITING) || name.starts_with(REMOVING)) && root.join(&name).is_dir() {
            disk.remove_dir(&root.join(name))?;
        }
    }
    Ok(())
}

/// Removes a checkpoint, which first takes a name that nobody reads.
fn remove(disk: &mut Disk, root: &Path, step: u64) -> Result<(), CheckpointError> {
    let doomed = root.join(format!("{REMOVING}{STEP}{step}"));
    disk.place(&root.join(step_name(step)), &doomed)?;
    disk.remove_dir(&doomed)?;
    Ok(())
}

/// Name of a step's checkpoint.
pub(super) fn step_name(step: u64) -> String {
    format!("{STEP}{step}")
}

fn names(root: &Path) -> Result<Vec<String>, CheckpointError> {
    let read = |source| CheckpointError::Read {
        path: root.to_path_buf(),
        source,
    };
    fs::read_dir(root)
        .map_err(read)?
        .map(|entry| {
            Ok(entry
                .map_err(read)?
                .file_name()
                .to_string_lossy()
                .into_owned())
        })
        .collect()
}

/// Steps with a checkpoint, newest first.
fn steps(root: &Path) -> Result<Vec<u64>, CheckpointError> {
    let mut steps: Vec<u64> = names(root)?
        .iter()
        .filter_map(|name| name.strip_prefix(STEP)?.parse().ok())
        .collect();
    steps.sort_unstable_by(|a, b| b.cmp(a));
    Ok(steps)
}

/// A checkpoint whose files were all found whole.
pub struct Checkpoint {
    /// Its directory.
    pub path: PathBuf,
    /// The drafter's shape.
    pub config: DrafterConfig,
    /// Where it stands.
    pub state: TrainState,
    /// What it carries for others.
    pub record: RunRecord,
    tensors: TensorFile,
}

/// The checkpoint to resume from.
pub struct Found {
    /// The newest whole one.
    pub checkpoint: Checkpoint,
    /// Newer ones that are not whole, and why.
    pub passed_over: Vec<CheckpointError>,
}

/// Finds the checkpoint to resume from under `root`: the one `latest` leads to, else the newest whole one.
/// `None` where there is no checkpoint at all.
///
/// # Errors
/// There are checkpoints, but none is whole: the first one's fault.
pub fn newest_checkpoint(root: &Path) -> Result<Option<Found>, CheckpointError> {
    if !root.is_dir() {
        return Ok(None);
    }
    let mut candidates: Vec<PathBuf> = steps(root)?
        .into_iter()
        .map(|step| root.join(step_name(step)))
        .collect();
    if let Ok(target) = fs::read_link(root.join(LATEST)) {
        let target = root.join(target);
        if let Some(i) = candidates.iter().position(|path| *path == target) {
            candidates[..=i].rotate_right(1);
        }
    }
    let mut passed_over = Vec::new();
    for path in candidates {
        match Checkpoint::open(&path) {
            Ok(checkpoint) => {
                return Ok(Some(Found {
                    checkpoint,
                    passed_over,
                }));
            }
            Err(error) => passed_over.push(error),
        }
    }
    match passed_over.into_iter().next() {
        None => Ok(None),
        Some(first) => Err(first),
    }
}

impl Checkpoint {
    /// Opens a checkpoint and compares every file with its record.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let broken = |what: String| CheckpointError::Broken {
            path: path.to_path_buf(),
            what,
        };
        let state =
            fs::read(path.join(STATE_FILE)).map_err(|e| broken(format!("{STATE_FILE}: {e}")))?;
        let state: TrainState =
            serde_json::from_slice(&state).map_err(|e| broken(format!("{STATE_FILE}: {e}")))?;
        if state.format != FORMAT {
            return Err(broken(format!(
                "its format is {}, this program reads {FORMAT}",
                state.format
            )));
        }
        for (name, written) in &state.files {
            if let Some(what) = written.difference(&path.join(name)) {
                return Err(broken(what));
            }
        }
        let read =
            |name: &str| fs::read(path.join(name)).map_err(|e| broken(format!("{name}: {e}")));
        let plan =
            String::from_utf8(read(PLAN_FILE)?).map_err(|e| broken(format!("{PLAN_FILE}: {e}")))?;
        Ok(Self {
            config: export::read_config(path)?,
            record: RunRecord {
                ledger: read(LEDGER_FILE)?,
                plan,
                plan_hash: state.plan_hash.clone(),
                provenance: export::read_provenance(path)?
                    .ok_or_else(|| broken("it has no provenance".to_string()))?,
            },
            tensors: TensorFile::open(&path.join(TENSORS_FILE))?,
            state,
            path: path.to_path_buf(),
        })
    }

    /// Puts masters, moments and counts on an engine, bit for bit as they were.
    pub fn restore<E: Engine>(
        &self,
        engine: &E,
        options: OptimizerOptions,
    ) -> Result<(Params<E>, Optimizer<E>), CheckpointError> {
        let layout = ParamLayout::new(&self.config);
        let masters = self.flat(&layout, "master.")?;
        let hash = hash_flat(&layout, &masters).to_hex().to_string();
        if hash != self.state.parameter_hash {
            return Err(CheckpointError::Broken {
                path: self.path.clone(),
                what: "the masters' values are not those of its parameter hash".to_string(),
            });
        }
        let part = |p: &Param| masters[p.window.offset..p.window.offset + p.window.len()].to_vec();
        let params = Params::from_values(engine, &self.config, |p| Ok(part(p)))?;
        let mut optimizer = Optimizer::new(engine, &layout, options)?;
        engine.write_float(optimizer.m.view_mut(), &self.flat(&layout, "m.")?)?;
        engine.write_float(optimizer.v.view_mut(), &self.flat(&layout, "v.")?)?;
        optimizer.count = self.state.optimizer_count;
        optimizer.non_finite_in_a_row = self.state.non_finite_in_a_row;
        Ok((params, optimizer))
    }

    /// Reads the tensors of `prefix` into a flat buffer.
    fn flat(&self, layout: &ParamLayout, prefix: &str) -> Result<Vec<f32>, CheckpointError> {
        let mut flat = vec![0.0; layout.len()];
        for p in layout.params() {
            let values = self
                .tensors
                .read(&format!("{prefix}{}", p.name), &p.shape())?;
            flat[p.window.offset..p.window.offset + p.window.len()].copy_from_slice(&values);
        }
        Ok(flat)
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk::fault::{Fault, Kind};
    use super::*;
    use crate::model::drafter::config::tests::small_config;

    /// A snapshot whose every value follows from the step.
    fn snapshot(step: u64) -> Snapshot {
        let config = small_config();
        let len = ParamLayout::new(&config).len();
        let flat = |salt: u64| -> Vec<f32> {
            (0..len as u64)
                .map(|i| ((i * 37 + salt * 101 + step * 13) % 1009) as f32 / 7.0)
                .collect()
        };
        Snapshot {
            masters: flat(1),
            m: flat(2),
            v: flat(3),
            config,
            optimizer_count: step,
            non_finite_in_a_row: 0,
            progress: Progress {
                step,
                anchors_committed: 96 * step,
                anchors_planned: 9600,
            },
            record: RunRecord {
                ledger: step.to_le_bytes().repeat(10),
                plan: format!("seed = {step}\n"),
                plan_hash: "abc".into(),
                provenance: Provenance {
                    target: "tiny".into(),
                    block_size: 4,
                    mask_token_id: 3,
                    slot_convention: export::SLOT_CONVENTION.into(),
                    ..Provenance::default()
                },
            },
        }
    }

    fn assert_is(found: &Checkpoint, step: u64) {
        let expected = snapshot(step);
        assert_eq!(found.state.progress, expected.progress);
        assert_eq!(found.record, expected.record);
        assert_eq!(found.config, expected.config);
        let layout = ParamLayout::new(&found.config);
        for (prefix, flat) in [
            ("master.", &expected.masters),
            ("m.", &expected.m),
            ("v.", &expected.v),
        ] {
            let read = found.flat(&layout, prefix).unwrap();
            for p in layout.params() {
                let range = p.window.offset..p.window.offset + p.window.len();
                assert_eq!(read[range.clone()], flat[range], "{prefix}{}", p.name);
            }
        }
    }

    #[test]
    fn a_checkpoint_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("checkpoints");
        assert!(newest_checkpoint(&root).unwrap().is_none());
        let path = write_checkpoint(&root, &snapshot(7), 2).unwrap();
        assert_eq!(path, root.join("step-7"));
        let found = newest_checkpoint(&root).unwrap().unwrap();
        assert!(found.passed_over.is_empty());
        assert_is(&found.checkpoint, 7);
        // The serving half stands on its own.
        let file = TensorFile::open(&path.join(export::WEIGHTS_FILE)).unwrap();
        assert_eq!(
            file.names().len(),
            2 + 1 + 11 * small_config().num_hidden_layers
        );
        let out = dir.path().join("serving");
        export::export(&path, &out).unwrap();
        assert_eq!(names(&out).unwrap().len(), 3);
        assert_eq!(export::read_config(&out).unwrap(), small_config());
        assert!(matches!(
            export::export(&path, &out),
            Err(ExportError::Exists(_))
        ));
    }

    #[test]
    fn the_newest_are_kept_and_latest_leads_to_the_last_written() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for step in [10, 20, 30, 40] {
            write_checkpoint(root, &snapshot(step), 2).unwrap();
        }
        assert_eq!(steps(root).unwrap(), [40, 30]);
        assert_eq!(
            fs::read_link(root.join(LATEST)).unwrap(),
            Path::new("step-40")
        );
        // The same step again: replaced in one operation.
        let mut again = snapshot(40);
        again.record.plan = "other".into();
        write_checkpoint(root, &again, 2).unwrap();
        assert_eq!(steps(root).unwrap(), [40, 30]);
        let found = newest_checkpoint(root).unwrap().unwrap();
        assert_eq!(found.checkpoint.record.plan, "other");
        let left = names(root).unwrap();
        assert!(left.iter().all(|n| !n.starts_with('.')), "{left:?}");
    }

    #[test]
    fn the_best_stays_however_old() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for step in [10, 20, 30, 40] {
            write_checkpoint(root, &snapshot(step), 1).unwrap();
            if step == 20 {
                best::Best::new(20, 5, 2).unwrap().keep(root).unwrap();
            }
        }
        assert_eq!(steps(root).unwrap(), [40, 20]);
        best::Best::new(40, 6, 2).unwrap().keep(root).unwrap();
        write_checkpoint(root, &snapshot(50), 1).unwrap();
        assert_eq!(steps(root).unwrap(), [50, 40]);
        // It is not what a run goes on from.
        let found = newest_checkpoint(root).unwrap().unwrap();
        assert_is(&found.checkpoint, 50);
    }

    #[test]
    fn a_kill_or_a_full_disk_at_any_point_leaves_a_whole_checkpoint() {
        for kind in [Kind::Killed, Kind::Full] {
            let mut failures = 0;
            for at in 0..1000 {
                let dir = tempfile::tempdir().unwrap();
                let root = dir.path();
                let write = |step, at| {
                    let mut disk = Disk {
                        fault: Some(Fault { at, kind, seen: 0 }),
                    };
                    let result = write_on(&mut disk, root, &snapshot(step), 1);
                    let reached = disk.fault.is_some_and(|fault| fault.seen > at);
                    (result, reached)
                };
                write(10, usize::MAX).0.unwrap();
                let (result, reached) = write(20, at);
                let found = newest_checkpoint(root).unwrap().unwrap();
                assert!(found.passed_over.is_empty(), "{kind:?} at {at}");
                let linked = fs::read_link(root.join(LATEST)).unwrap();
                assert_eq!(root.join(linked), found.checkpoint.path);
                let step = found.checkpoint.state.progress.step;
                assert_is(&found.checkpoint, step);
                if result.is_ok() {
                    assert_eq!(step, 20);
                }
                if !reached {
                    break;
                }
                failures += 1;
                // The next one succeeds and clears what was left.
                write(30, usize::MAX).0.unwrap();
                assert_is(&newest_checkpoint(root).unwrap().unwrap().checkpoint, 30);
                let mut left = names(root).unwrap();
                left.sort();
                assert_eq!(left, ["latest", "step-30"], "{kind:?} at {at}");
            }
            // Seven files, each created, written and synced, the directories, the rename and the link.
            assert!((25..500).contains(&failures), "{failures}");
        }
    }

    #[test]
    fn a_damaged_checkpoint_is_passed_over_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for step in [10, 20] {
            write_checkpoint(root, &snapshot(step), 5).unwrap();
        }
        let path = root.join("step-20").join(LEDGER_FILE);
        let mut bytes = fs::read(&path).unwrap();
        bytes[3] ^= 1;
        fs::write(&path, bytes).unwrap();
        let found = newest_checkpoint(root).unwrap().unwrap();
        assert_is(&found.checkpoint, 10);
        let text = found.passed_over[0].to_string();
        assert!(
            text.contains("step-20") && text.contains(LEDGER_FILE),
            "{text}"
        );
        fs::remove_file(root.join("step-10").join(TENSORS_FILE)).unwrap();
        let error = newest_checkpoint(root).err().unwrap().to_string();
        assert!(error.contains("step-20"), "{error}");
    }
}
