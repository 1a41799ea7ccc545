//! The target worker: leases units, prefills several at once, and publishes each in a slot.

use std::rc::Rc;

use super::slot::{States, fill, register};
use super::{WorkerError, WorkerPlan, report_memory};
use crate::control::{Loaded, WorkerLink};
use crate::data::{Document, Workload};
use crate::engine::cpu::Cpu;
use crate::engine::cuda::Cuda;
use crate::engine::{Engine, Queue};
use crate::launch::process;
use crate::model::drafter::DrafterConfig;
use crate::model::{Captured, Target as Model, TargetNeeds};
use crate::shm::{Activity, Claim, Geometry, Lease, Next, RunId, Segment, Target, UnitInfo};

/// Units with non-finite hidden states that are tolerated: one in this many.
const BAD_STATES_SHARE: u64 = 1000;

/// Plays a target, from plan to leaving.
///
/// # Errors
/// [`WorkerError`]: whatever keeps it from going on.
pub fn run(link: &WorkerLink) -> Result<(), WorkerError> {
    let plan: WorkerPlan = link.plan()?;
    match plan.gpu {
        None => play(link, &plan, &Cpu::new(link.threads())?),
        Some(gpu) => play(link, &plan, &Cuda::new(gpu as usize)?),
    }
}

fn play<E: Engine>(link: &WorkerLink, plan: &WorkerPlan, engine: &E) -> Result<(), WorkerError> {
    let reporter = link.reporter();
    reporter.loading("the target's weights", 0.0)?;
    let mut worker = Prefiller::load(engine, plan, link)?;
    reporter.ready(Loaded {
        memory: process::resident_memory(std::process::id()).unwrap_or(0),
        parameters: None,
    })?;
    worker.seat.live().set(Activity::WaitLauncher, 0);
    if link.wait_start()? {
        worker.run()?;
    }
    worker.seat.leave();
    report_memory(engine, &reporter)
}

/// Units of one forward: those that fit `prefill_tokens`, and no more than a target's share of the ring, or drafters
/// would wait for units that wait for slots.
pub fn units_at_once(prefill_tokens: usize, geometry: &Geometry) -> usize {
    let share = (geometry.slots / (2 * geometry.targets)).max(1) as usize;
    let fit = prefill_tokens / geometry.slot_tokens.max(1) as usize;
    fit.clamp(1, share)
}

struct Prefiller<'a, E: Engine> {
    engine: &'a E,
    model: Model<E>,
    work: Rc<Workload>,
    seat: Target,
    /// Units of one forward; the same whatever the timing, so that a run can be repeated bit for bit.
    batch: usize,
    prefilled: u64,
    bad: u64,
}

impl<'a, E: Engine> Prefiller<'a, E> {
    fn load(engine: &'a E, plan: &WorkerPlan, link: &WorkerLink) -> Result<Self, WorkerError> {
        let run_id: RunId = plan.run_id.parse().map_err(WorkerError::Plan)?;
        let segment = Segment::attach(link.descriptor("segment")?, Some(run_id))?;
        let seat = segment.target(link.name().rank, plan.incarnation)?;
        seat.live().set(Activity::Loading, 0);
        register(engine, &segment)?;
        let work = Workload::open(&plan.work)?;
        let drafter = DrafterConfig::from_json(&plan.drafter)?;
        let needs = TargetNeeds {
            capture: drafter.target_layer_ids.clone(),
            final_hidden: plan.loss.use_soft_labels,
            lm_head: false,
        };
        let files = plan.target_files()?;
        let mut model = Model::load(engine, &files, needs)?;
        model.reserve(engine, work.slot_tokens() as usize)?;
        Ok(Self {
            engine,
            model,
            work: Rc::new(work),
            seat,
            batch: units_at_once(plan.prefill_tokens, segment.geometry()),
            prefilled: 0,
            bad: 0,
        })
    }

    fn run(&mut self) -> Result<(), WorkerError> {
        while let Next::Unit(first) = self.seat.next_work()? {
            let mut leases = vec![first];
            while leases.len() < self.batch
                && let Some(lease) = self.seat.try_lease()
            {
                leases.push(lease);
            }
            if !self.prefill(leases)? {
                break;
            }
        }
        Ok(())
    }

    /// One forward over the leased units, then a slot for each; false when the run stops.
    fn prefill(&mut self, leases: Vec<Lease>) -> Result<bool, WorkerError> {
        let work = Rc::clone(&self.work);
        let units: Vec<Vec<Document<'_>>> =
            leases.iter().map(|lease| documents(&work, lease)).collect();
        let mut ids = Vec::new();
        let mut offsets = vec![0u32];
        for document in units.iter().flatten() {
            ids.extend_from_slice(document.ids);
            offsets.push(ids.len() as u32);
        }
        let (needs, hidden) = (self.model.needs(), self.model.config().hidden_size);
        let mut states = States {
            captured: self.engine.half(ids.len(), needs.capture.len() * hidden)?,
            teacher: match needs.final_hidden {
                true => Some(self.engine.half(ids.len(), hidden)?),
                false => None,
            },
        };
        {
            let first = leases.first().map_or(0, Lease::unit);
            let _doing = self.seat.live().during(Activity::Prefill, first);
            let out = Captured {
                states: states.captured.view_mut(),
                final_hidden: states.teacher.as_mut().map(|last| last.view_mut()),
            };
            self.model.prefill(self.engine, &ids, &offsets, out)?;
        }
        let computed = self.engine.record(Queue::Compute)?;
        self.engine.wait(Queue::CopyOut, &computed)?;
        let mut row = 0;
        for (lease, documents) in leases.into_iter().zip(&units) {
            self.seat.working_on(&lease);
            let tokens: usize = documents.iter().map(|document| document.ids.len()).sum();
            let anchors = match lease.is_eval() {
                true => 1,
                false => self.work.anchors(lease.unit()),
            };
            let rows = (row, row + tokens);
            row += tokens;
            let finite = self.is_finite(&states, rows)?;
            let claim = self
                .seat
                .claim(lease, tokens as u32, documents.len() as u32)?;
            let Claim::Filling(mut slot) = claim else {
                return Ok(false);
            };
            {
                let _doing = self.seat.live().during(Activity::CopyOut, slot.unit());
                fill(self.engine, &states, rows, documents, &mut slot)?;
            }
            let info = UnitInfo {
                anchors,
                weightless: !finite,
            };
            self.seat.publish(slot, info)?;
        }
        Ok(true)
    }

    /// Counts units whose states are NaN or infinite, and gives up when they are more than a few.
    fn is_finite(
        &mut self,
        states: &States<E>,
        (begin, end): (usize, usize),
    ) -> Result<bool, WorkerError> {
        let bad = self
            .engine
            .has_non_finite(states.captured.rows_view(begin, end))?;
        self.prefilled += 1;
        self.bad += u64::from(bad);
        if bad && self.bad > 1 && self.bad * BAD_STATES_SHARE > self.prefilled {
            return Err(WorkerError::BadStates {
                bad: self.bad,
                units: self.prefilled,
            });
        }
        Ok(!bad)
    }
}

fn documents<'w>(work: &'w Workload, lease: &Lease) -> Vec<Document<'w>> {
    match lease.is_eval() {
        true => work.eval_documents(lease.unit()).collect(),
        false => work.documents(lease.unit()).collect(),
    }
}
