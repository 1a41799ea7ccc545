//! Single behaviours of the shared memory, through its public interface.
#![cfg(not(feature = "loom"))]

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use slipstream::shm::*;

fn geometry(targets: u32, drafters: u32, units: u64) -> Geometry {
    Geometry {
        targets,
        drafters,
        slots: Geometry::slots_needed(4, drafters, targets) as u32,
        units,
        eval_units: 0,
        slot_tokens: 8,
        slot_documents: 2,
        captured_width: 6,
        hidden: 2,
        final_hidden: false,
        dtype: Dtype::F32,
        batch_anchors: 4,
        units_per_step: 4,
        reduce_floats: 5,
        broadcast_bytes: 64,
        check_payload: true,
        first_step: 1,
    }
}

fn segment(geometry: &Geometry) -> Segment {
    Segment::create(geometry, RunId::fresh()).unwrap()
}

fn fill(slot: &mut Filling) {
    let unit = slot.unit();
    slot.captured::<f32>().unwrap().fill(unit as f32);
    slot.ids().fill(unit as u32);
    slot.mask().fill(1);
    slot.offsets().copy_from_slice(&[0, 4]);
    slot.rows().fill(unit as u32);
}

const PLAIN: UnitInfo = UnitInfo {
    anchors: 1,
    weightless: false,
};

/// Both close the step and see it closed.
fn close_together(mut drafters: [&mut Drafter; 2]) {
    for drafter in &mut drafters {
        assert_eq!(drafter.close(Vote::default()).unwrap(), Closed::Closed);
    }
    for drafter in &mut drafters {
        assert!(matches!(drafter.wait_reduce().unwrap(), Reduce::Agreed(_)));
    }
}

/// Leases and publishes the next unit.
fn make(target: &mut Target) -> u64 {
    let Some(Next::Unit(lease)) = target.poll_next() else {
        panic!("nothing to lease");
    };
    let unit = lease.unit();
    let mut slot = target.try_claim(lease, 4, 1).unwrap().unwrap();
    fill(&mut slot);
    target.publish(slot, PLAIN).unwrap();
    unit
}

fn founder(segment: &Segment, rank: u32, incarnation: u32) -> Drafter {
    let mut drafter = segment.drafter(rank, incarnation, Entry::Founder).unwrap();
    drafter.poll_enter().unwrap().unwrap().unwrap();
    drafter
}

fn take(drafter: &mut Drafter) -> Item {
    match drafter.poll_take().unwrap() {
        Some(Take::Item(item)) => item,
        other => panic!("no item but {other:?}"),
    }
}

fn make_many(target: &mut Target, count: usize) {
    for _ in 0..count {
        make(target);
    }
}

fn take_many(drafter: &mut Drafter, count: usize) {
    for _ in 0..count {
        take(drafter);
    }
}

fn commit(drafter: &mut Drafter) -> Agreed {
    assert_eq!(drafter.close(Vote::default()).unwrap(), Closed::Closed);
    let Reduce::Agreed(agreed) = drafter.wait_reduce().unwrap() else {
        panic!("the group has changed");
    };
    assert_eq!(drafter.settle(true).unwrap(), Settled::Committed);
    drafter.finish_step().unwrap();
    agreed
}

// ---- geometry ---------------------------------------------------------------------------------------------

