//! The three attentions against one dense float64 softmax over an explicit list of visible keys.

use slipstream::engine::{
    BlockKeys, BlockKeysGrad, BlockMask, CacheMask, CausalMask, Engine, Heads, Scores,
};

use crate::support::{Matrix, Random, Wide, close, float, indices, random, read_float};

const HEADS: [Heads; 3] = [
    Heads {
        q: 1,
        kv: 1,
        dim: 5,
    },
    Heads {
        q: 4,
        kv: 2,
        dim: 16,
    },
    Heads {
        q: 6,
        kv: 2,
        dim: 40,
    },
];

/// Dense attention over `keys`, `values`, where row `r` sees the rows `visible[r]`.
struct Dense<'a> {
    heads: Heads,
    scale: f64,
    /// Of the scores; without gradients.
    cap: Option<f64>,
    q: &'a Matrix,
    keys: &'a Matrix,
    values: &'a Matrix,
    visible: &'a [Vec<usize>],
}

/// Output, log-sum-exp, and gradients by queries, keys and values for a gradient of the output.
struct DenseOut {
    out: Matrix,
    lse: Matrix,
    d_q: Matrix,
    d_keys: Matrix,
    d_values: Matrix,
}

impl Dense<'_> {
    fn run(&self, d_out: Option<&Matrix>) -> DenseOut {
        let Heads { q: heads, kv, dim } = self.heads;
        let rows = self.q.rows;
        let mut r = DenseOut {
            out: Matrix::zeros(rows, heads * dim),
            lse: Matrix::zeros(rows, heads),
            d_q: Matrix::zeros(rows, heads * dim),
            d_keys: Matrix::zeros(self.keys.rows, kv * dim),
            d_values: Matrix::zeros(self.keys.rows, kv * dim),
        };
        for row in 0..rows {
            for h in 0..heads {
                let (at, of) = (h * dim, h / (heads / kv) * dim);
                let seen = &self.visible[row];
                let dot = |a: &Matrix, ra: usize, oa: usize, b: &Matrix, rb: usize, ob: usize| {
                    (0..dim)
                        .map(|i| a.at(ra, oa + i) * b.at(rb, ob + i))
                        .sum::<f64>()
                };
                let s: Vec<f64> = seen
                    .iter()
                    .map(|&k| self.scale * dot(self.q, row, at, self.keys, k, of))
                    .map(|s| self.cap.map_or(s, |cap| cap * (s / cap).tanh()))
                    .collect();
                let total: f64 = s.iter().map(|s| s.exp()).sum();
                r.lse.row_mut(row)[h] = total.ln();
                let p: Vec<f64> = s.iter().map(|s| s.exp() / total).collect();
                for (&k, p) in seen.iter().zip(&p) {
                    for i in 0..dim {
                        r.out.row_mut(row)[at + i] += p * self.values.at(k, of + i);
                    }
                }
                let Some(d_out) = d_out else { continue };
                let dp: Vec<f64> = seen
                    .iter()
                    .map(|&k| dot(d_out, row, at, self.values, k, of))
                    .collect();
                let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                for (j, &k) in seen.iter().enumerate() {
                    let ds = p[j] * (dp[j] - mean) * self.scale;
                    for i in 0..dim {
                        r.d_q.row_mut(row)[at + i] += ds * self.keys.at(k, of + i);
                        r.d_keys.row_mut(k)[of + i] += ds * self.q.at(row, at + i);
                        r.d_values.row_mut(k)[of + i] += p[j] * d_out.at(row, at + i);
                    }
                }
            }
        }
        r
    }
}

fn scale(heads: Heads) -> f32 {
    (heads.dim as f32).powf(-0.5)
}

