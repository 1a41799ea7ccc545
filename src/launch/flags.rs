//! The one table of options: flag, config key, help, default and range come from the same line.
//!
//! A flag is first kept as the words that were given ([`Raw`]) and where; [`Raw::check`] then turns all of
//! them into values at once, so that every mistake is reported in one go.

use std::collections::BTreeMap;
use std::fmt;

/// What the words of an option must be.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// On or off; takes no value on the command line.
    Switch,
    /// A whole number in `min..=max`.
    Int {
        /// Smallest accepted.
        min: u64,
        /// Largest accepted.
        max: u64,
    },
    /// A finite number from `min` (excluded with `open`) to `max`.
    Real {
        /// Smallest accepted, or the bound itself with `open`.
        min: f64,
        /// Largest accepted.
        max: f64,
        /// `min` itself is refused.
        open: bool,
    },
    /// One of these words.
    Word(&'static [&'static str]),
    /// Any text that is not empty.
    Text,
    /// Whole numbers separated by commas.
    Ints,
    /// Two counts of at least one, as `2:2`.
    Pair,
    /// Seconds, or a number followed by s, m, h or d.
    Time,
    /// `KEY=VALUE`.
    KeyValue,
    /// `ROLE:RANK` separated by commas.
    Workers,
}

/// Where an option's value comes from when it is not given.
#[derive(Clone, Copy, Debug)]
pub enum Fallback {
    /// These words.
    Is(&'static str),
    /// The first words, or the second in the built-in demo.
    OrDemo(&'static str, &'static str),
    /// Nothing: found out later, in these words.
    Later(&'static str),
}

/// One option.
#[derive(Debug)]
pub struct Flag {
    /// Its name, without dashes; also the key in a config file.
    pub name: &'static str,
    /// What the value is called in the help.
    pub value: &'static str,
    /// What is accepted.
    pub kind: Kind,
    /// May be given several times, and with several values at once.
    pub many: bool,
    /// Its default.
    pub default: Fallback,
    /// One line about it.
    pub help: &'static str,
}

impl Flag {
    /// An option that is given at most once.
    pub const fn new(
        name: &'static str,
        value: &'static str,
        kind: Kind,
        default: Fallback,
        help: &'static str,
    ) -> Self {
        Self {
            name,
            value,
            kind,
            many: false,
            default,
            help,
        }
    }

    /// The same, given any number of times.
    pub const fn many(mut self) -> Self {
        self.many = true;
        self
    }

    /// The help line: what it does, its default, and what happens outside its range.
    pub fn help_text(&self) -> String {
        let default = match self.default {
            Fallback::Is("") => String::new(),
            Fallback::Is(words) => format!(" [default: {words}]"),
            Fallback::OrDemo(words, demo) => format!(" [default: {words}; demo: {demo}]"),
            Fallback::Later(words) => format!(" [default: {words}]"),
        };
        match self.kind.range() {
            Some(range) => format!("{}{default} [{range}; else refused]", self.help),
            None => format!("{}{default}", self.help),
        }
    }
}

impl Kind {
    /// The accepted values in words, if they are fewer than everything.
    fn range(&self) -> Option<String> {
        match *self {
            Self::Switch
            | Self::Text
            | Self::Time
            | Self::KeyValue
            | Self::Pair
            | Self::Workers
            | Self::Ints => None,
            Self::Int { min, max: u64::MAX } => Some(format!("{min} or more")),
            Self::Int { min, max } if min == max => Some(format!("only {min}")),
            Self::Int { min, max } => Some(format!("{min} to {max}")),
            Self::Real { min, max, open } => {
                let from = if open { "above" } else { "from" };
                Some(if max == f64::INFINITY {
                    format!("{from} {min}")
                } else {
                    format!("{from} {min} to {max}")
                })
            }
            Self::Word(words) => Some(words.join(", ")),
        }
    }

    /// Reads one value.
    ///
    /// # Errors
    ///
    /// What is wrong with `text`, as the end of a sentence that begins with the option.
    pub fn read(&self, text: &str) -> Result<Value, String> {
        let wanted = |what: &str| format!("`{text}` is not {what}");
        match *self {
            Self::Switch => match text {
                "true" => Ok(Value::Switch(true)),
                "false" => Ok(Value::Switch(false)),
                _ => Err(wanted("true or false")),
            },
            Self::Int { min, max } => {
                let number: u64 = digits(text).ok_or_else(|| wanted("a whole number"))?;
                if (min..=max).contains(&number) {
                    Ok(Value::Int(number))
                } else {
                    Err(format!(
                        "{number} is out of range ({})",
                        self.range().unwrap_or_default()
                    ))
                }
            }
            Self::Real { min, max, open } => {
                let number: f64 = text.parse().map_err(|_| wanted("a number"))?;
                let inside = number.is_finite()
                    && number <= max
                    && if open { number > min } else { number >= min };
                if inside {
                    Ok(Value::Real(number))
                } else {
                    Err(format!(
                        "{text} is out of range ({})",
                        self.range().unwrap_or_default()
                    ))
                }
            }
            Self::Word(words) => {
                if words.contains(&text) {
                    Ok(Value::Text(text.to_owned()))
                } else {
                    Err(wanted(&format!("one of {}", words.join(", "))))
                }
            }
            Self::Text if text.is_empty() => Err("is empty".to_owned()),
            Self::Text => Ok(Value::Text(text.to_owned())),
            Self::Ints => text
                .split(',')
                .map(|part| digits(part.trim()).and_then(|n| u32::try_from(n).ok()))
                .collect::<Option<Vec<_>>>()
                .map(Value::Ints)
                .ok_or_else(|| wanted("a list of whole numbers such as 1,9,17")),
            Self::Pair => text
                .split_once(':')
                .and_then(|(a, b)| Some((count(a)?, count(b)?)))
                .map(|(a, b)| Value::Pair(a, b))
                .ok_or_else(|| wanted("TARGETS:DRAFTERS, two counts from 1 to 4096 such as 2:2")),
            Self::Time => seconds(text).map(Value::Int).ok_or_else(|| {
                wanted("a time of at least a second such as 90, 90s, 30m, 2h or 1d")
            }),
            Self::KeyValue => match text.split_once('=') {
                Some((key, value)) if !key.is_empty() => {
                    Ok(Value::KeyValue(key.to_owned(), value.to_owned()))
                }
                _ => Err(wanted("KEY=VALUE")),
            },
            Self::Workers => text
                .split(',')
                .map(|part| part.trim().parse())
                .collect::<Result<Vec<_>, _>>()
                .map(Value::Workers)
                .map_err(|_| wanted("a list of ROLE:RANK such as target:0,drafter:1")),
        }
    }
}

/// A whole number; `_` and `,`-free, but `16_384` and `16384` are both fine.
fn digits(text: &str) -> Option<u64> {
    let plain: String = text.chars().filter(|c| *c != '_').collect();
    let all_digits = !plain.is_empty() && plain.bytes().all(|b| b.is_ascii_digit());
    if all_digits { plain.parse().ok() } else { None }
}

/// One side of `T:D`.
fn count(text: &str) -> Option<usize> {
    let number = digits(text)?;
    (1..=4096).contains(&number).then_some(number as usize)
}

/// A time in whole seconds, at least one.
fn seconds(text: &str) -> Option<u64> {
    let (number, unit) = match text.chars().last()? {
        's' => (&text[..text.len() - 1], 1),
        'm' => (&text[..text.len() - 1], 60),
        'h' => (&text[..text.len() - 1], 3600),
        'd' => (&text[..text.len() - 1], 86_400),
        _ => (text, 1),
    };
    digits(number)?.checked_mul(unit).filter(|s| *s > 0)
}

/// A checked value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Of [`Kind::Switch`].
    Switch(bool),
    /// Of [`Kind::Int`] and [`Kind::Time`].
    Int(u64),
    /// Of [`Kind::Real`].
    Real(f64),
    /// Of [`Kind::Word`] and [`Kind::Text`].
    Text(String),
    /// Of [`Kind::Ints`].
    Ints(Vec<u32>),
    /// Of [`Kind::Pair`].
    Pair(usize, usize),
    /// Of [`Kind::KeyValue`].
    KeyValue(String, String),
    /// Of [`Kind::Workers`].
    Workers(Vec<crate::control::WorkerName>),
}

/// Where some words were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The command line.
    Flag,
    /// The config file of this name.
    Config(String),
    /// The table.
    Table,
}

