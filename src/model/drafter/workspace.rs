//! Activations and their gradients, kept between micro-steps so that nothing is allocated once the largest
//! unit was seen.

use super::DrafterConfig;
use crate::engine::{Engine, EngineError, Storage, Tensor, View, ViewMut};

/// A matrix whose shape changes from one micro-step to the next inside memory that only grows.
pub(super) struct Buffer<S> {
    tensor: Option<Tensor<S>>,
    rows: usize,
    cols: usize,
}

impl<S> Default for Buffer<S> {
    fn default() -> Self {
        Self {
            tensor: None,
            rows: 0,
            cols: 0,
        }
    }
}

impl<S: Storage> Buffer<S> {
    /// Takes the shape `[rows, cols]`; the contents are lost.
    fn fit(
        &mut self,
        rows: usize,
        cols: usize,
        allocate: impl FnOnce(usize) -> Result<Tensor<S>, EngineError>,
    ) -> Result<(), EngineError> {
        let needed = rows * cols;
        if self.tensor.as_ref().is_none_or(|t| t.cols() < needed) {
            // The old memory goes back first, so that growing never holds both.
            self.tensor = None;
            self.tensor = Some(allocate(needed)?);
        }
        (self.rows, self.cols) = (rows, cols);
        Ok(())
    }

    /// The matrix, which [`Buffer::fit`] has shaped.
    pub(super) fn view(&self) -> View<'_, S> {
        self.tensor
            .as_ref()
            .expect("a buffer is fitted before it is used")
            .window(0, self.rows, self.cols)
    }

    /// The matrix, to write.
    pub(super) fn view_mut(&mut self) -> ViewMut<'_, S> {
        self.tensor
            .as_mut()
            .expect("a buffer is fitted before it is used")
            .window_mut(0, self.rows, self.cols)
    }
}

/// Shapes a buffer of the compute type.
pub(super) fn fit_half<E: Engine>(
    engine: &E,
    buffer: &mut Buffer<E::Half>,
    rows: usize,
    cols: usize,
) -> Result<(), EngineError> {
    buffer.fit(rows, cols, |len| engine.half(1, len))
}

fn fit_float<E: Engine>(
    engine: &E,
    buffer: &mut Buffer<E::Float>,
    rows: usize,
    cols: usize,
) -> Result<(), EngineError> {
    buffer.fit(rows, cols, |len| engine.float(1, len))
}

/// What one layer keeps from its forward for its backward. R = block rows, T = context rows.
pub(super) struct LayerActivations<E: Engine> {
    /// `[R, H]` residual stream before the layer.
    pub(super) h_in: Buffer<E::Half>,
    /// `[R, H]` after the input norm.
    pub(super) x: Buffer<E::Half>,
    /// `[R, q]` projected queries.
    pub(super) q_raw: Buffer<E::Half>,
    /// `[R, q]` after norm and rotary.
    pub(super) q: Buffer<E::Half>,
    /// `[R, 2 kv]` projected keys and values of the block.
    pub(super) kv: Buffer<E::Half>,
    /// `[R, kv]` block keys after norm and rotary.
    pub(super) k: Buffer<E::Half>,
    /// `[R, q]` attention output.
    pub(super) attention: Buffer<E::Half>,
    /// `[q heads, R]` log-sum-exp of the scores.
    pub(super) lse: Buffer<E::Float>,
    /// `[R, H]` residual stream after attention.
    pub(super) h_mid: Buffer<E::Half>,
    /// `[R, H]` after the second norm.
    pub(super) y: Buffer<E::Half>,
    /// `[R, 2 I]` gate and up.
    pub(super) gate_up: Buffer<E::Half>,
}

impl<E: Engine> Default for LayerActivations<E> {
    fn default() -> Self {
        Self {
            h_in: Buffer::default(),
            x: Buffer::default(),
            q_raw: Buffer::default(),
            q: Buffer::default(),
            kv: Buffer::default(),
            k: Buffer::default(),
            attention: Buffer::default(),
            lse: Buffer::default(),
            h_mid: Buffer::default(),
            y: Buffer::default(),
            gate_up: Buffer::default(),
        }
    }
}

