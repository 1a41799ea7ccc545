//! The drafter worker: takes units, trains, reduces, commits, and writes checkpoints when it is the lowest.

use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use super::held_out::evaluate;
use super::slot::{copy_in, register};
use super::{Replay, Start, WorkerError, WorkerPlan, report_memory};
use crate::collective::{Collective, Nccl, SharedMemory};
use crate::control::{FromWorker, Loaded, Reporter, StepReport, WorkerLink};
use crate::data::Workload;
use crate::engine::Engine;
use crate::engine::cpu::Cpu;
use crate::engine::cuda::Cuda;
use crate::launch::process;
use crate::model::TargetHead;
use crate::model::drafter::{Document, DrafterConfig, DrafterModel, ParamLayout, Params};
use crate::shm::{
    Activity, Agreed, Closed, Drafter, Entry, Item, Joined, Reduce, Reduced, RunId, Save, Segment,
    Settled, StopReason, Take, Vote,
};
use crate::train::anchors::{AnchorKey, draw_anchors};
use crate::train::checkpoint::{
    Checkpoint, CheckpointError, Progress, RunRecord, Snapshot, write_checkpoint,
};
use crate::train::export::{Provenance, SLOT_CONVENTION, load_serving};
use crate::train::micro_step::{MicroStepOut, UnitBatch, micro_step};
use crate::train::optimizer::{NON_FINITE_LIMIT, Optimizer, StepOutcome, StepSums};
use crate::train::schedule::learning_rate;

/// Longest wait for another member inside the all-reduce: all of them are there when it begins.
const REDUCE_DEADLINE: Duration = Duration::from_secs(120);
/// Sums that travel behind the gradients, before two for each position of a block.
const TOTALS: usize = 5;

/// All of these for blocks of `block` slots: the first of a block is the anchor, which predicts nothing.
fn totals_count(block: usize) -> usize {
    TOTALS + 2 * block.saturating_sub(1)
}

/// Elements of each drafter's all-reduce buffer for a drafter of this shape.
pub fn reduce_floats(config: &DrafterConfig) -> u64 {
    (ParamLayout::new(config).len() + totals_count(config.block_size)) as u64
}

/// Plays a drafter, from plan to leaving.
///
/// # Errors
/// [`WorkerError`]: whatever keeps it from going on.
pub fn run(link: &WorkerLink) -> Result<(), WorkerError> {
    let plan: WorkerPlan = link.plan()?;
    match plan.gpu {
        None => {
            let engine = Cpu::new(link.threads())?;
            play(link, plan, &engine, SharedMemory::default())
        }
        Some(gpu) => play(link, plan, &Cuda::new(gpu as usize)?, Nccl::default()),
    }
}

fn play<E: Engine, C: Collective<E>>(
    link: &WorkerLink,
    plan: WorkerPlan,
    engine: &E,
    collective: C,
) -> Result<(), WorkerError> {
    let reporter = link.reporter();
    reporter.loading("the target's embedding and head", 0.0)?;
    let trainer = Trainer::load(engine, plan, link, collective)?;
    let parameters = trainer.model.params.value_hash(engine)?;
    reporter.ready(Loaded {
        memory: process::resident_memory(std::process::id()).unwrap_or(0),
        parameters: Some(parameters.to_hex().to_string()),
    })?;
    trainer.seat.live().set(Activity::WaitLauncher, 0);
    if !link.wait_start()? {
        return Ok(trainer.seat.leave()?);
    }
    trainer.run()?;
    report_memory(engine, &reporter)
}

/// What a step adds up to on this drafter.
#[derive(Default)]
struct StepWork {
    sums: MicroStepOut,
    tokens: u64,
}

impl StepWork {
    /// Loss, weight, accepted tokens, blocks, tokens; then supervised slots by position, and the right ones.
    fn totals(&self, block: usize) -> Vec<f32> {
        let accepted: u64 = self.sums.accepted.iter().map(|&a| u64::from(a)).sum();
        let mut totals = vec![
            self.sums.loss_sum as f32,
            self.sums.weight_sum as f32,
            accepted as f32,
            self.sums.accepted.len() as f32,
            self.tokens as f32,
        ];
        let positions = totals_count(block) - TOTALS;
        for counts in [&self.sums.slots, &self.sums.correct] {
            let counts = counts.iter().copied().chain(std::iter::repeat(0));
            totals.extend(counts.take(positions / 2).map(|count| count as f32));
        }
        totals
    }
}

