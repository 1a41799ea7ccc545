//! Cosines and sines on an engine.

use super::Rope;
use crate::engine::{Engine, EngineError, Float, Index, IndexView, Rotary};

/// Cosines and sines by position, `[positions, pairs]` each, made longer when asked.
pub struct RotaryTables<E: Engine> {
    rope: Rope,
    dim: usize,
    cos: Float<E>,
    sin: Float<E>,
}

/// Where each row of a pass finds its cosines and sines.
pub struct Turns<E: Engine> {
    rows: Index<E>,
    /// `[rows, pairs]` each, where the pass has frequencies of its own.
    own: Option<(Float<E>, Float<E>)>,
}

impl<E: Engine> Turns<E> {
    /// `[rows]` rows of the tables.
    pub fn rows(&self) -> IndexView<'_, E> {
        self.rows.view()
    }
}

impl<E: Engine> RotaryTables<E> {
    /// Tables for heads of size `dim` that reach to `positions`.
    pub fn new(engine: &E, rope: Rope, dim: usize, positions: usize) -> Result<Self, EngineError> {
        let inverse = rope.inverse_frequencies(dim, 0);
        let angles = (0..positions).flat_map(|p| inverse.iter().map(move |&inv| angle(p, inv)));
        let (cos, sin) = upload(engine, &rope, dim, angles)?;
        Ok(Self {
            rope,
            dim,
            cos,
            sin,
        })
    }

    /// Makes the tables reach to `positions`.
    pub fn reserve(&mut self, engine: &E, positions: usize) -> Result<(), EngineError> {
        if positions > self.cos.rows() || self.cos.cols() == 0 {
            *self = Self::new(engine, self.rope, self.dim, positions.next_power_of_two())?;
        }
        Ok(())
    }

    /// For the engine's operations, with positions as rows.
    pub fn view(&self) -> Rotary<'_, E> {
        Rotary {
            cos: self.cos.view(),
            sin: self.sin.view(),
        }
    }

    /// The turns of rows at `positions`, each in a sequence of `reach` tokens so far. The tables reach to all
    /// positions.
    ///
    /// A sequence that outgrows the `dynamic` type's limit turns by frequencies of its own length.
    pub fn turns(
        &self,
        engine: &E,
        positions: &[u32],
        reach: &[u32],
    ) -> Result<Turns<E>, EngineError> {
        if !reach.iter().any(|&r| self.rope.depends_on(r as usize)) {
            return Ok(Turns {
                rows: engine.upload_index(positions)?,
                own: None,
            });
        }
        let mut angles = Vec::new();
        let mut last: Option<(u32, Vec<f32>)> = None;
        for (&position, &reach) in positions.iter().zip(reach) {
            let (of, inverse) = last.get_or_insert_with(|| (reach, self.inverse(reach)));
            if *of != reach {
                (*of, *inverse) = (reach, self.inverse(reach));
            }
            angles.extend(inverse.iter().map(|&inv| angle(position as usize, inv)));
        }
        let rows: Vec<u32> = (0..positions.len() as u32).collect();
        Ok(Turns {
            rows: engine.upload_index(&rows)?,
            own: Some(upload(engine, &self.rope, self.dim, angles.into_iter())?),
        })
    }

    fn inverse(&self, reach: u32) -> Vec<f32> {
        self.rope.inverse_frequencies(self.dim, reach as usize)
    }

    /// For the engine's operations, with [`Turns::rows`] as rows.
    pub fn of<'a>(&'a self, turns: &'a Turns<E>) -> Rotary<'a, E> {
        match &turns.own {
            None => self.view(),
            Some((cos, sin)) => Rotary {
                cos: cos.view(),
                sin: sin.view(),
            },
        }
    }
}

/// A float32 product, as in the reference; only its functions are taken more exactly.
fn angle(position: usize, inverse: f32) -> f64 {
    f64::from(position as f32 * inverse)
}

/// Cosines and sines of `angles`, pairs after pairs.
fn upload<E: Engine>(
    engine: &E,
    rope: &Rope,
    dim: usize,
    angles: impl Iterator<Item = f64>,
) -> Result<(Float<E>, Float<E>), EngineError> {
    let by = rope.attention_factor();
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles
        .map(|angle| (angle.cos() as f32 * by, angle.sin() as f32 * by))
        .unzip();
    let pairs = rope.turned(dim) / 2;
    Ok((
        engine.upload_float(&cos, pairs)?,
        engine.upload_float(&sin, pairs)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::Cpu;
    use crate::model::rotary::Scaling;

    fn read(engine: &Cpu, tables: Rotary<'_, Cpu>) -> (Vec<f32>, Vec<f32>) {
        (
            engine.download_float(tables.cos).unwrap(),
            engine.download_float(tables.sin).unwrap(),
        )
    }

    #[test]
    fn tables_hold_the_angles_and_grow() {
        let engine = Cpu::new(1).unwrap();
        let mut tables = RotaryTables::new(&engine, Rope::of_theta(100.0), 4, 0).unwrap();
        tables.reserve(&engine, 5).unwrap();
        let (cos, sin) = read(&engine, tables.view());
        assert_eq!((cos.len(), sin.len()), (16, 16));
        // Frequencies 1 and 1/10 at position 3.
        for (i, angle) in [3.0f64, 0.3].into_iter().enumerate() {
            assert!((f64::from(cos[6 + i]) - angle.cos()).abs() < 1e-7);
            assert!((f64::from(sin[6 + i]) - angle.sin()).abs() < 1e-7);
        }
    }

    #[test]
    fn half_a_head_has_half_the_pairs() {
        let engine = Cpu::new(1).unwrap();
        let rope = Rope {
            partial: 0.5,
            ..Rope::of_theta(100.0)
        };
        let tables = RotaryTables::new(&engine, rope, 8, 2).unwrap();
        let whole = RotaryTables::new(&engine, Rope::of_theta(100.0), 4, 2).unwrap();
        assert_eq!(tables.view().cos.cols, 2);
        assert_eq!(read(&engine, tables.view()), read(&engine, whole.view()));
    }

    #[test]
    fn a_long_sequence_turns_by_its_own_length_and_leaves_its_neighbour_alone() {
        let engine = Cpu::new(1).unwrap();
        let rope = Rope {
            scaling: Scaling::Dynamic {
                factor: 2.0,
                original: 4,
            },
            ..Rope::of_theta(100.0)
        };
        let tables = RotaryTables::new(&engine, rope, 8, 16).unwrap();
        let short = tables.turns(&engine, &[0, 3], &[4, 4]).unwrap();
        assert_eq!(engine.download_index(short.rows()).unwrap(), [0, 3]);
        let mixed = tables.turns(&engine, &[3, 3], &[4, 6]).unwrap();
        assert_eq!(engine.download_index(mixed.rows()).unwrap(), [0, 1]);
        let (cos, _) = read(&engine, tables.of(&mixed));
        let (of_table, _) = read(&engine, tables.view());
        assert_eq!(cos[..4], of_table[12..16]);
        assert_eq!(cos[4], of_table[12], "the highest frequency stays");
        assert_ne!(cos[5..], of_table[13..16]);
    }
}
