//! The drafter's backward, the mirror of `forward`: gradients of all parameters are added to `grads`, a flat
//! float32 buffer of the parameters' layout. The embedding and the captured states are frozen, so nothing
//! flows further than the first layer's input norm and `fc`'s weight.

use super::Window;
use super::forward::Network;
use super::plan::BlockPlan;
use super::workspace::{BlockActivations, ContextActivations, Gradients};
use crate::engine::{BlockKeys, BlockKeysGrad, Engine, EngineError, Float, FloatMut, HalfView};

/// The gradient of a parameter.
fn grad<E: Engine>(grads: &mut Float<E>, w: Window) -> FloatMut<'_, E> {
    grads.window_mut(w.offset, w.rows, w.cols)
}

impl<E: Engine> Network<'_, E> {
    /// From `d.hidden`, the gradient of the drafter's output, to the gradients of all layers and to
    /// `d.context_kv`, the gradient of the projected context keys and values.
    pub(super) fn blocks_backward(
        &self,
        plan: &BlockPlan<E>,
        context: &ContextActivations<E>,
        acts: &mut BlockActivations<E>,
        d: &mut Gradients<E>,
        grads: &mut Float<E>,
    ) -> Result<(), EngineError> {
        let engine = self.engine;
        let eps = self.eps();
        let positions = plan.block_positions();
        let (_, kv) = self.key_columns(0);

        // final norm
        engine.zero_half(d.h.view_mut())?;
        engine.norm_backward(
            d.hidden.view(),
            acts.h_out.view(),
            self.norm_weight(self.layout.norm),
            eps,
            d.h.view_mut(),
            grad::<E>(grads, self.layout.norm),
        )?;
        for (i, w) in self.layout.layers.iter().enumerate().rev() {
            let a = &acts.layers[i];

            // h += down(silu(gate(y)) * up(y)), y = RMSNorm(h): the residual's gradient is in d.h already
            engine.swiglu(a.gate_up.view(), acts.act.view_mut())?;
            engine.linear_dw(d.h.view(), acts.act.view(), grad::<E>(grads, w.down))?;
            engine.linear_dx(d.h.view(), self.weight(w.down), d.act.view_mut(), false)?;
            engine.swiglu_backward(d.act.view(), a.gate_up.view(), d.gate_up.view_mut())?;
            engine.linear_dw(d.gate_up.view(), a.y.view(), grad::<E>(grads, w.gate_up))?;
            engine.linear_dx(
                d.gate_up.view(),
                self.weight(w.gate_up),
                d.x.view_mut(),
                false,
            )?;
            engine.norm_backward(
                d.x.view(),
                a.h_mid.view(),
                self.norm_weight(w.post_norm),
                eps,
                d.h.view_mut(),
                grad::<E>(grads, w.post_norm),
            )?;

            // h += o_proj(attention)
            engine.linear_dw(d.h.view(), a.attention.view(), grad::<E>(grads, w.o))?;
            engine.linear_dx(d.h.view(), self.weight(w.o), d.attention.view_mut(), false)?;

            // attention
            let (key, value) = self.key_columns(i);
            let (context_k, context_v) = self.context_keys(context, i);
            engine.block_attention_backward(
                self.heads(),
                self.scale(),
                d.attention.view(),
                a.q.view(),
                &BlockKeys {
                    context_k,
                    context_v,
                    block_k: a.k.view(),
                    block_v: a.kv.view().col_range(kv, 2 * kv),
                },
                &plan.mask(self.config.window(i)),
                a.attention.view(),
                a.lse.view(),
                d.q.view_mut(),
                BlockKeysGrad {
                    context_k: d.context_k.view_mut(),
                    context_v: d.context_kv.view_mut().col_range(value, value + kv),
                    block_k: d.k.view_mut(),
                    block_v: d.kv.view_mut().col_range(kv, 2 * kv),
                },
            )?;

            // rotary and head norms: the key norm's weight serves block and context
            engine.head_norm_rotary_backward(
                d.q.view(),
                a.q_raw.view(),
                self.norm_weight(w.q_norm),
                eps,
                positions,
                self.rotary,
                d.q_raw.view_mut(),
                grad::<E>(grads, w.q_norm),
            )?;
            engine.head_norm_rotary_backward(
                d.k.view(),
                a.kv.view().col_range(0, kv),
                self.norm_weight(w.k_norm),
                eps,
                positions,
                self.rotary,
                d.kv.view_mut().col_range(0, kv),
                grad::<E>(grads, w.k_norm),
            )?;
            engine.head_norm_rotary_backward(
                d.context_k.view(),
                context.kv.view().col_range(key, value),
                self.norm_weight(w.k_norm),
                eps,
                plan.context_positions(),
                self.rotary,
                d.context_kv.view_mut().col_range(key, value),
                grad::<E>(grads, w.k_norm),
            )?;

            // queries, keys and values of the block, x = RMSNorm(h)
            engine.linear_dw(d.q_raw.view(), a.x.view(), grad::<E>(grads, w.q))?;
            engine.linear_dw(d.kv.view(), a.x.view(), grad::<E>(grads, w.kv))?;
            engine.linear_dx(d.q_raw.view(), self.weight(w.q), d.x.view_mut(), false)?;
            engine.linear_dx(d.kv.view(), self.weight(w.kv), d.x.view_mut(), true)?;
            engine.norm_backward(
                d.x.view(),
                a.h_in.view(),
                self.norm_weight(w.input_norm),
                eps,
                d.h.view_mut(),
                grad::<E>(grads, w.input_norm),
            )?;
        }
        Ok(())
    }

    /// From `d.context_kv` through the joint projection and the context's norm to `fc`.
    pub(super) fn context_backward(
        &self,
        states: HalfView<'_, E>,
        context: &ContextActivations<E>,
        d: &mut Gradients<E>,
        grads: &mut Float<E>,
    ) -> Result<(), EngineError> {
        let engine = self.engine;
        let layout = self.layout;
        engine.linear_dw(
            d.context_kv.view(),
            context.c.view(),
            grad::<E>(grads, layout.context_kv),
        )?;
        engine.linear_dx(
            d.context_kv.view(),
            self.weight(layout.context_kv),
            d.context.view_mut(),
            false,
        )?;
        engine.zero_half(d.fc.view_mut())?;
        engine.norm_backward(
            d.context.view(),
            context.fc.view(),
            self.norm_weight(layout.hidden_norm),
            self.eps(),
            d.fc.view_mut(),
            grad::<E>(grads, layout.hidden_norm),
        )?;
        engine.linear_dw(d.fc.view(), states, grad::<E>(grads, layout.fc))
    }
}
