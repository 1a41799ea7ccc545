//! Speculative decoding with a trained drafter: accepted length and losslessness.

pub mod tree;
pub mod walk;