struct Trainer<'a, E: Engine, C> {
    engine: &'a E,
    plan: WorkerPlan,
    work: Workload,
    head: TargetHead<E>,
    model: DrafterModel<E>,
    optimizer: Optimizer<E>,
    collective: C,
    seat: Drafter,
    reporter: Reporter,
    progress: Progress,
    step: StepWork,
    held_out: Vec<u32>,
    replay: Option<Replay>,
    /// Values are compared across drafters with the next step.
    compare: bool,
    writer: Option<JoinHandle<Result<PathBuf, CheckpointError>>>,
}

impl<'a, E: Engine, C: Collective<E>> Trainer<'a, E, C> {
    fn load(
        engine: &'a E,
        plan: WorkerPlan,
        link: &WorkerLink,
        collective: C,
    ) -> Result<Self, WorkerError> {
        let run_id: RunId = plan.run_id.parse().map_err(WorkerError::Plan)?;
        let segment = Segment::attach(link.descriptor("segment")?, Some(run_id))?;
        let rank = link.name().rank;
        let mut seat = segment.drafter(rank, plan.incarnation, Entry::Founder)?;
        seat.set_reduce_deadline(Some(REDUCE_DEADLINE));
        seat.live().set(Activity::Loading, 0);

        register(engine, &segment)?;
        let work = Workload::open(&plan.work)?;
        let (units, drafters) = (segment.geometry().units, segment.geometry().drafters);
        let replay = plan.replay.as_deref();
        let replay = replay
            .map(|path| Replay::read(path, units, drafters))
            .transpose()?;
        let config = DrafterConfig::from_json(&plan.drafter)?;
        let files = plan.target_files()?;
        let head = TargetHead::load(engine, &files)?;
        let layout = ParamLayout::new(&config);
        let mut progress = Progress {
            anchors_planned: work.planned_anchors(),
            ..Progress::default()
        };
        let (params, optimizer) = match &plan.start {
            Start::Fresh => (
                Params::init(engine, &config, plan.seed)?,
                Optimizer::new(engine, &layout, plan.optimizer.clone())?,
            ),
            Start::Weights(path) => {
                let (found, params) = load_serving(engine, path)?;
                if found.num_hidden_layers != config.num_hidden_layers
                    || found.hidden_size != config.hidden_size
                {
                    let what = format!("{} holds a drafter of another shape", path.display());
                    return Err(WorkerError::Plan(what));
                }
                let optimizer = Optimizer::new(engine, &layout, plan.optimizer.clone())?;
                (params, optimizer)
            }
            Start::Resume(path) => {
                let checkpoint = Checkpoint::open(path)?;
                progress = checkpoint.state.progress;
                checkpoint.restore(engine, plan.optimizer.clone())?
            }
        };
        let mut model = DrafterModel::new(engine, config, params)?;
        let most_anchors = work.units.max_anchors().max(1) as usize;
        let positions = work.slot_tokens() as usize;
        model.reserve(
            engine,
            work.units.max_tokens() as usize,
            most_anchors,
            positions,
        )?;
        model.params.zero_grads(engine)?;
        Ok(Self {
            engine,
            plan,
            work,
            head,
            model,
            optimizer,
            collective,
            seat,
            reporter: link.reporter(),
            progress,
            step: StepWork::default(),
            held_out: Vec::new(),
            replay,
            compare: true,
            writer: None,
        })
    }

