//! The CUDA engine: bf16 matrices, float32 sums, everything enqueued on three queues of one GPU.
//!
//! Products go through cuBLASLt (`gemm`), everything else through kernels of our own (`kernels` compiles
//! the sources in `kernels/` at first use). All CUDA libraries are opened at run time (`libraries`), so one
//! binary serves machines with and without a GPU. Kernels use no float atomics: on one machine the same calls
//! give the same bits.
//!
//! Memory comes from the driver's stream-ordered pool (`memory`). A matrix that receives copies
//! ([`Engine::copy_in`]) is best allocated once and used again: the first copy into fresh memory waits for
//! the compute queue, later ones only for what the caller makes them wait for.

mod attention;
mod copies;
mod device;
mod elementwise;
mod gemm;
mod head;
mod kernels;
mod libraries;
mod memory;
mod nvml;
mod rows;

use std::sync::Arc;
use std::time::Duration;

use half::{bf16, f16};

use super::{
    AdamW, BlockKeys, BlockKeysGrad, BlockMask, CacheMask, CausalMask, Draws, Encoding, Engine,
    EngineError, Float, FloatMut, FloatView, Half, HalfMut, HalfView, HeadLoss, HeadLossOut, Heads,
    Index, IndexMut, IndexView, Queue, Rotary, Scores, Tensor,
};
use copies::HostMemory;
use device::Device;
pub use device::{DeviceFacts, Event, devices};
use gemm::{Gemm, Gemms, Product};
pub(crate) use head::CHUNK_BYTES;
use kernels::{Arg, Kernels, Launch, Program};
pub use libraries::{
    Library, find_library, library_folders, linked_nccl, require as require_library,
};
pub use memory::{Buffer, Element};
use memory::{Raw, Staging, raw, raw_mut};
pub use nvml::{GpuUse, Nvml};

/// How much memory of a GPU is in use, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// In tensors of this engine now.
    pub used: u64,
    /// The most there ever was in tensors of this engine.
    pub peak: u64,
    /// Held by this engine's pool, used or not.
    pub reserved: u64,
    /// Free on the GPU, whoever else uses it.
    pub free: u64,
    /// On the GPU in all.
    pub total: u64,
}

/// A GPU that runs the models.
#[derive(Debug)]
pub struct Cuda {
    device: Arc<Device>,
    kernels: Kernels,
    gemms: Gemms,
    staging: Staging,
    host: HostMemory,
}

impl Cuda {
    /// Opens GPU `ordinal` of the visible ones.
    ///
    /// # Errors
    /// Names the library to install, the driver's complaint, or the number of GPUs there are.
    pub fn new(ordinal: usize) -> Result<Self, EngineError> {
        let device = Device::open(ordinal)?;
        Ok(Self {
            kernels: Kernels::new(&device),
            gemms: Gemms::new(&device)?,
            staging: Staging::new(&device)?,
            host: HostMemory::new(&device),
            device,
        })
    }

    /// What memory is in use now.
    ///
    /// # Errors
    /// When the driver refuses to say.
    pub fn memory_use(&self) -> Result<MemoryUse, EngineError> {
        let [used, peak, reserved] = self.device.pool_bytes()?;
        let [free, total] = self.device.memory_bytes()?;
        Ok(MemoryUse {
            used,
            peak,
            reserved,
            free,
            total,
        })
    }

    /// The driver's handle (`CUstream`) of a queue, for collectives.
    pub fn stream_handle(&self, queue: Queue) -> *mut std::ffi::c_void {
        self.device.stream(queue).cast()
    }

    /// The device address of a contiguous float32 view's first element, for collectives.
    pub fn float_address(&self, view: &FloatMut<'_, Self>) -> u64 {
        let raw = raw_mut(view);
        assert!(raw.is_contiguous(), "a strided view has no single address");
        raw.ptr
    }

