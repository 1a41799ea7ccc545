//! AdamW, the norm of a gradient, and the check for values that are no numbers.

#![forbid(unsafe_code)]

use super::Cpu;
use super::memory::{Rows, RowsMut};
use super::vector::{dot, sum, wide};
use crate::engine::AdamW;

/// Elements whose squares are summed in float32 before they join the float64 sum.
const PIECE: usize = 4096;

/// What AdamW updates, all of one shape.
pub(super) struct State<'a> {
    pub master: RowsMut<'a>,
    pub m: RowsMut<'a>,
    pub v: RowsMut<'a>,
}

pub(super) fn adamw(
    cpu: &Cpu,
    update: &AdamW,
    grad: Rows<'_>,
    state: State<'_>,
    weight: Option<RowsMut<'_>>,
) {
    let State { master, m, v } = state;
    let shape = (grad.rows, grad.cols);
    assert_eq!((master.rows, master.cols), shape, "shape of the masters");
    assert_eq!((m.rows, m.cols), shape, "shape of the first moment");
    assert_eq!((v.rows, v.cols), shape, "shape of the second moment");
    let count = update.count as f64;
    let correct = |beta: f32| (1.0 / (1.0 - f64::from(beta).powf(count))) as f32;
    let (correct_m, correct_v) = (correct(update.beta1), correct(update.beta2));
    let AdamW {
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        grad_scale,
        ..
    } = *update;
    let keep = 1.0 - lr * weight_decay;
    let per = Cpu::rows_per_task(grad.cols).min(grad.rows.div_ceil(cpu.threads()).max(1));
    let work = grad.rows * grad.cols * 4;
    let mut weight = weight;
    let weights: Vec<_> = match weight.take() {
        Some(weight) => {
            assert_eq!((weight.rows, weight.cols), shape, "shape of the weight");
            weight.chunks(per).map(Some).collect()
        }
        None => (0..grad.rows.div_ceil(per)).map(|_| None).collect(),
    };
    let tasks = master
        .chunks(per)
        .zip(m.chunks(per))
        .zip(v.chunks(per))
        .zip(weights);
    cpu.for_each(work, tasks, |(((master, m), v), weight)| {
        let (first, mut master, mut m, mut v) = (master.first, master.rows, m.rows, v.rows);
        let mut weight = weight.map(|chunk| chunk.rows);
        wide(
            #[inline(always)]
            || {
                for r in 0..master.rows {
                    let grad = grad.row(first + r);
                    let (x, m, v) = (master.row_mut(r), m.row_mut(r), v.row_mut(r));
                    let n = grad.len();
                    let (x, m, v) = (&mut x[..n], &mut m[..n], &mut v[..n]);
                    for i in 0..n {
                        let g = grad[i] * grad_scale;
                        m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                        v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                        let step = (m[i] * correct_m) / ((v[i] * correct_v).sqrt() + eps);
                        x[i] = x[i] * keep - lr * step;
                    }
                    if let Some(weight) = &mut weight {
                        weight.row_mut(r).copy_from_slice(x);
                    }
                }
            },
        );
    });
}

pub(super) fn sum_squares(cpu: &Cpu, x: Rows<'_>) -> f32 {
    let pieces_per_row = x.cols.div_ceil(PIECE);
    let mut sums = vec![0.0f32; x.rows * pieces_per_row];
    let work = x.rows * x.cols;
    let tasks = sums.iter_mut().enumerate();
    let square = |(i, sum): (usize, &mut f32)| {
        let (row, piece) = (i / pieces_per_row, i % pieces_per_row);
        let x = x.row(row);
        let x = &x[piece * PIECE..x.len().min((piece + 1) * PIECE)];
        *sum = wide(
            #[inline(always)]
            || dot(x, x),
        );
    };
    cpu.for_each(work, tasks, square);
    sums.iter().map(|&s| f64::from(s)).sum::<f64>() as f32
}

pub(super) fn has_non_finite(x: Rows<'_>) -> bool {
    // 0 · x is 0 for every number and NaN for the rest.
    (0..x.rows).any(|r| {
        wide(
            #[inline(always)]
            || {
                x.row(r).chunks(64).any(|piece| {
                    let mut differences = [0.0; 64];
                    for (d, x) in differences.iter_mut().zip(piece) {
                        *d = 0.0 * x;
                    }
                    sum(&differences) != 0.0
                })
            },
        )
    })
}
