//! What a tokenised set looks like: lengths, and rows that are there twice.

use rayon::prelude::*;
use serde::Serialize;

use super::{Document, TokenSet};

/// How some count is spread over documents.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Spread {
    /// Sum over all documents.
    pub sum: u64,
    /// Smallest.
    pub min: u32,
    /// The middle one; of an even number the lower of the two.
    pub median: u32,
    /// Mean.
    pub mean: f64,
    /// 95 of 100 documents have no more than this.
    pub p95: u32,
    /// 99 of 100 documents have no more than this.
    pub p99: u32,
    /// Largest.
    pub max: u32,
}

impl Spread {
    /// Of any number of counts; all zeros for none.
    pub fn of(mut counts: Vec<u32>) -> Spread {
        counts.sort_unstable();
        let sum: u64 = counts.iter().map(|&n| u64::from(n)).sum();
        let at = |hundredths: usize| {
            let place = (counts.len() * hundredths).div_ceil(100);
            counts.get(place.saturating_sub(1)).copied().unwrap_or(0)
        };
        Spread {
            sum,
            min: at(0),
            median: at(50),
            mean: sum as f64 / counts.len().max(1) as f64,
            p95: at(95),
            p99: at(99),
            max: at(100),
        }
    }
}

/// Documents whose length lies in `from..=to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bin {
    /// Fewest tokens.
    pub from: u32,
    /// Most tokens.
    pub to: u32,
    /// How many documents.
    pub documents: u64,
}

/// Tokens of all documents and the supervised ones among them, and the lengths in bins that double in width.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Lengths {
    /// Tokens of a document.
    pub tokens: Spread,
    /// Supervised tokens of a document.
    pub supervised: Spread,
    /// From the shortest document's bin to the longest's, without gaps.
    pub histogram: Vec<Bin>,
}

/// Measures a set's documents without reading their tokens.
pub fn lengths(set: &TokenSet) -> Lengths {
    let infos = || (0..set.len()).map(|i| set.info(i));
    let tokens: Vec<u32> = infos().map(|info| info.tokens).collect();
    Lengths {
        histogram: histogram(&tokens),
        tokens: Spread::of(tokens),
        supervised: Spread::of(infos().map(|info| info.supervised).collect()),
    }
}

fn histogram(tokens: &[u32]) -> Vec<Bin> {
    let bin = |n: u32| n.max(1).ilog2();
    let Some((&min, &max)) = tokens.iter().min().zip(tokens.iter().max()) else {
        return Vec::new();
    };
    let mut bins: Vec<Bin> = (bin(min)..=bin(max))
        .map(|b| Bin {
            from: 1 << b,
            to: u32::MAX >> (31 - b),
            documents: 0,
        })
        .collect();
    for &n in tokens {
        bins[(bin(n) - bin(min)) as usize].documents += 1;
    }
    bins
}

/// Documents that repeat an earlier one, token by token and with the same mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Duplicates {
    /// How many.
    pub documents: u64,
    /// The first of them in data order, each with the document it repeats.
    pub examples: Vec<(usize, usize)>,
}

/// Finds documents that repeat an earlier one; keeps `most` examples. Takes 12 bytes of memory a document.
pub fn duplicates(set: &TokenSet, most: usize) -> Duplicates {
    let mut marks: Vec<(u64, u32)> = (0..set.len() as u32)
        .into_par_iter()
        .map(|i| (mark(set.document(i as usize)), i))
        .collect();
    marks.par_sort_unstable();
    let same = |a: u32, b: u32| {
        let (a, b) = (set.document(a as usize), set.document(b as usize));
        a.ids == b.ids && a.mask == b.mask
    };
    let mut found = Vec::new();
    for group in marks.chunk_by(|a, b| a.0 == b.0) {
        let first = group[0].1;
        let repeats = group[1..].iter().filter(|(_, i)| same(first, *i));
        found.extend(repeats.map(|&(_, i)| (i as usize, first as usize)));
    }
    found.sort_unstable();
    Duplicates {
        documents: found.len() as u64,
        examples: found.into_iter().take(most).collect(),
    }
}

/// Equal for equal documents, and hardly ever else.
fn mark(document: Document<'_>) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(bytemuck::cast_slice(document.ids));
    hasher.update(document.mask);
    let mut word = [0; 8];
    hasher.finalize_xof().fill(&mut word);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_read_from_the_sorted_counts() {
        let spread = Spread::of((1..=200).rev().collect());
        assert_eq!((spread.min, spread.median, spread.max), (1, 100, 200));
        assert_eq!((spread.p95, spread.p99), (190, 198));
        assert_eq!((spread.sum, spread.mean), (20_100, 100.5));
        let one = Spread::of(vec![7]);
        assert_eq!((one.min, one.median, one.p99, one.max), (7, 7, 7, 7));
        let none = Spread::of(Vec::new());
        assert_eq!((none.sum, none.max, none.mean), (0, 0, 0.0));
    }

    #[test]
    fn bins_double_and_leave_no_gap() {
        let bins = histogram(&[5, 7, 4, 33, 63, 32]);
        let found: Vec<_> = bins.iter().map(|b| (b.from, b.to, b.documents)).collect();
        assert_eq!(found, [(4, 7, 3), (8, 15, 0), (16, 31, 0), (32, 63, 3)]);
        assert!(histogram(&[]).is_empty());
        assert_eq!(histogram(&[u32::MAX])[0].to, u32::MAX);
    }
}
