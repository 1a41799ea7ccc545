//! The drafter learns: optimizer, checkpoints and held-out walks together, on the CPU engine.

use super::anchors::eligible;
use super::checkpoint::{Progress, RunRecord, Snapshot, newest_checkpoint, write_checkpoint};
use super::export;
use super::micro_step::MicroStepOut;
use super::optimizer::{Optimizer, StepOutcome, StepSums};
use super::options::OptimizerOptions;
use crate::engine::cpu::Cpu;
use crate::engine::{Engine, LossOptions};
use crate::eval::tree::{SlotRanks, build_tree, depth_of};
use crate::eval::walk::{HeldOutUnit, WalkCount, WalkOptions, walk};
use crate::model::drafter::config::tests::small_config;
use crate::model::drafter::tests::{Fixture, Sample};
use crate::model::drafter::{DraftCache, DrafterModel, Params};

fn optimizer(fixture: &Fixture) -> Optimizer<Cpu> {
    let options = OptimizerOptions {
        lr: 3e-3,
        ..OptimizerOptions::default()
    };
    Optimizer::new(&fixture.engine, fixture.model.params.layout(), options).unwrap()
}

fn step(
    fixture: &mut Fixture,
    optimizer: &mut Optimizer<Cpu>,
    samples: &[&Sample],
) -> MicroStepOut {
    fixture.model.params.zero_grads(&fixture.engine).unwrap();
    let out = fixture.micro_step(samples, &LossOptions::default());
    let sums = StepSums {
        loss: out.loss_sum,
        weight: out.weight_sum,
    };
    let params = &mut fixture.model.params;
    let outcome = optimizer.step(&fixture.engine, params, sums, 3e-3).unwrap();
    assert!(
        matches!(outcome, StepOutcome::Updated { .. }),
        "{outcome:?}"
    );
    out
}

/// A fixture trained until it knows two documents nearly by heart.
fn trained(steps: usize) -> (Fixture, Vec<Sample>) {
    let config = small_config();
    let samples: Vec<_> = [(30, 41), (22, 42)]
        .iter()
        .map(|&(length, seed)| Sample {
            anchors: eligible(&Sample::random(&config, length, seed).mask).collect(),
            ..Sample::random(&config, length, seed)
        })
        .collect();
    let mut fixture = Fixture::new(config);
    let mut optimizer = optimizer(&fixture);
    let refs: Vec<_> = samples.iter().collect();
    for _ in 0..steps {
        step(&mut fixture, &mut optimizer, &refs);
    }
    (fixture, samples)
}

#[test]
fn training_learns_and_moves_norm_weights() {
    let (mut fixture, samples) = trained(0);
    let mut optimizer = optimizer(&fixture);
    let refs: Vec<_> = samples.iter().collect();
    let first = step(&mut fixture, &mut optimizer, &refs);
    for _ in 0..120 {
        step(&mut fixture, &mut optimizer, &refs);
    }
    let last = step(&mut fixture, &mut optimizer, &refs);
    let loss = |out: &MicroStepOut| out.loss_sum / out.weight_sum;
    assert!(
        loss(&last) < 0.3 * loss(&first),
        "{} {}",
        loss(&first),
        loss(&last)
    );
    assert!(last.block_accepted_length() > first.block_accepted_length());
    for p in fixture.model.params.layout().params() {
        if p.vector {
            let values = Params::read(&fixture.engine, &fixture.model.params.masters, p).unwrap();
            assert!(values.iter().any(|v| (v - 1.0).abs() > 1e-3), "{}", p.name);
        }
    }
}

#[test]
fn steps_without_weight_or_with_infinities_change_nothing() {
    let (mut fixture, samples) = trained(2);
    let mut optimizer = optimizer(&fixture);
    step(&mut fixture, &mut optimizer, &[&samples[0]]);
    let before = fixture.model.params.value_hash(&fixture.engine).unwrap();
    let moments = |o: &Optimizer<Cpu>, f: &Fixture| {
        let read = |t| f.engine.download_float(t).unwrap();
        (o.count, read(o.m.view()), read(o.v.view()))
    };
    let state = moments(&optimizer, &fixture);
    let mut run = |fixture: &mut Fixture, loss: f64, weight: f64| {
        let params = &mut fixture.model.params;
        let sums = StepSums { loss, weight };
        optimizer.step(&fixture.engine, params, sums, 1e-2).unwrap()
    };
    assert_eq!(run(&mut fixture, 0.0, 0.0), StepOutcome::NoWeight);
    let outcome = run(&mut fixture, f64::NAN, 3.0);
    assert_eq!(outcome, StepOutcome::NonFinite { in_a_row: 1 });
    // A state that is not finite reaches loss and gradients.
    let mut broken = Sample::random(&small_config(), 22, 42);
    broken.states[5] = f32::NAN;
    let out = fixture.micro_step(&[&broken], &LossOptions::default());
    assert!(!out.loss_sum.is_finite());
    for in_a_row in 2..4 {
        let outcome = run(&mut fixture, 1.0, out.weight_sum);
        assert_eq!(outcome, StepOutcome::NonFinite { in_a_row });
    }
    assert_eq!(state, moments(&optimizer, &fixture));
    assert_eq!(
        before,
        fixture.model.params.value_hash(&fixture.engine).unwrap()
    );
    step(&mut fixture, &mut optimizer, &[&samples[0]]);
    assert_eq!(optimizer.non_finite_in_a_row, 0);
    assert_ne!(
        before,
        fixture.model.params.value_hash(&fixture.engine).unwrap()
    );
}

