//! One resolver of a config's rotary fields: `rope_parameters`, `rope_scaling` and the flat ones.

use serde_json::{Map, Value};

use super::{Rope, Scaling};
use crate::model::error::Problems;

/// What a family takes where its config is silent.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::model) struct RopeDefaults {
    /// Base of the frequencies.
    pub theta: Option<f64>,
    /// Base in layers with a window, where these have one of their own.
    pub local_theta: Option<f64>,
    /// Whether a part of each head may pass through unturned.
    pub partial: bool,
    /// `max_position_embeddings`.
    pub positions: usize,
}

/// The rotary embeddings of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::model) struct Ropes {
    /// Of all layers, or of those without a window.
    pub full: Rope,
    /// Of layers with a window, where they have their own.
    pub local: Option<Rope>,
}

const NESTED: [&str; 2] = ["full_attention", "sliding_attention"];
const TYPES: &str = "default, linear, dynamic, llama3 and yarn";

impl Ropes {
    /// Reads the rotary fields of `config`. Sources that contradict each other are a problem.
    pub(in crate::model) fn resolve(
        config: &Map<String, Value>,
        defaults: RopeDefaults,
        problems: &mut Problems,
    ) -> Self {
        let mut full = Sources {
            tables: Vec::new(),
            flat: config,
            theta_key: "rope_theta",
            problems,
        };
        let mut local = Vec::new();
        for source in ["rope_parameters", "rope_scaling"] {
            match config.get(source) {
                None | Some(Value::Null) => {}
                Some(Value::Object(table)) => {
                    if !table.values().any(Value::is_object) {
                        full.tables.push((source.to_string(), table));
                        continue;
                    }
                    for (key, value) in table {
                        let at = format!("{source}.{key}");
                        match (NESTED.iter().position(|kind| kind == key), value) {
                            (Some(0), Value::Object(table)) if defaults.local_theta.is_some() => {
                                full.tables.push((at, table));
                            }
                            (Some(1), Value::Object(table)) if defaults.local_theta.is_some() => {
                                local.push((at, table));
                            }
                            (Some(_), Value::Null) => {}
                            _ => full.problems.add(format!(
                                "{at}: rotary fields by layer type are not implemented for this family; what works is one set for all layers"
                            )),
                        }
                    }
                }
                Some(other) => full
                    .problems
                    .add(format!("{source} is {other}, not an object")),
            }
        }
        let rope = full.rope(defaults.theta, &defaults);
        let local = defaults.local_theta.map(|theta| {
            let mut sources = Sources {
                tables: local,
                flat: config,
                theta_key: "rope_local_base_freq",
                problems: full.problems,
            };
            sources.rope(Some(theta), &defaults)
        });
        Self { full: rope, local }
    }
}

/// The tables that speak of one rotary embedding, the first winning unless two contradict each other.
struct Sources<'a> {
    tables: Vec<(String, &'a Map<String, Value>)>,
    flat: &'a Map<String, Value>,
    /// The flat field of the base.
    theta_key: &'static str,
    problems: &'a mut Problems,
}

