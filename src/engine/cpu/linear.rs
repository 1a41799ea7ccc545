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