#[test]
fn a_ring_that_cannot_carry_a_step_is_refused_with_the_numbers() {
    let mut small = geometry(2, 1, 10);
    small.slots -= 1;
    let error = Segment::create(&small, RunId::fresh()).unwrap_err();
    let text = error.to_string();
    for part in [
        "8 ring slots",
        "at least 9",
        "units per step 4",
        "drafters 1",
        "targets 2",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn units_per_step_counts_the_smallest() {
    assert_eq!(units_per_step([5, 1, 9, 2], 1, 8), 3);
    assert_eq!(units_per_step([5, 1, 9, 2], 2, 8), 5);
    assert_eq!(units_per_step([5, 1, 9, 2], 1, 1), 1);
    assert_eq!(units_per_step([5, 1], 1, 100), 2);
    assert_eq!(units_per_step([], 1, 8), 1);
}

#[test]
fn counts_out_of_range_are_named() {
    type Change = fn(&mut Geometry);
    let changes: [(&str, Change); 5] = [
        ("drafters", |g| g.drafters = 13),
        ("targets", |g| g.targets = 0),
        ("units", |g| g.units = 0),
        ("first_step", |g| g.first_step = 0),
        ("slot_documents", |g| g.slot_documents = 9),
    ];
    for (name, change) in changes {
        let mut wrong = geometry(1, 1, 1);
        change(&mut wrong);
        let text = wrong.check().unwrap_err().to_string();
        assert!(text.contains(name), "{text}");
    }
}

#[test]
fn a_geometry_survives_json() {
    let made = geometry(3, 2, 77);
    let text = serde_json::to_string(&made).unwrap();
    assert_eq!(serde_json::from_str::<Geometry>(&text).unwrap(), made);
}

// ---- handles ----------------------------------------------------------------------------------------------

#[test]
fn a_seat_is_taken_once_and_reused_only_after_its_recovery() {
    let segment = segment(&geometry(1, 1, 4));
    let first = segment.target(0, 1).unwrap();
    assert!(matches!(segment.target(0, 2), Err(ShmError::Seat { .. })));
    drop(first);
    assert!(
        matches!(segment.target(0, 2), Err(ShmError::Seat { .. })),
        "a drop is a death"
    );
    Recovery::new(&segment, true).target_died(0, Fate::Respawn, |_| {});
    assert!(
        matches!(segment.target(0, 1), Err(ShmError::Seat { .. })),
        "the same incarnation"
    );
    segment.target(0, 2).unwrap();
    assert!(
        matches!(segment.target(1, 1), Err(ShmError::Seat { .. })),
        "a drafter's seat"
    );
}

#[test]
fn the_order_of_a_step_is_kept() {
    let segment = segment(&geometry(1, 1, 4));
    let mut drafter = segment.drafter(0, 1, Entry::Founder).unwrap();
    let refused = |result: ShmError| matches!(result, ShmError::OutOfOrder { .. });
    assert!(refused(drafter.poll_take().unwrap_err()));
    drafter.poll_enter().unwrap();
    assert!(refused(drafter.finish_step().unwrap_err()));
    assert!(refused(drafter.settle(true).unwrap_err()));
    assert!(refused(drafter.all_reduce(&mut [1.0]).unwrap_err()));
    assert!(refused(drafter.prefetch().unwrap_err()));
    drafter.close(Vote::default()).unwrap();
    assert!(refused(drafter.poll_take().unwrap_err()));
    assert!(refused(drafter.settle(true).unwrap_err()));
}

#[test]
fn units_that_do_not_fit_are_refused() {
    let segment = segment(&geometry(1, 1, 4));
    let mut target = segment.target(0, 1).unwrap();
    let mut lease = || target.try_lease().unwrap();
    let (first, second, third) = (lease(), lease(), lease());
    for (lease, tokens, documents) in [(first, 9, 1), (second, 4, 3)] {
        let error = target.try_claim(lease, tokens, documents).unwrap_err();
        assert!(matches!(error, ShmError::TooLarge { .. }), "{error}");
    }
    let slot = target.try_claim(third, 4, 1).unwrap().unwrap();
    let none = UnitInfo {
        anchors: 0,
        ..PLAIN
    };
    assert!(matches!(
        target.publish(slot, none),
        Err(ShmError::TooLarge { .. })
    ));
}

#[test]
fn a_view_has_the_segments_element_size() {
    let mut half = geometry(1, 1, 4);
    half.dtype = Dtype::Bf16;
    let segment = segment(&half);
    let mut target = segment.target(0, 1).unwrap();
    let lease = target.try_lease().unwrap();
    let mut slot = target.try_claim(lease, 4, 1).unwrap().unwrap();
    assert_eq!(slot.captured::<u16>().unwrap().len(), 24);
    assert!(matches!(
        slot.captured::<f32>(),
        Err(ShmError::Element { asked: 4, held: 2 })
    ));
}

#[test]
fn a_third_slot_is_not_claimed_before_one_is_published() {
    let segment = segment(&geometry(1, 1, 4));
    let mut target = segment.target(0, 1).unwrap();
    let leases = [(); 3].map(|()| target.try_lease().unwrap());
    let mut slots = Vec::new();
    for lease in leases {
        match target.try_claim(lease, 4, 1) {
            Ok(slot) => slots.push(slot.unwrap()),
            Err(error) => assert!(matches!(error, ShmError::OutOfOrder { .. }), "{error}"),
        }
    }
    assert_eq!(slots.len(), 2);
}

#[test]
fn a_changed_payload_is_noticed() {
    let segment = segment(&geometry(1, 1, 4));
    let mut target = segment.target(0, 1).unwrap();
    make(&mut target);
    let mut drafter = founder(&segment, 0, 1);
    let item = take(&mut drafter);
    drafter.view(&item).unwrap();
    let (start, _) = segment.payload_range();
    // SAFETY: nobody else looks at the slot in this thread.
    unsafe { *start.add(5) ^= 1 };
    let error = drafter.view(&item).unwrap_err();
    let ShmError::Corrupt {
        slot,
        unit,
        producer,
        ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!((slot, unit, producer), (item.slot(), 0, 0));
}

#[test]
fn a_weightless_unit_says_so() {
    let segment = segment(&geometry(1, 1, 4));
    let mut target = segment.target(0, 1).unwrap();
    let lease = target.try_lease().unwrap();
    let mut slot = target.try_claim(lease, 4, 1).unwrap().unwrap();
    fill(&mut slot);
    let info = UnitInfo {
        anchors: 3,
        weightless: true,
    };
    target.publish(slot, info).unwrap();
    let mut drafter = founder(&segment, 0, 1);
    let header = *take(&mut drafter).header();
    assert_eq!(
        (header.weightless, header.anchors, header.tokens),
        (true, 3, 4)
    );
}

#[test]
fn an_interrupt_ends_a_wait_and_a_bump_wakes_at_once() {
    let segment = segment(&geometry(1, 1, 4));
    let mut drafter = founder(&segment, 0, 1);
    let interrupt = drafter.interrupt();
    let maker = segment.clone();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            let seat = &maker.snapshot().seats[1];
            assert_eq!((seat.activity, seat.waiting), (Activity::WaitItem, true));
            assert!(seat.for_ns > 50_000_000);
            make(&mut maker.target(0, 1).unwrap());
        });
        assert!(matches!(drafter.take().unwrap(), Take::Item(_)));
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            interrupt.set();
        });
        assert!(matches!(
            drafter.take(),
            Err(ShmError::Interrupted { seat: 1, .. })
        ));
    });
    let (busy, waiting) = segment.snapshot().seats[1].busy_and_waiting_ns();
    assert!(waiting > 100_000_000, "{busy} {waiting}");
}

