//! Per-head RMSNorm followed by rotary position embedding (arXiv 2104.09864, rotate-half convention).

#![forbid(unsafe_code)]

use super::Cpu;
use super::memory::{Rows, RowsMut};
use super::norm::{backward_row, inverse_rms, summed_by_rows};
use super::vector::wide;
use crate::engine::Rotary;

/// The norm of each head; without `w` heads are only turned.
pub(super) struct HeadNorm<'a> {
    pub w: Option<&'a [f32]>,
    pub eps: f32,
    pub dim: usize,
}

/// The rotation of each row.
#[derive(Clone, Copy)]
pub(super) struct Turn<'a> {
    positions: &'a [u32],
    cos: Rows<'a>,
    sin: Rows<'a>,
}

impl<'a> Turn<'a> {
    pub(super) fn new(positions: &'a [u32], tables: Rotary<'a, Cpu>) -> Self {
        let (cos, sin) = (Rows::new(tables.cos), Rows::new(tables.sin));
        assert_eq!(
            (cos.rows, cos.cols),
            (sin.rows, sin.cols),
            "shapes of rotary tables"
        );
        Self {
            positions,
            cos,
            sin,
        }
    }

    /// Cosines and sines of a row.
    #[inline(always)]
    fn at(&self, row: usize) -> (&'a [f32], &'a [f32]) {
        let position = self.positions[row] as usize;
        assert!(
            position < self.cos.rows,
            "position {position} past the rotary table of {}",
            self.cos.rows
        );
        (self.cos.row(position), self.sin.row(position))
    }
}

/// `y = R x` in place.
#[inline(always)]
fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let (low, high) = x[..2 * half].split_at_mut(half);
    for i in 0..half {
        let (a, b) = (low[i], high[i]);
        low[i] = a * cos[i] - b * sin[i];
        high[i] = b * cos[i] + a * sin[i];
    }
}

/// `y = Rᵀ x` in place.
#[inline(always)]
fn rotate_back(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let (low, high) = x[..2 * half].split_at_mut(half);
    for i in 0..half {
        let (a, b) = (low[i], high[i]);
        low[i] = a * cos[i] + b * sin[i];
        high[i] = b * cos[i] - a * sin[i];
    }
}

pub(super) fn forward(cpu: &Cpu, x: Rows<'_>, heads: HeadNorm<'_>, turn: Turn<'_>, y: RowsMut<'_>) {
    let HeadNorm { w, eps, dim } = heads;
    assert_eq!((x.rows, x.cols), (y.rows, y.cols), "shapes of heads");
    assert_eq!(
        (x.cols % dim, turn.positions.len()),
        (0, x.rows),
        "shapes of heads"
    );
    assert!(
        w.is_none_or(|w| w.len() == dim) && 2 * turn.cos.cols <= dim,
        "head size"
    );
    let work = x.rows * x.cols;
    cpu.for_each(work, y.chunks_of_task(), |chunk| {
        let (first, mut y) = (chunk.first, chunk.rows);
        wide(
            #[inline(always)]
            || {
                for r in 0..y.rows {
                    let (cos, sin) = turn.at(first + r);
                    let x = x.row(first + r);
                    for (x, y) in x.chunks_exact(dim).zip(y.row_mut(r).chunks_exact_mut(dim)) {
                        if let Some(w) = w {
                            let inverse = inverse_rms(x, eps);
                            for i in 0..dim {
                                y[i] = x[i] * inverse * w[i];
                            }
                        } else {
                            y.copy_from_slice(x);
                        }
                        rotate(y, cos, sin);
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
    (w, eps): (&[f32], f32),
    turn: Turn<'_>,
    dx: RowsMut<'_>,
    dw: &mut [f32],
) {
    let dim = w.len();
    assert_eq!((dy.rows, dy.cols), (x.rows, x.cols), "shapes of heads");
    assert_eq!(
        (dx.rows, dx.cols, dw.len()),
        (x.rows, x.cols, dim),
        "shapes of heads"
    );
    assert_eq!(
        (x.cols % dim, turn.positions.len()),
        (0, x.rows),
        "shapes of heads"
    );
    summed_by_rows(
        cpu,
        dx,
        dw,
        #[inline(always)]
        |row, dx, dw| {
            let (cos, sin) = turn.at(row);
            let (x, dy) = (x.row(row), dy.row(row));
            for (i, dx) in dx.chunks_exact_mut(dim).enumerate() {
                let mut turned = [0.0; MAX_DIM];
                let turned = &mut turned[..dim];
                turned.copy_from_slice(&dy[i * dim..][..dim]);
                rotate_back(turned, cos, sin);
                backward_row(turned, &x[i * dim..][..dim], w, eps, dx, dw, false);
            }
        },
    );
}

/// Largest head size.
const MAX_DIM: usize = 512;
