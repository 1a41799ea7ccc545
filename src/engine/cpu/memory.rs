//! Buffers of the CPU engine, the pool they come from, and views of them as slices.
//!
//! A step asks for the same sizes again and again; fresh memory from the system would cost a page fault per
//! 4 KiB each time, so dropped buffers wait on a shelf for the next request of their size class.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::Cpu;
use crate::engine::{Storage, View, ViewMut};

/// Dropped buffers by size class.
#[derive(Debug, Default)]
pub struct Shelf<T> {
    free: Mutex<HashMap<usize, Vec<Vec<T>>>>,
}

impl<T: Copy + Default> Shelf<T> {
    /// A buffer of at least `len` elements with whatever they last held.
    pub(super) fn take(self: &Arc<Self>, len: usize) -> Buffer<T> {
        let class = size_class(len);
        let found = self
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_mut(&class)
            .and_then(Vec::pop);
        Buffer {
            data: found.unwrap_or_else(|| vec![T::default(); class]),
            shelf: Arc::clone(self),
        }
    }
}

/// Capacity for `len` elements: four classes per power of two, so at most a fifth is wasted.
fn size_class(len: usize) -> usize {
    if len <= 64 {
        return 64;
    }
    let step = (len.next_power_of_two() / 8).max(1);
    len.next_multiple_of(step)
}

/// Host memory of one element type.
#[derive(Debug)]
pub struct Buffer<T> {
    data: Vec<T>,
    shelf: Arc<Shelf<T>>,
}

impl<T> Buffer<T> {
    pub(super) fn as_slice(&self) -> &[T] {
        &self.data
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.data
    }
}

impl<T> Storage for Buffer<T> {
    fn len(&self) -> usize {
        self.data.len()
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        self.shelf
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(data.len())
            .or_default()
            .push(data);
    }
}

/// A matrix to read: row `r` is `data[r * stride..][..cols]`.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, T = f32> {
    pub data: &'a [T],
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl<'a, T> Rows<'a, T> {
    pub(super) fn new(view: View<'a, Buffer<T>>) -> Self {
        let len = extent(view.rows, view.cols, view.stride);
        Self {
            data: &view.storage.data[view.offset..view.offset + len],
            rows: view.rows,
            cols: view.cols,
            stride: view.stride,
        }
    }

    pub(super) fn row(&self, row: usize) -> &'a [T] {
        &self.data[row * self.stride..][..self.cols]
    }

    /// Rows `begin..` and their successors, from column `col`.
    pub(super) fn from(&self, row: usize, col: usize) -> &'a [T] {
        self.data.get(row * self.stride + col..).unwrap_or_default()
    }

    /// The elements where no gap lies between rows.
    pub(super) fn contiguous(&self) -> Option<&'a [T]> {
        (self.stride == self.cols || self.rows <= 1).then_some(self.data)
    }
}

/// A matrix to write; see [`Rows`].
pub(super) struct RowsMut<'a, T = f32> {
    pub data: &'a mut [T],
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl<'a, T> RowsMut<'a, T> {
    pub(super) fn new(view: ViewMut<'a, Buffer<T>>) -> Self {
        let len = extent(view.rows, view.cols, view.stride);
        Self {
            data: &mut view.storage.data[view.offset..view.offset + len],
            rows: view.rows,
            cols: view.cols,
            stride: view.stride,
        }
    }

    pub(super) fn row_mut(&mut self, row: usize) -> &mut [T] {
        &mut self.data[row * self.stride..][..self.cols]
    }

    pub(super) fn as_rows(&self) -> Rows<'_, T> {
        Rows {
            data: self.data,
            rows: self.rows,
            cols: self.cols,
            stride: self.stride,
        }
    }

    /// Disjoint runs of `per` rows, for tasks.
    pub(super) fn chunks(self, per: usize) -> impl Iterator<Item = Chunk<'a, T>> {
        let Self {
            data,
            rows,
            cols,
            stride,
        } = self;
        data.chunks_mut((per * stride).max(1))
            .enumerate()
            .map(move |(i, data)| Chunk {
                first: i * per,
                rows: RowsMut {
                    data,
                    rows: per.min(rows - i * per),
                    cols,
                    stride,
                },
            })
    }

    /// [`RowsMut::chunks`] of a good size for elementwise work.
    pub(super) fn chunks_of_task(self) -> impl Iterator<Item = Chunk<'a, T>> {
        let per = Cpu::rows_per_task(self.cols);
        self.chunks(per)
    }

    /// Cuts off the first `rows` rows.
    pub(super) fn take_rows(&mut self, rows: usize) -> RowsMut<'a, T> {
        let data = std::mem::take(&mut self.data);
        let cut = (rows * self.stride).min(data.len());
        let (head, tail) = data.split_at_mut(cut);
        self.data = tail;
        self.rows -= rows;
        RowsMut {
            data: head,
            rows,
            cols: self.cols,
            stride: self.stride,
        }
    }
}

/// A run of rows of a [`RowsMut`].
pub(super) struct Chunk<'a, T = f32> {
    /// The first of them in the whole matrix.
    pub first: usize,
    pub rows: RowsMut<'a, T>,
}

/// Elements from the first to the last of a matrix.
fn extent(rows: usize, cols: usize, stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        0
    } else {
        (rows - 1) * stride + cols
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_waste_at_most_a_fifth() {
        for len in 1..5000 {
            let class = size_class(len);
            assert!(class >= len, "{len} in {class}");
            assert!(class == 64 || class * 4 <= len * 5 + 4, "{len} in {class}");
            assert_eq!(size_class(class), class);
        }
    }

    #[test]
    fn dropped_buffers_are_used_again() {
        let shelf = Arc::new(Shelf::<f32>::default());
        let mut first = shelf.take(1000);
        first.as_mut_slice()[0] = 7.0;
        let address = first.as_slice().as_ptr();
        drop(first);
        let second = shelf.take(990);
        assert_eq!(second.as_slice().as_ptr(), address);
        assert_ne!(shelf.take(990).as_slice().as_ptr(), address);
    }

    #[test]
    fn chunks_of_a_strided_view_cover_each_row_once() {
        let shelf = Arc::new(Shelf::<f32>::default());
        let mut tensor = crate::engine::Tensor::new(shelf.take(70), 7, 10);
        tensor.view_mut().storage.as_mut_slice().fill(0.0);
        let view = tensor.view_mut().col_range(3, 7);
        for chunk in RowsMut::new(view).chunks(2) {
            let mut rows = chunk.rows;
            for r in 0..rows.rows {
                for x in rows.row_mut(r) {
                    *x += 1.0 + (chunk.first + r) as f32;
                }
            }
        }
        let view = tensor.view();
        let all = Rows::new(view);
        for r in 0..7 {
            for c in 0..10 {
                let expected = if (3..7).contains(&c) {
                    1.0 + r as f32
                } else {
                    0.0
                };
                assert_eq!(all.row(r)[c], expected, "row {r} column {c}");
            }
        }
    }
}
