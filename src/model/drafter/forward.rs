//! The drafter's forward (DFlash, arXiv 2602.06036), read top to bottom; its backward is in `backward`.
//!
//! R = block rows, T = context rows, H = hidden size, K = captured layers, L = drafter layers. The context has
//! no queries, no MLP and no residual: it is encoded once per document and gives every layer its keys and values.

use super::plan::BlockPlan;
use super::workspace::{BlockActivations, ContextActivations};
use super::{DrafterConfig, ParamLayout, Tables, Window};
use crate::engine::{
    BlockKeys, Engine, EngineError, Float, FloatView, Half, HalfView, Heads, IndexView, Rotary,
};

/// The network of one call: its shape, its parameters and the engine it runs on.
pub(super) struct Network<'a, E: Engine> {
    pub(super) engine: &'a E,
    pub(super) config: &'a DrafterConfig,
    pub(super) layout: &'a ParamLayout,
    pub(super) weights: &'a Half<E>,
    pub(super) masters: &'a Float<E>,
    pub(super) rotary: Rotary<'a, E>,
}

/// A layer's context keys (after norm and rotary) and values, `[T, kv]` each.
pub(super) type ContextKeys<'a, E> = (HalfView<'a, E>, HalfView<'a, E>);

impl<'a, E: Engine> Network<'a, E> {
    /// Working weights of a matrix.
    pub(super) fn weight(&self, w: Window) -> HalfView<'a, E> {
        self.weights.window(w.offset, w.rows, w.cols)
    }

    /// A norm weight, float32.
    pub(super) fn norm_weight(&self, w: Window) -> FloatView<'a, E> {
        self.masters.window(w.offset, w.rows, w.cols)
    }

    pub(super) fn heads(&self) -> Heads {
        Heads {
            q: self.config.num_attention_heads,
            kv: self.config.num_key_value_heads,
            dim: self.config.head_dim,
        }
    }

    pub(super) fn scale(&self) -> f32 {
        (self.config.head_dim as f32).powf(-0.5)
    }

    pub(super) fn eps(&self) -> f32 {
        self.config.rms_norm_eps as f32
    }

    /// Columns of the keys of layer `i` inside the context's projections; the values follow them.
    pub(super) fn key_columns(&self, i: usize) -> (usize, usize) {
        let kv = self.config.num_key_value_heads * self.config.head_dim;
        (i * 2 * kv, i * 2 * kv + kv)
    }

    /// Context states `[T, K H]` at `positions` to the keys and values of every layer.
    pub(super) fn context_forward(
        &self,
        states: HalfView<'_, E>,
        positions: IndexView<'_, E>,
        context: &mut ContextActivations<E>,
    ) -> Result<(), EngineError> {
        let engine = self.engine;
        let layout = self.layout;
        // c = RMSNorm(fc · states)
        engine.linear(states, self.weight(layout.fc), context.fc.view_mut(), false)?;
        engine.norm(
            context.fc.view_mut(),
            None,
            self.norm_weight(layout.hidden_norm),
            self.eps(),
            context.c.view_mut(),
        )?;
        // keys and values of all layers in one product
        engine.linear(
            context.c.view(),
            self.weight(layout.context_kv),
            context.kv.view_mut(),
            false,
        )?;
        for (i, layer) in layout.layers.iter().enumerate() {
            let (begin, end) = self.key_columns(i);
            engine.head_norm_rotary(
                context.kv.view().col_range(begin, end),
                Some(self.norm_weight(layer.k_norm)),
                self.eps(),
                self.config.head_dim,
                positions,
                self.rotary,
                context.k[i].view_mut(),
            )?;
        }
        Ok(())
    }

    /// Keys and values of layer `i` out of the encoded context.
    pub(super) fn context_keys<'c>(
        &self,
        context: &'c ContextActivations<E>,
        i: usize,
    ) -> ContextKeys<'c, E> {
        let (begin, middle) = self.key_columns(i);
        let end = middle + (middle - begin);
        (
            context.k[i].view(),
            context.kv.view().col_range(middle, end),
        )
    }

    /// All blocks of `plan` through all layers, to `acts.hidden`. `keep` every layer's activations for a
    /// backward, or overwrite the first layer's.
    pub(super) fn blocks_forward<'c>(
        &self,
        tables: Tables<'_, E>,
        plan: &BlockPlan<E>,
        context: impl Fn(usize) -> ContextKeys<'c, E>,
        acts: &mut BlockActivations<E>,
        keep: bool,
    ) -> Result<(), EngineError> {
        let engine = self.engine;
        let positions = plan.block_positions();
        // h = embed([x[a], MASK, ...])
        engine.embed(
            tables.embedding,
            plan.block_ids(),
            acts.layers[0].h_in.view_mut(),
        )?;
        for (i, w) in self.layout.layers.iter().enumerate() {
            let a = &mut acts.layers[if keep { i } else { 0 }];

            // x = RMSNorm(h)
            engine.norm(
                a.h_in.view_mut(),
                None,
                self.norm_weight(w.input_norm),
                self.eps(),
                a.x.view_mut(),
            )?;
            // queries, keys and values of the block
            engine.linear(a.x.view(), self.weight(w.q), a.q_raw.view_mut(), false)?;
            engine.linear(a.x.view(), self.weight(w.kv), a.kv.view_mut(), false)?;
            engine.head_norm_rotary(
                a.q_raw.view(),
                Some(self.norm_weight(w.q_norm)),
                self.eps(),
                self.config.head_dim,
                positions,
                self.rotary,
                a.q.view_mut(),
            )?;
            let (_, kv) = self.key_columns(0);
            engine.head_norm_rotary(
                a.kv.view().col_range(0, kv),
                Some(self.norm_weight(w.k_norm)),
                self.eps(),
                self.config.head_dim,
                positions,
                self.rotary,
                a.k.view_mut(),
            )?;
            // attention over the context before the anchor and the block itself
            let (context_k, context_v) = context(i);
            engine.block_attention(
                self.heads(),
                self.scale(),
                a.q.view(),
                &BlockKeys {
                    context_k,
                    context_v,
                    block_k: a.k.view(),
                    block_v: a.kv.view().col_range(kv, 2 * kv),
                },
                &plan.mask(self.config.window(i)),
                a.attention.view_mut(),
                a.lse.view_mut(),
            )?;
            // h += o_proj(attention)
            engine.copy_half(a.h_in.view(), a.h_mid.view_mut())?;
            engine.linear(
                a.attention.view(),
                self.weight(w.o),
                a.h_mid.view_mut(),
                true,
            )?;

            // h += down(silu(gate(y)) * up(y)), y = RMSNorm(h)
            engine.norm(
                a.h_mid.view_mut(),
                None,
                self.norm_weight(w.post_norm),
                self.eps(),
                a.y.view_mut(),
            )?;
            engine.linear(
                a.y.view(),
                self.weight(w.gate_up),
                a.gate_up.view_mut(),
                false,
            )?;
            engine.swiglu(a.gate_up.view(), acts.act.view_mut())?;
            let last = i + 1 == self.layout.layers.len();
            let (done, rest) = acts.layers.split_at_mut(if keep { i + 1 } else { 1 });
            let a = done.last_mut().expect("split behind the layer at work");
            let next = match (last, keep) {
                (true, _) => &mut acts.h_out,
                (false, true) => &mut rest[0].h_in,
                (false, false) => &mut a.h_in,
            };
            engine.copy_half(a.h_mid.view(), next.view_mut())?;
            engine.linear(acts.act.view(), self.weight(w.down), next.view_mut(), true)?;
        }
        // final norm
        engine.norm(
            acts.h_out.view_mut(),
            None,
            self.norm_weight(self.layout.norm),
            self.eps(),
            acts.hidden.view_mut(),
        )
    }
}
