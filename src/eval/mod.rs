//! Speculative decoding with a trained drafter: accepted length and losslessness.

pub mod decode;
pub mod report;
pub mod tree;
pub mod walk;
