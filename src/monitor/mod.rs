//! Metrics, the live line, logs and plots.
