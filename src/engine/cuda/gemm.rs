//! Matrix products through cuBLASLt. For each shape the library proposes up to eight algorithms; large shapes
//! time them in rotation on a busy chip and keep the fastest, in memory and on disk.
//!
//! cuBLASLt counts columns first, so a row-major `[rows, cols]` matrix is its `cols × rows` matrix, and each
//! product below is written as the transposed one: `yᵀ = (w) xᵀ`.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::sys as driver;

use super::super::EngineError;
use super::device::Device;
use super::kernels::{Kernels, Launch, Program, args, cache_folder, defines, write_whole};
use super::libraries::{self, Library};
use super::memory::{Buffer, Raw};

/// Scratch memory of one product: what Hopper's split algorithms ask for.
const WORKSPACE: usize = 64 << 20;
/// Products below this many operations take the library's first choice: timing them is noise.
const WORTH_TIMING: f64 = 2e9;
/// First choices that are kept; token counts vary, and a run is long.
const FIRST_CHOICES: usize = 8192;
/// How many of the library's proposals are timed.
const PROPOSALS: usize = 8;
/// Operations between two looks at the clock, so that short products are not lost in its noise.
const TIMED_WORK: f64 = 2e11;
/// Timed rounds over all proposals, after one to warm up.
const ROUNDS: usize = 5;

/// What a kept choice was made among; another text makes all choices anew.
const CHOICE: &str = "parts summed in float32";

/// Used where cuBLASLt has no algorithm, as for odd row strides.
const PLAIN: Program = Program {
    file: "gemm_plain.cu",
    text: include_str!("kernels/gemm_plain.cu"),
    defines: defines([]),
};

/// Which product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Product {
    /// `y = x wᵀ`.
    Forward,
    /// `dx = dy w`.
    InputGradient,
    /// `dw = dyᵀ x`.
    WeightGradient,
}

/// `c (+)= a · b` in cuBLASLt's terms: `first` is its A, `second` its B.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gemm {
    pub(super) product: Product,
    /// cuBLASLt's A: weights, or the inputs of a weight gradient.
    pub(super) first: Raw,
    /// cuBLASLt's B: activations or their gradients.
    pub(super) second: Raw,
    /// The result.
    pub(super) out: Raw,
    /// Whether the result is float32 rather than bf16.
    pub(super) float: bool,
    /// Whether to add to what is there.
    pub(super) accumulate: bool,
}

impl Gemm {
    /// Columns of the result, rows of the result, summed length.
    fn sizes(&self) -> [usize; 3] {
        let summed = match self.product {
            Product::Forward => self.first.cols,
            Product::InputGradient | Product::WeightGradient => self.first.rows,
        };
        [self.out.cols, self.out.rows, summed]
    }

    /// Whether cuBLASLt's A and B are transposed.
    fn transposed(&self) -> [bool; 2] {
        match self.product {
            Product::Forward => [true, false],
            Product::InputGradient => [false, false],
            Product::WeightGradient => [false, true],
        }
    }

    /// Panics unless the shapes fit together.
    fn check_shapes(&self) {
        let (a, b, c) = (self.first, self.second, self.out);
        let fits = match self.product {
            Product::Forward => a.cols == b.cols && c.rows == b.rows && c.cols == a.rows,
            Product::InputGradient => a.rows == b.cols && c.rows == b.rows && c.cols == a.cols,
            Product::WeightGradient => a.rows == b.rows && c.rows == b.cols && c.cols == a.cols,
        };
        assert!(fits, "{:?} of {a:?} and {b:?} to {c:?}", self.product);
    }

    /// The largest power of two up to 256 that divides the addresses and row lengths in bytes, per matrix.
    fn alignments(&self) -> [u32; 3] {
        let of = |m: Raw, size: usize| {
            let pitch = if m.rows > 1 { m.stride * size } else { 0 };
            let bits = m.ptr | pitch as u64 | 256;
            1u32 << bits.trailing_zeros()
        };
        [
            of(self.first, 2),
            of(self.second, 2),
            of(self.out, if self.float { 4 } else { 2 }),
        ]
    }

    fn operations(&self) -> f64 {
        let [n, m, k] = self.sizes();
        2.0 * n as f64 * m as f64 * k as f64
    }
}

/// What shapes share a choice of algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    product: Product,
    sizes: [usize; 3],
    float: bool,
    accumulate: bool,
}

