//! One target process; the launcher starts it.

use std::process::ExitCode;

use slipstream::control::{Role, worker_main};
use slipstream::launch::{devices, gpus};
use slipstream::worker;

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    match words.next() {
        Some(word) if word == gpus::ARGUMENT => {
            println!("{}", gpus::report());
            ExitCode::SUCCESS
        }
        Some(word) if word == gpus::USE_ARGUMENT => {
            gpus::print_use();
            ExitCode::SUCCESS
        }
        Some(word) if word == devices::AS_LAUNCHER => ExitCode::from(devices::as_launcher(words)),
        _ => worker_main(Role::Target, worker::target::run),
    }
}
