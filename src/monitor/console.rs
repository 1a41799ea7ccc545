//! The launcher's console: whole lines from any thread, with a live line below them on a terminal.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustix::termios::tcgetwinsize;

/// Prints whole lines to standard error; copies share the one console.
#[derive(Clone, Debug)]
pub struct Console {
    quiet: bool,
    live: Option<ProgressBar>,
    turn: Arc<Mutex<()>>,
}

impl Console {
    /// On standard error; with `quiet` only [`Console::warn`] prints.
    pub fn new(quiet: bool) -> Self {
        let terminal = io::stderr().is_terminal() && !quiet;
        Self {
            quiet,
            live: terminal.then(|| {
                let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
                // The template holds no placeholder that could fail to parse.
                if let Ok(style) = ProgressStyle::with_template("{msg}") {
                    bar.set_style(style);
                }
                bar
            }),
            turn: Arc::new(Mutex::new(())),
        }
    }

    /// Whether a live line can be shown.
    pub fn is_live(&self) -> bool {
        self.live.is_some()
    }

    /// Replaces the live line; does nothing where there is none. Parts between ` | ` stay whole where the
    /// terminal is too narrow for all of them.
    pub fn set_live(&self, text: &str) {
        if let Some(bar) = &self.live {
            let width = tcgetwinsize(io::stderr()).map_or(0, |size| usize::from(size.ws_col));
            bar.set_message(wrap(text, if width == 0 { 80 } else { width }));
        }
    }

    /// Removes the live line for good, before the last report.
    pub fn end_live(&self) {
        if let Some(bar) = &self.live {
            bar.finish_and_clear();
        }
    }

    /// Prints a line (or several, together), unless quiet.
    pub fn line(&self, text: &str) {
        if !self.quiet {
            self.print(text);
        }
    }

    /// Prints a warning, also when quiet.
    pub fn warn(&self, text: &str) {
        self.print(&format!("warning: {text}"));
    }

    fn print(&self, text: &str) {
        let write = || {
            let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            let mut block = text.trim_end_matches('\n').to_owned();
            block.push('\n');
            // A console that went away is no reason to stop a run.
            let _ = io::stderr().lock().write_all(block.as_bytes());
        };
        match &self.live {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

/// Breaks a line of parts so that none is wider than `width`, as far as the parts allow.
fn wrap(text: &str, width: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for part in text.split(" | ") {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 3 + part.chars().count() < width => {
                line.push_str(" | ");
                line.push_str(part);
            }
            _ => lines.push(part.to_owned()),
        }
    }
    lines.join("\n")
}

/// Copies a log to the console as it grows, whole lines under the process's name. Reading the file rather than
/// a pipe means that a slow console never holds up the worker, and that the log is complete whatever happens here.
#[derive(Debug)]
pub struct Tail {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Tail {
    /// Begins at the present end of the log at `path`, which need not exist yet.
    ///
    /// # Errors
    ///
    /// When no thread can be started.
    pub fn start(path: PathBuf, name: String, console: Console) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let from = std::fs::metadata(&path).map_or(0, |found| found.len());
        let thread = thread::Builder::new()
            .name(format!("tail {name}"))
            .spawn(move || {
                let mut log = Log {
                    path,
                    at: from,
                    file: None,
                    part: Vec::new(),
                };
                loop {
                    let last = stopping.load(Ordering::Acquire);
                    for line in log.lines() {
                        console.line(&format!("[{name}] {line}"));
                    }
                    if last {
                        return;
                    }
                    thread::sleep(Duration::from_millis(100));
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic there was printed already.
            let _ = thread.join();
        }
    }
}

struct Log {
    path: PathBuf,
    at: u64,
    file: Option<File>,
    part: Vec<u8>,
}

impl Log {
    /// The lines that were completed since the last look.
    fn lines(&mut self) -> Vec<String> {
        if self.file.is_none() {
            self.file = File::open(&self.path)
                .ok()
                .filter(|mut file| file.seek(SeekFrom::Start(self.at)).is_ok());
        }
        let Some(file) = &mut self.file else {
            return Vec::new();
        };
        // What cannot be read now may be readable at the next look.
        let _ = file.read_to_end(&mut self.part);
        let Some(end) = self.part.iter().rposition(|byte| *byte == b'\n') else {
            return Vec::new();
        };
        let complete: Vec<u8> = self.part.drain(..=end).collect();
        let text = String::from_utf8_lossy(&complete);
        text.lines().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_terminal_gets_more_lines_of_whole_parts() {
        let text = "training step 1/9 | loss 2.0 | ring 3/9";
        assert_eq!(wrap(text, 80), text);
        assert_eq!(wrap(text, 30), "training step 1/9 | loss 2.0\nring 3/9");
        assert_eq!(wrap(text, 5), "training step 1/9\nloss 2.0\nring 3/9");
    }

    #[test]
    fn a_log_is_copied_from_where_it_was_and_in_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        std::fs::write(&path, "one\ntw").unwrap();
        let mut log = Log {
            path: path.clone(),
            at: 0,
            file: None,
            part: Vec::new(),
        };
        assert_eq!(log.lines(), ["one"]);
        let mut file = std::fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap();
        file.write_all(b"o\nthree\n").unwrap();
        assert_eq!(log.lines(), ["two", "three"]);
        assert!(log.lines().is_empty());
    }
}
