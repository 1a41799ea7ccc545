//! Gated activations: SwiGLU and GEGLU (arXiv 2002.05202).

#![forbid(unsafe_code)]

use super::Cpu;
use super::memory::{Rows, RowsMut};
use super::vector::{exp, wide};

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// GELU approximated by tanh (arXiv 1606.08415), `tanh` written with the exponential.
#[inline(always)]
fn gelu(x: f32) -> f32 {
    const ROOT: f32 = 0.797_884_6; // √(2/π)
    x * sigmoid(2.0 * ROOT * (x + 0.044_715 * x * x * x))
}

pub(super) fn forward(cpu: &Cpu, gate_up: Rows<'_>, y: RowsMut<'_>) {
    gated(
        cpu,
        gate_up,
        y,
        #[inline(always)]
        |gate| gate * sigmoid(gate),
    );
}

pub(super) fn gelu_gated(cpu: &Cpu, gate_up: Rows<'_>, y: RowsMut<'_>) {
    gated(cpu, gate_up, y, gelu);
}

/// `y = f(gate) * up`.
fn gated(cpu: &Cpu, gate_up: Rows<'_>, y: RowsMut<'_>, f: impl Fn(f32) -> f32 + Sync) {
    let inner = y.cols;
    assert_eq!(
        (gate_up.rows, gate_up.cols),
        (y.rows, 2 * inner),
        "shapes of a gated activation"
    );
    let work = y.rows * inner * 4;
    cpu.for_each(work, y.chunks_of_task(), |chunk| {
        let (first, mut y) = (chunk.first, chunk.rows);
        wide(
            #[inline(always)]
            || {
                for r in 0..y.rows {
                    let (gate, up) = gate_up.row(first + r).split_at(inner);
                    for ((y, gate), up) in y.row_mut(r).iter_mut().zip(gate).zip(up) {
                        *y = f(*gate) * up;
                    }
                }
            },
        );
    });
}

pub(super) fn backward(cpu: &Cpu, dy: Rows<'_>, gate_up: Rows<'_>, d_gate_up: RowsMut<'_>) {
    let inner = dy.cols;
    assert_eq!(
        (gate_up.rows, gate_up.cols),
        (dy.rows, 2 * inner),
        "shapes of a SwiGLU"
    );
    assert_eq!(
        (d_gate_up.rows, d_gate_up.cols),
        (dy.rows, 2 * inner),
        "shapes of a SwiGLU"
    );
    let work = dy.rows * inner * 4;
    cpu.for_each(work, d_gate_up.chunks_of_task(), |chunk| {
        let (first, mut out) = (chunk.first, chunk.rows);
        wide(
            #[inline(always)]
            || {
                for r in 0..out.rows {
                    let dy = dy.row(first + r);
                    let (gate, up) = gate_up.row(first + r).split_at(inner);
                    let (d_gate, d_up) = out.row_mut(r).split_at_mut(inner);
                    for i in 0..inner {
                        let s = sigmoid(gate[i]);
                        d_gate[i] = dy[i] * up[i] * s * (1.0 + gate[i] * (1.0 - s));
                        d_up[i] = dy[i] * gate[i] * s;
                    }
                }
            },
        );
    });
}