/// DESIGN: an idle ring costs under 2 % of a core per process.
#[test]
fn waiting_costs_next_to_nothing() {
    let segment = segment(&geometry(1, 1, 4));
    let mut drafter = founder(&segment, 0, 1);
    let interrupt = drafter.interrupt();
    let spent = std::thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            let clock = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            let before = clock();
            assert!(drafter.take().is_err());
            let after = clock();
            let ns =
                (after.tv_sec - before.tv_sec) * 1_000_000_000 + after.tv_nsec - before.tv_nsec;
            Duration::from_nanos(ns as u64)
        });
        std::thread::sleep(Duration::from_secs(1));
        interrupt.set();
        waiter.join().unwrap()
    });
    println!("one second of waiting costs {spent:?}");
    assert!(spent < Duration::from_millis(20), "{spent:?}");
}

// ---- steps ------------------------------------------------------------------------------------------------

#[test]
fn units_are_taken_in_the_order_published_and_up_to_the_batch() {
    let segment = segment(&geometry(1, 1, 7));
    let mut target = segment.target(0, 1).unwrap();
    make_many(&mut target, 6);
    let mut drafter = founder(&segment, 0, 1);
    let taken: Vec<u64> = (0..4).map(|_| take(&mut drafter).unit()).collect();
    assert_eq!(taken, [0, 1, 2, 3]);
    assert_eq!(drafter.poll_take().unwrap(), Some(Take::Close));
    assert_eq!(segment.budget().anchors, 4);
}

