//! One target process; the launcher starts it.

use std::process::ExitCode;

use slipstream::control::{Role, worker_main};
use slipstream::launch::gpus;
use slipstream::worker;

fn main() -> ExitCode {
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == gpus::ARGUMENT)
    {
        println!("{}", gpus::report());
        return ExitCode::SUCCESS;
    }
    worker_main(Role::Target, worker::target::run)
}
