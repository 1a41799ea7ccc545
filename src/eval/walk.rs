//! Held-out acceptance by the decoding walk, without decoding.
//!
//! Blocks are predicted at all supervised positions of a document in one forward. The walk then starts at the
//! first, goes a ← a + accepted + 1, and divides tokens by rounds. On answers that the target gave greedily
//! itself this is what greedy speculative decoding will show. A draft tree accepts as many tokens as the true
//! continuation lies deep inside it.

use super::tree::{SlotRanks, build_tree, depth_of};
use crate::engine::{Engine, HalfView};
use crate::model::drafter::{BlockPlan, Document, DrafterError, DrafterModel, HostPlan, Tables};
use crate::train::anchors::eligible;

/// A held-out unit.
pub struct HeldOutUnit<'a, E: Engine> {
    /// Ids and loss mask of each document; the context rows follow this order.
    pub documents: &'a [(&'a [u32], &'a [u8])],
    /// `[tokens, K * H]` captured target layers.
    pub states: HalfView<'a, E>,
}

/// Tokens and rounds of one kind of draft; counts of several units add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalkCount {
    /// Tokens produced behind the first anchors.
    pub tokens: u64,
    /// Draft-and-verify rounds.
    pub rounds: u64,
}

impl WalkCount {
    /// Adds another count.
    pub fn add(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.rounds += other.rounds;
    }

    /// Tokens a round, the target's own token included; `None` without rounds.
    pub fn accepted_length(&self) -> Option<f64> {
        (self.rounds > 0).then(|| self.tokens as f64 / self.rounds as f64)
    }
}

/// What the walk over some units found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WalkOut {
    /// With the most likely chain.
    pub chain: WalkCount,
    /// With a draft tree of each budget asked for, in that order.
    pub trees: Vec<WalkCount>,
}

impl WalkOut {
    /// Adds what another walk with the same budgets found.
    pub fn add(&mut self, other: &Self) {
        self.chain.add(other.chain);
        self.trees.resize(
            self.trees.len().max(other.trees.len()),
            WalkCount::default(),
        );
        for (mine, others) in self.trees.iter_mut().zip(&other.trees) {
            mine.add(*others);
        }
    }
}

/// How to walk.
#[derive(Clone, Copy, Debug)]
pub struct WalkOptions<'a> {
    /// Node budgets of draft trees to measure too.
    pub budgets: &'a [usize],
    /// Blocks of one forward.
    pub blocks: usize,
}

/// Accepted tokens at one position: of the chain, then of each tree.
type Accepted = Vec<usize>;

/// Walks all documents of a unit.
///
/// # Errors
/// A unit that does not fit the drafter, or the engine's.
pub fn walk<E: Engine>(
    engine: &E,
    model: &mut DrafterModel<E>,
    tables: Tables<'_, E>,
    unit: &HeldOutUnit<'_, E>,
    options: WalkOptions<'_>,
) -> Result<WalkOut, DrafterError> {
    let anchors: Vec<Vec<u32>> = unit
        .documents
        .iter()
        .map(|(_, mask)| eligible(mask).collect())
        .collect();
    let blocks: Vec<(usize, u32)> = anchors
        .iter()
        .enumerate()
        .flat_map(|(document, anchors)| anchors.iter().map(move |&a| (document, a)))
        .collect();
    let mut accepted = Vec::with_capacity(blocks.len());
    for (number, chunk) in blocks.chunks(options.blocks.max(1)).enumerate() {
        let chosen: Vec<Vec<u32>> = (0..unit.documents.len())
            .map(|document| {
                let of_document = chunk.iter().filter(|&&(d, _)| d == document);
                of_document.map(|&(_, a)| a).collect()
            })
            .collect();
        let documents: Vec<Document<'_>> = unit
            .documents
            .iter()
            .zip(&chosen)
            .map(|(&(ids, mask), anchors)| Document { ids, mask, anchors })
            .collect();
        let plan = BlockPlan::upload(
            engine,
            model.config(),
            HostPlan::new(model.config(), &documents)?,
        )?;
        if number == 0 {
            model.encode_context(engine, &plan, unit.states)?;
        }
        model.forward_blocks(engine, tables, &plan, false)?;
        accepted.extend(accept(engine, model, tables, &plan.host, options.budgets)?);
    }

    let mut out = WalkOut {
        trees: vec![WalkCount::default(); options.budgets.len()],
        ..WalkOut::default()
    };
    let mut rest = accepted.as_slice();
    for anchors in &anchors {
        let (mine, others) = rest.split_at(anchors.len());
        rest = others;
        out.chain.add(walk_document(anchors, mine, 0));
        for (i, tree) in out.trees.iter_mut().enumerate() {
            tree.add(walk_document(anchors, mine, i + 1));
        }
    }
    Ok(out)
}

