//! How often a file's documents appear in an epoch.

use super::TokenSet;

/// The documents of an epoch in the order to pack them: each as often as its file's weight says. Of a weight of
/// 2.25 the whole part is two passes over the file, and a quarter of its documents, the same ones for the same
/// seed, appear once more. Passes follow each other, so that a document does not meet its own copy in a unit.
///
/// A copy has its document's row and so, in the same epoch, its anchors.
pub(super) fn weighted(
    set: &TokenSet,
    documents: Vec<u32>,
    weights: &[f64],
    seed: u64,
) -> Vec<u32> {
    if weights.is_empty() {
        return documents;
    }
    let copies = |document: u32| {
        let info = set.info(document as usize);
        let weight = weights.get(info.file as usize).copied().unwrap_or(1.0);
        count(weight, seed, info.row)
    };
    let most = documents.iter().map(|&d| copies(d)).max().unwrap_or(0);
    (0..most)
        .flat_map(|pass| documents.iter().copied().filter(move |&d| copies(d) > pass))
        .collect()
}

/// The whole part of `weight`, and one more with the probability of the rest: a draw that depends on seed and row.
fn count(weight: f64, seed: u64, row: u64) -> u32 {
    let mut hasher = blake3::Hasher::new_derive_key("slipstream data weights 1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(&row.to_le_bytes());
    let mut word = [0; 8];
    hasher.finalize_xof().fill(&mut word);
    // 53 bits: all that a float from 0 to 1 can hold.
    let draw = (u64::from_le_bytes(word) >> 11) as f64 / (1u64 << 53) as f64;
    weight.trunc() as u32 + u32::from(draw < weight.fract())
}

#[cfg(test)]
mod tests {
    use super::count;

    #[test]
    fn a_weight_is_whole_passes_and_a_share() {
        for row in 0..50 {
            assert_eq!(count(1.0, 3, row), 1);
            assert_eq!(count(4.0, 3, row), 4);
            assert_eq!(count(0.0, 3, row), 0);
            let some = count(2.25, 3, row);
            assert!(some == 2 || some == 3);
            assert_eq!(some, count(2.25, 3, row));
        }
        let sum = |seed| -> u32 { (0..10_000).map(|row| count(2.25, seed, row)).sum() };
        // 22,500 expected, standard deviation 43.
        assert!((22_300..22_700).contains(&sum(0)), "{}", sum(0));
        let chosen = |seed| {
            (0..200)
                .map(|row| count(0.5, seed, row))
                .collect::<Vec<_>>()
        };
        assert_ne!(chosen(1), chosen(2));
    }
}
