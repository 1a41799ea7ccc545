//! Brings checked tensors to an engine, one after the other: what was read from a file is let go of at once, so
//! that host memory holds no more than the tensor in hand.

use safetensors::Dtype;

use super::check::scales_of;
use super::fp8;
use super::shards::Entry;
use super::{TargetFiles, encoding};
use crate::engine::{Encoding, Engine, Float, Half, HalfMut};
use crate::model::error::ModelError;

impl TargetFiles {
    fn entry(&self, name: &str) -> Result<&Entry, ModelError> {
        self.tensors.get(name).ok_or_else(|| {
            ModelError::Request(format!("{} has no tensor {name}", self.dir.display()))
        })
    }

    fn encoding(&self, name: &str, entry: &Entry) -> Result<Encoding, ModelError> {
        encoding(entry.dtype).ok_or_else(|| {
            ModelError::Request(format!(
                "{}: {name} is of type {}",
                self.dir.display(),
                entry.dtype
            ))
        })
    }

    /// The numbers of a tensor on the host.
    fn numbers(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let entry = self.entry(name)?;
        let mut values = vec![0.0; entry.shape.iter().product()];
        let shard = &self.shards[entry.shard];
        self.encoding(name, entry)?
            .decode(shard.bytes(entry), &mut values);
        shard.release(entry);
        Ok(values)
    }

    /// Matrices with equal columns, one below the other, in the compute type; names without `.weight`.
    pub(in crate::model) fn stacked<E: Engine>(
        &self,
        engine: &E,
        names: &[String],
    ) -> Result<Half<E>, ModelError> {
        let names: Vec<String> = names.iter().map(|name| format!("{name}.weight")).collect();
        self.matrices(engine, &names)
    }

    fn matrices<E: Engine>(&self, engine: &E, names: &[String]) -> Result<Half<E>, ModelError> {
        let parts: Vec<_> = names
            .iter()
            .map(|name| Ok((name, self.entry(name)?)))
            .collect::<Result<_, ModelError>>()?;
        let rows: usize = parts.iter().map(|(_, entry)| entry.shape[0]).sum();
        let cols = parts.first().map_or(0, |(_, entry)| entry.shape[1]);
        let mut whole = engine.half(rows, cols)?;
        let mut begin = 0;
        for (name, entry) in parts {
            let end = begin + entry.shape[0];
            let place = whole.view_mut().row_range(begin, end);
            self.decode(engine, name, entry, place)?;
            self.shards[entry.shard].release(entry);
            begin = end;
        }
        Ok(whole)
    }

    fn decode<E: Engine>(
        &self,
        engine: &E,
        name: &str,
        entry: &Entry,
        mut place: HalfMut<'_, E>,
    ) -> Result<(), ModelError> {
        let bytes = self.shards[entry.shard].bytes(entry);
        let (Dtype::F8_E4M3, Some([rows, cols])) = (entry.dtype, self.config.fp8_block) else {
            let encoding = self.encoding(name, entry)?;
            return Ok(engine.decode_half(place, encoding, bytes)?);
        };
        let scales = self.numbers(&scales_of(name))?;
        let width = place.cols;
        let mut values = Vec::new();
        let of_block = width.div_ceil(cols);
        for (i, scales) in scales.chunks(of_block).enumerate() {
            let (begin, end) = (i * rows, ((i + 1) * rows).min(place.rows));
            fp8::decode(
                &bytes[begin * width..end * width],
                scales,
                [width, cols],
                &mut values,
            );
            engine.write_half(place.reborrow().row_range(begin, end), &values)?;
        }
        Ok(())
    }

    /// Bias vectors, one behind the other, in float32; names without `.bias`.
    pub(in crate::model) fn biases<E: Engine>(
        &self,
        engine: &E,
        names: &[String],
    ) -> Result<Float<E>, ModelError> {
        let mut values = Vec::new();
        for name in names {
            values.extend(self.numbers(&format!("{name}.bias"))?);
        }
        Ok(engine.upload_float(&values, values.len())?)
    }

    /// What a norm multiplies with, in float32; the name without `.weight`.
    pub(in crate::model) fn norm<E: Engine>(
        &self,
        engine: &E,
        name: &str,
    ) -> Result<Float<E>, ModelError> {
        let mut values = self.numbers(&format!("{name}.weight"))?;
        for value in &mut values {
            *value += self.config.norm_offset();
        }
        Ok(engine.upload_float(&values, values.len())?)
    }

    /// `[V, H]` the embedding.
    pub(in crate::model) fn embedding<E: Engine>(&self, engine: &E) -> Result<Half<E>, ModelError> {
        self.stacked(engine, &[self.name("embed_tokens")])
    }

    /// `[V, H]` the head, where it is not the embedding.
    pub(in crate::model) fn lm_head<E: Engine>(
        &self,
        engine: &E,
    ) -> Result<Option<Half<E>>, ModelError> {
        if self.config.tie_word_embeddings {
            return Ok(None);
        }
        self.matrices(engine, &[self.head.to_string()]).map(Some)
    }

    /// `[1, H]` the final norm.
    pub(in crate::model) fn final_norm<E: Engine>(
        &self,
        engine: &E,
    ) -> Result<Float<E>, ModelError> {
        self.norm(engine, &self.name("norm"))
    }
}
