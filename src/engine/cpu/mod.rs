//! The CPU engine: float32, the readable reference.
//!
//! One file for each concept. Work is done when a call returns, so queues and events are trivial. Every output
//! element is computed by one thread in an order that depends on shapes only: results have the same bits for
//! any number of threads, and a row's result does not depend on the rows beside it (see `product`).

mod activation;
mod attention;
mod head;
mod head_loss;
mod linear;
mod memory;
mod norm;
mod optimizer;
mod product;
mod rate;
mod rotary;
mod transfer;
mod vector;

pub use rate::measured_rate;

use std::sync::Arc;
use std::time::Duration;

use rayon::prelude::*;

use super::{
    AdamW, BlockKeys, BlockKeysGrad, BlockMask, CacheMask, CausalMask, Draws, Engine, EngineError,
    Float, FloatMut, FloatView, Half, HalfMut, HalfView, HeadLoss, HeadLossOut, Heads, Index,
    IndexMut, IndexView, Queue, Rotary, Scores, Tensor,
};
pub(crate) use head_loss::CHUNK_ROWS;
pub use memory::Buffer;
use memory::{Rows, RowsMut, Shelf};

/// Elements a task should touch at least.
const TASK: usize = 1 << 15;

/// The CPU as a device.
pub struct Cpu {
    name: String,
    threads: usize,
    pool: Option<rayon::ThreadPool>,
    floats: Arc<Shelf<f32>>,
    indices: Arc<Shelf<u32>>,
}

impl Cpu {
    /// An engine that computes on `threads` threads of its own (0: as many as the process may use). With one,
    /// everything runs on the calling thread.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the threads cannot be started.
    pub fn new(threads: usize) -> Result<Self, EngineError> {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let name = format!("cpu ({threads} threads)");
        let pool = (threads > 1)
            .then(|| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .thread_name(|i| format!("engine-{i}"))
                    .build()
            })
            .transpose()
            .map_err(|error| EngineError::Device {
                device: name.clone(),
                what: "starting threads",
                message: error.to_string(),
            })?;
        Ok(Self {
            name,
            threads,
            pool,
            floats: Arc::default(),
            indices: Arc::default(),
        })
    }

    /// Number of threads that compute.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `f` where rayon's parallel calls find this engine's threads.
    fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }

    /// Runs `f` on each task, in parallel where `work` elements are worth it.
    fn for_each<T: Send>(&self, work: usize, tasks: impl Iterator<Item = T>, f: impl Fn(T) + Sync) {
        match &self.pool {
            Some(pool) if work >= 2 * TASK => {
                let tasks: Vec<T> = tasks.collect();
                if tasks.len() == 1 {
                    tasks.into_iter().for_each(f);
                } else {
                    pool.install(|| tasks.into_par_iter().for_each(&f));
                }
            }
            _ => tasks.for_each(f),
        }
    }

    /// Rows of a task, so that it touches about [`TASK`] elements.
    fn rows_per_task(cols: usize) -> usize {
        (TASK / cols.max(1)).max(1)
    }

    /// Temporary memory with arbitrary content.
    fn scratch(&self, len: usize) -> Buffer<f32> {
        self.floats.take(len)
    }
}

impl Engine for Cpu {
    type Half = Buffer<f32>;
    type Float = Buffer<f32>;
    type Index = Buffer<u32>;
    type Event = ();

    const HALF_BYTES: usize = 4;

    fn name(&self) -> &str {
        &self.name
    }

    fn half(&self, rows: usize, cols: usize) -> Result<Half<Self>, EngineError> {
        Ok(Tensor::new(self.floats.take(rows * cols), rows, cols))
    }

    fn float(&self, rows: usize, cols: usize) -> Result<Float<Self>, EngineError> {
        let mut tensor = Tensor::new(self.floats.take(rows * cols), rows, cols);
        self.zero_float(tensor.view_mut())?;
        Ok(tensor)
    }