    fn run(mut self) -> Result<(), WorkerError> {
        let Some(held_out) = self.seat.wait_eval()? else {
            return Ok(self.seat.leave()?);
        };
        self.held_out = held_out;
        let Some(joined) = self.seat.enter()? else {
            return Ok(self.seat.leave()?);
        };
        self.joined(&joined)?;
        self.evaluate()?;
        loop {
            self.seat.live().set(Activity::Busy, 0);
            match self.take()? {
                Take::Item(item) => self.train(&item)?,
                Take::Joined(joined) => self.joined(&joined)?,
                Take::Close if self.close()? => {}
                Take::Close | Take::Leave => break,
            }
        }
        self.save(true)?;
        // Whoever asked for an early end does not want to wait for figures.
        if self
            .seat
            .segment()
            .stop()
            .is_none_or(|stop| stop.why == StopReason::MaxSteps)
        {
            self.evaluate()?;
        }
        self.seat.leave()?;
        self.collective.finish();
        Ok(())
    }

    /// The next unit: the oldest ready one, or the one that the recorded run says.
    fn take(&mut self) -> Result<Take, WorkerError> {
        let Some(replay) = &self.replay else {
            return Ok(self.seat.take()?);
        };
        let units = replay.units(self.seat.step(), self.seat.rank());
        Ok(match units.get(self.seat.items().len()) {
            Some(&unit) => self.seat.take_unit(unit)?,
            // Behind the record: leave, as was agreed in its last step.
            None if self.seat.step() > replay.last() => self.seat.take()?,
            None => Take::Close,
        })
    }

    /// The group formed (again), for the step at hand.
    fn joined(&mut self, joined: &Joined) -> Result<(), WorkerError> {
        tracing::info!(
            "step {}, generation {}: members {:#b}",
            joined.step,
            joined.generation,
            joined.members
        );
        Ok(self.collective.regroup(self.engine, joined)?)
    }

    /// One micro-step on a unit: forward, loss, backward; gradients and sums are added to the step's.
    fn train(&mut self, item: &Item) -> Result<(), WorkerError> {
        let engine = self.engine;
        let _doing = self.seat.live().during(Activity::Train, item.unit());
        let view = self.seat.view(item)?;
        let config = self.model.config();
        let width = config.captured() * config.hidden_size;
        let teacher = self.plan.loss.use_soft_labels.then_some(config.hidden_size);
        // SAFETY: a held slot is freed in `finish_step` at the earliest, after the step's sums were read back.
        let states = unsafe { copy_in(engine, &view, width, teacher)? };
        let epoch = self.work.epoch(item.unit());
        let offsets = view.offsets();
        let (ids, masks) = (view.ids(), view.mask());
        let ranges = || {
            let range = |pair: &[u32]| pair[0] as usize..pair[1] as usize;
            offsets.windows(2).map(range)
        };
        let anchors: Vec<Vec<u32>> = ranges()
            .zip(view.rows())
            .map(|(range, &row)| {
                if item.header().weightless {
                    // Hidden states that are not finite: the unit still costs its micro-step.
                    return Vec::new();
                }
                let (seed, document) = (self.plan.seed, u64::from(row));
                let key = AnchorKey {
                    seed,
                    epoch,
                    document,
                };
                draw_anchors(key, &masks[range], self.plan.anchors)
            })
            .collect();
        let documents: Vec<Document<'_>> = ranges()
            .zip(&anchors)
            .map(|(range, anchors)| Document {
                ids: &ids[range.clone()],
                mask: &masks[range],
                anchors,
            })
            .collect();
        let unit = UnitBatch {
            documents: &documents,
            states: states.captured.view(),
            teacher: states.teacher.as_ref().map(|teacher| teacher.view()),
        };
        let tables = self.head.tables();
        let out = micro_step(engine, &mut self.model, tables, &unit, &self.plan.loss)?;
        self.step.sums.add(&out);
        self.step.tokens += view.tokens() as u64;
        Ok(())
    }

