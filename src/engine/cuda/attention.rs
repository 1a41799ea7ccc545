//! Attention: tensor-core kernels for the usual head sizes, a plain kernel for every other up to 256.

use super::super::{BlockKeys, BlockMask, CacheMask, CausalMask, EngineError, Heads, Scores};
use super::kernels::{Arg, Launch, Program, args, defines};
use super::memory::{Buffer, Raw, raw};
use super::{Cuda, index};

const PLAIN: Program = Program {
    file: "attention_plain.cu",
    text: include_str!("kernels/attention_plain.cu"),
    defines: defines([]),
};
/// Warps of a plain kernel's thread block, as the source says.
const PLAIN_WARPS: usize = 4;

const FLASH_FORWARD: &str = concat!(
    include_str!("kernels/flash.cu"),
    include_str!("kernels/flash_forward.cu")
);
const FLASH_BACKWARD: &str = concat!(
    include_str!("kernels/flash.cu"),
    include_str!("kernels/flash_backward.cu")
);

/// Room to begin the tiles at a multiple of 1024 bytes.
const ALIGNMENT: usize = 1024;

/// Tile sizes of a tensor-core forward kernel.
#[derive(Clone, Copy)]
struct Forward {
    dim: usize,
    warps: usize,
    /// 16-row tiles of queries of a warp.
    tiles: usize,
    /// Keys of a step.
    keys: usize,
    /// Whether products go through warpgroups.
    warpgroup: bool,
    /// Thread blocks of a multiprocessor.
    resident: usize,
}

impl Forward {
    /// For a head size.
    fn new(dim: usize, has_warpgroups: bool) -> Option<Self> {
        let warpgroup = has_warpgroups && dim <= 128;
        let (warps, tiles, keys, resident) = match dim {
            64 | 128 if warpgroup => (12, 1, 64, 1),
            64 | 128 => (4, 2, 64, 1),
            256 => (8, 1, 32, 1),
            _ => return None,
        };
        Some(Self {
            dim,
            warps,
            tiles,
            keys,
            warpgroup,
            resident,
        })
    }

    /// Tile rows of queries of a thread block.
    fn queries(&self) -> usize {
        self.warps * 16 * self.tiles
    }

    /// The kernel for packed causal or DFlash attention with `group` query heads a key head.
    fn program(&self, group: usize, blocks: bool) -> Program {
        Program {
            file: "flash_forward.cu",
            text: FLASH_FORWARD,
            defines: defines([
                ("DIM", self.dim as u32),
                ("GROUP", group as u32),
                ("WARPS", self.warps as u32),
                ("TILES", self.tiles as u32),
                ("KEYS", self.keys as u32),
                ("BLOCKS", u32::from(blocks)),
                ("WARPGROUP", u32::from(self.warpgroup)),
                ("RESIDENT", self.resident as u32),
            ]),
        }
    }
}

/// Tile sizes of the tensor-core backward kernels.
#[derive(Clone, Copy)]
struct Backward {
    dim: usize,
    warps: usize,
    /// Keys of a step of the queries' gradient.
    keys: usize,
    /// Tile rows of queries of a step of the keys' gradients.
    batch: usize,
    /// Whether products go through warpgroups.
    warpgroup: bool,
}

impl Backward {
    /// For a head size.
    fn new(dim: usize, warpgroup: bool) -> Option<Self> {
        let (warps, keys, batch) = match dim {
            64 | 128 if warpgroup => (8, 64, 64),
            64 => (4, 64, 64),
            128 => (4, 32, 32),
            _ => return None,
        };
        Some(Self {
            dim,
            warps,
            keys,
            batch,
            warpgroup,
        })
    }

    /// Both kernels, with `group` query heads a key head.
    fn program(&self, group: usize) -> Program {
        Program {
            file: "flash_backward.cu",
            text: FLASH_BACKWARD,
            defines: defines([
                ("DIM", self.dim as u32),
                ("GROUP", group as u32),
                ("WARPS", self.warps as u32),
                ("KEYS", self.keys as u32),
                ("BATCH", self.batch as u32),
                ("WARPGROUP", u32::from(self.warpgroup)),
            ]),
        }
    }
}

