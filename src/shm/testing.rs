//! Small segments for the tests of this module.

use super::geometry::{Dtype, Geometry};

/// Units of one anchor each, four to a step.
pub(crate) fn geometry(targets: u32, drafters: u32, slots: u32, units: u64) -> Geometry {
    Geometry {
        targets,
        drafters,
        slots,
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
        reduce_floats: 16,
        broadcast_bytes: 64,
        check_payload: true,
        first_step: 1,
    }
}

use super::{
    Agreed, Closed, Drafter, Entry, Next, Reduce, Segment, Settled, Take, Target, UnitInfo, Vote,
};

/// Prefills one unit: the payload says which unit it is.
pub(crate) fn make(target: &mut Target, lease: super::Lease) {
    let unit = lease.unit();
    let mut slot = target
        .try_claim(lease, 4, 1)
        .unwrap()
        .expect("a slot is free");
    slot.captured::<f32>().unwrap().fill(unit as f32);
    slot.ids().fill(unit as u32);
    slot.mask().fill(1);
    slot.offsets().copy_from_slice(&[0, 4]);
    slot.rows().fill(unit as u32);
    target
        .publish(
            slot,
            UnitInfo {
                anchors: 1,
                weightless: false,
            },
        )
        .unwrap();
}

/// Lets a target make what it can without waiting.
pub(crate) fn make_some(target: &mut Target, most: usize) -> Option<Next> {
    for _ in 0..most {
        if target.segment().ring_counts().free == 0 {
            return None;
        }
        match target.poll_next() {
            Some(Next::Unit(lease)) => make(target, lease),
            other => return other,
        }
    }
    None
}

/// Checks that an item's payload is its unit's.
pub(crate) fn check(drafter: &Drafter, item: &super::Item) {
    let view = drafter.view(item).unwrap();
    assert_eq!(view.ids(), [item.unit() as u32; 4]);
    assert_eq!(view.captured::<f32>().unwrap(), [item.unit() as f32; 24]);
    assert_eq!(view.offsets(), [0, 4]);
}

/// One target and one drafter in one thread, to the end; what was agreed in each step.
pub(crate) fn train_alone(segment: &Segment) -> Vec<Agreed> {
    let mut target = segment.target(0, 1).unwrap();
    let mut drafter = segment.drafter(0, 1, Entry::Founder).unwrap();
    drafter
        .enter()
        .unwrap()
        .expect("there is something to train");
    let mut steps = Vec::new();
    loop {
        make_some(&mut target, 3);
        match drafter.poll_take().unwrap() {
            Some(Take::Item(item)) => check(&drafter, &item),
            Some(Take::Close) => {
                assert_eq!(drafter.close(Vote::default()).unwrap(), Closed::Closed);
                let Reduce::Agreed(agreed) = drafter.wait_reduce().unwrap() else {
                    panic!("the group cannot change");
                };
                assert_eq!(drafter.settle(true).unwrap(), Settled::Committed);
                drafter.finish_step().unwrap();
                steps.push(agreed);
            }
            Some(Take::Leave) => break,
            Some(Take::Joined(_)) => panic!("the group cannot change"),
            None => {}
        }
    }
    drafter.leave().unwrap();
    assert_eq!(target.poll_next(), Some(Next::Finished));
    target.leave();
    steps
}