/// Gradients of activations; one set serves all layers.
pub(super) struct Gradients<E: Engine> {
    /// `[R, H]` of the drafter's output.
    pub(super) hidden: Buffer<E::Half>,
    /// `[R, H]` of the residual stream.
    pub(super) h: Buffer<E::Half>,
    /// `[R, H]` of a normalised input.
    pub(super) x: Buffer<E::Half>,
    /// `[R, I]` of the activation.
    pub(super) act: Buffer<E::Half>,
    /// `[R, 2 I]`.
    pub(super) gate_up: Buffer<E::Half>,
    /// `[R, q]` of the attention output.
    pub(super) attention: Buffer<E::Half>,
    /// `[R, q]` of the rotated queries.
    pub(super) q: Buffer<E::Half>,
    /// `[R, q]` of the projected queries.
    pub(super) q_raw: Buffer<E::Half>,
    /// `[R, kv]` of the rotated block keys.
    pub(super) k: Buffer<E::Half>,
    /// `[R, 2 kv]` of the projected block keys and values.
    pub(super) kv: Buffer<E::Half>,
    /// `[T, kv]` of the rotated context keys of one layer.
    pub(super) context_k: Buffer<E::Half>,
    /// `[T, L * 2 kv]` of the projected context keys and values of all layers.
    pub(super) context_kv: Buffer<E::Half>,
    /// `[T, H]` of the normalised context.
    pub(super) context: Buffer<E::Half>,
    /// `[T, H]` of `fc`'s output.
    pub(super) fc: Buffer<E::Half>,
}

impl<E: Engine> Default for Gradients<E> {
    fn default() -> Self {
        Self {
            hidden: Buffer::default(),
            h: Buffer::default(),
            x: Buffer::default(),
            act: Buffer::default(),
            gate_up: Buffer::default(),
            attention: Buffer::default(),
            q: Buffer::default(),
            q_raw: Buffer::default(),
            k: Buffer::default(),
            kv: Buffer::default(),
            context_k: Buffer::default(),
            context_kv: Buffer::default(),
            context: Buffer::default(),
            fc: Buffer::default(),
        }
    }
}

/// What the context's forward writes.
pub(super) struct ContextActivations<E: Engine> {
    /// `[T, H]` `fc`'s output, before its norm.
    pub(super) fc: Buffer<E::Half>,
    /// `[T, H]` the normalised context c.
    pub(super) c: Buffer<E::Half>,
    /// `[T, L * 2 kv]` projected keys and values of all layers.
    pub(super) kv: Buffer<E::Half>,
    /// `[T, kv]` of each layer: keys after norm and rotary.
    pub(super) k: Vec<Buffer<E::Half>>,
}

impl<E: Engine> Default for ContextActivations<E> {
    fn default() -> Self {
        Self {
            fc: Buffer::default(),
            c: Buffer::default(),
            kv: Buffer::default(),
            k: Vec::new(),
        }
    }
}

impl<E: Engine> ContextActivations<E> {
    /// Shapes everything for `tokens` rows.
    pub(super) fn fit(
        &mut self,
        engine: &E,
        config: &DrafterConfig,
        tokens: usize,
    ) -> Result<(), EngineError> {
        let s = Sizes::new(config);
        fit_half(engine, &mut self.fc, tokens, s.hidden)?;
        fit_half(engine, &mut self.c, tokens, s.hidden)?;
        fit_half(engine, &mut self.kv, tokens, s.layers * 2 * s.kv)?;
        self.k.resize_with(s.layers, Buffer::default);
        for k in &mut self.k {
            fit_half(engine, k, tokens, s.kv)?;
        }
        Ok(())
    }
}

/// What the blocks' forward writes.
pub(super) struct BlockActivations<E: Engine> {
    /// One entry a layer in training; evaluation has one for all.
    pub(super) layers: Vec<LayerActivations<E>>,
    /// `[R, I]` the activated MLP input, recomputed in backward.
    pub(super) act: Buffer<E::Half>,
    /// `[R, H]` residual stream after the last layer.
    pub(super) h_out: Buffer<E::Half>,
    /// `[R, H]` after the final norm.
    pub(super) hidden: Buffer<E::Half>,
}

impl<E: Engine> Default for BlockActivations<E> {
    fn default() -> Self {
        Self {
            layers: Vec::new(),
            act: Buffer::default(),
            h_out: Buffer::default(),
            hidden: Buffer::default(),
        }
    }
}

impl<E: Engine> BlockActivations<E> {
    /// Shapes everything for `rows` block rows; `kept` is the number of layers that keep their own.
    pub(super) fn fit(
        &mut self,
        engine: &E,
        config: &DrafterConfig,
        rows: usize,
        kept: usize,
    ) -> Result<(), EngineError> {
        let s = Sizes::new(config);
        if self.layers.len() < kept {
            self.layers.resize_with(kept, LayerActivations::default);
        }
        for layer in &mut self.layers[..kept] {
            fit_half(engine, &mut layer.h_in, rows, s.hidden)?;
            fit_half(engine, &mut layer.x, rows, s.hidden)?;
            fit_half(engine, &mut layer.q_raw, rows, s.q)?;
            fit_half(engine, &mut layer.q, rows, s.q)?;
            fit_half(engine, &mut layer.kv, rows, 2 * s.kv)?;
            fit_half(engine, &mut layer.k, rows, s.kv)?;
            fit_half(engine, &mut layer.attention, rows, s.q)?;
            fit_float(engine, &mut layer.lse, rows, config.num_attention_heads)?;
            fit_half(engine, &mut layer.h_mid, rows, s.hidden)?;
            fit_half(engine, &mut layer.y, rows, s.hidden)?;
            fit_half(engine, &mut layer.gate_up, rows, 2 * s.inner)?;
        }
        fit_half(engine, &mut self.act, rows, s.inner)?;
        fit_half(engine, &mut self.h_out, rows, s.hidden)?;
        fit_half(engine, &mut self.hidden, rows, s.hidden)
    }
}

