//! Rotary position embedding (arXiv 2104.09864) and its scaled types: what a config says, and the tables.

mod fields;
mod frequencies;
mod tables;

pub(super) use fields::{RopeDefaults, Ropes};
pub use tables::{RotaryTables, Turns};

/// How positions turn the heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Share of a head's dims that turn, the first ones; the others pass through.
    pub partial: f64,
    /// How frequencies are changed for sequences longer than those of pretraining.
    pub scaling: Scaling,
}

/// The types of rotary scaling, by the names that configs give them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// `default`: none.
    Default,
    /// `linear`: all frequencies divided (arXiv 2306.15595).
    Linear {
        /// Divides them.
        factor: f64,
    },
    /// `dynamic`: the base grows with a sequence that is longer than `original` ("NTK-aware").
    Dynamic {
        /// How far the base grows.
        factor: f64,
        /// Positions up to which nothing changes: `max_position_embeddings`.
        original: usize,
    },
    /// `llama3`: low frequencies divided, high ones kept, those between interpolated (arXiv 2407.21783).
    Llama3 {
        /// Divides low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// Positions of pretraining.
        original: usize,
    },
    /// `yarn` (arXiv 2309.00071).
    Yarn {
        /// Divides low frequencies.
        factor: f64,
        /// Multiplies cosines and sines.
        attention_factor: f64,
        /// Turns within `original` positions above which a frequency is kept.
        beta_fast: f64,
        /// Turns below which it is divided.
        beta_slow: f64,
        /// Positions of pretraining.
        original: usize,
        /// Whether the ramp between the two runs from a whole dim to a whole dim.
        truncate: bool,
    },
}

impl Rope {
    /// The default type over whole heads.
    pub fn of_theta(theta: f64) -> Self {
        Self {
            theta,
            partial: 1.0,
            scaling: Scaling::Default,
        }
    }
}
