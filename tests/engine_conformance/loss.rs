//! Head, loss, and the most likely tokens. The reference loss is float64 with its weights held fixed; gradients
//! are central differences of it.

use slipstream::engine::{Draws, Engine, HeadLoss, HeadLossOut, LossOptions, Slots, gumbel};

use crate::support::{Matrix, Random, Wide, close, float, indices, random, read_float};

/// Everything that goes into the loss, held as the engine holds it.
struct Case<E: Engine> {
    hidden: Wide<E>,
    hidden_held: Matrix,
    head: Wide<E>,
    head_held: Matrix,
    teacher: Wide<E>,
    teacher_held: Matrix,
    row: Vec<u32>,
    label: Vec<u32>,
    slot: Vec<u32>,
    teacher_row: Vec<u32>,
    block_begin: Vec<u32>,
}

impl<E: Engine> Case<E> {
    fn new(engine: &E, blocks: usize, vocabulary: usize, seed: u64) -> Self {
        let mut rng = Random(seed);
        let (block, width, context) = (6, 12, 30);
        let (hidden, hidden_held) = random(engine, &mut rng, blocks * block, width, 0.7);
        let (head, head_held) = random(engine, &mut rng, vocabulary, width, 0.7);
        let (teacher, teacher_held) = random(engine, &mut rng, context, width, 0.7);
        let (mut row, mut label, mut slot, mut teacher_row) = (vec![], vec![], vec![], vec![]);
        let mut block_begin = vec![0];
        for n in 0..blocks {
            for k in 1..block {
                // Some slots are missing, also first ones; every seventh block has none.
                if n % 7 == 3 || rng.below(4) == 0 {
                    continue;
                }
                let at = n * block + k;
                let best = argmax(&logits(hidden_held.row(at), &head_held));
                let lucky = rng.below(2) == 0;
                row.push(at as u32);
                label.push(if lucky { best } else { rng.below(vocabulary) } as u32);
                slot.push(k as u32);
                teacher_row.push(rng.below(context) as u32);
            }
            block_begin.push(row.len() as u32);
        }
        Self {
            hidden,
            hidden_held,
            head,
            head_held,
            teacher,
            teacher_held,
            row,
            label,
            slot,
            teacher_row,
            block_begin,
        }
    }

    /// Gradient, sums and correct flags of the engine.
    fn run(&self, engine: &E, options: &LossOptions) -> (Matrix, [f64; 2], Vec<u32>) {
        let index = |v: &[u32]| indices(engine, v);
        let (row, label, slot) = (index(&self.row), index(&self.label), index(&self.slot));
        let teacher_row = index(&self.teacher_row);
        let mut d_hidden = Wide::<E>::output(engine, self.hidden_held.rows, self.hidden_held.cols);
        let mut sums = engine.upload_float(&[0.5, 0.25], 2).unwrap();
        let mut correct = index(&vec![9; self.row.len()]);
        let input = HeadLoss {
            hidden: self.hidden.view(),
            lm_head: self.head.view(),
            slots: Slots {
                row: row.view(),
                label: label.view(),
                slot: slot.view(),
                teacher_row: teacher_row.view(),
                block_begin: &self.block_begin,
            },
            teacher: options.use_soft_labels.then(|| self.teacher.view()),
            options,
        };
        let out = HeadLossOut {
            d_hidden: d_hidden.view_mut(),
            sums: sums.view_mut(),
            correct: correct.view_mut(),
        };
        engine.head_loss(&input, out).unwrap();
        let sums = read_float(engine, &sums).data;
        let correct = engine.download_index(correct.view()).unwrap();
        (
            d_hidden.read(engine),
            [sums[0] - 0.5, sums[1] - 0.25],
            correct,
        )
    }

