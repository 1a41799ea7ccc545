//! One suite for every implementation of the collective trait: on CPUs through shared memory, on GPUs through NCCL,
//! one GPU for each member. Members are threads, and processes where they are killed.
#![cfg(not(feature = "loom"))]

use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use slipstream::collective::{Collective, Nccl, SharedMemory};
use slipstream::engine::Engine;
use slipstream::engine::cpu::Cpu;
use slipstream::engine::cuda::{Cuda, devices};
use slipstream::shm::{
    Closed, Drafter, Dtype, Entry, Geometry, Recovery, Reduce, Reduced, RunId, Segment, Settled,
    Vote,
};

/// From a death until the others are out of the collective.
const NOTICE: Duration = Duration::from_secs(1);
/// Set in the environment of a member that is a process: rank, segment, run.
const MEMBER: &str = "SLIPSTREAM_TEST_MEMBER";

fn segment(drafters: u32) -> Segment {
    let geometry = Geometry {
        targets: 1,
        drafters,
        slots: 16,
        units: 10,
        eval_units: 0,
        slot_tokens: 8,
        slot_documents: 2,
        captured_width: 6,
        hidden: 2,
        final_hidden: false,
        dtype: Dtype::F32,
        batch_anchors: 4,
        units_per_step: 4,
        // Less than is summed at once, so that it goes in pieces.
        reduce_floats: 1000,
        broadcast_bytes: 64,
        check_payload: true,
        first_step: 1,
    };
    Segment::create(&geometry, RunId::fresh()).unwrap()
}

