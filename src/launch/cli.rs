//! From the words of the command line and of a config file to what is asked for.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::LazyLock;

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::commands::{self, WatchCommand};
use super::flags::{self, Flag, Group, Kind, Mistake, Raw, Source};
use super::options::{CheckDataOptions, EvalOptions, ExportOptions, GenerateOptions, Options};
use super::predict::PlanOptions;
use super::table;

/// What the launcher is asked to do.
#[derive(Debug)]
pub enum Invocation {
    /// Train a drafter.
    Train(Box<Options>),
    /// Decode with a trained drafter.
    Eval(EvalOptions),
    /// Answer prompts, as training data.
    Generate(GenerateOptions),
    /// Write a checkpoint in serving format.
    Export(ExportOptions),
    /// Say what data files hold.
    CheckData(CheckDataOptions),
    /// Say what a run would be.
    Plan(PlanOptions),
    /// Look at runs and machines.
    Watch(WatchCommand),
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
        let mut features = vec!["cpu", "cuda"];
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
Examples:
  launcher                                                       the built-in demo
  launcher plan --target-model DIR --data chat.jsonl             what a run would be
  launcher --target-model DIR --data chat.jsonl --output runs/a  train
  launcher --output runs/a --resume …                            go on after a stop
  launcher top                                                   watch the newest run from another terminal
  launcher attach runs/a drafter:1                               a debugger on one live process
  launcher eval runs/a                                           accepted length by real decoding
  launcher report runs/a                                         one HTML page about it

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
        .arg(config());
    let plan = Command::new("plan")
        .about("Says what a run with these options would be: sizes, memory, steps, speed of each role, best split, ring; trains nothing")
        .arg(config())
        .arg(
            Arg::new("json")
                .long("json")
                .help("Print JSON")
                .action(ArgAction::SetTrue),
        );
    let eval = Command::new("eval")
        .about("Decodes with a trained drafter: accepted length, speed, and whether the output equals plain decoding")
        .arg(positional("checkpoint", "RUN|CHECKPOINT", "A run's output directory (its latest checkpoint) or a checkpoint"));
    let generate = Command::new("generate").about(
        "Answers prompts by the target itself, or by a server, as training data: one conversation a line",
    );
    let export = Command::new("export")
        .about("Writes a checkpoint in serving format")
        .arg(positional(
            "checkpoint",
            "CHECKPOINT",
            "A checkpoint, or a run's output directory",
        ))
        .arg(positional("to", "DIR", "Where to write it"));
    let check_data = Command::new("check-data")
        .about("Says what data files hold: counts per problem with examples, lengths, duplicates, and a few rows with their mask")
        .arg(positional("files", "FILE…", "Data files, or folders of them").num_args(1..));
    with_groups(train, table::TRAIN)
        .subcommand(with_groups(check_data, table::CHECK_DATA))
        .subcommand(with_groups(eval, table::EVAL))
        .subcommand(with_groups(generate, table::GENERATE))
        .subcommand(with_groups(export, table::EXPORT))
        .subcommand(with_groups(plan, table::TRAIN))
        .subcommands(commands::all())
}

fn config() -> Arg {
    Arg::new("config")
        .long("config")
        .value_name("FILE")
        .help("Options from a TOML file; unknown keys are refused")
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
        Some(("check-data", sub)) => {
            let values =
                given(sub, table::CHECK_DATA).check(flags::flags(table::CHECK_DATA), false);
            let files = sub.get_many::<PathBuf>("files").into_iter().flatten();
            CheckDataOptions::resolve(files.cloned().collect(), values).map(Invocation::CheckData)
        }
        Some(("generate", sub)) => {
            let values = given(sub, table::GENERATE).check(flags::flags(table::GENERATE), false);
            GenerateOptions::resolve(values).map(Invocation::Generate)
        }
        Some(("export", sub)) => {
            let values = given(sub, table::EXPORT).check(flags::flags(table::EXPORT), false);
            ExportOptions::resolve(path(sub, "checkpoint"), path(sub, "to"), values)
                .map(Invocation::Export)
        }
        Some(("plan", sub)) => train_options(sub).map(|run| {
            let json = sub.get_flag("json");
            let run = Box::new(run);
            Invocation::Plan(PlanOptions { run, json })
        }),
        Some((name, sub)) => commands::read(name, sub).map(Invocation::Watch),
        None => train_options(&matches).map(|options| Invocation::Train(Box::new(options))),
    }
    .map_err(CliError::Refused)
}

