//! Frozen head, loss and the gradient of the hidden state, in chunks of whole blocks (DFlash, arXiv 2602.06036;
//! D-PACE, arXiv 2605.18810; confidence-aware parallel training, arXiv 2512.15745).
//!
//! A chunk is: logits by one product, statistics of each slot, weights of each block (streak and D-PACE need
//! all of a block), the gradient by the logits written over the logits, and its product with the head.

#![forbid(unsafe_code)]

use super::memory::{Rows, RowsMut};
use super::product::{Mat, MatMut};
use super::vector::{dot, exp, exp_sum, max, sum, wide};
use super::{Cpu, index};
use crate::engine::{HeadLoss, HeadLossOut, LossOptions};

/// Logits of a chunk are at most this large, except for a single block.
const CHUNK_BYTES: usize = 1 << 30;
/// Rows that make the product with the head efficient.
pub(crate) const CHUNK_ROWS: usize = 256;

/// One slot of a chunk.
#[derive(Clone, Copy)]
struct Slot {
    label: u32,
    /// Slot number k, from 1.
    number: u32,
    /// Weight of its term.
    weight: f32,
    /// Probability of the label.
    q: f32,
    correct: bool,
    /// Value of its term, without weight.
    term: f32,
    /// Log-sum-exp of the logits.
    lse: f32,
    /// Entropy of the distribution, with the confidence term.
    entropy: f32,
}

pub(super) fn run(cpu: &Cpu, input: &HeadLoss<'_, Cpu>, out: HeadLossOut<'_, Cpu>) {
    let hidden = Rows::new(input.hidden);
    let head = Rows::new(input.lm_head);
    let (rows, labels) = (index(input.slots.row), index(input.slots.label));
    let numbers = index(input.slots.slot);
    let begins = input.slots.block_begin;
    let slots = rows.len();
    assert_eq!(
        (labels.len(), numbers.len()),
        (slots, slots),
        "lengths of the slots"
    );
    assert_eq!(
        hidden.cols, head.cols,
        "columns of the hidden state and of the head"
    );
    assert!(
        begins.first().is_none_or(|&b| b == 0) && begins.last().map_or(0, |&e| e as usize) == slots,
        "block_begin runs from 0 to the number of slots"
    );
    let teacher = input.options.use_soft_labels.then(|| {
        let teacher = Rows::new(input.teacher.expect("soft labels come with a teacher"));
        (teacher, index(input.slots.teacher_row))
    });

    let mut d_hidden = RowsMut::new(out.d_hidden);
    let mut correct = RowsMut::new(out.correct);
    assert_eq!(
        (d_hidden.rows, d_hidden.cols),
        (hidden.rows, hidden.cols),
        "shape of the gradient"
    );
    for r in 0..d_hidden.rows {
        d_hidden.row_mut(r).fill(0.0);
    }

    let width = head.cols;
    let vocabulary = head.rows;
    let (mut loss_sum, mut weight_sum) = (0.0f64, 0.0f64);
    let mut block = 0;
    while block + 1 < begins.len() {
        let end = chunk_end(begins, block, vocabulary);
        let range = begins[block] as usize..begins[end] as usize;
        let blocks = &begins[block..=end];
        block = end;
        let n = range.len();
        if n == 0 {
            continue;
        }
        let mut gathered = cpu.scratch(n * width);
        let gathered = &mut gathered.as_mut_slice()[..n * width];
        let mut logits = cpu.scratch(n * vocabulary);
        let logits = &mut logits.as_mut_slice()[..n * vocabulary];
        project(cpu, hidden, &rows[range.clone()], head, gathered, logits);
        let mut taught = teacher.map(|(teacher, teacher_rows)| {
            let mut taught = cpu.scratch(n * vocabulary);
            let values = &mut taught.as_mut_slice()[..n * vocabulary];
            project(
                cpu,
                teacher,
                &teacher_rows[range.clone()],
                head,
                gathered,
                values,
            );
            taught
        });
        let taught = taught
            .as_mut()
            .map(|t| &mut t.as_mut_slice()[..n * vocabulary]);

        let mut chunk: Vec<Slot> = range
            .clone()
            .map(|i| Slot::new(labels[i], numbers[i], vocabulary))
            .collect();
        measure(
            cpu,
            input.options,
            &mut chunk,
            logits,
            taught.as_deref(),
            vocabulary,
        );
        for block in blocks.windows(2) {
            let first = blocks[0];
            weigh(
                input.options,
                &mut chunk[(block[0] - first) as usize..(block[1] - first) as usize],
            );
        }
        for slot in &chunk {
            loss_sum += f64::from(slot.weight) * f64::from(slot.term);
            weight_sum += f64::from(slot.weight);
        }
        differentiate(cpu, input.options, &chunk, logits, taught, vocabulary);
        cpu.product(
            Mat::new(logits, n, vocabulary, vocabulary),
            head.mat(),
            MatMut::new(gathered, n, width, width),
            false,
        );
        for (i, &row) in rows[range.clone()].iter().enumerate() {
            d_hidden
                .row_mut(row as usize)
                .copy_from_slice(&gathered[i * width..][..width]);
        }
        for (correct, slot) in correct.row_mut(0)[range].iter_mut().zip(&chunk) {
            *correct = u32::from(slot.correct);
        }
    }
    let mut sums = RowsMut::new(out.sums);
    let sums = sums.row_mut(0);
    sums[0] += loss_sum as f32;
    sums[1] += weight_sum as f32;
}