#[test]
fn a_prefetched_unit_belongs_to_the_next_step() {
    let segment = segment(&geometry(1, 1, 7));
    let mut target = segment.target(0, 1).unwrap();
    make_many(&mut target, 6);
    let mut drafter = founder(&segment, 0, 1);
    take_many(&mut drafter, 4);
    drafter.close(Vote::default()).unwrap();
    let ahead = drafter.prefetch().unwrap().unwrap();
    assert_eq!(ahead.unit(), 4);
    assert_eq!(drafter.prefetch().unwrap(), None, "one at a time");
    let tag = |slot: u32| segment.snapshot().slots[slot as usize].tag;
    assert_eq!(tag(ahead.slot()), None);
    assert_eq!(segment.budget().anchors, 4);
    drafter.wait_reduce().unwrap();
    drafter.settle(true).unwrap();
    drafter.finish_step().unwrap();
    assert_eq!(segment.unit(4).state, UnitState::Leased);
    let item = take(&mut drafter);
    assert_eq!((item.unit(), item.was_prefetched()), (4, true));
    assert_eq!(tag(ahead.slot()), Some(2));
    assert_eq!(
        segment.budget(),
        BudgetWord {
            step: 2,
            generation: 1,
            anchors: 1
        }
    );
}

#[test]
fn members_learn_each_others_units_votes_and_hashes() {
    let segment = segment(&geometry(1, 2, 7));
    let mut target = segment.target(0, 1).unwrap();
    make_many(&mut target, 4);
    let mut drafters = [founder(&segment, 0, 1), founder(&segment, 1, 1)];
    let order = [1, 0, 1, 1];
    for rank in order {
        take(&mut drafters[rank]);
    }
    let votes = [(false, 11), (true, 12)].map(|(evaluate, hash)| Vote {
        stop: false,
        evaluate,
        hash,
    });
    for (drafter, vote) in drafters.iter_mut().zip(votes) {
        assert_eq!(drafter.poll_take().unwrap(), Some(Take::Close));
        drafter.close(vote).unwrap();
    }
    let agreed = drafters
        .each_mut()
        .map(|drafter| match drafter.wait_reduce().unwrap() {
            Reduce::Agreed(agreed) => agreed,
            other => panic!("{other:?}"),
        });
    assert_eq!(agreed[0], agreed[1]);
    let units: Vec<_> = agreed[0]
        .members
        .iter()
        .map(|member| member.units.clone())
        .collect();
    assert_eq!(units, [vec![1], vec![0, 2, 3]]);
    assert_eq!((agreed[0].items(), agreed[0].anchors()), (4, 4));
    assert_eq!((agreed[0].stop(), agreed[0].evaluate()), (false, true));
    assert_eq!(agreed[0].hash_mismatch(), Some(vec![(0, 11), (1, 12)]));
    // Nobody is committed before both have reduced.
    drafters[0].arrive(true).unwrap();
    assert_eq!(drafters[0].poll_settled().unwrap(), None);
    drafters[1].arrive(true).unwrap();
    for drafter in &mut drafters {
        assert_eq!(drafter.poll_settled().unwrap(), Some(Settled::Committed));
        drafter.finish_step().unwrap();
    }
    assert_eq!(
        segment.unit(2),
        LedgerWord {
            state: UnitState::Done,
            seat: 2,
            deaths: 0,
            step: 1,
        }
    );
}

#[test]
fn a_drafter_without_items_waits_for_those_of_another() {
    let segment = segment(&geometry(1, 2, 7));
    let mut target = segment.target(0, 1).unwrap();
    make_many(&mut target, 4);
    let (mut busy, mut idle) = (founder(&segment, 0, 1), founder(&segment, 1, 1));
    take_many(&mut busy, 4);
    assert_eq!(
        idle.poll_take().unwrap(),
        None,
        "the batch is reached, but no seat shows items"
    );
    busy.close(Vote::default()).unwrap();
    assert_eq!(idle.poll_take().unwrap(), Some(Take::Close));
}

#[test]
fn a_stop_now_closes_the_step_at_hand_and_one_after_a_step_lets_it_fill() {
    let segment = segment(&geometry(1, 1, 40));
    let mut target = segment.target(0, 1).unwrap();
    let mut drafter = founder(&segment, 0, 1);
    segment.request_stop(Some(1), StopReason::MaxSteps);
    make(&mut target);
    take(&mut drafter);
    assert_eq!(drafter.poll_take().unwrap(), None, "step 1 fills up first");
    make_many(&mut target, 3);
    take_many(&mut drafter, 3);
    assert!(commit(&mut drafter).stop());
    assert_eq!(drafter.poll_take().unwrap(), Some(Take::Leave));
    assert_eq!(
        target.poll_next(),
        None,
        "drafters could still die before the checkpoint"
    );
    drafter.leave().unwrap();
    assert_eq!(target.poll_next(), Some(Next::Stopped));

    let segment = self::segment(&geometry(1, 1, 40));
    let mut target = segment.target(0, 1).unwrap();
    let mut drafter = founder(&segment, 0, 1);
    make(&mut target);
    take(&mut drafter);
    segment.request_stop(None, StopReason::Interrupt);
    segment.request_stop(Some(9), StopReason::MaxSteps);
    assert_eq!(segment.stop().unwrap().why, StopReason::Interrupt);
    assert_eq!(drafter.poll_take().unwrap(), Some(Take::Close));
    assert!(commit(&mut drafter).stop());
    assert_eq!(drafter.poll_take().unwrap(), Some(Take::Leave));
    assert_eq!(target.poll_next(), Some(Next::Stopped));
    assert_eq!(segment.ledger_counts().done, 1);
}

