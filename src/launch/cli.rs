//! From the words of the command line and of a config file to what is asked for.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::LazyLock;

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::flags::{self, Flag, Group, Kind, Mistake, Raw, Source};
use super::options::{EvalOptions, ExportOptions, Options};
use super::table;

/// What the launcher is asked to do.
#[derive(Debug)]
pub enum Invocation {
    /// Train a drafter.
    Train(Box<Options>),
    /// Decode with a trained drafter.
    Eval(EvalOptions),
    /// Write a checkpoint in serving format.
    Export(ExportOptions),
}

/// Why there is nothing to do.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// Help or version was asked for, or the words are not an invocation at all.
    #[error("{0}")]
    Usage(Box<clap::Error>),
    /// Every option that cannot be used as given.
    #[error("{}", lines(.0))]
    Refused(Vec<Mistake>),
}

fn lines(mistakes: &[Mistake]) -> String {
    let lines: Vec<String> = mistakes.iter().map(|m| format!("error: {m}")).collect();
    lines.join("\n")
}

impl CliError {
    /// Prints it where it belongs and says what to exit with: 0 after help and version, else 2.
    pub fn report(&self) -> u8 {
        match self {
            Self::Usage(error) => {
                // A closed terminal leaves nobody to tell.
                let _ = error.print();
                u8::try_from(error.exit_code()).unwrap_or(2)
            }
            Self::Refused(_) => {
                eprintln!("{self}");
                2
            }
        }
    }
}

/// The version line: package, commit and features of this build.
pub fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let mut features = vec!["cpu"];
        if cfg!(feature = "loom") {
            features.push("loom");
        }
        format!(
            "{} (commit {}, features: {})",
            env!("CARGO_PKG_VERSION"),
            env!("SLIPSTREAM_COMMIT"),
            features.join(", ")
        )
    });
    &VERSION
}

const AFTER_HELP: &str = "\
Every option is also a key of the file given with --config (TOML, same names); a flag wins over the file.

Exit codes: 0 complete, or stopped and saved by --max-steps or the first Ctrl-C; 75 stopped and saved by
SIGTERM, SIGUSR1, SIGHUP or a time limit; 130 second Ctrl-C; 2 usage or refused input; 128+n the signal that
killed the worker that is the root cause; 1 anything else.";

/// The whole command line.
pub fn command() -> Command {
    let train = Command::new("launcher")
        .version(version())
        .about("Trains a drafter for speculative decoding online: target workers publish hidden states into shared memory, drafter workers train on them. With no model and no data: the built-in demo.")
        .after_help(AFTER_HELP)
        .args_conflicts_with_subcommands(true)
        .arg(
            Arg::new("config")
                .long("config")
                .value_name("FILE")
                .help("Options from a TOML file; unknown keys are refused"),
        );
    let eval = Command::new("eval")
        .about("Decodes with a trained drafter: accepted length, and whether the output equals plain greedy decoding")
        .arg(positional("checkpoint", "RUN|CHECKPOINT", "A run's output directory (its latest checkpoint) or a checkpoint"));
    let export = Command::new("export")
        .about("Writes a checkpoint in serving format")
        .arg(positional(
            "checkpoint",
            "CHECKPOINT",
            "A checkpoint, or a run's output directory",
        ))
        .arg(positional("to", "DIR", "Where to write it"));
    with_groups(train, table::TRAIN)
        .subcommand(with_groups(eval, table::EVAL))
        .subcommand(with_groups(export, table::EXPORT))
}

fn positional(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name)
        .value_name(value)
        .help(help)
        .required(true)
        .value_parser(clap::value_parser!(PathBuf))
}

fn with_groups(mut command: Command, groups: &'static [Group]) -> Command {
    for group in groups {
        for flag in group.flags {
            command = command.arg(argument(flag).help_heading(group.heading));
        }
    }
    command
}

fn argument(flag: &'static Flag) -> Arg {
    let arg = Arg::new(flag.name).long(flag.name).help(flag.help_text());
    match flag.kind {
        Kind::Switch => arg.action(ArgAction::SetTrue),
        _ if flag.many => arg
            .value_name(flag.value)
            .action(ArgAction::Append)
            .num_args(1..),
        _ => arg.value_name(flag.value).allow_negative_numbers(true),
    }
}

