//! One layer: its weights, and its forward pass as the config's family has it.

use super::attend::{Attend, NewRows};
use super::experts::Experts;
use super::mlp::{Gated, Linear};
use crate::engine::{Engine, Float, Half, HalfMut, HalfView, Heads, IndexView, Rotary, Scores};
use crate::model::config::{Role, TargetConfig};
use crate::model::error::ModelError;
use crate::model::weights::TargetFiles;

/// Weights of one layer, in the compute type; norms and biases in float32.
pub(super) struct Layer<E: Engine> {
    input_norm: Float<E>,
    /// `[q + 2 kv, H]`: queries, keys, values.
    qkv: Linear<E>,
    head_norms: Option<(Float<E>, Float<E>)>,
    /// `[H, q]`.
    out: Linear<E>,
    /// Of what the attention gives, before it is added.
    after_attention: Option<Float<E>>,
    mlp_norm: Float<E>,
    mlp: Mlp<E>,
    /// Of what the MLP gives, before it is added.
    after_mlp: Option<Float<E>>,
    window: Option<usize>,
}

enum Mlp<E: Engine> {
    Gated(Gated<E>),
    Experts(Experts<E>),
}

/// What is the same for all layers of a pass.
pub(super) struct Pass<'a, E: Engine> {
    pub engine: &'a E,
    pub config: &'a TargetConfig,
    /// Of layers without a window, and of those with one: rows of the tables, and the tables.
    pub turns: [(IndexView<'a, E>, Rotary<'a, E>); 2],
}

/// Matrices of a pass, used by one layer after the other.
pub(super) struct Room<E: Engine> {
    /// `[tokens, H]` the residual stream.
    pub h: Half<E>,
    /// `[tokens, H]` what a product reads.
    x: Half<E>,
    /// `[tokens, H]` what is normed or summed before it is added to the residual stream.
    delta: Half<E>,
    qkv: Half<E>,
    q: Half<E>,
    k: Half<E>,
    attention: Half<E>,
}

impl<E: Engine> Room<E> {
    pub(super) fn new(
        engine: &E,
        config: &TargetConfig,
        tokens: usize,
    ) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        let (query, key) = (config.query_size(), config.key_size());
        let adds = config.norm_name(Role::AfterMlp).is_some() || config.experts.is_some();
        Ok(Self {
            h: engine.half(tokens, hidden)?,
            x: engine.half(tokens, hidden)?,
            delta: engine.half(if adds { tokens } else { 0 }, hidden)?,
            qkv: engine.half(tokens, query + 2 * key)?,
            q: engine.half(tokens, query)?,
            k: engine.half(tokens, key)?,
            attention: engine.half(tokens, query)?,
        })
    }
}

impl<E: Engine> Layer<E> {
    pub(super) fn load(engine: &E, files: &TargetFiles, i: usize) -> Result<Self, ModelError> {
        let config = files.config();
        let norm = |role| -> Result<Option<Float<E>>, ModelError> {
            config
                .norm_name(role)
                .map(|name| files.norm(engine, &files.layer_name(i, name)))
                .transpose()
        };
        let needed = |role| -> Result<Float<E>, ModelError> {
            Ok(norm(role)?.expect("every family has the norms in front of attention and MLP"))
        };
        let (router, mlps) = config.mlps(i);
        let mut mlps = mlps
            .iter()
            .map(|mlp| Gated::load(engine, files, i, mlp))
            .collect::<Result<Vec<_>, ModelError>>()?;
        let mlp = match (router, config.experts_of(i)) {
            (Some(router), Some(experts)) => {
                let router = files.stacked(engine, &[files.layer_name(i, &router)])?;
                Mlp::Experts(Experts::new(experts.clone(), router, mlps))
            }
            _ => Mlp::Gated(mlps.swap_remove(0)),
        };
        Ok(Self {
            input_norm: needed(Role::Input)?,
            qkv: Linear::load(engine, files, i, &config.qkv())?,
            head_norms: norm(Role::Query)?.zip(norm(Role::Key)?),
            out: Linear::load(engine, files, i, &config.attention_output())?,
            after_attention: norm(Role::AfterAttention)?,
            mlp_norm: needed(Role::Mlp)?,
            mlp,
            after_mlp: norm(Role::AfterMlp)?,
            window: config.windows[i],
        })
    }

