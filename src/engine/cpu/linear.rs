//! Linear layers: forward, gradient of the input, gradient of the weight.

#![forbid(unsafe_code)]

use super::Cpu;
use super::memory::{Rows, RowsMut};
use super::product::{Mat, MatMut};
use super::vector::{axpy, wide};

impl<'a> Rows<'a> {
    /// As an operand of a product.
    pub(super) fn mat(&self) -> Mat<'a> {
        Mat::new(self.data, self.rows, self.cols, self.stride)
    }
}

impl<'a> RowsMut<'a> {
    /// As the result of a product.
    pub(super) fn mat(self) -> MatMut<'a> {
        MatMut::new(self.data, self.rows, self.cols, self.stride)
    }
}

pub(super) fn forward(cpu: &Cpu, x: Rows<'_>, w: Rows<'_>, y: RowsMut<'_>, accumulate: bool) {
    cpu.product(x.mat(), w.mat().t(), y.mat(), accumulate);
}

pub(super) fn input_gradient(
    cpu: &Cpu,
    dy: Rows<'_>,
    w: Rows<'_>,
    dx: RowsMut<'_>,
    accumulate: bool,
) {
    cpu.product(dy.mat(), w.mat(), dx.mat(), accumulate);
}

pub(super) fn weight_gradient(cpu: &Cpu, dy: Rows<'_>, x: Rows<'_>, dw: RowsMut<'_>) {
    cpu.product(dy.mat().t(), x.mat(), dw.mat(), true);
}

pub(super) fn add_bias(cpu: &Cpu, bias: &[f32], y: RowsMut<'_>) {
    assert_eq!(bias.len(), y.cols, "columns of a bias");
    let work = y.rows * y.cols;
    cpu.for_each(work, y.chunks_of_task(), |chunk| {
        let mut y = chunk.rows;
        wide(
            #[inline(always)]
            || {
                for r in 0..y.rows {
                    axpy(1.0, bias, y.row_mut(r));
                }
            },
        );
    });
}

pub(super) fn scale(cpu: &Cpu, by: f32, x: RowsMut<'_>) {
    let work = x.rows * x.cols;
    cpu.for_each(work, x.chunks_of_task(), |chunk| {
        let mut x = chunk.rows;
        for r in 0..x.rows {
            for x in x.row_mut(r) {
                *x *= by;
            }
        }
    });
}

pub(super) fn add(cpu: &Cpu, x: Rows<'_>, y: RowsMut<'_>) {
    assert_eq!((x.rows, x.cols), (y.rows, y.cols), "shapes of a sum");
    let work = y.rows * y.cols;
    cpu.for_each(work, y.chunks_of_task(), |chunk| {
        let (first, mut y) = (chunk.first, chunk.rows);
        wide(
            #[inline(always)]
            || {
                for r in 0..y.rows {
                    axpy(1.0, x.row(first + r), y.row_mut(r));
                }
            },
        );
    });
}

/// `dst[rows[i]] += weights[i] * src[i]`.
pub(super) fn scatter_add(src: Rows<'_>, rows: &[u32], weights: &[f32], mut dst: RowsMut<'_>) {
    assert_eq!(
        (src.rows, src.cols, weights.len()),
        (rows.len(), dst.cols, rows.len()),
        "shapes of scattered rows"
    );
    wide(
        #[inline(always)]
        || {
            for (r, (&to, &weight)) in rows.iter().zip(weights).enumerate() {
                axpy(weight, src.row(r), dst.row_mut(to as usize));
            }
        },
    );
}
