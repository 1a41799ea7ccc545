//! Rotary position embedding (arXiv 2104.09864): one resolver of a config's fields, and the tables.

use serde_json::{Map, Value};

use super::error::Problems;
use crate::engine::{Engine, EngineError, Float, Rotary};

/// How positions turn the heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
}

/// Where a config may say it, the first winning unless two contradict each other.
const SOURCES: [&str; 2] = ["rope_parameters", "rope_scaling"];

impl Rope {
    /// Reads `rope_parameters`, `rope_scaling` and the flat fields; `default_theta` where none gives a base.
    pub(super) fn resolve(
        config: &Map<String, Value>,
        default_theta: Option<f64>,
        problems: &mut Problems,
    ) -> Self {
        let mut kind: Option<(String, String)> = None;
        let mut theta: Option<(String, f64)> = None;
        let mut tables: Vec<(&str, &Map<String, Value>)> = Vec::new();
        for source in SOURCES {
            match config.get(source) {
                None | Some(Value::Null) => {}
                Some(Value::Object(table)) => tables.push((source, table)),
                Some(other) => problems.add(format!("{source} is {other}, not an object")),
            }
        }
        for &(source, table) in &tables {
            if let Some((key, _)) = table.iter().find(|(_, value)| value.is_object()) {
                problems.add(format!(
                    "{source}.{key} is an object: rotary fields by layer type are not implemented; what works is one set for all layers"
                ));
            }
            for key in ["rope_type", "type"] {
                let Some(value) = table.get(key) else {
                    continue;
                };
                let at = format!("{source}.{key}");
                let Some(name) = value.as_str() else {
                    problems.add(format!("{at} is {value}, not a name"));
                    continue;
                };
                match &kind {
                    Some((first, other)) if other != name => {
                        problems.add(format!("{first} is `{other}` but {at} is `{name}`"));
                    }
                    Some(_) => {}
                    None => kind = Some((at, name.to_string())),
                }
            }
        }
        let whole = ("", config);
        for (source, table) in tables.iter().copied().chain([whole]) {
            let Some(value) = table.get("rope_theta").filter(|value| !value.is_null()) else {
                continue;
            };
            let at = [source, "rope_theta"].join(if source.is_empty() { "" } else { "." });
            let Some(number) = value.as_f64().filter(|&t| t.is_finite() && t > 0.0) else {
                problems.add(format!("{at} is {value}, not a positive number"));
                continue;
            };
            match &theta {
                Some((first, other)) if *other != number => {
                    problems.add(format!("{first} is {other} but {at} is {number}"));
                }
                Some(_) => {}
                None => theta = Some((at, number)),
            }
        }
        if let Some((at, name)) = kind.filter(|(_, name)| name != "default") {
            problems.add(format!(
                "{at} is `{name}`, which is not implemented; what works is `default`"
            ));
        } else {
            refuse_leftovers(&tables, problems);
        }
        for (source, table) in tables.iter().copied().chain([whole]) {
            let share = table.get("partial_rotary_factor").and_then(Value::as_f64);
            if share.is_some_and(|share| share != 1.0) {
                let at = if source.is_empty() {
                    "the config"
                } else {
                    source
                };
                problems.add(format!(
                    "partial_rotary_factor in {at} is not 1, which is not implemented"
                ));
            }
        }
        if theta.is_none() && default_theta.is_none() {
            problems.add("rope_theta is missing".to_string());
        }
        Self {
            theta: theta
                .map(|(_, theta)| theta)
                .or(default_theta)
                .unwrap_or(1.0),
        }
    }

    /// `theta^(−2i/dim)` for each pair of a head of size `dim`.
    fn inverse_frequencies(self, dim: usize) -> Vec<f32> {
        (0..dim / 2)
            .map(|i| {
                // The exponent and the power are float32 values in the reference; the power itself is rounded
                // once here as there.
                let exponent = (2 * i) as f32 / dim as f32;
                1.0 / (self.theta.powf(f64::from(exponent)) as f32)
            })
            .collect()
    }
}

/// The default type has a base and nothing else: a factor beside it means that another type was meant.
fn refuse_leftovers(tables: &[(&str, &Map<String, Value>)], problems: &mut Problems) {
    const KNOWN: [&str; 4] = ["rope_theta", "rope_type", "type", "partial_rotary_factor"];
    for (source, table) in tables {
        for (key, value) in table.iter() {
            if !KNOWN.contains(&key.as_str()) && !value.is_null() && !value.is_object() {
                problems.add(format!(
                    "{source}.{key} contradicts the default rotary type, which has no such field"
                ));
            }
        }
    }
}