pub fn causal_attention_of_packed_documents<E: Engine>(engine: &E) {
    let mut rng = Random(20);
    let lengths = [1, 70, 0, 130, 3];
    let mut offsets = vec![0u32];
    for length in lengths {
        offsets.push(offsets.last().unwrap() + length);
    }
    let rows = *offsets.last().unwrap() as usize;
    let offsets_e = indices(engine, &offsets);
    for heads in HEADS {
        for (window, cap) in [
            (None, None),
            (Some(1), None),
            (Some(40), None),
            (None, Some(1.5)),
            (Some(40), Some(0.5)),
        ] {
            let (q, q_held) = random(engine, &mut rng, rows, heads.q * heads.dim, 1.0);
            let (k, k_held) = random(engine, &mut rng, rows, heads.kv * heads.dim, 1.0);
            let (v, v_held) = random(engine, &mut rng, rows, heads.kv * heads.dim, 1.0);
            let mut out = Wide::<E>::output(engine, rows, heads.q * heads.dim);
            let mask = CausalMask {
                offsets: offsets_e.view(),
                window,
                longest: 130,
            };
            engine
                .causal_attention(
                    heads,
                    Scores {
                        scale: scale(heads),
                        cap,
                    },
                    q.view(),
                    k.view(),
                    v.view(),
                    &mask,
                    out.view_mut(),
                )
                .unwrap();
            let visible: Vec<Vec<usize>> = offsets
                .windows(2)
                .flat_map(|d| (d[0] as usize..d[1] as usize).map(move |r| (d[0] as usize, r)))
                .map(|(first, r)| {
                    (first.max((r + 1).saturating_sub(window.unwrap_or(rows)))..=r).collect()
                })
                .collect();
            let want = Dense {
                heads,
                scale: f64::from(scale(heads)),
                cap: cap.map(f64::from),
                q: &q_held,
                keys: &k_held,
                values: &v_held,
                visible: &visible,
            }
            .run(None);
            close::<E>(
                &format!("causal {heads:?} {window:?} {cap:?}"),
                &out.read(engine),
                &want.out,
            );
        }
    }
}

/// Blocks over documents whose contexts lie in any order, with gaps, anchor 0 and overlapping blocks.
struct Case {
    block: usize,
    context_rows: usize,
    context_start: Vec<u32>,
    anchor: Vec<u32>,
    window: Option<usize>,
}

