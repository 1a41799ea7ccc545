//! Documents held out for evaluation.

use super::TokenSet;
use super::units::{generator, shuffle};

/// How many documents are held out.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SplitOptions {
    /// Share of all documents (`--eval-fraction`), 0 for none.
    pub fraction: f64,
    /// No fewer documents than this, unless the set is too small.
    pub at_least: usize,
    /// No more tokens than this (`--eval-tokens`).
    pub tokens: u64,
    /// The run's seed.
    pub seed: u64,
}

impl Default for SplitOptions {
    fn default() -> Self {
        SplitOptions {
            fraction: 0.01,
            at_least: 16,
            tokens: 65_536,
            seed: 0,
        }
    }
}

/// A set's documents, divided; both lists ascend, which is data order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// Documents to train on.
    pub train: Vec<u32>,
    /// Documents held out.
    pub eval: Vec<u32>,
}

/// A stream of the generator that no epoch uses.
const STREAM: u64 = u64::MAX;

/// Holds documents out, the same ones for the same set and seed. At most half of the set is held
/// out, so a set of one document has none; the document that would exceed the tokens, and all after
/// it, stay in training.
pub fn split(set: &TokenSet, options: &SplitOptions) -> Split {
    let n = set.len();
    let wanted = match options.fraction > 0.0 {
        true => {
            let share = (options.fraction * n as f64).ceil() as usize;
            share.max(options.at_least).min(n / 2)
        }
        false => 0,
    };
    let mut order: Vec<u32> = (0..n as u32).collect();
    shuffle(&mut order, &mut generator(options.seed, STREAM));
    let eval = limit(set, order.into_iter().take(wanted), options.tokens);
    let mut held = vec![false; n];
    for &i in &eval {
        held[i as usize] = true;
    }
    Split {
        train: (0..n as u32).filter(|&i| !held[i as usize]).collect(),
        eval,
    }
}

/// Every document of a separate evaluation set (`--eval-data`), in data order, up to `tokens`.
pub fn whole(set: &TokenSet, tokens: u64) -> Vec<u32> {
    limit(set, 0..set.len() as u32, tokens)
}

/// The first of `order` that fit into `tokens`, at least one, in data order.
fn limit(set: &TokenSet, order: impl Iterator<Item = u32>, tokens: u64) -> Vec<u32> {
    let mut sum = 0;
    let mut kept: Vec<u32> = Vec::new();
    for i in order {
        sum += u64::from(set.info(i as usize).tokens);
        if sum > tokens && !kept.is_empty() {
            break;
        }
        kept.push(i);
    }
    kept.sort_unstable();
    kept
}