impl Key {
    /// Batches vary in tokens, so token counts are taken in steps of a quarter octave.
    fn of(gemm: &Gemm) -> Self {
        let mut sizes = gemm.sizes();
        let tokens = match gemm.product {
            Product::Forward | Product::InputGradient => &mut sizes[1],
            Product::WeightGradient => &mut sizes[2],
        };
        *tokens = round_up_quarter_octave(*tokens);
        Self {
            product: gemm.product,
            sizes,
            float: gemm.float,
            accumulate: gemm.accumulate,
        }
    }
}

/// All that the library's first choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Exact {
    key: Key,
    alignments: [u32; 3],
    strides: [usize; 3],
}

/// The next of 1, 1.25, 1.5, 1.75 times a power of two, in multiples of 64.
fn round_up_quarter_octave(n: usize) -> usize {
    if n <= 256 {
        return n.next_multiple_of(64).max(64);
    }
    let step = (n.next_power_of_two() / 2) / 4;
    n.next_multiple_of(step)
}

/// Products of one device.
#[derive(Debug)]
pub(super) struct Gemms {
    device: Arc<Device>,
    handle: sys::cublasLtHandle_t,
    workspace: Buffer<u32>,
    cache: Option<PathBuf>,
    chosen: Mutex<HashMap<Key, Option<sys::cublasLtMatmulAlgo_t>>>,
    first: Mutex<HashMap<Exact, Option<sys::cublasLtMatmulAlgo_t>>>,
}

// SAFETY: cuBLASLt handles may be used from any thread; the rest is behind a mutex or never changes.
unsafe impl Send for Gemms {}
// SAFETY: as above; products are enqueued in order on one stream, so the workspace is used by one at a time.
unsafe impl Sync for Gemms {}

/// Descriptors of one product, destroyed on drop.
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: created by us, destroyed once. Null ones were never created. A failure to free host memory
        // changes nothing for us.
        unsafe {
            for layout in self.layouts {
                if !layout.is_null() {
                    let _ = lt::destroy_matrix_layout(layout);
                }
            }
            if !self.operation.is_null() {
                let _ = lt::destroy_matmul_desc(self.operation);
            }
        }
    }
}

impl Gemms {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, EngineError> {
        libraries::require(&device.name, Library::CublasLt)?;
        device.bind()?;
        let handle =
            lt::create_handle().map_err(|e| device.error("opening cuBLASLt", e.to_string()))?;
        // SAFETY: takes no arguments.
        let version = unsafe { sys::cublasLtGetVersion() };
        let cache = cache_folder().map(|folder| {
            let device_name: String = device
                .name
                .split_once('(')
                .map_or(device.name.as_str(), |(_, name)| name)
                .chars()
                .filter(char::is_ascii_alphanumeric)
                .collect();
            folder.join(format!("gemm-{device_name}-{version}"))
        });
        Ok(Self {
            device: Arc::clone(device),
            handle,
            workspace: Buffer::new(device, WORKSPACE / 4, "workspace of matrix products")?,
            cache,
            chosen: Mutex::new(HashMap::new()),
            first: Mutex::new(HashMap::new()),
        })
    }

    /// Enqueues a product on the compute queue.
    pub(super) fn run(&self, kernels: &Kernels, gemm: &Gemm) -> Result<(), EngineError> {
        gemm.check_shapes();
        let [n, m, k] = gemm.sizes();
        if n == 0 || m == 0 {
            return Ok(());
        }
        if k == 0 {
            return if gemm.accumulate {
                Ok(())
            } else {
                self.plain(kernels, gemm)
            };
        }
        self.device.bind()?;
        let plan = self.plan(gemm)?;
        if let Some(algorithm) = self.choice(gemm, &plan)?
            && self.multiply(gemm, &plan, &algorithm, gemm.out.ptr).is_ok()
        {
            return Ok(());
        }
        // The choice belongs to a neighbouring shape and does not fit this one, or there is none.
        match self.first_proposal(gemm, &plan)? {
            Some(algorithm) => self
                .multiply(gemm, &plan, &algorithm, gemm.out.ptr)
                .map_err(|e| self.device.error("a matrix product", e.to_string())),
            None => self.plain(kernels, gemm),
        }
    }

