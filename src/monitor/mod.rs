//! Metrics, the live line, logs and plots.

pub mod console;
pub mod live;
pub mod logs;
pub mod metrics;
