//! `launcher top`: the live view of a run, from any terminal. It maps the run's memory for reading only and looks
//! once in a while, so it cannot slow the run.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use super::{LiveRun, find_live, refuse};
use crate::monitor::top::{View, draw, once};

/// What `launcher top` was asked for.
#[derive(Clone, Debug)]
pub struct TopOptions {
    /// The run; `None` is the newest that is going on.
    pub run: Option<PathBuf>,
    /// Print one frame.
    pub once: bool,
    /// Between two looks.
    pub every: Duration,
}

/// Bounds of the interval that `+` and `-` change.
const FASTEST: Duration = Duration::from_millis(250);
const SLOWEST: Duration = Duration::from_secs(16);
/// Columns of a frame that goes to no terminal.
const PAPER: u16 = 160;

/// Shows it; returns the launcher's exit code.
pub fn top(options: &TopOptions) -> u8 {
    let mut run = match find_live(options.run.as_deref()) {
        Ok(run) => run,
        Err(error) => return refuse(&error),
    };
    if options.once || !std::io::stdout().is_terminal() {
        let width = ratatui::crossterm::terminal::size().map_or(PAPER, |(columns, _)| columns);
        let width = if std::io::stdout().is_terminal() {
            width
        } else {
            PAPER
        };
        print!("{}", one_frame(&mut run, options.every, width));
        return 0;
    }
    let mut terminal = match ratatui::try_init() {
        Ok(terminal) => terminal,
        Err(error) => return refuse(&format!("the terminal: {error}")),
    };
    let shown = show(&mut terminal, &mut run, options.every);
    ratatui::restore();
    match shown {
        Ok(true) => {
            println!("{}: the run has ended", run.path.display());
            0
        }
        Ok(false) => 0,
        Err(error) => refuse(&format!("the terminal: {error}")),
    }
}

/// A frame of two looks.
fn one_frame(run: &mut LiveRun, every: Duration, width: u16) -> String {
    run.look();
    let gpus = run.watch_gpus();
    // The helper has to load the driver.
    let least = if gpus.is_some() { 3 } else { 0 };
    std::thread::sleep(every.max(Duration::from_secs(least)));
    let (look, snapshot) = run.look();
    let mut view = View::new(look, &snapshot, run.metrics());
    if let Some(gpus) = &gpus {
        view.set_gpus(&gpus.latest());
    }
    once(&view, width)
}

/// Until `q` (false) or the end of the run (true).
fn show(
    terminal: &mut ratatui::DefaultTerminal,
    run: &mut LiveRun,
    every: Duration,
) -> std::io::Result<bool> {
    let (look, snapshot) = run.look();
    let mut view = View::new(look, &snapshot, run.metrics());
    let mut every = every;
    let mut looked = Instant::now();
    let gpus = run.watch_gpus();
    loop {
        view.every_s = every.as_secs_f64();
        terminal.draw(|frame| draw(frame, &view))?;
        let left = every.saturating_sub(looked.elapsed());
        if event::poll(left)? {
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => match key.code {
                    KeyCode::Char('q') | KeyCode::Esc => return Ok(false),
                    KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                        return Ok(false);
                    }
                    KeyCode::Char('p' | ' ') => view.paused = !view.paused,
                    KeyCode::Char('s') => view.order = view.order.next(),
                    KeyCode::Char('?' | 'h') => view.help = !view.help,
                    KeyCode::Char('+') => every = (every / 2).max(FASTEST),
                    KeyCode::Char('-') => every = (every * 2).min(SLOWEST),
                    _ => {}
                },
                _ => {}
            }
            continue;
        }
        looked = Instant::now();
        if !run.is_live() {
            return Ok(true);
        }
        if !view.paused {
            let (look, snapshot) = run.look();
            view.add(look, &snapshot, run.metrics());
            if let Some(gpus) = &gpus {
                view.set_gpus(&gpus.latest());
            }
        }
    }
}
