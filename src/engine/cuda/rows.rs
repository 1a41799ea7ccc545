//! Operations row by row: copies, conversions, norms, rotary, SwiGLU, optimizer.

use cudarc::driver::sys;

use super::super::{AdamW, EngineError, IndexView, Rotary};
use super::kernels::{Launch, Program, args, defines};
use super::memory::{Buffer, Raw, raw};
use super::{Cuda, index};

const ROWS: Program = Program {
    file: "rows.cu",
    text: include_str!("kernels/rows.cu"),
    defines: defines([]),
};
const NORM: Program = Program {
    file: "norm.cu",
    text: include_str!("kernels/norm.cu"),
    defines: defines([]),
};
const ROTARY: Program = Program {
    file: "rotary.cu",
    text: include_str!("kernels/rotary.cu"),
    defines: defines([]),
};
const OPTIMIZER: Program = Program {
    file: "optimizer.cu",
    text: include_str!("kernels/optimizer.cu"),
    defines: defines([]),
};

/// Warps of a rotary kernel's thread block, as the source says.
const ROTARY_WARPS: usize = 8;

/// Direction of a conversion.
#[derive(Clone, Copy, Debug)]
pub(super) enum Convert {
    /// float32 to bf16.
    Round,
    /// bf16 to float32.
    Widen,
}

/// Positions of the rows and the tables of angles.
#[derive(Clone, Copy, Debug)]
pub(super) struct Angles {
    positions: (u64, usize),
    cos: Raw,
    sin: Raw,
}

impl Angles {
    pub(super) fn new(positions: &IndexView<'_, Cuda>, rotary: &Rotary<'_, Cuda>) -> Self {
        let (cos, sin) = (raw(&rotary.cos), raw(&rotary.sin));
        assert_eq!((cos.rows, cos.cols), (sin.rows, sin.cols), "rotary tables");
        Self {
            positions: index(positions),
            cos,
            sin,
        }
    }

    /// Panics unless the tables fit heads of `dim` and there is a position for each row.
    fn check(&self, rows: usize, dim: usize) {
        assert_eq!(self.positions.1, rows, "positions of the rows");
        assert!(2 * self.cos.cols <= dim && dim <= 256, "head size {dim}");
    }
}

/// Whether all matrices can be read 8 elements at a time.
pub(super) fn is_wide(matrices: &[Raw]) -> bool {
    matrices.iter().all(|m| {
        m.cols.is_multiple_of(8)
            && m.ptr.is_multiple_of(16)
            && (m.rows <= 1 || m.stride.is_multiple_of(8))
    })
}

/// One thread per element or group of 8, rows along y.
pub(super) fn by_rows(rows: usize, cols: usize, wide: bool) -> Launch {
    let groups = cols.div_ceil(if wide { 8 } else { 1 });
    let threads = groups.next_multiple_of(32).clamp(32, 256);
    Launch {
        grid: [groups.div_ceil(threads), rows.min(65_535), 1],
        threads,
        shared: 0,
    }
}

/// Panics unless all matrices have the first one's shape.
pub(super) fn same_shape(matrices: &[Raw]) {
    for m in matrices {
        assert_eq!(
            (m.rows, m.cols),
            (matrices[0].rows, matrices[0].cols),
            "shapes differ"
        );
    }
}

/// The `_8` or the `_1` variant of a kernel.
macro_rules! variant {
    ($wide:expr, $name:literal) => {
        if $wide {
            concat!($name, "_8")
        } else {
            concat!($name, "_1")
        }
    };
}
pub(super) use variant;

impl Cuda {
    /// Zeroes elements of `size` bytes.
    pub(super) fn zero(&self, m: Raw, size: usize) -> Result<(), EngineError> {
        let m = m.flattened();
        if m.len() == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the view was checked against its storage.
        let result = unsafe {
            if m.rows == 1 {
                sys::cuMemsetD8Async(m.ptr, 0, m.cols * size, self.device.compute)
            } else {
                sys::cuMemsetD2D8Async(
                    m.ptr,
                    m.stride * size,
                    0,
                    m.cols * size,
                    m.rows,
                    self.device.compute,
                )
            }
        };
        self.device.check("clearing memory", result)
    }

