//! Which tensors a layer has, by name and shape.

use super::TargetConfig;

/// A tensor of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::model) struct TensorSpec {
    /// After `layers.{i}.`, with its `.weight` or `.bias`.
    pub name: String,
    /// As the file has it.
    pub shape: Vec<usize>,
}

/// What a layer does with a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum Role {
    /// Norm in front of the attention.
    Input,
    /// Norm behind the attention, before it is added (Gemma).
    AfterAttention,
    /// Norm in front of the MLP.
    Mlp,
    /// Norm behind the MLP, before it is added (Gemma).
    AfterMlp,
    /// Norm on each head of the queries.
    Query,
    /// Norm on each head of the keys.
    Key,
}

/// A matrix product of a layer: matrices that are laid one below the other, and whether each has a bias.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::model) struct Projection {
    /// Names without `.weight`.
    pub names: Vec<String>,
    pub biased: bool,
}

/// A gated MLP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::model) struct Mlp {
    pub gate_up: Projection,
    pub down: Projection,
}

impl TargetConfig {
    /// The norm of a role, without `.weight`; `None` where the family has none.
    pub(in crate::model) fn norm_name(&self, role: Role) -> Option<&'static str> {
        let traits = self.traits();
        match role {
            Role::Input => Some("input_layernorm"),
            Role::AfterAttention => traits.gemma.then_some("post_attention_layernorm"),
            Role::Mlp if traits.gemma => Some("pre_feedforward_layernorm"),
            Role::Mlp => Some("post_attention_layernorm"),
            Role::AfterMlp => traits.gemma.then_some("post_feedforward_layernorm"),
            Role::Query => traits.head_norms.then_some("self_attn.q_norm"),
            Role::Key => traits.head_norms.then_some("self_attn.k_norm"),
        }
    }

    /// Queries, keys and values.
    pub(in crate::model) fn qkv(&self) -> Projection {
        let parts: &[&str] = if self.traits().fused {
            &["qkv_proj"]
        } else {
            &["q_proj", "k_proj", "v_proj"]
        };
        Projection {
            names: parts
                .iter()
                .map(|part| format!("self_attn.{part}"))
                .collect(),
            biased: self.qkv_bias,
        }
    }

    /// The attention's output.
    pub(in crate::model) fn attention_output(&self) -> Projection {
        Projection {
            names: vec!["self_attn.o_proj".to_string()],
            biased: self.output_bias,
        }
    }

    /// The MLP of layer `i`, or the router's matrix and the MLP of each expert.
    pub(in crate::model) fn mlps(&self, i: usize) -> (Option<String>, Vec<Mlp>) {
        let mlp = |block: &str, [gate, up, down]: [&str; 3]| {
            let named = |part: &str| format!("{block}.{part}");
            Mlp {
                gate_up: Projection {
                    names: if self.traits().fused {
                        vec![named("gate_up_proj")]
                    } else {
                        vec![named(gate), named(up)]
                    },
                    biased: self.mlp_bias,
                },
                down: Projection {
                    names: vec![named(down)],
                    biased: self.mlp_bias,
                },
            }
        };
        match (self.experts_of(i), self.traits().experts) {
            (Some(experts), Some(names)) => (
                Some(format!("{}.gate", names.block)),
                (0..experts.count)
                    .map(|e| mlp(&format!("{}.experts.{e}", names.block), names.parts))
                    .collect(),
            ),
            _ => (
                None,
                vec![mlp("mlp", ["gate_proj", "up_proj", "down_proj"])],
            ),
        }
    }

    /// All tensors of layer `i`.
    pub(in crate::model) fn layer_tensors(&self, i: usize) -> Vec<TensorSpec> {
        let (h, q, kv) = (self.hidden_size, self.query_size(), self.key_size());
        let mut tensors = Vec::new();
        for (role, size) in [
            (Role::Input, h),
            (Role::AfterAttention, h),
            (Role::Mlp, h),
            (Role::AfterMlp, h),
            (Role::Query, self.head_dim),
            (Role::Key, self.head_dim),
        ] {
            if let Some(name) = self.norm_name(role) {
                tensors.push(TensorSpec {
                    name: format!("{name}.weight"),
                    shape: vec![size],
                });
            }
        }
        let mut product = |projection: &Projection, rows: &[usize], cols: usize| {
            let rows = match projection.names.len() {
                1 => vec![rows.iter().sum()],
                _ => rows.to_vec(),
            };
            for (name, rows) in projection.names.iter().zip(rows) {
                tensors.push(TensorSpec {
                    name: format!("{name}.weight"),
                    shape: vec![rows, cols],
                });
                if projection.biased {
                    tensors.push(TensorSpec {
                        name: format!("{name}.bias"),
                        shape: vec![rows],
                    });
                }
            }
        };
        product(&self.qkv(), &[q, kv, kv], h);
        product(&self.attention_output(), &[h], q);
        let (router, mlps) = self.mlps(i);
        let inner = self
            .experts_of(i)
            .map_or(self.intermediate_size, |experts| experts.intermediate_size);
        if let Some(router) = router {
            let router = Projection {
                names: vec![router],
                biased: false,
            };
            product(&router, &[mlps.len()], h);
        }
        for mlp in &mlps {
            product(&mlp.gate_up, &[inner, inner], h);
            product(&mlp.down, &[h], inner);
        }
        tensors
    }
}
