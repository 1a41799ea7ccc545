//! What the models run on: one trait in the models' fused steps, and one folder for each implementation.
//!
//! An engine owns one device and three queues: compute, copies in and copies out. Operations are enqueued on
//! the compute queue and run in order; nothing but [`Engine::finish`] and the `download` calls waits. Tensors
//! are opaque: matrices in the engine's *compute type* ([`Engine::Half`]: bf16 on GPUs, float32 on CPUs),
//! float32 buffers ([`Engine::Float`]: masters, moments, gradients, norm weights, statistics) and u32 buffers
//! ([`Engine::Index`]: ids, positions, offsets). Products accumulate in float32 everywhere.
//!
//! Operations panic on shapes that do not fit (a bug in the caller) and return [`EngineError`] for what a
//! device can do wrong. [`cpu`] is the readable reference; every implementation passes one conformance suite.

pub mod cpu;
pub mod cuda;
mod encoding;
mod tensor;

use std::time::Duration;

pub use encoding::Encoding;
pub use tensor::{Storage, Tensor, View, ViewMut};

/// What an engine can do wrong at run time.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device has not enough memory for an allocation.
    #[error("{device}: no memory for {bytes} bytes ({what})")]
    OutOfMemory {
        /// Which device.
        device: String,
        /// Size asked for.
        bytes: usize,
        /// What it was for.
        what: &'static str,
    },
    /// A wait outlasted its deadline.
    #[error("{device}: {what} did not finish within {after:?}")]
    Timeout {
        /// Which device.
        device: String,
        /// What was awaited.
        what: &'static str,
        /// The deadline.
        after: Duration,
    },
    /// The device or its driver reported an error.
    #[error("{device}: {what}: {message}")]
    Device {
        /// Which device.
        device: String,
        /// The operation.
        what: &'static str,
        /// The driver's text.
        message: String,
    },
}

/// A matrix in the compute type of engine `E`.
pub type Half<E> = Tensor<<E as Engine>::Half>;
/// A float32 buffer of engine `E`.
pub type Float<E> = Tensor<<E as Engine>::Float>;
/// A u32 buffer of engine `E`.
pub type Index<E> = Tensor<<E as Engine>::Index>;
/// A borrowed [`Half`].
pub type HalfView<'a, E> = View<'a, <E as Engine>::Half>;
/// A borrowed [`Half`], to write.
pub type HalfMut<'a, E> = ViewMut<'a, <E as Engine>::Half>;
/// A borrowed [`Float`].
pub type FloatView<'a, E> = View<'a, <E as Engine>::Float>;
/// A borrowed [`Float`], to write.
pub type FloatMut<'a, E> = ViewMut<'a, <E as Engine>::Float>;
/// A borrowed [`Index`].
pub type IndexView<'a, E> = View<'a, <E as Engine>::Index>;
/// A borrowed [`Index`], to write.
pub type IndexMut<'a, E> = ViewMut<'a, <E as Engine>::Index>;

/// The three in-order queues of a device. On a CPU all work is done when the call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// All operations.
    Compute,
    /// Host to device copies.
    CopyIn,
    /// Device to host copies.
    CopyOut,
}

/// Head counts of an attention layer. Queries `[rows, q * dim]`, keys and values `[rows, kv * dim]`; query
/// head `h` reads key/value head `h / (q / kv)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub q: usize,
    /// Key/value heads; divides `q`.
    pub kv: usize,
    /// Size of one head.
    pub dim: usize,
}

/// How an attention's products of queries and keys become the softmax's scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// Multiplies q·k.
    pub scale: f32,
    /// Then `cap · tanh(score / cap)`.
    pub cap: Option<f32>,
}

impl From<f32> for Scores {
    /// Scaled, not capped.
    fn from(scale: f32) -> Self {
        Self { scale, cap: None }
    }
}

/// Rotary tables: `cos` and `sin` are `[positions, rotary_dim / 2]` float32, rotate-half convention; dims past
/// `2 * cols` of a head pass through unrotated.
pub struct Rotary<'a, E: Engine> {
    /// Cosines.
    pub cos: FloatView<'a, E>,
    /// Sines.
    pub sin: FloatView<'a, E>,
}

impl<E: Engine> Clone for Rotary<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E: Engine> Copy for Rotary<'_, E> {}