/// The words given for each option, before any of them is understood.
#[derive(Clone, Debug, Default)]
pub struct Raw {
    given: BTreeMap<&'static str, (Source, Vec<String>)>,
}

impl Raw {
    /// Keeps `words` for `flag`, unless a source that wins already gave some.
    pub fn give(&mut self, flag: &'static Flag, source: Source, words: Vec<String>) {
        self.given.entry(flag.name).or_insert((source, words));
    }

    /// Whether anything was given for `name`.
    pub fn has(&self, name: &str) -> bool {
        self.given.contains_key(name)
    }

    /// Understands everything: what was given, and the table's default for the rest.
    pub fn check(&self, flags: impl Iterator<Item = &'static Flag>, demo: bool) -> Values {
        let mut values = Values {
            known: BTreeMap::new(),
            mistakes: Vec::new(),
        };
        for flag in flags {
            let default = match flag.default {
                Fallback::OrDemo(_, words) if demo => words,
                Fallback::Is(words) | Fallback::OrDemo(words, _) => words,
                Fallback::Later(_) => "",
            };
            let table = (
                Source::Table,
                if default.is_empty() {
                    Vec::new()
                } else {
                    vec![default.to_owned()]
                },
            );
            let (source, words) = self.given.get(flag.name).unwrap_or(&table);
            let mut read = Vec::new();
            for word in words {
                match flag.kind.read(word) {
                    Ok(value) => read.push(value),
                    Err(what) => values.mistakes.push(Mistake::of(flag.name, source, what)),
                }
            }
            values.known.insert(flag.name, (source.clone(), read));
        }
        values
    }
}

