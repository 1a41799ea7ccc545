//! All-reduce through the segment's reduce buffers, for CPU places.

use super::{Collective, CollectiveError};
use crate::engine::{Engine, Float};
use crate::shm::{Drafter, Joined, Reduced};

/// All-reduce through shared memory: every member copies its values in, sums its share over all in rank order,
/// and copies the whole sum out. The bits do not depend on timing.
#[derive(Debug, Default)]
pub struct SharedMemory {
    /// Gradients and totals on their way.
    staged: Vec<f32>,
}

impl<E: Engine> Collective<E> for SharedMemory {
    fn regroup(&mut self, _: &E, _: &Joined) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn all_reduce(
        &mut self,
        engine: &E,
        seat: &mut Drafter,
        gradients: &mut Float<E>,
        totals: &mut [f32],
    ) -> Result<Reduced, CollectiveError> {
        if seat.segment().step_word().members.count_ones() == 1 {
            // Nothing to sum: the values stay where they are.
            return Ok(seat.all_reduce(totals)?);
        }
        let count = gradients.cols();
        self.staged.clear();
        self.staged.extend(engine.download_float(gradients.view())?);
        self.staged.extend_from_slice(totals);
        if seat.all_reduce(&mut self.staged)? == Reduced::Moved {
            return Ok(Reduced::Moved);
        }
        engine.write_float(gradients.view_mut(), &self.staged[..count])?;
        totals.copy_from_slice(&self.staged[count..]);
        Ok(Reduced::Done)
    }
}
