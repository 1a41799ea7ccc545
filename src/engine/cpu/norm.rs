//! RMSNorm (arXiv 1910.07467) with the residual added on the way.

#![forbid(unsafe_code)]

use super::Cpu;
use super::memory::{Rows, RowsMut};
use super::vector::{axpy, dot, dot3, wide};

/// Rows whose weight gradients are summed before they join the others: the order is the same for any number
/// of threads.
const ROWS_PER_SUM: usize = 64;

/// `1 / rms(x)`.
#[inline(always)]
pub(super) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// Gradient of `y = x · inverse · w` by `x`, into `dx`, and by `w`, added to `dw`.
#[inline(always)]
pub(super) fn backward_row(
    dy: &[f32],
    x: &[f32],
    w: &[f32],
    eps: f32,
    dx: &mut [f32],
    dw: &mut [f32],
    add: bool,
) {
    let n = x.len();
    let (dy, w, dx, dw) = (&dy[..n], &w[..n], &mut dx[..n], &mut dw[..n]);
    let inverse = inverse_rms(x, eps);
    for i in 0..n {
        dw[i] += dy[i] * (x[i] * inverse);
    }
    let along = dot3(dy, w, x);
    let pull = inverse * inverse * inverse * along / n as f32;
    if add {
        for i in 0..n {
            dx[i] += dy[i] * w[i] * inverse - x[i] * pull;
        }
    } else {
        for i in 0..n {
            dx[i] = dy[i] * w[i] * inverse - x[i] * pull;
        }
    }
}

pub(super) fn forward(
    cpu: &Cpu,
    h: RowsMut<'_>,
    delta: Option<Rows<'_>>,
    w: &[f32],
    eps: f32,
    y: RowsMut<'_>,
) {
    assert_eq!(
        (h.rows, h.cols, h.cols),
        (y.rows, y.cols, w.len()),
        "shapes of a norm"
    );
    if let Some(delta) = delta {
        assert_eq!(
            (delta.rows, delta.cols),
            (h.rows, h.cols),
            "shape of a residual"
        );
    }
    let work = h.rows * h.cols;
    let per = Cpu::rows_per_task(h.cols);
    cpu.for_each(work, h.chunks(per).zip(y.chunks(per)), |(h, y)| {
        let (first, mut h, mut y) = (h.first, h.rows, y.rows);
        wide(
            #[inline(always)]
            || {
                for r in 0..h.rows {
                    let h = h.row_mut(r);
                    if let Some(delta) = delta {
                        axpy(1.0, delta.row(first + r), h);
                    }
                    let inverse = inverse_rms(h, eps);
                    for ((y, x), w) in y.row_mut(r).iter_mut().zip(h.iter()).zip(w) {
                        *y = x * inverse * w;
                    }
                }
            },
        );
    });
}

pub(super) fn backward(
    cpu: &Cpu,
    dy: Rows<'_>,
    x: Rows<'_>,
    w: &[f32],
    eps: f32,
    dx: RowsMut<'_>,
    dw: &mut [f32],
) {
    let cols = w.len();
    assert_eq!(
        (dy.rows, dy.cols),
        (x.rows, cols),
        "shapes of a norm's gradient"
    );
    assert_eq!(
        (dx.rows, dx.cols, dw.len()),
        (x.rows, cols, cols),
        "shapes of a norm's gradient"
    );
    summed_by_rows(
        cpu,
        dx,
        dw,
        #[inline(always)]
        |row, dx, dw| {
            backward_row(dy.row(row), x.row(row), w, eps, dx, dw, true);
        },
    );
}

/// Calls `f(row, dx row, dw)` for each row of `dx`, where the `dw`s of [`ROWS_PER_SUM`] rows are one partial sum;
/// the partial sums are added to `dw` in order.
pub(super) fn summed_by_rows(
    cpu: &Cpu,
    dx: RowsMut<'_>,
    dw: &mut [f32],
    f: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
) {
    let n = dw.len();
    let sums = dx.rows.div_ceil(ROWS_PER_SUM);
    let mut partial = cpu.scratch(sums * n);
    let partial = &mut partial.as_mut_slice()[..sums * n];
    let work = dx.rows * dx.cols;
    let tasks = dx.chunks(ROWS_PER_SUM).zip(partial.chunks_mut(n.max(1)));
    cpu.for_each(work, tasks, |(chunk, sum)| {
        let (first, mut dx) = (chunk.first, chunk.rows);
        sum.fill(0.0);
        wide(
            #[inline(always)]
            || {
                for r in 0..dx.rows {
                    f(first + r, dx.row_mut(r), sum);
                }
            },
        );
    });
    for sum in partial.chunks(n.max(1)) {
        for (dw, sum) in dw.iter_mut().zip(sum) {
            *dw += sum;
        }
    }
}
