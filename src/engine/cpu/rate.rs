//! How fast this machine multiplies, for predictions.

use std::time::{Duration, Instant};

use gemm::Parallelism;

/// Side of the matrices: they stay in the second cache.
const SIDE: usize = 256;
/// How long it is tried.
const TRIAL: Duration = Duration::from_millis(30);

/// Floating-point operations in a second of one thread, in matrix products of float32; a multiply-add is two.
pub fn measured_rate() -> f64 {
    let (a, b) = (vec![1.0_f32; SIDE * SIDE], vec![0.5_f32; SIDE * SIDE]);
    let mut c = vec![0.0_f32; SIDE * SIDE];
    let side = SIDE as isize;
    let mut product = || {
        // SAFETY: all three matrices are row-major, SIDE by SIDE, and `c` is no part of the others.
        unsafe {
            gemm::gemm(
                SIDE,
                SIDE,
                SIDE,
                c.as_mut_ptr(),
                1,
                side,
                false,
                a.as_ptr(),
                1,
                side,
                b.as_ptr(),
                1,
                side,
                0.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    };
    // The first call finds out what the processor can do.
    product();
    let began = Instant::now();
    let mut count = 0;
    while began.elapsed() < TRIAL {
        product();
        count += 1;
    }
    let operations = count as f64 * 2.0 * (SIDE * SIDE * SIDE) as f64;
    operations / began.elapsed().as_secs_f64()
}
