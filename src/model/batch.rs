//! The target at generation: key-value caches of many sequences, extended together in one pass.
//!
//! A pass takes a few new tokens of each of some sequences: one token of those that are being continued, a whole
//! prompt of those that begin. What it computes for a sequence does not depend on its company.

use super::error::ModelError;
use super::target::{CacheRows, Cached, Captured, Places, Target};
use crate::engine::{CacheMask, Engine, Half};

/// New tokens of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens<'a> {
    /// Its place in the caches.
    pub sequence: usize,
    /// What follows its cached tokens; at least one.
    pub ids: &'a [u32],
}

/// Sequences that are continued by a [`Target`] that was loaded with its head and captures nothing.
pub struct BatchDecoder<E: Engine> {
    /// Of each layer: `[sequences * capacity, kv]`.
    keys: Vec<Half<E>>,
    values: Vec<Half<E>>,
    capacity: usize,
    lengths: Vec<usize>,
}

impl<E: Engine> BatchDecoder<E> {
    /// Room for `sequences` of up to `capacity` tokens each.
    ///
    /// # Errors
    /// A target that was loaded without its head or captures layers, or the engine's.
    pub fn new(
        engine: &E,
        target: &Target<E>,
        sequences: usize,
        capacity: usize,
    ) -> Result<Self, ModelError> {
        target.head()?;
        if !target.needs().lm_head || !target.needs().capture.is_empty() {
            return Err(ModelError::Request(
                "was not loaded for generation alone".to_string(),
            ));
        }
        let cache = || {
            (0..target.layers())
                .map(|_| engine.half(sequences * capacity, target.config().key_size()))
                .collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            keys: cache()?,
            values: cache()?,
            capacity,
            lengths: vec![0; sequences],
        })
    }

    /// Bytes of the caches of `sequences` of `capacity` tokens.
    pub fn bytes(target: &Target<E>, sequences: usize, capacity: usize) -> u64 {
        let row = 2 * target.layers() * target.config().key_size() * E::HALF_BYTES;
        (sequences * capacity) as u64 * row as u64
    }

    /// Cached tokens of a sequence.
    pub fn length(&self, sequence: usize) -> usize {
        self.lengths[sequence]
    }

    /// Forgets a sequence, so that another can take its place.
    pub fn clear(&mut self, sequence: usize) {
        self.lengths[sequence] = 0;
    }

    /// Runs new tokens, which stay in the caches: `[parts, H]` the hidden state after the final norm of each part's
    /// last token, from which its next one is chosen.
    ///
    /// # Errors
    /// A sequence that is named twice or brings no token, more tokens than the capacity holds, ids outside the
    /// vocabulary, or the engine's.
    pub fn step(
        &mut self,
        engine: &E,
        target: &mut Target<E>,
        parts: &[NewTokens<'_>],
    ) -> Result<Half<E>, ModelError> {
        let mut ids = Vec::new();
        let mut offsets = vec![0u32];
        let mut cached = Vec::with_capacity(parts.len());
        let mut starts = Vec::with_capacity(parts.len());
        let mut places = Places {
            positions: Vec::new(),
            reach: Vec::new(),
        };
        let mut rows = Vec::new();
        let mut seen = vec![false; self.lengths.len()];
        for &NewTokens { sequence, ids: new } in parts {
            let length = self.lengths[sequence];
            if new.is_empty() || std::mem::replace(&mut seen[sequence], true) {
                return Err(ModelError::Request(format!(
                    "sequence {sequence} brings no token, or twice some"
                )));
            }
            if length + new.len() > self.capacity {
                return Err(ModelError::Request(format!(
                    "{length} cached and {} new tokens exceed the cache of {}",
                    new.len(),
                    self.capacity
                )));
            }
            ids.extend_from_slice(new);
            offsets.push(ids.len() as u32);
            starts.push((sequence * self.capacity) as u32);
            cached.push(length as u32);
            let range = length as u32..(length + new.len()) as u32;
            places.positions.extend(range.clone());
            // As in [`super::TargetDecoder`]: a prompt is as long as it is given, what follows turns as it comes.
            places.reach.extend(range.clone().map(|p| match length {
                0 => new.len() as u32,
                _ => p + 1,
            }));
            rows.extend(range.map(|p| (sequence * self.capacity) as u32 + p));
        }
        let longest = parts.iter().map(|part| part.ids.len()).max().unwrap_or(0);
        let words = longest.div_ceil(64).max(1);
        let ancestors = chains(parts.iter().map(|part| part.ids.len()), words);
        let mut states = engine.half(ids.len(), 0)?;
        let mut hidden = engine.half(ids.len(), target.config().hidden_size)?;
        let rows = engine.upload_index(&rows)?;
        let attend = Cached {
            keys: &mut self.keys,
            values: &mut self.values,
            rows: CacheRows::Scattered(rows.view()),
            mask: CacheMask {
                rows: &offsets,
                cache_start: &starts,
                cached: &cached,
                ancestors: &ancestors,
                words,
                window: None,
                positions: &places.positions,
            },
        };
        let out = Captured {
            states: states.view_mut(),
            final_hidden: Some(hidden.view_mut()),
        };
        target.forward(engine, &ids, &places, attend, out)?;
        for part in parts {
            self.lengths[part.sequence] += part.ids.len();
        }
        let last: Vec<u32> = offsets[1..].iter().map(|end| end - 1).collect();
        let last = engine.upload_index(&last)?;
        let mut out = engine.half(parts.len(), hidden.cols())?;
        engine.gather(hidden.view(), last.view(), out.view_mut())?;
        Ok(out)
    }
}