    /// g1 to the end of the step at hand; false when all units are trained and it is time to leave.
    fn close(&mut self) -> Result<bool, WorkerError> {
        let step = self.seat.step();
        let every = |count: Option<u64>| count.is_some_and(|count| step.is_multiple_of(count));
        // What is evaluated is saved too, so that the best can be kept.
        let evaluate = every(self.plan.eval_every);
        let save = every(self.plan.saving.every) || evaluate && !self.held_out.is_empty();
        let vote = Vote {
            // The last step, if there is one, stands in shared memory: targets must know it too.
            stop: false,
            evaluate,
            hash: if std::mem::take(&mut self.compare) {
                self.value_hash()?
            } else {
                0
            },
        };
        // Values that are saved are compared too.
        self.compare = save;
        if let Closed::Joined(joined) = self.seat.close(vote)? {
            self.compare = true;
            self.joined(&joined)?;
            return Ok(true);
        }
        let agreed = match self.seat.wait_reduce()? {
            Reduce::Agreed(agreed) => agreed,
            Reduce::Joined(joined) => {
                self.compare = true;
                self.joined(&joined)?;
                return Ok(true);
            }
            Reduce::Leave => return Ok(false),
        };
        if let Some(hashes) = agreed.hash_mismatch() {
            return Err(WorkerError::Diverged { step, hashes });
        }
        let mut totals = self.step.totals(self.model.config().block_size);
        let healthy = agreed.items() == 0 || {
            let gradients = &mut self.model.params.grads;
            let collective = &mut self.collective;
            let reduced =
                collective.all_reduce(self.engine, &mut self.seat, gradients, &mut totals)?;
            reduced == Reduced::Done
        };
        match self.seat.settle(healthy)? {
            Settled::Committed => self.committed(&agreed, &totals)?,
            Settled::Aborted(joined) => {
                // The weights are as they were before the step, so the same units give the same gradients.
                self.forget_step()?;
                self.compare = true;
                self.joined(&joined)?;
                for item in self.seat.items().to_vec() {
                    self.train(&item)?;
                }
                return Ok(true);
            }
            Settled::Leave => return Ok(false),
        }
        if save && agreed.items() > 0 {
            self.save(false)?;
        }
        if agreed.evaluate() {
            self.evaluate()?;
        }
        Ok(true)
    }

    /// The step has happened for all drafters: the optimizer's step, c2 and c3.
    fn committed(&mut self, agreed: &Agreed, totals: &[f32]) -> Result<(), WorkerError> {
        let (&[loss, weight, accepted, blocks, tokens], positions) = totals
            .split_first_chunk::<TOTALS>()
            .expect("`StepWork::totals` makes at least these");
        if agreed.items() > 0 {
            // An empty step, which only a stop brings about, leaves no trace.
            self.progress.step = agreed.step;
            self.progress.anchors_committed += agreed.anchors();
        }
        let lr = learning_rate(&self.plan.optimizer, self.progress.position());
        let mut grad_norm = 0.0;
        if agreed.items() > 0 {
            let _doing = self.seat.live().during(Activity::Optimizer, agreed.step);
            let sums = StepSums {
                loss: f64::from(loss),
                weight: f64::from(weight),
            };
            match self
                .optimizer
                .step(self.engine, &mut self.model.params, sums, lr)?
            {
                StepOutcome::Updated { grad_norm: norm } => grad_norm = norm,
                StepOutcome::NoWeight => {}
                StepOutcome::NonFinite { in_a_row } => self.not_finite(agreed, in_a_row)?,
            }
        }
        self.seat.finish_step()?;
        self.forget_step()?;
        if agreed.items() > 0 && self.seat.is_lowest() {
            let ratio = |sum: f32, count: f32| f64::from(sum) / f64::from(count);
            let (slots, right) = positions.split_at(positions.len() / 2);
            let units = |member: &crate::shm::MemberRecord| (member.rank, member.units.clone());
            self.reporter.send(FromWorker::Step(StepReport {
                step: agreed.step as u32,
                loss: ratio(loss, weight),
                block_accepted_length: ratio(accepted, blocks),
                lr,
                grad_norm,
                tokens: tokens as u64,
                position_accuracy: slots
                    .iter()
                    .zip(right)
                    .map(|(&slots, &right)| ratio(right, slots.max(1.0)))
                    .collect(),
                units: agreed.members.iter().map(units).collect(),
            }))?;
        }
        Ok(())
    }

