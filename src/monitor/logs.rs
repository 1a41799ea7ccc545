//! One log per process. `RUST_LOG` chooses what is in it; without it, everything from `info` up.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use super::console::Console;

fn filter() -> EnvFilter {
    EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"))
}

/// Logs of a worker go to standard error, which the launcher pointed at logs/ROLE-RANK.log.
pub fn start_worker() {
    let layer = fmt::layer().with_ansi(false).with_writer(io::stderr);
    // A second start in one process keeps the first.
    let _ = tracing_subscriber::registry()
        .with(filter())
        .with(layer)
        .try_init();
}

/// Logs of the launcher go to the file at `path`; warnings and errors also to the console.
///
/// # Errors
///
/// When the file cannot be opened.
pub fn start_launcher(path: &Path, console: &Console) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    let to_file = fmt::layer().with_ansi(false).with_writer(Arc::new(file));
    let to_console = ToConsole {
        console: console.clone(),
    };
    // A second start in one process keeps the first.
    let _ = tracing_subscriber::registry()
        .with(filter())
        .with(to_file)
        .with(to_console)
        .try_init();
    Ok(())
}

/// Shows what a person should see.
struct ToConsole {
    console: Console,
}

impl<S: Subscriber> Layer<S> for ToConsole {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() <= Level::WARN {
            let mut text = Text(String::new());
            event.record(&mut text);
            self.console.warn(&text.0);
        }
    }
}

/// An event's message followed by its fields.
struct Text(String);

impl tracing::field::Visit for Text {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0.insert_str(0, &format!("{value:?}"));
        } else {
            self.0.push_str(&format!(" {}={value:?}", field.name()));
        }
    }
}
