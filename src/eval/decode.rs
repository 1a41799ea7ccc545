//! Decoding with the target alone, and with a drafter that it verifies.
//!
//! A round of speculative decoding drafts tokens behind the anchor (a chain, DFlash arXiv 2602.06036, or a draft
//! tree, DDTree arXiv 2604.12989), runs anchor and draft through the target in one pass, and walks down the draft
//! for as long as its tokens are those that the target chooses itself. Whatever is emitted is the target's own
//! choice, so greedy output equals plain greedy decoding and sampled output has the target's distribution.

use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::tree::{SlotRanks, TreeNode, build_tree};
use crate::engine::{Draws, Engine, EngineError, HalfView, gumbel};
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

/// How the target chooses its tokens.
pub enum Choice<'r> {
    /// The most likely one; the lowest id wins a tie.
    Greedy,
    /// Drawn at this temperature. A token of an answer is decided by the logits before it and by the key of its
    /// place, so speculative and plain decoding with the same keys give the same answer.
    Sampled {
        /// Above 0.
        temperature: f32,
        /// Where the randomness comes from.
        keys: &'r mut DrawKeys,
    },
}

/// The keys of an answer's draws, by place.
#[derive(Clone, Debug)]
pub struct DrawKeys {
    rng: ChaCha8Rng,
    keys: Vec<u64>,
}

impl DrawKeys {
    /// Of answer `answer` under `seed`.
    pub fn new(seed: u64, answer: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(answer);
        Self {
            rng,
            keys: Vec::new(),
        }
    }

    /// The key of token `place` of the answer.
    pub fn at(&mut self, place: usize) -> u64 {
        while self.keys.len() <= place {
            self.keys.push(self.rng.next_u64());
        }
        self.keys[place]
    }
}

/// What is drafted in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draft {
    /// The most likely token of each slot of the block, one behind the other: at most so many slots.
    Chain(usize),
    /// The best tree of this many nodes.
    Tree(usize),
}

impl Draft {
    /// All slots.
    pub const CHAIN: Self = Self::Chain(usize::MAX);

    /// Nodes of the tree; none for a chain.
    pub fn nodes(self) -> Option<usize> {
        match self {
            Self::Chain(_) => None,
            Self::Tree(nodes) => Some(nodes),
        }
    }
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
    pub fn reached(&self, answer: &[u32]) -> bool {
        answer.len() >= self.new_tokens
            || answer.last().is_some_and(|token| self.end.contains(token))
    }
}

/// A plain answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plain {
    /// Its tokens.
    pub tokens: Vec<u32>,
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

/// How a speculative answer compares with the plain one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// Token for token the same.
    Equal,
    /// They part where the two tokens tie for the target within the resolution.
    Tie {
        /// At which token.
        at: usize,
    },
    /// They part although the target was sure.
    Differs {
        /// At which token.
        at: usize,
    },
}