impl Sources<'_> {
    fn rope(&mut self, default_theta: Option<f64>, defaults: &RopeDefaults) -> Rope {
        let known = self.problems.0.len();
        let theta = self.theta();
        if theta.is_none() && default_theta.is_none() && self.problems.0.len() == known {
            self.problems.add(format!("{} is missing", self.theta_key));
        }
        let theta = theta.or(default_theta).unwrap_or(1.0);
        Rope {
            theta,
            partial: self.partial(defaults),
            scaling: self.scaling(theta, defaults.positions),
        }
    }

    /// The value of `key` in the tables, and, where it is also a flat field, under `flat` there.
    fn find(&mut self, key: &str, flat: Option<&str>) -> Option<(String, Value)> {
        let mut found: Option<(String, Value)> = None;
        let tables = self
            .tables
            .iter()
            .map(|(at, table)| (format!("{at}.{key}"), *table, key));
        let flat = flat.map(|key| (key.to_string(), self.flat, key));
        for (at, table, key) in tables.chain(flat) {
            let Some(value) = table.get(key).filter(|value| !value.is_null()) else {
                continue;
            };
            match &found {
                Some((first, other)) if !same(other, value) => {
                    self.problems
                        .add(format!("{first} is {other} but {at} is {value}"));
                }
                Some(_) => {}
                None => found = Some((at, value.clone())),
            }
        }
        found
    }

    /// A number that `fits`.
    fn number(
        &mut self,
        key: &str,
        flat: Option<&str>,
        what: &str,
        fits: impl Fn(f64) -> bool,
    ) -> Option<f64> {
        let (at, value) = self.find(key, flat)?;
        let number = value.as_f64().filter(|&x| x.is_finite() && fits(x));
        if number.is_none() {
            self.problems.add(format!("{at} is {value}, not {what}"));
        }
        number
    }

    fn positive(&mut self, key: &str) -> Option<f64> {
        self.number(key, None, "a positive number", |x| x > 0.0)
    }

    /// A number that a type cannot do without; 1 after a problem.
    fn required(&mut self, kind: &str, key: &str) -> f64 {
        let known = self.problems.0.len();
        let number = self.positive(key);
        if number.is_none() && self.problems.0.len() == known {
            self.problems.add(format!(
                "{key} is missing, which the rotary type `{kind}` needs"
            ));
        }
        number.unwrap_or(1.0)
    }

    fn theta(&mut self) -> Option<f64> {
        let flat = self.theta_key;
        self.number("rope_theta", Some(flat), "a positive number", |x| x > 0.0)
    }

    fn partial(&mut self, defaults: &RopeDefaults) -> f64 {
        const KEY: &str = "partial_rotary_factor";
        let share = self
            .number(
                KEY,
                Some(KEY),
                "a share of a head, above 0 and up to 1",
                |x| x > 0.0 && x <= 1.0,
            )
            .unwrap_or(1.0);
        if share != 1.0 && !defaults.partial {
            self.problems.add(format!(
                "{KEY} is {share}, but heads of this family turn whole"
            ));
        }
        share
    }

    /// The type's name, and where it stands.
    fn kind(&mut self) -> Option<(String, String)> {
        let mut kind: Option<(String, String)> = None;
        for (source, table) in &self.tables {
            for key in ["rope_type", "type"] {
                let Some(value) = table.get(key).filter(|value| !value.is_null()) else {
                    continue;
                };
                let at = format!("{source}.{key}");
                let Some(name) = value.as_str() else {
                    self.problems.add(format!("{at} is {value}, not a name"));
                    continue;
                };
                match &kind {
                    Some((first, other)) if other != name => {
                        self.problems
                            .add(format!("{first} is `{other}` but {at} is `{name}`"));
                    }
                    Some(_) => {}
                    None => kind = Some((at, name.to_string())),
                }
            }
        }
        kind
    }

    fn scaling(&mut self, theta: f64, positions: usize) -> Scaling {
        let kind = self.kind();
        let name = kind.as_ref().map_or("default", |(_, name)| name.as_str());
        let keys: &[&str] = match name {
            "default" => &[],
            "linear" => &["factor"],
            "dynamic" => &["factor", ORIGINAL],
            "llama3" => &["factor", "low_freq_factor", "high_freq_factor", ORIGINAL],
            "yarn" => &[
                "factor",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                ORIGINAL,
                "truncate",
            ],
            _ => {
                let at = kind.as_ref().map_or("", |(at, _)| at.as_str());
                self.problems.add(format!(
                    "{at} is `{name}`, which is not implemented; what works is {TYPES}"
                ));
                return Scaling::Default;
            }
        };
        self.refuse_leftovers(name, keys);
        match name {
            "linear" => Scaling::Linear {
                factor: self.required(name, "factor"),
            },
            "dynamic" => {
                let original = self.original(positions);
                if original != positions {
                    self.problems.add(format!(
                        "{ORIGINAL} is {original} but max_position_embeddings is {positions}, and the rotary type `dynamic` grows from the latter; make them equal"
                    ));
                }
                Scaling::Dynamic {
                    factor: self.required(name, "factor"),
                    original: positions,
                }
            }
            "llama3" => {
                let [low, high] =
                    ["low_freq_factor", "high_freq_factor"].map(|key| self.required(name, key));
                if high < low || (high == low && self.problems.0.is_empty()) {
                    self.problems.add(format!(
                        "high_freq_factor {high} is not above low_freq_factor {low}"
                    ));
                }
                Scaling::Llama3 {
                    factor: self.required(name, "factor"),
                    low,
                    high,
                    original: self.original(positions),
                }
            }
            "yarn" => self.yarn(theta, positions),
            _ => Scaling::Default,
        }
    }

    fn yarn(&mut self, theta: f64, positions: usize) -> Scaling {
        if theta <= 1.0 && self.problems.0.is_empty() {
            self.problems.add(format!(
                "{} is {theta}, but the rotary type `yarn` needs one above 1",
                self.theta_key
            ));
        }
        let factor = self.required("yarn", "factor");
        let mut scale = |key| self.number(key, None, "a number from 0", |x| x >= 0.0);
        let (given, own, all) = (
            scale("attention_factor"),
            scale("mscale"),
            scale("mscale_all_dim"),
        );
        let grown = |by: f64| {
            if factor <= 1.0 {
                1.0
            } else {
                0.1 * by * factor.ln() + 1.0
            }
        };
        let inferred = match (own.filter(|&m| m != 0.0), all.filter(|&m| m != 0.0)) {
            (Some(own), Some(all)) => grown(own) / grown(all),
            _ => grown(1.0),
        };
        let truncate = match self.find("truncate", None) {
            None => true,
            Some((_, Value::Bool(truncate))) => truncate,
            Some((at, other)) => {
                self.problems
                    .add(format!("{at} is {other}, not true or false"));
                true
            }
        };
        Scaling::Yarn {
            factor,
            attention_factor: given.unwrap_or(inferred),
            beta_fast: self.positive("beta_fast").unwrap_or(32.0),
            beta_slow: self.positive("beta_slow").unwrap_or(1.0),
            original: self.original(positions),
            truncate,
        }
    }

    fn original(&mut self, positions: usize) -> usize {
        let whole = |x: f64| x >= 1.0 && x.fract() == 0.0 && x <= f64::from(u32::MAX);
        self.number(ORIGINAL, Some(ORIGINAL), "a whole number from 1", whole)
            .map_or(positions, |number| number as usize)
    }

    /// A field that the type does not have means that another type was meant, or a change that is not known
    /// here.
    fn refuse_leftovers(&mut self, kind: &str, keys: &[&str]) {
        const ALWAYS: [&str; 4] = ["rope_theta", "rope_type", "type", "partial_rotary_factor"];
        for (source, table) in &self.tables {
            for (key, value) in table.iter() {
                if !ALWAYS.contains(&key.as_str())
                    && !keys.contains(&key.as_str())
                    && !value.is_null()
                {
                    self.problems.add(format!(
                        "{source}.{key} contradicts the {kind} rotary type, which has no such field"
                    ));
                }
            }
        }
    }
}