    /// Makes this GPU the calling thread's, as libraries beside this engine expect.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn make_current(&self) -> Result<(), EngineError> {
        self.device.bind()
    }

    /// Enqueues a kernel; see [`Kernels::launch`].
    ///
    /// # Safety
    /// As there.
    unsafe fn launch(
        &self,
        program: &Program,
        name: &'static str,
        launch: Launch,
        args: &[Arg],
    ) -> Result<(), EngineError> {
        // SAFETY: passed on.
        unsafe { self.kernels.launch(program, name, launch, args) }
    }

    /// Uninitialised float32 scratch memory.
    fn scratch(&self, len: usize, what: &'static str) -> Result<Buffer<f32>, EngineError> {
        Buffer::new(&self.device, len, what)
    }

    fn product(
        &self,
        product: Product,
        [first, second, out]: [Raw; 3],
        float: bool,
        accumulate: bool,
    ) -> Result<(), EngineError> {
        self.gemms.run(
            &self.kernels,
            &Gemm {
                product,
                first,
                second,
                out,
                float,
                accumulate,
            },
        )
    }
}

impl Engine for Cuda {
    type Half = Buffer<bf16>;
    type Float = Buffer<f32>;
    type Index = Buffer<u32>;
    type Event = Event;

    const HALF_BYTES: usize = 2;

    fn name(&self) -> &str {
        &self.device.name
    }

    fn peak_memory(&self) -> Result<Option<u64>, EngineError> {
        Ok(Some(self.memory_use()?.peak))
    }

    fn half(&self, rows: usize, cols: usize) -> Result<Half<Self>, EngineError> {
        let buffer = Buffer::new(&self.device, rows * cols, "a bf16 matrix")?;
        Ok(Tensor::new(buffer, rows, cols))
    }

    fn float(&self, rows: usize, cols: usize) -> Result<Float<Self>, EngineError> {
        let buffer = Buffer::new(&self.device, rows * cols, "a float32 buffer")?;
        let mut tensor = Tensor::new(buffer, rows, cols);
        self.zero_float(tensor.view_mut())?;
        Ok(tensor)
    }

    fn upload_half(&self, values: &[f32], cols: usize) -> Result<Half<Self>, EngineError> {
        let mut tensor = self.half(values.len().checked_div(cols).unwrap_or(0), cols)?;
        self.write_half(tensor.view_mut(), values)?;
        Ok(tensor)
    }

    fn upload_float(&self, values: &[f32], cols: usize) -> Result<Float<Self>, EngineError> {
        let buffer = Buffer::new(&self.device, values.len(), "a float32 buffer")?;
        let mut tensor = Tensor::new(buffer, values.len().checked_div(cols).unwrap_or(0), cols);
        self.write_float(tensor.view_mut(), values)?;
        Ok(tensor)
    }

    fn upload_index(&self, values: &[u32]) -> Result<Index<Self>, EngineError> {
        let buffer = Buffer::new(&self.device, values.len(), "an index buffer")?;
        let mut tensor = Tensor::new(buffer, 1, values.len());
        let to = raw_mut(&tensor.view_mut());
        self.staging.upload(values, |v| v, to)?;
        Ok(tensor)
    }

    fn write_float(&self, dst: FloatMut<'_, Self>, values: &[f32]) -> Result<(), EngineError> {
        self.staging.upload(values, |v| v, raw_mut(&dst))
    }

    fn write_half(&self, dst: HalfMut<'_, Self>, values: &[f32]) -> Result<(), EngineError> {
        self.staging.upload(values, bf16::from_f32, raw_mut(&dst))
    }

    fn decode_half(
        &self,
        dst: HalfMut<'_, Self>,
        encoding: Encoding,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        let dst = raw_mut(&dst);
        match encoding {
            Encoding::Bf16 => {
                let (numbers, _) = bytes.as_chunks::<2>();
                self.staging.upload(numbers, bf16::from_le_bytes, dst)
            }
            Encoding::F32 => {
                let (numbers, _) = bytes.as_chunks::<4>();
                let convert = |bytes| bf16::from_f32(f32::from_le_bytes(bytes));
                self.staging.upload(numbers, convert, dst)
            }
            Encoding::F16 => {
                let (numbers, _) = bytes.as_chunks::<2>();
                let convert = |bytes| bf16::from_f32(f16::from_le_bytes(bytes).to_f32());
                self.staging.upload(numbers, convert, dst)
            }
        }
    }

