//! Operations element by element that some families of targets need.

use half::bf16;

use super::super::EngineError;
use super::Cuda;
use super::kernels::{Program, args, defines};
use super::memory::Raw;
use super::rows::{by_rows, is_wide, same_shape, variant};

const ELEMENTWISE: Program = Program {
    file: "elementwise.cu",
    text: include_str!("kernels/elementwise.cu"),
    defines: defines([]),
};

impl Cuda {
    pub(super) fn scale_impl(&self, by: f32, x: Raw) -> Result<(), EngineError> {
        let wide = is_wide(&[x]);
        let by = bf16::from_f32(by).to_f32();
        let args = args![x.ptr, x.stride, x.rows, x.cols, by];
        let launch = by_rows(x.rows, x.cols, wide);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&ELEMENTWISE, variant!(wide, "scale"), launch, &args) }
    }

    pub(super) fn add_impl(&self, x: Raw, y: Raw) -> Result<(), EngineError> {
        same_shape(&[x, y]);
        let wide = is_wide(&[x, y]);
        let args = args![x.ptr, x.stride, y.ptr, y.stride, y.rows, y.cols];
        let launch = by_rows(y.rows, y.cols, wide);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&ELEMENTWISE, variant!(wide, "add"), launch, &args) }
    }

    pub(super) fn geglu_impl(&self, gate_up: Raw, y: Raw) -> Result<(), EngineError> {
        assert_eq!((gate_up.rows, gate_up.cols), (y.rows, 2 * y.cols), "GEGLU");
        let wide = is_wide(&[gate_up, y]);
        let args = args![gate_up.ptr, gate_up.stride, y.ptr, y.stride, y.rows, y.cols];
        let launch = by_rows(y.rows, y.cols, wide);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&ELEMENTWISE, variant!(wide, "geglu"), launch, &args) }
    }

    /// `dst[rows[i]] += weights[i] * src[i]`.
    pub(super) fn scatter_add_impl(
        &self,
        src: Raw,
        (rows, count): (u64, usize),
        weights: Raw,
        dst: Raw,
    ) -> Result<(), EngineError> {
        assert_eq!(
            (src.rows, src.cols, weights.len()),
            (count, dst.cols, count),
            "scattered rows"
        );
        assert!(weights.is_contiguous(), "weights of scattered rows");
        let wide = is_wide(&[src, dst]);
        let args = args![
            src.ptr,
            src.stride,
            rows,
            weights.ptr,
            dst.ptr,
            dst.stride,
            dst.rows,
            src.rows,
            src.cols,
        ];
        let launch = by_rows(src.rows, src.cols, wide);
        // SAFETY: the arguments are the kernel's; views were checked against their storages, and `rows` holds
        // an index for each row of `src`.
        unsafe { self.launch(&ELEMENTWISE, variant!(wide, "scatter_add"), launch, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compile() {
        super::super::kernels::check_compiles(&ELEMENTWISE, "sm_80");
    }
}