    /// Weight of each slot and whether it is correct.
    fn weights(&self, options: &LossOptions) -> (Vec<f64>, Vec<u32>) {
        let mut weights = vec![1.0; self.row.len()];
        let mut correct = vec![0; self.row.len()];
        for block in self.block_begin.windows(2) {
            let range = block[0] as usize..block[1] as usize;
            let q: Vec<f64> = range
                .clone()
                .map(|i| {
                    let z = logits(self.hidden_held.row(self.row[i] as usize), &self.head_held);
                    correct[i] = u32::from(argmax(&z) == self.label[i] as usize);
                    log_softmax(&z, 1.0)[self.label[i] as usize].exp()
                })
                .collect();
            let slots = &mut weights[range.clone()];
            for (j, w) in slots.iter_mut().enumerate() {
                let k = f64::from(self.slot[range.start + j]);
                if options.gamma != 0.0 {
                    *w *= (-(k - 1.0) / f64::from(options.gamma)).exp();
                }
                let streak = f64::from(options.streak_alpha);
                *w *= (1.0 - streak) + streak * q[..j].iter().product::<f64>();
                if let Some(alpha) = options.dpace_alpha.map(f64::from) {
                    let s: Vec<f64> = q.iter().map(|q| (1.0 - alpha) * q + alpha).collect();
                    *w *= (j..q.len())
                        .map(|end| s[..=end].iter().product::<f64>())
                        .sum::<f64>();
                }
            }
        }
        (weights, correct)
    }

    /// One slot's term as a function of its hidden state.
    fn term(&self, i: usize, x: &[f64], options: &LossOptions, correct: bool) -> f64 {
        let z = logits(x, &self.head_held);
        let log_q = log_softmax(&z, 1.0);
        let mut term = -log_q[self.label[i] as usize];
        if options.use_soft_labels {
            let (t, share) = (
                f64::from(options.kl_temperature),
                f64::from(options.kl_weight),
            );
            let taught = logits(
                self.teacher_held.row(self.teacher_row[i] as usize),
                &self.head_held,
            );
            let (p, q) = (log_softmax(&taught, t), log_softmax(&z, t));
            let kl: f64 = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
            term = (1.0 - share) * term + share * t * t * kl;
        }
        if correct {
            let entropy: f64 = log_q.iter().map(|l| -l.exp() * l).sum();
            term += f64::from(options.cap_lambda) * entropy;
        }
        term
    }

    fn check(&self, engine: &E, options: &LossOptions) {
        let (got, sums, got_correct) = self.run(engine, options);
        let (weights, correct) = self.weights(options);
        assert_eq!(got_correct, correct, "{options:?}");
        let mut want = Matrix::zeros(got.rows, got.cols);
        let mut loss = 0.0;
        for i in 0..self.row.len() {
            let row = self.row[i] as usize;
            let correct = correct[i] == 1;
            let mut x = self.hidden_held.row(row).to_vec();
            loss += weights[i] * self.term(i, &x, options, correct);
            for c in 0..x.len() {
                let (middle, step) = (x[c], 1e-5);
                x[c] = middle + step;
                let above = self.term(i, &x, options, correct);
                x[c] = middle - step;
                let below = self.term(i, &x, options, correct);
                x[c] = middle;
                want.row_mut(row)[c] = weights[i] * (above - below) / (2.0 * step);
            }
        }
        close::<E>(&format!("d_hidden {options:?}"), &got, &want);
        let sums_as = |data: &[f64]| Matrix {
            rows: 1,
            cols: data.len(),
            data: data.to_vec(),
        };
        close::<E>(
            &format!("sums {options:?}"),
            &sums_as(&sums),
            &sums_as(&[loss, weights.iter().sum()]),
        );
    }
}

fn logits(x: &[f64], head: &Matrix) -> Vec<f64> {
    (0..head.rows)
        .map(|v| head.row(v).iter().zip(x).map(|(w, x)| w * x).sum())
        .collect()
}

fn log_softmax(z: &[f64], t: f64) -> Vec<f64> {
    let total: f64 = z.iter().map(|z| (z / t).exp()).sum();
    z.iter().map(|z| z / t - total.ln()).collect()
}

fn argmax(z: &[f64]) -> usize {
    (0..z.len()).fold(0, |best, i| if z[i] > z[best] { i } else { best })
}

fn off() -> LossOptions {
    LossOptions {
        gamma: 0.0,
        ..LossOptions::default()
    }
}

