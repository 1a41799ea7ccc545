//! Every order in which the shared accesses of a few threads can happen and be seen, explored by loom:
//! `cargo test --release --features loom --test loom`.
#![cfg(feature = "loom")]

use loom::thread;
use slipstream::shm::*;

/// Explores `body` with at most `preemptions` forced switches between threads.
fn explore(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    builder.check(body);
}

fn small(targets: u32, drafters: u32, slots: u32, units: u64) -> Segment {
    Segment::small(&Geometry {
        targets,
        drafters,
        slots,
        units,
        eval_units: 0,
        slot_tokens: 1,
        slot_documents: 1,
        captured_width: 1,
        hidden: 1,
        final_hidden: false,
        dtype: Dtype::F32,
        batch_anchors: 1,
        units_per_step: 1,
        reduce_floats: 0,
        broadcast_bytes: 64,
        check_payload: false,
        first_step: 1,
    })
}

/// Calls `poll` until it has an answer, letting the others run in between.
fn until<T>(mut poll: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(answer) = poll() {
            return answer;
        }
        thread::yield_now();
    }
}

/// Leases and publishes one unit.
fn publish(segment: &Segment, seat: u32) -> u64 {
    let unit = segment.line_p0(seat).expect("a unit is pending");
    let grip = until(|| segment.line_p1(seat));
    segment.line_p2(grip, unit, seat);
    segment.line_p3(grip, seat).unwrap();
    unit
}

/// Payload and header are whole when a slot is taken, also when it is filled again after being freed.
#[test]
fn a_taken_slot_holds_what_was_published() {
    explore(3, || {
        let segment = small(1, 1, 1, 2);
        let target = segment.clone();
        let made = thread::spawn(move || {
            publish(&target, 0);
            publish(&target, 0);
        });
        for expected in 0..2 {
            let grip = until(|| segment.line_c0(1));
            assert_eq!(segment.line_c1(grip).unwrap(), (expected, expected));
            segment.line_c2(expected, 1, 1).unwrap();
            segment.line_c3(grip, 1).unwrap();
        }
        made.join().unwrap();
        assert_eq!(segment.ledger_counts().done, 2);
    });
}

#[test]
fn a_ready_slot_is_taken_by_one() {
    explore(3, || {
        let segment = small(1, 2, 1, 1);
        publish(&segment, 0);
        let other = segment.clone();
        let second = thread::spawn(move || other.line_c0(2).is_some());
        let first = segment.line_c0(1).is_some();
        assert!(first ^ second.join().unwrap());
    });
}

#[test]
fn a_free_slot_is_claimed_by_one() {
    explore(3, || {
        let segment = small(2, 1, 1, 1);
        let other = segment.clone();
        let second = thread::spawn(move || other.line_p1(1).is_some());
        let first = segment.line_p1(0).is_some();
        assert!(first ^ second.join().unwrap());
    });
}

#[test]
fn a_unit_is_leased_once_and_none_is_forgotten() {
    explore(3, || {
        let segment = small(2, 1, 1, 3);
        let lease = |segment: Segment, seat| move || [segment.line_p0(seat), segment.line_p0(seat)];
        let second = thread::spawn(lease(segment.clone(), 1));
        let first = lease(segment.clone(), 0)();
        let mut units: Vec<u64> = first
            .into_iter()
            .chain(second.join().unwrap())
            .flatten()
            .collect();
        // Each may find nothing once only because the others have taken all.
        units.extend(segment.line_p0(0));
        units.sort_unstable();
        assert_eq!(units, [0, 1, 2]);
        assert_eq!(segment.line_p0(0), None);
    });
}

#[test]
fn the_budget_is_granted_up_to_the_batch() {
    explore(3, || {
        let segment = small(1, 2, 1, 1);
        let other = segment.clone();
        let second = thread::spawn(move || other.line_reserve(1, 1, 1));
        let first = segment.line_reserve(1, 1, 1);
        let second = second.join().unwrap();
        assert!(first ^ second);
        segment.line_give_back(1, 1, 1);
        assert!(segment.line_reserve(1, 1, 1));
        assert_eq!(segment.budget().anchors, 1);
    });
}

/// Both members see the same record of the step and the same decision, in two steps.
#[test]
fn a_step_is_decided_once_for_all() {
    explore(2, || {
        let segment = small(1, 2, 1, 1);
        let member = |segment: Segment, rank: u32| {
            move || {
                for step in 1..=2 {
                    let units = [(10 * step + u64::from(rank), 1 + rank)];
                    assert!(segment.line_g1(rank, step, 1, &units));
                    let agreed = until(|| segment.line_agreed(step, 1));
                    let units: Vec<_> = agreed.members.iter().map(|m| m.units.clone()).collect();
                    assert_eq!(units, [vec![10 * step], vec![10 * step + 1]]);
                    assert_eq!(agreed.anchors(), 3);
                    assert!(segment.line_g2(rank, step, 1));
                    until(|| {
                        let word = segment.step_word();
                        let committed = word.step == step && word.state == StepState::Committed;
                        (committed || word.step > step).then_some(())
                    });
                }
            }
        };
        let second = thread::spawn(member(segment.clone(), 1));
        member(segment.clone(), 0)();
        second.join().unwrap();
        let word = segment.step_word();
        assert_eq!(
            (word.step, word.state, word.mask),
            (2, StepState::Committed, 3)
        );
    });
}

