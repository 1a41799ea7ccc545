//! Matrices on an engine: a storage handle plus a shape, and borrowed views of it with a row stride.
//!
//! The borrow checker keeps one operation's outputs apart from its inputs on every engine, also where the
//! storage is device memory that Rust cannot look into.

/// A buffer of one element type on an engine. Dropping it gives the memory back to the engine's pool, in
/// stream order.
pub trait Storage {
    /// Elements it can hold.
    fn len(&self) -> usize;

    /// Whether it holds nothing.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An owned row-major matrix `[rows, cols]`; a vector is a matrix of one row.
#[derive(Debug)]
pub struct Tensor<S> {
    storage: S,
    rows: usize,
    cols: usize,
}

impl<S: Storage> Tensor<S> {
    /// Wraps `storage`, which must hold at least `rows * cols` elements.
    pub fn new(storage: S, rows: usize, cols: usize) -> Self {
        assert!(
            rows * cols <= storage.len(),
            "a [{rows}, {cols}] tensor in {} elements",
            storage.len()
        );
        Self {
            storage,
            rows,
            cols,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The whole matrix.
    pub fn view(&self) -> View<'_, S> {
        View {
            storage: &self.storage,
            offset: 0,
            rows: self.rows,
            cols: self.cols,
            stride: self.cols,
        }
    }

    /// The whole matrix, to write.
    pub fn view_mut(&mut self) -> ViewMut<'_, S> {
        ViewMut {
            offset: 0,
            rows: self.rows,
            cols: self.cols,
            stride: self.cols,
            storage: &mut self.storage,
        }
    }

    /// Rows `begin..end`.
    pub fn rows_view(&self, begin: usize, end: usize) -> View<'_, S> {
        self.view().row_range(begin, end)
    }

    /// Elements `offset..offset + rows * cols` as a `[rows, cols]` matrix: a parameter inside a flat buffer.
    pub fn window(&self, offset: usize, rows: usize, cols: usize) -> View<'_, S> {
        assert!(
            offset + rows * cols <= self.rows * self.cols,
            "window outside the buffer"
        );
        View {
            storage: &self.storage,
            offset,
            rows,
            cols,
            stride: cols,
        }
    }

    /// [`Tensor::window`], to write.
    pub fn window_mut(&mut self, offset: usize, rows: usize, cols: usize) -> ViewMut<'_, S> {
        assert!(
            offset + rows * cols <= self.rows * self.cols,
            "window outside the buffer"
        );
        ViewMut {
            storage: &mut self.storage,
            offset,
            rows,
            cols,
            stride: cols,
        }
    }
}

/// A borrowed matrix: element `(r, c)` is at `offset + r * stride + c` of the storage.
#[derive(Debug)]
pub struct View<'a, S> {
    /// Where the elements are.
    pub storage: &'a S,
    /// First element.
    pub offset: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Elements from one row to the next, at least `cols`.
    pub stride: usize,
}

impl<S> Clone for View<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for View<'_, S> {}

impl<'a, S> View<'a, S> {
    /// Rows `begin..end` of it.
    pub fn row_range(self, begin: usize, end: usize) -> View<'a, S> {
        assert!(
            begin <= end && end <= self.rows,
            "rows {begin}..{end} of {}",
            self.rows
        );
        View {
            offset: self.offset + begin * self.stride,
            rows: end - begin,
            ..self
        }
    }

    /// Columns `begin..end` of it.
    pub fn col_range(self, begin: usize, end: usize) -> View<'a, S> {
        assert!(
            begin <= end && end <= self.cols,
            "columns {begin}..{end} of {}",
            self.cols
        );
        View {
            offset: self.offset + begin,
            cols: end - begin,
            ..self
        }
    }
}

/// A mutably borrowed matrix; see [`View`].
#[derive(Debug)]
pub struct ViewMut<'a, S> {
    /// Where the elements are.
    pub storage: &'a mut S,
    /// First element.
    pub offset: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Elements from one row to the next, at least `cols`.
    pub stride: usize,
}

impl<'a, S> ViewMut<'a, S> {
    /// Rows `begin..end` of it.
    pub fn row_range(self, begin: usize, end: usize) -> ViewMut<'a, S> {
        assert!(
            begin <= end && end <= self.rows,
            "rows {begin}..{end} of {}",
            self.rows
        );
        ViewMut {
            offset: self.offset + begin * self.stride,
            rows: end - begin,
            ..self
        }
    }

    /// Columns `begin..end` of it.
    pub fn col_range(self, begin: usize, end: usize) -> ViewMut<'a, S> {
        assert!(
            begin <= end && end <= self.cols,
            "columns {begin}..{end} of {}",
            self.cols
        );
        ViewMut {
            offset: self.offset + begin,
            cols: end - begin,
            ..self
        }
    }

    /// The same matrix for a shorter time, so that it can be passed on and used again.
    pub fn reborrow(&mut self) -> ViewMut<'_, S> {
        ViewMut {
            storage: self.storage,
            offset: self.offset,
            rows: self.rows,
            cols: self.cols,
            stride: self.stride,
        }
    }

    /// The same matrix, to read.
    pub fn as_view(&self) -> View<'_, S> {
        View {
            storage: self.storage,
            offset: self.offset,
            rows: self.rows,
            cols: self.cols,
            stride: self.stride,
        }
    }
}