#[test]
fn an_update_is_adamw_with_decay_on_matrices_only() {
    let mut fixture = Fixture::new(small_config());
    let options = OptimizerOptions {
        weight_decay: 0.5,
        clip: 0.25,
        ..OptimizerOptions::default()
    };
    let layout = fixture.model.params.layout().clone();
    let mut optimizer = Optimizer::new(&fixture.engine, &layout, options.clone()).unwrap();
    let read = |f: &Fixture| {
        f.engine
            .download_float(f.model.params.masters.view())
            .unwrap()
    };
    let (mut expected, lr, weight) = (read(&fixture), 0.01, 4.0);
    let (mut m, mut v) = (vec![0.0; expected.len()], vec![0.0; expected.len()]);
    for count in 1..=3 {
        // Zero gradients in the odd places show the decay alone; the first step is below the clip norm.
        let size = if count == 1 { 1e-3 } else { 1.0 };
        let sums: Vec<f32> = (0..layout.len())
            .map(|i| match i % 2 {
                0 => size * (((i * count) % 13) as f32 - 6.0),
                _ => 0.0,
            })
            .collect();
        let norm = sums
            .iter()
            .map(|g| (f64::from(*g) / weight).powi(2))
            .sum::<f64>()
            .sqrt();
        let params = &mut fixture.model.params;
        fixture
            .engine
            .write_float(params.grads.view_mut(), &sums)
            .unwrap();
        let sums_of_step = StepSums { loss: 1.0, weight };
        let outcome = optimizer
            .step(&fixture.engine, params, sums_of_step, lr)
            .unwrap();
        let StepOutcome::Updated { grad_norm } = outcome else {
            panic!("{outcome:?}");
        };
        assert!((grad_norm - norm).abs() < 1e-4 * norm, "{grad_norm} {norm}");
        for i in 0..expected.len() {
            let g = f64::from(sums[i]) / weight * (options.clip / norm).min(1.0);
            m[i] = options.beta1 * m[i] + (1.0 - options.beta1) * g;
            v[i] = options.beta2 * v[i] + (1.0 - options.beta2) * g * g;
            let m_hat = m[i] / (1.0 - options.beta1.powi(count as i32));
            let v_hat: f64 = v[i] / (1.0 - options.beta2.powi(count as i32));
            let decay = if i < layout.matrix_len() {
                options.weight_decay
            } else {
                0.0
            };
            let old = f64::from(expected[i]);
            let new = old * (1.0 - lr * decay) - lr * m_hat / (v_hat.sqrt() + options.eps);
            expected[i] = new as f32;
        }
    }
    for (i, (a, b)) in read(&fixture).iter().zip(&expected).enumerate() {
        assert!((a - b).abs() < 1e-5, "{i}: {a} {b}");
    }
    let params = &fixture.model.params;
    let weights = fixture.engine.download_half(params.weights.view()).unwrap();
    assert_eq!(weights, read(&fixture)[..layout.matrix_len()]);
}

#[test]
fn a_run_that_was_resumed_ends_in_the_same_bits() {
    let (mut straight, samples) = trained(0);
    let mut optimizer_of_straight = optimizer(&straight);
    let record = RunRecord::default();
    let dir = tempfile::tempdir().unwrap();
    for number in 0..6_u64 {
        if number == 3 {
            let progress = Progress {
                step: 3,
                anchors_committed: 30,
                anchors_planned: 60,
            };
            let snapshot = Snapshot::take(
                &straight.engine,
                &straight.model,
                &optimizer_of_straight,
                progress,
                record.clone(),
            )
            .unwrap();
            write_checkpoint(dir.path(), &snapshot, 1).unwrap();
        }
        let sample = &samples[number as usize % 2];
        step(&mut straight, &mut optimizer_of_straight, &[sample]);
    }

    let checkpoint = newest_checkpoint(dir.path()).unwrap().unwrap().checkpoint;
    assert_eq!(checkpoint.state.progress.position(), 0.5);
    let mut resumed = Fixture::new(checkpoint.config.clone());
    let options = optimizer_of_straight.options().clone();
    let (params, mut optimizer) = checkpoint.restore(&resumed.engine, options).unwrap();
    resumed.model = DrafterModel::new(&resumed.engine, checkpoint.config.clone(), params).unwrap();
    for number in 3..6 {
        step(&mut resumed, &mut optimizer, &[&samples[number % 2]]);
    }
    let hash = |f: &Fixture| f.model.params.value_hash(&f.engine).unwrap();
    assert_eq!(hash(&resumed), hash(&straight));
    assert_eq!(optimizer.count, 6);

    // The serving half holds the same values, rounded to bf16.
    let (config, params) = export::load_serving(&resumed.engine, &checkpoint.path).unwrap();
    assert_eq!(config, checkpoint.config);
    let (exact, _) = checkpoint
        .restore(&resumed.engine, OptimizerOptions::default())
        .unwrap();
    let read = |p: &Params<Cpu>| resumed.engine.download_float(p.masters.view()).unwrap();
    for (a, b) in read(&params).iter().zip(read(&exact)) {
        assert_eq!(*a, half::bf16::from_f32(b).to_f32());
    }
}

