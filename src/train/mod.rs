//! Anchors, optimizer, schedule, step, checkpoint and export of a drafter.

pub mod options;
