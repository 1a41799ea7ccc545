//! Attention in its three forms: packed causal ([`causal`]), DFlash blocks ([`block_forward`],
//! [`block_backward`]) and a few rows against a cache ([`cached`]).
//!
//! All work on tiles of query rows: scores by one product, softmax by row, output by one product. Masked
//! scores become probability 0, which adds exact zeros to the sums, so a row's result depends neither on the
//! tile nor on the keys that it does not see.

#![forbid(unsafe_code)]

mod block;
mod block_backward;
mod cache;
mod causal;

pub(super) use block::{Blocks, Keys, block_forward};
pub(super) use block_backward::{KeysGrad, Saved, block_backward};
pub(super) use cache::cached;
pub(super) use causal::causal;

use super::memory::{Rows, RowsMut};
use super::product::{Mat, MatMut, product};
use super::vector::{exp, exp_sum, max};
use crate::engine::{Heads, Scores};

/// What every attention knows.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub heads: Heads,
    pub scale: f32,
    /// Of the scaled scores; packed causal attention and decoding alone know it.
    pub cap: Option<f32>,
}

impl Shape {
    pub(super) fn new(heads: Heads, scores: impl Into<Scores>) -> Self {
        let Scores { scale, cap } = scores.into();
        Self { heads, scale, cap }
    }

    /// The key/value head of a query head.
    fn kv(&self, head: usize) -> usize {
        head / (self.heads.q / self.heads.kv)
    }

    /// The largest of the visible scores and the sum of `exp(score − largest)`, which replaces them.
    #[inline(always)]
    fn softmax(&self, s: &mut [f32]) -> (f32, f32) {
        let Some(cap) = self.cap else {
            return softmax(s, self.scale);
        };
        let twice = 2.0 * self.scale / cap;
        for s in s.iter_mut() {
            // cap · tanh, written with the exponential.
            *s = cap * (1.0 - 2.0 / (1.0 + exp(twice * *s)));
        }
        softmax(s, 1.0)
    }

    fn check(&self, q: Rows<'_>, k: Rows<'_>, v: Rows<'_>) {
        let Heads { q: heads, kv, dim } = self.heads;
        assert_eq!(heads % kv, 0, "{heads} query heads on {kv} key heads");
        assert_eq!(q.cols, heads * dim, "columns of the queries");
        assert_eq!(
            (k.cols, v.cols),
            (kv * dim, kv * dim),
            "columns of keys and values"
        );
        assert_eq!(k.rows, v.rows, "rows of keys and values");
    }
}

/// Queries, keys and values.
#[derive(Clone, Copy)]
pub(super) struct Qkv<'a> {
    pub q: Rows<'a>,
    pub k: Rows<'a>,
    pub v: Rows<'a>,
}

impl<'a> Rows<'a> {
    /// Rows `first..first + rows` of one head, as an operand.
    fn head(&self, first: usize, rows: usize, head: usize, dim: usize) -> Mat<'a> {
        Mat::new(self.from(first, head * dim), rows, dim, self.stride)
    }

    /// One row of one head.
    #[inline(always)]
    fn head_row(&self, row: usize, head: usize, dim: usize) -> &'a [f32] {
        &self.data[row * self.stride + head * dim..][..dim]
    }
}

impl RowsMut<'_> {
    /// Rows `first..first + rows` of one head, to write.
    fn head(&mut self, first: usize, rows: usize, head: usize, dim: usize) -> MatMut<'_> {
        let at = (first * self.stride + head * dim).min(self.data.len());
        MatMut::new(&mut self.data[at..], rows, dim, self.stride)
    }

    /// One row of one head, to write.
    #[inline(always)]
    fn head_row(&mut self, row: usize, head: usize, dim: usize) -> &mut [f32] {
        &mut self.data[row * self.stride + head * dim..][..dim]
    }
}

/// Rows `first..first + rows` of `a` times the transposed rows of `b`, one head each: scores.
fn scores(a: Mat<'_>, b: Mat<'_>, out: MatMut<'_>) {
    product(a, b.t(), out, false);
}

/// The largest of the visible scores and the sum of `exp(scale·(s − largest))`, which replaces them.
#[inline(always)]
fn softmax(s: &mut [f32], scale: f32) -> (f32, f32) {
    let largest = max(s);
    let total = exp_sum(s, largest, scale);
    (largest, total)
}

/// 1 / total, and 0 for a row that sees nothing.
#[inline(always)]
fn inverse(total: f32) -> f32 {
    if total == 0.0 { 0.0 } else { 1.0 / total }
}
