//! Decoding with the target alone, and with a drafter that it verifies.
//!
//! A round of speculative decoding drafts tokens behind the anchor (a chain, DFlash arXiv 2602.06036, or a draft
//! tree, DDTree arXiv 2604.12989), runs anchor and draft through the target in one pass, and walks down the draft
//! for as long as its tokens are those that the target chooses itself. Whatever is emitted is the target's own
//! choice, so greedy output equals plain greedy decoding and sampled output has the target's distribution.

use std::ops::Range;
use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::Rng;

use super::tree::{SlotRanks, TreeNode, build_tree};
use crate::engine::{Engine, EngineError};
use crate::model::drafter::{DraftCache, DrafterError, DrafterModel};
use crate::model::{ModelError, Shape, Step, Target, TargetDecoder};

/// What can go wrong while decoding.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The target.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The drafter.
    #[error(transparent)]
    Drafter(#[from] DrafterError),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The prompt is empty.
    #[error("a prompt without tokens cannot be continued")]
    EmptyPrompt,
}

/// How the target chooses a token from its logits.
pub enum Choice<'r> {
    /// The most likely one; the lowest id wins a tie.
    Greedy,
    /// Drawn at this temperature.
    Sampled {
        /// Above 0.
        temperature: f32,
        /// Where the randomness comes from.
        rng: &'r mut ChaCha8Rng,
    },
}

impl Choice<'_> {
    fn pick(&mut self, logits: &[f32]) -> u32 {
        match self {
            Self::Greedy => most_likely(logits),
            Self::Sampled { temperature, rng } => sample(logits, *temperature, rng),
        }
    }
}

/// What is drafted in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draft {
    /// The most likely token of every slot of the block, one behind the other.
    Chain,
    /// The best tree of this many nodes.
    Tree(usize),
}

/// When an answer ends.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// Longest answer in tokens.
    pub new_tokens: usize,
    /// Tokens that end it; they belong to it.
    pub end: &'a [u32],
}

impl Limits<'_> {
    /// Whether an answer is over.
    fn reached(&self, answer: &[u32]) -> bool {
        answer.len() >= self.new_tokens
            || answer.last().is_some_and(|token| self.end.contains(token))
    }
}

/// A plain answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plain {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// By how much the chosen token's logit lay above the second's, for each token.
    pub margins: Vec<f32>,
    /// The chosen token's logit.
    pub logits: Vec<f32>,
    /// Time behind the prompt's prefill.
    pub time: Duration,
}

/// A speculative answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Speculative {
    /// Its tokens; the first is chosen from the prompt's prefill, before any round.
    pub tokens: Vec<u32>,
    /// Drafted tokens accepted in each round.
    pub accepted: Vec<usize>,
    /// Time spent drafting.
    pub draft_time: Duration,
    /// Time spent in the target.
    pub verify_time: Duration,
}

impl Speculative {
    /// Tokens behind the first, which is what rounds produced.
    pub fn produced(&self) -> usize {
        self.tokens.len().saturating_sub(1)
    }
}

/// A target and a drafter with the caches of one sequence.
pub struct Decoder<'a, E: Engine> {
    engine: &'a E,
    target: &'a mut Target<E>,
    drafter: &'a mut DrafterModel<E>,
    cache: TargetDecoder<E>,
    context: DraftCache<E>,
}

impl<'a, E: Engine> Decoder<'a, E> {
    /// Room for sequences of `capacity` tokens, drafts of up to `nodes` tokens included.
    ///
    /// # Errors
    /// A target without its head, or the engine's.
    pub fn new(
        engine: &'a E,
        target: &'a mut Target<E>,
        drafter: &'a mut DrafterModel<E>,
        capacity: usize,
        nodes: usize,
    ) -> Result<Self, DecodeError> {
        Ok(Self {
            cache: TargetDecoder::new(engine, target, capacity + nodes + 1)?,
            context: DraftCache::new(engine, drafter, 1, capacity + nodes + 1)?,
            engine,
            target,
            drafter,
        })
    }