    fn download_half(&self, src: HalfView<'_, Self>) -> Result<Vec<f32>, EngineError> {
        self.staging.download(raw(&src), bf16::to_f32)
    }

    fn download_float(&self, src: FloatView<'_, Self>) -> Result<Vec<f32>, EngineError> {
        self.staging.download(raw(&src), |v: f32| v)
    }

    fn download_index(&self, src: IndexView<'_, Self>) -> Result<Vec<u32>, EngineError> {
        self.staging.download(raw(&src), |v: u32| v)
    }

    fn zero_half(&self, dst: HalfMut<'_, Self>) -> Result<(), EngineError> {
        self.zero(raw_mut(&dst), 2)
    }

    fn zero_float(&self, dst: FloatMut<'_, Self>) -> Result<(), EngineError> {
        self.zero(raw_mut(&dst), 4)
    }

    fn copy_half(
        &self,
        src: HalfView<'_, Self>,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        self.gather_rows(raw(&src), None, raw_mut(&dst))
    }

    fn round(&self, src: FloatView<'_, Self>, dst: HalfMut<'_, Self>) -> Result<(), EngineError> {
        self.convert(rows::Convert::Round, raw(&src), raw_mut(&dst))
    }

    fn widen(&self, src: HalfView<'_, Self>, dst: FloatMut<'_, Self>) -> Result<(), EngineError> {
        self.convert(rows::Convert::Widen, raw(&src), raw_mut(&dst))
    }

    fn gather(
        &self,
        src: HalfView<'_, Self>,
        rows: IndexView<'_, Self>,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        self.gather_rows(raw(&src), Some(index(&rows)), raw_mut(&dst))
    }

    fn scatter(
        &self,
        src: HalfView<'_, Self>,
        rows: IndexView<'_, Self>,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        let (rows, count) = index(&rows);
        assert_eq!(count, src.rows, "rows of a scatter");
        self.scatter_rows(raw(&src), rows, raw_mut(&dst))
    }

    unsafe fn register_host(&self, base: *mut u8, len: usize) -> Result<(), EngineError> {
        // SAFETY: passed on.
        unsafe { self.host.register(base, len) }
    }

    unsafe fn copy_out(&self, src: HalfView<'_, Self>, dst: *mut u8) -> Result<(), EngineError> {
        // SAFETY: passed on.
        unsafe { self.copy_out_impl(src, dst) }
    }

    unsafe fn copy_in(&self, src: *const u8, dst: HalfMut<'_, Self>) -> Result<(), EngineError> {
        // SAFETY: passed on.
        unsafe { self.copy_in_impl(src, dst) }
    }

    fn record(&self, queue: Queue) -> Result<Event, EngineError> {
        self.device.record(self.device.stream(queue))
    }

    fn wait(&self, queue: Queue, event: &Event) -> Result<(), EngineError> {
        self.device.wait(self.device.stream(queue), event)
    }

    fn is_done(&self, event: &Event) -> Result<bool, EngineError> {
        event.is_done()
    }

    fn finish(&self, event: &Event, deadline: Duration) -> Result<(), EngineError> {
        event.finish("what was enqueued", deadline)
    }

    fn linear(
        &self,
        x: HalfView<'_, Self>,
        w: HalfView<'_, Self>,
        y: HalfMut<'_, Self>,
        accumulate: bool,
    ) -> Result<(), EngineError> {
        let operands = [raw(&w), raw(&x), raw_mut(&y)];
        self.product(Product::Forward, operands, false, accumulate)
    }

    fn linear_dx(
        &self,
        dy: HalfView<'_, Self>,
        w: HalfView<'_, Self>,
        dx: HalfMut<'_, Self>,
        accumulate: bool,
    ) -> Result<(), EngineError> {
        let operands = [raw(&w), raw(&dy), raw_mut(&dx)];
        self.product(Product::InputGradient, operands, false, accumulate)
    }

    fn linear_dw(
        &self,
        dy: HalfView<'_, Self>,
        x: HalfView<'_, Self>,
        dw: FloatMut<'_, Self>,
    ) -> Result<(), EngineError> {
        let operands = [raw(&x), raw(&dy), raw_mut(&dw)];
        self.product(Product::WeightGradient, operands, true, true)
    }

