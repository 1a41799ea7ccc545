//! Collectives through shared memory: an all-reduce for CPUs, and the newcomer's weights, in pieces.

use std::sync::atomic::fence;

use super::atomics::{Acquire, Relaxed, Release, plain};
use super::drafter::Drafter;
use super::error::{Result, ShmError};
use super::seat::{Activity, SeatState};
use super::segment::Segment;
use super::step::ranks;
use super::wake::{On, Until};
use super::words::{BudgetWord, stamp};

/// Answer to a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduced {
    /// The values are the sum over all members.
    Done,
    /// The group has changed: the values are garbage; [`Drafter::settle`] with `healthy` false.
    Moved,
}

/// Answer to sending one's state to newcomers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// Every newcomer has it.
    Done,
    /// The group has changed: whoever joins next is told who needs what.
    Moved,
}

/// Answer to receiving a member's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// It is complete.
    Done,
    /// The group has changed: drop what came and receive again.
    Again,
    /// There is nothing left to train: leave.
    Leave,
}

const PIECE_BITS: u32 = 50;

fn piece_word(generation: u32, piece: u64) -> u64 {
    (u64::from(generation) << PIECE_BITS) | piece
}

impl Drafter {
    /// Sums `values` over all members, in rank order, so that the result does not depend on timing and is
    /// the same bits everywhere. All members call it with equal lengths, in the same order, between
    /// [`Drafter::wait_reduce`] and [`Drafter::settle`].
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`] outside REDUCE; [`ShmError::Geometry`] without reduce buffers;
    /// [`ShmError::Deadline`] naming the ranks that did not come; [`ShmError::Interrupted`].
    pub fn all_reduce(&mut self, values: &mut [f32]) -> Result<Reduced> {
        self.expect_reducing("all_reduce")?;
        let most = self.segment().geometry().reduce_floats as usize;
        if most == 0 {
            let (what, allowed) = ("reduce_floats", "at least 1 for this collective".to_owned());
            return Err(ShmError::Geometry {
                what,
                value: 0,
                allowed,
            });
        }
        let members: Vec<u32> = ranks(self.agreed).collect();
        if members.len() == 1 {
            return Ok(if self.moved() {
                Reduced::Moved
            } else {
                Reduced::Done
            });
        }
        let _doing = self
            .live()
            .during(Activity::AllReduce, u64::from(self.agreed));
        for piece in values.chunks_mut(most) {
            if self.reduce_piece(piece, &members)? == Reduced::Moved {
                return Ok(Reduced::Moved);
            }
        }
        Ok(Reduced::Done)
    }

    fn reduce_piece(&mut self, piece: &mut [f32], members: &[u32]) -> Result<Reduced> {
        let segment = self.segment().clone();
        let memory = segment.memory();
        let sum = memory.reduce_buffer(segment.geometry().drafters as usize);
        let len = piece.len();
        // SAFETY: (also for the blocks below) the buffers hold `reduce_floats` elements, at least `len`.
        // Nobody else touches this rank's buffer before the first barrier, nor the sum outside the slice
        // that its member owns between the barriers. A member in another generation cannot be in REDUCE
        // before this one has left this function, since REDUCE needs its g1.
        unsafe {
            memory
                .reduce_buffer(self.rank as usize)
                .copy_from_nonoverlapping(piece.as_ptr(), len);
        }
        if self.barrier()? == Reduced::Moved {
            return Ok(Reduced::Moved);
        }
        let place = members
            .iter()
            .position(|&rank| rank == self.rank)
            .unwrap_or(0);
        let share = len.div_ceil(members.len());
        let (start, end) = ((place * share).min(len), ((place + 1) * share).min(len));
        for (order, &rank) in members.iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                let from = std::slice::from_raw_parts(
                    memory.reduce_buffer(rank as usize).add(start),
                    end - start,
                );
                let into = std::slice::from_raw_parts_mut(sum.add(start), end - start);
                if order == 0 {
                    into.copy_from_slice(from);
                } else {
                    into.iter_mut()
                        .zip(from)
                        .for_each(|(sum, value)| *sum += value);
                }
            }
        }
        if self.barrier()? == Reduced::Moved {
            return Ok(Reduced::Moved);
        }
        // SAFETY: as above; nobody writes the sum again before every member has reached the next piece's
        // first barrier, which this one does after this copy.
        unsafe { sum.copy_to_nonoverlapping(piece.as_mut_ptr(), len) };
        Ok(Reduced::Done)
    }

    /// Waits until all members have come as far as this one.
    fn barrier(&mut self) -> Result<Reduced> {
        self.barriers += 1;
        let segment = self.segment().clone();
        let words = segment.memory().reduce_words();
        let mine = stamp(self.step, self.generation) | self.barriers;
        // Release: our writes to the buffers come before; partner: the Acquire below.
        words[self.rank as usize].barrier.store(mine, Release);
        segment.wake(On::Reduce);
        let members = self.agreed;
        let late = |rank: &u32| {
            let word = words[*rank as usize].barrier.load(Acquire);
            // Of another step or generation, or not as far.
            BudgetWord::unpack(word).anchors < self.barriers || word >> 26 != mine >> 26
        };
        let until = self.reduce_deadline.map(|deadline| Until {
            what: "the all-reduce",
            deadline,
        });
        self.waiter.wait_until(
            On::Reduce,
            Activity::WaitReduce,
            u64::from(members),
            until,
            || {
                if self.moved() {
                    return Ok(Some(Reduced::Moved));
                }
                Ok(ranks(members)
                    .all(|rank| !late(&rank))
                    .then_some(Reduced::Done))
            },
            || ranks(members).filter(late).collect(),
        )
    }

    /// Sends `total` bytes of state to the newcomers in `newcomers` (of [`super::Joined::send`]); `fill`
    /// is called with (offset, bytes to fill) for each piece, in order.
    ///
    /// # Errors
    /// [`ShmError::Interrupted`].
    pub fn send_state(
        &mut self,
        newcomers: u32,
        total: u64,
        mut fill: impl FnMut(u64, &mut [u8]),
    ) -> Result<Sent> {
        let segment = self.segment().clone();
        let most = segment.geometry().broadcast_bytes as usize & !7;
        let control = &segment.control().broadcast;
        let mut staged = vec![0; most];
        let pieces = total.div_ceil(most as u64).max(1);
        for piece in 1..=pieces {
            let offset = (piece - 1) * most as u64;
            let len = (total - offset).min(most as u64) as usize;
            fill(offset, &mut staged[..len]);
            store_bytes(&segment, &staged[..len]);
            control.bytes.store(len as u64, Relaxed);
            control.total.store(total, Relaxed);
            let word = piece_word(self.generation, piece);
            // Release: the piece comes before; partner: `receive_state`.
            control.piece.store(word, Release);
            segment.wake(On::Reduce);
            if !self.all_received(newcomers, word)? {
                return Ok(Sent::Moved);
            }
        }
        Ok(Sent::Done)
    }

    /// Waits until all newcomers have copied the piece out, or have become members some other way.
    fn all_received(&self, newcomers: u32, word: u64) -> Result<bool> {
        let segment = self.segment();
        let behind = |rank: u32| {
            let seat = segment.geometry().drafter_seat(rank);
            let received = &segment.memory().reduce_words()[rank as usize].received;
            // Acquire: the copy out of the buffer comes before; partner: `receive_state`'s Release. One
            // that has left found nothing to train any more.
            received.load(Acquire) != word
                && segment.seat(seat).identity.needs_state.load(Acquire) == 1
                && segment.seat_state(seat) != SeatState::Left
        };
        self.waiter
            .wait(On::Reduce, Activity::WaitState, newcomers.into(), || {
                if self.moved() {
                    return Ok(Some(false));
                }
                Ok((!ranks(newcomers).any(behind)).then_some(true))
            })
    }

    /// Receives a member's state; `take` is called with (offset, bytes, total) for each piece, in order.
    /// After [`Received::Done`] this drafter is like any other member.
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`] unless this is a replacement that has entered; [`ShmError::Orphaned`];
    /// [`ShmError::Interrupted`].
    pub fn receive_state(&mut self, mut take: impl FnMut(u64, &[u8], u64)) -> Result<Received> {
        self.expect_receiving()?;
        let segment = self.segment().clone();
        let control = &segment.control().broadcast;
        let mut copied = vec![0; segment.geometry().broadcast_bytes as usize & !7];
        let (mut offset, mut piece) = (0, 1);
        loop {
            let word = piece_word(self.generation, piece);
            let waiter = self.waiter.clone();
            let came = waiter.wait(On::Reduce, Activity::WaitState, 0, || {
                if let Some(other) = self.poll_receive()? {
                    return Ok(Some(other));
                }
                // Acquire: partner: `send_state`.
                Ok((control.piece.load(Acquire) == word).then_some(Received::Done))
            })?;
            if came != Received::Done {
                return Ok(came);
            }
            let len = (control.bytes.load(Relaxed) as usize).min(copied.len());
            let total = control.total.load(Relaxed);
            load_bytes(&segment, &mut copied[..len]);
            // The sender of a newer generation may have written over the piece under us; its step word came
            // before its bytes. Partner: `store_bytes`.
            fence(Acquire);
            if self.moved() {
                continue;
            }
            take(offset, &copied[..len], total);
            offset += len as u64;
            piece += 1;
            // Release: our reads come before; partner: `all_received`.
            segment.memory().reduce_words()[self.rank as usize]
                .received
                .store(word, Release);
            segment.wake(On::Reduce);
            if offset >= total {
                self.received();
                return Ok(Received::Done);
            }
        }
    }

    /// Why a replacement should not go on waiting for a piece: never [`Received::Done`].
    ///
    /// # Errors
    /// [`ShmError::OutOfOrder`] unless this is a replacement that has entered; [`ShmError::Orphaned`].
    pub fn poll_receive(&mut self) -> Result<Option<Received>> {
        self.expect_receiving()?;
        if self.moved() {
            // A newer generation: adopt it and start again.
            return Ok(self.poll_enter()?.map(|entered| match entered {
                Some(_) => Received::Again,
                None => Received::Leave,
            }));
        }
        let segment = self.segment();
        let holders = segment.members_with_state();
        if holders == 0 && !self.moved() {
            // It stays so: whoever had weights in this generation is dead, and newcomers have none.
            let (rank, generation) = (self.rank, self.generation);
            return Err(ShmError::Orphaned { rank, generation });
        }
        let left = |rank| {
            let seat = segment.geometry().drafter_seat(rank);
            segment.seat_state(seat) == SeatState::Left
        };
        Ok(ranks(holders).all(left).then_some(Received::Leave))
    }
}

/// The broadcast buffer as words, so that a reader which has been overtaken by a new generation races with
/// atomics and not with plain memory.
fn broadcast_words(segment: &Segment) -> &[plain::AtomicU64] {
    let len = segment.geometry().broadcast_bytes as usize / 8;
    // SAFETY: the buffer is that long and page-aligned; all accesses to it go through here.
    unsafe { std::slice::from_raw_parts(segment.memory().broadcast_buffer().cast(), len) }
}

fn store_bytes(segment: &Segment, bytes: &[u8]) {
    // Release: our look at the step word comes before the bytes; partner: the fence in `receive_state`.
    fence(Release);
    for (word, chunk) in broadcast_words(segment).iter().zip(bytes.chunks(8)) {
        let mut padded = [0; 8];
        padded[..chunk.len()].copy_from_slice(chunk);
        word.store(u64::from_le_bytes(padded), Relaxed);
    }
}

fn load_bytes(segment: &Segment, bytes: &mut [u8]) {
    for (word, chunk) in broadcast_words(segment).iter().zip(bytes.chunks_mut(8)) {
        chunk.copy_from_slice(&word.load(Relaxed).to_le_bytes()[..chunk.len()]);
    }
}