    fn upload_half(&self, values: &[f32], cols: usize) -> Result<Half<Self>, EngineError> {
        Ok(transfer::upload(&self.floats, values, cols))
    }

    fn upload_float(&self, values: &[f32], cols: usize) -> Result<Float<Self>, EngineError> {
        Ok(transfer::upload(&self.floats, values, cols))
    }

    fn upload_index(&self, values: &[u32]) -> Result<Index<Self>, EngineError> {
        Ok(transfer::upload(&self.indices, values, values.len()))
    }

    fn write_float(&self, dst: FloatMut<'_, Self>, values: &[f32]) -> Result<(), EngineError> {
        transfer::write(RowsMut::new(dst), values);
        Ok(())
    }

    fn write_half(&self, dst: HalfMut<'_, Self>, values: &[f32]) -> Result<(), EngineError> {
        transfer::write(RowsMut::new(dst), values);
        Ok(())
    }

    fn download_half(&self, src: HalfView<'_, Self>) -> Result<Vec<f32>, EngineError> {
        Ok(transfer::download(Rows::new(src)))
    }

    fn download_float(&self, src: FloatView<'_, Self>) -> Result<Vec<f32>, EngineError> {
        Ok(transfer::download(Rows::new(src)))
    }

    fn download_index(&self, src: IndexView<'_, Self>) -> Result<Vec<u32>, EngineError> {
        Ok(transfer::download(Rows::new(src)))
    }

    fn zero_half(&self, dst: HalfMut<'_, Self>) -> Result<(), EngineError> {
        transfer::zero(self, RowsMut::new(dst));
        Ok(())
    }

    fn zero_float(&self, dst: FloatMut<'_, Self>) -> Result<(), EngineError> {
        transfer::zero(self, RowsMut::new(dst));
        Ok(())
    }

    fn copy_half(
        &self,
        src: HalfView<'_, Self>,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        transfer::copy(self, Rows::new(src), RowsMut::new(dst));
        Ok(())
    }

    fn round(&self, src: FloatView<'_, Self>, dst: HalfMut<'_, Self>) -> Result<(), EngineError> {
        transfer::copy(self, Rows::new(src), RowsMut::new(dst));
        Ok(())
    }

    fn widen(&self, src: HalfView<'_, Self>, dst: FloatMut<'_, Self>) -> Result<(), EngineError> {
        transfer::copy(self, Rows::new(src), RowsMut::new(dst));
        Ok(())
    }

    fn gather(
        &self,
        src: HalfView<'_, Self>,
        rows: IndexView<'_, Self>,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        transfer::gather(self, Rows::new(src), index(rows), RowsMut::new(dst));
        Ok(())
    }

    fn scatter(
        &self,
        src: HalfView<'_, Self>,
        rows: IndexView<'_, Self>,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        transfer::scatter(Rows::new(src), index(rows), RowsMut::new(dst));
        Ok(())
    }

    unsafe fn register_host(&self, _base: *mut u8, _len: usize) -> Result<(), EngineError> {
        Ok(())
    }

    unsafe fn copy_out(&self, src: HalfView<'_, Self>, dst: *mut u8) -> Result<(), EngineError> {
        // SAFETY: the caller's promise is the callee's.
        unsafe { transfer::copy_out(Rows::new(src), dst) };
        Ok(())
    }

    unsafe fn copy_in(&self, src: *const u8, dst: HalfMut<'_, Self>) -> Result<(), EngineError> {
        // SAFETY: the caller's promise is the callee's.
        unsafe { transfer::copy_in(src, RowsMut::new(dst)) };
        Ok(())
    }

    fn record(&self, _queue: Queue) -> Result<Self::Event, EngineError> {
        Ok(())
    }

    fn wait(&self, _queue: Queue, _event: &Self::Event) -> Result<(), EngineError> {
        Ok(())
    }

    fn is_done(&self, _event: &Self::Event) -> Result<bool, EngineError> {
        Ok(true)
    }

    fn finish(&self, _event: &Self::Event, _deadline: Duration) -> Result<(), EngineError> {
        Ok(())
    }

