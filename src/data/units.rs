//! Work units: documents packed once, and the order they are trained in.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Serialize;

use super::{DataError, DocumentInfo, TokenSet};

/// When a unit is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PackLimits {
    /// Tokens of a unit (`--slot-tokens`).
    pub slot_tokens: u32,
    /// Anchors of a unit (`--unit-anchors`).
    pub unit_anchors: u32,
    /// Anchors of a document, A (`--anchors`).
    pub anchors: u32,
}

/// One packed unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit<'a> {
    /// Its documents' numbers in the set, ascending.
    pub documents: &'a [u32],
    /// Their tokens.
    pub tokens: u32,
    /// Their anchors: Σ min(A, eligible positions).
    pub anchors: u32,
}

/// All units of a run, numbered from 0 in data order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Units {
    documents: Vec<u32>,
    units: Vec<Packed>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Packed {
    documents: Range<u32>,
    tokens: u32,
    anchors: u32,
}

/// Packs `documents` of a set in the order given: a unit is closed when the next document would take
/// it past either limit.
///
/// # Errors
/// Limits of zero or that contradict each other; a document longer than a slot.
pub fn pack(set: &TokenSet, documents: &[u32], limits: PackLimits) -> Result<Units, DataError> {
    pack_sizes(documents, |d| set.info(d as usize), limits)
}

fn pack_sizes(
    documents: &[u32],
    info: impl Fn(u32) -> DocumentInfo,
    limits: PackLimits,
) -> Result<Units, DataError> {
    limits.check()?;
    let mut units = Units {
        documents: documents.to_vec(),
        units: Vec::new(),
    };
    for (place, &document) in documents.iter().enumerate() {
        let info = info(document);
        if info.tokens > limits.slot_tokens {
            return Err(DataError::DocumentTooLong {
                row: info.row,
                tokens: info.tokens,
                slot_tokens: limits.slot_tokens,
            });
        }
        let anchors = info.eligible.min(limits.anchors);
        units.push(place as u32, info.tokens, anchors, limits);
    }
    Ok(units)
}

impl PackLimits {
    /// Whether the limits can hold together.
    ///
    /// # Errors
    /// A limit of zero, or more anchors for a document than for a unit.
    pub fn check(&self) -> Result<(), DataError> {
        for (flag, value) in [
            ("--slot-tokens", self.slot_tokens),
            ("--unit-anchors", self.unit_anchors),
            ("--anchors", self.anchors),
        ] {
            if value == 0 {
                return Err(DataError::ZeroLimit { flag });
            }
        }
        match self.anchors > self.unit_anchors {
            true => Err(DataError::AnchorsExceedUnit {
                anchors: self.anchors,
                unit_anchors: self.unit_anchors,
            }),
            false => Ok(()),
        }
    }
}

impl Units {
    fn push(&mut self, place: u32, tokens: u32, anchors: u32, limits: PackLimits) {
        let fits = |unit: &&mut Packed| {
            unit.tokens + tokens <= limits.slot_tokens
                && unit.anchors + anchors <= limits.unit_anchors
        };
        match self.units.last_mut().filter(fits) {
            Some(unit) => {
                unit.documents.end += 1;
                unit.tokens += tokens;
                unit.anchors += anchors;
            }
            None => self.units.push(Packed {
                documents: place..place + 1,
                tokens,
                anchors,
            }),
        }
    }

    /// Units of an epoch, U.
    pub fn len(&self) -> u32 {
        self.units.len() as u32
    }

