//! Loops over float32 slices that the compiler turns into the widest vectors the machine has.
//!
//! [`wide`] runs a closure compiled once per instruction set and picked at run time, so one binary serves a
//! baseline x86-64 and an AVX-512 machine. Reductions run over [`LANES`] fixed lanes joined in a fixed tree:
//! their bits depend neither on the instruction set nor on the number of threads.

#![forbid(unsafe_code)]

use pulp::Arch;

/// Partial sums of a reduction.
const LANES: usize = 16;

/// Runs `f` compiled for the best instruction set of this machine. What it calls must be inlined into it.
#[inline]
pub(super) fn wide<R>(f: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(f)
}

/// Joins the lanes in a fixed tree.
#[inline(always)]
fn join(mut lanes: [f32; LANES], op: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = op(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// `Σ x`.
#[inline(always)]
pub(super) fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] += chunk[i];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += x;
    }
    join(lanes, |a, b| a + b)
}

/// `Σ x·y`.
#[inline(always)]
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    for (x, y) in xs.iter().zip(ys) {
        for i in 0..LANES {
            lanes[i] += x[i] * y[i];
        }
    }
    for ((lane, x), y) in lanes.iter_mut().zip(x_rest).zip(y_rest) {
        *lane += x * y;
    }
    join(lanes, |a, b| a + b)
}

/// `Σ x·y·z`.
#[inline(always)]
pub(super) fn dot3(x: &[f32], y: &[f32], z: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    let (zs, z_rest) = z.as_chunks::<LANES>();
    for ((x, y), z) in xs.iter().zip(ys).zip(zs) {
        for i in 0..LANES {
            lanes[i] += x[i] * y[i] * z[i];
        }
    }
    for (((lane, x), y), z) in lanes.iter_mut().zip(x_rest).zip(y_rest).zip(z_rest) {
        *lane += x * y * z;
    }
    join(lanes, |a, b| a + b)
}

/// The largest element, −∞ of none.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], chunk[i]);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, *x);
    }
    join(lanes, larger)
}

/// `y += a·x`.
#[inline(always)]
pub(super) fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// `x = exp(scale·(x − shift))`; returns the sum.
#[inline(always)]
pub(super) fn exp_sum(x: &mut [f32], shift: f32, scale: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            chunk[i] = exp((chunk[i] - shift) * scale);
            lanes[i] += chunk[i];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *x = exp((*x - shift) * scale);
        *lane += *x;
    }
    join(lanes, |a, b| a + b)
}

/// `eˣ` within 2 units in the last place for −87.3 < x < 88; 0 below, e⁸⁸ above, NaN stays NaN.
///
/// `x = n·ln 2 + r` with |r| ≤ ln 2 / 2, then the Taylor series of `eʳ` up to r⁷ (its rest is below 10⁻⁸) and
/// `2ⁿ` put together from its bits. Written without fused multiply-add so that all machines agree.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.3;
    const HIGHEST: f32 = 88.0;
    // Adding it rounds to an integer and leaves that integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has few bits, so that its product with n is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = (std::f64::consts::LN_2 - 355.0 / 512.0) as f32;

    let y = if x > HIGHEST { HIGHEST } else { x };
    let y = if y < LOWEST { LOWEST } else { y };
    let shifted = y * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (y - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    let series = (p * r) * r + r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < LOWEST { 0.0 } else { series * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        for i in 0..2_000_000 {
            let x = -87.3 + i as f32 * (175.0 / 2_000_000.0);
            let exact = f64::from(x).exp();
            let unit = f64::from(f32::EPSILON) * 2f64.powi(exact.log2().floor() as i32);
            worst = worst.max((f64::from(exp(x)) - exact).abs() / unit);
        }
        assert!(worst <= 2.0, "{worst} units");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-90.0), 0.0);
        assert!(exp(f32::INFINITY).is_finite() && exp(f32::INFINITY) > 1e38);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn reductions_have_the_same_bits_in_every_instruction_set() {
        for len in [0, 1, 15, 16, 17, 33, 1000] {
            let x: Vec<f32> = (0..len).map(|i| ((i * 37 % 101) as f32).sin()).collect();
            let mut inside = x.clone();
            let mut outside = x.clone();
            let by_vectors = wide(
                #[inline(always)]
                || {
                    (
                        sum(&x),
                        dot(&x, &x),
                        max(&x),
                        exp_sum(&mut inside, 0.5, 3.0),
                    )
                },
            );
            let plain = (
                sum(&x),
                dot(&x, &x),
                max(&x),
                exp_sum(&mut outside, 0.5, 3.0),
            );
            assert_eq!(by_vectors, plain, "length {len}");
            assert_eq!(inside, outside);
        }
    }
}
