//! Metrics, the live line, logs and plots.

pub mod console;
pub mod diagnose;
pub mod live;
pub mod logs;
pub mod look;
pub mod metrics;
pub mod page;
pub mod registry;
pub mod shares;
pub mod tail;
pub mod tensorboard;
pub mod top;