/// Walks one document: `anchors` are its eligible positions, `kind` is which entry of [`Accepted`] counts.
fn walk_document(anchors: &[u32], accepted: &[Accepted], kind: usize) -> WalkCount {
    let mut count = WalkCount::default();
    let mut i = 0;
    while i < anchors.len() {
        let next = anchors[i] + accepted[i][kind] as u32 + 1;
        count.rounds += 1;
        // A supervised run of e eligible positions ends one token behind the last of them: a draft that is
        // right to the end leaves no token for the target to add.
        let run = (i..anchors.len())
            .take_while(|&j| anchors[j] - anchors[i] == (j - i) as u32)
            .count();
        let end = anchors[i] + run as u32;
        count.tokens += u64::from(next.min(end) - anchors[i]);
        i += anchors[i..].partition_point(|&a| a < next);
    }
    count
}

/// What each block of the last forward accepts.
fn accept<E: Engine>(
    engine: &E,
    model: &DrafterModel<E>,
    tables: Tables<'_, E>,
    plan: &HostPlan,
    budgets: &[usize],
) -> Result<Vec<Accepted>, DrafterError> {
    let config = model.config();
    let depths = config.block_size - 1;
    let width = budgets
        .iter()
        .copied()
        .fold(1, usize::max)
        .min(config.vocab_size);
    // All slots but the anchors'.
    let rows: Vec<u32> = (0..plan.blocks() * config.block_size)
        .filter(|row| row % config.block_size != 0)
        .map(|row| row as u32)
        .collect();
    let count = rows.len();
    let rows = engine.upload_index(&rows)?;
    let mut hidden = engine.half(count, config.hidden_size)?;
    engine.gather(model.hidden(), rows.view(), hidden.view_mut())?;
    let mut ids = engine.upload_index(&vec![0; count * width])?;
    let mut log_probs = engine.float(count, width)?;
    engine.top_k(
        hidden.view(),
        tables.lm_head,
        width,
        ids.window_mut(0, count, width),
        log_probs.view_mut(),
    )?;
    let ids = engine.download_index(ids.view())?;
    let log_probs = engine.download_float(log_probs.view())?;

    let per_block = depths * width;
    let blocks = ids.chunks(per_block).zip(log_probs.chunks(per_block));
    Ok(blocks
        .zip(plan.block_begin.windows(2))
        .map(|((ids, log_probs), slots)| {
            let slots = slots[0] as usize..slots[1] as usize;
            // The labels up to the first gap: the true continuation.
            let truth: Vec<u32> = plan.slot_label[slots.clone()]
                .iter()
                .zip(&plan.slot_number[slots])
                .enumerate()
                .take_while(|(i, (_, k))| **k as usize == i + 1)
                .map(|(_, (label, _))| *label)
                .collect();
            let chain = truth
                .iter()
                .zip(ids.chunks(width))
                .take_while(|(label, best)| **label == best[0])
                .count();
            let ranks = SlotRanks {
                ids,
                log_probs,
                width,
            };
            let trees = budgets
                .iter()
                .map(|&budget| depth_of(&build_tree(ranks, budget), &truth));
            std::iter::once(chain).chain(trees).collect()
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(counts: &[usize]) -> Vec<Accepted> {
        counts.iter().map(|&n| vec![n]).collect()
    }

    #[test]
    fn the_walk_jumps_over_what_was_accepted() {
        // Supervised 10..=16: eligible 10..=15, six tokens to produce behind the first.
        let anchors = [10, 11, 12, 13, 14, 15];
        // 10 accepts 2 -> 13; 13 accepts 0 -> 14; 14 accepts 1 -> the last token.
        let count = walk_document(&anchors, &accepted(&[2, 9, 9, 0, 1, 9]), 0);
        assert_eq!((count.tokens, count.rounds), (6, 3));
        assert_eq!(count.accepted_length(), Some(2.0));
        // Nothing accepted: one token a round.
        let count = walk_document(&anchors, &accepted(&[0; 6]), 0);
        assert_eq!((count.tokens, count.rounds), (6, 6));
        // A draft that is right to the end counts only tokens that exist.
        let count = walk_document(&anchors, &accepted(&[6, 0, 0, 0, 0, 0]), 0);
        assert_eq!((count.tokens, count.rounds), (6, 1));
    }

    #[test]
    fn every_answer_of_a_document_is_walked() {
        // Supervised 3..=5 and 20..=22.
        let anchors = [3, 4, 20, 21];
        let count = walk_document(&anchors, &accepted(&[1, 0, 0, 1]), 0);
        assert_eq!((count.tokens, count.rounds), (4, 3));
        assert_eq!(walk_document(&[], &[], 0).accepted_length(), None);
    }
}
