//! Memory shared by the processes: segment, ring of slots, ledger, step word, finish, seats, wake-ups,
//! recovery. No CUDA, no tensors, no training here.
//!
//! One sealed memfd holds everything ([`Segment::create`] in the launcher, [`Segment::attach`] in workers,
//! [`Observer::open`] for whoever watches). A worker sits in one seat through one handle:
//!
//! | handle | does | protocol lines |
//! |---|---|---|
//! | [`Target`] | leases units, claims slots, fills and publishes them, parks at the end | p0-p4, finish |
//! | [`Drafter`] | takes units, closes the step, settles it, comes and goes | c0-c3, g1, g2, join |
//! | [`Recovery`] | the launcher's: settles what the dead have left, admits replacements | r0-r6 |
//!
//! Members may be killed at any instruction. Four rules carry everything: a claim names its owner in the same
//! word; the ledger, not the slot, says whether a unit's effect happened; one step word decides for all
//! drafters at once; only the launcher reclaims, and only after `waitid` proved the death. A handle that is
//! dropped changes nothing: to the others it looks like a death, which the launcher must recover. Leave with
//! [`Target::leave`] and [`Drafter::leave`].
//!
//! Calls that wait sleep on futexes with a tick, keep the seat's heartbeat and say what they wait for; they
//! end early only through the handle's [`Interrupt`]. Each has a `poll_` form that does not wait. Calling
//! the lines of a step in the wrong order is refused with [`ShmError::OutOfOrder`].
//!
//! A target and a drafter, whole:
//!
//! ```no_run
//! use slipstream::shm::*;
//! # fn prefill(_: &mut Filling) -> bool { true }
//! # fn micro_step(_: View<'_>, _: &mut [f32]) {}
//! # fn optimizer_step(_: &[f32]) {}
//! # fn fill_state(_: u64, _: &mut [u8]) {}
//! # fn take_state(_: u64, _: &[u8], _: u64) {}
//! # fn save(_: &LedgerImage) {}
//! # fn plan(_: u64) -> (u32, u32, u32) { (1, 1, 1) }
//!
//! fn target_loop(segment: &Segment) -> Result<()> {
//!     let mut target = segment.target(0, 1)?;
//!     while let Next::Unit(lease) = target.next_work()? {
//!         let (tokens, documents, anchors) = plan(lease.unit());
//!         let Claim::Filling(mut slot) = target.claim(lease, tokens, documents)? else { break };
//!         let finite = prefill(&mut slot); // slot.captured::<f32>()?, slot.ids(), slot.mask(), ...
//!         target.publish(slot, UnitInfo { anchors, weightless: !finite })?;
//!     }
//!     target.leave();
//!     Ok(())
//! }
//!
//! fn drafter_loop(segment: &Segment, entry: Entry, save_every: u64) -> Result<()> {
//!     let mut drafter = segment.drafter(0, 1, entry)?;
//!     let Some(_held_out) = drafter.wait_eval()? else { return drafter.leave() };
//!     let Some(entered) = drafter.enter()? else { return drafter.leave() };
//!     while entry == Entry::Replacement {
//!         match drafter.receive_state(take_state)? {
//!             Received::Done => break,
//!             Received::Again => continue, // from offset 0
//!             Received::Leave => return drafter.leave(),
//!         }
//!     }
//!     let mut gradient = vec![0f32; 1 << 20];
//!     group_changed(&mut drafter, entered)?;
//!     loop {
//!         match drafter.take()? {
//!             Take::Item(item) => { micro_step(drafter.view(&item)?, &mut gradient); continue }
//!             Take::Joined(joined) => { group_changed(&mut drafter, joined)?; continue }
//!             Take::Leave => break,
//!             Take::Close => {}
//!         }
//!         if let Closed::Joined(joined) = drafter.close(Vote::default())? {
//!             group_changed(&mut drafter, joined)?;
//!             continue;
//!         }
//!         let agreed = match drafter.wait_reduce()? {
//!             Reduce::Agreed(agreed) => agreed,
//!             Reduce::Joined(joined) => { group_changed(&mut drafter, joined)?; continue }
//!             Reduce::Leave => break,
//!         };
//!         // Nobody has items: nothing to reduce, and no optimizer step.
//!         let healthy = agreed.items() == 0 || drafter.all_reduce(&mut gradient)? == Reduced::Done;
//!         match drafter.settle(healthy)? {
//!             Settled::Committed => {
//!                 if agreed.items() > 0 { optimizer_step(&gradient); }
//!                 drafter.finish_step()?;
//!                 gradient.fill(0.0);
//!                 // Here: the line of trained.jsonl, `agreed.evaluate()`.
//!                 if agreed.step % save_every == 0 { checkpoint(&mut drafter, false)?; }
//!             }
//!             Settled::Aborted(joined) => {
//!                 group_changed(&mut drafter, joined)?;
//!                 gradient.fill(0.0); // the same items once more, from the same weights
//!                 for item in drafter.items() { micro_step(drafter.view(item)?, &mut gradient); }
//!             }
//!             Settled::Leave => break,
//!         }
//!     }
//!     checkpoint(&mut drafter, true)?;
//!     drafter.leave()
//! }
//!
//! /// After every change of the group: weights for newcomers, and a new communicator where one is used.
//! fn group_changed(drafter: &mut Drafter, joined: Joined) -> Result<()> {
//!     if joined.send != 0 { drafter.send_state(joined.send, 123, fill_state)?; }
//!     Ok(())
//! }
//!
//! /// The lowest member writes; when the group changes, whoever is lowest then looks again.
//! fn checkpoint(drafter: &mut Drafter, last: bool) -> Result<()> {
//!     let step = drafter.committed();
//!     while drafter.segment().saved() < step {
//!         match drafter.wait_save()? {
//!             Save::Write => {
//!                 save(&drafter.segment().export_ledger(step));
//!                 drafter.mark_saved(step);
//!             }
//!             Save::Joined(joined) => group_changed(drafter, joined)?,
//!             Save::NotMine if !last => break,
//!             // Nobody leaves while the last checkpoint could be lost.
//!             Save::NotMine => if let Some(joined) = drafter.wait_saved(step)? {
//!                 group_changed(drafter, joined)?;
//!             },
//!         }
//!     }
//!     Ok(())
//! }
//! ```
//!
//! [`Agreed`] lists every member's units in the order taken, which is what `trained.jsonl` records: the
//! lowest member writes the line after the commit, and whoever is lowest after a change of the group looks
//! whether it is there.

