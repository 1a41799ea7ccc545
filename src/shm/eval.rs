//! Held-out units: leased, published and recovered like others, in slots of their own, and kept for good.

use super::atomics::Acquire;
use super::drafter::Drafter;
use super::error::{Result, ShmError};
use super::payload::{View, checked, view_of};
use super::seat::Activity;
use super::segment::Segment;
use super::slot::SlotHeader;
use super::wake::On;
use super::words::{LedgerWord, UnitState};

impl Drafter {
    /// Waits until every held-out unit is written; their numbers, without quarantined ones. `None`: stop.
    ///
    /// # Errors
    /// [`ShmError::Interrupted`].
    pub fn wait_eval(&mut self) -> Result<Option<Vec<u32>>> {
        let waiter = self.waiter.clone();
        waiter.wait(On::Items, Activity::WaitEval, 0, || {
            let stopped = self.stop().is_some_and(|stop| stop.after == 0);
            let written = self.segment().eval_written();
            Ok(if stopped {
                Some(None)
            } else {
                written.map(Some)
            })
        })
    }

    /// The header and payload of a held-out unit.
    ///
    /// # Errors
    /// [`ShmError::NotWritten`]; [`ShmError::Corrupt`].
    pub fn eval_view(&self, unit: u32) -> Result<(SlotHeader, View<'_>)> {
        self.segment().eval_view(unit)
    }
}

impl Segment {
    /// The held-out units once all are written or quarantined.
    pub(crate) fn eval_written(&self) -> Option<Vec<u32>> {
        let mut written = Vec::new();
        for (word, unit) in self.eval_ledger().iter().zip(0..) {
            let quarantined =
                LedgerWord::unpack(word.load(Acquire)).state == UnitState::Quarantined;
            match quarantined {
                true => {}
                false if self.is_published(unit.into(), true) => written.push(unit),
                false => return None,
            }
        }
        Some(written)
    }

    /// The header and payload of a held-out unit.
    ///
    /// # Errors
    /// [`ShmError::NotWritten`]; [`ShmError::Corrupt`].
    pub fn eval_view(&self, unit: u32) -> Result<(SlotHeader, View<'_>)> {
        if unit >= self.geometry().eval_units || !self.is_published(unit.into(), true) {
            let units = self.geometry().eval_units;
            return Err(ShmError::NotWritten { unit, units });
        }
        let slot = self.geometry().slots + unit;
        let header = self.read_header(slot)?;
        // SAFETY: a published eval slot is kept for good.
        let view = unsafe { view_of(self, slot, &header) };
        Ok((header, checked(self, slot, &header, view)?))
    }
}
