//! Matrix products, on the `gemm` crate, with bits that do not depend on the company a row keeps.
//!
//! `gemm` picks other summation orders for few rows (matrix-vector kernels, dot-product kernels up to 256
//! outputs, an inner blocking that follows the shape). Decoding one row must give the bits that verifying
//! eight or prefilling a thousand gives, so products here are cut along the inner dimension at fixed places
//! and padded with zeros past the special cases: every element is one chain of fused multiply-adds per cut.

use super::Cpu;

/// Longest inner dimension of one call; `gemm` never cuts below it.
const INNER: usize = 512;
/// Up to this many outputs `gemm` may use dot-product kernels.
const FEW_OUTPUTS: usize = 256;
/// Multiply-adds from which threads are worth waking.
const PARALLEL: usize = 1 << 20;

/// A matrix to read: element `(r, c)` is `data[r * row + c * col]`.
#[derive(Clone, Copy)]
pub(super) struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row: usize,
    col: usize,
}

impl<'a> Mat<'a> {
    /// Row-major with `stride` elements from row to row.
    pub(super) fn new(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        let mat = Self {
            data,
            rows,
            cols,
            row: stride,
            col: 1,
        };
        assert!(
            rows == 0 || cols == 0 || (rows - 1) * stride + cols <= data.len(),
            "a [{rows}, {cols}] matrix of stride {stride} in {} elements",
            data.len()
        );
        mat
    }

    /// The transpose.
    pub(super) fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row: self.col,
            col: self.row,
            ..self
        }
    }

    /// Columns `begin..end`.
    fn col_range(self, begin: usize, end: usize) -> Self {
        Self {
            data: self.data.get(begin * self.col..).unwrap_or_default(),
            cols: end - begin,
            ..self
        }
    }

    /// Rows `begin..end`.
    fn row_range(self, begin: usize, end: usize) -> Self {
        self.t().col_range(begin, end).t()
    }

    /// A row-major copy, padded with zeros.
    fn padded(self, rows: usize, cols: usize) -> Vec<f32> {
        let mut copy = vec![0.0; rows * cols];
        for r in 0..self.rows {
            for c in 0..self.cols {
                copy[r * cols + c] = self.data[r * self.row + c * self.col];
            }
        }
        copy
    }
}

/// A row-major matrix to write.
pub(super) struct MatMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a> MatMut<'a> {
    /// Row-major with `stride` elements from row to row.
    pub(super) fn new(data: &'a mut [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(
            rows == 0 || cols == 0 || (rows - 1) * stride + cols <= data.len(),
            "a [{rows}, {cols}] matrix of stride {stride} in {} elements",
            data.len()
        );
        assert!(rows <= 1 || cols <= stride, "rows overlap");
        Self {
            data,
            rows,
            cols,
            stride,
        }
    }
}

/// `c = a b`, or `c += a b` with `add`, on the calling thread.
pub(super) fn product(a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>, add: bool) {
    multiply(a, b, c, add, gemm::Parallelism::None);
}

impl Cpu {
    /// [`product`] on all threads where it is large enough; the same bits.
    pub(super) fn product(&self, a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>, add: bool) {
        if self.threads() == 1 || a.rows * a.cols * b.cols < PARALLEL {
            return product(a, b, c, add);
        }
        let parallelism = gemm::Parallelism::Rayon(self.threads());
        self.install(|| multiply(a, b, c, add, parallelism));
    }
}

fn multiply(a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>, add: bool, parallelism: gemm::Parallelism) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert_eq!((b.rows, c.rows, c.cols), (k, m, n), "shapes of a product");
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !add {
            for r in 0..m {
                c.data[r * c.stride..][..n].fill(0.0);
            }
        }
        return;
    }
    let mut add = add;
    let mut c = c;
    let mut begin = 0;
    while begin < k {
        let end = k.min(begin + INNER);
        let (a, b) = (a.col_range(begin, end), b.row_range(begin, end));
        regular(a, b, &mut c, add, parallelism);
        add = true;
        begin = end;
    }
}

/// One cut of the inner dimension, padded past the shapes for which `gemm` sums in another order.
fn regular(a: Mat<'_>, b: Mat<'_>, c: &mut MatMut<'_>, add: bool, parallelism: gemm::Parallelism) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let dots = a.col == 1 && b.row == 1 && m * n <= FEW_OUTPUTS;
    if m >= 2 && n >= 2 && k >= 3 && !dots {
        return call(a, b, c, add, parallelism);
    }
    let (inner, cols) = (k.max(3), n.max(2));
    let rows = m.max(FEW_OUTPUTS / cols + 1).max(2);
    let a_copy = a.padded(rows, inner);
    let b_copy;
    let mut b = b;
    if (inner, cols) != (k, n) {
        b_copy = b.padded(inner, cols);
        b = Mat::new(&b_copy, inner, cols, cols);
    }
    through_scratch(
        Mat::new(&a_copy, rows, inner, inner),
        b,
        c,
        add,
        parallelism,
    );
}

