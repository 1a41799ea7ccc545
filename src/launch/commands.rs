//! The commands that look at runs and machines: their words, and what they lead to.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::doctor::{DoctorOptions, doctor};
use super::flags::Mistake;
use super::manual::{complete, manual};
use super::watch::attach::{AttachOptions, attach};
use super::watch::report::{ReportOptions, report};
use super::watch::stacks::{StacksOptions, stacks};
use super::watch::status::{StatusOptions, status};
use super::watch::top::{TopOptions, top};

/// What one of these commands was asked for.
#[derive(Clone, Debug)]
pub enum WatchCommand {
    /// A live view of a run.
    Top(TopOptions),
    /// One look at a run.
    Status(StatusOptions),
    /// Where every process is.
    Stacks(StacksOptions),
    /// A debugger on one worker.
    Attach(AttachOptions),
    /// A page about a run.
    Report(ReportOptions),
    /// Whether this machine is fit.
    Doctor(DoctorOptions),
    /// A completion script for a shell.
    Completions(clap_complete::Shell),
    /// Manual pages, into a directory.
    Man(PathBuf),
}

impl WatchCommand {
    /// Does it; returns the launcher's exit code.
    pub fn run(&self) -> u8 {
        match self {
            Self::Top(options) => top(options),
            Self::Status(options) => status(options),
            Self::Stacks(options) => stacks(options),
            Self::Attach(options) => attach(options),
            Self::Report(options) => report(options),
            Self::Doctor(options) => doctor(options),
            Self::Completions(shell) => complete(*shell),
            Self::Man(folder) => manual(folder),
        }
    }
}

fn run() -> Arg {
    Arg::new("run")
        .value_name("RUN")
        .help("A run's output directory [default: the newest under ./runs that is going on]")
        .value_parser(clap::value_parser!(PathBuf))
}

fn switch(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .help(help)
        .action(ArgAction::SetTrue)
}

/// A quarter of a second to a minute.
fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.25..=60.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("not a number from 0.25 to 60".to_owned()),
    }
}

/// All of them, as clap knows them.
pub(super) fn all() -> Vec<Command> {
    vec![
        Command::new("top")
            .about("A live view of a run, from any terminal: who works, who waits and for what, ring, speed, time left; `?` explains it")
            .arg(run())
            .arg(switch("once", "Print one frame, of two looks, and leave"))
            .arg(
                Arg::new("every")
                    .long("every")
                    .value_name("SECONDS")
                    .help("Between two looks; + and - change it")
                    .default_value("1")
                    .value_parser(seconds),
            ),
        Command::new("status")
            .about("One look at a run, also a hung one: who does what, for how long, and holds what; and what holds it up")
            .arg(run())
            .arg(switch("json", "Print JSON")),
        Command::new("stacks")
            .about("Stacks of all processes of a run, by gdb or eu-stack; without them, where the kernel says that they wait")
            .arg(run()),
        Command::new("attach")
            .about("Puts a debugger on one worker of a run: cuda-gdb on GPUs, rust-gdb, gdb or lldb, whichever is there")
            .arg(
                Arg::new("words")
                    .value_names(["RUN", "ROLE:RANK"])
                    .help("The run [default: the newest under ./runs that is going on] and the worker, such as drafter:1")
                    .required(true)
                    .num_args(1..=2),
            )
            .arg(
                Arg::new("debugger")
                    .long("debugger")
                    .value_name("PROGRAM")
                    .help("The debugger; it is called with -p PID"),
            )
            .arg(switch("print", "Only print the command")),
        Command::new("report")
            .about("Writes one HTML page about a run, ended or going on: curves, time shares, ring, verdict")
            .arg(run())
            .arg(
                Arg::new("to")
                    .long("to")
                    .value_name("FILE")
                    .help("Where the page goes [default: report.html in the run's directory]")
                    .value_parser(clap::value_parser!(PathBuf)),
            ),
        Command::new("doctor")
            .about("Examines this machine: GPUs, libraries, memory, limits, debuggers, disk; says what to do. Exit code 1 when runs will not work")
            .arg(
                Arg::new("output")
                    .long("output")
                    .value_name("DIR")
                    .help("Where runs go; its disk is tried")
                    .default_value("runs")
                    .value_parser(clap::value_parser!(PathBuf)),
            )
            .arg(switch("json", "Print JSON")),
        Command::new("completions")
            .about("Prints a completion script: source <(launcher completions bash)")
            .arg(
                Arg::new("shell")
                    .value_name("SHELL")
                    .required(true)
                    .value_parser(clap::value_parser!(clap_complete::Shell)),
            ),
        Command::new("man")
            .about("Writes manual pages for the launcher and each command: man ./launcher.1")
            .arg(
                Arg::new("folder")
                    .value_name("DIR")
                    .default_value(".")
                    .value_parser(clap::value_parser!(PathBuf)),
            ),
    ]
}

/// Understands one of them.
pub(super) fn read(name: &str, given: &ArgMatches) -> Result<WatchCommand, Vec<Mistake>> {
    let run = || given.get_one::<PathBuf>("run").cloned();
    match name {
        "top" => Ok(WatchCommand::Top(TopOptions {
            run: run(),
            once: given.get_flag("once"),
            every: given
                .get_one::<Duration>("every")
                .copied()
                .unwrap_or(Duration::from_secs(1)),
        })),
        "status" => Ok(WatchCommand::Status(StatusOptions {
            run: run(),
            json: given.get_flag("json"),
        })),
        "stacks" => Ok(WatchCommand::Stacks(StacksOptions { run: run() })),
        "attach" => {
            let words: Vec<&String> = given.get_many("words").into_iter().flatten().collect();
            let (run, worker) = match words.as_slice() {
                [run, worker] => (Some(PathBuf::from(run)), worker.as_str()),
                [worker] => (None, worker.as_str()),
                _ => (None, ""),
            };
            let worker = worker.parse().map_err(|_| {
                vec![Mistake(format!(
                    "attach: `{worker}` is not ROLE:RANK such as drafter:1"
                ))]
            })?;
            Ok(WatchCommand::Attach(AttachOptions {
                run,
                worker,
                debugger: given.get_one::<String>("debugger").cloned(),
                print: given.get_flag("print"),
            }))
        }
        "report" => Ok(WatchCommand::Report(ReportOptions {
            run: run(),
            to: given.get_one::<PathBuf>("to").cloned(),
        })),
        "doctor" => Ok(WatchCommand::Doctor(DoctorOptions {
            output: given
                .get_one::<PathBuf>("output")
                .cloned()
                .unwrap_or_default(),
            json: given.get_flag("json"),
        })),
        "completions" => given
            .get_one::<clap_complete::Shell>("shell")
            .map(|shell| WatchCommand::Completions(*shell))
            .ok_or_else(Vec::new),
        "man" => Ok(WatchCommand::Man(
            given
                .get_one::<PathBuf>("folder")
                .cloned()
                .unwrap_or_default(),
        )),
        other => Err(vec![Mistake(format!("{other}: no such command"))]),
    }
}
