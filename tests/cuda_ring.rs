//! Hidden states through the ring between a GPU and itself, by the workers' own code, with every queue held up
//! before each copy: what is published or freed before its copy is complete shows in the values.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use half::bf16;
use slipstream::data::Document;
use slipstream::engine::cuda::Cuda;
use slipstream::engine::{Engine, Queue};
use slipstream::shm::{
    Closed, Dtype, Entry, Geometry, Next, Reduce, RunId, Segment, Settled, Take, UnitInfo, Vote,
};
use slipstream::worker::slot::{States, copy_in, fill, register};

const TOKENS: usize = 1024;
const WIDTH: usize = 2048;
const HIDDEN: usize = 512;
const UNITS: u64 = 20;
/// The fewest that a step of two units, one prefetch and one target need: each is used again and again.
const SLOTS: u32 = 5;
const DELAY: Duration = Duration::from_millis(20);

fn geometry() -> Geometry {
    Geometry {
        targets: 1,
        drafters: 1,
        slots: SLOTS,
        units: UNITS,
        eval_units: 0,
        slot_tokens: TOKENS as u32,
        slot_documents: 1,
        captured_width: WIDTH as u32,
        hidden: HIDDEN as u32,
        final_hidden: true,
        dtype: Dtype::Bf16,
        batch_anchors: 2,
        units_per_step: 2,
        reduce_floats: 16,
        broadcast_bytes: 64,
        check_payload: true,
        first_step: 1,
    }
}

/// Holds up a queue.
fn delay(engine: &Cuda, queue: Queue) {
    unsafe extern "C" fn sleep(_: *mut c_void) {
        std::thread::sleep(DELAY);
    }
    engine.make_current().unwrap();
    let stream = engine.stream_handle(queue).cast();
    // SAFETY: the function uses no argument and calls no CUDA function.
    let result = unsafe { sys::cuLaunchHostFunc(stream, Some(sleep), std::ptr::null_mut()) };
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// Values of a unit, exact in bf16.
fn values(unit: u64, cols: usize) -> Vec<f32> {
    (0..TOKENS * cols)
        .map(|i| {
            let mixed = (unit + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (i as u64 * 2_654_435_761);
            bf16::from_f32((mixed >> 13 & 0xff) as f32 - 128.0).to_f32()
        })
        .collect()
}

#[test]
#[ignore = "needs a GPU"]
fn nothing_is_published_or_freed_before_its_copy_is_complete() {
    let engine = Cuda::new(0).unwrap();
    let segment = Segment::create(&geometry(), RunId::fresh()).unwrap();
    register(&engine, &segment).unwrap();
    let mut target = segment.target(0, 1).unwrap();
    let mut drafter = segment.drafter(0, 1, Entry::Founder).unwrap();
    drafter.enter().unwrap().unwrap();
    let (ids, mask) = (vec![7; TOKENS], vec![1; TOKENS]);
    let began = Instant::now();
    let mut trained = 0;
    // What was copied in and not looked at yet, with its unit.
    let mut held: Vec<(u64, States<Cuda>)> = Vec::new();
    loop {
        while segment.ring_counts().free > 0 {
            let Some(Next::Unit(lease)) = target.poll_next() else {
                break;
            };
            let unit = lease.unit();
            delay(&engine, Queue::Compute);
            let states = States {
                captured: engine.upload_half(&values(unit, WIDTH), WIDTH).unwrap(),
                teacher: Some(
                    engine
                        .upload_half(&values(unit + 99, HIDDEN), HIDDEN)
                        .unwrap(),
                ),
            };
            let computed = engine.record(Queue::Compute).unwrap();
            engine.wait(Queue::CopyOut, &computed).unwrap();
            delay(&engine, Queue::CopyOut);
            let mut slot = target.try_claim(lease, TOKENS as u32, 1).unwrap().unwrap();
            let document = Document {
                row: unit,
                eligible: 1,
                ids: &ids,
                mask: &mask,
            };
            fill(&engine, &states, (0, TOKENS), &[document], &mut slot).unwrap();
            let info = UnitInfo {
                anchors: 1,
                weightless: false,
            };
            target.publish(slot, info).unwrap();
        }
        match drafter.poll_take().unwrap() {
            Some(Take::Item(item)) => {
                let view = drafter.view(&item).unwrap();
                let expected: Vec<u16> = values(item.unit(), WIDTH)
                    .into_iter()
                    .map(|v| bf16::from_f32(v).to_bits())
                    .collect();
                assert!(
                    view.captured::<u16>().unwrap() == expected,
                    "unit {} was published before its copy was complete",
                    item.unit()
                );
                delay(&engine, Queue::Compute);
                delay(&engine, Queue::CopyIn);
                // SAFETY: the slot is freed behind the download below, at the earliest.
                let states = unsafe { copy_in(&engine, &view, WIDTH, Some(HIDDEN)) }.unwrap();
                held.push((item.unit(), states));
            }
            Some(Take::Close) => {
                // As a step's sums are read back, after which slots are free.
                for (unit, states) in held.drain(..) {
                    let got = engine.download_half(states.captured.view()).unwrap();
                    assert!(got == values(unit, WIDTH), "unit {unit}: captured states");
                    let teacher = states.teacher.unwrap();
                    let got = engine.download_half(teacher.view()).unwrap();
                    assert!(
                        got == values(unit + 99, HIDDEN),
                        "unit {unit}: final states"
                    );
                    trained += 1;
                }
                assert_eq!(drafter.close(Vote::default()).unwrap(), Closed::Closed);
                let Reduce::Agreed(_) = drafter.wait_reduce().unwrap() else {
                    panic!("the group cannot change");
                };
                assert_eq!(drafter.settle(true).unwrap(), Settled::Committed);
                drafter.finish_step().unwrap();
            }
            Some(Take::Leave) => break,
            Some(Take::Joined(_)) => panic!("the group cannot change"),
            None => {}
        }
        assert!(began.elapsed() < Duration::from_secs(60));
    }
    assert_eq!(trained, UNITS);
    drafter.leave().unwrap();
    target.leave();
    drop(engine);
}
