//! Where the blocks of a document begin.
//!
//! Anchors are drawn uniformly without replacement among the eligible positions, anew each time a document is
//! seen, from a counter-based generator keyed by (seed, epoch, document): who trains the document, when, and in
//! what company does not matter.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// What a document's anchors depend on, beside its mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnchorKey {
    /// The run's seed.
    pub seed: u64,
    /// How often the data was seen before.
    pub epoch: u64,
    /// Row number of the document in the data.
    pub document: u64,
}

/// Positions `p` where the token at `p` and the one behind it are both supervised: an anchor needs a label.
pub fn eligible(mask: &[u8]) -> impl Iterator<Item = u32> + '_ {
    mask.windows(2)
        .enumerate()
        .filter(|(_, pair)| pair[0] != 0 && pair[1] != 0)
        .map(|(p, _)| p as u32)
}

/// How many anchors a document gives: min(`most`, eligible positions).
pub fn anchor_count(mask: &[u8], most: usize) -> usize {
    eligible(mask).count().min(most)
}

/// Draws at most `most` anchors of a document, ascending.
pub fn draw_anchors(key: AnchorKey, mask: &[u8], most: usize) -> Vec<u32> {
    let mut positions: Vec<u32> = eligible(mask).collect();
    if positions.len() <= most {
        return positions;
    }
    let mut hasher = blake3::Hasher::new_derive_key("slipstream anchors 1");
    for word in [key.seed, key.epoch, key.document] {
        hasher.update(&word.to_le_bytes());
    }
    let mut rng = ChaCha8Rng::from_seed(*hasher.finalize().as_bytes());
    // The first `most` places of a Fisher-Yates shuffle.
    for i in 0..most {
        let rest = (positions.len() - i) as u32;
        positions.swap(i, i + below(&mut rng, rest) as usize);
    }
    positions.truncate(most);
    positions.sort_unstable();
    positions
}

/// Uniform in `0..bound` without bias: 32-bit draws above the largest multiple of `bound` are drawn again.
fn below(rng: &mut ChaCha8Rng, bound: u32) -> u32 {
    let limit = u32::MAX - (u32::MAX % bound + 1) % bound;
    loop {
        let draw = rng.next_u32();
        if draw <= limit {
            return draw % bound;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(document: u64) -> AnchorKey {
        AnchorKey {
            seed: 1,
            epoch: 0,
            document,
        }
    }

    #[test]
    fn an_anchor_needs_a_label_behind_it() {
        let mask = [0, 1, 1, 0, 1, 0, 1, 1, 1];
        assert_eq!(eligible(&mask).collect::<Vec<_>>(), [1, 6, 7]);
        assert_eq!(anchor_count(&mask, 2), 2);
        assert_eq!(anchor_count(&mask, 8), 3);
        assert_eq!(draw_anchors(key(0), &mask, 8), [1, 6, 7]);
        assert!(draw_anchors(key(0), &[1], 8).is_empty());
        assert!(draw_anchors(key(0), &[], 8).is_empty());
        assert!(draw_anchors(key(0), &mask, 0).is_empty());
    }

    #[test]
    fn draws_are_sorted_distinct_and_depend_on_the_key_alone() {
        let mask = [1; 301];
        let first = draw_anchors(key(5), &mask, 40);
        assert_eq!(first.len(), 40);
        assert!(first.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(first.iter().all(|&p| p < 300));
        assert_eq!(first, draw_anchors(key(5), &mask, 40));
        let others = [
            AnchorKey { seed: 2, ..key(5) },
            AnchorKey { epoch: 1, ..key(5) },
            key(6),
        ];
        for other in others {
            assert_ne!(first, draw_anchors(other, &mask, 40), "{other:?}");
        }
    }

    #[test]
    fn every_position_and_every_pair_is_equally_likely() {
        // 12 positions, 5 of them drawn, 24,000 documents.
        let mask = [1; 13];
        let draws = 24_000_u32;
        let mut single = [0_u32; 12];
        let mut pairs = [[0_u32; 12]; 12];
        for document in 0..draws {
            let anchors = draw_anchors(key(u64::from(document)), &mask, 5);
            for (i, &a) in anchors.iter().enumerate() {
                single[a as usize] += 1;
                for &b in &anchors[i + 1..] {
                    pairs[a as usize][b as usize] += 1;
                }
            }
        }
        // Six standard deviations of the binomial counts.
        let near = |count: u32, p: f64| {
            let mean = f64::from(draws) * p;
            (f64::from(count) - mean).abs() < 6.0 * (mean * (1.0 - p)).sqrt()
        };
        assert!(single.iter().all(|&n| near(n, 5.0 / 12.0)), "{single:?}");
        for (a, row) in pairs.iter().enumerate() {
            for &n in &row[a + 1..] {
                assert!(near(n, 5.0 * 4.0 / (12.0 * 11.0)), "{pairs:?}");
            }
        }
    }

    #[test]
    fn bounded_draws_have_no_bias() {
        let mut rng = ChaCha8Rng::from_seed([7; 32]);
        let bound = 3_000_000_000;
        let low = (0..4_000)
            .filter(|_| below(&mut rng, bound) < bound / 2)
            .count();
        // Without rejection about 65 % would fall into the lower half.
        assert!((1_800..2_200).contains(&low), "{low}");
        assert_eq!(below(&mut rng, 1), 0);
    }
}