    /// Decodes with the target alone, one token a pass.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn plain(
        &mut self,
        prompt: &[u32],
        limits: Limits<'_>,
        choice: &mut Choice<'_>,
    ) -> Result<Plain, DecodeError> {
        self.cache.clear();
        let mut logits = self.prefill(prompt)?.1;
        let mut answer = Plain::default();
        let began = Instant::now();
        loop {
            let token = choice.pick(&logits);
            answer.tokens.push(token);
            answer.margins.push(margin(&logits, token));
            answer.logits.push(logits[token as usize]);
            if limits.reached(&answer.tokens) {
                break;
            }
            let step = self.pass(&[token], Shape::Chain)?;
            logits = self.cache.logits(self.engine, self.target, &step)?;
            self.cache.keep(self.engine, &[0])?;
        }
        answer.time = began.elapsed();
        Ok(answer)
    }

    /// Decodes with drafts that the target verifies.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn speculative(
        &mut self,
        prompt: &[u32],
        draft: Draft,
        limits: Limits<'_>,
        choice: &mut Choice<'_>,
    ) -> Result<Speculative, DecodeError> {
        self.cache.clear();
        self.context.clear(0);
        let (step, logits) = self.prefill(prompt)?;
        self.context
            .extend(self.engine, self.drafter, 0, step.states())?;
        let mut anchor = choice.pick(&logits);
        let mut answer = Speculative {
            tokens: vec![anchor],
            ..Speculative::default()
        };
        while !limits.reached(&answer.tokens) {
            let began = Instant::now();
            let nodes = self.draft(anchor, draft)?;
            answer.draft_time += began.elapsed();

            let began = Instant::now();
            let (path, chosen) = self.verify(anchor, &nodes, choice)?;
            answer.verify_time += began.elapsed();

            let mut taken = 0;
            for token in chosen {
                answer.tokens.push(token);
                taken += 1;
                anchor = token;
                if limits.reached(&answer.tokens) {
                    break;
                }
            }
            // The last token of a round is the target's own.
            answer.accepted.push(taken.min(path));
        }
        Ok(answer)
    }

    /// Runs the prompt; its step and the logits behind its last token.
    fn prefill(&mut self, prompt: &[u32]) -> Result<(Step<E>, Vec<f32>), DecodeError> {
        let last = prompt
            .len()
            .checked_sub(1)
            .ok_or(DecodeError::EmptyPrompt)?;
        let step = self.pass(prompt, Shape::Chain)?;
        self.cache
            .keep(self.engine, &(0..prompt.len()).collect::<Vec<_>>())?;
        let hidden = step.hidden().row_range(last, last + 1);
        let logits = self.target.logits(self.engine, hidden)?;
        Ok((step, logits))
    }

    fn pass(&mut self, ids: &[u32], shape: Shape<'_>) -> Result<Step<E>, DecodeError> {
        Ok(self.cache.step(self.engine, self.target, ids, shape)?)
    }

    /// Drafts behind `anchor`, which follows what the caches hold.
    fn draft(&mut self, anchor: u32, draft: Draft) -> Result<Vec<TreeNode>, DecodeError> {
        let engine = self.engine;
        let config = self.drafter.config();
        let depths = config.block_size - 1;
        let width = match draft {
            Draft::Chain => 1,
            Draft::Tree(budget) => budget.min(config.vocab_size),
        };
        let tables = self.target.head()?.tables();
        let hidden = self
            .context
            .draft(engine, self.drafter, tables, &[(0, anchor)])?;
        let slots = hidden.row_range(1, 1 + depths);
        let mut ids = engine.upload_index(&vec![0; depths * width])?;
        let mut log_probs = engine.float(depths, width)?;
        engine.top_k(
            slots,
            tables.lm_head,
            width,
            ids.window_mut(0, depths, width),
            log_probs.view_mut(),
        )?;
        let ids = engine.download_index(ids.view())?;
        let log_probs = engine.download_float(log_probs.view())?;
        Ok(match draft {
            Draft::Chain => ids
                .iter()
                .zip(0..)
                .map(|(&token, parent)| TreeNode {
                    token,
                    parent,
                    depth: parent + 1,
                })
                .collect(),
            Draft::Tree(budget) => {
                let ranks = SlotRanks {
                    ids: &ids,
                    log_probs: &log_probs,
                    width,
                };
                build_tree(ranks, budget)
            }
        })
    }

    /// Runs anchor and draft through the target and walks down the draft: how many drafted tokens stand, and the
    /// tokens chosen, which are these and one more. The caches hold the anchor and the accepted tokens then.
    fn verify(
        &mut self,
        anchor: u32,
        nodes: &[TreeNode],
        choice: &mut Choice<'_>,
    ) -> Result<(usize, Vec<u32>), DecodeError> {
        let ids: Vec<u32> = std::iter::once(anchor)
            .chain(nodes.iter().map(|node| node.token))
            .collect();
        let parents: Vec<Option<usize>> = std::iter::once(None)
            .chain(nodes.iter().map(|node| Some(node.parent as usize)))
            .collect();
        let step = self.pass(&ids, Shape::Tree(&parents))?;
        let logits = self.cache.logits(self.engine, self.target, &step)?;
        let vocabulary = self.target.config().vocab_size;
        let mut path = vec![0];
        let mut chosen = Vec::new();
        let mut at = 0;
        loop {
            let token = choice.pick(&logits[row(at, vocabulary)]);
            chosen.push(token);
            let next = nodes
                .iter()
                .position(|node| node.parent as usize == at && node.token == token);
            match next {
                Some(node) => at = node + 1,
                None => break,
            }
            path.push(at);
        }
        self.cache.keep(self.engine, &path)?;
        let rows: Vec<u32> = path.iter().map(|&row| row as u32).collect();
        let rows = self.engine.upload_index(&rows)?;
        let mut states = self.engine.half(path.len(), step.states().cols)?;
        self.engine
            .gather(step.states(), rows.view(), states.view_mut())?;
        self.context
            .extend(self.engine, self.drafter, 0, states.view())?;
        Ok((path.len() - 1, chosen))
    }
}