/// One thing that is wrong with what was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake(pub String);

impl Mistake {
    /// About the option `name`, as it was written in `source`.
    pub fn of(name: &str, source: &Source, what: impl fmt::Display) -> Self {
        Self(match source {
            Source::Flag | Source::Table => format!("--{name}: {what}"),
            Source::Config(file) => format!("{file}: {name}: {what}"),
        })
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The checked value of every option, and what could not be understood.
#[derive(Debug)]
pub struct Values {
    known: BTreeMap<&'static str, (Source, Vec<Value>)>,
    /// Everything wrong so far.
    pub mistakes: Vec<Mistake>,
}

impl Values {
    fn all(&self, name: &str) -> &[Value] {
        let (_, values) = self
            .known
            .get(name)
            .unwrap_or_else(|| panic!("--{name} is not in the table"));
        values
    }

    /// Adds a mistake about the option `name`, said as its source wrote it.
    pub fn wrong(&mut self, name: &str, what: impl fmt::Display) {
        let source = self
            .known
            .get(name)
            .map_or(&Source::Table, |(source, _)| source);
        self.mistakes.push(Mistake::of(name, source, what));
    }

    /// Whether the option was given at all, by flag or file.
    pub fn given(&self, name: &str) -> bool {
        self.known
            .get(name)
            .is_some_and(|(source, _)| *source != Source::Table)
    }

    /// A switch.
    pub fn switch(&self, name: &str) -> bool {
        matches!(self.all(name), [Value::Switch(true)])
    }

    /// A whole number or a time in seconds.
    pub fn int(&self, name: &str) -> Option<u64> {
        match self.all(name) {
            [Value::Int(number)] => Some(*number),
            _ => None,
        }
    }

    /// A number.
    pub fn real(&self, name: &str) -> Option<f64> {
        match self.all(name) {
            [Value::Real(number)] => Some(*number),
            _ => None,
        }
    }

    /// Every number of an option that may be given several times.
    pub fn reals(&self, name: &str) -> Vec<f64> {
        let real = |value: &Value| match value {
            Value::Real(number) => Some(*number),
            _ => None,
        };
        self.all(name).iter().filter_map(real).collect()
    }

    /// A text or a word.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.all(name) {
            [Value::Text(text)] => Some(text),
            _ => None,
        }
    }

    /// All texts of an option that may be repeated.
    pub fn texts(&self, name: &str) -> Vec<String> {
        let text = |value: &Value| match value {
            Value::Text(text) => Some(text.clone()),
            _ => None,
        };
        self.all(name).iter().filter_map(text).collect()
    }

    /// A list of whole numbers, all words together where it may be repeated.
    pub fn ints(&self, name: &str) -> Option<Vec<u32>> {
        let all = self.all(name);
        let numbers = |value: &Value| match value {
            Value::Ints(numbers) => numbers.clone(),
            _ => Vec::new(),
        };
        (!all.is_empty()).then(|| all.iter().flat_map(numbers).collect())
    }

    /// `T:D`.
    pub fn pair(&self, name: &str) -> Option<(usize, usize)> {
        match self.all(name) {
            [Value::Pair(a, b)] => Some((*a, *b)),
            _ => None,
        }
    }

    /// All `KEY=VALUE`s.
    pub fn key_values(&self, name: &str) -> Vec<(String, String)> {
        let pair = |value: &Value| match value {
            Value::KeyValue(key, value) => Some((key.clone(), value.clone())),
            _ => None,
        };
        self.all(name).iter().filter_map(pair).collect()
    }

    /// All workers named.
    pub fn workers(&self, name: &str) -> Vec<crate::control::WorkerName> {
        let names = |value: &Value| match value {
            Value::Workers(names) => names.clone(),
            _ => Vec::new(),
        };
        self.all(name).iter().flat_map(names).collect()
    }
}

/// Options under one heading of the help.
#[derive(Debug)]
pub struct Group {
    /// The heading.
    pub heading: &'static str,
    /// In the order of the help.
    pub flags: &'static [Flag],
}

/// All options of some groups.
pub fn flags(groups: &'static [Group]) -> impl Iterator<Item = &'static Flag> {
    groups.iter().flat_map(|group| group.flags)
}