/// Whether the rows of all matrices can be copied 16 bytes at a time.
fn is_aligned(matrices: &[Raw]) -> bool {
    matrices
        .iter()
        .all(|m| m.ptr.is_multiple_of(16) && m.stride.is_multiple_of(8))
}

/// A window as the kernels take it: 0 for none.
fn window(window: Option<usize>) -> Arg {
    let window = window.map_or(0, |w| {
        assert!(w > 0, "a window sees at least itself");
        u32::try_from(w).unwrap_or(0)
    });
    window.into()
}

/// Pointer and stride of matrices, as the kernels take them.
fn strided(matrices: &[Raw]) -> impl Iterator<Item = Arg> + '_ {
    matrices
        .iter()
        .flat_map(|m| [Arg::from(m.ptr), Arg::from(m.stride)])
}

/// Panics unless queries and keys have `heads` heads each.
fn check_heads(heads: Heads, queries: &[Raw], keys: &[Raw]) {
    assert!(
        heads.kv > 0 && heads.q.is_multiple_of(heads.kv) && heads.dim <= 256,
        "{heads:?}"
    );
    for m in queries {
        assert_eq!((m.rows, m.cols), (queries[0].rows, heads.q * heads.dim));
    }
    for m in keys {
        assert_eq!((m.rows, m.cols), (keys[0].rows, heads.kv * heads.dim));
    }
}

/// The inputs of DFlash attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    heads: Heads,
    scale: f32,
    q: Raw,
    /// Keys and values of the context.
    context: [Raw; 2],
    /// Keys and values of the blocks.
    own: [Raw; 2],
    block: usize,
    context_start: u64,
    anchor: u64,
    window: Option<usize>,
}

/// The other matrices of its backward.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gradients {
    pub(super) d_out: Raw,
    pub(super) out: Raw,
    pub(super) lse: Raw,
    pub(super) d_q: Raw,
    pub(super) d_context: [Raw; 2],
    pub(super) d_block: [Raw; 2],
}

impl Blocks {
    /// Panics on shapes that do not fit.
    pub(super) fn new(
        heads: Heads,
        scale: f32,
        q: Raw,
        keys: &BlockKeys<'_, Cuda>,
        mask: &BlockMask<'_, Cuda>,
    ) -> Self {
        let context = [raw(&keys.context_k), raw(&keys.context_v)];
        let own = [raw(&keys.block_k), raw(&keys.block_v)];
        check_heads(heads, &[q], &context);
        check_heads(heads, &[q], &own);
        let (starts, anchors) = (index(&mask.context_start), index(&mask.anchor));
        assert!(mask.block > 0, "blocks of no rows");
        assert_eq!(
            [own[0].rows, starts.1 * mask.block, anchors.1 * mask.block],
            [q.rows; 3],
            "rows of the blocks"
        );
        Self {
            heads,
            scale,
            q,
            context,
            own,
            block: mask.block,
            context_start: starts.0,
            anchor: anchors.0,
            window: mask.window,
        }
    }

    fn group(&self) -> usize {
        self.heads.q / self.heads.kv
    }

    /// The mask's arguments, as all kernels end.
    fn mask_args(&self) -> [Arg; 4] {
        args![
            self.context_start,
            self.anchor,
            self.block as u32,
            window(self.window),
        ]
    }
}

