//! The shared memory between real processes: this test's own binary, started again as targets and drafters,
//! killed with SIGKILL before chosen lines of the protocol, recovered and replaced.
#![cfg(not(feature = "loom"))]

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use slipstream::shm::*;

/// Set in the environment of a worker: its part, as [`Part::to_text`] writes it.
const PART: &str = "SLIPSTREAM_TEST_PART";
const SAVE_EVERY: u64 = 5;
const TOKENS: u32 = 6;

fn anchors(unit: u64) -> u32 {
    1 + (unit % 3) as u32
}

fn geometry(targets: u32, drafters: u32, units: u64) -> Geometry {
    let batch_anchors = 8;
    let units_per_step = units_per_step((0..units).map(anchors), 1, batch_anchors);
    Geometry {
        targets,
        drafters,
        slots: Geometry::slots_needed(units_per_step, drafters, targets) as u32,
        units,
        eval_units: 3,
        slot_tokens: 8,
        slot_documents: 2,
        captured_width: 5,
        hidden: 1,
        final_hidden: false,
        dtype: Dtype::F32,
        batch_anchors,
        units_per_step,
        // Less than is reduced at once, so that it goes in pieces.
        reduce_floats: 3,
        broadcast_bytes: 64,
        check_payload: true,
        first_step: 1,
    }
}

// ---- a worker ---------------------------------------------------------------------------------------------

/// What one process does.
#[derive(Clone, Debug)]
struct Part {
    target: bool,
    index: u32,
    incarnation: u32,
    replacement: bool,
    fd: i32,
    run: RunId,
    folder: PathBuf,
    /// Dies before the n-th time (from 1) at this label.
    dies: Option<(Label, u32)>,
}

impl Part {
    fn to_text(&self) -> String {
        let (label, count) = match self.dies {
            Some((label, count)) => (label.name(), count),
            None => ("-".to_owned(), 0),
        };
        let Part {
            target,
            index,
            incarnation,
            replacement,
            fd,
            run,
            folder,
            ..
        } = self;
        let folder = folder.display();
        format!("{target} {index} {incarnation} {replacement} {fd} {run} {label} {count} {folder}")
    }

    fn from_text(text: &str) -> Self {
        let fields: Vec<&str> = text.splitn(9, ' ').collect();
        let count: u32 = fields[7].parse().unwrap();
        Part {
            target: fields[0].parse().unwrap(),
            index: fields[1].parse().unwrap(),
            incarnation: fields[2].parse().unwrap(),
            replacement: fields[3].parse().unwrap(),
            fd: fields[4].parse().unwrap(),
            run: fields[5].parse().unwrap(),
            dies: Label::from_name(fields[6]).map(|label| (label, count)),
            folder: fields[8].into(),
        }
    }
}

/// Not a test by itself: the processes started below come in here.
#[test]
fn worker() {
    let Ok(text) = std::env::var(PART) else {
        return;
    };
    let part = Part::from_text(&text);
    if let Some((label, count)) = part.dies {
        let passed = AtomicU32::new(0);
        install_label_hook(move |line| {
            if line == label && passed.fetch_add(1, Ordering::Relaxed) + 1 == count {
                let _ = rustix::process::kill_process(
                    rustix::process::getpid(),
                    rustix::process::Signal::KILL,
                );
            }
        });
    }
    // SAFETY: the parent made this descriptor for its workers, and nothing else here uses it.
    let fd = unsafe { OwnedFd::from_raw_fd(part.fd) };
    let segment = Segment::attach(fd, Some(part.run)).unwrap();
    segment.prefault();
    if part.target {
        target(&segment, &part).unwrap();
    } else {
        Trainer::new(&segment, &part).unwrap().run().unwrap();
    }
}

