//! The frozen target: packed prefill of variable-length documents with the wanted layers captured.

mod attend;
mod experts;
mod layer;
mod mlp;
#[cfg(test)]
mod tests;

use super::config::TargetConfig;
use super::drafter::Tables;
use super::error::ModelError;
use super::rotary::RotaryTables;
use super::weights::TargetFiles;
use crate::engine::{Engine, Float, Half, HalfMut, HalfView};
use attend::Packed;
pub(super) use attend::{Attend, CacheRows, Cached};
use layer::{Layer, Pass, Room};

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

/// The embedding and the head alone, as a drafter needs them and as the files hold them: what a family does to
/// embeddings and logits belongs to the target's own forward pass.
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

/// Where the rows of a pass stand in their sequences.
pub(super) struct Places {
    /// `[rows]` positions.
    pub positions: Vec<u32>,
    /// `[rows]` length of the sequence that sets the frequencies, where these depend on a length.
    pub reach: Vec<u32>,
}

/// A loaded target.
pub struct Target<E: Engine> {
    config: TargetConfig,
    needs: TargetNeeds,
    layers: Vec<Layer<E>>,
    head: TargetHead<E>,
    final_norm: Option<Float<E>>,
    rotary: RotaryTables<E>,
    /// Of layers with a window, where they have their own.
    local_rotary: Option<RotaryTables<E>>,
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
            local_rotary: config
                .local_rope
                .map(|rope| RotaryTables::new(engine, rope, config.head_dim, 0))
                .transpose()?,
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

    /// `[rows, V]` logits of hidden states after the final norm, on the host.
    ///
    /// # Errors
    /// A target that was loaded without its head, or the engine's.
    pub fn logits(&self, engine: &E, hidden: HalfView<'_, E>) -> Result<Vec<f32>, ModelError> {
        let mut logits = engine.float(hidden.rows, self.config.vocab_size)?;
        engine.logits(hidden, self.head()?.lm_head(), logits.view_mut())?;
        let mut logits = engine.download_float(logits.view())?;
        if let Some(cap) = self.config.final_cap {
            let cap = cap as f32;
            for z in &mut logits {
                *z = cap * (*z / cap).tanh();
            }
        }
        Ok(logits)
    }

    /// Makes room for documents of up to `positions` tokens, so that no prefill has to.
    pub fn reserve(&mut self, engine: &E, positions: usize) -> Result<(), ModelError> {
        self.rotary.reserve(engine, positions)?;
        if let Some(tables) = &mut self.local_rotary {
            tables.reserve(engine, positions)?;
        }
        Ok(())
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
        let lengths = || offsets.windows(2).map(|d| d[1] - d[0]);
        let places = Places {
            positions: lengths().flat_map(|length| 0..length).collect(),
            reach: lengths()
                .flat_map(|length| (0..length).map(move |_| length))
                .collect(),
        };
        let longest = lengths().max().map(|length| length as usize);
        let offsets = engine.upload_index(offsets)?;
        let keys = Packed::<E> {
            offsets: offsets.view(),
            longest: longest.unwrap_or(0),
        };
        self.forward(engine, ids, &places, keys, out)
    }

    /// The layers over `ids`; `attend` says what each row sees.
    pub(super) fn forward(
        &mut self,
        engine: &E,
        ids: &[u32],
        places: &Places,
        mut attend: impl Attend<E>,
        out: Captured<'_, E>,
    ) -> Result<(), ModelError> {
        self.check(ids, &out)?;
        let tokens = ids.len();
        if tokens == 0 {
            return Ok(());
        }
        let Places { positions, reach } = places;
        let highest = positions.iter().max().map_or(0, |&p| p as usize);
        self.reserve(engine, highest + 1)?;
        let Captured {
            mut states,
            final_hidden,
        } = out;
        let config = &self.config;
        let turns = self.rotary.turns(engine, positions, reach)?;
        let local = match &self.local_rotary {
            Some(tables) => Some((tables, tables.turns(engine, positions, reach)?)),
            None => None,
        };
        let all = (turns.rows(), self.rotary.of(&turns));
        let pass = Pass {
            engine,
            config,
            turns: [
                all,
                local
                    .as_ref()
                    .map_or(all, |(tables, turns)| (turns.rows(), tables.of(turns))),
            ],
        };
        let mut room = Room::new(engine, config, tokens)?;
        let ids = engine.upload_index(ids)?;
        engine.embed(self.head.embedding(), ids.view(), room.h.view_mut())?;
        if let Some(by) = config.embedding_scale() {
            engine.scale(by, room.h.view_mut())?;
        }
        let hidden = config.hidden_size;
        for (i, layer) in self.layers.iter().enumerate() {
            layer.forward(i, &pass, &mut room, &mut attend)?;
            let slots = self.needs.capture.iter().enumerate();
            for (slot, _) in slots.filter(|&(_, &id)| id == i) {
                let place = states
                    .reborrow()
                    .col_range(slot * hidden, (slot + 1) * hidden);
                engine.copy_half(room.h.view(), place)?;
            }
        }
        if let (Some(norm), Some(out)) = (&self.final_norm, final_hidden) {
            let eps = config.rms_norm_eps as f32;
            engine.norm(room.h.view_mut(), None, norm.view(), eps, out)?;
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
