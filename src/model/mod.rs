//! Target and drafter networks, written once over the engine: configs, weights, forward, backward, losses.

pub mod batch;
pub mod config;
pub mod decoder;
pub mod drafter;
mod end_tokens;
mod error;
pub mod rotary;
pub mod target;
#[cfg(test)]
pub(crate) mod testing;
pub mod weights;

pub use batch::{BatchDecoder, NewTokens};
pub use config::{Activation, ExpertsConfig, Family, TargetConfig};
pub use decoder::{Shape, Step, TargetDecoder};
pub use end_tokens::end_token_ids;
pub use error::{ModelError, Problems};
pub use rotary::{Rope, RotaryTables, Scaling, Turns};
pub use target::{Captured, Target, TargetHead, TargetNeeds};
pub use weights::TargetFiles;