#[test]
fn an_all_reduce_sums_in_rank_order_whoever_comes_first() {
    let values = |rank: u32| -> Vec<f32> {
        (0..13)
            .map(|i| 1e7 / (1.0 + rank as f32) + i as f32 * 0.3)
            .collect()
    };
    let expected: Vec<f32> = (0..13)
        .map(|i| {
            (0..3)
                .map(|rank| values(rank)[i])
                .reduce(|a, b| a + b)
                .unwrap()
        })
        .collect();
    for delayed in 0..3 {
        let segment = segment(&geometry(1, 3, 9));
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let (segment, expected) = (segment.clone(), expected.clone());
                scope.spawn(move || {
                    let mut drafter = founder(&segment, rank, 1);
                    segment.request_stop(None, StopReason::Interrupt);
                    drafter.close(Vote::default()).unwrap();
                    drafter.wait_reduce().unwrap();
                    if rank == delayed {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    for _ in 0..2 {
                        let mut mine = values(rank);
                        assert_eq!(drafter.all_reduce(&mut mine).unwrap(), Reduced::Done);
                        assert_eq!(mine, expected);
                    }
                    assert_eq!(drafter.settle(true).unwrap(), Settled::Committed);
                });
            }
        });
    }
}

#[test]
fn a_member_that_does_not_come_is_named_at_the_deadline() {
    let segment = segment(&geometry(1, 2, 9));
    let (mut here, mut late) = (founder(&segment, 0, 1), founder(&segment, 1, 1));
    close_together([&mut here, &mut late]);
    here.set_reduce_deadline(Some(Duration::from_millis(80)));
    let error = here.all_reduce(&mut [1.0]).unwrap_err();
    assert!(
        matches!(&error, ShmError::Deadline { ranks, .. } if ranks == &[1]),
        "{error}"
    );
}

#[test]
fn a_death_inside_the_all_reduce_frees_the_survivor_within_100_ms() {
    let segment = segment(&geometry(1, 2, 9));
    let mut target = segment.target(0, 1).unwrap();
    make_many(&mut target, 4);
    let (mut here, mut dead) = (founder(&segment, 0, 1), founder(&segment, 1, 1));
    take(&mut here);
    take_many(&mut dead, 3);
    close_together([&mut here, &mut dead]);
    drop(dead);
    std::thread::scope(|scope| {
        let survivor = scope.spawn(|| {
            assert_eq!(here.all_reduce(&mut [1.0; 7]).unwrap(), Reduced::Moved);
            let settled = here.settle(false).unwrap();
            (settled, Instant::now())
        });
        std::thread::sleep(Duration::from_millis(100));
        segment.mark_suspect(2);
        assert_eq!(segment.suspects(), 2);
        let told = Instant::now();
        let report = Recovery::new(&segment, true)
            .drafter_died(1, None, |_| {})
            .unwrap();
        assert_eq!((report.redelivered.len(), report.members), (3, 1));
        let (settled, noticed) = survivor.join().unwrap();
        let joined = Joined {
            step: 1,
            generation: 2,
            members: 1,
            send: 0,
        };
        assert_eq!(settled, Settled::Aborted(joined));
        assert!(noticed - told < Duration::from_millis(100));
    });
    assert_eq!(segment.suspects(), 0);
    assert_eq!(here.items().len(), 1);
    assert_eq!(
        segment.budget(),
        BudgetWord {
            step: 1,
            generation: 2,
            anchors: 1
        }
    );
    take_many(&mut here, 3);
    assert_eq!(commit(&mut here).items(), 4);
}

// ---- ends -------------------------------------------------------------------------------------------------