/// The last finisher publishes, once; a sentinel means that every unit can be seen.
#[test]
fn one_sentinel_per_drafter_and_no_unit_after_it() {
    explore(3, || {
        let segment = small(2, 1, 2, 2);
        let filled = [0, 1].map(|seat| {
            let unit = segment.line_p0(seat).unwrap();
            let grip = segment.line_p1(seat).unwrap();
            segment.line_p2(grip, unit, seat);
            grip
        });
        let target = |segment: Segment, seat: u32| {
            move || {
                segment.line_p3(filled[seat as usize], seat).unwrap();
                if segment.line_all_published() {
                    assert!(segment.line_finish(seat));
                }
            }
        };
        let threads = [0, 1].map(|seat| thread::spawn(target(segment.clone(), seat)));
        let taken = segment.line_sentinel(0);
        if taken {
            let seen = (0..2).filter(|_| segment.line_c0(2).is_some()).count();
            assert_eq!(seen, 2, "the sentinel came before a unit");
        }
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        // Whoever looked too early looks again; one of them is the last finisher.
        for seat in 0..2 {
            assert!(segment.line_all_published());
            assert!(segment.line_finish(seat));
        }
        assert!(segment.line_sentinel(0));
        let view = segment.finish_view();
        assert_eq!((view.published, view.taken, view.targets_done), (1, 1, 3));
    });
}

/// A target died after publishing: its unit is never prefilled again, however far the drafter is.
#[test]
fn requeuing_leaves_published_units_alone() {
    explore(3, || {
        let segment = small(1, 1, 1, 2);
        let unit = publish(&segment, 0);
        let lost = segment.line_p0(0).unwrap();
        let launcher = Recovery::new(&segment, true);
        let recovery = thread::spawn(move || launcher.target_died(0, Fate::Respawn, |_| {}));
        let grip = until(|| segment.line_c0(1));
        segment.line_c1(grip).unwrap();
        segment.line_c2(unit, 1, 1).unwrap();
        segment.line_c3(grip, 1).unwrap();
        assert_eq!(recovery.join().unwrap().requeued, [lost]);
        assert_eq!(segment.unit(unit).state, UnitState::Done);
        assert_eq!(segment.unit(lost).state, UnitState::Pending);
    });
}

/// A drafter died after its g2, while the last g2 is under way: the survivor and the recovery agree on
/// whether the dead one's unit has had its effect.
#[test]
fn survivors_and_recovery_agree_on_a_step() {
    explore(3, || {
        let segment = small(1, 2, 1, 1);
        let unit = publish(&segment, 0);
        let grip = segment.line_c0(2).unwrap();
        segment.line_c0t(grip, 1);
        assert!(segment.line_g1(0, 1, 1, &[]));
        assert!(segment.line_g1(1, 1, 1, &[(unit, 1)]));
        assert!(segment.line_g2(1, 1, 1));
        let launcher = Recovery::new(&segment, true);
        let recovery = thread::spawn(move || launcher.drafter_died(1, None, |_| {}).unwrap());
        let _ = segment.line_g2(0, 1, 1);
        let committed = until(|| {
            let word = segment.step_word();
            if word.step > 1 || word.state == StepState::Committed {
                return Some(true);
            }
            (word.generation > 1).then_some(false)
        });
        let report = recovery.join().unwrap();
        let word = segment.step_word();
        assert_eq!(
            (word.state, word.generation, word.members),
            (StepState::Gather, 2, 1)
        );
        let state = segment.unit(unit).state;
        if committed {
            assert_eq!(
                (report.committed, state, word.step),
                (vec![unit], UnitState::Done, 2)
            );
            assert!(!segment.line_any_ready());
        } else {
            assert_eq!(
                (report.redelivered, state, word.step),
                (vec![unit], UnitState::Leased, 1)
            );
            assert!(segment.line_any_ready());
        }
    });
}

/// A survivor is between its c0 and c0t, or before, when the budget is set anew: after joining, the budget
/// holds exactly what it holds.
#[test]
fn the_budget_survives_a_death() {
    explore(2, || {
        let segment = small(1, 2, 1, 1);
        publish(&segment, 0);
        let mut drafter = segment.drafter(0, 1, Entry::Founder).unwrap();
        drafter.poll_enter().unwrap();
        let launcher = Recovery::new(&segment, true);
        let recovery = thread::spawn(move || launcher.drafter_died(1, None, |_| {}).unwrap());
        let mut joined = false;
        until(|| {
            match drafter.poll_take().unwrap() {
                Some(Take::Joined(_)) => joined = true,
                Some(Take::Item(_)) | None => {}
                Some(Take::Close) if joined => return Some(()),
                Some(Take::Close) => {}
                Some(Take::Leave) => panic!("the unit is not trained"),
            }
            None
        });
        recovery.join().unwrap();
        assert_eq!(drafter.items().len(), 1);
        let budget = segment.budget();
        assert_eq!((budget.generation, budget.anchors), (2, 1));
    });
}
