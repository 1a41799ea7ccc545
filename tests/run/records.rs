//! What the files of a run say about its units, and what must be true of them.

use std::collections::{BTreeMap, BTreeSet};

use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::Value;

use crate::support::Run;

/// One packed unit.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unit {
    unit: u64,
    /// Row numbers.
    pub documents: Vec<u64>,
    /// Tokens.
    pub tokens: u64,
    /// Anchors.
    pub anchors: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EpochOrder {
    epoch: u64,
    order: Vec<u64>,
}

/// One committed step.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Its number.
    pub step: u64,
    /// Rank to units.
    pub units: BTreeMap<u64, Vec<u64>>,
}

impl Step {
    /// Units of all ranks.
    pub fn all(&self) -> impl Iterator<Item = u64> + '_ {
        self.units.values().flatten().copied()
    }
}

/// units.jsonl.
pub struct Packed {
    /// Units in data order.
    pub units: Vec<Unit>,
    orders: Vec<Vec<u64>>,
}

impl Packed {
    /// Of a run.
    pub fn of(run: &Run) -> Self {
        let lines = run.lines("units.jsonl");
        let (orders, units): (Vec<Value>, Vec<Value>) = lines
            .into_iter()
            .partition(|line| line.get("epoch").is_some());
        let units: Vec<Unit> = units
            .into_iter()
            .map(|line| serde_json::from_value(line).expect("a unit"))
            .collect();
        for (number, unit) in units.iter().enumerate() {
            assert_eq!(unit.unit, number as u64);
            assert!(unit.tokens > 0 && unit.anchors > 0 && !unit.documents.is_empty());
        }
        let orders: Vec<Vec<u64>> = orders
            .into_iter()
            .enumerate()
            .map(|(number, line)| {
                let line: EpochOrder = serde_json::from_value(line).expect("an order");
                assert_eq!(line.epoch, number as u64);
                line.order
            })
            .collect();
        for order in &orders {
            let places: BTreeSet<u64> = order.iter().copied().collect();
            assert!(
                places.into_iter().eq(0..units.len() as u64),
                "an order is a permutation: {order:?}"
            );
        }
        Self { units, orders }
    }

    /// Number of units over all epochs.
    pub fn total(&self) -> u64 {
        (self.units.len() * self.orders.len()) as u64
    }

    /// The unit with this number of the run, epoch·U + place.
    pub fn unit(&self, number: u64) -> &Unit {
        let (epoch, place) = (
            number as usize / self.units.len(),
            number as usize % self.units.len(),
        );
        &self.units[self.orders[epoch][place] as usize]
    }
}

/// trained.jsonl.
pub fn trained(run: &Run) -> Vec<Step> {
    let step = |line| serde_json::from_value(line).expect("a committed step");
    run.lines("trained.jsonl").into_iter().map(step).collect()
}

/// All units that were trained, each at most once, ascending.
pub fn units_trained(run: &Run) -> BTreeSet<u64> {
    let mut seen = BTreeSet::new();
    for (number, step) in trained(run).iter().enumerate() {
        assert_eq!(step.step, number as u64 + 1, "steps follow each other");
        for unit in step.all() {
            assert!(seen.insert(unit), "unit {unit} was trained twice");
        }
    }
    seen
}

/// Every unit of every epoch was trained, and exactly once.
pub fn each_unit_once(run: &Run) {
    let packed = Packed::of(run);
    let seen = units_trained(run);
    let missing: Vec<u64> = (0..packed.total()).filter(|g| !seen.contains(g)).collect();
    assert!(missing.is_empty(), "units were not trained: {missing:?}");
    assert_eq!(seen.len() as u64, packed.total(), "there are other units");
}

/// Tensors of a safetensors file in float32, those whose names begin with `prefix`, without it.
pub fn floats(bytes: &[u8], prefix: &str) -> BTreeMap<String, Vec<f32>> {
    let file = SafeTensors::deserialize(bytes).expect("a safetensors file");
    let tensors = file.iter().filter_map(|(name, view)| {
        let name = name.strip_prefix(prefix)?;
        assert_eq!(view.dtype(), safetensors::Dtype::F32, "{name}");
        let numbers = view.data().chunks_exact(4);
        let read = |four: &[u8]| f32::from_le_bytes(four.try_into().expect("four bytes"));
        Some((name.to_owned(), numbers.map(read).collect()))
    });
    tensors.collect()
}

/// ‖a − b‖ / ‖b‖.
pub fn difference(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    apart / norm(&mut b.iter().map(|&b| f64::from(b)))
}
