//! What is recorded of each step.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::shares::Shares;

/// One line of metrics.jsonl; other programs read it, so names and meaning stay.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MetricsRecord {
    /// Number of the step in the run, from 1.
    pub step: u32,
    /// Seconds since the run began to train.
    pub time_s: f64,
    /// Weighted mean of the loss over the step.
    pub loss: f64,
    /// Mean over the step's blocks of 1 + length of the correct prefix.
    pub block_accepted_length: f64,
    /// Learning rate used.
    pub lr: f64,
    /// L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Tokens of the step.
    pub tokens: u64,
    /// Tokens that all targets together prefill in a second.
    pub target_tokens_per_s: f64,
    /// Tokens that all drafters together train on in a second.
    pub drafter_tokens_per_s: f64,
    /// Slots that hold a unit nobody has taken.
    pub ring_ready: u32,
    /// Slots that hold nothing.
    pub ring_free: u32,
    /// Share of its time that each worker, by name, spends computing: 0..=1.
    pub busy: BTreeMap<String, f64>,
    /// Share of the supervised slots whose most likely token was right, slot 1 first.
    #[serde(default)]
    pub position_accuracy: Vec<f64>,
}

/// One line of evaluations.jsonl: the held-out documents, walked after a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationRecord {
    /// After this step; 0 is before training.
    pub step: u32,
    /// Seconds since the run began to train.
    pub time_s: f64,
    /// Documents walked.
    pub documents: u64,
    /// Tokens a target pass, by the chain.
    pub accepted_length: f64,
    /// The same by draft trees: nodes, and tokens a pass.
    pub trees: Vec<(u32, f64)>,
}

/// One worker in a line of workers.jsonl.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// Tokens in a second since the line before.
    pub tokens_per_s: f64,
    /// How often it was started again after a death.
    pub restarts: u32,
    /// What it spent its time on since the line before.
    pub shares: Shares,
}

/// One line of workers.jsonl: the run at one moment, whether steps are made or not. Lines come once a second at
/// first and less often as a run grows old.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkersRecord {
    /// The last step committed.
    pub step: u32,
    /// Seconds since the run began to train.
    pub time_s: f64,
    /// Units that need no more work.
    pub units_done: u64,
    /// Slots: free, being filled, ready, held.
    pub ring: [u32; 4],
    /// Every worker, by name.
    pub workers: BTreeMap<String, WorkerRecord>,
}

/// One line of trained.jsonl: which units each member trained in a committed step, in trained order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainedRecord {
    /// Number of the step in the run, from 1.
    pub step: u32,
    /// Rank to units; a unit's number is epoch·U + place in that epoch's order.
    pub units: BTreeMap<u32, Vec<u64>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trained_line_has_the_documented_form() {
        let record = TrainedRecord {
            step: 7,
            units: BTreeMap::from([(0, vec![12, 14]), (1, vec![])]),
        };
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(text, r#"{"step":7,"units":{"0":[12,14],"1":[]}}"#);
        assert_eq!(
            serde_json::from_str::<TrainedRecord>(&text).unwrap(),
            record
        );
    }

    #[test]
    fn a_metrics_line_has_the_documented_fields() {
        let value = serde_json::to_value(MetricsRecord::default()).unwrap();
        let fields: Vec<&str> = value
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let mut wanted = vec![
            "step",
            "time_s",
            "loss",
            "block_accepted_length",
            "lr",
            "grad_norm",
            "tokens",
            "target_tokens_per_s",
            "drafter_tokens_per_s",
            "ring_ready",
            "ring_free",
            "busy",
            "position_accuracy",
        ];
        wanted.sort_unstable();
        let mut fields = fields;
        fields.sort_unstable();
        assert_eq!(fields, wanted);
    }
}