    /// The library's first choice. It is kept, since asking takes longer than a small product does.
    fn first_proposal(
        &self,
        gemm: &Gemm,
        plan: &Plan,
    ) -> Result<Option<sys::cublasLtMatmulAlgo_t>, EngineError> {
        let exact = Exact {
            key: Key {
                sizes: gemm.sizes(),
                ..Key::of(gemm)
            },
            alignments: gemm.alignments(),
            strides: [gemm.first, gemm.second, gemm.out].map(|matrix| matrix.stride),
        };
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(algorithm) = first.get(&exact) {
            return Ok(*algorithm);
        }
        let proposals = self.proposals(gemm, plan, 1)?;
        let algorithm = proposals.first().map(|proposal| proposal.algo);
        if first.len() >= FIRST_CHOICES {
            first.clear();
        }
        first.insert(exact, algorithm);
        Ok(algorithm)
    }

    fn plan(&self, gemm: &Gemm) -> Result<Plan, EngineError> {
        let fail = |e: lt::CublasError| self.device.error("describing a product", e.to_string());
        let mut plan = Plan {
            operation: lt::create_matmul_desc(
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType::CUDA_R_32F,
            )
            .map_err(fail)?,
            layouts: [ptr::null_mut(); 3],
        };
        use sys::cublasLtMatmulDescAttributes_t as D;
        let which = [
            D::CUBLASLT_MATMUL_DESC_TRANSA,
            D::CUBLASLT_MATMUL_DESC_TRANSB,
        ];
        for (attribute, transposed) in which.into_iter().zip(gemm.transposed()) {
            let value = i32::from(transposed);
            // SAFETY: the descriptor is live; the attribute is a 32-bit number.
            unsafe {
                lt::set_matmul_desc_attribute(
                    plan.operation,
                    attribute,
                    (&raw const value).cast(),
                    4,
                )
            }
            .map_err(fail)?;
        }
        let out_type = if gemm.float {
            sys::cudaDataType::CUDA_R_32F
        } else {
            sys::cudaDataType::CUDA_R_16BF
        };
        let half = sys::cudaDataType::CUDA_R_16BF;
        let matrices = [
            (gemm.first, half),
            (gemm.second, half),
            (gemm.out, out_type),
        ];
        for (layout, (matrix, kind)) in plan.layouts.iter_mut().zip(matrices) {
            let pitch = matrix.stride.max(matrix.cols) as i64;
            *layout = lt::create_matrix_layout(kind, matrix.cols as u64, matrix.rows as u64, pitch)
                .map_err(fail)?;
        }
        Ok(plan)
    }