/// Spacing of the compute type's numbers around 1 beyond which two logits are told apart: products are summed in
/// another order for one row than for many, so float32 logits are trusted to about 15 bits and bfloat16 ones to 6.
pub fn resolution(half_bytes: usize) -> f32 {
    match half_bytes {
        4 => 2.0f32.powi(-15),
        _ => 2.0f32.powi(-6),
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
        let step = self.prefill(prompt)?;
        let last = step.hidden().row_range(prompt.len() - 1, prompt.len());
        let mut token = self.choose(last, &[0], choice)?[0];
        let mut answer = Plain::default();
        let began = Instant::now();
        loop {
            answer.tokens.push(token);
            if limits.reached(&answer.tokens) {
                break;
            }
            let step = self.pass(&[token], Shape::Chain)?;
            token = self.choose(step.hidden(), &[answer.tokens.len()], choice)?[0];
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
        let step = self.prefill(prompt)?;
        self.context
            .extend(self.engine, self.drafter, 0, step.states())?;
        let last = step.hidden().row_range(prompt.len() - 1, prompt.len());
        let mut anchor = self.choose(last, &[0], choice)?[0];
        let mut answer = Speculative {
            tokens: vec![anchor],
            ..Speculative::default()
        };
        while !limits.reached(&answer.tokens) {
            let began = Instant::now();
            let nodes = self.draft(anchor, draft)?;
            answer.draft_time += began.elapsed();

            let began = Instant::now();
            let place = answer.tokens.len();
            let (path, chosen) = self.verify(anchor, &nodes, place, choice)?;
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

    /// Whether an answer is the plain one; where they part, whether the target was undecided between the two tokens.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn compare(
        &mut self,
        prompt: &[u32],
        plain: &[u32],
        answer: &[u32],
        choice: &mut Choice<'_>,
    ) -> Result<Agreement, DecodeError> {
        let longest = plain.len().max(answer.len());
        let Some(at) = (0..longest).find(|&at| plain.get(at) != answer.get(at)) else {
            return Ok(Agreement::Equal);
        };
        let (Some(&one), Some(&other)) = (plain.get(at), answer.get(at)) else {
            return Ok(Agreement::Differs { at });
        };
        self.cache.clear();
        let known = [prompt, &plain[..at]].concat();
        let step = self.prefill(&known)?;
        let logits = self.cache.logits(self.engine, self.target, &step)?;
        let logits = &logits[logits.len() - self.target.config().vocab_size..];
        let (scale, key) = match choice {
            Choice::Greedy => (1.0, None),
            Choice::Sampled { temperature, keys } => (1.0 / *temperature, Some(keys.at(at))),
        };
        let score =
            |(id, logit): (u32, f32)| logit * scale + key.map_or(0.0, |key| gumbel(key, id));
        let of = |id: u32| score((id, logits[id as usize]));
        let best = (0..).zip(logits.iter().copied()).map(score);
        let best = best.fold(f32::NEG_INFINITY, f32::max);
        let size = logits[one as usize].abs().max(logits[other as usize].abs());
        let allowed = resolution(E::HALF_BYTES) * size.max(1.0) * scale;
        Ok(if best - of(one).min(of(other)) <= allowed {
            Agreement::Tie { at }
        } else {
            Agreement::Differs { at }
        })
    }

    /// Runs the prompt behind an empty cache.
    fn prefill(&mut self, prompt: &[u32]) -> Result<Step<E>, DecodeError> {
        if prompt.is_empty() {
            return Err(DecodeError::EmptyPrompt);
        }
        let step = self.pass(prompt, Shape::Chain)?;
        self.cache
            .keep(self.engine, &(0..prompt.len()).collect::<Vec<_>>())?;
        Ok(step)
    }

    /// The target's tokens behind some rows, which stand at `places` of the answer.
    fn choose(
        &self,
        hidden: HalfView<'_, E>,
        places: &[usize],
        choice: &mut Choice<'_>,
    ) -> Result<Vec<u32>, DecodeError> {
        let mut ids = self.engine.upload_index(&vec![0; places.len()])?;
        let keys: Vec<u64>;
        let draws = match choice {
            Choice::Greedy => None,
            Choice::Sampled {
                temperature,
                keys: all,
            } => {
                keys = places.iter().map(|&place| all.at(place)).collect();
                Some(Draws {
                    temperature: *temperature,
                    cap: self.target.config().final_cap.map(|cap| cap as f32),
                    keys: &keys,
                })
            }
        };
        let head = self.target.head()?.lm_head();
        self.engine.choose(hidden, head, draws, ids.view_mut())?;
        Ok(self.engine.download_index(ids.view())?)
    }

    fn pass(&mut self, ids: &[u32], shape: Shape<'_>) -> Result<Step<E>, DecodeError> {
        Ok(self.cache.step(self.engine, self.target, ids, shape)?)
    }

    /// Drafts behind `anchor`, which follows what the caches hold.
    fn draft(&mut self, anchor: u32, draft: Draft) -> Result<Vec<TreeNode>, DecodeError> {
        let engine = self.engine;
        let config = self.drafter.config();
        let all = config.block_size - 1;
        let (depths, width) = match draft {
            Draft::Chain(slots) => (all.min(slots), 1),
            Draft::Tree(budget) => (all, budget.min(config.vocab_size)),
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
            Draft::Chain(_) => ids
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
    /// tokens chosen, which are these and one more, the first at `place` of the answer. The caches hold the anchor
    /// and the accepted tokens then.
    fn verify(
        &mut self,
        anchor: u32,
        nodes: &[TreeNode],
        place: usize,
        choice: &mut Choice<'_>,
    ) -> Result<(usize, Vec<u32>), DecodeError> {
        let ids: Vec<u32> = std::iter::once(anchor)
            .chain(nodes.iter().map(|node| node.token))
            .collect();
        let parents: Vec<Option<usize>> = std::iter::once(None)
            .chain(nodes.iter().map(|node| Some(node.parent as usize)))
            .collect();
        let step = self.pass(&ids, Shape::Tree(&parents))?;
        let depths = nodes.iter().map(|node| node.depth as usize);
        let places: Vec<usize> = std::iter::once(0)
            .chain(depths)
            .map(|depth| place + depth)
            .collect();
        let choices = self.choose(step.hidden(), &places, choice)?;
        let mut path = vec![0];
        let mut chosen = Vec::new();
        let mut at = 0;
        loop {
            let token = choices[at];
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_depend_on_seed_answer_and_place_alone() {
        let mut keys = DrawKeys::new(3, 5);
        let later = keys.at(4);
        assert_eq!(DrawKeys::new(3, 5).at(4), later);
        assert_ne!(keys.at(0), keys.at(1));
        assert_eq!(keys.at(4), later);
        for (seed, answer) in [(3, 6), (4, 5)] {
            assert_ne!(DrawKeys::new(seed, answer).at(4), later);
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