#[test]
fn the_last_finisher_publishes_one_sentinel_per_drafter() {
    let segment = segment(&geometry(2, 2, 2));
    let mut targets = [segment.target(0, 1).unwrap(), segment.target(1, 1).unwrap()];
    make(&mut targets[0]);
    let lease = targets[1].try_lease().unwrap();
    assert_eq!(targets[0].poll_next(), None);
    assert_eq!(
        segment.finish_view().targets_done,
        0,
        "a leased unit may come back"
    );
    let mut slot = targets[1].try_claim(lease, 4, 1).unwrap().unwrap();
    fill(&mut slot);
    targets[1].publish(slot, PLAIN).unwrap();
    assert_eq!(targets[1].poll_next(), None);
    let view = segment.finish_view();
    assert_eq!((view.targets_done, view.published), (2, 0));
    assert_eq!(targets[0].poll_next(), None);
    let view = segment.finish_view();
    assert_eq!((view.targets_done, view.published, view.taken), (3, 2, 0));
    let mut drafter = founder(&segment, 1, 1);
    take_many(&mut drafter, 2);
    assert_eq!(drafter.poll_take().unwrap(), Some(Take::Close));
    assert_eq!(segment.finish_view().taken, 2);
}

#[test]
fn a_given_up_target_leaves_its_work_to_the_others() {
    let segment = segment(&geometry(2, 1, 2));
    let recovery = Recovery::new(&segment, true);
    let mut targets = [segment.target(0, 1).unwrap(), segment.target(1, 1).unwrap()];
    targets[1].try_lease().unwrap();
    let report = recovery.target_died(1, Fate::GiveUp, |_| {});
    assert_eq!((report.requeued, report.stranded), (vec![0], 0));
    assert_eq!(segment.finish_view().targets_done, 2);
    assert_eq!([make(&mut targets[0]), make(&mut targets[0])], [0, 1]);
    assert_eq!(targets[0].poll_next(), None);
    assert_eq!(segment.finish_view().published, 1);
}

#[test]
fn without_any_target_the_run_has_failed() {
    let segment = segment(&geometry(2, 1, 3));
    let recovery = Recovery::new(&segment, true);
    let mut target = segment.target(0, 1).unwrap();
    make(&mut target);
    target.try_lease().unwrap();
    assert_eq!(recovery.target_died(1, Fate::GiveUp, |_| {}).stranded, 0);
    let report = recovery.target_died(0, Fate::GiveUp, |_| {});
    assert_eq!(report.stranded, 2);
    let view = segment.finish_view();
    assert_eq!(
        (view.targets_done, view.published),
        (2, 0),
        "its bit stays clear"
    );
}

// ---- deaths -----------------------------------------------------------------------------------------------

#[test]
fn three_deaths_of_drafters_quarantine_the_unit_in_hand() {
    let segment = segment(&geometry(1, 1, 2));
    let recovery = Recovery::new(&segment, true);
    let mut target = segment.target(0, 1).unwrap();
    make(&mut target);
    for death in 1..=3 {
        if death > 1 {
            recovery.roll_back(0, 1, None).unwrap();
        }
        let mut drafter = founder(&segment, 0, death);
        let item = take(&mut drafter);
        drafter.view(&item).unwrap();
        drop(drafter);
        let mut saved = Vec::new();
        let report = recovery
            .drafter_died(0, None, |unit| {
                let (header, view) = unit.payload.unwrap();
                saved.push((unit.unit, unit.deaths, header.tokens, view.ids().to_vec()));
            })
            .unwrap();
        if death < 3 {
            assert_eq!(
                (report.redelivered, segment.unit(0).deaths),
                (vec![0], death as u8)
            );
            assert!(saved.is_empty());
        } else {
            assert_eq!(report.quarantined, [(0, false)]);
            assert_eq!(saved, [(0, 3, 4, vec![0; 4])]);
        }
    }
    assert_eq!(segment.unit(0).state, UnitState::Quarantined);
    assert_eq!(segment.ring_counts().free, segment.geometry().slots);
}