    /// Whether there is no unit.
    pub fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// The `u`-th packed unit.
    ///
    /// # Panics
    /// If `u >= self.len()`.
    pub fn unit(&self, u: u32) -> Unit<'_> {
        let unit = &self.units[u as usize];
        let range = unit.documents.start as usize..unit.documents.end as usize;
        Unit {
            documents: &self.documents[range],
            tokens: unit.tokens,
            anchors: unit.anchors,
        }
    }

    /// All units in data order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Unit<'_>> {
        (0..self.len()).map(|u| self.unit(u))
    }

    /// Tokens of the largest unit: a slot's capacity.
    pub fn max_tokens(&self) -> u32 {
        self.units.iter().map(|u| u.tokens).max().unwrap_or(0)
    }

    /// Documents of the unit that has most.
    pub fn max_documents(&self) -> u32 {
        let count = |u: &Packed| u.documents.end - u.documents.start;
        self.units.iter().map(count).max().unwrap_or(0)
    }

    /// Anchors of the unit that has most.
    pub fn max_anchors(&self) -> u32 {
        self.units.iter().map(|u| u.anchors).max().unwrap_or(0)
    }

    /// Anchors of an epoch.
    pub fn total_anchors(&self) -> u64 {
        self.units.iter().map(|u| u64::from(u.anchors)).sum()
    }

    /// Tokens of an epoch.
    pub fn total_tokens(&self) -> u64 {
        self.units.iter().map(|u| u64::from(u.tokens)).sum()
    }

    /// The most units that a step of `batch_anchors` can take: it takes units while it has fewer
    /// anchors, so this counts the units with fewest.
    pub fn most_in_a_step(&self, batch_anchors: u64) -> u32 {
        let mut anchors: Vec<u32> = self.units.iter().map(|u| u.anchors).collect();
        anchors.sort_unstable();
        let mut sum = 0;
        let taken = anchors.iter().take_while(|&&a| {
            let open = sum < batch_anchors;
            sum += u64::from(a);
            open
        });
        taken.count() as u32
    }
}

/// The order of a run's units over all epochs: g = epoch·U + place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    units: u32,
    epochs: u32,
    /// `[epoch][place]` -> unit.
    unit_at: Vec<u32>,
    /// `[epoch][unit]` -> place.
    place_of: Vec<u32>,
}

impl Order {
    /// Shuffles `units` units for each of `epochs` epochs, keyed by (seed, epoch) alone.
    ///
    /// # Errors
    /// More numbers than 32 bits hold.
    pub fn new(seed: u64, units: u32, epochs: u32) -> Result<Order, DataError> {
        let total = u64::from(units) * u64::from(epochs);
        if total > u64::from(u32::MAX) {
            return Err(DataError::TooManyUnits {
                units: u64::from(units),
                epochs,
            });
        }
        let mut unit_at = Vec::with_capacity(total as usize);
        let mut place_of = vec![0; total as usize];
        for epoch in 0..epochs {
            let start = unit_at.len();
            let mut rng = generator(seed, u64::from(epoch));
            unit_at.extend(0..units);
            shuffle(&mut unit_at[start..], &mut rng);
            for (place, &unit) in unit_at[start..].iter().enumerate() {
                place_of[start + unit as usize] = place as u32;
            }
        }
        Ok(Order {
            units,
            epochs,
            unit_at,
            place_of,
        })
    }

    /// Units of all epochs; g runs below this.
    pub fn len(&self) -> u32 {
        self.unit_at.len() as u32
    }

    /// Whether there is nothing to train.
    pub fn is_empty(&self) -> bool {
        self.unit_at.is_empty()
    }

    /// Epochs.
    pub fn epochs(&self) -> u32 {
        self.epochs
    }

    /// The packed unit that stands at g.
    ///
    /// # Panics
    /// If `g >= self.len()`.
    pub fn unit(&self, g: u32) -> u32 {
        self.unit_at[g as usize]
    }

    /// The epoch of g.
    pub fn epoch(&self, g: u32) -> u32 {
        g / self.units
    }

    /// The number g of a packed unit in an epoch.
    ///
    /// # Panics
    /// If the epoch or the unit does not exist.
    pub fn g(&self, epoch: u32, unit: u32) -> u32 {
        assert!(unit < self.units, "unit {unit} of {}", self.units);
        let start = epoch * self.units;
        start + self.place_of[(start + unit) as usize]
    }

    /// An epoch's packed units in order.
    ///
    /// # Panics
    /// If the epoch does not exist.
    pub fn epoch_order(&self, epoch: u32) -> &[u32] {
        let start = epoch as usize * self.units as usize;
        &self.unit_at[start..start + self.units as usize]
    }
}

/// ChaCha with 8 rounds; the seed is its key, little-endian and padded with zeros. Spelled out here so
/// that orders stay the same whatever a library's shorthand for seeding does.
pub(super) fn generator(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(stream);
    rng
}

/// Fisher–Yates, with numbers drawn without bias.
pub(super) fn shuffle(items: &mut [u32], rng: &mut ChaCha8Rng) {
    for i in (1..items.len()).rev() {
        let j = below(rng, i as u32 + 1);
        items.swap(i, j as usize);
    }
}

