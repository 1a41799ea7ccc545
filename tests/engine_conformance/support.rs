//! Random inputs, strided tensors and comparisons.

use slipstream::engine::{Engine, Float, Half, Index, View, ViewMut};

/// A float64 matrix, row-major.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<f64>,
}

impl Matrix {
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self {
            rows,
            cols,
            data: vec![0.0; rows * cols],
        }
    }

    pub fn row(&self, r: usize) -> &[f64] {
        &self.data[r * self.cols..][..self.cols]
    }

    pub fn row_mut(&mut self, r: usize) -> &mut [f64] {
        &mut self.data[r * self.cols..][..self.cols]
    }

    pub fn at(&self, r: usize, c: usize) -> f64 {
        self.data[r * self.cols + c]
    }

    pub fn transposed(&self) -> Self {
        let mut out = Self::zeros(self.cols, self.rows);
        for r in 0..self.rows {
            for c in 0..self.cols {
                out.row_mut(c)[r] = self.at(r, c);
            }
        }
        out
    }

    pub fn times(&self, other: &Self) -> Self {
        assert_eq!(self.cols, other.rows);
        let mut out = Self::zeros(self.rows, other.cols);
        for r in 0..self.rows {
            for i in 0..self.cols {
                let a = self.at(r, i);
                for c in 0..other.cols {
                    out.data[r * other.cols + c] += a * other.at(i, c);
                }
            }
        }
        out
    }

    pub fn plus(&self, other: &Self) -> Self {
        let mut out = self.clone();
        for (a, b) in out.data.iter_mut().zip(&other.data) {
            *a += b;
        }
        out
    }

    pub fn f32(&self) -> Vec<f32> {
        self.data.iter().map(|&x| x as f32).collect()
    }
}

/// A stream of random numbers (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Roughly normal with the given deviation.
    pub fn normal(&mut self, deviation: f64) -> f64 {
        let sum: f64 = (0..12)
            .map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64)
            .sum();
        (sum - 6.0) * deviation
    }

    pub fn matrix(&mut self, rows: usize, cols: usize, deviation: f64) -> Matrix {
        Matrix {
            rows,
            cols,
            data: (0..rows * cols).map(|_| self.normal(deviation)).collect(),
        }
    }
}

/// Value of the gaps between rows.
const GAP: f32 = 1024.0;
/// Columns before and after the matrix in its tensor.
const PAD: usize = 3;

/// A matrix of the compute type inside a wider tensor, and the values it really holds after rounding.
pub struct Wide<E: Engine> {
    tensor: Half<E>,
    rows: usize,
    cols: usize,
}

impl<E: Engine> Wide<E> {
    pub fn new(engine: &E, values: &Matrix) -> Self {
        let width = values.cols + 2 * PAD;
        let mut host = vec![GAP; values.rows * width];
        for r in 0..values.rows {
            for c in 0..values.cols {
                host[r * width + PAD + c] = values.at(r, c) as f32;
            }
        }
        let mut tensor = engine.half(values.rows, width).unwrap();
        engine.write_half(tensor.view_mut(), &host).unwrap();
        Self {
            tensor,
            rows: values.rows,
            cols: values.cols,
        }
    }

    /// An output that starts as NaN: what is not overwritten shows.
    pub fn output(engine: &E, rows: usize, cols: usize) -> Self {
        let values = Matrix {
            rows,
            cols,
            data: vec![f64::NAN; rows * cols],
        };
        Self::new(engine, &values)
    }

    pub fn view(&self) -> View<'_, E::Half> {
        self.tensor.view().col_range(PAD, PAD + self.cols)
    }

    pub fn view_mut(&mut self) -> ViewMut<'_, E::Half> {
        self.tensor.view_mut().col_range(PAD, PAD + self.cols)
    }

    /// The values as held; the gaps must be as they were.
    pub fn read(&self, engine: &E) -> Matrix {
        let width = self.cols + 2 * PAD;
        let host = engine.download_half(self.tensor.view()).unwrap();
        let mut values = Matrix::zeros(self.rows, self.cols);
        for r in 0..self.rows {
            for (c, &x) in host[r * width..][..width].iter().enumerate() {
                if (PAD..PAD + self.cols).contains(&c) {
                    values.row_mut(r)[c - PAD] = f64::from(x);
                } else {
                    assert_eq!(x, GAP, "a gap at row {r} was written");
                }
            }
        }
        values
    }
}

/// Random values in the compute type: the tensor, and what it holds.
pub fn random<E: Engine>(
    engine: &E,
    random: &mut Random,
    rows: usize,
    cols: usize,
    deviation: f64,
) -> (Wide<E>, Matrix) {
    let wide = Wide::new(engine, &random.matrix(rows, cols, deviation));
    let held = wide.read(engine);
    (wide, held)
}

pub fn float<E: Engine>(engine: &E, values: &Matrix) -> Float<E> {
    engine.upload_float(&values.f32(), values.cols).unwrap()
}

pub fn read_float<E: Engine>(engine: &E, tensor: &Float<E>) -> Matrix {
    let host = engine.download_float(tensor.view()).unwrap();
    Matrix {
        rows: tensor.rows(),
        cols: tensor.cols(),
        data: host.into_iter().map(f64::from).collect(),
    }
}

pub fn indices<E: Engine>(engine: &E, values: &[u32]) -> Index<E> {
    engine.upload_index(values).unwrap()
}

/// Rounds to float32, as uploads of float buffers do.
pub fn rounded(values: &Matrix) -> Matrix {
    Matrix {
        data: values.data.iter().map(|&x| f64::from(x as f32)).collect(),
        ..values.clone()
    }
}

/// ‖got − want‖ ≤ tolerance · ‖want‖, over the whole matrix.
#[track_caller]
pub fn close<E: Engine>(what: &str, got: &Matrix, want: &Matrix) {
    assert_eq!(
        (got.rows, got.cols),
        (want.rows, want.cols),
        "{what}: shape"
    );
    // What should be zero is left over from terms of order 1: nothing smaller is told apart from it.
    let (tolerance, floor) = if E::HALF_BYTES == 4 {
        (3e-6, 1e-6)
    } else {
        (2e-2, 1e-3)
    };
    let square = |x: f64| x * x;
    let norm: f64 = want.data.iter().map(|&x| square(x)).sum::<f64>().sqrt();
    let difference: f64 = got
        .data
        .iter()
        .zip(&want.data)
        .map(|(a, b)| square(a - b))
        .sum::<f64>()
        .sqrt();
    assert!(
        difference <= tolerance * norm.max(floor),
        "{what}: off by {difference} of {norm}\ngot  {:?}\nwant {:?}",
        &got.data[..got.data.len().min(8)],
        &want.data[..want.data.len().min(8)]
    );
}
