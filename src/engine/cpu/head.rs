//! The most likely tokens of a few rows, and draws.

#![forbid(unsafe_code)]

use std::ops::Range;

use super::Cpu;
use super::memory::{Rows, RowsMut};
use super::product::MatMut;
use super::vector::{exp, wide};
use crate::engine::{Draws, gumbel};

/// Rows whose logits are held at once.
const ROWS: usize = 64;

pub(super) fn top_k(
    cpu: &Cpu,
    hidden: Rows<'_>,
    lm_head: Rows<'_>,
    k: usize,
    ids: RowsMut<'_, u32>,
    log_probs: RowsMut<'_>,
) {
    let vocabulary = lm_head.rows;
    assert!(k <= vocabulary, "the best {k} of {vocabulary} tokens");
    assert_eq!((ids.rows, ids.cols), (hidden.rows, k), "shape of the ids");
    assert_eq!(
        (log_probs.rows, log_probs.cols),
        (hidden.rows, k),
        "shape of the log probabilities"
    );
    let mut logits = cpu.scratch(ROWS.min(hidden.rows) * vocabulary);
    for (ids, log_probs) in ids.chunks(ROWS).zip(log_probs.chunks(ROWS)) {
        let (first, ids, log_probs) = (ids.first, ids.rows, log_probs.rows);
        let rows = ids.rows;
        let logits = project(
            cpu,
            hidden,
            first..first + rows,
            lm_head,
            logits.as_mut_slice(),
        );
        let tasks = ids.chunks(1).zip(log_probs.chunks(1));
        cpu.for_each(rows * vocabulary, tasks, |(mut ids, mut log_probs)| {
            let logits = &logits[ids.first * vocabulary..][..vocabulary];
            best(logits, ids.rows.row_mut(0), log_probs.rows.row_mut(0));
        });
    }
}

/// Logits of some rows of `hidden`, in `room`.
fn project<'a>(
    cpu: &Cpu,
    hidden: Rows<'_>,
    range: Range<usize>,
    lm_head: Rows<'_>,
    room: &'a mut [f32],
) -> &'a [f32] {
    let (rows, vocabulary) = (range.len(), lm_head.rows);
    let logits = &mut room[..rows * vocabulary];
    let x = Rows {
        data: hidden.from(range.start, 0),
        rows,
        ..hidden
    };
    cpu.product(
        x.mat(),
        lm_head.mat().t(),
        MatMut::new(logits, rows, vocabulary, vocabulary),
        false,
    );
    logits
}

/// One token for each row: the most likely, or drawn.
pub(super) fn choose(
    cpu: &Cpu,
    hidden: Rows<'_>,
    lm_head: Rows<'_>,
    draws: Option<Draws<'_>>,
    ids: &mut [u32],
) {
    let vocabulary = lm_head.rows;
    assert_eq!(ids.len(), hidden.rows, "one token for each row");
    if let Some(draws) = draws {
        assert!(draws.temperature > 0.0, "draws at temperature 0");
        assert_eq!(draws.keys.len(), hidden.rows, "one key for each row");
    }
    let mut logits = cpu.scratch(ROWS.min(hidden.rows) * vocabulary);
    for (number, ids) in ids.chunks_mut(ROWS).enumerate() {
        let (first, rows) = (number * ROWS, ids.len());
        let logits = project(
            cpu,
            hidden,
            first..first + rows,
            lm_head,
            logits.as_mut_slice(),
        );
        cpu.for_each(
            rows * vocabulary,
            ids.iter_mut().enumerate(),
            |(row, id)| {
                let logits = &logits[row * vocabulary..][..vocabulary];
                *id = match draws {
                    None => largest(logits.iter().copied()),
                    Some(Draws {
                        temperature,
                        cap,
                        keys,
                    }) => {
                        let key = keys[first + row];
                        let capped = |z: f32| cap.map_or(z, |cap| cap * (z / cap).tanh());
                        let score = |(&z, id): (&f32, u32)| {
                            capped(z) * (1.0 / temperature) + gumbel(key, id)
                        };
                        largest(logits.iter().zip(0..).map(score))
                    }
                };
            },
        );
    }
}

/// Place of the largest value, the first of several.
fn largest(values: impl Iterator<Item = f32>) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (value, id) in values.zip(0..) {
        if value > best.0 {
            best = (value, id);
        }
    }
    best.1
}

/// The largest of `logits`, best first, the lower id first in a tie.
fn best(logits: &[f32], ids: &mut [u32], log_probs: &mut [f32]) {
    let k = ids.len();
    if k == 0 {
        return;
    }
    let mut found: Vec<(f32, u32)> = Vec::with_capacity(k + 1);
    let mut worst = f32::NEG_INFINITY;
    for (id, &z) in logits.iter().enumerate() {
        if found.len() < k || z > worst {
            let at = found.partition_point(|&(other, _)| other >= z);
            found.insert(at, (z, id as u32));
            found.truncate(k);
            worst = found.last().map_or(worst, |&(z, _)| z);
        }
    }
    let largest = found[0].0;
    let total = wide(
        #[inline(always)]
        || {
            // Float64: a vocabulary is long, and these values are compared with one another.
            let mut total = 0.0f64;
            for piece in logits.chunks(64) {
                let mut sum = 0.0f32;
                for z in piece {
                    sum += exp(z - largest);
                }
                total += f64::from(sum);
            }
            total
        },
    );
    for (i, (z, id)) in found.into_iter().enumerate() {
        ids[i] = id;
        log_probs[i] = (f64::from(z) - f64::from(largest) - total.ln()) as f32;
    }
}