/// Understands a command line, program name first.
///
/// # Errors
///
/// [`CliError`]: help, version or usage from clap, else all options that are wrong, together.
pub fn parse<I>(words: I) -> Result<Invocation, CliError>
where
    I: IntoIterator,
    I::Item: Into<OsString> + Clone,
{
    let matches = command()
        .try_get_matches_from(words)
        .map_err(|error| CliError::Usage(Box::new(error)))?;
    match matches.subcommand() {
        Some(("eval", sub)) => {
            let values = given(sub, table::EVAL).check(flags::flags(table::EVAL), false);
            EvalOptions::resolve(path(sub, "checkpoint"), values).map(Invocation::Eval)
        }
        Some(("export", sub)) => {
            let values = given(sub, table::EXPORT).check(flags::flags(table::EXPORT), false);
            ExportOptions::resolve(path(sub, "checkpoint"), path(sub, "to"), values)
                .map(Invocation::Export)
        }
        _ => {
            let mut raw = given(&matches, table::TRAIN);
            let mut mistakes = Vec::new();
            if let Some(file) = matches.get_one::<String>("config") {
                add_config(&mut raw, file, &mut mistakes);
            }
            let demo = !raw.has("target-model") && !raw.has("data");
            let mut values = raw.check(flags::flags(table::TRAIN), demo);
            mistakes.append(&mut values.mistakes);
            values.mistakes = mistakes;
            Options::resolve(values, demo).map(|options| Invocation::Train(Box::new(options)))
        }
    }
    .map_err(CliError::Refused)
}

fn path(matches: &ArgMatches, name: &str) -> PathBuf {
    matches
        .get_one::<PathBuf>(name)
        .cloned()
        .unwrap_or_default()
}

/// The words of every flag that is on the command line.
fn given(matches: &ArgMatches, groups: &'static [Group]) -> Raw {
    let mut raw = Raw::default();
    for flag in flags::flags(groups) {
        if matches!(flag.kind, Kind::Switch) {
            if matches.get_flag(flag.name) {
                raw.give(flag, Source::Flag, vec!["true".to_owned()]);
            }
        } else if let Some(words) = matches.get_many::<String>(flag.name) {
            raw.give(flag, Source::Flag, words.cloned().collect());
        }
    }
    raw
}

/// Adds what a config file gives and the command line does not.
fn add_config(raw: &mut Raw, file: &str, mistakes: &mut Vec<Mistake>) {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => {
            mistakes.push(Mistake(format!("--config {file}: {error}")));
            return;
        }
    };
    let table: toml::Table = match text.parse() {
        Ok(table) => table,
        Err(error) => {
            let what = error.to_string();
            mistakes.push(Mistake(format!("--config {file}: {}", one_line(&what))));
            return;
        }
    };
    for (key, value) in &table {
        let Some(flag) = flags::flags(table::TRAIN).find(|flag| flag.name == key) else {
            let hint =
                nearest(key).map_or(String::new(), |name| format!("; did you mean `{name}`?"));
            mistakes.push(Mistake(format!("{file}: unknown key `{key}`{hint}")));
            continue;
        };
        let source = Source::Config(file.to_owned());
        match words(flag, value) {
            Ok(words) => raw.give(flag, source, words),
            Err(what) => mistakes.push(Mistake::of(flag.name, &source, what)),
        }
    }
}

/// A message of several lines as one.
fn one_line(text: &str) -> String {
    let parts: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    parts.join(" ")
}

/// A TOML value as the words that the command line would hold.
fn words(flag: &Flag, value: &toml::Value) -> Result<Vec<String>, String> {
    let one = |value: &toml::Value| match value {
        toml::Value::String(text) => Ok(text.clone()),
        toml::Value::Integer(number) => Ok(number.to_string()),
        toml::Value::Float(number) => Ok(number.to_string()),
        toml::Value::Boolean(on) => Ok(on.to_string()),
        other => Err(format!("cannot be a {}", other.type_str())),
    };
    match value {
        toml::Value::Array(list) => {
            let words = list.iter().map(one).collect::<Result<Vec<_>, _>>()?;
            match flag.kind {
                Kind::Ints | Kind::Workers => Ok(vec![words.join(",")]),
                _ if flag.many => Ok(words),
                _ => Err("takes one value, not a list".to_owned()),
            }
        }
        toml::Value::Table(table) if matches!(flag.kind, Kind::KeyValue) => table
            .iter()
            .map(|(key, value)| Ok(format!("{key}={}", one(value)?)))
            .collect(),
        value => Ok(vec![one(value)?]),
    }
}

/// The option whose name is closest to `key`, if one is close.
fn nearest(key: &str) -> Option<&'static str> {
    let key = key.replace('_', "-");
    flags::flags(table::TRAIN)
        .map(|flag| (distance(&key, flag.name), flag.name))
        .min()
        .filter(|(distance, _)| *distance <= 2)
        .map(|(_, name)| name)
}

/// Levenshtein's distance of two short names.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let swap = corner + usize::from(x != *y);
            corner = row[j + 1];
            row[j + 1] = swap.min(row[j] + 1).min(corner + 1);
        }
    }
    row[b.len()]
}
