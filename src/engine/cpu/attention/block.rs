//! DFlash attention (arXiv 2602.06036): blocks see the context before their anchor, and themselves.

use super::{Rows, RowsMut, Shape, inverse, scores};
use crate::engine::cpu::product::{Mat, MatMut, product};
use crate::engine::cpu::vector::{axpy, dot, exp_sum, max, wide};
use crate::engine::cpu::{Cpu, index};
use crate::engine::{BlockKeys, BlockMask};

/// Query rows of a tile: as many whole blocks of one document as fit.
const TILE: usize = 64;

/// Keys and values; see [`BlockKeys`].
pub(in crate::engine::cpu) struct Keys<'a> {
    pub(super) context_k: Rows<'a>,
    pub(super) context_v: Rows<'a>,
    pub(super) block_k: Rows<'a>,
    pub(super) block_v: Rows<'a>,
}

impl<'a> Keys<'a> {
    pub(in crate::engine::cpu) fn new(keys: &BlockKeys<'a, Cpu>) -> Self {
        Self {
            context_k: Rows::new(keys.context_k),
            context_v: Rows::new(keys.context_v),
            block_k: Rows::new(keys.block_k),
            block_v: Rows::new(keys.block_v),
        }
    }

    pub(super) fn check(&self, shape: Shape, q: Rows<'_>, blocks: &Blocks<'_>) {
        shape.check(q, self.context_k, self.context_v);
        shape.check(q, self.block_k, self.block_v);
        let rows = blocks.anchor.len() * blocks.size;
        assert_eq!(
            (q.rows, self.block_k.rows),
            (rows, rows),
            "rows of the blocks"
        );
        for (&start, &anchor) in blocks.context_start.iter().zip(blocks.anchor) {
            assert!(
                (start + anchor) as usize <= self.context_k.rows,
                "context rows {start}..{start}+{anchor} of {}",
                self.context_k.rows
            );
        }
    }
}

/// Where the blocks are; see [`BlockMask`].
pub(in crate::engine::cpu) struct Blocks<'a> {
    pub(super) size: usize,
    pub(super) context_start: &'a [u32],
    pub(super) anchor: &'a [u32],
    pub(super) window: Option<usize>,
}

/// A run of blocks of one document, and the context rows that any of them sees.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Its blocks.
    pub begin: usize,
    pub end: usize,
    /// First row of the document's context.
    pub document: usize,
    /// Positions of the visible context.
    pub first_key: usize,
    pub end_key: usize,
}

impl<'a> Blocks<'a> {
    pub(in crate::engine::cpu) fn new(mask: &BlockMask<'a, Cpu>) -> Self {
        let blocks = Self {
            size: mask.block,
            context_start: index(mask.context_start),
            anchor: index(mask.anchor),
            window: mask.window,
        };
        assert_eq!(
            blocks.context_start.len(),
            blocks.anchor.len(),
            "lengths of the blocks"
        );
        blocks
    }

    /// Runs of blocks with one context.
    pub(super) fn documents(&self) -> Vec<std::ops::Range<usize>> {
        let mut begin = 0;
        self.context_start
            .chunk_by(|a, b| a == b)
            .map(|run| {
                let range = begin..begin + run.len();
                begin = range.end;
                range
            })
            .collect()
    }

    /// Tiles of one document's blocks.
    pub(super) fn tiles(&self, document: std::ops::Range<usize>) -> impl Iterator<Item = Tile> {
        let per = (TILE / self.size).max(1);
        document.clone().step_by(per).map(move |begin| {
            let end = document.end.min(begin + per);
            let anchors = &self.anchor[begin..end];
            let lowest = anchors.iter().min().map_or(0, |&a| a as usize);
            let end_key = anchors.iter().max().map_or(0, |&a| a as usize);
            Tile {
                begin,
                end,
                document: self.context_start[begin] as usize,
                first_key: self.context_from(lowest).min(end_key),
                end_key,
            }
        })
    }

    /// The first context position that a query at `position` may see.
    pub(super) fn context_from(&self, position: usize) -> usize {
        self.window.map_or(0, |w| (position + 1).saturating_sub(w))
    }

    /// The slots that slot `i` sees.
    #[inline(always)]
    pub(super) fn own(&self, i: usize) -> std::ops::Range<usize> {
        match self.window {
            Some(w) => (i + 1).saturating_sub(w)..i + 1,
            None => 0..self.size,
        }
    }
}

impl Tile {
    /// Query rows.
    pub(super) fn rows(&self, blocks: &Blocks<'_>) -> usize {
        (self.end - self.begin) * blocks.size
    }

    /// Context keys.
    pub(super) fn keys(&self) -> usize {
        self.end_key - self.first_key
    }

