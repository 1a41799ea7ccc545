//! The head: loss and its gradient in chunks of whole blocks, and the most likely tokens.

use super::super::{
    Draws, EngineError, HalfView, HeadLoss, HeadLossOut, IndexView, Storage, Tensor,
};
use super::gemm::Product;
use super::kernels::{Launch, Program, args, defines};
use super::memory::{Buffer, Raw, raw, raw_mut};
use super::{Cuda, index};

/// Most bytes of logits at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 30;
/// Threads of a thread block and floats of a row's statistics, as the source says.
const THREADS: usize = 512;
const STATISTICS: usize = 8;

const WIDE: Program = Program {
    file: "head.cu",
    text: include_str!("kernels/head.cu"),
    defines: defines([("VECTOR", 8)]),
};
const NARROW: Program = Program {
    defines: defines([("VECTOR", 1)]),
    ..WIDE
};

/// A buffer as a contiguous matrix.
fn matrix<T: super::Element>(buffer: &Buffer<T>, rows: usize, cols: usize, stride: usize) -> Raw {
    assert!(rows * stride <= buffer.len());
    Raw {
        ptr: buffer.address(),
        rows,
        cols,
        stride,
    }
}

/// Cuts `blocks` into chunks of at most `most` rows, or one block where that has more; yields block ranges.
fn chunks(begin: &[u32], most: usize) -> Vec<(usize, usize)> {
    let mut cut = Vec::new();
    let blocks = begin.len().saturating_sub(1);
    let mut from = 0;
    while from < blocks {
        let mut to = from + 1;
        while to < blocks && (begin[to + 1] - begin[from]) as usize <= most {
            to += 1;
        }
        if begin[to] > begin[from] {
            cut.push((from, to));
        }
        from = to;
    }
    cut
}

impl Cuda {
    pub(super) fn head_loss_impl(
        &self,
        input: &HeadLoss<'_, Self>,
        out: HeadLossOut<'_, Self>,
    ) -> Result<(), EngineError> {
        let (hidden, lm_head) = (raw(&input.hidden), raw(&input.lm_head));
        let d_hidden = raw_mut(&out.d_hidden);
        let (sums, correct) = (raw_mut(&out.sums), raw_mut(&out.correct));
        let slots = &input.slots;
        let options = input.options;
        let count = slots.block_begin.last().map_or(0, |n| *n as usize);
        let part = |view: &IndexView<'_, Self>, what: &str| {
            let (ptr, len) = index(view);
            assert_eq!(len, count, "{what} of the slots");
            ptr
        };
        let rows = part(&slots.row, "rows");
        let labels = part(&slots.label, "labels");
        let numbers = part(&slots.slot, "numbers");
        assert_eq!(correct.len(), count, "flags of the slots");
        assert!(sums.len() >= 2 && sums.is_contiguous(), "sums of the loss");
        assert_eq!(lm_head.cols, hidden.cols, "the head's hidden size");
        assert_eq!(
            (d_hidden.rows, d_hidden.cols),
            (hidden.rows, hidden.cols),
            "gradient of the hidden state"
        );
        let teacher = options.use_soft_labels.then(|| {
            let teacher = input.teacher.as_ref().expect("soft labels need a teacher");
            let teacher = raw(teacher);
            assert_eq!(teacher.cols, hidden.cols, "the teacher's hidden size");
            (teacher, part(&slots.teacher_row, "teacher rows"))
        });

        self.zero(d_hidden, 2)?;
        let (vocab, width) = (lm_head.rows, hidden.cols);
        let stride = vocab.next_multiple_of(8);
        let program = if vocab.is_multiple_of(8) {
            WIDE
        } else {
            NARROW
        };
        let copies = if teacher.is_some() { 2 } else { 1 };
        let most = (CHUNK_BYTES / (stride * 4 * copies)).max(1);
        let cut = chunks(slots.block_begin, most);
        let longest = cut
            .iter()
            .map(|(from, to)| (slots.block_begin[*to] - slots.block_begin[*from]) as usize)
            .max();
        let Some(longest) = longest else {
            return Ok(());
        };