/// A number below `n`, by multiplication and rejection (arXiv 1805.10941).
fn below(rng: &mut ChaCha8Rng, n: u32) -> u32 {
    let reject = n.wrapping_neg() % n;
    loop {
        let product = u64::from(rng.next_u32()) * u64::from(n);
        if product as u32 >= reject {
            return (product >> 32) as u32;
        }
    }
}

#[derive(Serialize)]
struct UnitLine {
    unit: u32,
    documents: Vec<u64>,
    tokens: u32,
    anchors: u32,
}

#[derive(Serialize)]
struct EpochLine<'a> {
    epoch: u32,
    order: &'a [u32],
}

/// Writes `units.jsonl`: a line `{unit, documents: [row numbers], tokens, anchors}` for each packed
/// unit, then for each epoch `{epoch, order: [unit at place 0, at place 1, …]}`. A row number counts
/// the rows of all data files from 0, blank lines aside.
///
/// # Errors
/// The file cannot be written.
pub fn write_units(
    path: &Path,
    set: &TokenSet,
    units: &Units,
    order: &Order,
) -> Result<(), DataError> {
    let write = || -> io::Result<()> {
        let mut out = BufWriter::new(File::create(path)?);
        for (number, unit) in units.iter().enumerate() {
            let row = |&d: &u32| set.info(d as usize).row;
            let line = UnitLine {
                unit: number as u32,
                documents: unit.documents.iter().map(row).collect(),
                tokens: unit.tokens,
                anchors: unit.anchors,
            };
            serde_json::to_writer(&mut out, &line)?;
            out.write_all(b"\n")?;
        }
        for epoch in 0..order.epochs() {
            let line = EpochLine {
                epoch,
                order: order.epoch_order(epoch),
            };
            serde_json::to_writer(&mut out, &line)?;
            out.write_all(b"\n")?;
        }
        out.flush()
    };
    write().map_err(|source| DataError::Write {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn info(row: u32, (tokens, eligible): (u32, u32)) -> DocumentInfo {
        DocumentInfo {
            row: u64::from(row),
            file: 0,
            line: u64::from(row) + 1,
            tokens,
            supervised: eligible + 1,
            eligible,
        }
    }

    fn packed(sizes: &[(u32, u32)], limits: PackLimits) -> Units {
        let documents: Vec<u32> = (0..sizes.len() as u32).collect();
        pack_sizes(&documents, |d| info(d, sizes[d as usize]), limits).unwrap()
    }

    proptest! {
        #[test]
        fn packing_keeps_order_and_limits(
            sizes in prop::collection::vec((1u32..100, 1u32..100), 0..200),
            slot_tokens in 100u32..400,
            unit_anchors in 20u32..100,
            anchors in 1u32..20,
        ) {
            let limits = PackLimits { slot_tokens, unit_anchors, anchors };
            let units = packed(&sizes, limits);
            let all: Vec<u32> = units.iter().flat_map(|u| u.documents.to_vec()).collect();
            prop_assert_eq!(all, (0..sizes.len() as u32).collect::<Vec<_>>());
            let cost = |d: &u32| {
                let (tokens, eligible) = sizes[*d as usize];
                (tokens, eligible.min(anchors))
            };
            for (number, unit) in units.iter().enumerate() {
                prop_assert!(!unit.documents.is_empty());
                prop_assert_eq!(unit.tokens, unit.documents.iter().map(|d| cost(d).0).sum::<u32>());
                prop_assert_eq!(unit.anchors, unit.documents.iter().map(|d| cost(d).1).sum::<u32>());
                prop_assert!(unit.tokens <= slot_tokens && unit.anchors <= unit_anchors);
                // Closed only because the next document did not fit.
                if number + 1 < units.len() as usize {
                    let (tokens, more) = cost(&units.unit(number as u32 + 1).documents[0]);
                    prop_assert!(
                        unit.tokens + tokens > slot_tokens || unit.anchors + more > unit_anchors
                    );
                }
            }
            prop_assert_eq!(units.max_tokens(), units.iter().map(|u| u.tokens).max().unwrap_or(0));
            let total: u64 = units.iter().map(|u| u64::from(u.anchors)).sum();
            prop_assert_eq!(units.total_anchors(), total);
        }

        /// However the units are ordered, a step that takes units until the budget is met never
        /// takes more than `most_in_a_step`.
        #[test]
        fn no_step_takes_more_units(
            sizes in prop::collection::vec((1u32..9, 1u32..9), 1..60),
            batch in 1u64..60,
            seed in any::<u64>(),
        ) {
            let limits = PackLimits { slot_tokens: 9, unit_anchors: 9, anchors: 9 };
            let units = packed(&sizes, limits);
            let order = Order::new(seed, units.len(), 1).unwrap();
            let (mut sum, mut taken) = (0, 0);
            for g in 0..order.len() {
                if sum >= batch {
                    (sum, taken) = (0, 0);
                }
                sum += u64::from(units.unit(order.unit(g)).anchors);
                taken += 1;
                prop_assert!(taken <= units.most_in_a_step(batch));
            }
        }

        #[test]
        fn each_epoch_holds_each_unit_once(seed in any::<u64>(), units in 0u32..300, epochs in 0u32..5) {
            let order = Order::new(seed, units, epochs).unwrap();
            prop_assert_eq!(order.len(), units * epochs);
            for epoch in 0..epochs {
                let mut sorted = order.epoch_order(epoch).to_vec();
                sorted.sort_unstable();
                prop_assert_eq!(sorted, (0..units).collect::<Vec<_>>());
            }
            for g in 0..order.len() {
                prop_assert_eq!(order.g(order.epoch(g), order.unit(g)), g);
                prop_assert_eq!(order.epoch_order(order.epoch(g))[(g % units) as usize], order.unit(g));
            }
            prop_assert_eq!(&order, &Order::new(seed, units, epochs).unwrap());
        }
    }

    /// Of seed 7, epochs 0 and 2, by another implementation of ChaCha8.
    const FIXED: [[u32; 8]; 2] = [[3, 4, 0, 7, 2, 6, 5, 1], [4, 3, 2, 1, 6, 7, 0, 5]];

    /// An epoch's order depends on (seed, epoch) alone, and never changes between versions: resuming
    /// relies on it.
    #[test]
    fn the_order_is_fixed_for_good() {
        let order = Order::new(7, 8, 3).unwrap();
        assert_eq!(
            order.epoch_order(0),
            Order::new(7, 8, 1).unwrap().epoch_order(0)
        );
        assert_ne!(order.epoch_order(0), order.epoch_order(1));
        assert_ne!(
            order.epoch_order(0),
            Order::new(8, 8, 1).unwrap().epoch_order(0)
        );
        assert_eq!([order.epoch_order(0), order.epoch_order(2)], FIXED);
    }

    #[test]
    fn every_place_is_equally_likely() {
        let mut counts = [[0u32; 5]; 5];
        for seed in 0..20_000 {
            let order = Order::new(seed, 5, 1).unwrap();
            for (place, &unit) in order.epoch_order(0).iter().enumerate() {
                counts[place][unit as usize] += 1;
            }
        }
        // 4,000 expected, standard deviation 57.
        for count in counts.into_iter().flatten() {
            assert!((3_700..4_300).contains(&count), "{counts:?}");
        }
    }

    #[test]
    fn limits_that_cannot_hold_refuse() {
        let limits = PackLimits {
            slot_tokens: 64,
            unit_anchors: 16,
            anchors: 8,
        };
        let refuse = |limits: PackLimits| {
            pack_sizes(&[3], |d| info(d, (65, 9)), limits)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            refuse(limits),
            "row 3 has 65 tokens, more than a slot's 64; raise --slot-tokens or lower --max-length to at most 64"
        );
        let more = PackLimits {
            anchors: 17,
            ..limits
        };
        assert!(refuse(more).contains("--anchors 17 is more than --unit-anchors 16"));
        let none = PackLimits {
            slot_tokens: 0,
            ..limits
        };
        assert_eq!(refuse(none), "--slot-tokens must be at least 1");
        assert!(Order::new(0, u32::MAX, 2).is_err());
    }

    #[test]
    fn a_document_may_fill_a_unit_alone() {
        let limits = PackLimits {
            slot_tokens: 10,
            unit_anchors: 4,
            anchors: 4,
        };
        let units = packed(&[(10, 9), (1, 1), (9, 3), (5, 1)], limits);
        let documents: Vec<&[u32]> = units.iter().map(|u| u.documents).collect();
        assert_eq!(documents, [&[0][..], &[1, 2], &[3]]);
        assert_eq!(units.max_documents(), 2);
        assert_eq!(units.max_anchors(), 4);
        assert_eq!(units.most_in_a_step(5), 2);
        assert_eq!(units.most_in_a_step(6), 3);
        assert_eq!(units.most_in_a_step(100), 3);
    }
}
