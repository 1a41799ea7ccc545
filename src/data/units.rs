//! Work units: documents packed once, and the order they are trained in.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Serialize;

use super::{DataError, TokenSet};

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
    limits.check()?;
    let mut units = Units {
        documents: documents.to_vec(),
        units: Vec::new(),
    };
    for (place, &document) in documents.iter().enumerate() {
        let info = set.info(document as usize);
        if info.tokens > limits.slot_tokens {
            return Err(DataError::DocumentTooLong {
                row: info.row,
                tokens: info.tokens,
                slot_tokens: limits.slot_tokens,
            });
        }
        units.push(
            place as u32,
            info.tokens,
            info.eligible.min(limits.anchors),
            limits,
        );
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
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(u64::from(epoch));
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
