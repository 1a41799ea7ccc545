//! Linear layers with an optional bias, and the gated MLP made of them.

use crate::engine::{Engine, Float, Half, HalfMut, HalfView};
use crate::model::config::{self, Activation, Projection};
use crate::model::error::ModelError;
use crate::model::weights::TargetFiles;

/// `y = x wᵀ + bias`.
pub(super) struct Linear<E: Engine> {
    /// `[out, in]`.
    weight: Half<E>,
    /// `[1, out]`.
    bias: Option<Float<E>>,
}

impl<E: Engine> Linear<E> {
    pub(super) fn load(
        engine: &E,
        files: &TargetFiles,
        layer: usize,
        projection: &Projection,
    ) -> Result<Self, ModelError> {
        let names: Vec<String> = projection
            .names
            .iter()
            .map(|name| files.layer_name(layer, name))
            .collect();
        Ok(Self {
            weight: files.stacked(engine, &names)?,
            bias: projection
                .biased
                .then(|| files.biases(engine, &names))
                .transpose()?,
        })
    }

    /// Overwrites `y`, or adds to it.
    pub(super) fn run(
        &self,
        engine: &E,
        x: HalfView<'_, E>,
        mut y: HalfMut<'_, E>,
        accumulate: bool,
    ) -> Result<(), ModelError> {
        engine.linear(x, self.weight.view(), y.reborrow(), accumulate)?;
        if let Some(bias) = &self.bias {
            engine.add_bias(bias.view(), y)?;
        }
        Ok(())
    }
}

/// `down(act(gate(x)) · up(x))`.
pub(super) struct Gated<E: Engine> {
    /// `[2 I, H]`: gate, up.
    gate_up: Linear<E>,
    /// `[H, I]`.
    down: Linear<E>,
    activation: Activation,
}

impl<E: Engine> Gated<E> {
    pub(super) fn load(
        engine: &E,
        files: &TargetFiles,
        layer: usize,
        names: &config::Mlp,
    ) -> Result<Self, ModelError> {
        Ok(Self {
            gate_up: Linear::load(engine, files, layer, &names.gate_up)?,
            down: Linear::load(engine, files, layer, &names.down)?,
            activation: files.config().activation,
        })
    }

    /// Overwrites `y`, or adds to it.
    pub(super) fn run(
        &self,
        engine: &E,
        x: HalfView<'_, E>,
        y: HalfMut<'_, E>,
        accumulate: bool,
    ) -> Result<(), ModelError> {
        let inner = self.down.weight.cols();
        let mut gate_up = engine.half(x.rows, 2 * inner)?;
        let mut act = engine.half(x.rows, inner)?;
        self.gate_up.run(engine, x, gate_up.view_mut(), false)?;
        match self.activation {
            Activation::Silu => engine.swiglu(gate_up.view(), act.view_mut())?,
            Activation::GeluTanh => engine.geglu(gate_up.view(), act.view_mut())?,
        }
        self.down.run(engine, act.view(), y, accumulate)
    }
}
