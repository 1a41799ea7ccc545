//! From a command line to a supervised set of processes and one exit report.
