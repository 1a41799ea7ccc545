//! Gradients of DFlash attention. Probabilities come back from the scores and the log-sum-exps.

use super::block::{Blocks, Keys, Tile, own_products};
use super::{Rows, RowsMut, Shape, scores};
use crate::engine::BlockKeysGrad;
use crate::engine::cpu::Cpu;
use crate::engine::cpu::product::{Mat, MatMut, product};
use crate::engine::cpu::vector::{axpy, dot, exp, wide};

/// Gradients of [`Keys`].
pub(in crate::engine::cpu) struct KeysGrad<'a> {
    context_k: RowsMut<'a>,
    context_v: RowsMut<'a>,
    block_k: RowsMut<'a>,
    block_v: RowsMut<'a>,
}

impl<'a> KeysGrad<'a> {
    pub(in crate::engine::cpu) fn new(grads: BlockKeysGrad<'a, Cpu>) -> Self {
        Self {
            context_k: RowsMut::new(grads.context_k),
            context_v: RowsMut::new(grads.context_v),
            block_k: RowsMut::new(grads.block_k),
            block_v: RowsMut::new(grads.block_v),
        }
    }

    fn check(&self, keys: &Keys<'_>) {
        for (grad, of) in [
            (&self.context_k, keys.context_k),
            (&self.context_v, keys.context_v),
            (&self.block_k, keys.block_k),
            (&self.block_v, keys.block_v),
        ] {
            assert_eq!(
                (grad.rows, grad.cols),
                (of.rows, of.cols),
                "shape of a key gradient"
            );
        }
    }
}

/// The output's gradient, and what the forward pass left.
pub(in crate::engine::cpu) struct Saved<'a> {
    pub d_out: Rows<'a>,
    pub q: Rows<'a>,
    pub out: Rows<'a>,
    pub lse: Rows<'a>,
}

/// The part of the gradients that one document owns.
struct Document<'a> {
    blocks: std::ops::Range<usize>,
    d_q: RowsMut<'a>,
    context_k: RowsMut<'a>,
    context_v: RowsMut<'a>,
    block_k: RowsMut<'a>,
    block_v: RowsMut<'a>,
}

pub(in crate::engine::cpu) fn block_backward(
    cpu: &Cpu,
    shape: Shape,
    saved: &Saved<'_>,
    keys: &Keys<'_>,
    blocks: &Blocks<'_>,
    d_q: RowsMut<'_>,
    grads: KeysGrad<'_>,
) {
    keys.check(shape, saved.q, blocks);
    grads.check(keys);
    for rows in [saved.d_out, saved.out, d_q.as_rows()] {
        assert_eq!(
            (rows.rows, rows.cols),
            (saved.q.rows, saved.q.cols),
            "shape of the queries"
        );
    }
    let work = saved.q.rows * shape.heads.q * keys.context_k.rows.max(shape.heads.dim);
    let tasks = documents(blocks, d_q, grads);
    cpu.for_each(work, tasks.into_iter(), |document| {
        differentiate(cpu, shape, saved, keys, blocks, document);
    });
}

/// Cuts the gradients by document; context rows that no document sees become zero.
fn documents<'a>(
    blocks: &Blocks<'_>,
    mut d_q: RowsMut<'a>,
    mut grads: KeysGrad<'a>,
) -> Vec<Document<'a>> {
    for grad in [&mut grads.context_k, &mut grads.context_v] {
        for r in 0..grad.rows {
            grad.row_mut(r).fill(0.0);
        }
    }
    let ranges = blocks.documents();
    // Contexts may lie in any order; cut them in the order of their rows.
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_by_key(|&i| blocks.context_start[ranges[i].start]);
    let mut contexts: Vec<Option<(RowsMut<'a>, RowsMut<'a>)>> =
        ranges.iter().map(|_| None).collect();
    let mut cut = 0;
    for i in order {
        let start = blocks.context_start[ranges[i].start] as usize;
        let seen = blocks.anchor[ranges[i].clone()]
            .iter()
            .max()
            .map_or(0, |&a| a as usize);
        assert!(start >= cut, "two runs of blocks share context rows");
        grads.context_k.take_rows(start - cut);
        grads.context_v.take_rows(start - cut);
        contexts[i] = Some((
            grads.context_k.take_rows(seen),
            grads.context_v.take_rows(seen),
        ));
        cut = start + seen;
    }
    ranges
        .into_iter()
        .zip(contexts)
        .filter_map(|(range, context)| {
            let (context_k, context_v) = context?;
            let rows = range.len() * blocks.size;
            Some(Document {
                blocks: range,
                d_q: d_q.take_rows(rows),
                context_k,
                context_v,
                block_k: grads.block_k.take_rows(rows),
                block_v: grads.block_v.take_rows(rows),
            })
        })
        .collect()
}

fn differentiate(
    cpu: &Cpu,
    shape: Shape,
    saved: &Saved<'_>,
    keys: &Keys<'_>,
    blocks: &Blocks<'_>,
    mut document: Document<'_>,
) {
    for grad in [&mut document.block_k, &mut document.block_v] {
        for r in 0..grad.rows {
            grad.row_mut(r).fill(0.0);
        }
    }
    let most = blocks
        .tiles(document.blocks.clone())
        .map(|tile| tile.rows(blocks) * (tile.keys() + blocks.size))
        .max();
    let mut p = cpu.scratch(most.unwrap_or(0));
    let mut ds = cpu.scratch(most.unwrap_or(0));
    for tile in blocks.tiles(document.blocks.clone()) {
        for head in 0..shape.heads.q {
            let run = TileOfHead {
                shape,
                saved,
                keys,
                blocks,
                tile,
                head,
            };
            run.probabilities(p.as_mut_slice(), ds.as_mut_slice());
            run.gradients(p.as_slice(), ds.as_slice(), &mut document);
        }
    }
}

