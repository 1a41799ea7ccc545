//! Completion scripts and manual pages, made from the same table as the help.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use clap_complete::Shell;

use super::cli::command;
use super::watch::refuse;

/// Prints a completion script; returns the launcher's exit code.
pub fn complete(shell: Shell) -> u8 {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "launcher", &mut script);
    match io::Write::write_all(&mut io::stdout(), &script) {
        Ok(()) => 0,
        Err(error) => refuse(&error),
    }
}

/// Writes launcher.1 and one page for each command; returns the launcher's exit code.
pub fn manual(folder: &Path) -> u8 {
    match write(folder) {
        Ok(names) => {
            println!("{}", names.join("\n"));
            0
        }
        Err(error) => refuse(&format!("{}: {error}", folder.display())),
    }
}

fn write(folder: &Path) -> io::Result<Vec<String>> {
    fs::create_dir_all(folder)?;
    let mut all = command();
    // Gives every command its full name.
    all.build();
    let mut names = Vec::new();
    let commands = all
        .get_subcommands()
        .filter(|sub| sub.get_name() != "help")
        .map(|sub| (format!("launcher-{}", sub.get_name()), sub.clone()));
    for (name, page) in [("launcher".to_owned(), all.clone())]
        .into_iter()
        .chain(commands)
    {
        let path = folder.join(format!("{name}.1"));
        clap_mangen::Man::new(page.disable_help_subcommand(true))
            .title(&name)
            .render(&mut File::create(&path)?)?;
        names.push(path.display().to_string());
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_and_every_shell_a_script() {
        let folder = tempfile::tempdir().unwrap();
        let names = write(folder.path()).unwrap();
        assert!(names.len() >= 10, "{names:?}");
        let page = fs::read_to_string(folder.path().join("launcher.1")).unwrap();
        assert!(
            page.contains("batch\\-anchors") && page.contains("launcher\\-top"),
            "{page}"
        );
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command(), "launcher", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(
                script.contains("batch-anchors") && script.contains("doctor"),
                "{shell}"
            );
        }
    }
}
