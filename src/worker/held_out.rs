//! Evaluation on the held-out units, each drafter its share.

use crate::control::Evaluation;
use crate::engine::Engine;
use crate::eval::walk::{HeldOutUnit, WalkOptions, WalkOut, walk};
use crate::model::drafter::{DrafterModel, Tables};
use crate::shm::{Activity, Drafter};

use super::WorkerError;
use super::slot::copy_in;

/// Node budgets of the draft trees that are measured beside the chain.
pub(super) const BUDGETS: [usize; 2] = [16, 64];
/// Blocks of one forward.
const BLOCKS: usize = 512;

/// Walks this member's share of the held-out units: every n-th, n being the number of members.
pub(super) fn evaluate<E: Engine>(
    engine: &E,
    seat: &Drafter,
    model: &mut DrafterModel<E>,
    tables: Tables<'_, E>,
    units: &[u32],
    step: u64,
) -> Result<Evaluation, WorkerError> {
    let members = seat.segment().step_word().members;
    let before = members & ((1 << seat.rank()) - 1);
    let (index, count) = (before.count_ones() as usize, members.count_ones() as usize);
    let _doing = seat.live().during(Activity::Evaluate, step);
    let width = model.config().captured() * model.config().hidden_size;
    let mut sum = WalkOut::default();
    let mut documents = 0;
    for &unit in units.iter().skip(index).step_by(count.max(1)) {
        seat.live().beat();
        let (_, view) = seat.eval_view(unit)?;
        // SAFETY: held-out slots are kept for good.
        let states = unsafe { copy_in(engine, &view, width, None)? };
        let offsets = view.offsets();
        let parts: Vec<_> = offsets
            .windows(2)
            .map(|range| {
                let range = range[0] as usize..range[1] as usize;
                (&view.ids()[range.clone()], &view.mask()[range])
            })
            .collect();
        let held_out = HeldOutUnit {
            documents: &parts,
            states: states.captured.view(),
        };
        let options = WalkOptions {
            budgets: &BUDGETS,
            blocks: BLOCKS,
        };
        sum.add(&walk(engine, model, tables, &held_out, options)?);
        documents += parts.len() as u64;
    }
    let trees = BUDGETS.iter().zip(&sum.trees);
    Ok(Evaluation {
        step: step as u32,
        documents,
        tokens: sum.chain.tokens,
        rounds: sum.chain.rounds,
        trees: trees
            .map(|(&budget, tree)| (budget as u32, tree.tokens, tree.rounds))
            .collect(),
    })
}