fn row(number: usize, width: usize) -> Range<usize> {
    number * width..(number + 1) * width
}

/// The largest logit's token; the lowest id wins a tie.
fn most_likely(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

/// By how much `token` lies above the best of the others.
fn margin(logits: &[f32], token: u32) -> f32 {
    let others = logits
        .iter()
        .enumerate()
        .filter(|&(id, _)| id != token as usize)
        .map(|(_, &logit)| logit);
    logits[token as usize] - others.fold(f32::NEG_INFINITY, f32::max)
}

/// Draws from the softmax of `logits / temperature`, by inverting its cumulative sum.
fn sample(logits: &[f32], temperature: f32, rng: &mut ChaCha8Rng) -> u32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| f64::from((logit - max) / temperature).exp();
    let total: f64 = logits.iter().map(|&logit| weight(logit)).sum();
    // 53 random bits: uniform in [0, 1).
    let mut left = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * total;
    for (id, &logit) in logits.iter().enumerate() {
        left -= weight(logit);
        if left < 0.0 {
            return id as u32;
        }
    }
    most_likely(logits)
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn the_lowest_id_wins_a_tie() {
        assert_eq!(most_likely(&[0.0, 3.0, 3.0, 1.0]), 1);
        assert_eq!(margin(&[0.0, 3.0, 3.0, 1.0], 1), 0.0);
        assert_eq!(margin(&[0.0, 3.0, 2.5], 1), 0.5);
    }

    #[test]
    fn samples_follow_the_softmax() {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let logits = [0.0, 1.0, -1.0, 2.0];
        let temperature = 0.7;
        let weights: Vec<f64> = logits
            .iter()
            .map(|&l: &f32| f64::from(l / temperature).exp())
            .collect();
        let total: f64 = weights.iter().sum();
        let draws = 40_000;
        let mut counts = [0u32; 4];
        for _ in 0..draws {
            counts[sample(&logits, temperature, &mut rng) as usize] += 1;
        }
        for (count, weight) in counts.iter().zip(&weights) {
            let p = weight / total;
            let deviation = (f64::from(draws) * p * (1.0 - p)).sqrt();
            assert!(
                (f64::from(*count) - f64::from(draws) * p).abs() < 5.0 * deviation,
                "{counts:?}"
            );
        }
    }

    #[test]
    fn an_answer_ends_with_an_end_token_or_at_its_length() {
        let limits = Limits {
            new_tokens: 3,
            end: &[9],
        };
        assert!(!limits.reached(&[1, 2]));
        assert!(limits.reached(&[1, 9]));
        assert!(limits.reached(&[1, 2, 3]));
    }
}