/// Which rows a packed causal attention sees: document `i` is rows `offsets[i]..offsets[i + 1]`; a query at
/// position `p` sees positions `max(0, p - window + 1)..=p` of its own document.
pub struct CausalMask<'a, E: Engine> {
    /// `[documents + 1]` row offsets, first 0.
    pub offsets: IndexView<'a, E>,
    /// Sliding window W: sees positions > p − W.
    pub window: Option<usize>,
    /// Longest document in rows.
    pub longest: usize,
}

/// Which rows a DFlash attention sees (arXiv 2602.06036): block `n` is query rows `n * block..(n + 1) * block`
/// at positions `anchor[n]..anchor[n] + block`. It sees context rows `context_start[n] + p` for
/// `p < anchor[n]`, and its own rows in both directions. With a window W it sees only positions > q − W and is
/// causal inside the block.
pub struct BlockMask<'a, E: Engine> {
    /// Rows of a block, B.
    pub block: usize,
    /// `[blocks]` first context row of the block's document.
    pub context_start: IndexView<'a, E>,
    /// `[blocks]` anchor position = number of visible context rows. Blocks of one document are adjacent and
    /// their anchors ascend.
    pub anchor: IndexView<'a, E>,
    /// Sliding window W.
    pub window: Option<usize>,
}

/// Keys and values of a DFlash layer: of the context `[context rows, kv * dim]` and of the blocks
/// `[blocks * B, kv * dim]`.
pub struct BlockKeys<'a, E: Engine> {
    /// Context keys, after norm and rotary.
    pub context_k: HalfView<'a, E>,
    /// Context values.
    pub context_v: HalfView<'a, E>,
    /// Block keys, after norm and rotary.
    pub block_k: HalfView<'a, E>,
    /// Block values.
    pub block_v: HalfView<'a, E>,
}

/// Gradients of [`BlockKeys`], overwritten.
pub struct BlockKeysGrad<'a, E: Engine> {
    /// Of the context keys.
    pub context_k: HalfMut<'a, E>,
    /// Of the context values.
    pub context_v: HalfMut<'a, E>,
    /// Of the block keys.
    pub block_k: HalfMut<'a, E>,
    /// Of the block values.
    pub block_v: HalfMut<'a, E>,
}

/// Which rows the attention of decoding sees. Query rows `rows[i]..rows[i + 1]` belong to sequence `i`, whose
/// keys and values are cache rows `cache_start[i]..cache_start[i] + cached[i]` plus its own new rows, which
/// already stand in the cache right behind. New row `a` sees new row `b` of its sequence where bit `b` of its
/// `ancestors` row is set (itself included): a chain sets all lower bits, a draft tree its ancestors.
pub struct CacheMask<'a> {
    /// `[sequences + 1]` offsets of query rows.
    pub rows: &'a [u32],
    /// `[sequences]` first cache row.
    pub cache_start: &'a [u32],
    /// `[sequences]` cached rows before the new ones.
    pub cached: &'a [u32],
    /// `[query rows, words]` bit masks over the sequence's new rows, 64 a word.
    pub ancestors: &'a [u64],
    /// Words a query row.
    pub words: usize,
    /// Sliding window W, by `positions`.
    pub window: Option<usize>,
    /// `[query rows]` positions.
    pub positions: &'a [u32],
}

/// How tokens are drawn from softmax(logits / temperature): the token with the largest logit / temperature +
/// g(key, id) is such a draw when the g are independent standard Gumbel variables (the Gumbel-max trick). g is
/// [`gumbel`] of the row's key, so that a key and the logits decide the token, whatever else is in the batch.
#[derive(Clone, Copy, Debug)]
pub struct Draws<'a> {
    /// Above 0.
    pub temperature: f32,
    /// Logits z are cap·tanh(z / cap), where a model caps them.
    pub cap: Option<f32>,
    /// One for each row.
    pub keys: &'a [u64],
}