/// Cosines and sines on an engine, `[positions, dim / 2]` each, made longer when asked.
pub struct RotaryTables<E: Engine> {
    rope: Rope,
    dim: usize,
    cos: Float<E>,
    sin: Float<E>,
}

impl<E: Engine> RotaryTables<E> {
    /// Tables for heads of size `dim` that reach to `positions`.
    pub fn new(engine: &E, rope: Rope, dim: usize, positions: usize) -> Result<Self, EngineError> {
        let inverse = rope.inverse_frequencies(dim);
        // The angle is a float32 product, as in the reference; only its functions are taken more exactly.
        let table = |f: fn(f64) -> f64| -> Vec<f32> {
            (0..positions)
                .flat_map(|p| {
                    inverse
                        .iter()
                        .map(move |&inv| f(f64::from(p as f32 * inv)) as f32)
                })
                .collect()
        };
        Ok(Self {
            rope,
            dim,
            cos: engine.upload_float(&table(f64::cos), dim / 2)?,
            sin: engine.upload_float(&table(f64::sin), dim / 2)?,
        })
    }

    /// Makes the tables reach to `positions`.
    pub fn reserve(&mut self, engine: &E, positions: usize) -> Result<(), EngineError> {
        if positions > self.cos.rows() || self.cos.cols() == 0 {
            *self = Self::new(engine, self.rope, self.dim, positions.next_power_of_two())?;
        }
        Ok(())
    }

    /// For the engine's operations.
    pub fn view(&self) -> Rotary<'_, E> {
        Rotary {
            cos: self.cos.view(),
            sin: self.sin.view(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::Cpu;

    fn resolve(text: &str) -> Result<f64, String> {
        let Value::Object(config) = serde_json::from_str(text).unwrap() else {
            panic!("an object")
        };
        let mut problems = Problems::default();
        let rope = Rope::resolve(&config, Some(10_000.0), &mut problems);
        if problems.0.is_empty() {
            Ok(rope.theta)
        } else {
            Err(problems.0.join("; "))
        }
    }

    #[test]
    fn every_form_of_the_default_type_is_read() {
        for (text, theta) in [
            ("{}", 10_000.0),
            (r#"{"rope_theta": 5e5, "rope_scaling": null}"#, 5e5),
            (
                r#"{"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}"#,
                1e6,
            ),
            (
                r#"{"rope_scaling": {"type": "default"}, "rope_theta": 7}"#,
                7.0,
            ),
            (
                r#"{"rope_parameters": {"rope_theta": 7.0, "type": "default", "rope_type": "default"}, "rope_theta": 7}"#,
                7.0,
            ),
        ] {
            assert_eq!(resolve(text), Ok(theta), "{text}");
        }
    }

    #[test]
    fn other_types_and_contradictions_are_refused() {
        for (text, says) in [
            (
                r#"{"rope_scaling": {"type": "yarn", "factor": 4}}"#,
                "rope_scaling.type is `yarn`, which is not implemented; what works is `default`",
            ),
            (
                r#"{"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}"#,
                "`llama3`",
            ),
            (
                r#"{"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear"}}"#,
                "rope_parameters.rope_type is `default` but rope_scaling.type is `linear`",
            ),
            (
                r#"{"rope_parameters": {"rope_theta": 5}, "rope_theta": 6}"#,
                "rope_parameters.rope_theta is 5 but rope_theta is 6",
            ),
            (
                r#"{"rope_scaling": {"factor": 2.0}}"#,
                "rope_scaling.factor contradicts the default",
            ),
            (r#"{"rope_theta": "x"}"#, "not a positive number"),
            (r#"{"rope_scaling": 3}"#, "not an object"),
            (
                r#"{"rope_parameters": {"full_attention": {"rope_theta": 5}}}"#,
                "by layer type",
            ),
            (
                r#"{"partial_rotary_factor": 0.5}"#,
                "partial_rotary_factor in the config is not 1",
            ),
        ] {
            let error = resolve(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn tables_hold_the_angles_and_grow() {
        let engine = Cpu::new(1).unwrap();
        let mut tables = RotaryTables::new(&engine, Rope { theta: 100.0 }, 4, 0).unwrap();
        tables.reserve(&engine, 5).unwrap();
        let cos = engine.download_float(tables.view().cos).unwrap();
        let sin = engine.download_float(tables.view().sin).unwrap();
        assert_eq!((cos.len(), sin.len()), (16, 16));
        // Frequencies 1 and 1/10 at position 3.
        for (i, angle) in [3.0f64, 0.3].into_iter().enumerate() {
            assert!((f64::from(cos[6 + i]) - angle.cos()).abs() < 1e-7);
            assert!((f64::from(sin[6 + i]) - angle.sin()).abs() < 1e-7);
        }
    }
}
