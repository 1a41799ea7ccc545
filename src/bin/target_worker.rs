//! One target process; the launcher starts it.

use std::process::ExitCode;

use slipstream::control::{Role, worker_main};
use slipstream::worker;

fn main() -> ExitCode {
    worker_main(Role::Target, worker::target::run)
}
