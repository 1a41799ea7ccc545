//! The frozen target: packed prefill of variable-length documents with the wanted layers captured.

use super::config::TargetConfig;
use super::drafter::Tables;
use super::error::ModelError;
use super::rotary::RotaryTables;
use super::weights::TargetFiles;
use crate::engine::{
    CacheMask, CausalMask, Engine, Float, Half, HalfMut, HalfView, Heads, IndexView,
};

/// What a worker wants from a target, so that no more of it is loaded or run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetNeeds {
    /// Layers whose output (the residual stream after the layer, before the final norm) is captured.
    pub capture: Vec<usize>,
    /// The hidden state after the final norm: all layers are run.
    pub final_hidden: bool,
    /// The head: all layers are run.
    pub lm_head: bool,
}

impl TargetNeeds {
    /// Layers to load and run of `all`.
    pub fn layers(&self, all: usize) -> usize {
        if self.final_hidden || self.lm_head {
            return all;
        }
        self.capture.iter().map(|id| id + 1).max().unwrap_or(0)
    }
}

/// Weights of one layer, in the compute type; norms in float32.
struct Layer<E: Engine> {
    input_norm: Float<E>,
    /// `[q + 2 kv, H]`: queries, keys, values.
    qkv: Half<E>,
    head_norms: Option<(Float<E>, Float<E>)>,
    /// `[H, q]`.
    out: Half<E>,
    post_norm: Float<E>,
    /// `[2 I, H]`: gate, up.
    gate_up: Half<E>,
    /// `[H, I]`.
    down: Half<E>,
    window: Option<usize>,
}

/// The embedding and the head alone, as a drafter needs them.
pub struct TargetHead<E: Engine> {
    embedding: Half<E>,
    lm_head: Option<Half<E>>,
}

impl<E: Engine> TargetHead<E> {
    /// Loads the two tables, or the one where they are tied.
    pub fn load(engine: &E, files: &TargetFiles) -> Result<Self, ModelError> {
        Ok(Self {
            embedding: files.embedding(engine)?,
            lm_head: files.lm_head(engine)?,
        })
    }

    /// `[V, H]`.
    pub fn embedding(&self) -> HalfView<'_, E> {
        self.embedding.view()
    }

    /// `[V, H]`; the embedding where they are tied.
    pub fn lm_head(&self) -> HalfView<'_, E> {
        self.lm_head.as_ref().unwrap_or(&self.embedding).view()
    }

    /// Both, for a drafter.
    pub fn tables(&self) -> Tables<'_, E> {
        Tables {
            embedding: self.embedding(),
            lm_head: self.lm_head(),
        }
    }
}

/// Where a prefill's results go.
pub struct Captured<'a, E: Engine> {
    /// `[tokens, K H]` the captured layers, in the order of [`TargetNeeds::capture`].
    pub states: HalfMut<'a, E>,
    /// `[tokens, H]` after the final norm, where it was asked for.
    pub final_hidden: Option<HalfMut<'a, E>>,
}

/// A loaded target.
pub struct Target<E: Engine> {
    config: TargetConfig,
    needs: TargetNeeds,
    layers: Vec<Layer<E>>,
    head: TargetHead<E>,
    final_norm: Option<Float<E>>,
    rotary: RotaryTables<E>,
}

impl<E: Engine> Target<E> {
    /// Loads what `needs` asks for.
    ///
    /// # Errors
    /// A captured layer that does not exist, or the engine's.
    pub fn load(engine: &E, files: &TargetFiles, needs: TargetNeeds) -> Result<Self, ModelError> {
        let config = files.config().clone();
        if let Some(id) = needs
            .capture
            .iter()
            .find(|&&id| id >= config.num_hidden_layers)
        {
            return Err(ModelError::Request(format!(
                "layer {id} cannot be captured: layers are 0 to {}",
                config.num_hidden_layers - 1
            )));
        }
        let layers = (0..needs.layers(config.num_hidden_layers))
            .map(|i| Layer::load(engine, files, i))
            .collect::<Result<_, _>>()?;
        let head = TargetHead {
            embedding: files.embedding(engine)?,
            lm_head: if needs.lm_head {
                files.lm_head(engine)?
            } else {
                None
            },
        };
        let final_norm = (needs.final_hidden || needs.lm_head).then(|| files.final_norm(engine));
        Ok(Self {
            rotary: RotaryTables::new(engine, config.rope, config.head_dim, 0)?,
            final_norm: final_norm.transpose()?,
            config,
            needs,
            layers,
            head,
        })
    }

