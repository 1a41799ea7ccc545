//! How the rows of a pass see one another.

use crate::engine::{
    CacheMask, CausalMask, Engine, Half, HalfMut, HalfView, Heads, IndexView, Scores,
};
use crate::model::error::ModelError;

/// What a layer hands to its attention.
pub(in crate::model) struct NewRows<'a, E: Engine> {
    pub heads: Heads,
    pub scores: Scores,
    pub q: HalfView<'a, E>,
    pub k: HalfView<'a, E>,
    pub v: HalfView<'a, E>,
    pub window: Option<usize>,
}

/// How a layer's rows see one another.
pub(in crate::model) trait Attend<E: Engine> {
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
pub(in crate::model) struct Packed<'a, E: Engine> {
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
        Ok(engine.causal_attention(new.heads, new.scores, new.q, new.k, new.v, &mask, out)?)
    }
}

/// Where new keys and values go in a cache.
pub(in crate::model) enum CacheRows<'a, E: Engine> {
    /// In a row, from here on.
    From(usize),
    /// Each to its own place.
    Scattered(IndexView<'a, E>),
}

/// New rows behind cached ones; each layer's keys and values join its cache first.
pub(in crate::model) struct Cached<'a, E: Engine> {
    pub keys: &'a mut [Half<E>],
    pub values: &'a mut [Half<E>],
    pub rows: CacheRows<'a, E>,
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
        for (new, cache) in [(new.k, &mut *keys), (new.v, &mut *values)] {
            match self.rows {
                CacheRows::From(begin) => {
                    let place = cache.view_mut().row_range(begin, begin + new.rows);
                    engine.copy_half(new, place)?;
                }
                CacheRows::Scattered(rows) => engine.scatter(new, rows, cache.view_mut())?,
            }
        }
        let mask = CacheMask {
            window: new.window,
            ..self.mask
        };
        Ok(engine.cache_attention(
            new.heads,
            new.scores,
            new.q,
            keys.view(),
            values.view(),
            &mask,
            out,
        )?)
    }
}