#[test]
fn three_deaths_of_targets_quarantine_the_unit_in_hand() {
    let segment = segment(&geometry(1, 1, 2));
    let recovery = Recovery::new(&segment, true);
    for death in 1..=3 {
        let mut target = segment.target(0, death).unwrap();
        let lease = target.try_lease().unwrap();
        assert_eq!(lease.unit(), 0);
        let slot = target.try_claim(lease, 4, 1).unwrap().unwrap();
        drop((slot, target));
        let mut told = Vec::new();
        let report = recovery.target_died(0, Fate::Respawn, |unit| told.push(unit.deaths));
        assert_eq!(report.freed, 1);
        assert_eq!(told, if death == 3 { vec![3] } else { vec![] });
    }
    assert_eq!(segment.unit(0).state, UnitState::Quarantined);
    let mut target = segment.target(0, 4).unwrap();
    assert_eq!(make(&mut target), 1);
}

#[test]
fn tests_may_switch_quarantine_off() {
    let segment = segment(&geometry(1, 1, 1));
    let recovery = Recovery::new(&segment, false);
    for death in 1..=5 {
        segment.target(0, death).unwrap().try_lease().unwrap();
        recovery.target_died(0, Fate::Respawn, |_| panic!("quarantined"));
    }
    let word = segment.unit(0);
    assert_eq!((word.state, word.deaths), (UnitState::Pending, 5));
}

#[test]
fn a_death_counts_only_against_the_unit_in_hand() {
    let segment = segment(&geometry(1, 2, 4));
    let recovery = Recovery::new(&segment, true);
    let mut target = segment.target(0, 1).unwrap();
    make_many(&mut target, 3);
    let mut drafter = founder(&segment, 0, 1);
    let items = [(); 3].map(|()| take(&mut drafter));
    drafter.view(&items[1]).unwrap();
    drop(drafter);
    recovery.drafter_died(0, None, |_| {}).unwrap();
    let deaths = [0, 1, 2].map(|unit| segment.unit(unit).deaths);
    assert_eq!(deaths, [0, 1, 0]);
}

#[test]
fn redelivered_units_keep_their_place() {
    let segment = segment(&geometry(1, 2, 6));
    let recovery = Recovery::new(&segment, true);
    let mut target = segment.target(0, 1).unwrap();
    make_many(&mut target, 3);
    let (mut dead, mut other) = (founder(&segment, 0, 1), founder(&segment, 1, 1));
    assert_eq!(take(&mut dead).unit(), 0);
    drop(dead);
    recovery.drafter_died(0, None, |_| {}).unwrap();
    assert!(matches!(other.poll_take().unwrap(), Some(Take::Joined(_))));
    let taken = [(); 3].map(|()| take(&mut other).unit());
    assert_eq!(taken, [0, 1, 2]);
}

#[test]
fn the_next_communicators_id_comes_with_the_generation() {
    let segment = segment(&geometry(1, 2, 4));
    let id = [7u8; UNIQUE_ID_BYTES];
    segment.write_unique_id(1, &id);
    assert_eq!(segment.unique_id(1), Some(id));
    let next = [9u8; UNIQUE_ID_BYTES];
    drop(segment.drafter(0, 1, Entry::Founder).unwrap());
    Recovery::new(&segment, true)
        .drafter_died(0, Some(&next), |_| {})
        .unwrap();
    assert_eq!(
        (segment.unique_id(1), segment.unique_id(2)),
        (None, Some(next))
    );
}

// ---- held-out units, checkpoints, observers ---------------------------------------------------------------

#[test]
fn held_out_units_come_first_and_survive_deaths() {
    let mut made = geometry(1, 1, 2);
    made.eval_units = 2;
    let segment = segment(&made);
    let recovery = Recovery::new(&segment, true);
    let mut target = segment.target(0, 1).unwrap();
    let lease = target.try_lease().unwrap();
    assert!(lease.is_eval());
    let slot = target.try_claim(lease, 4, 1).unwrap().unwrap();
    drop((slot, target));
    let report = recovery.target_died(0, Fate::Respawn, |_| {});
    assert_eq!((report.freed, report.requeued), (1, vec![0]));
    let mut target = segment.target(0, 2).unwrap();
    assert!(matches!(
        segment.eval_view(0),
        Err(ShmError::NotWritten { unit: 0, units: 2 })
    ));
    assert_eq!([make(&mut target), make(&mut target)], [0, 1]);
    assert_eq!(make(&mut target), 0, "then the training units");
    let mut drafter = segment.drafter(0, 1, Entry::Founder).unwrap();
    assert_eq!(drafter.wait_eval().unwrap(), Some(vec![0, 1]));
    let (header, view) = drafter.eval_view(1).unwrap();
    assert_eq!((header.unit, view.ids()), (1, &[1; 4][..]));
    assert_eq!(segment.ring_counts().ready, 1);
}

