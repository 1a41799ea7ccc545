//! One target process; the launcher starts it.

use std::process::ExitCode;

use slipstream::control::{Role, worker_main};
use slipstream::launch::{evaluate, gpus};
use slipstream::worker;

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    match words.next() {
        Some(word) if word == gpus::ARGUMENT => {
            println!("{}", gpus::report());
            return ExitCode::SUCCESS;
        }
        Some(word) if word == gpus::AGAIN => return ExitCode::from(evaluate::on_gpu(words)),
        Some(word) if word == gpus::USE_ARGUMENT => {
            gpus::print_use();
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    worker_main(Role::Target, worker::target::run)
}
