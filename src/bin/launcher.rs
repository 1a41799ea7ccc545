//! The launcher: everything a person does goes through it.

use std::process::ExitCode;

use slipstream::launch::cli::{self, Invocation};
use slipstream::launch::{check_data, evaluate, export, generate, predict, run};

/// Tokenising is made of small allocations, which take it nearly half of its time with the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let code = match cli::parse(std::env::args_os()) {
        Err(error) => error.report(),
        Ok(Invocation::Train(options)) => run::train(&options),
        Ok(Invocation::Eval(options)) => evaluate::evaluate(&options),
        Ok(Invocation::Generate(options)) => generate::generate(&options),
        Ok(Invocation::Export(options)) => export::export(&options),
        Ok(Invocation::CheckData(options)) => check_data::check_data(&options),
        Ok(Invocation::Plan(options)) => predict::plan(&options),
        Ok(Invocation::Watch(command)) => command.run(),
    };
    ExitCode::from(code)
}