fn every_option() -> Vec<LossOptions> {
    let soft = LossOptions {
        use_soft_labels: true,
        kl_temperature: 1.7,
        kl_weight: 0.6,
        ..off()
    };
    vec![
        off(),
        LossOptions {
            gamma: 3.0,
            ..off()
        },
        LossOptions {
            streak_alpha: 0.6,
            gamma: 4.0,
            ..off()
        },
        LossOptions {
            dpace_alpha: Some(0.3),
            ..off()
        },
        LossOptions {
            dpace_alpha: Some(0.0),
            ..off()
        },
        LossOptions {
            cap_lambda: 0.4,
            ..off()
        },
        LossOptions {
            kl_weight: 1.0,
            ..soft
        },
        soft,
        LossOptions {
            gamma: 5.0,
            streak_alpha: 0.5,
            dpace_alpha: Some(0.2),
            cap_lambda: 0.2,
            ..soft
        },
    ]
}

pub fn head_loss_with_every_option<E: Engine>(engine: &E) {
    let case = Case::new(engine, 9, 83, 30);
    for options in every_option() {
        case.check(engine, &options);
    }
    // Nothing is supervised: no loss, no weight, no gradient.
    let mut empty = Case::new(engine, 3, 20, 31);
    for v in [
        &mut empty.row,
        &mut empty.label,
        &mut empty.slot,
        &mut empty.teacher_row,
    ] {
        v.clear();
    }
    empty.block_begin.fill(0);
    let (gradient, sums, _) = empty.run(engine, &off());
    assert!(gradient.data.iter().all(|&x| x == 0.0));
    assert_eq!(sums, [0.0, 0.0]);
}

pub fn head_loss_over_many_chunks<E: Engine>(engine: &E) {
    let case = Case::new(engine, 400, 17, 32);
    assert!(case.row.len() > 1000);
    case.check(engine, &every_option()[8]);
}

pub fn top_tokens_and_logits<E: Engine>(engine: &E) {
    let mut rng = Random(33);
    let (rows, width, vocabulary, k) = (70, 12, 131, 5);
    let (hidden, hidden_held) = random(engine, &mut rng, rows, width, 1.0);
    // Tokens 3, 40 and 100 have one embedding: they always tie.
    let mut head = rng.matrix(vocabulary, width, 1.0);
    for twin in [40, 100] {
        let first = head.row(3).to_vec();
        head.row_mut(twin).copy_from_slice(&first);
    }
    let head = Wide::new(engine, &head);
    let head_held = head.read(engine);
    let mut all = engine.float(rows, vocabulary).unwrap();
    engine
        .logits(hidden.view(), head.view(), all.view_mut())
        .unwrap();
    let all = read_float(engine, &all);
    close::<E>("logits", &all, &hidden_held.times(&head_held.transposed()));
    let mut ids = indices(engine, &vec![0; rows * k]);
    let mut log_probs = float(engine, &Matrix::zeros(rows, k));
    engine
        .top_k(
            hidden.view(),
            head.view(),
            k,
            ids.window_mut(0, rows, k),
            log_probs.view_mut(),
        )
        .unwrap();
    let ids = engine.download_index(ids.view()).unwrap();
    let log_probs = read_float(engine, &log_probs);
    let mut ties = 0;
    for r in 0..rows {
        let z = all.row(r);
        let mut order: Vec<usize> = (0..vocabulary).collect();
        order.sort_by(|&a, &b| z[b].total_cmp(&z[a]).then(a.cmp(&b)));
        let got: Vec<usize> = ids[r * k..][..k].iter().map(|&id| id as usize).collect();
        assert_eq!(got, order[..k], "row {r}");
        ties += usize::from(got.contains(&40));
        let want = log_softmax(z, 1.0);
        for (i, &id) in got.iter().enumerate() {
            assert!((log_probs.at(r, i) - want[id]).abs() < 1e-5, "row {r}");
        }
    }
    assert!(ties > 0, "no tie was met");
}

