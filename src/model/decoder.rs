//! The target at decoding: a key-value cache for one sequence, extended by chains or draft trees and rolled
//! back to what was accepted.

use super::error::ModelError;
use super::target::{CacheRows, Cached, Captured, Places, Target};
use crate::engine::{CacheMask, Engine, Half, HalfView};

/// What one pass over new tokens gives, a row for each of them.
pub struct Step<E: Engine> {
    states: Half<E>,
    hidden: Half<E>,
}

impl<E: Engine> Step<E> {
    /// `[new, K H]` the captured layers, in the order they were asked for.
    pub fn states(&self) -> HalfView<'_, E> {
        self.states.view()
    }

    /// `[new, H]` after the final norm.
    pub fn hidden(&self) -> HalfView<'_, E> {
        self.hidden.view()
    }
}

/// Which new tokens a pass sees.
#[derive(Clone, Copy, Debug)]
pub enum Shape<'a> {
    /// Each follows the one before it.
    Chain,
    /// A draft tree: the parent of each among the new tokens, before it; `None` hangs on the cache.
    Tree(&'a [Option<usize>]),
}

/// A sequence being decoded by a [`Target`] that was loaded with its head.
pub struct TargetDecoder<E: Engine> {
    /// Of each layer: `[capacity, kv]`.
    keys: Vec<Half<E>>,
    values: Vec<Half<E>>,
    capacity: usize,
    /// Rows of accepted tokens.
    length: usize,
    /// Rows behind them, of the last pass.
    pending: usize,
}

impl<E: Engine> TargetDecoder<E> {
    /// Room for `capacity` tokens, those of a draft included.
    ///
    /// # Errors
    /// A target that was loaded without its head, or the engine's.
    pub fn new(engine: &E, target: &Target<E>, capacity: usize) -> Result<Self, ModelError> {
        target.head()?;
        if !target.needs().lm_head {
            return Err(ModelError::Request(
                "was loaded without its head".to_string(),
            ));
        }
        let cache = || {
            (0..target.layers())
                .map(|_| engine.half(capacity, target.config().key_size()))
                .collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            keys: cache()?,
            values: cache()?,
            capacity,
            length: 0,
            pending: 0,
        })
    }

    /// Accepted tokens in the cache.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether no token was accepted yet.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Forgets the sequence.
    pub fn clear(&mut self) {
        self.length = 0;
        self.pending = 0;
    }

    /// Runs `ids` behind the accepted tokens. They stay pending until [`TargetDecoder::keep`]; what was pending
    /// before is forgotten.
    ///
    /// # Errors
    /// More tokens than the capacity holds, ids outside the vocabulary, parents that do not come first, or the
    /// engine's.
    pub fn step(
        &mut self,
        engine: &E,
        target: &mut Target<E>,
        ids: &[u32],
        shape: Shape<'_>,
    ) -> Result<Step<E>, ModelError> {
        let new = ids.len();
        if self.length + new > self.capacity {
            return Err(ModelError::Request(format!(
                "{} cached and {new} new tokens exceed the cache of {}",
                self.length, self.capacity
            )));
        }
        let words = new.div_ceil(64).max(1);
        let (ancestors, depths) = lineage(new, words, shape)?;
        let first = self.length as u32;
        let places = Places {
            positions: depths.iter().map(|depth| first + depth).collect(),
            // A sequence that begins is as long as it is given. A row behind a cache turns as if it came alone,
            // so that a draft is verified as plain decoding would have it.
            reach: match first {
                0 => vec![depths.iter().max().map_or(0, |depth| depth + 1); new],
                _ => depths.iter().map(|depth| first + depth + 1).collect(),
            },
        };
        let width = target.needs().capture.len() * target.config().hidden_size;
        let mut step = Step {
            states: engine.half(new, width)?,
            hidden: engine.half(new, target.config().hidden_size)?,
        };
        let attend = Cached {
            keys: &mut self.keys,
            values: &mut self.values,
            rows: CacheRows::From(self.length),
            mask: CacheMask {
                rows: &[0, new as u32],
                cache_start: &[0],
                cached: &[first],
                ancestors: &ancestors,
                words,
                window: None,
                positions: &places.positions,
            },
        };
        let out = Captured {
            states: step.states.view_mut(),
            final_hidden: Some(step.hidden.view_mut()),
        };
        target.forward(engine, ids, &places, attend, out)?;
        self.pending = new;
        Ok(step)
    }

    /// Accepts `rows` of the last step, an ascending path, and forgets its others.
    ///
    /// # Errors
    /// Rows that are not ascending rows of the last step, or the engine's.
    pub fn keep(&mut self, engine: &E, rows: &[usize]) -> Result<(), ModelError> {
        let ascending = rows.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || rows.last().is_some_and(|&row| row >= self.pending) {
            return Err(ModelError::Request(format!(
                "rows {rows:?} are no ascending rows of a step of {}",
                self.pending
            )));
        }
        let first = self.length;
        let settled = rows
            .iter()
            .enumerate()
            .take_while(|&(i, &row)| i == row)
            .count();
        let moved = &rows[settled..];
        if !moved.is_empty() {
            let from: Vec<u32> = moved.iter().map(|&row| (first + row) as u32).collect();
            let from = engine.upload_index(&from)?;
            let begin = first + settled;
            for cache in self.keys.iter_mut().chain(&mut self.values) {
                let mut rows = engine.half(moved.len(), cache.cols())?;
                engine.gather(cache.view(), from.view(), rows.view_mut())?;
                let place = cache.view_mut().row_range(begin, begin + moved.len());
                engine.copy_half(rows.view(), place)?;
            }
        }
        self.length += rows.len();
        self.pending = 0;
        Ok(())
    }

    /// `[new, V]` logits of a step, on the host.
    pub fn logits(
        &self,
        engine: &E,
        target: &Target<E>,
        step: &Step<E>,
    ) -> Result<Vec<f32>, ModelError> {
        target.logits(engine, step.hidden())
    }
}