impl Case {
    fn visible(&self) -> Vec<Vec<usize>> {
        let mut visible = Vec::new();
        for (n, (&start, &a)) in self.context_start.iter().zip(&self.anchor).enumerate() {
            for i in 0..self.block {
                let position = a as usize + i;
                let inside = |p: usize| self.window.is_none_or(|w| p + w > position);
                let context = (0..a as usize)
                    .filter(|&p| inside(p))
                    .map(|p| start as usize + p);
                let own = (0..self.block)
                    .filter(|&j| self.window.is_none() || (j <= i && inside(a as usize + j)))
                    .map(|j| self.context_rows + n * self.block + j);
                visible.push(context.chain(own).collect());
            }
        }
        visible
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for window in [None, Some(1), Some(6), Some(50)] {
        cases.push(Case {
            block: 5,
            context_rows: 200,
            context_start: [vec![110; 3], vec![5; 20], vec![105; 1]].concat(),
            anchor: [vec![0, 40, 90], (3..43).step_by(2).collect(), vec![2]].concat(),
            window,
        });
    }
    cases.push(Case {
        block: 1,
        context_rows: 0,
        context_start: vec![0],
        anchor: vec![0],
        window: None,
    });
    cases.push(Case {
        block: 8,
        context_rows: 700,
        context_start: vec![0; 3],
        anchor: vec![1, 650, 700],
        window: None,
    });
    cases.push(Case {
        block: 16,
        context_rows: 30,
        context_start: vec![],
        anchor: vec![],
        window: None,
    });
    cases
}

/// Output, log-sum-exp and the five gradients, as the engine computes them for one case.
fn run_blocks<E: Engine>(
    engine: &E,
    rng: &mut Random,
    heads: Heads,
    case: &Case,
) -> ([Matrix; 7], DenseOut) {
    let rows = case.anchor.len() * case.block;
    let (wide, narrow) = (heads.q * heads.dim, heads.kv * heads.dim);
    let (q, q_held) = random(engine, rng, rows, wide, 1.0);
    let (context_k, ck) = random(engine, rng, case.context_rows, narrow, 1.0);
    let (context_v, cv) = random(engine, rng, case.context_rows, narrow, 1.0);
    let (block_k, bk) = random(engine, rng, rows, narrow, 1.0);
    let (block_v, bv) = random(engine, rng, rows, narrow, 1.0);
    let (d_out, d_out_held) = random(engine, rng, rows, wide, 1.0);
    let keys = BlockKeys {
        context_k: context_k.view(),
        context_v: context_v.view(),
        block_k: block_k.view(),
        block_v: block_v.view(),
    };
    let (starts, anchors) = (
        indices(engine, &case.context_start),
        indices(engine, &case.anchor),
    );
    let mask = BlockMask {
        block: case.block,
        context_start: starts.view(),
        anchor: anchors.view(),
        window: case.window,
    };
    let mut out = Wide::<E>::output(engine, rows, wide);
    let mut lse = float(
        engine,
        &Matrix {
            rows,
            cols: heads.q,
            data: vec![f64::NAN; rows * heads.q],
        },
    );
    engine
        .block_attention(
            heads,
            scale(heads),
            q.view(),
            &keys,
            &mask,
            out.view_mut(),
            lse.view_mut(),
        )
        .unwrap();
    let mut d_q = Wide::<E>::output(engine, rows, wide);
    let mut grads = [case.context_rows, case.context_rows, rows, rows]
        .map(|n| Wide::<E>::output(engine, n, narrow));
    let [d_ck, d_cv, d_bk, d_bv] = &mut grads;
    let d_keys = BlockKeysGrad {
        context_k: d_ck.view_mut(),
        context_v: d_cv.view_mut(),
        block_k: d_bk.view_mut(),
        block_v: d_bv.view_mut(),
    };
    engine
        .block_attention_backward(
            heads,
            scale(heads),
            d_out.view(),
            q.view(),
            &keys,
            &mask,
            out.view(),
            lse.view(),
            d_q.view_mut(),
            d_keys,
        )
        .unwrap();
    let stacked = |a: Matrix, b: Matrix| Matrix {
        rows: a.rows + b.rows,
        cols: narrow,
        data: [a.data, b.data].concat(),
    };
    let want = Dense {
        heads,
        scale: f64::from(scale(heads)),
        cap: None,
        q: &q_held,
        keys: &stacked(ck, bk),
        values: &stacked(cv, bv),
        visible: &case.visible(),
    }
    .run(Some(&d_out_held));
    let [d_ck, d_cv, d_bk, d_bv] = grads.map(|g| g.read(engine));
    let got = [
        out.read(engine),
        read_float(engine, &lse),
        d_q.read(engine),
        d_ck,
        d_cv,
        d_bk,
        d_bv,
    ];
    (got, want)
}

pub fn block_attention_and_its_gradient<E: Engine>(engine: &E) {
    let mut rng = Random(21);
    for heads in HEADS {
        for case in cases() {
            let name = format!("{heads:?} block {} window {:?}", case.block, case.window);
            let (got, want) = run_blocks(engine, &mut rng, heads, &case);
            let [out, lse, d_q, d_ck, d_cv, d_bk, d_bv] = got;
            let part = |m: &Matrix, context: bool| {
                let cut = case.context_rows * m.cols;
                let data = if context {
                    &m.data[..cut]
                } else {
                    &m.data[cut..]
                };
                Matrix {
                    rows: data.len() / m.cols,
                    cols: m.cols,
                    data: data.to_vec(),
                }
            };
            close::<E>(&format!("block {name}"), &out, &want.out);
            close::<E>(&format!("lse {name}"), &lse, &want.lse);
            close::<E>(&format!("d_q {name}"), &d_q, &want.d_q);
            close::<E>(
                &format!("context d_k {name}"),
                &d_ck,
                &part(&want.d_keys, true),
            );
            close::<E>(
                &format!("context d_v {name}"),
                &d_cv,
                &part(&want.d_values, true),
            );
            close::<E>(
                &format!("block d_k {name}"),
                &d_bk,
                &part(&want.d_keys, false),
            );
            close::<E>(
                &format!("block d_v {name}"),
                &d_bv,
                &part(&want.d_values, false),
            );
        }
    }
}

pub fn cache_attention_of_chains_and_trees<E: Engine>(engine: &E) {
    let mut rng = Random(22);
    // Parents inside the sequence's new rows; a row without a parent hangs on the cache.
    let trees: [&[Option<usize>]; 3] = [
        &[None, Some(0), Some(1)],
        &[None, Some(0), Some(0), Some(1), Some(2), None, Some(4)],
        &[None],
    ];
    let (cached, cache_start) = ([20u32, 37, 0], [50u32, 5, 90]);
    let cache_rows = 100;
    let words = 2;
    let mut offsets = vec![0u32];
    let (mut ancestors, mut positions) = (Vec::new(), Vec::new());
    for (tree, cached) in trees.iter().zip(cached) {
        for row in 0..tree.len() {
            let mut bits = vec![0u64; words];
            let mut depth = 0;
            let mut at = Some(row);
            while let Some(node) = at {
                bits[node / 64] |= 1 << (node % 64);
                at = tree[node];
                depth += 1;
            }
            ancestors.extend(bits);
            positions.push(cached + depth - 1);
        }
        offsets.push(offsets.last().unwrap() + tree.len() as u32);
    }
    let rows = positions.len();
    for heads in HEADS {
        for (window, cap) in [
            (None, None),
            (Some(2), None),
            (Some(30), None),
            (None, Some(1.5)),
            (Some(30), Some(0.5)),
        ] {
            let (q, q_held) = random(engine, &mut rng, rows, heads.q * heads.dim, 1.0);
            let (k, k_held) = random(engine, &mut rng, cache_rows, heads.kv * heads.dim, 1.0);
            let (v, v_held) = random(engine, &mut rng, cache_rows, heads.kv * heads.dim, 1.0);
            let mut out = Wide::<E>::output(engine, rows, heads.q * heads.dim);
            let mask = CacheMask {
                rows: &offsets,
                cache_start: &cache_start,
                cached: &cached,
                ancestors: &ancestors,
                words,
                window,
                positions: &positions,
            };
            engine
                .cache_attention(
                    heads,
                    Scores {
                        scale: scale(heads),
                        cap,
                    },
                    q.view(),
                    k.view(),
                    v.view(),
                    &mask,
                    out.view_mut(),
                )
                .unwrap();
            let mut visible = Vec::new();
            for (i, tree) in trees.iter().enumerate() {
                let first = offsets[i] as usize;
                for row in 0..tree.len() {
                    let at = positions[first + row];
                    let inside = |p: u32| window.is_none_or(|w| p as usize + w > at as usize);
                    let start = cache_start[i] as usize;
                    let old = (0..cached[i])
                        .filter(|&p| inside(p))
                        .map(|p| start + p as usize);
                    let new = (0..tree.len())
                        .filter(|b| ancestors[(first + row) * words] >> b & 1 == 1)
                        .filter(|b| inside(positions[first + b]))
                        .map(|b| start + cached[i] as usize + b);
                    visible.push(old.chain(new).collect());
                }
            }
            let want = Dense {
                heads,
                scale: f64::from(scale(heads)),
                cap: cap.map(f64::from),
                q: &q_held,
                keys: &k_held,
                values: &v_held,
                visible: &visible,
            }
            .run(None);
            close::<E>(
                &format!("cache {heads:?} {window:?} {cap:?}"),
                &out.read(engine),
                &want.out,
            );
        }
    }
}

/// Every output of block attention is the same on two engines of one kind.
pub fn same_bits<E: Engine>(one: &E, other: &E) {
    for (i, case) in cases().iter().enumerate() {
        let run = |engine: &E| {
            run_blocks(engine, &mut Random(i as u64), HEADS[1], case)
                .0
                .map(|m| m.data)
        };
        assert_eq!(run(one), run(other));
    }
}

/// One document's prefill, against the same rows one at a time, eight at a time and as a branch of a tree.
pub fn decoding_has_the_bits_of_prefill<E: Engine>(engine: &E) {
    let mut rng = Random(23);
    let heads = HEADS[1];
    let rows = 90;
    let (q, q_held) = random(engine, &mut rng, rows, heads.q * heads.dim, 1.0);
    let (k, k_held) = random(engine, &mut rng, rows, heads.kv * heads.dim, 1.0);
    let (v, v_held) = random(engine, &mut rng, rows, heads.kv * heads.dim, 1.0);
    let mut out = Wide::<E>::output(engine, rows, heads.q * heads.dim);
    let offsets = indices(engine, &[0, rows as u32]);
    let mask = CausalMask {
        offsets: offsets.view(),
        window: None,
        longest: rows,
    };
    engine
        .causal_attention(
            heads,
            scale(heads),
            q.view(),
            k.view(),
            v.view(),
            &mask,
            out.view_mut(),
        )
        .unwrap();
    let prefill = out.read(engine);
    let decode =
        |q: &Matrix, k: &Matrix, v: &Matrix, cached: u32, ancestors: &[u64], positions: &[u32]| {
            let mut out = Wide::<E>::output(engine, q.rows, q.cols);
            let mask = CacheMask {
                rows: &[0, q.rows as u32],
                cache_start: &[0],
                cached: &[cached],
                ancestors,
                words: 1,
                window: None,
                positions,
            };
            engine
                .cache_attention(
                    heads,
                    scale(heads),
                    Wide::new(engine, q).view(),
                    Wide::new(engine, k).view(),
                    Wide::new(engine, v).view(),
                    &mask,
                    out.view_mut(),
                )
                .unwrap();
            out.read(engine)
        };
    let part = |m: &Matrix, begin: usize, end: usize| Matrix {
        rows: end - begin,
        cols: m.cols,
        data: m.data[begin * m.cols..end * m.cols].to_vec(),
    };
    for new in [1, 2, 8] {
        for first in [0, 1, 33, rows - new] {
            let (q, end) = (part(&q_held, first, first + new), first + new);
            let chain: Vec<u64> = (0..new).map(|i| (1 << (i + 1)) - 1).collect();
            let positions: Vec<u32> = (first as u32..end as u32).collect();
            let got = decode(
                &q,
                &part(&k_held, 0, end),
                &part(&v_held, 0, end),
                first as u32,
                &chain,
                &positions,
            );
            assert_eq!(
                got.data,
                part(&prefill, first, end).data,
                "{new} rows at {first}"
            );
        }
    }
    // The chain 40, 41, 42 as nodes 0, 2, 4 of a tree whose other nodes are strangers.
    let woven = |m: &Matrix| {
        let stranger = m.row(80);
        let mut out = part(m, 0, 40);
        for own in 40..43 {
            out.data.extend_from_slice(m.row(own));
            out.data.extend_from_slice(stranger);
        }
        out.rows += 6;
        out
    };
    let q = woven(&q_held);
    let ancestors = [0b1, 0b11, 0b101, 0b1101, 0b10101, 0b110101];
    let positions = [40, 41, 41, 42, 42, 43];
    let got = decode(
        &part(&q, 40, 46),
        &woven(&k_held),
        &woven(&v_held),
        40,
        &ancestors,
        &positions,
    );
    for (node, row) in [(0, 40), (2, 41), (4, 42)] {
        assert_eq!(got.row(node), prefill.row(row), "node {node}");
    }
}
