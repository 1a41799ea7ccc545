//! Waiting: spin for at most 20 µs, then sleep on a futex that every process of the run can wake.
//!
//! A waiter reads the wake word, looks at what it waits for, and sleeps only while the word is unchanged;
//! whoever changes something bumps the word afterwards. A kill between the change and the bump costs one
//! tick, since every sleep ends by then.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::atomics::{Acquire, Relaxed, Release, plain, relax};
use super::error::{Result, ShmError};
use super::seat::{Activity, LiveSeat};
use super::segment::Segment;

/// Longest sleep: what a lost wake-up costs, and how stale a heartbeat gets.
const TICK: Duration = Duration::from_millis(50);
#[cfg(not(feature = "loom"))]
const SPIN: Duration = Duration::from_micros(20);

/// Ends the waits of one handle from another thread, within a tick.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Every wait of the handle, now and later, fails with [`ShmError::Interrupted`].
    pub fn set(&self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    /// Whether it was set.
    pub fn is_set(&self) -> bool {
        self.0.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// Which wake word.
#[derive(Clone, Copy, Debug)]
pub(crate) enum On {
    Items,
    Space,
    Step,
    Reduce,
}

impl Segment {
    fn wake_word(&self, on: On) -> &plain::AtomicU32 {
        let wake = &self.control().wake;
        match on {
            On::Items => &wake.items,
            On::Space => &wake.space,
            On::Step => &wake.step,
            On::Reduce => &wake.reduce,
        }
    }

    /// Bumps a word and wakes all who sleep on it.
    pub(crate) fn wake(&self, on: On) {
        let word = self.wake_word(on);
        // Release: the change comes before the bump; partner: the Acquire load in `Waiter::wait`.
        word.fetch_add(1, Release);
        #[cfg(not(feature = "loom"))]
        {
            let flags = rustix::thread::futex::Flags::empty();
            // The only failure is a word outside the mapping.
            let _ = rustix::thread::futex::wake(word, flags, i32::MAX as u32);
        }
    }

    /// Wakes everyone, whatever they wait for.
    pub(crate) fn wake_all(&self) {
        for on in [On::Items, On::Space, On::Step, On::Reduce] {
            self.wake(on);
        }
    }
}

/// Sleeps until `word` differs from `seen`, or for `most`.
fn sleep(word: &plain::AtomicU32, seen: u32, most: Duration) {
    #[cfg(not(feature = "loom"))]
    {
        let start = Instant::now();
        while start.elapsed() < SPIN {
            if word.load(Relaxed) != seen {
                return;
            }
            relax();
        }
        let timeout = rustix::thread::futex::Timespec {
            tv_sec: most.as_secs() as i64,
            tv_nsec: most.subsec_nanos().into(),
        };
        // Woken, changed before it slept, timed out or interrupted by a signal: the caller looks again.
        let flags = rustix::thread::futex::Flags::empty();
        let _ = rustix::thread::futex::wait(word, flags, seen, Some(&timeout));
    }
    #[cfg(feature = "loom")]
    {
        let _ = (word.load(Relaxed), seen, most);
        relax();
    }
}

/// Waits on behalf of one seat.
#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub segment: Segment,
    pub live: LiveSeat,
    pub interrupt: Interrupt,
}

/// A wait that must end: what for, and until when.
pub(crate) struct Until {
    pub what: &'static str,
    pub deadline: Duration,
}

impl Waiter {
    /// Calls `poll` until it has an answer; the seat says that it is doing `activity` about `detail`
    /// meanwhile.
    pub(crate) fn wait<T>(
        &self,
        on: On,
        activity: Activity,
        detail: u64,
        poll: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        self.wait_until(on, activity, detail, None, poll, Vec::new)
    }

    /// As [`Waiter::wait`], with a deadline; `missing` names the ranks that it waits for.
    pub(crate) fn wait_until<T>(
        &self,
        on: On,
        activity: Activity,
        detail: u64,
        until: Option<Until>,
        mut poll: impl FnMut() -> Result<Option<T>>,
        missing: impl Fn() -> Vec<u32>,
    ) -> Result<T> {
        if let Some(answer) = poll()? {
            return Ok(answer);
        }
        let _doing = self.live.during(activity, detail);
        let word = self.segment.wake_word(on);
        let mut start = Instant::now();
        loop {
            let seen = word.load(Acquire);
            if let Some(answer) = poll()? {
                return Ok(answer);
            }
            let seat = self.live.index();
            if self.interrupt.is_set() {
                let activity = activity.to_string();
                return Err(ShmError::Interrupted { seat, activity });
            }
            if let Some(Until { what, deadline }) = &until
                && start.elapsed() > *deadline
            {
                if self.segment.is_debugged() {
                    // A person looks at one of the others: the deadline begins anew.
                    start = Instant::now();
                    continue;
                }
                let (waited_s, ranks) = (start.elapsed().as_secs_f64(), missing());
                return Err(ShmError::Deadline {
                    seat,
                    what,
                    waited_s,
                    ranks,
                });
            }
            sleep(word, seen, TICK);
            self.live.beat();
        }
    }
}