/// The Gumbel variable of token `id` under `key`: output `id` of SplitMix64 seeded with the key, its upper half as
/// u in (0, 1), and −ln(−ln(1 − u)), which is precise where it is large.
pub fn gumbel(key: u64, id: u32) -> f32 {
    let mut z = key.wrapping_add((u64::from(id) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    let u = ((z >> 32) as f32 + 0.5) * 2.0f32.powi(-32);
    -(-(-u).ln_1p()).ln()
}

/// The supervised slots of a batch of blocks, compacted: only slots with weight reach the head. Row `i` is one
/// valid slot; the slots of block `n` are `block_begin[n]..block_begin[n + 1]`, in slot order.
pub struct Slots<'a, E: Engine> {
    /// `[slots]` row of the drafter's hidden state.
    pub row: IndexView<'a, E>,
    /// `[slots]` token to predict.
    pub label: IndexView<'a, E>,
    /// `[slots]` slot number k, 1..B.
    pub slot: IndexView<'a, E>,
    /// `[slots]` row of the teacher's final hidden state (position a + k − 1); unused without a teacher.
    pub teacher_row: IndexView<'a, E>,
    /// `[blocks + 1]` on the host, since chunks are cut between blocks.
    pub block_begin: &'a [u32],
}

/// Every option of the loss (the table of options in the training docs; D-PACE is arXiv 2605.18810, the
/// confidence term arXiv 2512.15745).
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossOptions {
    /// Slot weight exp(−(k−1)/γ); 0 turns it off.
    pub gamma: f32,
    /// σ: weight × ((1−σ) + σ·∏_{i<k} q_i).
    pub streak_alpha: f32,
    /// D-PACE α; off when absent.
    pub dpace_alpha: Option<f32>,
    /// (1−λ)·CE + λ·T²·KL(target ‖ drafter).
    pub use_soft_labels: bool,
    /// Temperature T of the soft labels.
    pub kl_temperature: f32,
    /// λ of the soft labels.
    pub kl_weight: f32,
    /// + λ · entropy of the drafter's distribution on slots it already gets right.
    pub cap_lambda: f32,
}

impl Default for LossOptions {
    fn default() -> Self {
        Self {
            gamma: 7.0,
            streak_alpha: 0.0,
            dpace_alpha: None,
            use_soft_labels: false,
            kl_temperature: 1.0,
            kl_weight: 0.5,
            cap_lambda: 0.0,
        }
    }
}

/// Inputs of [`Engine::head_loss`].
pub struct HeadLoss<'a, E: Engine> {
    /// `[blocks * B, H]` drafter hidden state after the final norm.
    pub hidden: HalfView<'a, E>,
    /// `[V, H]` frozen head.
    pub lm_head: HalfView<'a, E>,
    /// What is supervised.
    pub slots: Slots<'a, E>,
    /// `[context rows, H]` the target's hidden state after its final norm, with soft labels.
    pub teacher: Option<HalfView<'a, E>>,
    /// Options.
    pub options: &'a LossOptions,
}

/// Outputs of [`Engine::head_loss`].
pub struct HeadLossOut<'a, E: Engine> {
    /// `[blocks * B, H]` gradient of `loss_sum` by the hidden state, overwritten (rows that are no slot: 0).
    pub d_hidden: HalfMut<'a, E>,
    /// `[2]` `loss_sum`, `weight_sum`: added to.
    pub sums: FloatMut<'a, E>,
    /// `[slots]` 1 where the most likely token is the label (the lowest id wins a tie).
    pub correct: IndexMut<'a, E>,
}

/// One AdamW update (arXiv 1711.05101), `grad * grad_scale` being the clipped mean gradient.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Updates done so far, this one included, for the bias correction.
    pub count: u64,
    /// Multiplies the gradient: clip factor / weight sum.
    pub grad_scale: f32,
}