/// The walk as decoding does it: one cached draft a round, verified against what the target wrote.
fn decode(fixture: &mut Fixture, sample: &Sample, budget: Option<usize>) -> WalkCount {
    let config = fixture.model.config().clone();
    let width = config.captured() * config.hidden_size;
    let mut cache = DraftCache::new(&fixture.engine, &fixture.model, 1, 64).unwrap();
    let states = fixture.engine.upload_half(&sample.states, width).unwrap();
    let mut count = WalkCount::default();
    let mut next = 0;
    for position in eligible(&sample.mask) {
        if position < next {
            continue;
        }
        let a = position as usize;
        let new = states.rows_view(cache.length(0), a);
        let (engine, model, tables) = fixture.parts();
        cache.extend(engine, model, 0, new).unwrap();
        let hidden = cache
            .draft(engine, model, tables, &[(0, sample.ids[a])])
            .unwrap();
        let slots = hidden.row_range(1, config.block_size);
        let (depths, k) = (
            config.block_size - 1,
            budget.unwrap_or(1).min(config.vocab_size),
        );
        let mut ids = engine.upload_index(&vec![0; depths * k]).unwrap();
        let mut log_probs = engine.float(depths, k).unwrap();
        engine
            .top_k(
                slots,
                tables.lm_head,
                k,
                ids.window_mut(0, depths, k),
                log_probs.view_mut(),
            )
            .unwrap();
        let ids = engine.download_index(ids.view()).unwrap();
        let log_probs = engine.download_float(log_probs.view()).unwrap();
        let end = (a..sample.ids.len())
            .take_while(|&p| sample.mask[p] != 0)
            .last()
            .unwrap();
        let truth = &sample.ids[a + 1..=end];
        let accepted = match budget {
            None => ids.iter().zip(truth).take_while(|(a, b)| a == b).count(),
            Some(budget) => {
                let ranks = SlotRanks {
                    ids: &ids,
                    log_probs: &log_probs,
                    width: k,
                };
                depth_of(&build_tree(ranks, budget), truth)
            }
        };
        next = position + accepted as u32 + 1;
        count.rounds += 1;
        count.tokens += u64::from(next.min(end as u32) - position);
    }
    count
}

#[test]
fn the_walk_counts_what_decoding_accepts() {
    let (mut fixture, samples) = trained(0);
    let mut optimizer = optimizer(&fixture);
    let refs: Vec<_> = samples.iter().collect();
    let budgets = [4, 16];
    let length = |count: &WalkCount| count.accepted_length().unwrap();
    // Train until some drafts are right and some are wrong.
    let expected = loop {
        step(&mut fixture, &mut optimizer, &refs);
        let mut expected = vec![WalkCount::default(); 3];
        for sample in &samples {
            for (i, budget) in [None, Some(4), Some(16)].into_iter().enumerate() {
                expected[i].add(decode(&mut fixture, sample, budget));
            }
        }
        if length(&expected[0]) > 1.3 {
            break expected;
        }
        assert!(optimizer.count < 60, "{expected:?}");
    };
    assert!(length(&expected[2]) > length(&expected[0]), "{expected:?}");
    let documents: Vec<_> = samples.iter().map(|s| (&s.ids[..], &s.mask[..])).collect();
    let states: Vec<f32> = samples.iter().flat_map(|s| s.states.clone()).collect();
    let config = fixture.model.config();
    let width = config.captured() * config.hidden_size;
    let states = fixture.engine.upload_half(&states, width).unwrap();
    for blocks in [1, 7, 1000] {
        let unit = HeldOutUnit {
            documents: &documents,
            states: states.view(),
        };
        let options = WalkOptions {
            budgets: &budgets,
            blocks,
        };
        let (engine, model, tables) = fixture.parts();
        let out = walk(engine, model, tables, &unit, options).unwrap();
        assert_eq!(out.chain, expected[0]);
        assert_eq!(out.trees, expected[1..]);
    }
}