/// Numbers of a member in a step, between -1 and 1.
fn numbers(rank: u32, step: u64, len: usize) -> Vec<f32> {
    (0..len as u64)
        .map(|i| {
            let mixed =
                (i ^ (u64::from(rank) << 40) ^ (step << 50)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// A drafter that does nothing but sum.
struct Member<E: Engine, C> {
    engine: E,
    seat: Drafter,
    collective: C,
}

impl<E: Engine, C: Collective<E>> Member<E, C> {
    fn enter(segment: &Segment, rank: u32, (engine, mut collective): (E, C)) -> Self {
        let mut seat = segment.drafter(rank, 1, Entry::Founder).unwrap();
        let joined = seat.enter().unwrap().unwrap();
        collective.regroup(&engine, &joined).unwrap();
        Self {
            engine,
            seat,
            collective,
        }
    }

    /// To where the collective may begin; false when the group changed on the way.
    fn begin(&mut self) -> bool {
        let joined = match self.seat.close(Vote::default()).unwrap() {
            Closed::Joined(joined) => joined,
            Closed::Closed => match self.seat.wait_reduce().unwrap() {
                Reduce::Agreed(_) => return true,
                Reduce::Joined(joined) => joined,
                Reduce::Leave => panic!("units are left"),
            },
        };
        self.collective.regroup(&self.engine, &joined).unwrap();
        false
    }

    /// The sums of a step; `None` when the group changed.
    fn step(&mut self, len: usize) -> Option<Vec<f32>> {
        let step = self.seat.step();
        let mut values = numbers(self.seat.rank(), step, len);
        if !self.begin() {
            return None;
        }
        let mut gradients = self.engine.upload_float(&values, len).unwrap();
        let mut totals = [1.0, values[0], step as f32];
        let reduced = self
            .collective
            .all_reduce(&self.engine, &mut self.seat, &mut gradients, &mut totals)
            .unwrap();
        match self.seat.settle(reduced == Reduced::Done).unwrap() {
            Settled::Committed => {}
            Settled::Aborted(joined) => {
                self.collective.regroup(&self.engine, &joined).unwrap();
                return None;
            }
            Settled::Leave => panic!("units are left"),
        }
        self.seat.finish_step().unwrap();
        values = self.engine.download_float(gradients.view()).unwrap();
        values.extend(totals);
        Some(values)
    }
}

/// Whether `got` is the sum over `ranks`, and of their totals.
fn check_sums(got: &[f32], ranks: &[u32], step: u64) {
    let len = got.len() - 3;
    let parts: Vec<Vec<f32>> = ranks.iter().map(|&rank| numbers(rank, step, len)).collect();
    let sum = |i: usize| parts.iter().map(|part| f64::from(part[i])).sum::<f64>();
    for (i, &got) in got[..len].iter().enumerate() {
        let off = (f64::from(got) - sum(i)).abs();
        assert!(off < 1e-6, "element {i} of step {step} is off by {off:e}");
    }
    let count = ranks.len() as f32;
    assert_eq!(got[len], count, "members of step {step}");
    assert!((f64::from(got[len + 1]) - sum(0)).abs() < 1e-6);
    assert_eq!(got[len + 2], count * step as f32);
}

/// Every member gets the same bits, those of the sum, step after step.
fn sums_are_right_everywhere<E: Engine, C: Collective<E>>(
    members: u32,
    len: usize,
    make: impl Fn(u32) -> (E, C) + Sync,
) {
    const STEPS: u64 = 4;
    let segment = segment(members);
    let ranks: Vec<u32> = (0..members).collect();
    let sums: Vec<Vec<Vec<f32>>> = std::thread::scope(|scope| {
        let (segment, make) = (&segment, &make);
        let play = |rank| {
            move || {
                let mut member = Member::enter(segment, rank, make(rank));
                (0..STEPS).map(|_| member.step(len).unwrap()).collect()
            }
        };
        let threads: Vec<_> = ranks.iter().map(|&rank| scope.spawn(play(rank))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for step in 0..STEPS as usize {
        check_sums(&sums[0][step], &ranks, 1 + step as u64);
        for other in &sums[1..] {
            assert!(sums[0][step] == other[step], "bits of step {}", 1 + step);
        }
    }
}

/// The last member dies before it takes part in the sum of step `dies`: the others come out of theirs in time, and
/// go on without it.
fn a_death_ends_the_sum<E: Engine, C: Collective<E>>(
    members: u32,
    dies: u64,
    make: impl Fn(u32) -> (E, C) + Sync,
) {
    const LEN: usize = 2_500;
    let segment = segment(members);
    let victim = members - 1;
    let survivors: Vec<u32> = (0..victim).collect();
    let (stalled, stalls) = mpsc::channel();
    let (out, came_out) = mpsc::channel();
    std::thread::scope(|scope| {
        let (segment, make, survivors) = (&segment, &make, &survivors);
        scope.spawn(move || {
            let mut member = Member::enter(segment, victim, make(victim));
            for _ in 1..dies {
                member.step(LEN).unwrap();
            }
            assert!(member.begin());
            // As a process that is killed does, it ends nothing in order.
            std::mem::forget(member);
            stalled.send(()).unwrap();
        });
        for &rank in survivors {
            let out = out.clone();
            scope.spawn(move || {
                let mut member = Member::enter(segment, rank, make(rank));
                for _ in 1..dies {
                    member.step(LEN).unwrap();
                }
                assert_eq!(member.step(LEN), None, "a sum without the dead one");
                out.send(Instant::now()).unwrap();
                for _ in 0..2 {
                    let step = member.seat.step();
                    check_sums(&member.step(LEN).unwrap(), survivors, step);
                }
            });
        }
        stalls.recv().unwrap();
        // The others are inside by then.
        std::thread::sleep(Duration::from_millis(500));
        segment.mark_suspect(segment.geometry().drafter_seat(victim));
        let died = Instant::now();
        let recovery = Recovery::new(segment, false);
        recovery.drafter_died(victim, None, |_| {}).unwrap();
        for _ in survivors {
            let took = came_out.recv().unwrap().duration_since(died);
            println!("out of the collective {took:?} after the death");
            assert!(took < NOTICE, "{took:?}");
        }
    });
}

mod shared_memory {
    use super::*;

    fn make(_: u32) -> (Cpu, SharedMemory) {
        (Cpu::new(1).unwrap(), SharedMemory::default())
    }

    #[test]
    fn sums_are_right_everywhere_for_one_two_and_three() {
        for members in 1..=3 {
            sums_are_right_everywhere(members, 2_501, make);
        }
    }

    #[test]
    fn a_death_ends_the_first_sum_and_a_later_one() {
        a_death_ends_the_sum(2, 1, make);
        a_death_ends_the_sum(3, 3, make);
    }
}

mod cuda {
    use super::*;

    fn make(rank: u32) -> (Cuda, Nccl) {
        (Cuda::new(rank as usize).unwrap(), Nccl::default())
    }

    /// One member for each GPU, if there are two.
    fn members() -> Option<u32> {
        let count = devices().unwrap().len() as u32;
        if count < 2 {
            eprintln!("SKIPPED: needs two GPUs, {count} visible");
        }
        (count >= 2).then_some(count)
    }

    #[test]
    #[ignore = "needs two GPUs"]
    fn sums_are_right_everywhere_for_one_and_all() {
        let Some(members) = members() else { return };
        sums_are_right_everywhere(1, 2_501, make);
        sums_are_right_everywhere(members, 2_500_001, make);
    }

    #[test]
    #[ignore = "needs two GPUs"]
    fn a_death_ends_the_first_sum_and_a_later_one() {
        let Some(members) = members() else { return };
        // While all connect, and with the sum under way on the GPU.
        a_death_ends_the_sum(members, 1, make);
        a_death_ends_the_sum(members, 3, make);
    }

    #[test]
    #[ignore = "needs two GPUs"]
    fn bandwidth() {
        const LEN: usize = 256 << 20;
        let Some(members) = members() else { return };
        let segment = segment(members);
        std::thread::scope(|scope| {
            for rank in 0..members {
                let segment = &segment;
                scope.spawn(move || {
                    let mut member = Member::enter(segment, rank, make(rank));
                    let mut buffer = member.engine.float(1, LEN).unwrap();
                    assert!(member.begin());
                    let mut best = f64::INFINITY;
                    for _ in 0..12 {
                        let begin = Instant::now();
                        let (engine, seat) = (&member.engine, &mut member.seat);
                        let collective = &mut member.collective;
                        let reduced = collective.all_reduce(engine, seat, &mut buffer, &mut [0.0]);
                        assert_eq!(reduced.unwrap(), Reduced::Done);
                        best = best.min(begin.elapsed().as_secs_f64());
                    }
                    assert_eq!(member.seat.settle(true).unwrap(), Settled::Committed);
                    let moved = 2.0 * f64::from(members - 1) / f64::from(members) * (4 * LEN) as f64;
                    println!(
                        "all-reduce of 1 GiB float32, rank {rank} of {members}: {:.3} ms, {:.1} GB/s of bus bandwidth",
                        1e3 * best,
                        1e-9 * moved / best
                    );
                });
            }
        });
    }

    /// What a member that is a process does: sums for ever; once the group has changed it shows that its GPU is as
    /// it was, and ends.
    #[test]
    #[ignore = "is started by killed_in_mid_sum"]
    fn member() {
        const LEN: usize = 64 << 20;
        let Ok(part) = std::env::var(MEMBER) else {
            return;
        };
        let words: Vec<&str> = part.split(' ').collect();
        let rank: u32 = words[0].parse().unwrap();
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(words[1])
            .unwrap();
        let segment = Segment::attach(file.into(), Some(words[2].parse().unwrap())).unwrap();
        let mut member = Member::enter(&segment, rank, make(rank));
        let kept = numbers(9, 9, 1 << 20);
        let on_gpu = member.engine.upload_float(&kept, kept.len()).unwrap();
        let mut gradients = member.engine.float(1, LEN).unwrap();
        for step in 1.. {
            if !member.begin() {
                break;
            }
            let (engine, seat) = (&member.engine, &mut member.seat);
            let reduced = member
                .collective
                .all_reduce(engine, seat, &mut gradients, &mut [0.0])
                .unwrap();
            if reduced == Reduced::Moved {
                println!("out");
            }
            match member.seat.settle(reduced == Reduced::Done).unwrap() {
                Settled::Committed => member.seat.finish_step().unwrap(),
                Settled::Aborted(joined) => {
                    member.collective.regroup(&member.engine, &joined).unwrap();
                    break;
                }
                Settled::Leave => panic!("units are left"),
            }
            println!("step {step}");
        }
        let found = member.engine.download_float(on_gpu.view()).unwrap();
        assert!(found == kept, "the GPU's memory has changed");
        let step = member.seat.step();
        check_sums(&member.step(2_500).unwrap(), &[rank], step);
        println!("alone");
    }

    struct Process {
        child: Child,
        lines: mpsc::Receiver<(String, Instant)>,
    }

    impl Process {
        fn start(segment: &Segment, rank: u32) -> Self {
            let file = format!(
                "/proc/{}/fd/{}",
                std::process::id(),
                segment.fd().as_raw_fd()
            );
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["cuda::member", "--exact", "--ignored", "--nocapture"])
                .env(MEMBER, format!("{rank} {file} {}", segment.run_id()))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let out = BufReader::new(child.stdout.take().unwrap());
            let (tell, lines) = mpsc::channel();
            std::thread::spawn(move || {
                for line in out.lines().map_while(Result::ok) {
                    // The test has seen enough.
                    let _ = tell.send((line, Instant::now()));
                }
            });
            Self { child, lines }
        }

        /// When a line with these words came; `None` at the end of its output.
        fn wait_for(&self, words: &str) -> Option<Instant> {
            loop {
                match self.lines.recv_timeout(Duration::from_secs(30)) {
                    Ok((line, at)) if line.contains(words) => return Some(at),
                    Ok(_) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => return None,
                    Err(mpsc::RecvTimeoutError::Timeout) => panic!("no `{words}` in 30 s"),
                }
            }
        }
    }

    #[test]
    #[ignore = "needs two GPUs"]
    fn killed_in_mid_sum() {
        let Some(_) = members() else { return };
        let kills: u32 = std::env::var("KILLS").map_or(20, |count| count.parse().unwrap());
        let mut inside = 0;
        for kill in 0..kills {
            let segment = segment(2);
            let mut processes = [0, 1].map(|rank| Process::start(&segment, rank));
            for process in &processes {
                process.wait_for("step 3").expect("it sums");
            }
            std::thread::sleep(Duration::from_micros(u64::from(kill) * 731 % 5_000));
            let victim = kill % 2;
            let dead = &mut processes[victim as usize];
            dead.child.kill().unwrap();
            let killed = Instant::now();
            // The end of its pipe comes before the end of the process.
            assert_eq!(dead.wait_for("no such line"), None);
            segment.mark_suspect(segment.geometry().drafter_seat(victim));
            let noticed = killed.elapsed();
            dead.child.wait().unwrap();
            let ended = killed.elapsed();
            let recovery = Recovery::new(&segment, false);
            recovery.drafter_died(victim, None, |_| {}).unwrap();
            let survivor = &mut processes[1 - victim as usize];
            let mut out = None;
            loop {
                let (line, at) = survivor
                    .lines
                    .recv_timeout(Duration::from_secs(15))
                    .expect("the survivor goes on");
                match line {
                    line if line.contains("out") => out = Some(at),
                    line if line.contains("alone") => break,
                    _ => {}
                }
            }
            let alone = killed.elapsed();
            assert!(survivor.child.wait().unwrap().success());
            let aborted = out.map(|at| at.duration_since(killed));
            println!(
                "kill {kill}: noticed {noticed:?}, ended {ended:?}, out {aborted:?}, alone {alone:?}"
            );
            if let Some(aborted) = aborted {
                inside += 1;
                assert!(aborted - noticed < NOTICE, "{aborted:?}");
            }
        }
        println!("{inside} of {kills} kills hit a sum under way");
        assert!(inside > 0);
    }
}
