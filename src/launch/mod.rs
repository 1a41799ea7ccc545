//! From a command line to a supervised set of processes and one exit report.

pub mod check_data;
pub mod checkpoints;
pub mod cli;
pub mod evaluate;
pub mod export;
pub mod flags;
pub mod gpus;
pub mod hub;
pub mod memory;
pub mod options;
pub mod output;
pub mod places;
pub mod plan;
pub mod prepare;
pub mod process;
pub mod report;
pub mod run;
pub mod signals;
mod sources;
pub mod spawn;
pub mod supervise;
pub mod table;