impl Cuda {
    /// Packed causal attention of `[q, k, v, out]`.
    pub(super) fn causal(
        &self,
        heads: Heads,
        Scores { scale, cap }: Scores,
        [q, k, v, out]: [Raw; 4],
        mask: &CausalMask<'_, Self>,
    ) -> Result<(), EngineError> {
        check_heads(heads, &[q, out], &[k, v]);
        let (offsets, entries) = index(&mask.offsets);
        let documents = entries.saturating_sub(1);
        if q.rows == 0 || documents == 0 {
            return Ok(());
        }
        assert_eq!(k.rows, q.rows, "keys of the rows");
        let group = heads.q / heads.kv;
        if let Some(kernel) = Forward::new(heads.dim, self.device.has_warpgroups)
            && cap.is_none()
            && group <= kernel.queries()
            && is_aligned(&[q, k, v, out])
        {
            let none = Raw {
                ptr: 0,
                stride: 0,
                ..k
            };
            let mut args: Vec<Arg> = strided(&[q, k, v, none, none, out, none]).collect();
            args.extend(args![
                q.rows as u32,
                offsets,
                0u64,
                0u32,
                window(mask.window),
                scale,
            ]);
            let tiles = mask.longest.div_ceil(kernel.queries() / group);
            let program = kernel.program(group, false);
            return self.flash_forward(&kernel, &program, [tiles, heads.kv, documents], &args);
        }
        let mut args: Vec<Arg> = strided(&[q, k, v, out]).collect();
        args.extend(args![
            offsets,
            documents as u32,
            window(mask.window),
            group as u32,
            heads.dim as u32,
            scale,
            cap.unwrap_or(0.0),
        ]);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.plain("causal_plain", [q.rows, heads.q], &args) }
    }

    /// Starts a tensor-core forward kernel.
    fn flash_forward(
        &self,
        kernel: &Forward,
        program: &Program,
        grid: [usize; 3],
        args: &[Arg],
    ) -> Result<(), EngineError> {
        let launch = Launch {
            grid,
            threads: 32 * kernel.warps,
            shared: (kernel.queries() + 4 * kernel.keys) * kernel.dim * 2 + ALIGNMENT,
        };
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(program, "flash_forward", launch, args) }
    }

    /// Starts a plain kernel, one thread block for each of `rows` and `heads`.
    ///
    /// # Safety
    /// As for [`super::kernels::Kernels::launch`].
    unsafe fn plain(
        &self,
        name: &'static str,
        [rows, heads]: [usize; 2],
        args: &[Arg],
    ) -> Result<(), EngineError> {
        let launch = Launch {
            grid: [rows, heads, 1],
            threads: 32 * PLAIN_WARPS,
            shared: 0,
        };
        // SAFETY: passed on.
        unsafe { self.launch(&PLAIN, name, launch, args) }
    }

    /// DFlash attention.
    pub(super) fn block(&self, p: &Blocks, out: Raw, lse: Raw) -> Result<(), EngineError> {
        check_heads(p.heads, &[p.q, out], &p.context);
        assert_eq!((lse.rows, lse.cols), (p.q.rows, p.heads.q), "log-sum-exp");
        let matrices = [p.q, p.context[0], p.context[1], p.own[0], p.own[1], out];
        if let Some(kernel) = Forward::new(p.heads.dim, self.device.has_warpgroups)
            && p.group() <= kernel.queries()
            && is_aligned(&matrices)
        {
            let mut args: Vec<Arg> = strided(&matrices).chain(strided(&[lse])).collect();
            args.push((p.q.rows as u32).into());
            args.extend(p.mask_args());
            args.push(p.scale.into());
            let tiles = p.q.rows.div_ceil(kernel.queries() / p.group());
            let program = kernel.program(p.group(), true);
            return self.flash_forward(&kernel, &program, [tiles, p.heads.kv, 1], &args);
        }
        let mut args: Vec<Arg> = strided(&matrices).chain(strided(&[lse])).collect();
        args.extend(p.mask_args());
        args.extend(args![p.group() as u32, p.heads.dim as u32, p.scale]);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.plain("block_plain", [p.q.rows, p.heads.q], &args) }
    }

    /// Gradients of DFlash attention.
    pub(super) fn block_backward(&self, p: &Blocks, g: &Gradients) -> Result<(), EngineError> {
        let heads = p.heads;
        check_heads(heads, &[p.q, g.d_out, g.out, g.d_q], &p.context);
        check_heads(
            heads,
            &[p.q],
            &[p.context[0], g.d_context[0], g.d_context[1]],
        );
        check_heads(heads, &[p.q], &[p.own[0], g.d_block[0], g.d_block[1]]);
        assert_eq!((g.lse.rows, g.lse.cols), (p.q.rows, heads.q), "log-sum-exp");
        let delta = self.scratch(heads.q * p.q.rows, "attention's backward")?;
        let mut args: Vec<Arg> = strided(&[g.d_out, g.out]).collect();
        args.extend(args![
            delta.address(),
            p.q.rows,
            heads.q as u32,
            heads.dim as u32,
        ]);
        let blocks = (p.q.rows * heads.q).div_ceil(PLAIN_WARPS);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.plain("attention_deltas", [blocks, 1], &args)? };
        match Backward::new(heads.dim, self.device.has_warpgroups) {
            Some(kernel)
                if p.group() <= kernel.batch
                    && is_aligned(&[
                        p.q,
                        p.context[0],
                        p.context[1],
                        p.own[0],
                        p.own[1],
                        g.d_out,
                        g.d_q,
                    ])
                    && is_aligned(&g.d_context)
                    && is_aligned(&g.d_block) =>
            {
                self.flash_backward(&kernel, p, g, &delta)
            }
            _ => self.plain_backward(p, g, &delta),
        }
    }

    fn flash_backward(
        &self,
        kernel: &Backward,
        p: &Blocks,
        g: &Gradients,
        delta: &Buffer<f32>,
    ) -> Result<(), EngineError> {
        let (dim, threads) = (kernel.dim, 32 * kernel.warps);
        let program = kernel.program(p.group());
        let tile_rows = kernel.warps * 16;
        let inputs: Vec<Arg> = strided(&[
            g.d_out,
            p.q,
            p.context[0],
            p.context[1],
            p.own[0],
            p.own[1],
            g.lse,
        ])
        .chain([delta.address().into()])
        .collect();

        let mut args = inputs.clone();
        args.extend(strided(&[g.d_q]));
        args.push((p.q.rows as u32).into());
        args.extend(p.mask_args());
        args.push(p.scale.into());
        let launch = Launch {
            grid: [p.q.rows.div_ceil(tile_rows / p.group()), p.heads.kv, 1],
            threads,
            shared: (2 * tile_rows + 6 * kernel.keys) * dim * 2 + ALIGNMENT,
        };
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.launch(&program, "flash_dq", launch, &args)? };

        let context_rows = p.context[0].rows;
        let context_tiles = context_rows.div_ceil(tile_rows);
        let mut args = inputs;
        args.extend(strided(&g.d_context).chain(strided(&g.d_block)));
        args.extend(args![
            context_rows as u32,
            context_tiles as u32,
            p.q.rows as u32,
        ]);
        args.extend(p.mask_args());
        args.push(p.scale.into());
        let tiles = context_tiles + p.q.rows.div_ceil(tile_rows);
        let launch = Launch {
            grid: [tiles, p.heads.kv, 1],
            threads,
            shared: (2 * tile_rows + 4 * kernel.batch) * dim * 2 + ALIGNMENT,
        };
        // SAFETY: as above.
        unsafe { self.launch(&program, "flash_dkv", launch, &args) }
    }

    fn plain_backward(
        &self,
        p: &Blocks,
        g: &Gradients,
        delta: &Buffer<f32>,
    ) -> Result<(), EngineError> {
        let end = [
            p.mask_args().to_vec(),
            args![p.group() as u32, p.heads.dim as u32, p.scale].to_vec(),
        ]
        .concat();
        let delta: Arg = delta.address().into();
        let rows: Arg = p.q.rows.into();

        let mut args: Vec<Arg> = strided(&[g.d_out, p.q]).collect();
        args.extend(strided(&p.context).chain(strided(&p.own)));
        args.extend(strided(&[g.lse]).chain([delta]));
        args.extend(strided(&[g.d_q]).chain([rows]));
        args.extend(&end);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.plain("block_plain_dq", [p.q.rows, p.heads.q], &args)? };

        for (keys, gradients, is_own) in
            [(&p.context, &g.d_context, 0u32), (&p.own, &g.d_block, 1u32)]
        {
            let mut args: Vec<Arg> = strided(&[g.d_out, p.q]).collect();
            args.extend(strided(keys).chain(strided(&[g.lse])).chain([delta]));
            args.extend(strided(gradients).chain([rows]));
            args.extend(&end);
            args.push(is_own.into());
            // SAFETY: as above.
            unsafe { self.plain("block_plain_dkv", [keys[0].rows, p.heads.kv], &args)? };
        }
        Ok(())
    }

    /// A few new rows against a cache, `[q, k_cache, v_cache, out]`.
    pub(super) fn cached(
        &self,
        heads: Heads,
        Scores { scale, cap }: Scores,
        [q, k, v, out]: [Raw; 4],
        mask: &CacheMask<'_>,
    ) -> Result<(), EngineError> {
        check_heads(heads, &[q, out], &[k, v]);
        let sequences = mask.rows.len().saturating_sub(1);
        assert_eq!(mask.rows.last().copied().unwrap_or(0) as usize, q.rows);
        assert_eq!(
            [mask.cache_start.len(), mask.cached.len()],
            [sequences; 2],
            "sequences of the cache"
        );
        assert_eq!(mask.positions.len(), q.rows, "positions of the rows");
        assert_eq!(mask.ancestors.len(), q.rows * mask.words, "ancestor masks");
        for i in 0..sequences {
            let end = mask.cache_start[i] + mask.cached[i] + mask.rows[i + 1] - mask.rows[i];
            assert!(end as usize <= k.rows, "sequence {i} ends past the cache");
        }
        if q.rows == 0 {
            return Ok(());
        }
        // One upload for all of it; the masks come first, so that they lie at multiples of 8 bytes.
        let masks = mask
            .ancestors
            .iter()
            .flat_map(|word| [*word as u32, (*word >> 32) as u32]);
        let mut words: Vec<u32> = masks.collect();
        let mut place = |part: &[u32]| {
            let at = words.len();
            words.extend(part);
            at as u64 * 4
        };
        let rows = place(mask.rows);
        let cache_start = place(mask.cache_start);
        let cached = place(mask.cached);
        let positions = place(mask.positions);
        let buffer: Buffer<u32> = Buffer::new(&self.device, words.len(), "masks of decoding")?;
        let whole = Raw {
            ptr: buffer.address(),
            rows: 1,
            cols: words.len(),
            stride: words.len(),
        };
        self.staging.upload(&words, |v| v, whole)?;
        let base = buffer.address();
        let mut args: Vec<Arg> = strided(&[q, k, v, out]).collect();
        args.extend(args![
            base + rows,
            sequences as u32,
            base + cache_start,
            base + cached,
            base,
            mask.words as u32,
            window(mask.window),
            base + positions,
            (heads.q / heads.kv) as u32,
            heads.dim as u32,
            scale,
            cap.unwrap_or(0.0),
        ]);
        // SAFETY: the arguments are the kernel's; views were checked against their storages.
        unsafe { self.plain("cache_plain", [q.rows, heads.q], &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernels::check_compiles;
    use super::*;

    #[test]
    fn kernels_compile() {
        check_compiles(&PLAIN, "sm_80");
        // Groups of query heads that are powers of two and others; the Hopper kernels for all head sizes.
        for (arch, warpgroups, groups) in [("sm_80", false, &[4][..]), ("sm_90a", true, &[4, 5])] {
            for dim in [64, 128, 256] {
                for &group in groups {
                    let forward = Forward::new(dim, warpgroups).unwrap();
                    check_compiles(&forward.program(group, false), arch);
                    check_compiles(&forward.program(group, true), arch);
                    if let Some(backward) = Backward::new(dim, warpgroups) {
                        check_compiles(&backward.program(group), arch);
                    }
                }
            }
        }
    }
}
