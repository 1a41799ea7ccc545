//! A target's handle: lease, claim, fill, publish, and the end of the run.

use super::error::{Result, ShmError};
use super::payload::{Filling, Payload};
use super::seat::{Activity, LiveSeat};
use super::segment::Segment;
use super::slot::SlotHeader;
use super::wake::{Interrupt, On, Waiter};

/// A unit that this target must prefill. Dropping it without publishing leaves it leased until the
/// target's death is recovered.
#[derive(Debug, PartialEq, Eq)]
pub struct Lease {
    unit: u64,
    eval: bool,
}

impl Lease {
    /// Unit, or eval unit.
    pub fn unit(&self) -> u64 {
        self.unit
    }

    /// Whether it is a held-out unit.
    pub fn is_eval(&self) -> bool {
        self.eval
    }
}

/// What a target does next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Prefill this unit.
    Unit(Lease),
    /// Every unit is made and the drafters have left: leave.
    Finished,
    /// A stop was asked for: leave.
    Stopped,
}

/// Answer to a claim.
#[derive(Debug)]
pub enum Claim {
    /// Fill this slot.
    Filling(Filling),
    /// A stop was asked for: leave.
    Stopped,
}

/// What a target knows of a unit when it publishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitInfo {
    /// Σ over documents of min(A, eligible positions); at least 1.
    pub anchors: u32,
    /// The hidden states are not finite: train it with weight 0.
    pub weightless: bool,
}

/// Most slots that one target may be filling at once; the ring is sized for it.
const MOST_FILLING: u32 = 2;

/// One target's seat.
#[derive(Debug)]
pub struct Target {
    waiter: Waiter,
    seat: u32,
    incarnation: u32,
    filling: u32,
    /// Every training unit before this one is settled, unless the run has been rolled back more than
    /// `epoch` times.
    floor: u64,
    epoch: u64,
}

impl Segment {
    /// Takes the seat of target `index` (0-based) for this process. Incarnations count from 1.
    ///
    /// # Errors
    /// [`ShmError::Seat`] when it is not vacant.
    pub fn target(&self, index: u32, incarnation: u32) -> Result<Target> {
        if index >= self.geometry().targets {
            let why = format!("there are {} targets", self.geometry().targets);
            return Err(ShmError::Seat {
                seat: index,
                incarnation,
                why,
            });
        }
        let live = self.sit(index, incarnation, false)?;
        let waiter = Waiter {
            segment: self.clone(),
            live,
            interrupt: Interrupt::default(),
        };
        Ok(Target {
            waiter,
            seat: index,
            incarnation,
            filling: 0,
            floor: 0,
            epoch: 0,
        })
    }
}

impl Target {
    /// The live record that others watch.
    pub fn live(&self) -> &LiveSeat {
        &self.waiter.live
    }

    /// Ends this handle's waits from another thread.
    pub fn interrupt(&self) -> Interrupt {
        self.waiter.interrupt.clone()
    }

    /// The segment.
    pub fn segment(&self) -> &Segment {
        &self.waiter.segment
    }

    /// p0 without waiting: the next unit, held-out ones first; `None` when nothing is pending. For a
    /// forward pass over several units.
    pub fn try_lease(&mut self) -> Option<Lease> {
        let segment = self.segment().clone();
        let epoch = segment.epoch();
        if self.epoch != epoch {
            (self.epoch, self.floor) = (epoch, 0);
        }
        let eval = segment
            .try_lease_eval(self.seat)
            .map(|unit| Lease { unit, eval: true });
        let lease = eval.or_else(|| {
            let unit = segment.try_lease(self.seat, self.floor)?;
            Some(Lease { unit, eval: false })
        })?;
        self.working_on(&lease);
        Some(lease)
    }

    /// Names the leased unit in hand; a death from here on counts against it. [`Target::try_lease`] names
    /// the unit it returns.
    pub fn working_on(&self, lease: &Lease) {
        self.segment()
            .set_current(self.seat, Some((lease.unit, lease.eval)));
    }

    /// Whether a stop ends this target's work: at once, or when the drafters have left after a whole last
    /// step, since until its checkpoint they may still die.
    pub fn is_stopped(&self) -> bool {
        let segment = self.segment();
        let now = segment.stop().is_some_and(|stop| stop.after == 0);
        segment.stop_reached() && (now || segment.drafters_left())
    }

    /// What to do next; `None` when only somebody else can bring it about.
    ///
    /// When every unit is made the finish bit is set here, and the target stays: should all drafters die,
    /// units become pending again.
    pub fn poll_next(&mut self) -> Option<Next> {
        let segment = self.segment().clone();
        if segment.stop_reached() {
            return self.is_stopped().then_some(Next::Stopped);
        }
        if segment.finish_bit(self.seat) {
            // Only a roll-back makes units pending again, and it clears the bit.
            segment.help_publish();
            return segment.drafters_left().then_some(Next::Finished);
        }
        if let Some(lease) = self.try_lease() {
            return Some(Next::Unit(lease));
        }
        // What follows is void if the run is rolled back meanwhile.
        segment.all_settled(&mut self.floor);
        if segment.all_published(self.floor) {
            segment.set_finish_bit(self.seat, self.epoch);
        }
        None
    }