/// The block after the last of a chunk that starts at `block`.
fn chunk_end(begins: &[u32], block: usize, vocabulary: usize) -> usize {
    let rows = (CHUNK_BYTES / (4 * vocabulary.max(1))).min(CHUNK_ROWS);
    let first = begins[block] as usize;
    let mut end = block + 1;
    while end + 1 < begins.len() && begins[end + 1] as usize - first <= rows {
        end += 1;
    }
    end
}

/// `logits = x[rows] headᵀ`; `gathered` is room for the rows.
fn project(
    cpu: &Cpu,
    x: Rows<'_>,
    rows: &[u32],
    head: Rows<'_>,
    gathered: &mut [f32],
    logits: &mut [f32],
) {
    let (n, width, vocabulary) = (rows.len(), head.cols, head.rows);
    assert_eq!(x.cols, width, "columns of a hidden state and of the head");
    for (i, &row) in rows.iter().enumerate() {
        gathered[i * width..][..width].copy_from_slice(x.row(row as usize));
    }
    cpu.product(
        Mat::new(gathered, n, width, width),
        head.mat().t(),
        MatMut::new(logits, n, vocabulary, vocabulary),
        false,
    );
}

impl Slot {
    fn new(label: u32, number: u32, vocabulary: usize) -> Self {
        assert!(
            (label as usize) < vocabulary,
            "label {label} of {vocabulary} tokens"
        );
        assert!(number >= 1, "slot 0 predicts nothing");
        Self {
            label,
            number,
            weight: 1.0,
            q: 0.0,
            correct: false,
            term: 0.0,
            lse: 0.0,
            entropy: 0.0,
        }
    }
}

/// Each slot's statistics and its term. With soft labels `taught` becomes nothing else than read.
fn measure(
    cpu: &Cpu,
    options: &LossOptions,
    chunk: &mut [Slot],
    logits: &[f32],
    taught: Option<&[f32]>,
    vocabulary: usize,
) {
    let work = logits.len() * 4;
    cpu.for_each(work, chunk.iter_mut().enumerate(), |(i, slot)| {
        let z = &logits[i * vocabulary..][..vocabulary];
        wide(
            #[inline(always)]
            || {
                let largest = max(z);
                slot.lse = largest + sum_of_exps(z, largest, 1.0).ln();
                let label = slot.label as usize;
                let cross_entropy = slot.lse - z[label];
                slot.q = exp(-cross_entropy);
                slot.correct = z[label] == largest && !z[..label].contains(&largest);
                slot.term = cross_entropy;
                if let Some(taught) = taught {
                    let kl = divergence(
                        &taught[i * vocabulary..][..vocabulary],
                        z,
                        options.kl_temperature,
                    );
                    let t = options.kl_temperature;
                    slot.term =
                        (1.0 - options.kl_weight) * cross_entropy + options.kl_weight * t * t * kl;
                }
                if options.cap_lambda != 0.0 {
                    slot.entropy = entropy(z, slot.lse);
                    if slot.correct {
                        slot.term += options.cap_lambda * slot.entropy;
                    }
                }
            },
        );
    });
}

/// `Σ exp(scale·(z − shift))`.
#[inline(always)]
fn sum_of_exps(z: &[f32], shift: f32, scale: f32) -> f32 {
    let mut pieces = [0.0; 64];
    let mut total = 0.0;
    for piece in z.chunks(64) {
        let piece_of = &mut pieces[..piece.len()];
        piece_of.copy_from_slice(piece);
        total += exp_sum(piece_of, shift, scale);
    }
    total
}