    /// All drafters skipped the update together; names the documents, and gives up after three in a row.
    fn not_finite(&self, agreed: &Agreed, in_a_row: u32) -> Result<(), WorkerError> {
        let step = agreed.step;
        let units: Vec<u64> = agreed
            .members
            .iter()
            .flat_map(|member| member.units.iter().copied())
            .collect();
        if self.seat.is_lowest() {
            let rows: Vec<u64> = units
                .iter()
                .flat_map(|&unit| self.work.documents(unit))
                .map(|document| document.row)
                .collect();
            self.reporter.warn(format!(
                "step {step}: loss or gradient was NaN or infinite; the update was skipped; rows {rows:?}"
            ));
        }
        if in_a_row >= NON_FINITE_LIMIT {
            return Err(WorkerError::NonFinite {
                step,
                in_a_row,
                units,
            });
        }
        Ok(())
    }

    fn forget_step(&mut self) -> Result<(), WorkerError> {
        self.step = StepWork::default();
        Ok(self.model.params.zero_grads(self.engine)?)
    }

    fn value_hash(&self) -> Result<u64, WorkerError> {
        let hash = self.model.params.value_hash(self.engine)?;
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_bytes()[..8]);
        // 0 stands for "none given".
        Ok(u64::from_le_bytes(first).max(1))
    }

    fn evaluate(&mut self) -> Result<(), WorkerError> {
        let step = self.progress.step;
        let tables = self.head.tables();
        let found = evaluate(
            self.engine,
            &self.seat,
            &mut self.model,
            tables,
            &self.held_out,
            step,
        )?;
        Ok(self.reporter.send(FromWorker::Evaluation(found))?)
    }

    /// The checkpoint of the last committed step, by the lowest member; a thread writes it. `last`: nobody
    /// leaves before it is complete, and one that cannot be written is an error.
    fn save(&mut self, last: bool) -> Result<(), WorkerError> {
        let step = self.progress.step;
        while self.seat.segment().saved() < step {
            match self.seat.wait_save()? {
                Save::Write => {
                    self.write(step)?;
                    if !last {
                        break;
                    }
                    self.join_writer()?;
                }
                Save::Joined(joined) => self.joined(&joined)?,
                Save::NotMine if !last => break,
                Save::NotMine => {
                    if let Some(joined) = self.seat.wait_saved(step)? {
                        self.joined(&joined)?;
                    }
                }
            }
        }
        if last {
            // One of an earlier step may still be on its way.
            self.join_writer()?;
        }
        Ok(())
    }

    fn write(&mut self, step: u64) -> Result<(), WorkerError> {
        if let Err(error) = self.join_writer() {
            // The run goes on with the checkpoint it has.
            self.reporter.warn(error.to_string());
        }
        let doing = self.seat.live().during(Activity::Checkpoint, step);
        let segment = self.seat.segment().clone();
        let saving = &self.plan.saving;
        let config = self.model.config();
        let record = RunRecord {
            ledger: segment.export_ledger(step).to_bytes(),
            plan: saving.plan.clone(),
            plan_hash: saving.plan_hash.clone(),
            provenance: Provenance {
                target: self.plan.target.display().to_string(),
                target_hash: saving.target_hash.clone(),
                target_dtype: if E::HALF_BYTES == 4 {
                    "float32"
                } else {
                    "bfloat16"
                }
                .to_owned(),
                template_hash: saving.template_hash.clone(),
                block_size: config.block_size,
                mask_token_id: config.mask_token_id,
                slot_convention: SLOT_CONVENTION.to_owned(),
            },
        };
        let snapshot = Snapshot::take(
            self.engine,
            &self.model,
            &self.optimizer,
            self.progress,
            record,
        )?;
        drop(doing);
        let (folder, keep) = (saving.folder.clone(), saving.keep);
        let reporter = self.reporter.clone();
        self.writer = Some(std::thread::spawn(move || {
            let path = write_checkpoint(&folder, &snapshot, keep)?;
            segment.mark_saved(step);
            let saved = FromWorker::CheckpointSaved {
                step: step as u32,
                path: path.clone(),
            };
            // Without a launcher the watchdog ends this process.
            let _ = reporter.send(saved);
            Ok(path)
        }));
        Ok(())
    }

    /// Waits for the thread that writes, and says how it went.
    fn join_writer(&mut self) -> Result<(), WorkerError> {
        match self.writer.take().map(JoinHandle::join) {
            None | Some(Ok(Ok(_))) => Ok(()),
            Some(Ok(Err(error))) => Err(error.into()),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }
}
