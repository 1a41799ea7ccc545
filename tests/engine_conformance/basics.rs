//! Memory, copies, the optimizer and the checks.

use std::time::Duration;

use slipstream::engine::{AdamW, Engine, Queue};

use crate::support::{Matrix, Random, Wide, close, float, indices, random, read_float, rounded};

pub fn values_travel_to_the_device_and_back<E: Engine>(engine: &E) {
    let mut rng = Random(1);
    let (a, held) = random(engine, &mut rng, 5, 7, 1.0);
    let mut b = Wide::<E>::output(engine, 5, 7);
    engine.copy_half(a.view(), b.view_mut()).unwrap();
    assert_eq!(b.read(engine).data, held.data);
    engine.zero_half(b.view_mut().row_range(1, 3)).unwrap();
    let after = b.read(engine);
    assert_eq!(after.row(0), held.row(0));
    assert!(after.row(1).iter().chain(after.row(2)).all(|&x| x == 0.0));
    assert_eq!(after.row(3), held.row(3));

    let values = rng.matrix(4, 6, 1.0);
    let mut floats = float(engine, &values);
    let mut halves = Wide::<E>::output(engine, 4, 6);
    engine.round(floats.view(), halves.view_mut()).unwrap();
    close::<E>("round", &halves.read(engine), &values);
    engine
        .zero_float(floats.view_mut().row_range(0, 1))
        .unwrap();
    assert!(read_float(engine, &floats).row(0).iter().all(|&x| x == 0.0));
    engine.widen(halves.view(), floats.view_mut()).unwrap();
    assert_eq!(read_float(engine, &floats).data, halves.read(engine).data);
    engine
        .write_float(floats.window_mut(6, 1, 6), &[9.0; 6])
        .unwrap();
    assert_eq!(read_float(engine, &floats).row(1), [9.0; 6]);

    let fresh = engine.float(3, 3).unwrap();
    assert!(read_float(engine, &fresh).data.iter().all(|&x| x == 0.0));
    let ids = indices(engine, &[4, 5, 6]);
    assert_eq!(
        engine.download_index(ids.view().col_range(1, 3)).unwrap(),
        [5, 6]
    );
    let none = indices(engine, &[]);
    assert!(engine.download_index(none.view()).unwrap().is_empty());
}

pub fn slots_are_copied_out_and_in<E: Engine>(engine: &E) {
    let mut rng = Random(2);
    let values = rng.matrix(6, 10, 1.0);
    let a = engine.upload_half(&values.f32(), 10).unwrap();
    let mut b = engine.half(6, 10).unwrap();
    let mut slot = vec![0u8; 6 * 10 * E::HALF_BYTES];
    let deadline = Duration::from_secs(10);
    // SAFETY: the slot holds all bytes, outlives the waits, and nothing else touches it.
    unsafe {
        engine.register_host(slot.as_mut_ptr(), slot.len()).unwrap();
        let written = engine.record(Queue::Compute).unwrap();
        engine.wait(Queue::CopyOut, &written).unwrap();
        engine
            .copy_out(a.rows_view(1, 5), slot.as_mut_ptr())
            .unwrap();
        let copied = engine.record(Queue::CopyOut).unwrap();
        engine.finish(&copied, deadline).unwrap();
        assert!(engine.is_done(&copied).unwrap());
        engine
            .copy_in(slot.as_ptr(), b.view_mut().row_range(2, 6))
            .unwrap();
        let filled = engine.record(Queue::CopyIn).unwrap();
        engine.wait(Queue::Compute, &filled).unwrap();
        engine.finish(&filled, deadline).unwrap();
    }
    assert_eq!(
        engine.download_half(b.rows_view(2, 6)).unwrap(),
        engine.download_half(a.rows_view(1, 5)).unwrap()
    );
}

pub fn rows_are_gathered<E: Engine>(engine: &E) {
    let mut rng = Random(3);
    let (table, held) = random(engine, &mut rng, 11, 5, 1.0);
    let ids = [10, 0, 3, 3, 7];
    let mut out = Wide::<E>::output(engine, 5, 5);
    engine
        .embed(table.view(), indices(engine, &ids).view(), out.view_mut())
        .unwrap();
    let out = out.read(engine);
    for (i, &id) in ids.iter().enumerate() {
        assert_eq!(out.row(i), held.row(id as usize));
    }
}