impl<E: Engine> Gradients<E> {
    /// Shapes everything for `tokens` context rows and `rows` block rows.
    pub(super) fn fit(
        &mut self,
        engine: &E,
        config: &DrafterConfig,
        tokens: usize,
        rows: usize,
    ) -> Result<(), EngineError> {
        let s = Sizes::new(config);
        fit_half(engine, &mut self.hidden, rows, s.hidden)?;
        fit_half(engine, &mut self.h, rows, s.hidden)?;
        fit_half(engine, &mut self.x, rows, s.hidden)?;
        fit_half(engine, &mut self.act, rows, s.inner)?;
        fit_half(engine, &mut self.gate_up, rows, 2 * s.inner)?;
        fit_half(engine, &mut self.attention, rows, s.q)?;
        fit_half(engine, &mut self.q, rows, s.q)?;
        fit_half(engine, &mut self.q_raw, rows, s.q)?;
        fit_half(engine, &mut self.k, rows, s.kv)?;
        fit_half(engine, &mut self.kv, rows, 2 * s.kv)?;
        fit_half(engine, &mut self.context_k, tokens, s.kv)?;
        fit_half(engine, &mut self.context_kv, tokens, s.layers * 2 * s.kv)?;
        fit_half(engine, &mut self.context, tokens, s.hidden)?;
        fit_half(engine, &mut self.fc, tokens, s.hidden)
    }
}

/// Column counts of a drafter.
struct Sizes {
    hidden: usize,
    inner: usize,
    q: usize,
    kv: usize,
    layers: usize,
}

impl Sizes {
    fn new(config: &DrafterConfig) -> Self {
        Self {
            hidden: config.hidden_size,
            inner: config.intermediate_size,
            q: config.num_attention_heads * config.head_dim,
            kv: config.num_key_value_heads * config.head_dim,
            layers: config.num_hidden_layers,
        }
    }
}

/// Elements of the compute type that a micro-step of `tokens` context rows and `rows` block rows keeps.
pub(super) fn training_elements(config: &DrafterConfig, tokens: usize, rows: usize) -> usize {
    let s = Sizes::new(config);
    let context = tokens * (2 * s.hidden + 3 * s.layers * s.kv);
    let layer = rows * (4 * s.hidden + 3 * s.q + 3 * s.kv + 2 * s.inner);
    let shared = rows * (2 * s.hidden + s.inner);
    let gradients = rows * (3 * s.hidden + 3 * s.inner + 3 * s.q + 3 * s.kv)
        + tokens * (2 * s.hidden + s.kv + 2 * s.layers * s.kv);
    context + s.layers * layer + shared + gradients
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    impl<S: Storage> Buffer<S> {
        fn len(&self) -> usize {
            self.tensor.as_ref().map_or(0, Tensor::cols)
        }
    }

    /// Elements that are really held.
    pub(in crate::model::drafter) fn held<E: Engine>(
        context: &ContextActivations<E>,
        blocks: &BlockActivations<E>,
        d: &Gradients<E>,
    ) -> usize {
        let layer = |l: &LayerActivations<E>| {
            let half = [
                &l.h_in,
                &l.x,
                &l.q_raw,
                &l.q,
                &l.kv,
                &l.k,
                &l.attention,
                &l.h_mid,
                &l.y,
                &l.gate_up,
            ];
            half.iter().map(|b| b.len()).sum::<usize>() + l.lse.len()
        };
        let context_buffers = [&context.fc, &context.c, &context.kv];
        let shared = [&blocks.act, &blocks.h_out, &blocks.hidden];
        let gradients = [
            &d.hidden,
            &d.h,
            &d.x,
            &d.act,
            &d.gate_up,
            &d.attention,
            &d.q,
            &d.q_raw,
            &d.k,
            &d.kv,
            &d.context_k,
            &d.context_kv,
            &d.context,
            &d.fc,
        ];
        let all = context_buffers.into_iter().chain(&context.k);
        let all = all.chain(shared).chain(gradients);
        all.map(Buffer::len).sum::<usize>() + blocks.layers.iter().map(layer).sum::<usize>()
    }
}
