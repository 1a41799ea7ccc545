//! The drafter at decoding: context keys and values are encoded once for every verified token and kept.

use super::forward::Network;
use super::plan::{BlockPlan, HostPlan};
use super::workspace::{BlockActivations, ContextActivations};
use super::{DrafterError, DrafterModel, Tables};
use crate::engine::{Engine, Half, HalfView};

/// Context keys and values of a few sequences, and the memory to draft with them.
pub struct DraftCache<E: Engine> {
    /// Of each layer: keys after norm and rotary, `[sequences * capacity, kv]`.
    keys: Vec<Half<E>>,
    /// Of each layer: values, `[sequences * capacity, kv]`.
    values: Vec<Half<E>>,
    capacity: usize,
    lengths: Vec<usize>,
    context: ContextActivations<E>,
    blocks: BlockActivations<E>,
}

impl<E: Engine> DraftCache<E> {
    /// Room for `sequences` of up to `capacity` tokens each.
    pub fn new(
        engine: &E,
        model: &DrafterModel<E>,
        sequences: usize,
        capacity: usize,
    ) -> Result<Self, DrafterError> {
        let config = model.config();
        let kv = config.num_key_value_heads * config.head_dim;
        let matrices = || {
            (0..config.num_hidden_layers)
                .map(|_| engine.half(sequences * capacity, kv))
                .collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            keys: matrices()?,
            values: matrices()?,
            capacity,
            lengths: vec![0; sequences],
            context: ContextActivations::default(),
            blocks: BlockActivations::default(),
        })
    }

    /// Verified tokens of a sequence that are in the cache.
    pub fn length(&self, sequence: usize) -> usize {
        self.lengths[sequence]
    }

    /// Forgets a sequence, so that its place can hold another.
    pub fn clear(&mut self, sequence: usize) {
        self.lengths[sequence] = 0;
    }

    /// Adds verified tokens: `states [n, K H]` are the captured layers at the next `n` positions.
    ///
    /// # Errors
    /// More tokens than the capacity holds, or the engine's.
    pub fn extend(
        &mut self,
        engine: &E,
        model: &mut DrafterModel<E>,
        sequence: usize,
        states: HalfView<'_, E>,
    ) -> Result<(), DrafterError> {
        let first = self.lengths[sequence];
        let end = first + states.rows;
        if end > self.capacity {
            return Err(DrafterError::Shape {
                what: format!("draft cache of sequence {sequence}"),
                expected: format!("at most {} tokens", self.capacity),
                found: format!("{end} tokens"),
            });
        }
        if states.rows == 0 {
            return Ok(());
        }
        let positions: Vec<u32> = (first as u32..end as u32).collect();
        let positions = engine.upload_index(&positions)?;
        self.context.fit(engine, model.config(), states.rows)?;
        model.rotary.reserve(engine, end)?;
        let network = model.network(engine);
        network.context_forward(states, positions.view(), &mut self.context)?;
        let row = sequence * self.capacity + first;
        for (i, (keys, values)) in self.keys.iter_mut().zip(&mut self.values).enumerate() {
            let (k, v) = network.context_keys(&self.context, i);
            let rows = row..row + states.rows;
            engine.copy_half(k, keys.view_mut().row_range(rows.start, rows.end))?;
            engine.copy_half(v, values.view_mut().row_range(rows.start, rows.end))?;
        }
        self.lengths[sequence] = end;
        Ok(())
    }

    /// Drafts one block for each `(sequence, anchor id)`: the anchor is the token behind the sequence's cached
    /// ones. Returns `[blocks * B, H]` after the final norm; row k ≥ 1 of a block predicts the k-th token
    /// behind its anchor.
    pub fn draft(
        &mut self,
        engine: &E,
        model: &mut DrafterModel<E>,
        tables: Tables<'_, E>,
        anchors: &[(usize, u32)],
    ) -> Result<HalfView<'_, E>, DrafterError> {
        let blocks: Vec<_> = anchors
            .iter()
            .map(|&(sequence, id)| {
                let start = (sequence * self.capacity) as u32;
                (start, self.lengths[sequence] as u32, id)
            })
            .collect();
        let host = HostPlan::for_decoding(model.config(), &blocks);
        model.rotary.reserve(engine, host.positions)?;
        let plan = BlockPlan::upload(engine, model.config(), host)?;
        self.blocks.fit(engine, model.config(), plan.rows(), 1)?;
        let network: Network<'_, E> = model.network(engine);
        let (keys, values) = (&self.keys, &self.values);
        network.blocks_forward(
            tables,
            &plan,
            |i| (keys[i].view(), values[i].view()),
            &mut self.blocks,
            false,
        )?;
        Ok(self.blocks.hidden.view())
    }
}
