//! AdamW (arXiv 1711.05101) over the flat buffers, once per step.
//!
//! The update uses the quotient of the step's gradient sum and weight sum, cut to the clip norm. Weight decay
//! applies to matrices only: a norm weight that decayed would be pulled to 0, not to the 1 that it starts from.
//! Masters and moments are float32; the matrices' working copy is rounded from the masters in the same pass.

use super::options::OptimizerOptions;
use crate::engine::{AdamW, Engine, EngineError, Float};
use crate::model::drafter::{DrafterConfig, ParamLayout, Params};

/// Non-finite steps in a row after which a run stops.
pub const NON_FINITE_LIMIT: u32 = 3;

/// Moments and count of updates of the parameters of one drafter.
pub struct Optimizer<E: Engine> {
    /// First moment, in the parameters' layout.
    pub m: Float<E>,
    /// Second moment.
    pub v: Float<E>,
    /// Updates done.
    pub count: u64,
    /// Non-finite steps since the last good one.
    pub non_finite_in_a_row: u32,
    options: OptimizerOptions,
    /// `[1, 1]` where the sum of squares lands.
    squares: Float<E>,
}

/// The step's sums over all micro-steps and drafters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSums {
    /// Σ weight · term.
    pub loss: f64,
    /// Σ weight.
    pub weight: f64,
}

/// What became of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepOutcome {
    /// The parameters moved.
    Updated {
        /// L2 norm of the mean gradient, before clipping.
        grad_norm: f64,
    },
    /// Σ weight = 0: nothing to learn from; moments and count stay.
    NoWeight,
    /// The loss or the gradient was NaN or infinite: moments and count stay.
    NonFinite {
        /// How many such steps there were without a good one between; see [`NON_FINITE_LIMIT`].
        in_a_row: u32,
    },
}

impl<E: Engine> Optimizer<E> {
    /// Zero moments.
    pub fn new(
        engine: &E,
        layout: &ParamLayout,
        options: OptimizerOptions,
    ) -> Result<Self, EngineError> {
        Ok(Self {
            m: engine.float(1, layout.len())?,
            v: engine.float(1, layout.len())?,
            count: 0,
            non_finite_in_a_row: 0,
            options,
            squares: engine.float(1, 1)?,
        })
    }

    /// Its options.
    pub fn options(&self) -> &OptimizerOptions {
        &self.options
    }

    /// Bytes of masters, gradients, moments and working copy of a drafter on engine `E`.
    pub fn state_bytes(config: &DrafterConfig) -> usize {
        let layout = ParamLayout::new(config);
        16 * layout.len() + E::HALF_BYTES * layout.matrix_len()
    }

    /// Updates `params` from its gradient sum, which must already be reduced over all drafters, as must `sums`,
    /// at learning rate `lr`. The gradients stay as they are.
    pub fn step(
        &mut self,
        engine: &E,
        params: &mut Params<E>,
        sums: StepSums,
        lr: f64,
    ) -> Result<StepOutcome, EngineError> {
        if sums.weight == 0.0 && sums.loss.is_finite() {
            return Ok(StepOutcome::NoWeight);
        }
        engine.sum_squares(params.grads.view(), self.squares.view_mut())?;
        let squares = f64::from(engine.download_float(self.squares.view())?[0]);
        let grad_norm = squares.sqrt() / sums.weight;
        if !(grad_norm.is_finite() && sums.loss.is_finite() && sums.weight > 0.0) {
            self.non_finite_in_a_row += 1;
            return Ok(StepOutcome::NonFinite {
                in_a_row: self.non_finite_in_a_row,
            });
        }
        self.non_finite_in_a_row = 0;
        self.count += 1;
        let clip = self.options.clip;
        let factor = if clip > 0.0 && grad_norm > clip {
            clip / grad_norm
        } else {
            1.0
        };
        let update = AdamW {
            lr: lr as f32,
            beta1: self.options.beta1 as f32,
            beta2: self.options.beta2 as f32,
            eps: self.options.eps as f32,
            weight_decay: self.options.weight_decay as f32,
            count: self.count,
            grad_scale: (factor / sums.weight) as f32,
        };
        let matrices = params.layout().matrix_len();
        let norms = params.layout().len() - matrices;
        engine.adamw(
            &update,
            params.grads.window(0, 1, matrices),
            params.masters.window_mut(0, 1, matrices),
            self.m.window_mut(0, 1, matrices),
            self.v.window_mut(0, 1, matrices),
            Some(params.weights.view_mut()),
        )?;
        engine.adamw(
            &AdamW {
                weight_decay: 0.0,
                ..update
            },
            params.grads.window(matrices, 1, norms),
            params.masters.window_mut(matrices, 1, norms),
            self.m.window_mut(matrices, 1, norms),
            self.v.window_mut(matrices, 1, norms),
            None,
        )?;
        Ok(StepOutcome::Updated { grad_norm })
    }
}