    /// Waits for what to do next.
    ///
    /// # Errors
    /// [`ShmError::Interrupted`].
    pub fn next_work(&mut self) -> Result<Next> {
        if let Some(next) = self.poll_next() {
            return Ok(next);
        }
        self.segment().set_current(self.seat, None);
        let parked = self.segment().finish_bit(self.seat);
        let activity = if parked {
            Activity::Parked
        } else {
            Activity::WaitUnit
        };
        let waiter = self.waiter.clone();
        waiter.wait(On::Items, activity, 0, || Ok(self.poll_next()))
    }

    /// p1 without waiting: a slot for a leased unit of `tokens` tokens in `documents` documents; the lease
    /// comes back when no slot is free.
    ///
    /// # Errors
    /// [`ShmError::TooLarge`] when the unit does not fit; [`ShmError::OutOfOrder`] when two slots are being
    /// filled already.
    pub fn try_claim(
        &mut self,
        lease: Lease,
        tokens: u32,
        documents: u32,
    ) -> Result<std::result::Result<Filling, Lease>> {
        let segment = self.segment().clone();
        let geometry = segment.geometry();
        let unit = lease.unit;
        for (what, value, most) in [
            ("tokens", tokens, geometry.slot_tokens),
            ("documents", documents, geometry.slot_documents),
        ] {
            if value == 0 || value > most {
                let (value, most) = (value.into(), most.into());
                return Err(ShmError::TooLarge {
                    unit,
                    what,
                    value,
                    most,
                });
            }
        }
        if self.filling >= MOST_FILLING {
            let state = format!("{} slots are being filled; publish one first", self.filling);
            return Err(ShmError::OutOfOrder {
                seat: self.seat,
                called: "claim",
                state,
            });
        }
        let claimed = if lease.eval {
            let slot = geometry.slots + unit as u32;
            segment
                .try_claim_slot(slot, self.seat)
                .map(|generation| (slot, generation))
        } else {
            segment.try_claim(self.seat)
        };
        let Some((slot, generation)) = claimed else {
            return Ok(Err(lease));
        };
        self.filling += 1;
        let payload = Payload::new(&segment, slot, tokens, documents);
        let eval = lease.eval;
        Ok(Ok(Filling {
            segment,
            payload,
            slot,
            generation,
            unit,
            eval,
            tokens,
            documents,
        }))
    }

    /// p1: waits for a free slot for a leased unit of `tokens` tokens in `documents` documents.
    ///
    /// # Errors
    /// As [`Target::try_claim`]; [`ShmError::Interrupted`].
    pub fn claim(&mut self, lease: Lease, tokens: u32, documents: u32) -> Result<Claim> {
        let waiter = self.waiter.clone();
        let unit = lease.unit;
        let mut lease = Some(lease);
        waiter.wait(On::Space, Activity::WaitSpace, unit, || {
            if self.is_stopped() {
                return Ok(Some(Claim::Stopped));
            }
            let asked = lease.take().expect("put back whenever no slot was free");
            match self.try_claim(asked, tokens, documents)? {
                Ok(filling) => Ok(Some(Claim::Filling(filling))),
                Err(back) => {
                    lease = Some(back);
                    Ok(None)
                }
            }
        })
    }

    /// p2, p3, p4: publishes a slot whose payload is complete (after the device-to-host copy's event).
    ///
    /// # Errors
    /// [`ShmError::TooLarge`] for a unit without anchors or with more than a step can count;
    /// [`ShmError::Stolen`] when this living process was recovered as dead.
    pub fn publish(&mut self, filling: Filling, info: UnitInfo) -> Result<()> {
        let Filling {
            segment,
            payload,
            slot,
            generation,
            unit,
            eval,
            tokens,
            documents,
        } = filling;
        let most = super::words::MAX_ANCHORS / 2;
        if info.anchors == 0 || u64::from(info.anchors) > most {
            let (what, value) = ("anchors", info.anchors.into());
            return Err(ShmError::TooLarge {
                unit,
                what,
                value,
                most,
            });
        }
        let payload_sum = if segment.geometry().check_payload {
            // SAFETY: the slot is ours until it is published.
            unsafe { payload.checksum() }
        } else {
            0
        };
        let header = SlotHeader {
            unit,
            sequence: if eval { unit } else { segment.draw_sequence() },
            anchors: info.anchors,
            tokens,
            documents,
            weightless: info.weightless,
            producer: self.seat,
            incarnation: self.incarnation,
            payload_sum,
        };
        segment.write_header(slot, &header);
        segment.publish_slot(slot, generation, self.seat)?;
        self.filling -= 1;
        self.live().count(tokens.into(), 1);
        Ok(())
    }

    /// Leaves in good order.
    pub fn leave(self) {
        self.segment().set_current(self.seat, None);
        self.segment().mark_left(self.seat);
        self.segment().wake_all();
    }
}