#[test]
fn a_checkpoints_ledger_holds_what_was_trained_by_then() {
    let made = geometry(1, 1, 10);
    let first = segment(&made);
    let mut target = first.target(0, 1).unwrap();
    let mut drafter = founder(&first, 0, 1);
    make_many(&mut target, 7);
    take_many(&mut drafter, 4);
    commit(&mut drafter);
    let image = first.export_ledger(1);
    take_many(&mut drafter, 3);
    commit(&mut drafter);
    assert_eq!(first.export_ledger(1), image, "later steps do not show");
    assert_eq!((image.done(), first.export_ledger(2).done()), (4, 7));

    let text = serde_json::to_string(&image).unwrap();
    let resumed = segment(&Geometry {
        first_step: 2,
        drafters: 2,
        slots: made.slots + 1,
        ..made.clone()
    });
    resumed
        .restore_ledger(&serde_json::from_str(&text).unwrap())
        .unwrap();
    let mut target = resumed.target(0, 1).unwrap();
    assert_eq!([make(&mut target), make(&mut target)], [4, 5]);
    assert_eq!(founder(&resumed, 1, 1).step(), 2);
    assert_eq!(resumed.saved(), 1);
    let other = segment(&geometry(1, 1, 11));
    assert!(matches!(
        other.restore_ledger(&image),
        Err(ShmError::LedgerSize { .. })
    ));
}

#[test]
fn an_observer_sees_everything() {
    let segment = segment(&geometry(1, 2, 5));
    let mut target = segment.target(0, 1).unwrap();
    make_many(&mut target, 3);
    let mut drafter = founder(&segment, 1, 1);
    take(&mut drafter);
    let path = format!("/proc/self/fd/{}", segment.fd().as_raw_fd());
    let observer = Observer::open(path.as_ref()).unwrap();
    assert_eq!(observer.run_id(), segment.run_id());
    let seen = observer.snapshot();
    assert_eq!((seen.ring.ready, seen.ring.held, seen.published), (2, 1, 3));
    assert_eq!((seen.ledger.leased, seen.ledger.pending), (3, 2));
    assert_eq!(
        (seen.step.step, seen.step.members, seen.step.anchors),
        (1, 3, 1)
    );
    let held: Vec<_> = seen
        .slots
        .iter()
        .filter(|slot| slot.phase == SlotPhase::Held)
        .collect();
    assert_eq!(
        (held[0].seat, held[0].unit, held[0].tag),
        (Some(2), Some(0), Some(1))
    );
    let seats = &seen.seats;
    assert_eq!(
        (seats[0].role, seats[0].state, seats[0].units),
        (Role::Target, SeatState::Occupied, 3)
    );
    assert_eq!(
        (seats[2].role, seats[2].rank, seats[2].pid),
        (Role::Drafter, 1, std::process::id())
    );
    assert_eq!(seats[1].state, SeatState::Vacant);
    let text = serde_json::to_string(&seen).unwrap();
    assert!(text.contains("\"phase\":\"held\""), "{text}");
}

#[test]
fn the_lowest_member_saves_once_all_are_done_with_the_step() {
    let segment = segment(&geometry(1, 2, 8));
    let mut target = segment.target(0, 1).unwrap();
    make_many(&mut target, 4);
    let mut drafters = [founder(&segment, 0, 1), founder(&segment, 1, 1)];
    for rank in [0, 1, 0, 1] {
        take(&mut drafters[rank]);
    }
    for drafter in &mut drafters {
        drafter.close(Vote::default()).unwrap();
    }
    for drafter in &mut drafters {
        drafter.wait_reduce().unwrap();
        drafter.arrive(true).unwrap();
    }
    let [lowest, other] = &mut drafters;
    assert_eq!(lowest.poll_settled().unwrap(), Some(Settled::Committed));
    lowest.finish_step().unwrap();
    assert_eq!(
        lowest.poll_save().unwrap(),
        None,
        "the other's c2 is not done"
    );
    assert_eq!(other.poll_settled().unwrap(), Some(Settled::Committed));
    other.finish_step().unwrap();
    assert_eq!(lowest.poll_save().unwrap(), Some(Save::Write));
    assert_eq!(other.poll_save().unwrap(), Some(Save::NotMine));
    lowest.mark_saved(1);
    assert_eq!(other.wait_saved(1).unwrap(), None);
}
