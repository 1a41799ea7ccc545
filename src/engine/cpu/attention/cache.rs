//! A few new rows against a cache: chain decoding, verification of a block, and of a draft tree.
//!
//! Keys a row does not see are left out, not masked, where they lie between keys that it sees: a tree node is
//! computed exactly as it would be in the chain of its ancestors.

use super::{Qkv, Rows, RowsMut, Shape, inverse, scores};
use crate::engine::CacheMask;
use crate::engine::cpu::Cpu;
use crate::engine::cpu::product::{Mat, MatMut, product};
use crate::engine::cpu::vector::wide;

pub(in crate::engine::cpu) fn cached(
    cpu: &Cpu,
    shape: Shape,
    qkv: Qkv<'_>,
    mask: &CacheMask<'_>,
    out: RowsMut<'_>,
) {
    shape.check(qkv.q, qkv.k, qkv.v);
    let sequences = mask.cached.len();
    assert_eq!(
        (mask.rows.len(), mask.cache_start.len()),
        (sequences + 1, sequences),
        "lengths of the mask"
    );
    assert_eq!(mask.positions.len(), qkv.q.rows, "positions of the rows");
    assert_eq!(
        mask.ancestors.len(),
        qkv.q.rows * mask.words,
        "ancestors of the rows"
    );
    assert_eq!(
        (out.rows, out.cols),
        (qkv.q.rows, qkv.q.cols),
        "shape of the output"
    );
    let mut out = out;
    let mut work = 0;
    let tasks: Vec<_> = (0..sequences)
        .map(|i| {
            let rows = (mask.rows[i + 1] - mask.rows[i]) as usize;
            work += rows * (mask.cached[i] as usize + rows) * shape.heads.q;
            let sequence = Sequence {
                first_row: mask.rows[i] as usize,
                rows,
                first_key: mask.cache_start[i] as usize,
                cached: mask.cached[i] as usize,
            };
            (sequence, out.take_rows(rows))
        })
        .collect();
    cpu.for_each(work * 2, tasks.into_iter(), |(sequence, mut out)| {
        let visible: Vec<Visible> = (0..sequence.rows)
            .map(|r| sequence.visible(mask, r))
            .collect();
        for head in 0..shape.heads.q {
            attend(cpu, shape, qkv, &sequence, &visible, head, &mut out);
        }
    });
}

/// The new rows of one sequence and its place in the cache.
struct Sequence {
    first_row: usize,
    rows: usize,
    first_key: usize,
    cached: usize,
}

/// The keys that a row sees, counted from the sequence's first.
struct Visible {
    /// A run without gaps.
    run: std::ops::Range<usize>,
    /// Keys after the run, in order; empty for chains.
    more: Vec<usize>,
}

impl Sequence {
    fn visible(&self, mask: &CacheMask<'_>, row: usize) -> Visible {
        let at = self.first_row + row;
        let from = mask
            .window
            .map_or(0, |w| (mask.positions[at] as usize + 1).saturating_sub(w));
        let words = &mask.ancestors[at * mask.words..][..mask.words];
        let new = (0..self.rows)
            .filter(|b| words[b / 64] >> (b % 64) & 1 == 1)
            .filter(|b| mask.positions[self.first_row + b] as usize >= from)
            .map(|b| self.cached + b);
        let mut visible = Visible {
            run: from.min(self.cached)..self.cached,
            more: Vec::new(),
        };
        for key in new {
            if visible.run.is_empty() && visible.more.is_empty() {
                visible.run = key..key + 1;
            } else if visible.more.is_empty() && visible.run.end == key {
                visible.run.end = key + 1;
            } else {
                visible.more.push(key);
            }
        }
        visible
    }
}

fn attend(
    cpu: &Cpu,
    shape: Shape,
    qkv: Qkv<'_>,
    sequence: &Sequence,
    visible: &[Visible],
    head: usize,
    out: &mut RowsMut<'_>,
) {
    let (dim, kv) = (shape.heads.dim, shape.kv(head));
    let (rows, keys) = (sequence.rows, sequence.cached + sequence.rows);
    let mut buffer = cpu.scratch(rows * keys);
    let s = &mut buffer.as_mut_slice()[..rows * keys];
    scores(
        qkv.q.head(sequence.first_row, rows, head, dim),
        qkv.k.head(sequence.first_key, keys, kv, dim),
        MatMut::new(s, rows, keys, keys),
    );
    let mut inverses = vec![0.0; rows];
    wide(
        #[inline(always)]
        || {
            for ((s, visible), inv) in s.chunks_exact_mut(keys).zip(visible).zip(&mut inverses) {
                // What is seen moves together, so that sums run over it in a chain's order.
                let mut end = visible.run.end;
                for &key in &visible.more {
                    s[end] = s[key];
                    end += 1;
                }
                s[..visible.run.start].fill(0.0);
                s[end..].fill(0.0);
                *inv = inverse(shape.softmax(&mut s[visible.run.start..end]).1);
            }
        },
    );
    product(
        Mat::new(s, rows, keys, keys),
        qkv.v.head(sequence.first_key, keys, kv, dim),
        out.head(0, rows, head, dim),
        false,
    );
    if visible.iter().any(|v| !v.more.is_empty()) {
        scattered(cpu, qkv.v, sequence, visible, (head, kv, dim), s, out);
    }
    for (r, inverse) in inverses.iter().enumerate() {
        for x in out.head_row(r, head, dim) {
            *x *= inverse;
        }
    }
}

/// Outputs of the rows whose keys have gaps, from probabilities `s` that have none.
fn scattered(
    cpu: &Cpu,
    v: Rows<'_>,
    sequence: &Sequence,
    visible: &[Visible],
    (head, kv, dim): (usize, usize, usize),
    s: &[f32],
    out: &mut RowsMut<'_>,
) {
    let keys = sequence.cached + sequence.rows;
    let mut buffer = cpu.scratch(keys * dim);
    let values = &mut buffer.as_mut_slice()[..keys * dim];
    let value_of = |key: usize| v.head_row(sequence.first_key + key, kv, dim);
    for (key, value) in values.chunks_exact_mut(dim).enumerate() {
        value.copy_from_slice(value_of(key));
    }
    for (r, visible) in visible.iter().enumerate() {
        if visible.more.is_empty() {
            continue;
        }
        for key in sequence.cached..visible.run.end {
            values[key * dim..][..dim].copy_from_slice(value_of(key));
        }
        for (i, &key) in visible.more.iter().enumerate() {
            values[(visible.run.end + i) * dim..][..dim].copy_from_slice(value_of(key));
        }
        product(
            Mat::new(&s[r * keys..], 1, keys, keys),
            Mat::new(values, keys, dim, dim),
            out.head(r, 1, head, dim),
            false,
        );
    }
}
