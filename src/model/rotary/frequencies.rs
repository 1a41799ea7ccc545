//! Frequencies of each rotary type.
//!
//! The reference computes in float32; where that decides which side of a border a frequency falls, so does
//! this.

use std::f64::consts::PI;

use super::{Rope, Scaling};

impl Rope {
    /// Dims of a head of size `dim` that turn, rounded up to pairs.
    pub(super) fn turned(&self, dim: usize) -> usize {
        2 * self.share(dim).div_ceil(2)
    }

    /// Dims of a head that turn, before they are paired: the frequencies' exponents count in these.
    fn share(&self, dim: usize) -> usize {
        (dim as f64 * self.partial) as usize
    }

    /// Angle by position of each pair of turned dims of a head of size `dim`, in a sequence of `reach` tokens.
    pub(super) fn inverse_frequencies(&self, dim: usize, reach: usize) -> Vec<f32> {
        let dim = self.share(dim);
        let pairs = dim.div_ceil(2);
        let plain = |theta: f64| (0..pairs).map(move |i| 1.0 / power(theta, i, dim));
        match self.scaling {
            Scaling::Default => plain(self.theta).collect(),
            Scaling::Linear { factor } => {
                plain(self.theta).map(|inv| inv / factor as f32).collect()
            }
            Scaling::Dynamic { factor, original } => {
                let longer = reach.max(original) as f64 / original as f64;
                let grown =
                    (factor * longer - (factor - 1.0)).powf(dim as f64 / (dim as f64 - 2.0));
                plain(self.theta * grown).collect()
            }
            Scaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => plain(self.theta)
                .map(|inv| smoothed(inv, [factor, low, high, original as f64].map(|x| x as f32)))
                .collect(),
            Scaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original,
                truncate,
                ..
            } => {
                let turning = |turns: f64| {
                    let ratio = original as f64 / (turns * 2.0 * PI);
                    dim as f64 * ratio.ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (turning(beta_fast), turning(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                (0..pairs)
                    .map(|i| {
                        let power = power(self.theta, i, dim);
                        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                        let kept = 1.0 - ramp;
                        1.0 / (factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
                    })
                    .collect()
            }
        }
    }

    /// What cosines and sines are multiplied with.
    pub(super) fn attention_factor(&self) -> f32 {
        match self.scaling {
            Scaling::Yarn {
                attention_factor, ..
            } => attention_factor as f32,
            _ => 1.0,
        }
    }

    /// Whether a sequence of `reach` tokens has frequencies of its own.
    pub(super) fn depends_on(&self, reach: usize) -> bool {
        matches!(self.scaling, Scaling::Dynamic { original, .. } if reach > original)
    }
}

/// `theta^(2 i / dim)`; the exponent is a float32 value, and the power is rounded once.
fn power(theta: f64, i: usize, dim: usize) -> f32 {
    let exponent = (2 * i) as f32 / dim as f32;
    theta.powf(f64::from(exponent)) as f32
}

/// A frequency of the `llama3` type.
fn smoothed(inverse: f32, [factor, low, high, original]: [f32; 4]) -> f32 {
    let wavelength = (2.0 * PI) as f32 / inverse;
    if wavelength > original / low {
        inverse / factor
    } else if wavelength < original / high {
        inverse
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * inverse / factor + smooth * inverse
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of heads of 16 dims with theta 10,000, by transformers 5.24.
    #[test]
    fn every_type_has_the_references_frequencies() {
        let yarn = |original, beta_fast, beta_slow, truncate| Scaling::Yarn {
            factor: 4.0,
            attention_factor: 1.0,
            beta_fast,
            beta_slow,
            original,
            truncate,
        };
        let dynamic = Scaling::Dynamic {
            factor: 2.5,
            original: 64,
        };
        let llama3 = Scaling::Llama3 {
            factor: 8.0,
            low: 1.0,
            high: 4.0,
            original: 32,
        };
        let cases: [(Scaling, f64, usize, &[f32]); 10] = [
            (
                Scaling::Linear { factor: 3.0 },
                1.0,
                1,
                &[
                    0.33333334,
                    0.10540926,
                    0.033333335,
                    0.010540926,
                    0.0033333332,
                    0.0010540927,
                    0.00033333336,
                    0.000105409265,
                ],
            ),
            (
                Scaling::Linear { factor: 3.0 },
                0.5,
                1,
                &[0.33333334, 0.033333335, 0.0033333332, 0.00033333336],
            ),
            (
                Scaling::Linear { factor: 3.0 },
                0.33,
                1,
                &[0.33333334, 0.008372954, 0.00021031911],
            ),
            (
                dynamic,
                1.0,
                64,
                &[
                    1.0,
                    0.31622776,
                    0.1,
                    0.03162278,
                    0.01,
                    0.0031622779,
                    0.001,
                    0.0003162278,
                ],
            ),
            (
                dynamic,
                1.0,
                100,
                &[
                    1.0,
                    0.27894768,
                    0.07781181,
                    0.021705423,
                    0.006054677,
                    0.0016889381,
                    0.0004711254,
                    0.00013141934,
                ],
            ),
            (
                llama3,
                1.0,
                1,
                &[
                    1.0,
                    0.09583998,
                    0.0125,
                    0.0039528473,
                    0.00125,
                    0.00039528473,
                    0.000125,
                    3.9528473e-05,
                ],
            ),
            (
                yarn(32, 32.0, 1.0, true),
                1.0,
                1,
                &[
                    1.0,
                    0.19764236,
                    0.025,
                    0.007905695,
                    0.0025,
                    0.00079056947,
                    0.00025,
                    7.905695e-05,
                ],
            ),
            (
                yarn(32, 8.0, 2.0, false),
                1.0,
                1,
                &[
                    1.0,
                    0.07905694,
                    0.025,
                    0.007905695,
                    0.0025,
                    0.00079056947,
                    0.00025,
                    7.905695e-05,
                ],
            ),
            (
                yarn(2048, 32.0, 1.0, true),
                1.0,
                1,
                &[
                    1.0,
                    0.31622776,
                    0.1,
                    0.025693506,
                    0.0062499996,
                    0.0013834966,
                    0.00025,
                    7.905695e-05,
                ],
            ),
            (Scaling::Default, 0.25, 1, &[1.0, 0.01]),
        ];
        for (scaling, partial, reach, expected) in cases {
            let rope = Rope {
                theta: 10_000.0,
                partial,
                scaling,
            };
            let got = rope.inverse_frequencies(16, reach);
            assert_eq!(got.len(), expected.len(), "{rope:?}");
            assert_eq!(rope.turned(16), 2 * expected.len());
            for (got, want) in got.iter().zip(expected) {
                assert!((got - want).abs() <= want * 1e-6, "{rope:?}: {got} {want}");
            }
        }
    }

    #[test]
    fn only_a_long_sequence_of_the_dynamic_type_has_its_own() {
        let mut rope = Rope::of_theta(10_000.0);
        assert!(!rope.depends_on(1 << 30));
        rope.scaling = Scaling::Dynamic {
            factor: 2.0,
            original: 64,
        };
        assert!(!rope.depends_on(64) && rope.depends_on(65));
        let plain = Rope::of_theta(10_000.0).inverse_frequencies(16, 1);
        assert_eq!(rope.inverse_frequencies(16, 64), plain);
        assert_ne!(rope.inverse_frequencies(16, 65), plain);
    }
}
