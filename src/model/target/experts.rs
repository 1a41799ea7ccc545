//! Routed experts (arXiv 2101.03961): each token takes the few MLPs that its router likes best.
//!
//! The router's logits come to the host, where tokens are sorted by expert; each expert then runs over its
//! tokens alone, and what it gives is added, weighted, in the order of the experts.

use super::mlp::Gated;
use crate::engine::{Engine, Half, HalfMut, HalfView};
use crate::model::config::ExpertsConfig;
use crate::model::error::ModelError;

/// The experts of one layer and their router.
pub(super) struct Experts<E: Engine> {
    config: ExpertsConfig,
    /// `[experts, H]`.
    router: Half<E>,
    experts: Vec<Gated<E>>,
}

/// Which tokens an expert gets, and with what weight its result counts.
#[derive(Clone, Debug, Default, PartialEq)]
struct Share {
    rows: Vec<u32>,
    weights: Vec<f32>,
}

impl<E: Engine> Experts<E> {
    pub(super) fn new(config: ExpertsConfig, router: Half<E>, experts: Vec<Gated<E>>) -> Self {
        Self {
            config,
            router,
            experts,
        }
    }

    /// Overwrites `y [tokens, H]`.
    pub(super) fn run(
        &self,
        engine: &E,
        x: HalfView<'_, E>,
        mut y: HalfMut<'_, E>,
    ) -> Result<(), ModelError> {
        let mut logits = engine.float(x.rows, self.config.count)?;
        engine.logits(x, self.router.view(), logits.view_mut())?;
        let shares = route(&engine.download_float(logits.view())?, &self.config);
        engine.zero_half(y.reborrow())?;
        for (expert, share) in self.experts.iter().zip(&shares) {
            if share.rows.is_empty() {
                continue;
            }
            let rows = engine.upload_index(&share.rows)?;
            let weights = engine.upload_float(&share.weights, share.weights.len())?;
            let mut taken = engine.half(share.rows.len(), x.cols)?;
            let mut given = engine.half(share.rows.len(), x.cols)?;
            engine.gather(x, rows.view(), taken.view_mut())?;
            expert.run(engine, taken.view(), given.view_mut(), false)?;
            engine.scatter_add(given.view(), rows.view(), weights.view(), y.reborrow())?;
        }
        Ok(())
    }
}

/// Sorts tokens by expert, from the router's `[tokens, experts]` logits: the most likely experts of each, the
/// lower one first in a tie.
fn route(logits: &[f32], config: &ExpertsConfig) -> Vec<Share> {
    let mut shares = vec![Share::default(); config.count];
    let mut chosen: Vec<usize> = Vec::with_capacity(config.per_token + 1);
    for (row, logits) in logits.chunks(config.count).enumerate() {
        chosen.clear();
        for (expert, &z) in logits.iter().enumerate() {
            if chosen.len() == config.per_token && z <= logits[chosen[config.per_token - 1]] {
                continue;
            }
            let at = chosen.partition_point(|&other| logits[other] >= z);
            chosen.insert(at, expert);
            chosen.truncate(config.per_token);
        }
        let likely = |z: f32| (z - logits[chosen[0]]).exp();
        let total: f32 = if config.normalised {
            chosen.iter().map(|&expert| likely(logits[expert])).sum()
        } else {
            logits.iter().map(|&z| likely(z)).sum()
        };
        for &expert in &chosen {
            shares[expert].rows.push(row as u32);
            shares[expert].weights.push(likely(logits[expert]) / total);
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_go_to_their_likeliest_experts() {
        let config = |normalised| ExpertsConfig {
            count: 3,
            per_token: 2,
            intermediate_size: 1,
            normalised,
            layers: vec![true],
        };
        let logits = [0.0, 2f32.ln(), 4f32.ln(), 1.0, 1.0, 1.0];
        let shares = route(&logits, &config(true));
        let rows: Vec<&[u32]> = shares.iter().map(|share| share.rows.as_slice()).collect();
        assert_eq!(rows, [&[1][..], &[0, 1], &[0]]);
        let close = |got: f32, want: f32| assert!((got - want).abs() < 1e-6, "{got} {want}");
        close(shares[1].weights[0], 1.0 / 3.0);
        close(shares[2].weights[0], 2.0 / 3.0);
        close(shares[0].weights[0], 0.5);
        let shares = route(&logits, &config(false));
        close(shares[1].weights[0], 2.0 / 7.0);
        close(shares[2].weights[0], 4.0 / 7.0);
    }
}
