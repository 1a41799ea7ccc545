//! Explicit-state checks of the ring protocol (its lines p0..p4, c0..c3, g1, g2, r0..r6).
//!
//! A model lists, for each state, every shared-memory access that some process may make next; a member may be
//! killed before any of them, and recovery is a process like the others. [`explore`] visits every state: no
//! rule may be broken, and from each one a right end must be reachable without another fault.
//!
//! - `ring`: targets, drafters, slots and the ledger, each unit committed for itself.
//! - `whole`: the whole protocol, with sizes and features chosen per exploration. `whole/sound.rs` explores it
//!   as it should be, `whole/mistakes.rs` with one planted mistake at a time. With no targets it is the model of
//!   drafters, tags and the step word alone.
//!
//! `cargo test --release --test protocol_model -- --nocapture` prints each size and each counterexample. Slots
//! are sorted after every access, so a slot's number in a trace is its place in that order, not its identity.
//! Larger sizes: add `--ignored`.

mod bits;
mod explore;
mod ring;
mod whole;
