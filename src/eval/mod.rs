//! Speculative decoding with a trained drafter: accepted length and losslessness.
