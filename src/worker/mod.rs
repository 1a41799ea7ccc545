//! The loops of the two worker processes.