/// A device that runs the models. See the module's docs.
#[allow(
    clippy::too_many_arguments,
    reason = "a fused step reads and writes many matrices, each named in its doc"
)]
pub trait Engine: Sized + 'static {
    /// Storage of the compute type.
    type Half: Storage;
    /// Storage of float32.
    type Float: Storage;
    /// Storage of u32.
    type Index: Storage;
    /// A point in a queue that can be waited for.
    type Event: Send;

    /// Bytes of one element of the compute type: 4 or 2.
    const HALF_BYTES: usize;

    /// The device in words, for messages.
    fn name(&self) -> &str;

    /// The most bytes of its device's memory that tensors held at a time; none where the device is the host.
    ///
    /// # Errors
    /// When the driver refuses to say.
    fn peak_memory(&self) -> Result<Option<u64>, EngineError> {
        Ok(None)
    }

    // Memory.

    /// An uninitialised `[rows, cols]` matrix from the pool.
    fn half(&self, rows: usize, cols: usize) -> Result<Half<Self>, EngineError>;
    /// A zeroed `[rows, cols]` float32 buffer.
    fn float(&self, rows: usize, cols: usize) -> Result<Float<Self>, EngineError>;
    /// `[values.len() / cols, cols]` from float32 on the host, rounded to the compute type.
    fn upload_half(&self, values: &[f32], cols: usize) -> Result<Half<Self>, EngineError>;
    /// A float32 buffer from the host.
    fn upload_float(&self, values: &[f32], cols: usize) -> Result<Float<Self>, EngineError>;
    /// A `[1, len]` index buffer from the host.
    fn upload_index(&self, values: &[u32]) -> Result<Index<Self>, EngineError>;
    /// Overwrites a float32 view from the host (a checkpoint's masters).
    fn write_float(&self, dst: FloatMut<'_, Self>, values: &[f32]) -> Result<(), EngineError>;
    /// Overwrites a compute view from float32 on the host.
    fn write_half(&self, dst: HalfMut<'_, Self>, values: &[f32]) -> Result<(), EngineError>;
    /// Overwrites a compute view from the bytes of a file: `rows * cols` numbers, row by row.
    fn decode_half(
        &self,
        mut dst: HalfMut<'_, Self>,
        encoding: Encoding,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        const PIECE: usize = 1 << 20;
        let (rows, cols) = (dst.rows, dst.cols);
        let size = encoding.bytes();
        assert_eq!(
            bytes.len(),
            rows * cols * size,
            "bytes of a [{rows}, {cols}] matrix"
        );
        let per = (PIECE / cols.max(1)).max(1);
        let mut values = vec![0.0; per.min(rows) * cols];
        for begin in (0..rows).step_by(per) {
            let end = rows.min(begin + per);
            let values = &mut values[..(end - begin) * cols];
            encoding.decode(&bytes[begin * cols * size..end * cols * size], values);
            self.write_half(dst.reborrow().row_range(begin, end), values)?;
        }
        Ok(())
    }
    /// Waits and reads back as float32.
    fn download_half(&self, src: HalfView<'_, Self>) -> Result<Vec<f32>, EngineError>;
    /// Waits and reads back.
    fn download_float(&self, src: FloatView<'_, Self>) -> Result<Vec<f32>, EngineError>;
    /// Waits and reads back.
    fn download_index(&self, src: IndexView<'_, Self>) -> Result<Vec<u32>, EngineError>;
    /// Sets all elements to zero.
    fn zero_half(&self, dst: HalfMut<'_, Self>) -> Result<(), EngineError>;
    /// Sets all elements to zero.
    fn zero_float(&self, dst: FloatMut<'_, Self>) -> Result<(), EngineError>;
    /// `dst = src`, same shape, on the compute queue.
    fn copy_half(&self, src: HalfView<'_, Self>, dst: HalfMut<'_, Self>)
    -> Result<(), EngineError>;
    /// `dst = src` rounded to the compute type: masters to working weights.
    fn round(&self, src: FloatView<'_, Self>, dst: HalfMut<'_, Self>) -> Result<(), EngineError>;
    /// `dst = src` widened to float32.
    fn widen(&self, src: HalfView<'_, Self>, dst: FloatMut<'_, Self>) -> Result<(), EngineError>;
    /// `dst[i] = src[rows[i]]`.
    fn gather(
        &self,
        src: HalfView<'_, Self>,
        rows: IndexView<'_, Self>,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// `dst[rows[i]] = src[i]`, each row at most once; the other rows of `dst` stay.
    fn scatter(
        &self,
        src: HalfView<'_, Self>,
        rows: IndexView<'_, Self>,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError>;

    // Ring slots and queues.

    /// Makes host memory fit for asynchronous copies; a no-op on CPUs.
    ///
    /// # Safety
    /// `base..base + len` stays mapped while the engine lives.
    unsafe fn register_host(&self, base: *mut u8, len: usize) -> Result<(), EngineError>;
    /// Copies a contiguous matrix, in the compute type, to host memory on the copy-out queue.
    ///
    /// # Safety
    /// `dst` takes `rows * cols * HALF_BYTES` bytes that nobody else touches until the queue's next event is done.
    unsafe fn copy_out(&self, src: HalfView<'_, Self>, dst: *mut u8) -> Result<(), EngineError>;
    /// Copies host memory in the compute type into a contiguous matrix on the copy-in queue.
    ///
    /// # Safety
    /// `src` holds `rows * cols * HALF_BYTES` bytes that nobody writes until the queue's next event is done.
    unsafe fn copy_in(&self, src: *const u8, dst: HalfMut<'_, Self>) -> Result<(), EngineError>;
    /// Marks the end of what is enqueued on `queue` now.
    fn record(&self, queue: Queue) -> Result<Self::Event, EngineError>;
    /// Makes `queue` wait for `event`, without waiting on the host.
    fn wait(&self, queue: Queue, event: &Self::Event) -> Result<(), EngineError>;
    /// Whether `event` was reached.
    fn is_done(&self, event: &Self::Event) -> Result<bool, EngineError>;
    /// Waits on the host until `event` was reached.
    fn finish(&self, event: &Self::Event, deadline: Duration) -> Result<(), EngineError>;

    // Linear layers. Weights are `[out, in]` as checkpoints hold them.

    /// `y = x wᵀ`, or `y += x wᵀ` with `accumulate`: `x [m, in]`, `w [out, in]`, `y [m, out]`.
    fn linear(
        &self,
        x: HalfView<'_, Self>,
        w: HalfView<'_, Self>,
        y: HalfMut<'_, Self>,
        accumulate: bool,
    ) -> Result<(), EngineError>;
    /// `dx = dy w` (or `+=`): `dy [m, out]`, `w [out, in]`, `dx [m, in]`.
    fn linear_dx(
        &self,
        dy: HalfView<'_, Self>,
        w: HalfView<'_, Self>,
        dx: HalfMut<'_, Self>,
        accumulate: bool,
    ) -> Result<(), EngineError>;
    /// `dw += dyᵀ x` in float32: `dy [m, out]`, `x [m, in]`, `dw [out, in]`.
    fn linear_dw(
        &self,
        dy: HalfView<'_, Self>,
        x: HalfView<'_, Self>,
        dw: FloatMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// `y[r] += bias`, `bias [1, cols]`.
    fn add_bias(&self, bias: FloatView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError>;

    // Norms, rotary, activation. Norm weights are float32 `[1, cols]`.

    /// `out[i] = table[ids[i]]`.
    fn embed(
        &self,
        table: HalfView<'_, Self>,
        ids: IndexView<'_, Self>,
        out: HalfMut<'_, Self>,
    ) -> Result<(), EngineError> {
        self.gather(table, ids, out)
    }
    /// RMSNorm with residual: `h += delta` if given, then `y = h / rms(h) * w`.
    fn norm(
        &self,
        h: HalfMut<'_, Self>,
        delta: Option<HalfView<'_, Self>>,
        w: FloatView<'_, Self>,
        eps: f32,
        y: HalfMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// Backward of [`Engine::norm`]: `x` is the `h` it normalised; `dx += …` (the residual's gradient is in it
    /// already), `dw += …`.
    fn norm_backward(
        &self,
        dy: HalfView<'_, Self>,
        x: HalfView<'_, Self>,
        w: FloatView<'_, Self>,
        eps: f32,
        dx: HalfMut<'_, Self>,
        dw: FloatMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// Per-head RMSNorm (if `w [1, dim]` is given), then rotary at `positions`: `x`, `y` `[rows, heads * dim]`.
    fn head_norm_rotary(
        &self,
        x: HalfView<'_, Self>,
        w: Option<FloatView<'_, Self>>,
        eps: f32,
        dim: usize,
        positions: IndexView<'_, Self>,
        rotary: Rotary<'_, Self>,
        y: HalfMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// Backward of [`Engine::head_norm_rotary`]: `dx` overwritten, `dw += …`; several calls may add to one `dw`.
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
    ) -> Result<(), EngineError>;
    /// `y = silu(gate) * up`, `gate_up [rows, 2 I]` with the gate first, `y [rows, I]`.
    fn swiglu(&self, gate_up: HalfView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError>;
    /// `y = gelu(gate) * up` with GELU's approximation by tanh (arXiv 1606.08415); shapes as for
    /// [`Engine::swiglu`].
    fn geglu(&self, gate_up: HalfView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError>;
    /// `x *= by`, `by` rounded to the compute type.
    fn scale(&self, by: f32, x: HalfMut<'_, Self>) -> Result<(), EngineError>;
    /// `y += x`, same shape.
    fn add(&self, x: HalfView<'_, Self>, y: HalfMut<'_, Self>) -> Result<(), EngineError>;
    /// `dst[rows[i]] += weights[i] * src[i]`: `src [m, cols]`, `weights [1, m]`; no row comes twice.
    fn scatter_add(
        &self,
        src: HalfView<'_, Self>,
        rows: IndexView<'_, Self>,
        weights: FloatView<'_, Self>,
        dst: HalfMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// Backward of [`Engine::swiglu`], `d_gate_up` overwritten.
    fn swiglu_backward(
        &self,
        dy: HalfView<'_, Self>,
        gate_up: HalfView<'_, Self>,
        d_gate_up: HalfMut<'_, Self>,
    ) -> Result<(), EngineError>;

    // Attention. A number for `scores` or `scale` multiplies q·k; softmax over an empty set gives zeros.

    /// Packed causal attention: `q`, `out` `[rows, q * dim]`, `k`, `v` `[rows, kv * dim]`.
    fn causal_attention(
        &self,
        heads: Heads,
        scores: impl Into<Scores>,
        q: HalfView<'_, Self>,
        k: HalfView<'_, Self>,
        v: HalfView<'_, Self>,
        mask: &CausalMask<'_, Self>,
        out: HalfMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// DFlash attention; `lse [rows, q heads]` receives the log-sum-exp of the scaled
    /// scores.
    fn block_attention(
        &self,
        heads: Heads,
        scale: f32,
        q: HalfView<'_, Self>,
        keys: &BlockKeys<'_, Self>,
        mask: &BlockMask<'_, Self>,
        out: HalfMut<'_, Self>,
        lse: FloatMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// Backward of [`Engine::block_attention`]; all gradients overwritten.
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
    ) -> Result<(), EngineError>;
    /// A few new query rows against a cache of keys and values `[cache rows, kv * dim]`.
    fn cache_attention(
        &self,
        heads: Heads,
        scores: impl Into<Scores>,
        q: HalfView<'_, Self>,
        k_cache: HalfView<'_, Self>,
        v_cache: HalfView<'_, Self>,
        mask: &CacheMask<'_>,
        out: HalfMut<'_, Self>,
    ) -> Result<(), EngineError>;

    // Head, loss, optimizer.

    /// Head, loss and gradient of the hidden state in chunks of whole blocks; logits are never held whole.
    fn head_loss(
        &self,
        input: &HeadLoss<'_, Self>,
        out: HeadLossOut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// Logits of a few rows: `hidden [m, H]`, `lm_head [V, H]`, `logits [m, V]` float32.
    fn logits(
        &self,
        hidden: HalfView<'_, Self>,
        lm_head: HalfView<'_, Self>,
        logits: FloatMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// The `k` most likely tokens of each row, in chunks: `ids`, `log_probs` `[m, k]`, best first, the lower id first in a tie.
    fn top_k(
        &self,
        hidden: HalfView<'_, Self>,
        lm_head: HalfView<'_, Self>,
        k: usize,
        ids: IndexMut<'_, Self>,
        log_probs: FloatMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// One token for each row of `hidden [m, H]`, in chunks: the most likely one, the lowest id in a tie, or one
    /// drawn by [`Draws`]. `ids [1, m]`.
    fn choose(
        &self,
        hidden: HalfView<'_, Self>,
        lm_head: HalfView<'_, Self>,
        draws: Option<Draws<'_>>,
        ids: IndexMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// `out[0] = Σ x²` in a fixed order.
    fn sum_squares(
        &self,
        x: FloatView<'_, Self>,
        out: FloatMut<'_, Self>,
    ) -> Result<(), EngineError>;
    /// `master`, `m`, `v` updated from `grad`, and `weight = round(master)` where a working copy exists.
    fn adamw(
        &self,
        update: &AdamW,
        grad: FloatView<'_, Self>,
        master: FloatMut<'_, Self>,
        m: FloatMut<'_, Self>,
        v: FloatMut<'_, Self>,
        weight: Option<HalfMut<'_, Self>>,
    ) -> Result<(), EngineError>;
    /// Whether any element is NaN or infinite (hidden states before they are published); waits.
    fn has_non_finite(&self, x: HalfView<'_, Self>) -> Result<bool, EngineError>;
}