    /// Its shape.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// What it was loaded for.
    pub fn needs(&self) -> &TargetNeeds {
        &self.needs
    }

    /// Layers that are loaded and run.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The embedding, and the head if it was asked for.
    pub fn head(&self) -> Result<&TargetHead<E>, ModelError> {
        if self.needs.lm_head || self.config.tie_word_embeddings {
            Ok(&self.head)
        } else {
            Err(ModelError::Request(
                "was loaded without its head".to_string(),
            ))
        }
    }

    /// Makes room for documents of up to `positions` tokens, so that no prefill has to.
    pub fn reserve(&mut self, engine: &E, positions: usize) -> Result<(), ModelError> {
        Ok(self.rotary.reserve(engine, positions)?)
    }

    /// Runs packed documents: document `i` is `ids[offsets[i]..offsets[i + 1]]`, from position 0.
    ///
    /// # Errors
    /// Ids outside the vocabulary, offsets that do not cover the ids, outputs of another shape than the ids
    /// and the needs ask for, or the engine's.
    pub fn prefill(
        &mut self,
        engine: &E,
        ids: &[u32],
        offsets: &[u32],
        out: Captured<'_, E>,
    ) -> Result<(), ModelError> {
        let ordered = offsets.first() == Some(&0) && offsets.is_sorted();
        if !ordered || offsets.last().is_none_or(|&end| end as usize != ids.len()) {
            return Err(ModelError::Request(format!(
                "the document offsets do not run from 0 to {} tokens",
                ids.len()
            )));
        }
        let positions: Vec<u32> = offsets.windows(2).flat_map(|d| 0..d[1] - d[0]).collect();
        let longest = offsets.windows(2).map(|d| (d[1] - d[0]) as usize).max();
        let offsets = engine.upload_index(offsets)?;
        let keys = Packed::<E> {
            offsets: offsets.view(),
            longest: longest.unwrap_or(0),
        };
        self.forward(engine, ids, &positions, keys, out)
    }

    /// The layers over `ids` at `positions`; `attend` says what each row sees.
    pub(super) fn forward(
        &mut self,
        engine: &E,
        ids: &[u32],
        positions: &[u32],
        mut attend: impl Attend<E>,
        out: Captured<'_, E>,
    ) -> Result<(), ModelError> {
        self.check(ids, &out)?;
        let tokens = ids.len();
        if tokens == 0 {
            return Ok(());
        }
        let highest = positions.iter().max().map_or(0, |&p| p as usize);
        self.rotary.reserve(engine, highest + 1)?;
        let Captured {
            mut states,
            final_hidden,
        } = out;
        let config = &self.config;
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (query, key) = (config.query_size(), config.key_size());
        let heads = Heads {
            q: config.num_attention_heads,
            kv: config.num_key_value_heads,
            dim: config.head_dim,
        };
        let scale = (config.head_dim as f32).powf(-0.5);
        let eps = config.rms_norm_eps as f32;
        let positions = engine.upload_index(positions)?;

        let mut h = engine.half(tokens, hidden)?;
        let mut x = engine.half(tokens, hidden)?;
        let mut qkv = engine.half(tokens, query + 2 * key)?;
        let mut q = engine.half(tokens, query)?;
        let mut k = engine.half(tokens, key)?;
        let mut attention = engine.half(tokens, query)?;
        let mut gate_up = engine.half(tokens, 2 * inner)?;
        let mut act = engine.half(tokens, inner)?;
        engine.embed(
            self.head.embedding(),
            engine.upload_index(ids)?.view(),
            h.view_mut(),
        )?;
        for (i, layer) in self.layers.iter().enumerate() {
            engine.norm(
                h.view_mut(),
                None,
                layer.input_norm.view(),
                eps,
                x.view_mut(),
            )?;
            engine.linear(x.view(), layer.qkv.view(), qkv.view_mut(), false)?;
            let (q_norm, k_norm) = match &layer.head_norms {
                Some((q, k)) => (Some(q.view()), Some(k.view())),
                None => (None, None),
            };
            let rotary = self.rotary.view();
            let raw = qkv.view();
            for (raw, norm, turned) in [
                (raw.col_range(0, query), q_norm, q.view_mut()),
                (raw.col_range(query, query + key), k_norm, k.view_mut()),
            ] {
                engine.head_norm_rotary(
                    raw,
                    norm,
                    eps,
                    heads.dim,
                    positions.view(),
                    rotary,
                    turned,
                )?;
            }
            let new = NewRows {
                heads,
                scale,
                q: q.view(),
                k: k.view(),
                v: raw.col_range(query + key, query + 2 * key),
                window: layer.window,
            };
            attend.attend(engine, i, new, attention.view_mut())?;
            engine.linear(attention.view(), layer.out.view(), h.view_mut(), true)?;
            engine.norm(
                h.view_mut(),
                None,
                layer.post_norm.view(),
                eps,
                x.view_mut(),
            )?;
            engine.linear(x.view(), layer.gate_up.view(), gate_up.view_mut(), false)?;
            engine.swiglu(gate_up.view(), act.view_mut())?;
            engine.linear(act.view(), layer.down.view(), h.view_mut(), true)?;
            for (slot, _) in self
                .needs
                .capture
                .iter()
                .enumerate()
                .filter(|&(_, &id)| id == i)
            {
                let place = states
                    .reborrow()
                    .col_range(slot * hidden, (slot + 1) * hidden);
                engine.copy_half(h.view(), place)?;
            }
        }
        if let (Some(norm), Some(out)) = (&self.final_norm, final_hidden) {
            engine.norm(h.view_mut(), None, norm.view(), eps, out)?;
        }
        Ok(())
    }