/// One head of one tile.
struct TileOfHead<'a> {
    shape: Shape,
    saved: &'a Saved<'a>,
    keys: &'a Keys<'a>,
    blocks: &'a Blocks<'a>,
    tile: Tile,
    head: usize,
}

impl TileOfHead<'_> {
    fn first_row(&self) -> usize {
        self.tile.begin * self.blocks.size
    }

    /// Fills `p` with the probabilities and `ds` with the gradient by the unscaled scores: each row's context,
    /// then its own block; 0 where nothing is seen.
    fn probabilities(&self, p: &mut [f32], ds: &mut [f32]) {
        let Self {
            shape,
            saved,
            keys,
            blocks,
            tile,
            head,
        } = *self;
        let (dim, size, kv) = (shape.heads.dim, blocks.size, shape.kv(head));
        let (rows, context) = (tile.rows(blocks), tile.keys());
        let width = context + size;
        let first_key = tile.document + tile.first_key;
        let first_row = self.first_row();
        scores(
            saved.q.head(first_row, rows, head, dim),
            keys.context_k.head(first_key, context, kv, dim),
            MatMut::new(p, rows, context, width),
        );
        scores(
            saved.d_out.head(first_row, rows, head, dim),
            keys.context_v.head(first_key, context, kv, dim),
            MatMut::new(ds, rows, context, width),
        );
        wide(
            #[inline(always)]
            || {
                let rows = p
                    .chunks_exact_mut(width)
                    .zip(ds.chunks_exact_mut(width))
                    .take(rows);
                for (r, (p, ds)) in rows.enumerate() {
                    let (seen, slots) = (tile.visible(blocks, r), blocks.own(r % size));
                    let block_row = first_row + r / size * size;
                    let d_out = saved.d_out.head_row(first_row + r, head, dim);
                    let at = (block_row, kv, dim);
                    own_products(
                        saved.q.head_row(first_row + r, head, dim),
                        keys.block_k,
                        at,
                        slots.clone(),
                        &mut p[context..],
                    );
                    own_products(d_out, keys.block_v, at, slots.clone(), &mut ds[context..]);
                    let lse = saved.lse.row(first_row + r)[head];
                    let delta = dot(d_out, saved.out.head_row(first_row + r, head, dim));
                    let own = context + slots.start..context + slots.end;
                    for hidden in [
                        0..seen.start,
                        seen.end..context,
                        context..own.start,
                        own.end..width,
                    ] {
                        p[hidden.clone()].fill(0.0);
                        ds[hidden].fill(0.0);
                    }
                    for range in [seen, own] {
                        for (p, ds) in p[range.clone()].iter_mut().zip(&mut ds[range]) {
                            *p = exp(*p * shape.scale - lse);
                            *ds = *p * (*ds - delta) * shape.scale;
                        }
                    }
                }
            },
        );
    }

    /// Adds this head's and tile's part to the gradients.
    fn gradients(&self, p: &[f32], ds: &[f32], to: &mut Document<'_>) {
        let Self {
            shape,
            saved,
            keys,
            blocks,
            tile,
            head,
        } = *self;
        let (dim, size, kv) = (shape.heads.dim, blocks.size, shape.kv(head));
        let (rows, context) = (tile.rows(blocks), tile.keys());
        let width = context + size;
        let first_row = self.first_row();
        let row_in_document = first_row - to.blocks.start * size;
        let (p_context, ds_context) = (
            Mat::new(p, rows, context, width),
            Mat::new(ds, rows, context, width),
        );
        product(
            ds_context,
            keys.context_k
                .head(tile.document + tile.first_key, context, kv, dim),
            to.d_q.head(row_in_document, rows, head, dim),
            false,
        );
        product(
            ds_context.t(),
            saved.q.head(first_row, rows, head, dim),
            to.context_k.head(tile.first_key, context, kv, dim),
            true,
        );
        product(
            p_context.t(),
            saved.d_out.head(first_row, rows, head, dim),
            to.context_v.head(tile.first_key, context, kv, dim),
            true,
        );
        wide(
            #[inline(always)]
            || {
                for r in 0..rows {
                    let own = r * width + context;
                    let in_block = r / size * size;
                    let q = saved.q.head_row(first_row + r, head, dim);
                    let d_out = saved.d_out.head_row(first_row + r, head, dim);
                    let d_q = to.d_q.head_row(row_in_document + r, head, dim);
                    for j in blocks.own(r % size) {
                        let (p, ds) = (p[own + j], ds[own + j]);
                        axpy(
                            ds,
                            keys.block_k.head_row(first_row + in_block + j, kv, dim),
                            d_q,
                        );
                        let key = row_in_document + in_block + j;
                        axpy(ds, q, to.block_k.head_row(key, kv, dim));
                        axpy(p, d_out, to.block_v.head_row(key, kv, dim));
                    }
                }
            },
        );
    }
}
