//! The work of a run: which documents are held out, the units of the others, and their order.
//!
//! The launcher and every worker build it from the same [`WorkloadSpec`] and so agree on what unit number g is;
//! only the tokens themselves are shared, as mapped files.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::split::{self, SplitOptions};
use super::units::{Order, PackLimits, Units, pack};
use super::weights::weighted;
use super::{DataError, Document, TokenSet};

/// Everything that the work of a run follows from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkloadSpec {
    /// The tokenised set to train on; see [`super::prepare`].
    pub tokens: PathBuf,
    /// A separate set to evaluate on; without one a share of `tokens` is held out.
    pub eval_tokens: Option<PathBuf>,
    /// Which share, and of both how many tokens.
    pub split: SplitOptions,
    /// For each data file of `tokens`, how often its documents appear in an epoch, above 0; empty: once each.
    pub weights: Vec<f64>,
    /// When a unit is closed.
    pub limits: PackLimits,
    /// Passes over the documents.
    pub epochs: u32,
}

/// The work of a run.
#[derive(Debug)]
pub struct Workload {
    set: TokenSet,
    eval_set: Option<TokenSet>,
    /// Units of an epoch.
    pub units: Units,
    /// The units of all epochs in order.
    pub order: Order,
    /// Held-out documents, packed like the others.
    pub eval_units: Units,
}

impl Workload {
    /// Maps the sets and packs their documents.
    ///
    /// # Errors
    /// A set that cannot be mapped, limits that contradict each other, more units than can be numbered.
    pub fn open(spec: &WorkloadSpec) -> Result<Self, DataError> {
        let set = TokenSet::open(&spec.tokens)?;
        let eval_set = spec
            .eval_tokens
            .as_deref()
            .map(TokenSet::open)
            .transpose()?;
        let (train, eval) = match &eval_set {
            Some(eval_set) => {
                let train = (0..set.len() as u32).collect();
                (train, split::whole(eval_set, spec.split.tokens))
            }
            None => {
                let split = split::split(&set, &spec.split);
                (split.train, split.eval)
            }
        };
        let train = weighted(&set, train, &spec.weights, spec.split.seed);
        if train.is_empty() {
            return Err(DataError::NothingDrawn);
        }
        let units = pack(&set, &train, spec.limits)?;
        let order = Order::new(spec.split.seed, units.len(), spec.epochs)?;
        let eval_units = pack(eval_set.as_ref().unwrap_or(&set), &eval, spec.limits)?;
        Ok(Self {
            set,
            eval_set,
            units,
            order,
            eval_units,
        })
    }

    /// The set that is trained on.
    pub fn set(&self) -> &TokenSet {
        &self.set
    }

    /// The set that held-out documents are from.
    pub fn eval_set(&self) -> &TokenSet {
        self.eval_set.as_ref().unwrap_or(&self.set)
    }

    /// Documents of the unit at `g` = epoch·U + place, in packed order.
    pub fn documents(&self, g: u64) -> impl Iterator<Item = Document<'_>> {
        let unit = self.units.unit(self.order.unit(g as u32));
        unit.documents
            .iter()
            .map(|&d| self.set.document(d as usize))
    }

    /// Documents of the held-out unit `u`, in packed order.
    pub fn eval_documents(&self, u: u64) -> impl Iterator<Item = Document<'_>> {
        let unit = self.eval_units.unit(u as u32);
        unit.documents
            .iter()
            .map(|&d| self.eval_set().document(d as usize))
    }

    /// Anchors of the unit at `g`.
    pub fn anchors(&self, g: u64) -> u32 {
        self.units.unit(self.order.unit(g as u32)).anchors
    }

    /// Tokens of the unit at `g`.
    pub fn tokens(&self, g: u64) -> u32 {
        self.units.unit(self.order.unit(g as u32)).tokens
    }

    /// Epoch that the unit at `g` belongs to.
    pub fn epoch(&self, g: u64) -> u64 {
        g / u64::from(self.units.len().max(1))
    }

    /// Anchors of all epochs: what the schedule's position is measured against.
    pub fn planned_anchors(&self) -> u64 {
        self.units.total_anchors() * u64::from(self.order.epochs())
    }

    /// Tokens of the largest unit, held-out ones included: a slot's capacity.
    pub fn slot_tokens(&self) -> u32 {
        self.units.max_tokens().max(self.eval_units.max_tokens())
    }

    /// Documents of the unit that has most, held-out ones included.
    pub fn slot_documents(&self) -> u32 {
        self.units
            .max_documents()
            .max(self.eval_units.max_documents())
    }
}
