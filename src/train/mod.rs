//! Anchors, optimizer, schedule, step, checkpoint and export of a drafter.

pub mod anchors;
pub mod best;
pub mod checkpoint;
pub mod disk;
pub mod export;
pub mod micro_step;
pub mod optimizer;
pub mod options;
pub mod schedule;
pub mod tensors;

#[cfg(test)]
mod tests;
