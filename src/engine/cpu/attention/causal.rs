//! Packed causal attention of variable-length documents, optionally with a sliding window.

use super::{Qkv, RowsMut, Shape, inverse, scores};
use crate::engine::cpu::Cpu;
use crate::engine::cpu::product::{Mat, MatMut, product};
use crate::engine::cpu::vector::wide;

/// Query rows of a tile.
const TILE: usize = 64;

/// A run of query rows of one document.
struct Tile<'a> {
    /// First row of the document.
    document: usize,
    /// Positions of the tile's rows.
    begin: usize,
    end: usize,
    out: RowsMut<'a>,
}

pub(in crate::engine::cpu) fn causal(
    cpu: &Cpu,
    shape: Shape,
    qkv: Qkv<'_>,
    offsets: &[u32],
    window: Option<usize>,
    out: RowsMut<'_>,
) {
    shape.check(qkv.q, qkv.k, qkv.v);
    let rows = offsets.last().map_or(0, |&end| end as usize);
    assert_eq!(
        (qkv.q.rows, qkv.k.rows),
        (rows, rows),
        "rows of the documents"
    );
    assert_eq!(
        (out.rows, out.cols),
        (rows, qkv.q.cols),
        "shape of the output"
    );
    let mut rest = out;
    let mut tiles = Vec::new();
    let mut work = 0;
    for document in offsets.windows(2) {
        let (first, length) = (document[0] as usize, (document[1] - document[0]) as usize);
        for begin in (0..length).step_by(TILE) {
            let end = length.min(begin + TILE);
            work += (end - begin) * end * shape.heads.q;
            tiles.push(Tile {
                document: first,
                begin,
                end,
                out: rest.take_rows(end - begin),
            });
        }
    }
    cpu.for_each(work * 2, tiles.into_iter(), |tile| {
        attend(cpu, shape, qkv, window, tile);
    });
}

fn attend(cpu: &Cpu, shape: Shape, qkv: Qkv<'_>, window: Option<usize>, tile: Tile<'_>) {
    let Tile {
        document,
        begin,
        end,
        mut out,
    } = tile;
    let dim = shape.heads.dim;
    let rows = end - begin;
    let seen_from = |position: usize| window.map_or(0, |w| (position + 1).saturating_sub(w));
    let first_key = seen_from(begin);
    let keys = end - first_key;
    let mut buffer = cpu.scratch(rows * keys);
    let s = &mut buffer.as_mut_slice()[..rows * keys];
    let mut inverses = [0.0; TILE];
    for head in 0..shape.heads.q {
        let kv = shape.kv(head);
        scores(
            qkv.q.head(document + begin, rows, head, dim),
            qkv.k.head(document + first_key, keys, kv, dim),
            MatMut::new(s, rows, keys, keys),
        );
        wide(
            #[inline(always)]
            || {
                for (r, s) in s.chunks_exact_mut(keys).enumerate() {
                    let position = begin + r;
                    let visible = seen_from(position) - first_key..position + 1 - first_key;
                    s[..visible.start].fill(0.0);
                    s[visible.end..].fill(0.0);
                    inverses[r] = inverse(shape.softmax(&mut s[visible]).1);
                }
            },
        );
        product(
            Mat::new(s, rows, keys, keys),
            qkv.v.head(document + first_key, keys, kv, dim),
            out.head(0, rows, head, dim),
            false,
        );
        wide(
            #[inline(always)]
            || {
                for (r, inverse) in inverses[..rows].iter().enumerate() {
                    for x in out.head_row(r, head, dim) {
                        *x *= inverse;
                    }
                }
            },
        );
    }
}
