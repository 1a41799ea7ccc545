//! The launcher's console: whole lines from any thread, with a live line below them on a terminal.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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
                if let Ok(style) = ProgressStyle::with_template("{wide_msg}") {
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

    /// Replaces the live line; does nothing where there is none.
    pub fn set_live(&self, text: String) {
        if let Some(bar) = &self.live {
            bar.set_message(text);
            bar.tick();
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
                    log.copy(&name, &console);
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
    fn copy(&mut self, name: &str, console: &Console) {
        if self.file.is_none() {
            let Ok(mut file) = File::open(&self.path) else {
                return;
            };
            if file.seek(SeekFrom::Start(self.at)).is_err() {
                return;
            }
            self.file = Some(file);
        }
        let Some(file) = &mut self.file else { return };
        // What cannot be read now may be readable at the next look.
        let _ = file.read_to_end(&mut self.part);
        while let Some(end) = self.part.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.part.drain(..=end).collect();
            console.line(&format!(
                "[{name}] {}",
                String::from_utf8_lossy(&line[..end])
            ));
        }
    }
}
