//! Decoding by the target alone and with a trained drafter: answers, accepted length, losslessness.

pub mod decode;
pub mod generate;
pub mod plots;
pub mod report;
pub mod tree;
pub mod walk;

#[cfg(test)]
mod tests;
