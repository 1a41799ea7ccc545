//! Workers that are started under a debugger, or wait for one.

use std::ffi::OsString;
use std::path::PathBuf;

use super::spawn::WorkerSpec;
use crate::control::{WAIT_FOR_DEBUGGER, WorkerName};

/// What a run was asked for in matters of debugging.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DebugOptions {
    /// Every worker waits.
    pub all_wait: bool,
    /// These wait for a debugger before they load.
    pub wait: Vec<WorkerName>,
    /// Programs, with arguments, that workers are started through.
    pub prefixes: Vec<(WorkerName, Vec<String>)>,
}

impl DebugOptions {
    /// Understands the words of `--wait-for-debugger` and the pairs of `--debugger-prefix`.
    ///
    /// # Errors
    /// The option's name and what is wrong with it, for each.
    pub fn read(
        wait: &[String],
        prefixes: &[(String, String)],
    ) -> Result<Self, Vec<(&'static str, String)>> {
        let mut options = Self::default();
        let mut wrong = Vec::new();
        for word in wait.iter().flat_map(|list| list.split(',')) {
            match word.trim() {
                "all" => options.all_wait = true,
                name => match name.parse() {
                    Ok(worker) => options.wait.push(worker),
                    Err(_) => wrong.push((
                        "wait-for-debugger",
                        format!("`{name}` is not ROLE:RANK such as drafter:1, and not `all`"),
                    )),
                },
            }
        }
        for (name, command) in prefixes {
            let words = split(command);
            match name.parse() {
                Ok(worker) if !words.is_empty() => options.prefixes.push((worker, words)),
                Ok(_) => wrong.push(("debugger-prefix", format!("{name} has no command"))),
                Err(_) => wrong.push((
                    "debugger-prefix",
                    format!("`{name}` is not ROLE:RANK such as drafter:1"),
                )),
            }
        }
        if wrong.is_empty() {
            Ok(options)
        } else {
            Err(wrong)
        }
    }

    /// Changes how a worker is started, where this was asked for.
    pub fn apply(&self, spec: &mut WorkerSpec<'_>) {
        if self.all_wait || self.wait.contains(&spec.worker) {
            spec.environment
                .push((WAIT_FOR_DEBUGGER.into(), "1".into()));
        }
        let prefix = self
            .prefixes
            .iter()
            .find(|(worker, _)| *worker == spec.worker);
        if let Some((_, words)) = prefix {
            let program = std::mem::replace(&mut spec.program, PathBuf::from(&words[0]));
            let mut arguments: Vec<OsString> = words[1..].iter().map(OsString::from).collect();
            arguments.push(program.into());
            arguments.append(&mut spec.arguments);
            spec.arguments = arguments;
            spec.terminal = true;
        }
    }

    /// Workers that the options name.
    pub fn named(&self) -> impl Iterator<Item = WorkerName> + '_ {
        let prefixed = self.prefixes.iter().map(|(worker, _)| *worker);
        self.wait.iter().copied().chain(prefixed)
    }
}

/// The words of a command as a shell would see them: blanks separate, quotes and backslashes keep together.
fn split(command: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut letters = command.chars();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (Some(end), letter) if letter == end => quote = None,
            (Some('\''), letter) => word.get_or_insert_default().push(letter),
            (_, '\\') => word.get_or_insert_default().extend(letters.next()),
            (Some(_), letter) => word.get_or_insert_default().push(letter),
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, letter) if letter.is_whitespace() => words.extend(word.take()),
            (None, letter) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Role;

    #[test]
    fn commands_are_split_as_a_shell_does() {
        assert_eq!(split("gdb --args"), ["gdb", "--args"]);
        assert_eq!(
            split(r#"gdb -ex 'run  now' -ex "print \"x\"" a\ b """#),
            ["gdb", "-ex", "run  now", "-ex", "print \"x\"", "a b", ""]
        );
        assert!(split("  ").is_empty());
    }

    #[test]
    fn options_are_read_or_refused_together() {
        let pair = |name: &str, command: &str| (name.to_owned(), command.to_owned());
        let words = ["drafter:1,target:0".to_owned()];
        let read = DebugOptions::read(&words, &[pair("drafter:0", "rr record")]).unwrap();
        assert_eq!(
            read.wait,
            [
                WorkerName::new(Role::Drafter, 1),
                WorkerName::new(Role::Target, 0)
            ]
        );
        assert_eq!(read.prefixes[0].1, ["rr", "record"]);
        assert!(
            DebugOptions::read(&["all".to_owned()], &[])
                .unwrap()
                .all_wait
        );
        let wrong = DebugOptions::read(
            &["someone".to_owned()],
            &[pair("x", "gdb"), pair("target:0", " ")],
        );
        assert_eq!(wrong.unwrap_err().len(), 3);
    }

    #[test]
    fn a_prefix_starts_the_worker_through_another_program() {
        let name = WorkerName::new(Role::Drafter, 0);
        let prefixes = [("drafter:0".to_owned(), "gdb --args".to_owned())];
        let options = DebugOptions::read(&["all".to_owned()], &prefixes).unwrap();
        let spec = |worker| WorkerSpec {
            worker,
            program: PathBuf::from("/bin/drafter_worker"),
            arguments: Vec::new(),
            environment: Vec::new(),
            threads: 1,
            descriptors: Vec::new(),
            log: PathBuf::new(),
            terminal: false,
        };
        let mut prefixed = spec(name);
        options.apply(&mut prefixed);
        assert_eq!(prefixed.program, PathBuf::from("gdb"));
        assert_eq!(prefixed.arguments, ["--args", "/bin/drafter_worker"]);
        assert!(prefixed.terminal && prefixed.environment.len() == 1);
        let mut other = spec(WorkerName::new(Role::Target, 0));
        options.apply(&mut other);
        assert_eq!(other.program, PathBuf::from("/bin/drafter_worker"));
        assert!(!other.terminal && other.environment.len() == 1);
    }
}