    /// Runs layer `i` over the rows of `room.h`.
    pub(super) fn forward(
        &self,
        i: usize,
        pass: &Pass<'_, E>,
        room: &mut Room<E>,
        attend: &mut impl Attend<E>,
    ) -> Result<(), ModelError> {
        let (engine, eps) = (pass.engine, pass.config.rms_norm_eps as f32);
        engine.norm(
            room.h.view_mut(),
            None,
            self.input_norm.view(),
            eps,
            room.x.view_mut(),
        )?;
        self.attention(i, pass, room, attend)?;
        let attention = room.attention.view();
        match &self.after_attention {
            None => {
                self.out.run(engine, attention, room.h.view_mut(), true)?;
                engine.norm(
                    room.h.view_mut(),
                    None,
                    self.mlp_norm.view(),
                    eps,
                    room.x.view_mut(),
                )?;
            }
            Some(norm) => {
                let (h, x, delta) = (&mut room.h, &mut room.x, &mut room.delta);
                self.out.run(engine, attention, x.view_mut(), false)?;
                engine.norm(x.view_mut(), None, norm.view(), eps, delta.view_mut())?;
                engine.norm(
                    h.view_mut(),
                    Some(delta.view()),
                    self.mlp_norm.view(),
                    eps,
                    x.view_mut(),
                )?;
            }
        }
        let (h, x, delta) = (&mut room.h, &mut room.x, &mut room.delta);
        if let (None, Mlp::Gated(mlp)) = (&self.after_mlp, &self.mlp) {
            return mlp.run(engine, x.view(), h.view_mut(), true);
        }
        self.mlp.run(engine, x.view(), delta.view_mut())?;
        match &self.after_mlp {
            None => engine.add(delta.view(), h.view_mut())?,
            Some(norm) => {
                engine.norm(delta.view_mut(), None, norm.view(), eps, x.view_mut())?;
                engine.add(x.view(), h.view_mut())?;
            }
        }
        Ok(())
    }

    /// From `room.x` to `room.attention`.
    fn attention(
        &self,
        i: usize,
        pass: &Pass<'_, E>,
        room: &mut Room<E>,
        attend: &mut impl Attend<E>,
    ) -> Result<(), ModelError> {
        let (engine, config) = (pass.engine, pass.config);
        let (query, key) = (config.query_size(), config.key_size());
        self.qkv
            .run(engine, room.x.view(), room.qkv.view_mut(), false)?;
        let (q_norm, k_norm) = match &self.head_norms {
            Some((q, k)) => (Some(q.view()), Some(k.view())),
            None => (None, None),
        };
        let (rows, rotary) = pass.turns[usize::from(self.window.is_some())];
        let raw = room.qkv.view();
        for (raw, norm, turned) in [
            (raw.col_range(0, query), q_norm, room.q.view_mut()),
            (raw.col_range(query, query + key), k_norm, room.k.view_mut()),
        ] {
            let eps = config.rms_norm_eps as f32;
            engine.head_norm_rotary(raw, norm, eps, config.head_dim, rows, rotary, turned)?;
        }
        let new = NewRows {
            heads: Heads {
                q: config.num_attention_heads,
                kv: config.num_key_value_heads,
                dim: config.head_dim,
            },
            scores: Scores {
                scale: config.attention_scale as f32,
                cap: config.attention_cap.map(|cap| cap as f32),
            },
            q: room.q.view(),
            k: room.k.view(),
            v: raw.col_range(query + key, query + 2 * key),
            window: self.window,
        };
        attend.attend(engine, i, new, room.attention.view_mut())
    }
}

impl<E: Engine> Mlp<E> {
    /// Overwrites `y`.
    fn run(&self, engine: &E, x: HalfView<'_, E>, y: HalfMut<'_, E>) -> Result<(), ModelError> {
        match self {
            Self::Gated(mlp) => mlp.run(engine, x, y, false),
            Self::Experts(experts) => experts.run(engine, x, y),
        }
    }
}
