//! One micro-step: a unit through the drafter, forward and backward, on whoever took it.
//!
//! It adds to the gradient *sum* and yields a loss sum and a weight sum; the quotient is taken once per step,
//! over all micro-steps and drafters.

use crate::engine::{Engine, Float, HalfView, Index, LossOptions};
use crate::model::drafter::{
    BlockPlan, Document, DrafterError, DrafterModel, HostPlan, LossSink, Tables,
};

/// A unit as it came out of a slot: its documents packed one behind the other.
pub struct UnitBatch<'a, E: Engine> {
    /// Ids, masks and anchors; the context rows follow this order.
    pub documents: &'a [Document<'a>],
    /// `[tokens, K * H]` captured target layers.
    pub states: HalfView<'a, E>,
    /// `[tokens, H]` final hidden states of the target, with soft labels.
    pub teacher: Option<HalfView<'a, E>>,
}

/// What one or more micro-steps add up to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MicroStepOut {
    /// Σ weight · term over the supervised slots.
    pub loss_sum: f64,
    /// Σ weight.
    pub weight_sum: f64,
    /// Supervised slots by slot number, slot 1 first, `[B - 1]`.
    pub slots: Vec<u64>,
    /// Those whose most likely token was the label.
    pub correct: Vec<u64>,
    /// Of each block in order: 1 + length of the correct prefix.
    pub accepted: Vec<u32>,
}

impl MicroStepOut {
    /// Adds the results of another micro-step.
    pub fn add(&mut self, other: &Self) {
        self.loss_sum += other.loss_sum;
        self.weight_sum += other.weight_sum;
        for (mine, others) in [
            (&mut self.slots, &other.slots),
            (&mut self.correct, &other.correct),
        ] {
            mine.resize(mine.len().max(others.len()), 0);
            mine.iter_mut().zip(others).for_each(|(a, b)| *a += b);
        }
        self.accepted.extend_from_slice(&other.accepted);
    }

    /// Mean over the blocks of 1 + length of the correct prefix; `None` without blocks.
    pub fn block_accepted_length(&self) -> Option<f64> {
        let sum: u64 = self.accepted.iter().map(|&a| u64::from(a)).sum();
        (!self.accepted.is_empty()).then(|| sum as f64 / self.accepted.len() as f64)
    }
}

/// A micro-step that was enqueued; its results are read by [`PendingMicroStep::finish`].
pub struct PendingMicroStep<E: Engine> {
    plan: HostPlan,
    block: usize,
    device: Option<(Float<E>, Index<E>)>,
}

/// Enqueues a micro-step. A unit without a supervised slot computes nothing and yields zeros.
///
/// # Errors
/// A unit that does not fit the drafter, soft labels without a teacher, or the engine's.
pub fn start_micro_step<E: Engine>(
    engine: &E,
    model: &mut DrafterModel<E>,
    tables: Tables<'_, E>,
    unit: &UnitBatch<'_, E>,
    options: &LossOptions,
) -> Result<PendingMicroStep<E>, DrafterError> {
    let config = model.config();
    let block = config.block_size;
    let host = HostPlan::new(config, unit.documents)?;
    let teacher = unit.teacher.filter(|_| options.use_soft_labels);
    if options.use_soft_labels {
        let expected = [host.tokens(), config.hidden_size];
        let found = teacher.map(|t| [t.rows, t.cols]);
        if found != Some(expected) {
            return Err(DrafterError::Shape {
                what: "the target's final hidden states for soft labels".to_string(),
                expected: format!("{expected:?}"),
                found: found.map_or("none".to_string(), |found| format!("{found:?}")),
            });
        }
    }
    if host.slots() == 0 {
        return Ok(PendingMicroStep {
            plan: host,
            block,
            device: None,
        });
    }
    let plan = BlockPlan::upload(engine, config, host)?;
    model.forward(engine, tables, &plan, unit.states, true)?;
    let mut sums = engine.float(1, 2)?;
    let mut correct = engine.upload_index(&vec![0; plan.host.slots()])?;
    let sink = LossSink {
        teacher,
        options,
        sums: &mut sums,
        correct: correct.view_mut(),
    };
    model.loss_backward(engine, tables, &plan, unit.states, sink)?;
    Ok(PendingMicroStep {
        plan: plan.host,
        block,
        device: Some((sums, correct)),
    })
}

/// [`start_micro_step`] and its results.
pub fn micro_step<E: Engine>(
    engine: &E,
    model: &mut DrafterModel<E>,
    tables: Tables<'_, E>,
    unit: &UnitBatch<'_, E>,
    options: &LossOptions,
) -> Result<MicroStepOut, DrafterError> {
    start_micro_step(engine, model, tables, unit, options)?.finish(engine)
}

impl<E: Engine> PendingMicroStep<E> {
    /// Waits and reads the results.
    pub fn finish(self, engine: &E) -> Result<MicroStepOut, DrafterError> {
        let (sums, correct) = match &self.device {
            None => (vec![0.0; 2], Vec::new()),
            Some((sums, correct)) => (
                engine.download_float(sums.view())?,
                engine.download_index(correct.view())?,
            ),
        };
        Ok(count(&self.plan, self.block, &sums, &correct))
    }
}

/// Counts by slot and accepted prefixes out of the device's answers.
fn count(plan: &HostPlan, block: usize, sums: &[f32], correct: &[u32]) -> MicroStepOut {
    let mut out = MicroStepOut {
        loss_sum: f64::from(sums[0]),
        weight_sum: f64::from(sums[1]),
        slots: vec![0; block - 1],
        correct: vec![0; block - 1],
        accepted: Vec::with_capacity(plan.blocks()),
    };
    for range in plan.block_begin.windows(2) {
        let mut prefix = 0;
        let slots = range[0] as usize..range[1] as usize;
        for (&k, &correct) in plan.slot_number[slots.clone()].iter().zip(&correct[slots]) {
            let right = correct != 0;
            out.slots[k as usize - 1] += 1;
            out.correct[k as usize - 1] += u64::from(right);
            // A slot without a label ends the prefix like a wrong one.
            if right && k == prefix + 1 {
                prefix = k;
            }
        }
        out.accepted.push(1 + prefix);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_or_a_wrong_slot_ends_the_prefix() {
        let plan = HostPlan {
            block_begin: vec![0, 3, 5, 5, 8],
            slot_number: vec![1, 2, 3, 1, 3, 1, 2, 3],
            ..HostPlan::default()
        };
        let out = count(&plan, 4, &[2.5, 0.5], &[1, 1, 1, 1, 1, 0, 1, 1]);
        assert_eq!(out.accepted, [4, 2, 1, 1]);
        assert_eq!(out.slots, [3, 2, 3]);
        assert_eq!(out.correct, [2, 2, 3]);
        assert_eq!(out.block_accepted_length(), Some(2.0));
        assert_eq!((out.loss_sum, out.weight_sum), (2.5, 0.5));
    }

    #[test]
    fn results_add_up() {
        let one = MicroStepOut {
            loss_sum: 1.0,
            weight_sum: 2.0,
            slots: vec![3, 1],
            correct: vec![1, 0],
            accepted: vec![2],
        };
        let mut sum = MicroStepOut::default();
        assert_eq!(sum.block_accepted_length(), None);
        sum.add(&one);
        sum.add(&one);
        assert_eq!(sum.slots, [6, 2]);
        assert_eq!(sum.correct, [2, 0]);
        assert_eq!(sum.accepted, [2, 2]);
        assert_eq!((sum.loss_sum, sum.weight_sum), (2.0, 4.0));
    }
}