mod atomics;
mod budget;
mod drafter;
mod error;
mod eval;
mod finish;
mod geometry;
mod label;
mod layout;
mod ledger;
#[cfg(feature = "loom")]
mod lines;
mod memory;
mod payload;
mod recovery;
mod reduce;
mod seat;
mod segment;
mod slot;
mod snapshot;
mod step;
mod target;
#[cfg(test)]
pub(crate) mod testing;
mod wake;
mod words;

pub use drafter::{Closed, Drafter, Entry, Item, Joined, Reduce, Save, Settled, Take};
pub use error::{Result, ShmError};
pub use finish::{FinishView, Stop, StopReason};
pub use geometry::{Dtype, Geometry, units_per_step};
pub use label::{Label, install_label_hook};
pub use ledger::{LedgerCounts, LedgerImage};
#[cfg(feature = "loom")]
pub use lines::Grip;
pub use payload::{Filling, View};
pub use recovery::{Fate, Quarantined, Recovered, Recovery, UNIQUE_ID_BYTES};
pub use reduce::{Received, Reduced, Sent};
pub use seat::{Activity, During, LiveSeat, Role, SeatState, now_ns};
pub use segment::{RunId, Segment};
pub use slot::SlotHeader;
pub use snapshot::{
    LeaseView, Observer, RecordView, RingCounts, SeatView, SlotView, Snapshot, StepView,
};
pub use step::{Agreed, MemberRecord, Vote};
pub use target::{Claim, Lease, Next, Target, UnitInfo};
pub use wake::Interrupt;
pub use words::{
    BudgetWord, LedgerWord, MAX_DRAFTERS, MAX_TARGETS, QUARANTINE_DEATHS, SlotPhase, SlotWord,
    StepState, StepWord, UnitState,
};