    /// The visible part of row `r`'s context scores: first and end column.
    #[inline(always)]
    pub(super) fn visible(&self, blocks: &Blocks<'_>, r: usize) -> std::ops::Range<usize> {
        let anchor = blocks.anchor[self.begin + r / blocks.size] as usize;
        let from = blocks
            .context_from(anchor + r % blocks.size)
            .clamp(self.first_key, anchor.max(self.first_key));
        from - self.first_key..anchor.max(from) - self.first_key
    }
}

/// Scores of row `r` of a tile against its own block, for the slots it sees.
#[inline(always)]
pub(super) fn own_products(
    a: &[f32],
    b: Rows<'_>,
    (block_row, head, dim): (usize, usize, usize),
    own: std::ops::Range<usize>,
    out: &mut [f32],
) {
    for j in own {
        out[j] = dot(a, b.head_row(block_row + j, head, dim));
    }
}

pub(in crate::engine::cpu) fn block_forward(
    cpu: &Cpu,
    shape: Shape,
    q: Rows<'_>,
    keys: &Keys<'_>,
    blocks: &Blocks<'_>,
    out: RowsMut<'_>,
    lse: RowsMut<'_>,
) {
    keys.check(shape, q, blocks);
    assert_eq!(
        (out.rows, out.cols),
        (q.rows, q.cols),
        "shape of the output"
    );
    assert_eq!(
        (lse.rows, lse.cols),
        (q.rows, shape.heads.q),
        "shape of the log-sum-exps"
    );
    let (mut out, mut lse) = (out, lse);
    let mut tasks = Vec::new();
    let mut work = 0;
    for document in blocks.documents() {
        for tile in blocks.tiles(document) {
            let rows = tile.rows(blocks);
            work += rows * (tile.keys() + blocks.size) * shape.heads.q;
            tasks.push((tile, out.take_rows(rows), lse.take_rows(rows)));
        }
    }
    cpu.for_each(work * 2, tasks.into_iter(), |(tile, out, lse)| {
        attend(cpu, shape, q, keys, blocks, (tile, out, lse));
    });
}

fn attend(
    cpu: &Cpu,
    shape: Shape,
    q: Rows<'_>,
    keys: &Keys<'_>,
    blocks: &Blocks<'_>,
    (tile, mut out, mut lse): (Tile, RowsMut<'_>, RowsMut<'_>),
) {
    let dim = shape.heads.dim;
    let size = blocks.size;
    let rows = tile.rows(blocks);
    let first_row = tile.begin * size;
    let context = tile.keys();
    // Each row holds its context scores, then those of its own block.
    let width = context + size;
    let mut buffer = cpu.scratch(rows * width);
    let s = &mut buffer.as_mut_slice()[..rows * width];
    for head in 0..shape.heads.q {
        let kv = shape.kv(head);
        let context_k = keys
            .context_k
            .head(tile.document + tile.first_key, context, kv, dim);
        scores(
            q.head(first_row, rows, head, dim),
            context_k,
            MatMut::new(s, rows, context, width),
        );
        wide(
            #[inline(always)]
            || {
                for (r, s) in s.chunks_exact_mut(width).enumerate() {
                    let (ctx, own) = s.split_at_mut(context);
                    let slots = blocks.own(r % size);
                    let block_row = first_row + r / size * size;
                    let query = q.head_row(first_row + r, head, dim);
                    own_products(
                        query,
                        keys.block_k,
                        (block_row, kv, dim),
                        slots.clone(),
                        own,
                    );
                    let seen = tile.visible(blocks, r);
                    ctx[..seen.start].fill(0.0);
                    ctx[seen.end..].fill(0.0);
                    own[..slots.start].fill(0.0);
                    own[slots.end..].fill(0.0);
                    let (ctx, own) = (&mut ctx[seen], &mut own[slots]);
                    let largest = max(ctx).max(max(own));
                    let total =
                        exp_sum(ctx, largest, shape.scale) + exp_sum(own, largest, shape.scale);
                    lse.row_mut(r)[head] = largest * shape.scale + total.ln();
                    let inverse = inverse(total);
                    for p in ctx.iter_mut().chain(own) {
                        *p *= inverse;
                    }
                }
            },
        );
        product(
            Mat::new(s, rows, context, width),
            keys.context_v
                .head(tile.document + tile.first_key, context, kv, dim),
            out.head(0, rows, head, dim),
            false,
        );
        wide(
            #[inline(always)]
            || {
                for (r, s) in s.chunks_exact(width).enumerate() {
                    let block_row = first_row + r / size * size;
                    let out = out.head_row(r, head, dim);
                    for j in blocks.own(r % size) {
                        axpy(
                            s[context + j],
                            keys.block_v.head_row(block_row + j, kv, dim),
                            out,
                        );
                    }
                }
            },
        );
    }
}
