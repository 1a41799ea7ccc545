//! Linear layers, norms, rotary embedding, gated activations and sums.

use slipstream::engine::{Engine, EngineError, HalfMut, HalfView, Rotary};

use crate::support::{Matrix, Random, Wide, close, float, indices, random, read_float, rounded};

pub fn linear_and_its_gradients<E: Engine>(engine: &E) {
    let mut rng = Random(10);
    for (m, inner, outer) in [
        (1, 33, 65),
        (3, 5, 1),
        (17, 129, 40),
        (130, 600, 70),
        (0, 8, 8),
    ] {
        let (x, x_held) = random(engine, &mut rng, m, inner, 1.0);
        let (w, w_held) = random(engine, &mut rng, outer, inner, 1.0);
        let (dy, dy_held) = random(engine, &mut rng, m, outer, 1.0);
        for accumulate in [false, true] {
            let name = format!("[{m}, {inner}, {outer}] accumulate {accumulate}");
            let (mut y, before) = random(engine, &mut rng, m, outer, 1.0);
            engine
                .linear(x.view(), w.view(), y.view_mut(), accumulate)
                .unwrap();
            let want = x_held.times(&w_held.transposed());
            let want = if accumulate { want.plus(&before) } else { want };
            close::<E>(&format!("linear {name}"), &y.read(engine), &want);

            let (mut dx, before) = random(engine, &mut rng, m, inner, 1.0);
            engine
                .linear_dx(dy.view(), w.view(), dx.view_mut(), accumulate)
                .unwrap();
            let want = dy_held.times(&w_held);
            let want = if accumulate { want.plus(&before) } else { want };
            close::<E>(&format!("linear_dx {name}"), &dx.read(engine), &want);
        }
        let before = rounded(&rng.matrix(outer, inner, 1.0));
        let mut dw = float(engine, &before);
        engine
            .linear_dw(dy.view(), x.view(), dw.view_mut())
            .unwrap();
        let want = dy_held.transposed().times(&x_held).plus(&before);
        close::<E>("linear_dw", &read_float(engine, &dw), &want);

        let bias = rounded(&rng.matrix(1, outer, 1.0));
        let (mut y, mut want) = random(engine, &mut rng, m, outer, 1.0);
        engine
            .add_bias(float(engine, &bias).view(), y.view_mut())
            .unwrap();
        for r in 0..m {
            for (x, b) in want.row_mut(r).iter_mut().zip(&bias.data) {
                *x += b;
            }
        }
        close::<E>("add_bias", &y.read(engine), &want);
    }
}

/// `(y, dx, dw)` of RMSNorm of one row.
fn norm_row(x: &[f64], w: &[f64], dy: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let n = x.len() as f64;
    let inverse = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / n + eps).sqrt();
    let along: f64 = (0..x.len()).map(|i| dy[i] * w[i] * x[i]).sum();
    let y = (0..x.len()).map(|i| x[i] * inverse * w[i]).collect();
    let dx = (0..x.len())
        .map(|i| inverse * (dy[i] * w[i] - x[i] * inverse * inverse * along / n))
        .collect();
    let dw = (0..x.len()).map(|i| dy[i] * x[i] * inverse).collect();
    (y, dx, dw)
}

pub fn norm_and_its_gradient<E: Engine>(engine: &E) {
    let mut rng = Random(11);
    let eps = 1e-5f32;
    for (rows, cols) in [(1, 7), (150, 48), (3, 1000)] {
        let w = rounded(&rng.matrix(1, cols, 1.0));
        let w_e = float(engine, &w);
        for residual in [false, true] {
            let (mut h, h_held) = random(engine, &mut rng, rows, cols, 0.5);
            let (delta, delta_held) = random(engine, &mut rng, rows, cols, 0.5);
            let mut y = Wide::<E>::output(engine, rows, cols);
            engine
                .norm(
                    h.view_mut(),
                    residual.then(|| delta.view()),
                    w_e.view(),
                    eps,
                    y.view_mut(),
                )
                .unwrap();
            let sum = if residual {
                h_held.plus(&delta_held)
            } else {
                h_held
            };
            close::<E>("residual", &h.read(engine), &sum);
            let x = h.read(engine);
            let (dy, dy_held) = random(engine, &mut rng, rows, cols, 1.0);
            let (mut dx, mut want_dx) = random(engine, &mut rng, rows, cols, 1.0);
            let mut want_dw = rounded(&rng.matrix(1, cols, 1.0));
            let mut dw = float(engine, &want_dw);
            engine
                .norm_backward(
                    dy.view(),
                    h.view(),
                    w_e.view(),
                    eps,
                    dx.view_mut(),
                    dw.view_mut(),
                )
                .unwrap();
            let mut want_y = Matrix::zeros(rows, cols);
            for r in 0..rows {
                let (y, d, dw) = norm_row(x.row(r), &w.data, dy_held.row(r), f64::from(eps));
                want_y.row_mut(r).copy_from_slice(&y);
                for c in 0..cols {
                    want_dx.row_mut(r)[c] += d[c];
                    want_dw.data[c] += dw[c];
                }
            }
            close::<E>("norm", &y.read(engine), &want_y);
            close::<E>("norm dx", &dx.read(engine), &want_dx);
            close::<E>("norm dw", &read_float(engine, &dw), &want_dw);
        }
    }
}