/// A product larger than `c`, of which `c` keeps the upper left corner.
fn through_scratch(
    a: Mat<'_>,
    b: Mat<'_>,
    c: &mut MatMut<'_>,
    add: bool,
    parallelism: gemm::Parallelism,
) {
    let mut scratch = vec![0.0; a.rows * b.cols];
    if add {
        for r in 0..c.rows {
            scratch[r * b.cols..][..c.cols].copy_from_slice(&c.data[r * c.stride..][..c.cols]);
        }
    }
    let mut whole = MatMut::new(&mut scratch, a.rows, b.cols, b.cols);
    call(a, b, &mut whole, add, parallelism);
    for r in 0..c.rows {
        c.data[r * c.stride..][..c.cols].copy_from_slice(&scratch[r * b.cols..][..c.cols]);
    }
}

fn call(a: Mat<'_>, b: Mat<'_>, c: &mut MatMut<'_>, add: bool, parallelism: gemm::Parallelism) {
    // SAFETY: `Mat::new` and `MatMut::new` checked that every element addressed by these strides lies inside
    // its slice, row and column ranges only shrink that set, and `c` is borrowed mutably, apart from `a`, `b`.
    unsafe {
        gemm::gemm(
            c.rows,
            c.cols,
            a.cols,
            c.data.as_mut_ptr(),
            1,
            c.stride as isize,
            add,
            a.data.as_ptr(),
            a.col as isize,
            a.row as isize,
            b.data.as_ptr(),
            b.col as isize,
            b.row as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761) | 1;
        (0..len)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                state as f32 / u32::MAX as f32 - 0.5
            })
            .collect()
    }

    /// Rows of one large product against the same rows in every smaller company.
    fn rows_keep_their_bits(inner: usize, cols: usize, b_transposed: bool) {
        let most = 70;
        let x = noise(most * inner, 1);
        let w = noise(inner * cols, 2);
        let b = if b_transposed {
            Mat::new(&w, cols, inner, inner).t()
        } else {
            Mat::new(&w, inner, cols, cols)
        };
        let mut whole = vec![0.0; most * cols];
        let a = Mat::new(&x, most, inner, inner);
        product(a, b, MatMut::new(&mut whole, most, cols, cols), false);
        for rows in (1..=17).chain([31, 33, 64, 65]) {
            let first = most - rows;
            let a = Mat::new(&x[first * inner..], rows, inner, inner);
            let mut part = vec![f32::NAN; rows * cols];
            product(a, b, MatMut::new(&mut part, rows, cols, cols), false);
            assert_eq!(
                part,
                whole[first * cols..],
                "{rows} rows, inner {inner}, {cols} columns"
            );
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_company() {
        for (inner, cols) in [
            (128, 64),
            (128, 352),
            (576, 192),
            (1536, 576),
            (32, 7),
            (2, 1),
            (40, 17),
            (700, 33),
        ] {
            rows_keep_their_bits(inner, cols, true);
            rows_keep_their_bits(inner, cols, false);
        }
    }

    #[test]
    fn threads_do_not_change_bits() {
        let (m, k, n) = (150, 600, 190);
        let (x, w) = (noise(m * k, 3), noise(k * n, 4));
        let run = |threads| {
            let cpu = Cpu::new(threads).unwrap();
            let mut y = noise(m * n, 5);
            let (a, b) = (Mat::new(&x, m, k, k), Mat::new(&w, n, k, k).t());
            cpu.product(a, b, MatMut::new(&mut y, m, n, n), true);
            y
        };
        let one = run(1);
        for threads in [2, 3, 5] {
            assert_eq!(run(threads), one, "{threads} threads");
        }
    }

    #[test]
    fn products_of_every_small_shape_are_right() {
        for (m, k, n) in [
            (0, 3, 2),
            (1, 1, 1),
            (2, 0, 3),
            (3, 2, 1),
            (5, 7, 3),
            (16, 16, 16),
            (20, 1030, 20),
        ] {
            let (x, w) = (noise(m * k, 6), noise(k * n, 7));
            for add in [false, true] {
                let before = noise(m * (n + 2), 8);
                let mut y = before.clone();
                let c = MatMut::new(&mut y, m, n, n + 2);
                product(Mat::new(&x, m, k, k), Mat::new(&w, k, n, n), c, add);
                for r in 0..m {
                    for j in 0..n + 2 {
                        let old = f64::from(before[r * (n + 2) + j]);
                        let dot: f64 = (0..k)
                            .map(|i| {
                                f64::from(x[r * k + i])
                                    * if j < n { f64::from(w[i * n + j]) } else { 0.0 }
                            })
                            .sum();
                        let expected = if j >= n {
                            old
                        } else if add {
                            old + dot
                        } else {
                            dot
                        };
                        let got = f64::from(y[r * (n + 2) + j]);
                        assert!(
                            (got - expected).abs() < 1e-5,
                            "[{m},{k},{n}] at {r},{j}: {got} {expected}"
                        );
                    }
                }
            }
        }
    }
}