/// The options of a run, from flags and a config file.
fn train_options(matches: &ArgMatches) -> Result<Options, Vec<Mistake>> {
    let mut raw = given(matches, table::TRAIN);
    let mut mistakes = Vec::new();
    if let Some(file) = matches.get_one::<String>("config") {
        add_config(&mut raw, file, &mut mistakes);
    }
    let demo = !raw.has("target-model") && !raw.has("data");
    let mut values = raw.check(flags::flags(table::TRAIN), demo);
    mistakes.append(&mut values.mistakes);
    values.mistakes = mistakes;
    Options::resolve(values, demo)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{Role, WorkerName};
    use crate::train::options::Schedule;

    fn try_run(words: &[&str]) -> Result<Options, CliError> {
        match parse(["launcher"].iter().chain(words))? {
            Invocation::Train(options) => Ok(*options),
            other => panic!("not a run: {other:?}"),
        }
    }

    fn run(words: &[&str]) -> Options {
        try_run(words).unwrap_or_else(|error| panic!("{error}"))
    }

    fn mistakes(words: &[&str]) -> Vec<String> {
        match try_run(words) {
            Err(CliError::Refused(mistakes)) => {
                mistakes.into_iter().map(|mistake| mistake.0).collect()
            }
            other => panic!("not refused: {other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn nothing_given_is_the_demo() {
        let options = run(&[]);
        assert!(options.demo);
        assert_eq!(options.places.cpu, (2, 2));
        assert_eq!(
            (options.drafter.layers, options.drafter.block_size),
            (Some(2), Some(8))
        );
        assert_eq!(options.drafter.target_layers, Some(vec![1, 3, 5]));
        assert_eq!(
            (options.training.anchors, options.training.batch_anchors),
            (24, 96)
        );
        assert_eq!(options.optimizer.lr, 3e-3);
        assert_eq!(options.default_name(), "demo");
        assert!(options.missing_files().is_empty());
    }

    #[test]
    fn a_real_run_has_the_published_defaults() {
        let options = run(&["--target-model", "m", "--data", "chat.jsonl"]);
        assert!(!options.demo);
        assert_eq!(
            (options.drafter.layers, options.drafter.block_size),
            (Some(5), Some(16))
        );
        assert_eq!(options.drafter.target_layers, None);
        assert_eq!(
            (options.training.anchors, options.training.batch_anchors),
            (512, 16_384)
        );
        assert_eq!(
            options.optimizer,
            crate::train::options::OptimizerOptions::default()
        );
        assert_eq!(options.loss, crate::train::options::LossOptions::default());
        assert_eq!(
            (options.ring.slot_tokens, options.ring.unit_anchors),
            (4096, 1024)
        );
        assert_eq!(options.ring.prefill_tokens, 16_384);
        assert_eq!(
            (options.data.eval_fraction, options.data.eval_tokens),
            (0.01, 65_536)
        );
        assert_eq!(
            (options.data.max_length, options.data.min_loss_tokens),
            (3072, 2)
        );
        assert_eq!((options.training.epochs, options.faults.restarts), (1, 0));
        assert!(options.faults.quarantine);
        assert_eq!(options.default_name(), "chat");
    }

    #[test]
    fn options_are_read_as_given() {
        let options = run(&[
            "--target-model",
            "m",
            "--data",
            "a",
            "b",
            "--data",
            "c",
            "--data-weights",
            "1",
            "0.5",
            "3",
            "--cpu",
            "1:3",
            "--target-layers",
            "1,9,17",
            "--template-kwarg",
            "enable_thinking=false",
            "name=x y",
            "--time-limit",
            "2h",
            "--schedule",
            "wsd",
            "--batch-anchors",
            "16_384",
            "--dpace-alpha",
            "0.25",
            "--show",
            "target:0,drafter:2",
            "--no-quarantine",
        ]);
        assert_eq!(options.data.files, ["a", "b", "c"].map(PathBuf::from));
        assert_eq!(options.data.weights, [1.0, 0.5, 3.0]);
        assert_eq!(options.places.cpu, (1, 3));
        assert_eq!(options.drafter.target_layers, Some(vec![1, 9, 17]));
        let kwargs = &options.data.template_kwargs;
        assert_eq!(
            kwargs[0],
            ("enable_thinking".to_owned(), serde_json::Value::Bool(false))
        );
        assert_eq!(
            kwargs[1],
            (
                "name".to_owned(),
                serde_json::Value::String("x y".to_owned())
            )
        );
        assert_eq!(options.training.time_limit.unwrap().as_secs(), 7200);
        assert_eq!(options.optimizer.schedule, Schedule::Wsd);
        assert_eq!(options.training.batch_anchors, 16_384);
        assert_eq!(options.loss.dpace_alpha, Some(0.25));
        let shown = [
            WorkerName::new(Role::Target, 0),
            WorkerName::new(Role::Drafter, 2),
        ];
        assert_eq!(options.watch.show, shown);
        assert!(!options.faults.quarantine);
    }

    #[test]
    fn all_mistakes_are_told_together() {
        let told = mistakes(&[
            "--lr",
            "-1",
            "--epochs",
            "0",
            "--cpu",
            "2:0",
            "--schedule",
            "linear",
            "--target-layers",
            "9,1",
            "--warmup",
            "nan",
            "--time-limit",
            "5w",
            "--restarts",
            "3",
            "--gpus",
            "7-0",
            "--target-model",
            "m",
            "--seed",
            "1.5",
            "--template-kwarg",
            "=x",
        ]);
        let starts = [
            "--gpus: `7-0` runs backwards; write 0-7",
            "--gpus: and --cpu exclude each other",
            "--data: is missing",
            "--target-layers: must rise",
            "--lr: -1 is out of range (above 0 to 1)",
            "--epochs: 0 is out of range (1 to 10000)",
            "--cpu: `2:0` is not TARGETS:DRAFTERS",
            "--schedule: `linear` is not one of constant, cosine, wsd",
            "--warmup: nan is out of range",
            "--time-limit: `5w` is not a time",
            "--restarts: 3 is out of range (only 0)",
            "--seed: `1.5` is not a whole number",
            "--template-kwarg: `=x` is not KEY=VALUE",
        ];
        for start in starts {
            assert!(
                told.iter().any(|line| line.starts_with(start)),
                "{start} in {told:#?}"
            );
        }
        assert_eq!(told.len(), starts.len(), "{told:#?}");
        assert!(told.iter().all(|line| !line.contains('\n')));
    }

    #[test]
    fn combinations_that_cannot_be_honoured_are_refused() {
        for (words, start) in [
            (&["--data", "x"][..], "--target-model: is missing"),
            (
                &[
                    "--target-model",
                    "m",
                    "--data",
                    "x",
                    "y",
                    "--data-weights",
                    "2",
                ],
                "--data-weights: 1 weights for 2 paths of --data",
            ),
            (&["--resume"], "--output: is missing"),
            (
                &["--resume", "--output", "o", "--overwrite"],
                "--overwrite: would remove",
            ),
            (
                &["--resume", "--output", "o", "--init-from", "c"],
                "--init-from: the weights come from",
            ),
            (
                &["--raw-text", "--last-turn-only"],
                "--last-turn-only: has no meaning",
            ),
            (
                &["--show", "drafter:2"],
                "--show: there is no drafter:2 (ranks 0 to 1)",
            ),
        ] {
            let told = mistakes(words);
            assert!(told.len() == 1 && told[0].starts_with(start), "{told:?}");
        }
    }

    #[test]
    fn a_config_file_gives_what_flags_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        let file = file.to_str().unwrap();
        std::fs::write(
            file,
            "lr = 1e-3\nepochs = 4\ntarget-model = 'm'\ndata = ['a', 'b']\nuse-soft-labels = true\n\
             target-layers = [1, 3]\ncpu = '1:1'\n[template-kwarg]\nthink = false\n",
        )
        .unwrap();
        let options = run(&["--config", file, "--epochs", "9"]);
        assert_eq!((options.optimizer.lr, options.training.epochs), (1e-3, 9));
        assert_eq!(options.data.files, ["a", "b"].map(PathBuf::from));
        assert!(options.loss.use_soft_labels && !options.demo);
        assert_eq!(options.drafter.target_layers, Some(vec![1, 3]));
        assert_eq!(
            options.data.template_kwargs[0].1,
            serde_json::Value::Bool(false)
        );
    }

    #[test]
    fn a_wrong_config_file_is_told_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        let file = file.to_str().unwrap();
        std::fs::write(
            file,
            "learning-rate = 1\nbatch_anchors = 5\nlr = 'x'\nepochs = [1, 2]\n",
        )
        .unwrap();
        let told = mistakes(&["--config", file, "--keep", "0"]);
        assert_eq!(
            told,
            [
                format!("{file}: unknown key `batch_anchors`; did you mean `batch-anchors`?"),
                format!("{file}: epochs: takes one value, not a list"),
                format!("{file}: unknown key `learning-rate`"),
                format!("{file}: lr: `x` is not a number"),
                "--keep: 0 is out of range (1 to 4294967295)".to_owned(),
            ]
        );
        std::fs::write(file, "lr = = 3\n").unwrap();
        let told = mistakes(&["--config", file]);
        assert!(
            told.len() == 1
                && told[0].starts_with(&format!("--config {file}: "))
                && !told[0].contains('\n')
        );
        let told = mistakes(&["--config", "/no/such.toml"]);
        assert_eq!(
            told,
            ["--config /no/such.toml: No such file or directory (os error 2)"]
        );
    }

    #[test]
    fn a_draft_config_leaves_sizes_to_the_file() {
        let options = run(&["--draft-config", "c.json", "--block-size", "4"]);
        assert_eq!(
            (options.drafter.layers, options.drafter.block_size),
            (None, Some(4))
        );
    }

    #[test]
    fn files_that_are_missing_are_named_all_at_once() {
        let here = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        let options = run(&["--replay", "/no/record", "--draft-config", here]);
        let told: Vec<String> = options
            .missing_files()
            .into_iter()
            .map(|mistake| mistake.0)
            .collect();
        assert_eq!(
            told,
            [
                format!("--draft-config {here}: is a directory, not a file"),
                "--replay /no/record: No such file or directory (os error 2)".to_owned(),
            ]
        );
    }

    #[test]
    fn subcommands_are_read() {
        let Ok(Invocation::Eval(eval)) = parse(["launcher", "eval", "runs/a", "--documents", "3"])
        else {
            panic!("not eval")
        };
        assert_eq!(
            (eval.checkpoint, eval.documents, eval.max_new_tokens),
            (PathBuf::from("runs/a"), 3, 256)
        );
        let Ok(Invocation::Export(export)) = parse(["launcher", "export", "a", "b", "--overwrite"])
        else {
            panic!("not export")
        };
        assert_eq!((export.to, export.overwrite), (PathBuf::from("b"), true));
        let words = [
            "launcher",
            "check-data",
            "a",
            "b",
            "--rows",
            "0,7",
            "--json",
        ];
        let Ok(Invocation::CheckData(check)) = parse(words) else {
            panic!("not check-data")
        };
        assert_eq!(check.files, ["a", "b"].map(PathBuf::from));
        assert_eq!((check.rows, check.json), (Some(vec![0, 7]), true));
        assert_eq!(check.text, crate::data::TextOptions::default());
        let Err(error) = parse(["launcher", "eval", "a", "--documents", "0"]) else {
            panic!("accepted")
        };
        assert_eq!(
            error.to_string(),
            "error: --documents: 0 is out of range (1 to 4294967295)"
        );
    }

    #[test]
    fn usage_mistakes_exit_with_2_and_help_with_0() {
        for (words, code) in [
            (&["--no-such"][..], 2),
            (&["--lr"], 2),
            (&["eval"], 2),
            (&["--lr", "1", "eval", "x"], 2),
            (&["stray"], 2),
            (&["--help"], 0),
            (&["--version"], 0),
        ] {
            match parse(["launcher"].iter().chain(words)) {
                Err(CliError::Usage(error)) => assert_eq!(error.exit_code(), code, "{words:?}"),
                other => panic!("{words:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn help_says_defaults_and_ranges_of_every_option() {
        let help = command().term_width(0).render_long_help().to_string();
        for flag in flags::flags(table::TRAIN) {
            assert!(help.contains(&format!("--{}", flag.name)), "{}", flag.name);
            assert!(
                matches!(flag.kind, Kind::Switch) || flag.help_text().contains("[default: "),
                "{}",
                flag.name
            );
        }
        assert!(
            help.contains("[default: 6e-4; demo: 3e-3] [above 0 to 1; else refused]"),
            "{help}"
        );
        assert!(version().contains("(commit ") && version().contains("features: cpu"));
    }
}