fn target(segment: &Segment, part: &Part) -> Result<()> {
    let mut target = segment.target(part.index, part.incarnation)?;
    while let Next::Unit(lease) = target.next_work()? {
        let unit = lease.unit();
        let Claim::Filling(mut slot) = target.claim(lease, TOKENS, 2)? else {
            break;
        };
        slot.captured::<f32>()?.fill(unit as f32);
        slot.ids().fill(unit as u32);
        slot.mask().fill(1);
        slot.offsets().copy_from_slice(&[0, 2, TOKENS]);
        slot.rows().copy_from_slice(&[unit as u32, unit as u32 + 1]);
        let info = UnitInfo {
            anchors: anchors(unit),
            weightless: unit % 7 == 0,
        };
        target.publish(slot, info)?;
    }
    target.leave();
    Ok(())
}

/// A drafter whose weights count how often each unit has changed them.
struct Trainer {
    drafter: Drafter,
    weights: Vec<u8>,
    folder: PathBuf,
    replacement: bool,
}

impl Trainer {
    fn new(segment: &Segment, part: &Part) -> Result<Self> {
        let entry = if part.replacement {
            Entry::Replacement
        } else {
            Entry::Founder
        };
        let mut drafter = segment.drafter(part.index, part.incarnation, entry)?;
        drafter.set_reduce_deadline(Some(Duration::from_secs(60)));
        let weights = match saved(&part.folder) {
            Some((_, weights)) => weights,
            None => vec![0; segment.geometry().units as usize],
        };
        Ok(Self {
            drafter,
            weights,
            folder: part.folder.clone(),
            replacement: part.replacement,
        })
    }

    fn run(mut self) -> Result<()> {
        let held_out = self.drafter.wait_eval()?.expect("nobody stops before");
        assert_eq!(held_out, [0, 1, 2]);
        for unit in held_out {
            let (header, view) = self.drafter.eval_view(unit)?;
            check(&header, &view);
        }
        let Some(entered) = self.drafter.enter()? else {
            return self.drafter.leave();
        };
        while self.replacement {
            let mut weights = Vec::new();
            match self
                .drafter
                .receive_state(|_, bytes, _| weights.extend_from_slice(bytes))?
            {
                Received::Done => {
                    self.weights = weights;
                    break;
                }
                Received::Again => {}
                Received::Leave => return self.drafter.leave(),
            }
        }
        self.joined(entered)?;
        while self.step()? {}
        self.checkpoint(true)?;
        let name = format!("final-{}", self.drafter.rank());
        std::fs::write(self.folder.join(name), &self.weights).unwrap();
        self.drafter.leave()
    }

    fn step(&mut self) -> Result<bool> {
        loop {
            match self.drafter.take()? {
                Take::Item(item) => check(item.header(), &self.drafter.view(&item)?),
                Take::Joined(joined) => self.joined(joined)?,
                Take::Leave => return Ok(false),
                Take::Close => break,
            }
        }
        if let Closed::Joined(joined) = self.drafter.close(Vote::default())? {
            self.joined(joined)?;
            return Ok(true);
        }
        self.drafter.prefetch()?;
        let agreed = match self.drafter.wait_reduce()? {
            Reduce::Agreed(agreed) => agreed,
            Reduce::Joined(joined) => {
                self.joined(joined)?;
                return Ok(true);
            }
            Reduce::Leave => return Ok(false),
        };
        let mine = self.drafter.items().iter().map(|item| item.unit() as f32);
        let mut gradient = [0f32; 8];
        gradient[7] = mine.clone().sum();
        gradient[0] = mine.count() as f32;
        let healthy =
            agreed.items() == 0 || self.drafter.all_reduce(&mut gradient)? == Reduced::Done;
        match self.drafter.settle(healthy)? {
            Settled::Committed => {
                let units = || agreed.members.iter().flat_map(|member| member.units.iter());
                let sum: u64 = units().sum();
                assert_eq!(
                    (gradient[0], gradient[7]),
                    (units().count() as f32, sum as f32)
                );
                for unit in units() {
                    self.weights[*unit as usize] += 1;
                }
                self.drafter.finish_step()?;
                if agreed.step % SAVE_EVERY == 0 {
                    self.checkpoint(false)?;
                }
            }
            Settled::Aborted(joined) => self.joined(joined)?,
            Settled::Leave => return Ok(false),
        }
        Ok(true)
    }