    fn linear(
        &self,
        x: HalfView<'_, Self>,
        w: HalfView<'_, Self>,
        y: HalfMut<'_, Self>,
        accumulate: bool,
    ) -> Result<(), EngineError> {
        linear::forward(
            self,
            Rows::new(x),
            Rows::new(w),
            RowsMut::new(y),
            accumulate,
        );
        Ok(())
    }

    fn linear_dx(
        &self,
        dy: HalfView<'_, Self>,
        w: HalfView<'_, Self>,
        dx: HalfMut<'_, Self>,
        accumulate: bool,
    ) -> Result<(), EngineError> {
        linear::input_gradient(
            self,
            Rows::new(dy),
            Rows::new(w),
            RowsMut::new(dx),
            accumulate,
        );
        Ok(())
    }

    fn linear_dw(
        &self,
        dy: HalfView<'_, Self>,
        x: HalfView<'_, Self>,
        dw: FloatMut<'_, Self>,
    ) -> Result<(), EngineError> {
        linear::weight_gradient(self, Rows::new(dy), Rows::new(x), RowsMut::new(dw));
        Ok(())
    }

    fn add_bias(&self, bias: FloatView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError> {
        linear::add_bias(self, vector_of(bias), RowsMut::new(y));
        Ok(())
    }

    fn norm(
        &self,
        h: HalfMut<'_, Self>,
        delta: Option<HalfView<'_, Self>>,
        w: FloatView<'_, Self>,
        eps: f32,
        y: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        norm::forward(
            self,
            RowsMut::new(h),
            delta.map(Rows::new),
            vector_of(w),
            eps,
            RowsMut::new(y),
        );
        Ok(())
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
        norm::backward(
            self,
            Rows::new(dy),
            Rows::new(x),
            vector_of(w),
            eps,
            RowsMut::new(dx),
            RowsMut::new(dw).row_mut(0),
        );
        Ok(())
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
        let heads = rotary::HeadNorm {
            w: w.map(vector_of),
            eps,
            dim,
        };
        let turn = rotary::Turn::new(index(positions), rotary);
        rotary::forward(self, Rows::new(x), heads, turn, RowsMut::new(y));
        Ok(())
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
        let turn = rotary::Turn::new(index(positions), rotary);
        rotary::backward(
            self,
            Rows::new(dy),
            Rows::new(x),
            (vector_of(w), eps),
            turn,
            RowsMut::new(dx),
            RowsMut::new(dw).row_mut(0),
        );
        Ok(())
    }

    fn swiglu(&self, gate_up: HalfView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError> {
        activation::forward(self, Rows::new(gate_up), RowsMut::new(y));
        Ok(())
    }

    fn geglu(&self, gate_up: HalfView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError> {
        activation::gelu_gated(self, Rows::new(gate_up), RowsMut::new(y));
        Ok(())
    }

    fn scale(&self, by: f32, x: HalfMut<'_, Self>) -> Result<(), EngineError> {
        linear::scale(self, by, RowsMut::new(x));
        Ok(())
    }

    fn add(&self, x: HalfView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError> {
        linear::add(self, Rows::new(x), RowsMut::new(y));
        Ok(())
    }

    fn scatter_add(
        &self,
        src: HalfView<'_, Self>,
        rows: IndexView<'_, Self>,
        weights: FloatView<'_, Self>,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        linear::scatter_add(
            Rows::new(src),
            index(rows),
            vector_of(weights),
            RowsMut::new(dst),
        );
        Ok(())
    }

    fn swiglu_backward(
        &self,
        dy: HalfView<'_, Self>,
        gate_up: HalfView<'_, Self>,
        d_gate_up: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        activation::backward(
            self,
            Rows::new(dy),
            Rows::new(gate_up),
            RowsMut::new(d_gate_up),
        );
        Ok(())
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
        attention::causal(
            self,
            attention::Shape::new(heads, scores),
            attention::Qkv {
                q: Rows::new(q),
                k: Rows::new(k),
                v: Rows::new(v),
            },
            index(mask.offsets),
            mask.window,
            RowsMut::new(out),
        );
        Ok(())
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
        attention::block_forward(
            self,
            attention::Shape::new(heads, scale),
            Rows::new(q),
            &attention::Keys::new(keys),
            &attention::Blocks::new(mask),
            RowsMut::new(out),
            RowsMut::new(lse),
        );
        Ok(())
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
        attention::block_backward(
            self,
            attention::Shape::new(heads, scale),
            &attention::Saved {
                d_out: Rows::new(d_out),
                q: Rows::new(q),
                out: Rows::new(out),
                lse: Rows::new(lse),
            },
            &attention::Keys::new(keys),
            &attention::Blocks::new(mask),
            RowsMut::new(d_q),
            attention::KeysGrad::new(d_keys),
        );
        Ok(())
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
        attention::cached(
            self,
            attention::Shape::new(heads, scores),
            attention::Qkv {
                q: Rows::new(q),
                k: Rows::new(k_cache),
                v: Rows::new(v_cache),
            },
            mask,
            RowsMut::new(out),
        );
        Ok(())
    }

    fn head_loss(
        &self,
        input: &HeadLoss<'_, Self>,
        out: HeadLossOut<'_, Self>,
    ) -> Result<(), EngineError> {
        head_loss::run(self, input, out);
        Ok(())
    }

    fn logits(
        &self,
        hidden: HalfView<'_, Self>,
        lm_head: HalfView<'_, Self>,
        logits: FloatMut<'_, Self>,
    ) -> Result<(), EngineError> {
        linear::forward(
            self,
            Rows::new(hidden),
            Rows::new(lm_head),
            RowsMut::new(logits),
            false,
        );
        Ok(())
    }

    fn top_k(
        &self,
        hidden: HalfView<'_, Self>,
        lm_head: HalfView<'_, Self>,
        k: usize,
        ids: IndexMut<'_, Self>,
        log_probs: FloatMut<'_, Self>,
    ) -> Result<(), EngineError> {
        head::top_k(
            self,
            Rows::new(hidden),
            Rows::new(lm_head),
            k,
            RowsMut::new(ids),
            RowsMut::new(log_probs),
        );
        Ok(())
    }

    fn choose(
        &self,
        hidden: HalfView<'_, Self>,
        lm_head: HalfView<'_, Self>,
        draws: Option<Draws<'_>>,
        ids: IndexMut<'_, Self>,
    ) -> Result<(), EngineError> {
        let mut ids = RowsMut::new(ids);
        head::choose(
            self,
            Rows::new(hidden),
            Rows::new(lm_head),
            draws,
            ids.row_mut(0),
        );
        Ok(())
    }

    fn sum_squares(
        &self,
        x: FloatView<'_, Self>,
        out: FloatMut<'_, Self>,
    ) -> Result<(), EngineError> {
        RowsMut::new(out).row_mut(0)[0] = optimizer::sum_squares(self, Rows::new(x));
        Ok(())
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
        optimizer::adamw(
            self,
            update,
            Rows::new(grad),
            optimizer::State {
                master: RowsMut::new(master),
                m: RowsMut::new(m),
                v: RowsMut::new(v),
            },
            weight.map(RowsMut::new),
        );
        Ok(())
    }

    fn has_non_finite(&self, x: HalfView<'_, Self>) -> Result<bool, EngineError> {
        Ok(optimizer::has_non_finite(Rows::new(x)))
    }
}

/// A vector of numbers; a matrix of one row.
fn vector_of(view: FloatView<'_, Cpu>) -> &[f32] {
    assert!(view.rows == 1, "a vector has one row, not {}", view.rows);
    Rows::new(view).data
}

/// A vector of indices; a matrix of one row.
fn index(view: IndexView<'_, Cpu>) -> &[u32] {
    assert!(view.rows == 1, "a vector has one row, not {}", view.rows);
    Rows::new(view).data
}