        let begin = self.upload_words(slots.block_begin)?;
        let logits = self.scratch(longest * stride, "logits")?;
        let teacher_logits = match teacher {
            Some(_) => Some(self.scratch(longest * stride, "logits")?),
            None => None,
        };
        let gathered: Buffer<half::bf16> =
            Buffer::new(&self.device, longest * width, "slots of a chunk")?;
        let statistics = self.scratch(longest * STATISTICS, "statistics of logits")?;
        let losses = self.scratch(longest * 2, "losses of slots")?;
        let inverse_t = 1.0 / options.kl_temperature;
        let soft = if options.use_soft_labels {
            options.kl_weight
        } else {
            0.0
        };

        for (from, to) in cut {
            let first = slots.block_begin[from] as usize;
            let n = slots.block_begin[to] as usize - first;
            let at = |ptr: u64| ptr + 4 * first as u64;
            let x = matrix(&gathered, n, width, width);
            let z = matrix(&logits, n, vocab, stride);
            // The teacher goes first: its rows are not needed again, the drafter's are.
            let zt = match (&teacher_logits, teacher) {
                (Some(buffer), Some((teacher, teacher_rows))) => {
                    let zt = matrix(buffer, n, vocab, stride);
                    self.gather_rows(teacher, Some((at(teacher_rows), n)), x)?;
                    self.product(Product::Forward, [lm_head, x, zt], true, false)?;
                    zt.ptr
                }
                _ => 0,
            };
            self.gather_rows(hidden, Some((at(rows), n)), x)?;
            self.product(Product::Forward, [lm_head, x, z], true, false)?;

            let args = args![
                z.ptr,
                zt,
                stride,
                vocab,
                at(labels),
                inverse_t,
                statistics.address(),
                at(correct.ptr),
            ];
            let per_row = Launch::line(n, THREADS);
            // SAFETY: the arguments are the kernel's, here and below; all buffers hold `n` rows.
            unsafe { self.launch(&program, "row_statistics", per_row, &args)? };
            let args = args![
                begin.address() + 4 * from as u64,
                (to - from) as u32,
                first as u32,
                at(numbers),
                statistics.address(),
                options.gamma,
                options.streak_alpha,
                options.dpace_alpha.unwrap_or(-1.0),
                soft,
                options.kl_temperature * options.kl_temperature,
                options.cap_lambda,
                losses.address(),
            ];
            let per_block = Launch::line((to - from).div_ceil(64), 64);
            // SAFETY: as above.
            unsafe { self.launch(&program, "slot_weights", per_block, &args)? };
            let args = args![losses.address(), n, sums.ptr];
            // SAFETY: as above.
            unsafe { self.launch(&program, "add_losses", Launch::line(1, 512), &args)? };
            let args = args![
                z.ptr,
                zt,
                stride,
                vocab,
                at(labels),
                inverse_t,
                soft,
                options.cap_lambda,
                statistics.address(),
            ];
            // SAFETY: as above.
            unsafe { self.launch(&program, "logit_gradient", per_row, &args)? };
            let dz = Raw {
                stride: 2 * stride,
                ..z
            };
            self.product(Product::InputGradient, [lm_head, dz, x], false, false)?;
            self.scatter_rows(x, at(rows), d_hidden)?;
        }
        Ok(())
    }

    /// A short list of words, from the host.
    fn upload_words(&self, words: &[u32]) -> Result<Buffer<u32>, EngineError> {
        let buffer: Buffer<u32> = Buffer::new(&self.device, words.len(), "an index buffer")?;
        let to = matrix(&buffer, 1, words.len(), words.len());
        self.staging.upload(words, |v| v, to)?;
        Ok(buffer)
    }

    pub(super) fn top_k_impl(
        &self,
        hidden: HalfView<'_, Self>,
        lm_head: HalfView<'_, Self>,
        k: usize,
        ids: Raw,
        log_probs: Raw,
    ) -> Result<(), EngineError> {
        let (rows, vocab) = (hidden.rows, lm_head.rows);
        assert!(k <= vocab, "the {k} most likely of {vocab} tokens");
        for m in [ids, log_probs] {
            assert_eq!(
                (m.rows, m.cols),
                (rows, k),
                "shape of the most likely tokens"
            );
        }
        let most = (CHUNK_BYTES / (vocab * 4)).clamp(1, rows.max(1));
        let logits: Buffer<f32> = Buffer::new(&self.device, most * vocab, "logits")?;
        let mut logits = Tensor::new(logits, most, vocab);
        for from in (0..rows).step_by(most) {
            let n = most.min(rows - from);
            let z = raw_mut(&logits.view_mut().row_range(0, n));
            let x = raw(&hidden.row_range(from, from + n));
            self.product(Product::Forward, [raw(&lm_head), x, z], true, false)?;
            let args = args![
                z.ptr,
                vocab,
                k as u32,
                ids.ptr + (from * ids.stride * 4) as u64,
                ids.stride,
                log_probs.ptr + (from * log_probs.stride * 4) as u64,
                log_probs.stride,
            ];
            let launch = Launch::line(n, THREADS);
            // SAFETY: the arguments are the kernel's; views were checked against their storages.
            unsafe { self.launch(&WIDE, "top_tokens", launch, &args)? };
        }
        Ok(())
    }

    pub(super) fn choose_impl(
        &self,
        hidden: HalfView<'_, Self>,
        lm_head: HalfView<'_, Self>,
        draws: Option<Draws<'_>>,
        ids: Raw,
    ) -> Result<(), EngineError> {
        let (rows, vocab) = (hidden.rows, lm_head.rows);
        assert_eq!((ids.rows, ids.cols), (1, rows), "one token for each row");
        if rows == 0 {
            return Ok(());
        }
        let inverse_t = draws.map_or(1.0, |draws| 1.0 / draws.temperature);
        let cap = draws.and_then(|draws| draws.cap).unwrap_or(0.0);
        let keys = match draws {
            None => None,
            Some(Draws {
                temperature, keys, ..
            }) => {
                assert!(temperature > 0.0, "draws at temperature 0");
                assert_eq!(keys.len(), rows, "one key for each row");
                let halves = keys.iter().flat_map(|&k| [k as u32, (k >> 32) as u32]);
                Some(self.upload_words(&halves.collect::<Vec<_>>())?)
            }
        };
        let most = (CHUNK_BYTES / (vocab * 4)).clamp(1, rows);
        let logits: Buffer<f32> = Buffer::new(&self.device, most * vocab, "logits")?;
        let mut logits = Tensor::new(logits, most, vocab);
        for from in (0..rows).step_by(most) {
            let n = most.min(rows - from);
            let z = raw_mut(&logits.view_mut().row_range(0, n));
            let x = raw(&hidden.row_range(from, from + n));
            self.product(Product::Forward, [raw(&lm_head), x, z], true, false)?;
            let keys = keys
                .as_ref()
                .map_or(0, |keys| keys.address() + 8 * from as u64);
            let to = ids.ptr + 4 * from as u64;
            let args = args![z.ptr, vocab, cap, inverse_t, keys, to];
            let launch = Launch::line(n, THREADS);
            // SAFETY: the arguments are the kernel's; views were checked against their storages.
            unsafe { self.launch(&WIDE, "choose_token", launch, &args)? };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_whole_blocks_and_skip_empty_ones() {
        let begin = [0, 3, 3, 6, 16, 16];
        // A block larger than a chunk stands alone.
        assert_eq!(chunks(&begin, 6), [(0, 3), (3, 4)]);
        assert_eq!(chunks(&begin, 1), [(0, 1), (2, 3), (3, 4)]);
        assert_eq!(chunks(&begin, 100), [(0, 5)]);
        assert_eq!(chunks(&[0, 0, 0], 4), []);
        assert_eq!(chunks(&[], 4), []);
    }

    #[test]
    fn kernels_compile() {
        for program in [&WIDE, &NARROW] {
            super::super::kernels::check_compiles(program, "sm_80");
        }
    }
}
