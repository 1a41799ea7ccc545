//! The DFlash drafter (arXiv 2602.06036): one forward pass fills a block of masked slots behind an anchor.
//!
//! [`config`] is its shape, [`params`] its parameters, [`plan`] what a packed unit asks of it. `forward` and
//! `backward` are written next to each other and run on any engine; [`cache`] is the same network at decoding.

mod backward;
pub mod cache;
pub mod config;
mod fields;
mod forward;
pub mod params;
pub mod plan;
#[cfg(test)]
pub(crate) mod tests;
mod workspace;

use crate::engine::{
    Engine, EngineError, Float, HalfView, HeadLoss, HeadLossOut, IndexMut, LossOptions,
};

pub use cache::DraftCache;
pub use config::{DraftOptions, DrafterConfig, LayerType, TargetSizes, default_target_layer_ids};
pub use params::{Param, ParamLayout, Params, ValueHasher, Window};
pub use plan::{BlockPlan, Document, HostPlan};

use super::rotary::{Rope, RotaryTables};
use forward::Network;
use workspace::{BlockActivations, ContextActivations, Gradients};

/// What can be wrong with a drafter or with what it is given.
#[derive(Debug, thiserror::Error)]
pub enum DrafterError {
    /// A configuration that cannot be used.
    #[error("drafter configuration: {0}")]
    Config(String),
    /// Something has another shape than the drafter's.
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        /// What was looked at.
        what: String,
        /// What the drafter needs.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// The target's frozen tables that the drafter uses.
pub struct Tables<'a, E: Engine> {
    /// `[V, H]` embedding of block tokens.
    pub embedding: HalfView<'a, E>,
    /// `[V, H]` head; the embedding where they are tied.
    pub lm_head: HalfView<'a, E>,
}

impl<E: Engine> Clone for Tables<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E: Engine> Copy for Tables<'_, E> {}

/// Where the loss of a micro-step goes.
pub struct LossSink<'a, E: Engine> {
    /// `[context rows, H]` the target's final hidden states, with soft labels.
    pub teacher: Option<HalfView<'a, E>>,
    /// Options of the loss.
    pub options: &'a LossOptions,
    /// `[1, 2]` loss sum and weight sum, added to.
    pub sums: &'a mut Float<E>,
    /// `[1, slots]` 1 where the slot's most likely token is its label.
    pub correct: IndexMut<'a, E>,
}

/// A drafter on an engine, with the memory of its micro-steps.
pub struct DrafterModel<E: Engine> {
    config: DrafterConfig,
    /// Masters, gradients and working weights.
    pub params: Params<E>,
    rotary: RotaryTables<E>,
    context: ContextActivations<E>,
    blocks: BlockActivations<E>,
    gradients: Gradients<E>,
}

impl<E: Engine> DrafterModel<E> {
    /// A drafter of this shape with these parameters.
    pub fn new(engine: &E, config: DrafterConfig, params: Params<E>) -> Result<Self, DrafterError> {
        config.validate()?;
        let rope = Rope::of_theta(config.rope_theta);
        Ok(Self {
            rotary: RotaryTables::new(engine, rope, config.head_dim, 0)?,
            config,
            params,
            context: ContextActivations::default(),
            blocks: BlockActivations::default(),
            gradients: Gradients::default(),
        })
    }

    /// Its shape.
    pub fn config(&self) -> &DrafterConfig {
        &self.config
    }

    /// Bytes that micro-steps of up to `tokens` context rows and `blocks` blocks keep on the engine, beside
    /// parameters, inputs and the head's chunks.
    pub fn workspace_bytes(config: &DrafterConfig, tokens: usize, blocks: usize) -> usize {
        let rows = blocks * config.block_size;
        E::HALF_BYTES * workspace::training_elements(config, tokens, rows)
            + 4 * config.num_hidden_layers * config.num_attention_heads * rows
    }

    /// Takes the memory of the largest micro-step now, so that none of them allocates.
    pub fn reserve(
        &mut self,
        engine: &E,
        tokens: usize,
        blocks: usize,
        positions: usize,
    ) -> Result<(), EngineError> {
        let rows = blocks * self.config.block_size;
        self.rotary
            .reserve(engine, positions + self.config.block_size)?;
        self.fit(engine, tokens, rows, self.config.num_hidden_layers)?;
        self.gradients.fit(engine, &self.config, tokens, rows)
    }

