//! Explicit-state checks of the ring protocol.
mod bits;
mod explore;
mod ring;
mod whole;