/// Rotates a head by its position's tables; `sign` −1 turns back.
fn turned(x: &[f64], cos: &[f64], sin: &[f64], sign: f64) -> Vec<f64> {
    let half = cos.len();
    let mut y = x.to_vec();
    for i in 0..half {
        y[i] = x[i] * cos[i] - sign * x[i + half] * sin[i];
        y[i + half] = x[i + half] * cos[i] + sign * x[i] * sin[i];
    }
    y
}

pub fn head_norm_rotary_and_its_gradient<E: Engine>(engine: &E) {
    let mut rng = Random(12);
    let eps = 1e-6f32;
    for (rows, heads, dim, turned_dim) in [(1, 1, 2, 2), (70, 3, 16, 16), (9, 2, 64, 24)] {
        let table = 40;
        let angles = rng.matrix(table, turned_dim / 2, 2.0);
        let cos = rounded(&Matrix {
            data: angles.data.iter().map(|a| a.cos()).collect(),
            ..angles.clone()
        });
        let sin = rounded(&Matrix {
            data: angles.data.iter().map(|a| a.sin()).collect(),
            ..angles
        });
        let (cos_e, sin_e) = (float(engine, &cos), float(engine, &sin));
        let rotary = Rotary {
            cos: cos_e.view(),
            sin: sin_e.view(),
        };
        let positions: Vec<u32> = (0..rows).map(|_| rng.below(table) as u32).collect();
        let positions_e = indices(engine, &positions);
        let w = rounded(&rng.matrix(1, dim, 1.0));
        let w_e = float(engine, &w);
        let (x, x_held) = random(engine, &mut rng, rows, heads * dim, 1.0);
        let (dy, dy_held) = random(engine, &mut rng, rows, heads * dim, 1.0);
        let mut dw = float(engine, &w);
        let mut want_dw = w.clone();
        let mut dx = Wide::<E>::output(engine, rows, heads * dim);
        engine
            .head_norm_rotary_backward(
                dy.view(),
                x.view(),
                w_e.view(),
                eps,
                positions_e.view(),
                rotary,
                dx.view_mut(),
                dw.view_mut(),
            )
            .unwrap();
        let mut want = [
            Matrix::zeros(rows, heads * dim),
            Matrix::zeros(rows, heads * dim),
        ];
        let mut want_dx = Matrix::zeros(rows, heads * dim);
        for (r, &position) in positions.iter().enumerate() {
            let (cos, sin) = (cos.row(position as usize), sin.row(position as usize));
            for h in 0..heads {
                let range = h * dim..(h + 1) * dim;
                let x = &x_held.row(r)[range.clone()];
                let back = turned(&dy_held.row(r)[range.clone()], cos, sin, -1.0);
                let (y, d, dw) = norm_row(x, &w.data, &back, f64::from(eps));
                want[0].row_mut(r)[range.clone()].copy_from_slice(&turned(x, cos, sin, 1.0));
                want[1].row_mut(r)[range.clone()].copy_from_slice(&turned(&y, cos, sin, 1.0));
                want_dx.row_mut(r)[range].copy_from_slice(&d);
                for (sum, dw) in want_dw.data.iter_mut().zip(&dw) {
                    *sum += dw;
                }
            }
        }
        for (normed, want) in want.iter().enumerate() {
            let mut y = Wide::<E>::output(engine, rows, heads * dim);
            let w = (normed == 1).then(|| w_e.view());
            engine
                .head_norm_rotary(
                    x.view(),
                    w,
                    eps,
                    dim,
                    positions_e.view(),
                    rotary,
                    y.view_mut(),
                )
                .unwrap();
            close::<E>("head_norm_rotary", &y.read(engine), want);
        }
        close::<E>("head_norm_rotary dx", &dx.read(engine), &want_dx);
        close::<E>("head_norm_rotary dw", &read_float(engine, &dw), &want_dw);
    }
}

