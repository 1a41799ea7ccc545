//! `launcher export`: a checkpoint in serving format.

use super::checkpoints::find;
use super::options::ExportOptions;
use crate::train::export::{self, read_config};

/// Exports; returns the launcher's exit code.
pub fn export(options: &ExportOptions) -> u8 {
    let refuse = |what: String| {
        eprintln!("error: {what}");
        2
    };
    let checkpoint = match find(&options.checkpoint) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return refuse(error),
    };
    if options.overwrite && options.to.exists() {
        // Only what an earlier export wrote is ever removed.
        if read_config(&options.to).is_err() {
            return refuse(format!(
                "{} is no earlier export; it stays",
                options.to.display()
            ));
        }
        if let Err(error) = std::fs::remove_dir_all(&options.to) {
            return refuse(format!("{}: {error}", options.to.display()));
        }
    }
    match export::export(&checkpoint, &options.to) {
        Ok(()) => {
            println!("{}", options.to.display());
            0
        }
        Err(error) => refuse(error.to_string()),
    }
}