    /// Up to `count` algorithms, in the library's order of preference.
    fn proposals(
        &self,
        gemm: &Gemm,
        plan: &Plan,
        count: usize,
    ) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>, EngineError> {
        let fail = |e: lt::CublasError| self.device.error("choosing a product", e.to_string());
        let preference = lt::create_matmul_pref().map_err(fail)?;
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        let [a, b, c] = gemm.alignments();
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: the preference is live and `value` points to `size` bytes.
            unsafe { lt::set_matmul_pref_attribute(preference, attribute, value, size) }
        };
        let workspace = WORKSPACE as u64;
        // Parts of a sum that was split are added in float32, not in the result's type.
        let reduction =
            sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let mut found = Vec::with_capacity(count);
        let mut given = 0;
        let result = set(
            P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const workspace).cast(),
            8,
        )
        .and_then(|()| {
            for (attribute, value) in [
                (P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction),
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a),
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b),
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
            ] {
                set(attribute, (&raw const value).cast(), 4)?;
            }
            let [first, second, out] = plan.layouts;
            // SAFETY: all descriptors are live; the results' buffer holds `count` entries.
            let status = unsafe {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    plan.operation,
                    first,
                    second,
                    out,
                    out,
                    preference,
                    count as i32,
                    found.as_mut_ptr(),
                    &mut given,
                )
            };
            status.result()
        });
        // SAFETY: created above, destroyed once; a failure to free host memory changes nothing.
        let _ = unsafe { lt::destroy_matmul_pref(preference) };
        match result {
            Ok(()) => {}
            Err(lt::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => given = 0,
            Err(error) => return Err(fail(error)),
        }
        // SAFETY: the library wrote `given` entries, at most `count`.
        unsafe { found.set_len(given as usize) };
        found.retain(|p: &sys::cublasLtMatmulHeuristicResult_t| {
            p.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
        });
        Ok(found)
    }

    /// Enqueues the product with one algorithm, the result going to `out`.
    fn multiply(
        &self,
        gemm: &Gemm,
        plan: &Plan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        out: u64,
    ) -> Result<(), lt::CublasError> {
        let alpha = 1f32;
        let beta = if gemm.accumulate { 1f32 } else { 0f32 };
        let [first, second, result] = plan.layouts;
        // SAFETY: the views were checked against their storages; the workspace is used in stream order.
        unsafe {
            lt::matmul(
                self.handle,
                plan.operation,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                gemm.first.ptr as *const c_void,
                first,
                gemm.second.ptr as *const c_void,
                second,
                out as *const c_void,
                result,
                out as *mut c_void,
                result,
                algorithm,
                self.workspace.address() as *mut c_void,
                WORKSPACE,
                self.device.compute.cast(),
            )
        }
    }

    /// The measured algorithm for a large, well aligned product; none otherwise.
    fn choice(
        &self,
        gemm: &Gemm,
        plan: &Plan,
    ) -> Result<Option<sys::cublasLtMatmulAlgo_t>, EngineError> {
        if gemm.operations() < WORTH_TIMING || gemm.alignments().iter().any(|a| *a < 16) {
            return Ok(None);
        }
        let key = Key::of(gemm);
        let mut chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(choice) = chosen.get(&key) {
            return Ok(*choice);
        }
        let file = self.cache.as_ref().map(|folder| {
            let hash = blake3::hash(format!("{CHOICE} {key:?}").as_bytes()).to_hex();
            folder.join(format!("{}.json", &hash[..24]))
        });
        let kept: Option<Kept> = file
            .as_deref()
            .and_then(|f| serde_json::from_slice(&std::fs::read(f).ok()?).ok());
        let choice = match kept {
            Some(kept) => Some(sys::cublasLtMatmulAlgo_t {
                data: kept.algorithm,
            }),
            None => {
                let (choice, kept) = self.measure(gemm, plan, &key)?.unzip();
                if let (Some(file), Some(kept)) = (file, kept) {
                    let text = serde_json::to_vec(&kept).expect("numbers and text serialise");
                    // Not being able to keep it costs the next start a measurement, nothing else.
                    if let Err(error) = write_whole(&file, &text) {
                        tracing::debug!("product cache {}: {error}", file.display());
                    }
                }
                choice
            }
        };
        chosen.insert(key, choice);
        Ok(choice)
    }

    /// Times the proposals in rotation, on the real inputs: into the result, which is computed after this, or where
    /// that already holds something, into scratch memory.
    fn measure(
        &self,
        gemm: &Gemm,
        plan: &Plan,
        key: &Key,
    ) -> Result<Option<(sys::cublasLtMatmulAlgo_t, Kept)>, EngineError> {
        let proposals = self.proposals(gemm, plan, PROPOSALS)?;
        let Some(first) = proposals.first() else {
            return Ok(None);
        };
        let scratch = match gemm.accumulate {
            false => None,
            true => {
                let width = if gemm.float { 1 } else { 2 };
                let words = (gemm.out.rows * gemm.out.stride.max(gemm.out.cols)).div_ceil(width);
                let scratch: Buffer<u32> =
                    Buffer::new(&self.device, words, "timing matrix products")?;
                // SAFETY: the buffer holds the words.
                self.device.check("clearing", unsafe {
                    driver::cuMemsetD32Async(scratch.address(), 0, words, self.device.compute)
                })?;
                Some(scratch)
            }
        };
        let out = scratch.as_ref().map_or(gemm.out.ptr, Buffer::address);
        let timer = Timer::new(&self.device)?;
        let repeats = (TIMED_WORK / gemm.operations()).ceil().min(20.0) as usize;
        let mut times = vec![Vec::with_capacity(ROUNDS); proposals.len()];
        for round in 0..=ROUNDS {
            for (proposal, times) in proposals.iter().zip(&mut times) {
                timer.start()?;
                let done =
                    (0..repeats).try_for_each(|_| self.multiply(gemm, plan, &proposal.algo, out));
                let elapsed = timer.stop()?;
                if done.is_ok() && round > 0 {
                    times.push(elapsed / repeats as f32);
                }
            }
        }
        let medians: Vec<f32> = times
            .iter_mut()
            .map(|t| {
                t.sort_by(f32::total_cmp);
                t.get(t.len() / 2).copied().unwrap_or(f32::INFINITY)
            })
            .collect();
        // A lead below one percent is noise; the library's order decides then.
        let best = medians.iter().copied().fold(f32::INFINITY, f32::min);
        let pick = medians.iter().position(|t| *t <= best * 1.01).unwrap_or(0);
        let algorithm = proposals.get(pick).unwrap_or(first).algo;
        tracing::debug!("{key:?}: {medians:?} ms, choice {pick}");
        let kept = Kept {
            algorithm: algorithm.data,
            shape: format!("{key:?}"),
            milliseconds: medians.into_iter().map(|t| t.min(f32::MAX)).collect(),
        };
        Ok(Some((algorithm, kept)))
    }

    /// The product by our own kernel.
    fn plain(&self, kernels: &Kernels, gemm: &Gemm) -> Result<(), EngineError> {
        let [n, m, k] = gemm.sizes();
        let [a_transposed, b_transposed] = gemm.transposed();
        // Steps along (result column, summed index) of A and (result row, summed index) of B.
        let (a_col, a_sum) = if a_transposed {
            (gemm.first.stride, 1)
        } else {
            (1, gemm.first.stride)
        };
        let (b_row, b_sum) = if b_transposed {
            (1, gemm.second.stride)
        } else {
            (gemm.second.stride, 1)
        };
        let launch = Launch {
            grid: [n.div_ceil(16), m.div_ceil(16), 1],
            threads: 256,
            shared: 0,
        };
        let args = args![
            gemm.first.ptr,
            a_col,
            a_sum,
            gemm.second.ptr,
            b_row,
            b_sum,
            gemm.out.ptr,
            gemm.out.stride,
            m,
            n,
            k,
            u32::from(gemm.float),
            u32::from(gemm.accumulate),
        ];
        // SAFETY: the arguments are the kernel's; the views were checked against their storages.
        unsafe { kernels.launch(&PLAIN, "gemm_plain", launch, &args) }
    }
}