    fn joined(&mut self, joined: Joined) -> Result<()> {
        if joined.send != 0 {
            let weights = &self.weights;
            self.drafter
                .send_state(joined.send, weights.len() as u64, |offset, bytes| {
                    bytes.copy_from_slice(&weights[offset as usize..][..bytes.len()]);
                })?;
        }
        Ok(())
    }

    fn checkpoint(&mut self, last: bool) -> Result<()> {
        let step = self.drafter.committed();
        while self.drafter.segment().saved() < step {
            match self.drafter.wait_save()? {
                Save::Write => {
                    let ledger = self.drafter.segment().export_ledger(step);
                    assert_eq!(
                        ledger.done(),
                        self.weights.iter().map(|n| u64::from(*n)).sum::<u64>()
                    );
                    let text: String = self.weights.iter().map(|n| char::from(b'0' + n)).collect();
                    let temporary = self.folder.join("saving");
                    std::fs::write(&temporary, format!("{step} {text}")).unwrap();
                    std::fs::rename(temporary, self.folder.join("saved")).unwrap();
                    self.drafter.mark_saved(step);
                }
                Save::Joined(joined) => self.joined(joined)?,
                Save::NotMine if !last => break,
                Save::NotMine => {
                    if let Some(joined) = self.drafter.wait_saved(step)? {
                        self.joined(joined)?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn check(header: &SlotHeader, view: &View<'_>) {
    let unit = header.unit as u32;
    assert_eq!(view.ids(), [unit; TOKENS as usize]);
    assert_eq!(
        view.captured::<f32>().unwrap(),
        [unit as f32; 5 * TOKENS as usize]
    );
    assert_eq!(view.offsets(), [0, 2, TOKENS]);
    assert_eq!(view.rows(), [unit, unit + 1]);
    assert_eq!(header.weightless, unit.is_multiple_of(7));
}

/// The last checkpoint: step and weights.
fn saved(folder: &Path) -> Option<(u64, Vec<u8>)> {
    let text = std::fs::read_to_string(folder.join("saved")).ok()?;
    let (step, weights) = text.split_once(' ')?;
    Some((
        step.parse().ok()?,
        weights.bytes().map(|digit| digit - b'0').collect(),
    ))
}

// ---- the launcher -----------------------------------------------------------------------------------------

struct Launcher {
    segment: Segment,
    recovery: Recovery,
    inherited: OwnedFd,
    folder: tempfile::TempDir,
    /// By seat.
    workers: BTreeMap<u32, (Part, Child)>,
    /// Deaths that are asked for: (seat, incarnation) -> before which line.
    deaths: BTreeMap<(u32, u32), (Label, u32)>,
    /// Replacements that have not been admitted.
    waiting: Vec<u32>,
    died: u32,
}

impl Drop for Launcher {
    fn drop(&mut self) {
        for (_, child) in self.workers.values_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Launcher {
    fn new(geometry: &Geometry, deaths: &[(u32, u32, Label, u32)]) -> Self {
        let segment = Segment::create(geometry, RunId::fresh()).unwrap();
        // Without close-on-exec, as the launcher hands it on.
        let inherited = rustix::io::dup(segment.fd()).unwrap();
        let deaths = deaths
            .iter()
            .map(|&(seat, incarnation, label, count)| ((seat, incarnation), (label, count)));
        let mut launcher = Self {
            recovery: Recovery::new(&segment, true),
            segment,
            inherited,
            folder: tempfile::tempdir().unwrap(),
            workers: BTreeMap::new(),
            deaths: deaths.collect(),
            waiting: Vec::new(),
            died: 0,
        };
        (0..geometry.seats()).for_each(|seat| launcher.start(seat, 1, false));
        launcher
    }

    fn start(&mut self, seat: u32, incarnation: u32, replacement: bool) {
        let targets = self.segment.geometry().targets;
        let target = seat < targets;
        let part = Part {
            target,
            index: if target { seat } else { seat - targets },
            incarnation,
            replacement,
            fd: self.inherited.as_raw_fd(),
            run: self.segment.run_id(),
            folder: self.folder.path().to_owned(),
            dies: self.deaths.get(&(seat, incarnation)).copied(),
        };
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["worker", "--exact", "--nocapture", "--test-threads=1"])
            .env(PART, part.to_text())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        self.workers.insert(seat, (part, child));
    }

    /// Supervises until everybody has left; returns what a snapshot says then.
    fn run(&mut self) -> Snapshot {
        let start = Instant::now();
        while !self.workers.is_empty() {
            assert!(
                start.elapsed() < Duration::from_secs(120),
                "{}",
                self.describe()
            );
            let ended: Vec<(u32, ExitStatus)> = self
                .workers
                .iter_mut()
                .filter_map(|(seat, (_, child))| Some((*seat, child.try_wait().unwrap()?)))
                .collect();
            let idle = ended.is_empty();
            for (seat, status) in ended {
                let (part, _) = self.workers.remove(&seat).unwrap();
                self.waiting.retain(|&waiting| waiting != seat);
                if !status.success() {
                    use std::os::unix::process::ExitStatusExt;
                    assert_eq!(status.signal(), Some(9), "seat {seat} failed: {status}");
                    self.died += 1;
                    self.recover(&part);
                }
            }
            self.admit();
            if idle {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.segment.snapshot()
    }

    fn recover(&mut self, part: &Part) {
        let next = part.incarnation + 1;
        if part.target {
            self.recovery.target_died(part.index, Fate::Respawn, |_| {});
            return self.start(part.index, next, false);
        }
        let seat = self.segment.geometry().drafter_seat(part.index);
        let left = self
            .recovery
            .drafter_died(part.index, None, |_| {})
            .unwrap()
            .members;
        if left != 0 {
            self.start(seat, next, true);
            self.waiting.push(seat);
            return;
        }
        let drafters = self.segment.geometry().drafters;
        assert_eq!(
            drafters, 1,
            "these tests kill all drafters only when there is one"
        );
        let step = saved(self.folder.path()).map_or(0, |(step, _)| step);
        self.recovery.roll_back(step, 1, None).unwrap();
        self.start(seat, next, false);
    }

    /// A replacement that sits has loaded.
    fn admit(&mut self) {
        let segment = self.segment.clone();
        let workers = &self.workers;
        let sits = |seat: u32| {
            let view = &segment.snapshot().seats[seat as usize];
            view.state == SeatState::Occupied && view.incarnation == workers[&seat].0.incarnation
        };
        let (ready, waiting) = self.waiting.iter().partition(|&&seat| sits(seat));
        self.waiting = waiting;
        let ready: Vec<u32> = ready;
        for seat in ready {
            // Refused when the others have left: the newcomer then leaves too.
            let _ = self.recovery.admit(seat - segment.geometry().targets, None);
        }
    }

    fn describe(&self) -> String {
        let snapshot = self.segment.snapshot();
        let seats = snapshot.seats.iter().map(|seat| {
            let (state, activity) = (seat.state, seat.activity);
            format!("{state:?} {activity} {} step {}", seat.detail, seat.step)
        });
        let seats: Vec<_> = seats.collect();
        let (step, ring, ledger) = (snapshot.step, snapshot.ring, snapshot.ledger);
        format!(
            "{seats:#?}\n{step:?}\n{ring:?}\n{ledger:?}\n{:?}",
            snapshot.finish
        )
    }
}

/// Runs to the end and checks that every unit has had its effect exactly once on every drafter.
fn complete(geometry: &Geometry, deaths: &[(u32, u32, Label, u32)]) -> (Launcher, Snapshot) {
    let mut launcher = Launcher::new(geometry, deaths);
    let snapshot = launcher.run();
    let (ring, ledger) = (snapshot.ring, snapshot.ledger);
    assert_eq!(ledger.done, geometry.units, "{deaths:?}");
    assert_eq!(
        ring.free,
        geometry.slots,
        "{deaths:?}: {}",
        launcher.describe()
    );
    let trained = vec![1; geometry.units as usize];
    let mut finals = 0;
    for rank in 0..geometry.drafters {
        // A replacement that came too late leaves without weights.
        if let Ok(weights) = std::fs::read(launcher.folder.path().join(format!("final-{rank}"))) {
            assert_eq!(weights, trained, "{deaths:?}: rank {rank}");
            finals += 1;
        }
    }
    assert!(finals > 0, "{deaths:?}");
    let (_, weights) = saved(launcher.folder.path()).expect("a last checkpoint");
    assert_eq!(weights, trained, "{deaths:?}: the last checkpoint");
    (launcher, snapshot)
}

#[test]
fn thousands_of_units_pass_once_each() {
    let geometry = geometry(2, 2, 3000);
    let start = Instant::now();
    let (_, snapshot) = complete(&geometry, &[]);
    println!("3000 units, 2 targets, 2 drafters: {:.2?}", start.elapsed());
    assert_eq!((snapshot.finish.published, snapshot.finish.taken), (2, 3));
    assert_eq!(snapshot.ledger.deaths, 0);
}

#[test]
fn more_drafters_than_units() {
    complete(&geometry(1, 3, 2), &[]);
}

#[test]
fn a_target_killed_before_any_line_loses_nothing() {
    let geometry = geometry(2, 2, 60);
    for label in [Label::P0, Label::P1, Label::P2, Label::P3, Label::P4] {
        for count in [1, 15] {
            let (launcher, _) = complete(&geometry, &[(1, 1, label, count)]);
            // The other target may have been faster to the last units.
            assert!(count > 1 || launcher.died == 1, "{label:?}");
        }
    }
    for label in [Label::FinishBit, Label::Publish] {
        let deaths = [(0, 1, label, 1), (1, 1, label, 1)];
        complete(&geometry, &deaths);
    }
}

#[test]
fn a_drafter_killed_before_any_line_loses_and_doubles_nothing() {
    let geometry = geometry(2, 2, 60);
    for label in [
        Label::Reserve,
        Label::C0,
        Label::C0t,
        Label::C1,
        Label::C2,
        Label::C3,
        Label::Record,
        Label::G1,
        Label::G2,
        Label::Sentinel,
    ] {
        for count in [1, 4] {
            complete(&geometry, &[(3, 1, label, count)]);
        }
    }
}

#[test]
fn a_replacement_killed_while_it_joins_is_replaced() {
    let geometry = geometry(2, 3, 400);
    for label in [Label::Join, Label::Received, Label::C0, Label::G2] {
        let deaths = [
            (4, 1, Label::G2, 3),
            (4, 2, label, 1),
            (2, 1, Label::C3, 20),
        ];
        complete(&geometry, &deaths);
    }
}

#[test]
fn the_only_drafter_is_replaced_from_the_last_checkpoint() {
    let geometry = geometry(2, 1, 80);
    for label in [Label::C0t, Label::G1, Label::G2, Label::C2, Label::C3] {
        let deaths = [(2, 1, label, 8), (2, 2, label, 8)];
        let (launcher, snapshot) = complete(&geometry, &deaths);
        assert_eq!(launcher.died, 2, "{label:?}");
        assert_eq!(snapshot.finish.roll_backs, 2);
    }
}