    /// `dst[i] = src[rows[i]]`, or `src[i]` without `rows`.
    pub(super) fn gather_rows(
        &self,
        src: Raw,
        rows: Option<(u64, usize)>,
        dst: Raw,
    ) -> Result<(), EngineError> {
        assert_eq!(src.cols, dst.cols, "gather");
        assert_eq!(rows.map_or(src.rows, |r| r.1), dst.rows, "gather");
        let wide = is_wide(&[src, dst]);
        let args = args![
            src.ptr,
            src.stride,
            src.rows,
            rows.map_or(0, |r| r.0),
            dst.ptr,
            dst.stride,
            dst.rows,
            dst.cols,
        ];
        let launch = by_rows(dst.rows, dst.cols, wide);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&ROWS, variant!(wide, "gather"), launch, &args) }
    }

    /// `dst[rows[i]] = src[i]`.
    pub(super) fn scatter_rows(&self, src: Raw, rows: u64, dst: Raw) -> Result<(), EngineError> {
        assert_eq!(src.cols, dst.cols, "scatter");
        let wide = is_wide(&[src, dst]);
        let args = args![
            src.ptr, src.stride, rows, dst.ptr, dst.stride, dst.rows, src.rows, src.cols,
        ];
        let launch = by_rows(src.rows, src.cols, wide);
        // SAFETY: as above; `rows` holds an index for each row of `src`.
        unsafe { self.launch(&ROWS, variant!(wide, "scatter"), launch, &args) }
    }

    /// Rounds or widens.
    pub(super) fn convert(&self, kind: Convert, src: Raw, dst: Raw) -> Result<(), EngineError> {
        same_shape(&[src, dst]);
        let (src, dst) = if src.is_contiguous() && dst.is_contiguous() {
            (src.flattened(), dst.flattened())
        } else {
            (src, dst)
        };
        let wide = is_wide(&[src, dst]);
        let name = match kind {
            Convert::Round => variant!(wide, "round_to_bf16"),
            Convert::Widen => variant!(wide, "widen"),
        };
        let args = args![src.ptr, src.stride, dst.ptr, dst.stride, src.rows, src.cols,];
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&ROWS, name, by_rows(src.rows, src.cols, wide), &args) }
    }

    pub(super) fn add_bias_impl(&self, bias: Raw, y: Raw) -> Result<(), EngineError> {
        assert_eq!(bias.len(), y.cols, "bias");
        let wide = is_wide(&[bias, y]);
        let args = args![bias.ptr, y.ptr, y.stride, y.rows, y.cols,];
        let launch = by_rows(y.rows, y.cols, wide);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&ROWS, variant!(wide, "add_bias"), launch, &args) }
    }

    pub(super) fn swiglu_impl(&self, gate_up: Raw, y: Raw) -> Result<(), EngineError> {
        assert_eq!((gate_up.rows, gate_up.cols), (y.rows, 2 * y.cols), "SwiGLU");
        let wide = is_wide(&[gate_up, y]);
        let args = args![gate_up.ptr, gate_up.stride, y.ptr, y.stride, y.rows, y.cols,];
        let launch = by_rows(y.rows, y.cols, wide);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&ROWS, variant!(wide, "swiglu"), launch, &args) }
    }

    pub(super) fn swiglu_backward_impl(
        &self,
        dy: Raw,
        gate_up: Raw,
        out: Raw,
    ) -> Result<(), EngineError> {
        same_shape(&[gate_up, out]);
        assert_eq!(
            (gate_up.rows, gate_up.cols),
            (dy.rows, 2 * dy.cols),
            "SwiGLU"
        );
        let wide = is_wide(&[dy, gate_up, out]);
        let args = args![
            dy.ptr,
            dy.stride,
            gate_up.ptr,
            gate_up.stride,
            out.ptr,
            out.stride,
            dy.rows,
            dy.cols,
        ];
        let launch = by_rows(dy.rows, dy.cols, wide);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&ROWS, variant!(wide, "swiglu_backward"), launch, &args) }
    }

    /// Threads for a row of `cols`, so that each holds few groups of it in registers.
    fn norm_threads(cols: usize, wide: bool) -> usize {
        let (group, most) = if wide { (8, 4) } else { (1, 16) };
        let groups = cols.div_ceil(group);
        assert!(
            groups <= 512 * most,
            "norm over {cols} columns: at most 16384, or 8192 where they are not a multiple of 8"
        );
        let few = groups.div_ceil(2).next_multiple_of(32).clamp(32, 256);
        few.max(groups.div_ceil(most).next_multiple_of(32))
    }

    pub(super) fn norm_impl(
        &self,
        h: Raw,
        delta: Option<Raw>,
        w: Raw,
        eps: f32,
        y: Raw,
    ) -> Result<(), EngineError> {
        same_shape(&[h, y, delta.unwrap_or(h)]);
        assert_eq!(w.len(), h.cols, "norm weights");
        let wide = is_wide(&[h, y, w, delta.unwrap_or(h)]);
        let args = args![
            h.ptr,
            h.stride,
            delta.map_or(0, |d| d.ptr),
            delta.map_or(0, |d| d.stride),
            w.ptr,
            eps,
            y.ptr,
            y.stride,
            h.cols,
        ];
        let launch = Launch::line(h.rows, Self::norm_threads(h.cols, wide));
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&NORM, variant!(wide, "norm"), launch, &args) }
    }

    /// Thread blocks of a kernel that sums over rows, `each` for a multiprocessor: fixed by the device, so that
    /// the order of sums is.
    fn summing_blocks(&self, rows: usize, each: usize) -> usize {
        rows.min(each * self.device.multiprocessors)
    }

    /// `out += Σ parts`, in order.
    fn add_partial(
        &self,
        partial: &Buffer<f32>,
        parts: usize,
        out: Raw,
    ) -> Result<(), EngineError> {
        assert!(out.is_contiguous(), "weight gradients of a norm");
        let cols = out.len();
        let args = args![partial.address(), parts, cols, out.ptr,];
        let launch = Launch::line(cols.div_ceil(32), 256);
        // SAFETY: the arguments are the kernel's; `partial` holds `parts * cols` sums.
        unsafe { self.launch(&NORM, "add_partial", launch, &args) }
    }

    pub(super) fn norm_backward_impl(
        &self,
        dy: Raw,
        x: Raw,
        w: Raw,
        eps: f32,
        dx: Raw,
        dw: Raw,
    ) -> Result<(), EngineError> {
        same_shape(&[dy, x, dx]);
        assert_eq!((w.len(), dw.len()), (x.cols, x.cols), "norm weights");
        if x.rows == 0 {
            return Ok(());
        }
        let wide = is_wide(&[dy, x, dx, w]);
        let blocks = self.summing_blocks(x.rows, 4);
        let partial = self.scratch(blocks * x.cols, "sums of a norm's weight gradient")?;
        let args = args![
            dy.ptr,
            dy.stride,
            x.ptr,
            x.stride,
            w.ptr,
            eps,
            dx.ptr,
            dx.stride,
            partial.address(),
            x.rows,
            x.cols,
        ];
        let launch = Launch::line(blocks, Self::norm_threads(x.cols, wide));
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&NORM, variant!(wide, "norm_backward"), launch, &args)? };
        self.add_partial(&partial, blocks, dw)
    }

    /// The kernel for a head size: rotary over a whole head of 64 or 128, or any.
    fn rotary_kernel(dim: usize, angles: &Angles, matrices: &[Raw]) -> Option<usize> {
        let whole = 2 * angles.cos.cols == dim
            && matrices
                .iter()
                .all(|m| m.ptr.is_multiple_of(4) && m.stride.is_multiple_of(2));
        (whole && (dim == 64 || dim == 128)).then_some(dim)
    }

    pub(super) fn rotate(
        &self,
        x: Raw,
        w: Option<Raw>,
        eps: f32,
        dim: usize,
        angles: &Angles,
        y: Raw,
    ) -> Result<(), EngineError> {
        same_shape(&[x, y]);
        angles.check(x.rows, dim);
        assert!(
            x.cols.is_multiple_of(dim),
            "{} columns in heads of {dim}",
            x.cols
        );
        assert!(w.is_none_or(|w| w.len() == dim), "weights of a head's norm");
        let heads = x.cols / dim;
        let mut args = args![
            x.ptr,
            x.stride,
            w.map_or(0, |w| w.ptr),
            eps,
            angles.positions.0,
            angles.cos.ptr,
            angles.cos.stride,
            angles.sin.ptr,
            angles.sin.stride,
            y.ptr,
            y.stride,
            heads as u32,
        ]
        .to_vec();
        let (name, warps) = match Self::rotary_kernel(dim, angles, &[x, y]) {
            Some(64) => ("rotate_64", heads.min(ROTARY_WARPS)),
            Some(_) => ("rotate_128", heads.min(ROTARY_WARPS)),
            None => {
                args.extend(args![dim as u32, angles.cos.cols as u32]);
                ("rotate_any", ROTARY_WARPS)
            }
        };
        let launch = Launch::line(x.rows, 32 * warps.max(1));
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&ROTARY, name, launch, &args) }
    }

    pub(super) fn rotate_backward(
        &self,
        [dy, x, w, dx, dw]: [Raw; 5],
        eps: f32,
        angles: &Angles,
    ) -> Result<(), EngineError> {
        same_shape(&[dy, x, dx]);
        let dim = w.len();
        angles.check(x.rows, dim);
        assert!(
            x.cols.is_multiple_of(dim),
            "{} columns in heads of {dim}",
            x.cols
        );
        assert_eq!(dw.len(), dim, "weights of a head's norm");
        if x.rows == 0 {
            return Ok(());
        }
        let blocks = self.summing_blocks(x.rows, 8);
        let partial = self.scratch(blocks * dim, "sums of a head norm's weight gradient")?;
        let mut args = args![
            dy.ptr,
            dy.stride,
            x.ptr,
            x.stride,
            w.ptr,
            eps,
            angles.positions.0,
            angles.cos.ptr,
            angles.cos.stride,
            angles.sin.ptr,
            angles.sin.stride,
            dx.ptr,
            dx.stride,
            partial.address(),
            x.rows,
            (x.cols / dim) as u32,
        ]
        .to_vec();
        let name = match Self::rotary_kernel(dim, angles, &[dy, x, dx]) {
            Some(64) => "rotate_64_backward",
            Some(_) => "rotate_128_backward",
            None => {
                args.extend(args![dim as u32, angles.cos.cols as u32]);
                "rotate_any_backward"
            }
        };
        let launch = Launch::line(blocks, 32 * ROTARY_WARPS);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&ROTARY, name, launch, &args)? };
        self.add_partial(&partial, blocks, dw)
    }

    pub(super) fn sum_squares_impl(&self, x: Raw, out: Raw) -> Result<(), EngineError> {
        assert!(out.len() >= 1, "sum_squares needs a place for its sum");
        let parts = x
            .len()
            .div_ceil(4096)
            .clamp(1, 8 * self.device.multiprocessors);
        let partial = self.scratch(parts, "sums of squares")?;
        let args = args![x.ptr, x.stride, x.rows, x.cols, partial.address(),];
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&OPTIMIZER, "square_sums", Launch::line(parts, 256), &args)? };
        let args = args![partial.address(), parts, out.ptr];
        // SAFETY: as above.
        unsafe { self.launch(&OPTIMIZER, "sum_partial", Launch::line(1, 256), &args) }
    }

    pub(super) fn adamw_impl(
        &self,
        update: &AdamW,
        [grad, master, m, v]: [Raw; 4],
        weight: Option<Raw>,
    ) -> Result<(), EngineError> {
        let mut all = [grad, master, m, v, weight.unwrap_or(grad)];
        same_shape(&all);
        if all.iter().all(Raw::is_contiguous) {
            all = all.map(Raw::flattened);
        }
        let wide = is_wide(&all);
        let correction = |beta: f32| (1.0 - f64::from(beta).powf(update.count as f64)) as f32;
        let [grad, master, m, v, last] = all;
        let args = args![
            grad.ptr,
            grad.stride,
            master.ptr,
            master.stride,
            m.ptr,
            m.stride,
            v.ptr,
            v.stride,
            weight.map_or(0, |w| w.ptr),
            last.stride,
            grad.rows,
            grad.cols,
            update.grad_scale,
            update.lr,
            update.beta1,
            update.beta2,
            update.eps,
            update.weight_decay,
            correction(update.beta1),
            correction(update.beta2),
        ];
        let launch = by_rows(grad.rows, grad.cols, wide);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&OPTIMIZER, variant!(wide, "adamw"), launch, &args) }
    }

    pub(super) fn has_non_finite_impl(&self, x: Raw) -> Result<bool, EngineError> {
        let x = x.flattened();
        let wide = is_wide(&[x]);
        let flag: Buffer<u32> = Buffer::new(&self.device, 1, "a flag")?;
        let flag_raw = Raw {
            ptr: flag.address(),
            rows: 1,
            cols: 1,
            stride: 1,
        };
        self.zero(flag_raw, 4)?;
        let args = args![x.ptr, x.stride, x.rows, x.cols, flag.address(),];
        let launch = by_rows(x.rows, x.cols, wide);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&ROWS, variant!(wide, "find_non_finite"), launch, &args)? };
        let found = self.staging.download(flag_raw, |v: u32| v)?;
        Ok(found[0] != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compile() {
        for program in [&ROWS, &NORM, &ROTARY, &OPTIMIZER] {
            super::super::kernels::check_compiles(program, "sm_80");
        }
    }
}