impl Drop for Gemms {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: created by us, destroyed once.
            let _ = unsafe { lt::destroy_handle(self.handle) };
        }
    }
}

/// A measured choice on disk.
#[derive(serde::Serialize, serde::Deserialize)]
struct Kept {
    /// cuBLASLt's opaque description.
    algorithm: [u64; 8],
    /// For people.
    shape: String,
    /// Of each proposal, for people.
    milliseconds: Vec<f32>,
}

/// Two events that take the time between them.
struct Timer<'a> {
    device: &'a Device,
    events: [driver::CUevent; 2],
}

impl<'a> Timer<'a> {
    fn new(device: &'a Device) -> Result<Self, EngineError> {
        let mut events = [ptr::null_mut(); 2];
        for event in &mut events {
            // SAFETY: valid out-pointer; the context is current.
            device.check("cuEventCreate", unsafe { driver::cuEventCreate(event, 0) })?;
        }
        Ok(Self { device, events })
    }

    fn start(&self) -> Result<(), EngineError> {
        // SAFETY: event and stream are live.
        self.device.check("cuEventRecord", unsafe {
            driver::cuEventRecord(self.events[0], self.device.compute)
        })
    }

    /// Milliseconds since `start`, once the queue gets here.
    fn stop(&self) -> Result<f32, EngineError> {
        let mut elapsed = 0.0;
        // SAFETY: events and stream are live.
        unsafe {
            self.device.check(
                "cuEventRecord",
                driver::cuEventRecord(self.events[1], self.device.compute),
            )?;
            loop {
                match driver::cuEventQuery(self.events[1]) {
                    driver::CUresult::CUDA_ERROR_NOT_READY => {
                        std::thread::sleep(Duration::from_micros(10));
                    }
                    result => {
                        self.device.check("timing matrix products", result)?;
                        break;
                    }
                }
            }
            self.device.check(
                "cuEventElapsedTime",
                driver::cuEventElapsedTime_v2(&mut elapsed, self.events[0], self.events[1]),
            )?;
        }
        Ok(elapsed)
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        for event in self.events {
            // SAFETY: created by us, destroyed once.
            unsafe { driver::cuEventDestroy_v2(event) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_counts_share_choices_in_quarter_octaves() {
        for (n, bucket) in [
            (1, 64),
            (65, 128),
            (257, 320),
            (512, 512),
            (513, 640),
            (8000, 8192),
            (16384, 16384),
            (16385, 20480),
        ] {
            assert_eq!(round_up_quarter_octave(n), bucket, "{n}");
        }
    }

    #[test]
    fn kernels_compile() {
        super::super::kernels::check_compiles(&PLAIN, "sm_80");
    }
}