const ORIGINAL: &str = "original_max_position_embeddings";

/// Whether two values say the same; 1 and 1.0 do.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: RopeDefaults = RopeDefaults {
        theta: Some(10_000.0),
        local_theta: None,
        partial: false,
        positions: 64,
    };

    fn with(defaults: RopeDefaults, text: &str) -> Result<Ropes, String> {
        let Value::Object(config) = serde_json::from_str(text).unwrap() else {
            panic!("an object")
        };
        let mut problems = Problems::default();
        let ropes = Ropes::resolve(&config, defaults, &mut problems);
        if problems.0.is_empty() {
            Ok(ropes)
        } else {
            Err(problems.0.join("; "))
        }
    }

    fn resolve(text: &str) -> Result<Rope, String> {
        with(DEFAULTS, text).map(|ropes| ropes.full)
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
            (r#"{"partial_rotary_factor": 1.0}"#, 10_000.0),
        ] {
            assert_eq!(resolve(text), Ok(Rope::of_theta(theta)), "{text}");
        }
    }

    #[test]
    fn every_type_is_read_in_either_form() {
        let types = [
            (r#""linear", "factor": 2"#, Scaling::Linear { factor: 2.0 }),
            (
                r#""dynamic", "factor": 2.5, "original_max_position_embeddings": 64"#,
                Scaling::Dynamic {
                    factor: 2.5,
                    original: 64,
                },
            ),
            (
                r#""llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32"#,
                Scaling::Llama3 {
                    factor: 8.0,
                    low: 1.0,
                    high: 4.0,
                    original: 32,
                },
            ),
            (
                r#""yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 20, "truncate": false, "attention_factor": 0.5"#,
                Scaling::Yarn {
                    factor: 4.0,
                    attention_factor: 0.5,
                    beta_fast: 20.0,
                    beta_slow: 1.0,
                    original: 16,
                    truncate: false,
                },
            ),
        ];
        for (fields, scaling) in types {
            for text in [
                format!(r#"{{"rope_scaling": {{"type": {fields}}}, "rope_theta": 7}}"#),
                format!(r#"{{"rope_scaling": {{"rope_type": {fields}}}, "rope_theta": 7}}"#),
                format!(r#"{{"rope_parameters": {{"rope_theta": 7, "rope_type": {fields}}}}}"#),
                format!(
                    r#"{{"rope_parameters": {{"rope_theta": 7, "rope_type": {fields}}}, "rope_scaling": {{"type": {fields}}}, "rope_theta": 7.0}}"#
                ),
            ] {
                let expected = Rope {
                    scaling,
                    ..Rope::of_theta(7.0)
                };
                assert_eq!(resolve(&text), Ok(expected), "{text}");
            }
        }
    }

    #[test]
    fn yarn_infers_its_attention_factor() {
        let attention_factor = |more: &str| {
            let text = format!(r#"{{"rope_scaling": {{"type": "yarn", "factor": 4{more}}}}}"#);
            match resolve(&text).unwrap().scaling {
                Scaling::Yarn {
                    attention_factor,
                    original,
                    ..
                } => {
                    assert_eq!(
                        original, 64,
                        "max_position_embeddings where nothing says it"
                    );
                    attention_factor
                }
                other => panic!("{other:?}"),
            }
        };
        let grown = |by: f64| 0.1 * by * 4f64.ln() + 1.0;
        assert_eq!(attention_factor(""), grown(1.0));
        assert_eq!(
            attention_factor(r#", "mscale": 0.7, "mscale_all_dim": 0.5"#),
            grown(0.7) / grown(0.5)
        );
        assert_eq!(
            attention_factor(r#", "mscale": 0.7, "mscale_all_dim": 0"#),
            grown(1.0)
        );
    }

    #[test]
    fn a_part_of_a_head_turns_where_the_family_has_it() {
        let text = r#"{"partial_rotary_factor": 0.5}"#;
        let partial = RopeDefaults {
            partial: true,
            ..DEFAULTS
        };
        assert_eq!(with(partial, text).unwrap().full.partial, 0.5);
        let error = resolve(text).unwrap_err();
        assert!(error.contains("heads of this family turn whole"), "{error}");
    }

    #[test]
    fn layers_with_a_window_may_have_their_own() {
        let local = RopeDefaults {
            theta: Some(1e6),
            local_theta: Some(1e4),
            ..DEFAULTS
        };
        let linear = Scaling::Linear { factor: 8.0 };
        for (text, full, theta, local_theta) in [
            ("{}", Scaling::Default, 1e6, 1e4),
            (
                r#"{"rope_theta": 5, "rope_local_base_freq": 7, "rope_scaling": {"rope_type": "linear", "factor": 8}}"#,
                linear,
                5.0,
                7.0,
            ),
            (
                r#"{"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 5}, "sliding_attention": {"rope_type": "default", "rope_theta": 7}}}"#,
                linear,
                5.0,
                7.0,
            ),
        ] {
            let ropes = with(local, text).unwrap();
            assert_eq!(ropes.full.scaling, full, "{text}");
            assert_eq!(ropes.full.theta, theta, "{text}");
            assert_eq!(ropes.local, Some(Rope::of_theta(local_theta)), "{text}");
        }
    }

    #[test]
    fn other_types_and_contradictions_are_refused() {
        for (text, says) in [
            (
                r#"{"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}"#,
                "rope_scaling.type is `longrope`, which is not implemented; what works is default, linear, dynamic, llama3 and yarn",
            ),
            (
                r#"{"rope_scaling": {"type": "linear"}}"#,
                "factor is missing, which the rotary type `linear` needs",
            ),
            (
                r#"{"rope_scaling": {"type": "linear", "factor": -1}}"#,
                "rope_scaling.factor is -1, not a positive number",
            ),
            (
                r#"{"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 2}}"#,
                "rope_scaling.beta_fast contradicts the linear rotary type",
            ),
            (
                r#"{"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}}"#,
                "high_freq_factor 1 is not above low_freq_factor 4",
            ),
            (
                r#"{"rope_scaling": {"type": "dynamic", "factor": 2, "original_max_position_embeddings": 32}}"#,
                "original_max_position_embeddings is 32 but max_position_embeddings is 64",
            ),
            (
                r#"{"rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_scaling": {"type": "linear", "factor": 3}}"#,
                "rope_parameters.factor is 2 but rope_scaling.factor is 3",
            ),
            (
                r#"{"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32}, "original_max_position_embeddings": 16}"#,
                "rope_scaling.original_max_position_embeddings is 32 but original_max_position_embeddings is 16",
            ),
            (
                r#"{"rope_scaling": {"type": "yarn", "factor": 4}, "rope_theta": 1}"#,
                "needs one above 1",
            ),
            (
                r#"{"rope_scaling": {"type": "yarn", "factor": 4, "truncate": 1}}"#,
                "rope_scaling.truncate is 1, not true or false",
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
                r#"{"partial_rotary_factor": 0}"#,
                "partial_rotary_factor is 0, not a share of a head",
            ),
        ] {
            let error = resolve(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