    fn check(&self, ids: &[u32], out: &Captured<'_, E>) -> Result<(), ModelError> {
        let request = |problem: String| Err(ModelError::Request(problem));
        let vocabulary = self.config.vocab_size;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
            return request(format!(
                "token {id} is outside its {vocabulary} embeddings; is the tokenizer another model's?"
            ));
        }
        let width = self.needs.capture.len() * self.config.hidden_size;
        if (out.states.rows, out.states.cols) != (ids.len(), width) {
            return request(format!(
                "captured states are [{}, {width}], not [{}, {}]",
                ids.len(),
                out.states.rows,
                out.states.cols
            ));
        }
        match (&out.final_hidden, &self.final_norm) {
            (Some(_), None) => request("was loaded without its final norm".to_string()),
            (Some(view), _) if (view.rows, view.cols) != (ids.len(), self.config.hidden_size) => {
                request(format!(
                    "the final hidden state is [{}, {}], not [{}, {}]",
                    ids.len(),
                    self.config.hidden_size,
                    view.rows,
                    view.cols
                ))
            }
            _ => Ok(()),
        }
    }
}

impl<E: Engine> Layer<E> {
    fn load(engine: &E, files: &TargetFiles, i: usize) -> Result<Self, ModelError> {
        let matrix = |parts: &[&str]| {
            let names: Vec<String> = parts.iter().map(|part| files.layer_name(i, part)).collect();
            files.stacked(engine, &names)
        };
        let vector = |part: &str| files.vector(engine, &files.layer_name(i, part));
        let head_norms = match files.config().family {
            super::config::Family::Llama => None,
            super::config::Family::Qwen3 => {
                Some((vector("self_attn.q_norm")?, vector("self_attn.k_norm")?))
            }
        };
        Ok(Self {
            input_norm: vector("input_layernorm")?,
            qkv: matrix(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])?,
            head_norms,
            out: matrix(&["self_attn.o_proj"])?,
            post_norm: vector("post_attention_layernorm")?,
            gate_up: matrix(&["mlp.gate_proj", "mlp.up_proj"])?,
            down: matrix(&["mlp.down_proj"])?,
            window: files.config().windows[i],
        })
    }
}

/// What a layer hands to its attention.
pub(super) struct NewRows<'a, E: Engine> {
    pub heads: Heads,
    pub scale: f32,
    pub q: HalfView<'a, E>,
    pub k: HalfView<'a, E>,
    pub v: HalfView<'a, E>,
    pub window: Option<usize>,
}

/// How a layer's rows see one another.
pub(super) trait Attend<E: Engine> {
    /// Attention of layer `layer`.
    fn attend(
        &mut self,
        engine: &E,
        layer: usize,
        new: NewRows<'_, E>,
        out: HalfMut<'_, E>,
    ) -> Result<(), ModelError>;
}