    fn add_bias(&self, bias: FloatView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError> {
        self.add_bias_impl(raw(&bias), raw_mut(&y))
    }

    fn norm(
        &self,
        h: HalfMut<'_, Self>,
        delta: Option<HalfView<'_, Self>>,
        w: FloatView<'_, Self>,
        eps: f32,
        y: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        let delta = delta.map(|d| raw(&d));
        self.norm_impl(raw_mut(&h), delta, raw(&w), eps, raw_mut(&y))
    }

    fn norm_backward(
        &self,
        dy: HalfView<'_, Self>,
        x: HalfView<'_, Self>,
        w: FloatView<'_, Self>,
        eps: f32,
        dx: HalfMut<'_, Self>,
        dw: FloatMut<'_, Self>,
    ) -> Result<(), EngineError> {
        self.norm_backward_impl(raw(&dy), raw(&x), raw(&w), eps, raw_mut(&dx), raw_mut(&dw))
    }

    fn head_norm_rotary(
        &self,
        x: HalfView<'_, Self>,
        w: Option<FloatView<'_, Self>>,
        eps: f32,
        dim: usize,
        positions: IndexView<'_, Self>,
        rotary: Rotary<'_, Self>,
        y: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        let angles = rows::Angles::new(&positions, &rotary);
        let w = w.map(|w| raw(&w));
        self.rotate(raw(&x), w, eps, dim, &angles, raw_mut(&y))
    }

    fn head_norm_rotary_backward(
        &self,
        dy: HalfView<'_, Self>,
        x: HalfView<'_, Self>,
        w: FloatView<'_, Self>,
        eps: f32,
        positions: IndexView<'_, Self>,
        rotary: Rotary<'_, Self>,
        dx: HalfMut<'_, Self>,
        dw: FloatMut<'_, Self>,
    ) -> Result<(), EngineError> {
        let angles = rows::Angles::new(&positions, &rotary);
        let operands = [raw(&dy), raw(&x), raw(&w), raw_mut(&dx), raw_mut(&dw)];
        self.rotate_backward(operands, eps, &angles)
    }

    fn swiglu(&self, gate_up: HalfView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError> {
        self.swiglu_impl(raw(&gate_up), raw_mut(&y))
    }

    fn geglu(&self, gate_up: HalfView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError> {
        self.geglu_impl(raw(&gate_up), raw_mut(&y))
    }

    fn scale(&self, by: f32, x: HalfMut<'_, Self>) -> Result<(), EngineError> {
        self.scale_impl(by, raw_mut(&x))
    }

    fn add(&self, x: HalfView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError> {
        self.add_impl(raw(&x), raw_mut(&y))
    }

    fn scatter_add(
        &self,
        src: HalfView<'_, Self>,
        rows: IndexView<'_, Self>,
        weights: FloatView<'_, Self>,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        self.scatter_add_impl(raw(&src), index(&rows), raw(&weights), raw_mut(&dst))
    }

    fn swiglu_backward(
        &self,
        dy: HalfView<'_, Self>,
        gate_up: HalfView<'_, Self>,
        d_gate_up: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        self.swiglu_backward_impl(raw(&dy), raw(&gate_up), raw_mut(&d_gate_up))
    }

    fn causal_attention(
        &self,
        heads: Heads,
        scores: impl Into<Scores>,
        q: HalfView<'_, Self>,
        k: HalfView<'_, Self>,
        v: HalfView<'_, Self>,
        mask: &CausalMask<'_, Self>,
        out: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        let operands = [raw(&q), raw(&k), raw(&v), raw_mut(&out)];
        self.causal(heads, scores.into(), operands, mask)
    }

    fn block_attention(
        &self,
        heads: Heads,
        scale: f32,
        q: HalfView<'_, Self>,
        keys: &BlockKeys<'_, Self>,
        mask: &BlockMask<'_, Self>,
        out: HalfMut<'_, Self>,
        lse: FloatMut<'_, Self>,
    ) -> Result<(), EngineError> {
        let problem = attention::Blocks::new(heads, scale, raw(&q), keys, mask);
        self.block(&problem, raw_mut(&out), raw_mut(&lse))
    }

    fn block_attention_backward(
        &self,
        heads: Heads,
        scale: f32,
        d_out: HalfView<'_, Self>,
        q: HalfView<'_, Self>,
        keys: &BlockKeys<'_, Self>,
        mask: &BlockMask<'_, Self>,
        out: HalfView<'_, Self>,
        lse: FloatView<'_, Self>,
        d_q: HalfMut<'_, Self>,
        d_keys: BlockKeysGrad<'_, Self>,
    ) -> Result<(), EngineError> {
        let problem = attention::Blocks::new(heads, scale, raw(&q), keys, mask);
        let gradients = attention::Gradients {
            d_out: raw(&d_out),
            out: raw(&out),
            lse: raw(&lse),
            d_q: raw_mut(&d_q),
            d_context: [raw_mut(&d_keys.context_k), raw_mut(&d_keys.context_v)],
            d_block: [raw_mut(&d_keys.block_k), raw_mut(&d_keys.block_v)],
        };
        self.block_backward(&problem, &gradients)
    }

    fn cache_attention(
        &self,
        heads: Heads,
        scores: impl Into<Scores>,
        q: HalfView<'_, Self>,
        k_cache: HalfView<'_, Self>,
        v_cache: HalfView<'_, Self>,
        mask: &CacheMask<'_>,
        out: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        let operands = [raw(&q), raw(&k_cache), raw(&v_cache), raw_mut(&out)];
        self.cached(heads, scores.into(), operands, mask)
    }

    fn head_loss(
        &self,
        input: &HeadLoss<'_, Self>,
        out: HeadLossOut<'_, Self>,
    ) -> Result<(), EngineError> {
        self.head_loss_impl(input, out)
    }

    fn logits(
        &self,
        hidden: HalfView<'_, Self>,
        lm_head: HalfView<'_, Self>,
        logits: FloatMut<'_, Self>,
    ) -> Result<(), EngineError> {
        let operands = [raw(&lm_head), raw(&hidden), raw_mut(&logits)];
        self.product(Product::Forward, operands, true, false)
    }

    fn top_k(
        &self,
        hidden: HalfView<'_, Self>,
        lm_head: HalfView<'_, Self>,
        k: usize,
        ids: IndexMut<'_, Self>,
        log_probs: FloatMut<'_, Self>,
    ) -> Result<(), EngineError> {
        self.top_k_impl(hidden, lm_head, k, raw_mut(&ids), raw_mut(&log_probs))
    }

    fn choose(
        &self,
        hidden: HalfView<'_, Self>,
        lm_head: HalfView<'_, Self>,
        draws: Option<Draws<'_>>,
        ids: IndexMut<'_, Self>,
    ) -> Result<(), EngineError> {
        self.choose_impl(hidden, lm_head, draws, raw_mut(&ids))
    }

    fn sum_squares(
        &self,
        x: FloatView<'_, Self>,
        out: FloatMut<'_, Self>,
    ) -> Result<(), EngineError> {
        self.sum_squares_impl(raw(&x), raw_mut(&out))
    }

    fn adamw(
        &self,
        update: &AdamW,
        grad: FloatView<'_, Self>,
        master: FloatMut<'_, Self>,
        m: FloatMut<'_, Self>,
        v: FloatMut<'_, Self>,
        weight: Option<HalfMut<'_, Self>>,
    ) -> Result<(), EngineError> {
        let weight = weight.map(|w| raw_mut(&w));
        let operands = [raw(&grad), raw_mut(&master), raw_mut(&m), raw_mut(&v)];
        self.adamw_impl(update, operands, weight)
    }

    fn has_non_finite(&self, x: HalfView<'_, Self>) -> Result<bool, EngineError> {
        self.has_non_finite_impl(raw(&x))
    }
}

/// Address and length of an index buffer's view, which must be one row or one column without gaps.
fn index(view: &IndexView<'_, Cuda>) -> (u64, usize) {
    let raw = raw(view);
    assert!(raw.is_contiguous(), "a strided index buffer");
    (raw.ptr, raw.len())
}
