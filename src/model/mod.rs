//! Target and drafter networks, written once over the engine: configs, weights, forward, backward, losses.

pub mod drafter;