pub fn tokens_are_chosen_and_drawn<E: Engine>(engine: &E) {
    let mut rng = Random(34);
    let (rows, width, vocabulary) = (70, 12, 131);
    let (hidden, _) = random(engine, &mut rng, rows, width, 1.0);
    let mut head = rng.matrix(vocabulary, width, 0.5);
    for twin in [40, 100] {
        let first = head.row(3).to_vec();
        head.row_mut(twin).copy_from_slice(&first);
    }
    let head = Wide::new(engine, &head);
    let logits_of = |hidden: &Wide<E>, rows: usize| {
        let mut all = engine.float(rows, vocabulary).unwrap();
        engine
            .logits(hidden.view(), head.view(), all.view_mut())
            .unwrap();
        read_float(engine, &all)
    };
    let choose = |hidden: &Wide<E>, rows: usize, draws: Option<Draws<'_>>| {
        let mut ids = indices(engine, &vec![u32::MAX; rows]);
        engine
            .choose(hidden.view(), head.view(), draws, ids.view_mut())
            .unwrap();
        engine.download_index(ids.view()).unwrap()
    };
    let largest = |scores: &[f64]| {
        let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (scores.iter().position(|&s| s == best).unwrap(), best)
    };
    let all = logits_of(&hidden, rows);
    for (r, id) in choose(&hidden, rows, None).into_iter().enumerate() {
        assert_eq!(id as usize, largest(all.row(r)).0, "row {r}");
    }
    let keys: Vec<u64> = (0..rows).map(|_| rng.next()).collect();
    let temperature = 0.7;
    let draws = Draws {
        temperature,
        cap: Some(2.0),
        keys: &keys,
    };
    let drawn = choose(&hidden, rows, Some(draws));
    for (r, &id) in drawn.iter().enumerate() {
        let noise = |id: usize| f64::from(gumbel(keys[r], id as u32));
        let scores: Vec<f64> = all
            .row(r)
            .iter()
            .enumerate()
            .map(|(i, z)| 2.0 * (z / 2.0).tanh() / f64::from(temperature) + noise(i))
            .collect();
        // Rounding may decide between two that are as good as equal.
        assert!(scores[id as usize] > largest(&scores).1 - 1e-4, "row {r}");
    }
    assert_ne!(drawn, choose(&hidden, rows, None));

    // Draws from one distribution, against it.
    let count = 4000;
    let row = rng.matrix(1, width, 1.0).data;
    let same = Wide::new(
        engine,
        &Matrix {
            rows: count,
            cols: width,
            data: row.repeat(count),
        },
    );
    let keys: Vec<u64> = (0..count as u64).collect();
    let draws = Draws {
        temperature,
        cap: None,
        keys: &keys,
    };
    let mut counts = vec![0.0; vocabulary];
    for id in choose(&same, count, Some(draws)) {
        counts[id as usize] += 1.0;
    }
    let held = logits_of(&same, count);
    // Pearson's statistic by the point that it exceeds once in 10,000 (Wilson and Hilferty); rare tokens together.
    let misfit = |temperature: f64| {
        let log_p = log_softmax(held.row(0), temperature);
        let (mut statistic, mut cells, mut rare) = (0.0, 0.0, (0.0, 0.0));
        for (seen, log_p) in counts.iter().zip(&log_p) {
            let expected = log_p.exp() * count as f64;
            if expected < 5.0 {
                rare = (rare.0 + seen, rare.1 + expected);
            } else {
                statistic += (seen - expected).powi(2) / expected;
                cells += 1.0;
            }
        }
        statistic += (rare.0 - rare.1).powi(2) / rare.1.max(1e-9);
        let v = 2.0 / (9.0 * cells);
        statistic / (cells * (1.0 - v + 3.719 * f64::sqrt(v)).powi(3))
    };
    let (right, wrong) = (misfit(f64::from(temperature)), misfit(0.8));
    assert!(right < 1.0 && wrong > 1.0, "{right}, {wrong}");
}

/// The gradient and the sums are the same on two engines of one kind.
pub fn same_bits<E: Engine>(one: &E, other: &E) {
    let run = |engine: &E| {
        let (gradient, sums, correct) =
            Case::new(engine, 200, 300, 34).run(engine, &every_option()[8]);
        (gradient.data, sums, correct)
    };
    assert_eq!(run(one), run(other));
}