/// Ancestor bits and depths of the new rows.
fn lineage(new: usize, words: usize, shape: Shape<'_>) -> Result<(Vec<u64>, Vec<u32>), ModelError> {
    if let Shape::Tree(parents) = shape
        && parents.len() != new
    {
        return Err(ModelError::Request(format!(
            "{} parents for {new} tokens",
            parents.len()
        )));
    }
    let mut ancestors = vec![0u64; new * words];
    let mut depths = vec![0u32; new];
    for row in 0..new {
        let parent = match shape {
            Shape::Chain => row.checked_sub(1),
            Shape::Tree(parents) => parents[row],
        };
        let (before, own) = ancestors.split_at_mut(row * words);
        own[row / 64] |= 1 << (row % 64);
        let Some(parent) = parent else { continue };
        if parent >= row {
            return Err(ModelError::Request(format!(
                "token {row} has parent {parent}, which does not come first"
            )));
        }
        for (bits, of_parent) in own.iter_mut().zip(&before[parent * words..][..words]) {
            *bits |= of_parent;
        }
        depths[row] = depths[parent] + 1;
    }
    Ok((ancestors, depths))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::Cpu;
    use crate::model::testing::Made;

    /// Captured states and final hidden states of a whole prefill.
    fn prefill(engine: &Cpu, target: &mut Target<Cpu>, ids: &[u32]) -> (Vec<f32>, Vec<f32>) {
        let mut states = engine.half(ids.len(), 48).unwrap();
        let mut hidden = engine.half(ids.len(), 24).unwrap();
        let out = Captured {
            states: states.view_mut(),
            final_hidden: Some(hidden.view_mut()),
        };
        target
            .prefill(engine, ids, &[0, ids.len() as u32], out)
            .unwrap();
        (
            engine.download_half(states.view()).unwrap(),
            engine.download_half(hidden.view()).unwrap(),
        )
    }

    #[test]
    fn chains_and_trees_have_the_bits_of_prefill() {
        let engine = Cpu::new(1).unwrap();
        let read = |view: HalfView<'_, Cpu>| engine.download_half(view).unwrap();
        for qwen3 in [false, true] {
            let mut target = Made::target(&engine, qwen3, &[0, 2]);
            let ids: Vec<u32> = (0..40).map(|i| (i * i + 3) % 40).collect();
            let (states, hidden) = prefill(&engine, &mut target, &ids);
            let mut decoder = TargetDecoder::new(&engine, &target, 64).unwrap();
            let step = decoder
                .step(&engine, &mut target, &ids[..20], Shape::Chain)
                .unwrap();
            assert_eq!(read(step.states()), states[..20 * 48]);
            decoder.keep(&engine, &(0..20).collect::<Vec<_>>()).unwrap();
            // One token; a chain of which only two are right; a step that is forgotten whole.
            let step = decoder
                .step(&engine, &mut target, &ids[20..21], Shape::Chain)
                .unwrap();
            assert_eq!(read(step.hidden()), hidden[20 * 24..21 * 24]);
            decoder.keep(&engine, &[0]).unwrap();
            let draft = [ids[21], ids[22], 39 - ids[23], 7];
            let step = decoder
                .step(&engine, &mut target, &draft, Shape::Chain)
                .unwrap();
            assert_eq!(read(step.hidden())[..48], hidden[21 * 24..23 * 24]);
            decoder.keep(&engine, &[0, 1]).unwrap();
            decoder
                .step(&engine, &mut target, &[5, 6, 7], Shape::Chain)
                .unwrap();
            decoder.keep(&engine, &[]).unwrap();
            assert_eq!(decoder.len(), 23);
            // A tree with the true path at nodes 1, 3, 4, among strangers.
            let wrong = (ids[23] + 1) % 40;
            let nodes = [wrong, ids[23], wrong, ids[24], ids[25], wrong];
            let parents = [None, None, Some(0), Some(1), Some(3), Some(3)];
            let step = decoder
                .step(&engine, &mut target, &nodes, Shape::Tree(&parents))
                .unwrap();
            let got = read(step.states());
            for (node, row) in [(1, 23), (3, 24), (4, 25)] {
                assert_eq!(
                    got[node * 48..][..48],
                    states[row * 48..][..48],
                    "node {node}"
                );
            }
            decoder.keep(&engine, &[1, 3, 4]).unwrap();
            let step = decoder
                .step(&engine, &mut target, &ids[26..40], Shape::Chain)
                .unwrap();
            assert_eq!(read(step.hidden()), hidden[26 * 24..]);
            let logits = decoder.logits(&engine, &target, &step).unwrap();
            assert_eq!(logits.len(), 14 * 40);
        }
    }

    #[test]
    fn wrong_steps_are_refused() {
        let engine = Cpu::new(1).unwrap();
        let mut target = Made::target(&engine, false, &[0, 2]);
        let mut decoder = TargetDecoder::new(&engine, &target, 4).unwrap();
        let refused = |result: Result<(), ModelError>, says: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        };
        let chain = |decoder: &mut TargetDecoder<Cpu>,
                     target: &mut Target<Cpu>,
                     ids: &[u32],
                     shape: Shape<'_>| {
            decoder.step(&engine, target, ids, shape).map(|_| ())
        };
        refused(
            chain(&mut decoder, &mut target, &[1; 5], Shape::Chain),
            "5 new tokens exceed the cache of 4",
        );
        refused(
            chain(&mut decoder, &mut target, &[1, 2], Shape::Tree(&[None])),
            "1 parents for 2 tokens",
        );
        refused(
            chain(
                &mut decoder,
                &mut target,
                &[1, 2],
                Shape::Tree(&[None, Some(1)]),
            ),
            "token 1 has parent 1",
        );
        refused(
            chain(&mut decoder, &mut target, &[40], Shape::Chain),
            "token 40 is outside",
        );
        chain(&mut decoder, &mut target, &[1, 2, 3], Shape::Chain).unwrap();
        refused(
            decoder.keep(&engine, &[0, 3]),
            "no ascending rows of a step of 3",
        );
        refused(decoder.keep(&engine, &[1, 1]), "no ascending rows");
        decoder.keep(&engine, &[0, 2]).unwrap();
        assert_eq!(decoder.len(), 2);
        refused(decoder.keep(&engine, &[0]), "a step of 0");
    }
}