pub fn swiglu_and_its_gradient<E: Engine>(engine: &E) {
    let mut rng = Random(13);
    for (rows, inner) in [(1, 1), (90, 37), (5, 352)] {
        let (gate_up, held) = random(engine, &mut rng, rows, 2 * inner, 4.0);
        let (dy, dy_held) = random(engine, &mut rng, rows, inner, 1.0);
        let mut y = Wide::<E>::output(engine, rows, inner);
        let mut d = Wide::<E>::output(engine, rows, 2 * inner);
        engine.swiglu(gate_up.view(), y.view_mut()).unwrap();
        engine
            .swiglu_backward(dy.view(), gate_up.view(), d.view_mut())
            .unwrap();
        let mut want_y = Matrix::zeros(rows, inner);
        let mut want_d = Matrix::zeros(rows, 2 * inner);
        for r in 0..rows {
            for i in 0..inner {
                let (g, u, dy) = (held.at(r, i), held.at(r, inner + i), dy_held.at(r, i));
                let s = 1.0 / (1.0 + (-g).exp());
                want_y.row_mut(r)[i] = g * s * u;
                want_d.row_mut(r)[i] = dy * u * (s + g * s * (1.0 - s));
                want_d.row_mut(r)[inner + i] = dy * g * s;
            }
        }
        close::<E>("swiglu", &y.read(engine), &want_y);
        close::<E>("swiglu gradient", &d.read(engine), &want_d);
    }
    far_ends(engine, E::swiglu);
}

/// A gated activation of −1000 is 0 and of 1000 is 1000.
fn far_ends<E: Engine>(
    engine: &E,
    activate: impl Fn(&E, HalfView<'_, E>, HalfMut<'_, E>) -> Result<(), EngineError>,
) {
    let ends = Matrix {
        rows: 1,
        cols: 4,
        data: vec![-1000.0, 1000.0, 1.0, 1.0],
    };
    let mut y = Wide::<E>::output(engine, 1, 2);
    activate(engine, Wide::new(engine, &ends).view(), y.view_mut()).unwrap();
    let ends = y.read(engine).data;
    assert!(ends[0].abs() < 1e-30 && ends[1] == 1000.0, "{ends:?}");
}

pub fn geglu<E: Engine>(engine: &E) {
    let mut rng = Random(14);
    for (rows, inner) in [(1, 1), (90, 37), (5, 352)] {
        let (gate_up, held) = random(engine, &mut rng, rows, 2 * inner, 4.0);
        let mut y = Wide::<E>::output(engine, rows, inner);
        engine.geglu(gate_up.view(), y.view_mut()).unwrap();
        let mut want = Matrix::zeros(rows, inner);
        for r in 0..rows {
            for i in 0..inner {
                let (g, u) = (held.at(r, i), held.at(r, inner + i));
                let along = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                want.row_mut(r)[i] = 0.5 * g * (1.0 + along.tanh()) * u;
            }
        }
        close::<E>("geglu", &y.read(engine), &want);
    }
    far_ends(engine, E::geglu);
}

pub fn matrices_are_scaled_added_and_scattered<E: Engine>(engine: &E) {
    let mut rng = Random(15);
    for (rows, cols) in [(1, 1), (90, 37), (70, 512)] {
        let (x, x_held) = random(engine, &mut rng, rows, cols, 1.0);
        let (mut y, y_held) = random(engine, &mut rng, rows, cols, 1.0);
        engine.add(x.view(), y.view_mut()).unwrap();
        close::<E>("add", &y.read(engine), &x_held.plus(&y_held));

        let (mut y, mut want) = random(engine, &mut rng, rows, cols, 1.0);
        engine.scale(2.5, y.view_mut()).unwrap();
        want.data.iter_mut().for_each(|x| *x *= 2.5);
        close::<E>("scale", &y.read(engine), &want);

        // Every other row, the last first.
        let to: Vec<u32> = (0..rows as u32).rev().step_by(2).collect();
        let weights = rounded(&rng.matrix(1, to.len(), 1.0));
        let (src, src_held) = random(engine, &mut rng, to.len(), cols, 1.0);
        let (mut y, mut want) = random(engine, &mut rng, rows, cols, 1.0);
        engine
            .scatter_add(
                src.view(),
                indices(engine, &to).view(),
                float(engine, &weights).view(),
                y.view_mut(),
            )
            .unwrap();
        for (i, (&to, weight)) in to.iter().zip(&weights.data).enumerate() {
            for (y, x) in want.row_mut(to as usize).iter_mut().zip(src_held.row(i)) {
                *y += weight * x;
            }
        }
        close::<E>("scatter_add", &y.read(engine), &want);
    }
}