    /// Encodes the context `states [T, K H]` of `plan` and runs its blocks; see [`DrafterModel::hidden`].
    /// `keep` what a backward needs.
    ///
    /// # Errors
    /// States of another shape than the plan's, or the engine's.
    pub fn forward(
        &mut self,
        engine: &E,
        tables: Tables<'_, E>,
        plan: &BlockPlan<E>,
        states: HalfView<'_, E>,
        keep: bool,
    ) -> Result<(), DrafterError> {
        self.encode_context(engine, plan, states)?;
        self.forward_blocks(engine, tables, plan, keep)
    }

    /// Encodes the context alone, for several plans over the same documents.
    pub fn encode_context(
        &mut self,
        engine: &E,
        plan: &BlockPlan<E>,
        states: HalfView<'_, E>,
    ) -> Result<(), DrafterError> {
        let (tokens, width) = (
            plan.host.tokens(),
            self.config.captured() * self.config.hidden_size,
        );
        if (states.rows, states.cols) != (tokens, width) {
            return Err(DrafterError::Shape {
                what: "captured hidden states of a unit".to_string(),
                expected: format!("[{tokens}, {width}]"),
                found: format!("[{}, {}]", states.rows, states.cols),
            });
        }
        self.rotary.reserve(engine, plan.host.positions)?;
        self.context.fit(engine, &self.config, tokens)?;
        let network = network(engine, &self.config, &self.params, &self.rotary);
        network.context_forward(states, plan.context_positions(), &mut self.context)?;
        Ok(())
    }

    /// Runs the blocks of `plan` over the context encoded last.
    pub fn forward_blocks(
        &mut self,
        engine: &E,
        tables: Tables<'_, E>,
        plan: &BlockPlan<E>,
        keep: bool,
    ) -> Result<(), DrafterError> {
        self.rotary.reserve(engine, plan.host.positions)?;
        let kept = if keep {
            self.config.num_hidden_layers
        } else {
            1
        };
        self.blocks.fit(engine, &self.config, plan.rows(), kept)?;
        let network = network(engine, &self.config, &self.params, &self.rotary);
        let context = &self.context;
        network.blocks_forward(
            tables,
            plan,
            |i| network.context_keys(context, i),
            &mut self.blocks,
            keep,
        )?;
        Ok(())
    }

    /// `[blocks * B, H]` the drafter's output of the last forward, after the final norm.
    pub fn hidden(&self) -> HalfView<'_, E> {
        self.blocks.hidden.view()
    }

    /// Head, loss and the whole backward of the last forward, which must have kept its activations: adds to the
    /// gradients in [`DrafterModel::params`] and to the sums of `sink`.
    pub fn loss_backward(
        &mut self,
        engine: &E,
        tables: Tables<'_, E>,
        plan: &BlockPlan<E>,
        states: HalfView<'_, E>,
        sink: LossSink<'_, E>,
    ) -> Result<(), DrafterError> {
        self.gradients
            .fit(engine, &self.config, plan.host.tokens(), plan.rows())?;
        engine.head_loss(
            &HeadLoss {
                hidden: self.blocks.hidden.view(),
                lm_head: tables.lm_head,
                slots: plan.slots(),
                teacher: sink.teacher,
                options: sink.options,
            },
            HeadLossOut {
                d_hidden: self.gradients.hidden.view_mut(),
                sums: sink.sums.view_mut(),
                correct: sink.correct,
            },
        )?;
        let (layout, masters, weights, grads) = self.params.split();
        let network = Network {
            engine,
            config: &self.config,
            layout,
            weights,
            masters,
            rotary: self.rotary.view(),
        };
        network.blocks_backward(
            plan,
            &self.context,
            &mut self.blocks,
            &mut self.gradients,
            grads,
        )?;
        network.context_backward(states, &self.context, &mut self.gradients, grads)?;
        Ok(())
    }

    /// The network as it stands, for decoding.
    fn network<'a>(&'a self, engine: &'a E) -> Network<'a, E> {
        network(engine, &self.config, &self.params, &self.rotary)
    }

    fn fit(
        &mut self,
        engine: &E,
        tokens: usize,
        rows: usize,
        kept: usize,
    ) -> Result<(), EngineError> {
        self.context.fit(engine, &self.config, tokens)?;
        self.blocks.fit(engine, &self.config, rows, kept)
    }
}

/// The network over these parameters; a function of parts, so that activations can be borrowed beside it.
fn network<'a, E: Engine>(
    engine: &'a E,
    config: &'a DrafterConfig,
    params: &'a Params<E>,
    rotary: &'a RotaryTables<E>,
) -> Network<'a, E> {
    Network {
        engine,
        config,
        layout: params.layout(),
        weights: &params.weights,
        masters: &params.masters,
        rotary: rotary.view(),
    }
}