pub fn rows_are_scattered<E: Engine>(engine: &E) {
    let mut rng = Random(7);
    for cols in [5, 16] {
        let (src, held) = random(engine, &mut rng, 4, cols, 1.0);
        let (mut dst, before) = random(engine, &mut rng, 9, cols, 1.0);
        let ids = [7, 0, 3, 8];
        engine
            .scatter(src.view(), indices(engine, &ids).view(), dst.view_mut())
            .unwrap();
        let after = dst.read(engine);
        for row in 0..9 {
            let from = ids.iter().position(|&id| id as usize == row);
            let want = from.map_or(before.row(row), |i| held.row(i));
            assert_eq!(after.row(row), want, "row {row}");
        }
    }
}

pub fn non_finite_values_are_found<E: Engine>(engine: &E) {
    let mut values = Random(4).matrix(3, 131, 1.0);
    let found = |values: &Matrix| {
        engine
            .has_non_finite(Wide::new(engine, values).view())
            .unwrap()
    };
    assert!(!found(&values));
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for at in [0, 130, 2 * 131 + 64, 3 * 131 - 1] {
            let good = std::mem::replace(&mut values.data[at], bad);
            assert!(found(&values), "{bad} at {at}");
            values.data[at] = good;
        }
    }
}

pub fn squares_are_summed<E: Engine>(engine: &E) {
    let mut rng = Random(5);
    for (rows, cols) in [(1, 1), (1, 100_003), (7, 33)] {
        let values = rounded(&rng.matrix(rows, cols, 1.0));
        let want: f64 = values.data.iter().map(|x| x * x).sum();
        let mut out = engine.float(1, 1).unwrap();
        engine
            .sum_squares(float(engine, &values).view(), out.view_mut())
            .unwrap();
        let got = engine.download_float(out.view()).unwrap()[0];
        assert!((f64::from(got) / want - 1.0).abs() < 1e-6, "{got} {want}");
    }
}

pub fn adamw_updates_masters_and_weights<E: Engine>(engine: &E) {
    let mut rng = Random(6);
    let shape = (3, 50);
    let (beta1, beta2, eps, decay, scale) = (0.9f32, 0.95f32, 1e-8f32, 0.1f32, 0.25f32);
    let mut master = rounded(&rng.matrix(shape.0, shape.1, 1.0));
    let (mut m, mut v) = (Matrix::zeros(3, 50), Matrix::zeros(3, 50));
    let (mut master_e, mut m_e, mut v_e) = (
        float(engine, &master),
        engine.float(3, 50).unwrap(),
        engine.float(3, 50).unwrap(),
    );
    let mut weight = Wide::<E>::output(engine, 3, 50);
    for count in 1..=4 {
        let lr = 0.01 * count as f32;
        let grad = rounded(&rng.matrix(shape.0, shape.1, 1.0));
        let update = AdamW {
            lr,
            beta1,
            beta2,
            eps,
            weight_decay: decay,
            count,
            grad_scale: scale,
        };
        let grad_e = float(engine, &grad);
        engine
            .adamw(
                &update,
                grad_e.view(),
                master_e.view_mut(),
                m_e.view_mut(),
                v_e.view_mut(),
                (count != 3).then(|| weight.view_mut()),
            )
            .unwrap();
        let [lr, beta1, beta2, eps, decay] = [lr, beta1, beta2, eps, decay].map(f64::from);
        for i in 0..grad.data.len() {
            let g = grad.data[i] * f64::from(scale);
            m.data[i] = beta1 * m.data[i] + (1.0 - beta1) * g;
            v.data[i] = beta2 * v.data[i] + (1.0 - beta2) * g * g;
            let m_hat = m.data[i] / (1.0 - beta1.powi(count as i32));
            let v_hat = v.data[i] / (1.0 - beta2.powi(count as i32));
            master.data[i] -= lr * decay * master.data[i] + lr * m_hat / (v_hat.sqrt() + eps);
        }
        // Masters and moments are float32 on every engine.
        for (got, want) in read_float(engine, &master_e).data.iter().zip(&master.data) {
            assert!((got - want).abs() < 2e-6, "{got} {want}");
        }
        if count != 3 {
            close::<E>("weight", &weight.read(engine), &master);
        }
    }
    close::<E>("first moment", &read_float(engine, &m_e), &m);
    close::<E>("second moment", &read_float(engine, &v_e), &v);
}