/// Packed documents.
pub(super) struct Packed<'a, E: Engine> {
    pub offsets: IndexView<'a, E>,
    pub longest: usize,
}

impl<E: Engine> Attend<E> for Packed<'_, E> {
    fn attend(
        &mut self,
        engine: &E,
        _layer: usize,
        new: NewRows<'_, E>,
        out: HalfMut<'_, E>,
    ) -> Result<(), ModelError> {
        let mask = CausalMask {
            offsets: self.offsets,
            window: new.window,
            longest: self.longest,
        };
        Ok(engine.causal_attention(new.heads, new.scale, new.q, new.k, new.v, &mask, out)?)
    }
}

/// New rows behind cached ones; each layer's keys and values join its cache first.
pub(super) struct Cached<'a, E: Engine> {
    pub keys: &'a mut [Half<E>],
    pub values: &'a mut [Half<E>],
    /// The window is the layer's.
    pub mask: CacheMask<'a>,
}

impl<E: Engine> Attend<E> for Cached<'_, E> {
    fn attend(
        &mut self,
        engine: &E,
        layer: usize,
        new: NewRows<'_, E>,
        out: HalfMut<'_, E>,
    ) -> Result<(), ModelError> {
        let (keys, values) = (&mut self.keys[layer], &mut self.values[layer]);
        let begin = (self.mask.cache_start[0] + self.mask.cached[0]) as usize;
        let end = begin + new.k.rows;
        engine.copy_half(new.k, keys.view_mut().row_range(begin, end))?;
        engine.copy_half(new.v, values.view_mut().row_range(begin, end))?;
        let mask = CacheMask {
            window: new.window,
            ..self.mask
        };
        Ok(engine.cache_attention(
            new.heads,
            new.scale,
            new.q,
            keys.view(),
            values.view(),
            &mask,
            out,
        )?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::Cpu;
    use crate::model::testing::Made;

    fn files(qwen3: bool, tied: bool) -> (tempfile::TempDir, TargetFiles) {
        let dir = tempfile::tempdir().unwrap();
        Made::new(qwen3, tied).write(dir.path());
        let files = TargetFiles::open(dir.path(), false).unwrap();
        (dir, files)
    }

    fn needs(capture: &[usize], final_hidden: bool) -> TargetNeeds {
        TargetNeeds {
            capture: capture.to_vec(),
            final_hidden,
            lm_head: false,
        }
    }

    /// Captured states and the final hidden state, on the host.
    fn run(target: &mut Target<Cpu>, ids: &[u32], offsets: &[u32]) -> (Vec<f32>, Vec<f32>) {
        let engine = Cpu::new(1).unwrap();
        let width = target.needs().capture.len() * 24;
        let mut states = engine.half(ids.len(), width).unwrap();
        let mut last = engine.half(ids.len(), 24).unwrap();
        let wants_last = target.needs().final_hidden;
        let out = Captured {
            states: states.view_mut(),
            final_hidden: wants_last.then(|| last.view_mut()),
        };
        target.prefill(&engine, ids, offsets, out).unwrap();
        (
            engine.download_half(states.view()).unwrap(),
            if wants_last {
                engine.download_half(last.view()).unwrap()
            } else {
                vec![]
            },
        )
    }

    #[test]
    fn packing_and_loading_less_change_no_bit() {
        let engine = Cpu::new(1).unwrap();
        let ids: Vec<u32> = (0..30).map(|i| i * 7 % 40).collect();
        for qwen3 in [false, true] {
            let (_dir, files) = files(qwen3, false);
            let mut whole = Target::load(&engine, &files, needs(&[0, 1], true)).unwrap();
            assert_eq!(whole.layers(), 3);
            let (states, last) = run(&mut whole, &ids, &[0, 11, 11, 30]);
            for (begin, end) in [(0, 11), (11, 30)] {
                let alone = run(&mut whole, &ids[begin..end], &[0, (end - begin) as u32]);
                assert_eq!(alone.0, states[begin * 48..end * 48]);
                assert_eq!(alone.1, last[begin * 24..end * 24]);
            }
            let mut less = Target::load(&engine, &files, needs(&[1], false)).unwrap();
            assert_eq!(less.layers(), 2);
            let captured = run(&mut less, &ids, &[0, 11, 30]).0;
            let of_layer_1: Vec<f32> = states
                .chunks(48)
                .flat_map(|row| row[24..].to_vec())
                .collect();
            assert_eq!(captured, of_layer_1);
            let mut turned = Target::load(&engine, &files, needs(&[1, 0, 1], false)).unwrap();
            let (captured, _) = run(&mut turned, &ids, &[0, 11, 30]);
            for (row, of) in captured.chunks(72).zip(states.chunks(48)) {
                assert_eq!(row, [&of[24..], &of[..24], &of[24..]].concat());
            }
        }
    }

    #[test]
    fn a_sliding_layer_forgets_what_is_far() {
        let engine = Cpu::new(1).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut made = Made::new(true, true);
        made.config["layer_types"] =
            serde_json::json!(["sliding_attention", "full_attention", "full_attention"]);
        made.config["sliding_window"] = serde_json::json!(4);
        made.write(dir.path());
        let files = TargetFiles::open(dir.path(), false).unwrap();
        let mut target = Target::load(&engine, &files, needs(&[0, 1], false)).unwrap();
        let mut ids: Vec<u32> = (0..12).collect();
        let before = run(&mut target, &ids, &[0, 12]).0;
        ids[2] = 30;
        let after = run(&mut target, &ids, &[0, 12]).0;
        let changed = |row: usize, slot: usize| {
            let range = row * 48 + slot * 24..row * 48 + (slot + 1) * 24;
            before[range.clone()] != after[range]
        };
        for row in 0..12 {
            assert_eq!(
                changed(row, 0),
                (2..6).contains(&row),
                "row {row} of the sliding layer"
            );
            assert_eq!(changed(row, 1), row >= 2, "row {row} of the full layer");
        }
    }

    #[test]
    fn a_drafter_loads_only_the_tables() {
        let engine = Cpu::new(1).unwrap();
        let (_dir, untied) = files(false, false);
        let head = TargetHead::load(&engine, &untied).unwrap();
        let made = Made::new(false, false);
        let tables = head.tables();
        let read = |view| engine.download_half(view).unwrap();
        assert_eq!(
            read(tables.embedding),
            made.tensors["model.embed_tokens.weight"].1
        );
        assert_eq!(read(tables.lm_head), made.tensors["lm_head.weight"].1);
        let (_dir, tied) = files(false, true);
        let head = TargetHead::load(&engine, &tied).unwrap();
        assert_eq!(read(head.lm_head()), read(head.embedding()));
    }

    #[test]
    fn wrong_requests_are_refused() {
        let engine = Cpu::new(1).unwrap();
        let (_dir, files) = files(false, false);
        let refused = |result: Result<(), ModelError>, says: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        };
        refused(
            Target::load(&engine, &files, needs(&[3], false)).map(|_| ()),
            "layer 3 cannot be captured: layers are 0 to 2",
        );
        let mut target = Target::load(&engine, &files, needs(&[0], false)).unwrap();
        refused(target.head().map(|_| ()), "without its head");
        let mut prefill = |ids: &[u32], offsets: &[u32], cols: usize, last: bool| {
            let mut states = engine.half(2, cols).unwrap();
            let mut hidden = engine.half(2, 24).unwrap();
            let out = Captured {
                states: states.view_mut(),
                final_hidden: last.then(|| hidden.view_mut()),
            };
            target.prefill(&engine, ids, offsets, out)
        };
        refused(
            prefill(&[1, 40], &[0, 2], 24, false),
            "token 40 is outside its 40 embeddings",
        );
        refused(
            prefill(&[1, 2], &[0, 1], 24, false),
            "do not run from 0 to 2 tokens",
        );
        refused(
            prefill(&[1, 2], &[], 24, false),
            "do not run from 0 to 2 tokens",
        );
        refused(
            prefill(&[1, 2], &[0, 2, 1, 2], 24, false),
            "do not run from 0",
        );
        refused(
            prefill(&[1, 2], &[0, 2], 25, false),
            "captured states are [2, 24], not [2, 25]",
        );
        refused(
            prefill(&[1, 2], &[0, 2], 24, true),
            "without its final norm",
        );
        prefill(&[1, 2], &[0, 2], 24, false).unwrap();
    }
}
