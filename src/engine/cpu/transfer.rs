//! Copies: from and to the host, to and from ring slots, between matrices.

use std::sync::Arc;

use super::Cpu;
use super::memory::{Buffer, Rows, RowsMut, Shelf};
use crate::engine::Tensor;

pub(super) fn upload<T: Copy + Default>(
    shelf: &Arc<Shelf<T>>,
    values: &[T],
    cols: usize,
) -> Tensor<Buffer<T>> {
    let rows = values.len().checked_div(cols).unwrap_or(1);
    assert_eq!(
        rows * cols,
        values.len(),
        "{} values in columns of {cols}",
        values.len()
    );
    let mut buffer = shelf.take(values.len());
    buffer.as_mut_slice()[..values.len()].copy_from_slice(values);
    Tensor::new(buffer, rows, cols)
}

pub(super) fn write(mut dst: RowsMut<'_>, values: &[f32]) {
    assert_eq!(dst.rows * dst.cols, values.len(), "values for a view");
    let cols = dst.cols;
    for r in 0..dst.rows {
        dst.row_mut(r).copy_from_slice(&values[r * cols..][..cols]);
    }
}

pub(super) fn download<T: Copy>(src: Rows<'_, T>) -> Vec<T> {
    let mut values = Vec::with_capacity(src.rows * src.cols);
    for r in 0..src.rows {
        values.extend_from_slice(src.row(r));
    }
    values
}

pub(super) fn zero(cpu: &Cpu, dst: RowsMut<'_>) {
    let work = dst.rows * dst.cols;
    cpu.for_each(work, dst.chunks_of_task(), |chunk| {
        let mut rows = chunk.rows;
        for r in 0..rows.rows {
            rows.row_mut(r).fill(0.0);
        }
    });
}

pub(super) fn copy(cpu: &Cpu, src: Rows<'_>, dst: RowsMut<'_>) {
    assert_eq!(
        (src.rows, src.cols),
        (dst.rows, dst.cols),
        "shapes of a copy"
    );
    let work = dst.rows * dst.cols;
    cpu.for_each(work, dst.chunks_of_task(), |chunk| {
        let mut rows = chunk.rows;
        for r in 0..rows.rows {
            rows.row_mut(r).copy_from_slice(src.row(chunk.first + r));
        }
    });
}

pub(super) fn gather(cpu: &Cpu, src: Rows<'_>, ids: &[u32], dst: RowsMut<'_>) {
    assert_eq!(
        (ids.len(), src.cols),
        (dst.rows, dst.cols),
        "shapes of a gather"
    );
    let work = dst.rows * dst.cols;
    cpu.for_each(work, dst.chunks_of_task(), |chunk| {
        let mut rows = chunk.rows;
        for r in 0..rows.rows {
            let id = ids[chunk.first + r] as usize;
            assert!(id < src.rows, "row {id} of a table of {}", src.rows);
            rows.row_mut(r).copy_from_slice(src.row(id));
        }
    });
}

pub(super) fn scatter(src: Rows<'_>, ids: &[u32], mut dst: RowsMut<'_>) {
    assert_eq!(
        (ids.len(), dst.cols),
        (src.rows, src.cols),
        "shapes of a scatter"
    );
    for (r, &id) in ids.iter().enumerate() {
        let id = id as usize;
        assert!(id < dst.rows, "row {id} of a table of {}", dst.rows);
        dst.row_mut(id).copy_from_slice(src.row(r));
    }
}

/// Copies a contiguous matrix to `dst`.
///
/// # Safety
/// `dst` takes four bytes for each element, and nobody else touches them meanwhile.
pub(super) unsafe fn copy_out(src: Rows<'_>, dst: *mut u8) {
    let src: &[u8] = bytemuck::cast_slice(src.contiguous().expect("copies out are contiguous"));
    // SAFETY: `dst` takes the bytes by the caller's promise and is not Rust memory of this matrix.
    unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) };
}

/// Fills a contiguous matrix from `src`.
///
/// # Safety
/// `src` holds four bytes for each element, and nobody writes them meanwhile.
pub(super) unsafe fn copy_in(src: *const u8, dst: RowsMut<'_>) {
    assert!(
        dst.stride == dst.cols || dst.rows <= 1,
        "copies in are contiguous"
    );
    let dst: &mut [u8] = bytemuck::cast_slice_mut(dst.data);
    // SAFETY: `src` holds the bytes by the caller's promise and is not Rust memory of this matrix.
    unsafe { std::ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) };
}
