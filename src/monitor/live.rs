//! The live line: what a run does right now.

use std::fmt::Write;
use std::time::{Duration, Instant};

use super::console::Console;

/// How often a line is printed where there is no terminal.
const PLAIN: Duration = Duration::from_secs(5);
/// How often the line on a terminal changes.
const LIVE: Duration = Duration::from_millis(200);

/// A run at one moment.
#[derive(Clone, Debug, Default)]
pub struct LiveView {
    /// What it does, in a word or two: `loading`, `training`, `stopping`.
    pub phase: String,
    /// Steps committed.
    pub step: u32,
    /// Steps expected at this rate of anchors, if known.
    pub steps: Option<u32>,
    /// Share of the planned anchors that are committed, 0..=1.
    pub progress: f64,
    /// Loss of the last step.
    pub loss: Option<f64>,
    /// `block_accepted_length` of the last step.
    pub block_accepted_length: Option<f64>,
    /// Tokens that all targets together prefill in a second.
    pub target_tokens_per_s: f64,
    /// Tokens that all drafters together train on in a second.
    pub drafter_tokens_per_s: f64,
    /// Slots ready.
    pub ring_ready: u32,
    /// Slots of the ring.
    pub ring_slots: u32,
    /// Share of its time that each worker spends computing, by a short name such as `t0`.
    pub busy: Vec<(String, f64)>,
    /// Seconds until the end at the present rate, if known.
    pub remaining_s: Option<f64>,
}

impl LiveView {
    /// The line.
    pub fn line(&self) -> String {
        let mut text = format!("{} step {}", self.phase, self.step);
        // Writing to a String cannot fail.
        if let Some(steps) = self.steps {
            let _ = write!(text, "/{steps}");
        }
        let _ = write!(text, " ({:.0}%)", (100.0 * self.progress).clamp(0.0, 100.0));
        if let Some(loss) = self.loss {
            let _ = write!(text, " | loss {loss:.3}");
        }
        if let Some(length) = self.block_accepted_length {
            let _ = write!(text, " accept {length:.2}");
        }
        let _ = write!(
            text,
            " | tok/s targets {} drafters {}",
            short(self.target_tokens_per_s),
            short(self.drafter_tokens_per_s)
        );
        let _ = write!(text, " | ring {}/{}", self.ring_ready, self.ring_slots);
        if !self.busy.is_empty() {
            text.push_str(" | busy");
            for (name, share) in &self.busy {
                let _ = write!(text, " {name} {:.0}%", (100.0 * share).clamp(0.0, 100.0));
            }
        }
        if let Some(seconds) = self.remaining_s {
            let _ = write!(text, " | {} left", duration(seconds));
        }
        text
    }
}

/// A rate in three or four characters: `950`, `12.3k`, `1.20M`.
pub fn short(rate: f64) -> String {
    if rate >= 1e6 {
        format!("{:.2}M", rate / 1e6)
    } else if rate >= 1e4 {
        format!("{:.1}k", rate / 1e3)
    } else {
        format!("{rate:.0}")
    }
}

/// Seconds as `1:02:03` or `4:05`.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}

/// Shows views: in place on a terminal, as a line every few seconds elsewhere.
#[derive(Debug)]
pub struct LiveLine {
    console: Console,
    every: Duration,
    shown: Option<Instant>,
}

impl LiveLine {
    /// On this console.
    pub fn new(console: Console) -> Self {
        let every = if console.is_live() { LIVE } else { PLAIN };
        Self {
            console,
            every,
            shown: None,
        }
    }

    /// Whether it is time for another view; making one costs a look at shared memory.
    pub fn is_due(&self) -> bool {
        self.shown.is_none_or(|at| at.elapsed() >= self.every)
    }

    /// Shows a view if it is time.
    pub fn show(&mut self, view: &LiveView) {
        if !self.is_due() {
            return;
        }
        self.shown = Some(Instant::now());
        if self.console.is_live() {
            self.console.set_live(&view.line());
        } else {
            self.console.line(&view.line());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_holds_what_is_known() {
        let view = LiveView {
            phase: "training".to_owned(),
            step: 12,
            steps: Some(300),
            progress: 0.04,
            loss: Some(2.3456),
            block_accepted_length: Some(1.5),
            target_tokens_per_s: 12_345.0,
            drafter_tokens_per_s: 950.0,
            ring_ready: 3,
            ring_slots: 28,
            busy: vec![("t0".to_owned(), 0.5), ("d0".to_owned(), 1.0)],
            remaining_s: Some(65.0),
        };
        assert_eq!(
            view.line(),
            "training step 12/300 (4%) | loss 2.346 accept 1.50 | tok/s targets 12.3k drafters 950 | ring 3/28 | busy t0 50% d0 100% | 1:05 left"
        );
    }

    #[test]
    fn plain_lines_are_rare() {
        let mut line = LiveLine::new(Console::new(true));
        assert!(line.is_due());
        line.show(&LiveView::default());
        assert!(!line.is_due());
    }
}