/// KL(softmax(a / t) ‖ softmax(b / t)).
#[inline(always)]
fn divergence(a: &[f32], b: &[f32], t: f32) -> f32 {
    let (max_a, max_b) = (max(a), max(b));
    let sum_a = sum_of_exps(a, max_a, 1.0 / t);
    let (log_a, log_b) = (sum_a.ln(), sum_of_exps(b, max_b, 1.0 / t).ln());
    let mut total = 0.0;
    let (mut p, mut difference) = ([0.0; 64], [0.0; 64]);
    for (a, b) in a.chunks(64).zip(b.chunks(64)) {
        for i in 0..a.len() {
            let (a, b) = ((a[i] - max_a) / t, (b[i] - max_b) / t);
            p[i] = exp(a);
            difference[i] = (a - log_a) - (b - log_b);
        }
        total += dot(&p[..a.len()], &difference[..a.len()]);
    }
    total / sum_a
}

/// Entropy of softmax(z).
#[inline(always)]
fn entropy(z: &[f32], lse: f32) -> f32 {
    let mut total = 0.0;
    let mut terms = [0.0; 64];
    for z in z.chunks(64) {
        for i in 0..z.len() {
            let log_p = z[i] - lse;
            terms[i] = -exp(log_p) * log_p;
        }
        total += sum(&terms[..z.len()]);
    }
    total
}

/// Weights of one block's slots. Slots that are missing count as 1 in the products.
fn weigh(options: &LossOptions, block: &mut [Slot]) {
    let mut run = 1.0;
    for slot in block.iter_mut() {
        if options.gamma != 0.0 {
            slot.weight *= (-((slot.number - 1) as f32) / options.gamma).exp();
        }
        if options.streak_alpha != 0.0 {
            slot.weight *= (1.0 - options.streak_alpha) + options.streak_alpha * run;
            run *= slot.q;
        }
    }
    if let Some(alpha) = options.dpace_alpha {
        let mut product = 1.0;
        let products: Vec<f32> = block
            .iter()
            .map(|slot| {
                product *= (1.0 - alpha) * slot.q + alpha;
                product
            })
            .collect();
        let mut tail = 0.0;
        for (slot, product) in block.iter_mut().zip(products).rev() {
            tail += product;
            slot.weight *= tail;
        }
    }
}

/// Writes the gradient of `Σ weight · term` by the logits over the logits; `taught` is used up.
fn differentiate(
    cpu: &Cpu,
    options: &LossOptions,
    chunk: &[Slot],
    logits: &mut [f32],
    taught: Option<&mut [f32]>,
    vocabulary: usize,
) {
    let work = logits.len() * 4;
    let hard = if options.use_soft_labels {
        1.0 - options.kl_weight
    } else {
        1.0
    };
    let t = options.kl_temperature;
    let mut taught: Vec<Option<&mut [f32]>> = match taught {
        Some(taught) => taught.chunks_mut(vocabulary).map(Some).collect(),
        None => chunk.iter().map(|_| None).collect(),
    };
    let tasks = chunk
        .iter()
        .zip(logits.chunks_mut(vocabulary))
        .zip(taught.iter_mut());
    cpu.for_each(work, tasks, |((slot, z), taught)| {
        wide(
            #[inline(always)]
            || {
                let label = slot.label as usize;
                let confident = if slot.correct {
                    options.cap_lambda
                } else {
                    0.0
                };
                // The soft part, before the logits are overwritten: t · (softmax(z/t) − softmax(taught/t)).
                if let Some(taught) = taught {
                    let (max_z, max_taught) = (max(z), max(taught));
                    let share = slot.weight * options.kl_weight * t;
                    let of_z = share / sum_of_exps(z, max_z, 1.0 / t);
                    let of_taught = share / sum_of_exps(taught, max_taught, 1.0 / t);
                    for (taught, z) in taught.iter_mut().zip(z.iter()) {
                        *taught = exp((z - max_z) / t) * of_z
                            - exp((*taught - max_taught) / t) * of_taught;
                    }
                }
                if confident == 0.0 {
                    let share = slot.weight * hard;
                    for z in z.iter_mut() {
                        *z = share * exp(*z - slot.lse);
                    }
                } else {
                    for z in z.iter_mut() {
                        let log_p = *z - slot.lse;
                        let p = exp(log_p);
                        *z = slot.weight * p * (hard - confident * (log_p + slot.entropy));
                    }
                }
                z[label] -= slot.weight * hard;
                if let Some(taught) = taught {
                    for (z, taught) in z.iter_mut().zip(taught.iter()) {
                        *z += taught;
                    }
                }
            },
        );
    });
}
