//! The numbers that say what a step computes: the loss, the optimizer and its schedule.
//!
//! They are part of the resolved plan and of its hash, and are read by the drafter; nothing here knows of
//! processes or of the command line.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use crate::engine::LossOptions;

/// The shape of the learning rate over the run, as a function of anchors committed ÷ anchors planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// After the warm-up the rate stays.
    Constant,
    /// After the warm-up half a cosine down to `floor` times the rate.
    Cosine,
    /// Warm-up, stable, decay: the rate stays until the last fifth, then falls linearly to `floor` times it.
    Wsd,
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Constant => "constant",
            Self::Cosine => "cosine",
            Self::Wsd => "wsd",
        })
    }
}

impl FromStr for Schedule {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "constant" => Ok(Self::Constant),
            "cosine" => Ok(Self::Cosine),
            "wsd" => Ok(Self::Wsd),
            other => Err(format!("`{other}` is not one of constant, cosine, wsd")),
        }
    }
}

/// AdamW with decoupled weight decay (arXiv 1711.05101), the schedule of its rate and the gradient's bound.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerOptions {
    /// The peak learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, multiplied by the rate.
    pub weight_decay: f64,
    /// The gradient's L2 norm is cut to this; 0 leaves it.
    pub clip: f64,
    /// The rate's shape.
    pub schedule: Schedule,
    /// Share of the run, in 0..1, over which the rate rises linearly from zero.
    pub warmup: f64,
    /// What the rate falls to, as a share of `lr`.
    pub floor: f64,
}

impl Default for OptimizerOptions {
    fn default() -> Self {
        Self {
            lr: 6e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.01,
            clip: 1.0,
            schedule: Schedule::Cosine,
            warmup: 0.04,
            floor: 0.1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_survive_toml() {
        let loss = LossOptions {
            dpace_alpha: Some(0.3),
            ..LossOptions::default()
        };
        let text = toml::to_string(&loss).unwrap();
        assert_eq!(toml::from_str::<LossOptions>(&text).unwrap(), loss);
        let optimizer = OptimizerOptions {
            schedule: Schedule::Wsd,
            ..OptimizerOptions::default()
        };
        let text = toml::to_string(&optimizer).unwrap();
        assert_eq!(
            toml::from_str::<OptimizerOptions>(&text).unwrap(),
            optimizer
        );
    }

    #[test]
    fn schedule_names_are_those_of_the_command_line() {
        for name in ["constant", "cosine", "wsd"] {
            assert_eq!(name.parse::<Schedule>().unwrap().to_string(), name);
        }
        assert!(
            "linear"
                .parse::<Schedule>()
                .unwrap_err()
                .contains("constant, cosine, wsd")
        );
    }
}
