//! The atomics that the protocol is written against: std's, or loom's under the cargo feature `loom`.
//!
//! Words that decide something are [`AtomicU32`] and [`AtomicU64`] of this module, so that loom explores
//! every order their accesses may be seen in. What is only watched (live records, sizes that a neighbouring
//! word publishes, futex words, which carry no meaning beyond "look again") is [`plain`], always std's: loom
//! then sees no ordering through them, which is the stricter test.

pub(crate) use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};

/// Atomics that loom does not model.
pub(crate) mod plain {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};
}

/// Lets another thread run while a condition is not yet true.
pub(crate) fn relax() {
    #[cfg(not(feature = "loom"))]
    std::hint::spin_loop();
    #[cfg(feature = "loom")]
    loom::thread::yield_now();
}