/// Ancestor bits of chains of these lengths: each row sees its own chain up to itself.
fn chains(lengths: impl Iterator<Item = usize>, words: usize) -> Vec<u64> {
    let mut bits = Vec::new();
    for length in lengths {
        for row in 0..length {
            let word = |w: usize| match (row + 1).saturating_sub(64 * w) {
                0 => 0,
                n @ 1..64 => (1u64 << n) - 1,
                _ => u64::MAX,
            };
            bits.extend((0..words).map(word));
        }
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::Cpu;
    use crate::model::testing::Made;

    /// The final hidden states of a whole prefill.
    fn prefill(engine: &Cpu, target: &mut Target<Cpu>, ids: &[u32]) -> Vec<f32> {
        let mut states = engine.half(ids.len(), 0).unwrap();
        let mut hidden = engine.half(ids.len(), 24).unwrap();
        let out = Captured {
            states: states.view_mut(),
            final_hidden: Some(hidden.view_mut()),
        };
        let offsets = [0, ids.len() as u32];
        target.prefill(engine, ids, &offsets, out).unwrap();
        engine.download_half(hidden.view()).unwrap()
    }

    #[test]
    fn sequences_in_company_have_the_bits_of_prefill() {
        let engine = Cpu::new(1).unwrap();
        for qwen3 in [false, true] {
            let mut target = Made::target(&engine, qwen3, &[]);
            let long: Vec<u32> = (0..90).map(|i| (i * i + 3) % 40).collect();
            let short: Vec<u32> = (0..12).map(|i| (i * 5 + 1) % 40).collect();
            let of_long = prefill(&engine, &mut target, &long);
            let of_short = prefill(&engine, &mut target, &short);
            let row = |states: &[f32], at: usize| states[at * 24..][..24].to_vec();
            let mut decoder = BatchDecoder::new(&engine, &target, 3, 100).unwrap();
            let mut step = |decoder: &mut BatchDecoder<Cpu>, parts: &[(usize, &[u32])]| {
                let parts: Vec<NewTokens<'_>> = parts
                    .iter()
                    .map(|&(sequence, ids)| NewTokens { sequence, ids })
                    .collect();
                let out = decoder.step(&engine, &mut target, &parts).unwrap();
                engine.download_half(out.view()).unwrap()
            };
            // A prompt of more than 64 tokens; then one token of it beside another prompt, in another order.
            let out = step(&mut decoder, &[(2, &long[..70])]);
            assert_eq!(out, row(&of_long, 69));
            let out = step(&mut decoder, &[(0, &short[..10]), (2, &long[70..71])]);
            assert_eq!(row(&out, 0), row(&of_short, 9));
            assert_eq!(row(&out, 1), row(&of_long, 70));
            let out = step(&mut decoder, &[(2, &long[71..80]), (0, &short[10..11])]);
            assert_eq!(row(&out, 0), row(&of_long, 79));
            assert_eq!(row(&out, 1), row(&of_short, 10));
            // A place that is taken over by another sequence.
            decoder.clear(2);
            let out = step(&mut decoder, &[(2, &short[..11]), (0, &short[11..])]);
            assert_eq!(row(&out, 0), row(&of_short, 10));
            assert_eq!(row(&out, 1), row(&of_short, 11));
            assert_eq!((decoder.length(0), decoder.length(2)), (12, 11));
        }
    }

    #[test]
    fn wrong_steps_are_refused() {
        let engine = Cpu::new(1).unwrap();
        let mut target = Made::target(&engine, false, &[]);
        let mut decoder = BatchDecoder::new(&engine, &target, 2, 4).unwrap();
        for (parts, says) in [
            (vec![(0, &[1u32, 2, 3, 4, 5][..])], "5 new tokens exceed"),
            (vec![(0, &[][..])], "brings no token"),
            (vec![(1, &[1][..]), (1, &[2][..])], "twice"),
            (vec![(1, &[40][..])], "token 40 is outside"),
        ] {
            let parts: Vec<NewTokens<'_>> = parts
                .iter()
                .map(|&(sequence, ids)| NewTokens { sequence, ids })
                .collect();
            let error = decoder.step(&engine, &mut target, &parts).err().unwrap();
            assert!(error.to_string().contains(says), "{error}");
        }
        assert_eq!((decoder.length(0), decoder.length(1)), (0, 0));
    }
}
