//! Anchors, optimizer, schedule, step, checkpoint and export of a drafter.

pub mod anchors;
pub mod micro_step;
pub mod optimizer;
pub mod options;
pub mod schedule;
