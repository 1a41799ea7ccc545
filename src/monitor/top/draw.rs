//! One frame of `launcher top`.

use ratatui::backend::TestBackend;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table, Wrap};
use ratatui::{Frame, Terminal};

use super::{View, spark, stacked};
use crate::control::Role;
use crate::monitor::diagnose::Verdict;
use crate::monitor::live::{duration, short};
use crate::monitor::look::WorkerLook;
use crate::monitor::shares::Spent;
use crate::shm::{SeatState, SlotPhase};

/// Width of a worker's bar of shares.
const BAR: u16 = 20;

fn color(kind: Spent) -> Color {
    match kind {
        Spent::Busy => Color::Green,
        Spent::Slot => Color::Yellow,
        Spent::Data => Color::Red,
        Spent::Reduce => Color::Blue,
        Spent::Peers => Color::Magenta,
        Spent::Idle => Color::DarkGray,
        Spent::Load => Color::Cyan,
    }
}

fn letter(kind: Spent) -> &'static str {
    &kind.name()[..1]
}

/// Draws the whole terminal.
pub fn draw(frame: &mut Frame<'_>, view: &View) {
    let workers = view.look.workers.len() as u16;
    let [head, diagnosis, table, below, keys] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(2),
        Constraint::Max(workers + 3),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(heading(view), head);
    frame.render_widget(line_of_diagnosis(view), diagnosis);
    draw_workers(frame, view, table);
    let [ring, curves] = Layout::vertical([Constraint::Length(5), Constraint::Min(0)]).areas(below);
    draw_ring(frame, view, ring);
    draw_curves(frame, view, curves);
    frame.render_widget(keys_line(view), keys);
    if view.help {
        draw_help(frame);
    }
}

fn heading(view: &View) -> Paragraph<'static> {
    let look = &view.look;
    let progress = look.progress();
    let filled = (progress * 20.0).round() as usize;
    let mut first = vec![
        Span::from(format!("{} ", look.run)).bold(),
        Span::from(format!("{} ", look.phase)).cyan(),
        Span::from("█".repeat(filled.min(20))).green(),
        Span::from("░".repeat(20 - filled.min(20))).dark_gray(),
        Span::from(format!(
            " {:.0} %  {} of {} units",
            100.0 * progress,
            look.ledger.done,
            look.ledger.done + look.ledger.quarantined + look.ledger.pending + look.ledger.leased
        )),
    ];
    if look.ledger.quarantined > 0 {
        first.push(Span::from(format!("  {} quarantined", look.ledger.quarantined)).red());
    }
    let mut second = format!(
        "tokens/s: targets {}, drafters {}",
        short(view.role_tokens_per_s(Role::Target)),
        short(view.role_tokens_per_s(Role::Drafter))
    );
    if let Some(training) = &look.training {
        first.push(Span::from(format!(
            "  step {}  loss {:.3}  accepted {:.2}",
            training.step, training.loss, training.block_accepted_length
        )));
        if let Some(seconds) = training.remaining_s {
            first.push(Span::from(format!("  {} left", duration(seconds))).bold());
        }
        second += &format!("  lr {:.2e}", training.lr);
    }
    let restarts: u32 = look.workers.iter().map(|worker| worker.restarts).sum();
    second += &format!("  restarts {restarts}");
    Paragraph::new(vec![Line::from(first), Line::from(second)])
}

fn line_of_diagnosis(view: &View) -> Paragraph<'static> {
    let diagnosis = &view.look.diagnosis;
    let color = match diagnosis.verdict {
        Verdict::Balanced => Color::Green,
        Verdict::Phase => Color::Cyan,
        verdict if verdict.is_trouble() => Color::LightRed,
        _ => Color::Yellow,
    };
    let mark = if diagnosis.verdict.is_trouble() {
        "! "
    } else {
        "> "
    };
    Paragraph::new(format!("{mark}{}", diagnosis.text))
        .style(Style::new().fg(color).add_modifier(Modifier::BOLD))
        .wrap(Wrap { trim: true })
}

fn draw_workers(frame: &mut Frame<'_>, view: &View, area: Rect) {
    let has_gpus = !view.gpus.is_empty();
    // Of what is left beside the other columns; the text of the last column needs some too.
    let fixed = 11 + 13 + 9 + 7 + 6 + BAR + 6 * 7 + 10 + if has_gpus { 18 } else { 0 };
    let past = area.width.saturating_sub(fixed + 46).min(40);
    let mut names: Vec<String> = ["worker", "place", "is", "tok/s", "CPU"]
        .map(str::to_owned)
        .to_vec();
    let mut widths = vec![
        Constraint::Length(11),
        Constraint::Length(13),
        Constraint::Length(8),
        Constraint::Length(6),
        Constraint::Length(5),
    ];
    if has_gpus {
        names.push("GPU  memory".to_owned());
        widths.push(Constraint::Length(17));
    }
    names.push("time".to_owned());
    widths.push(Constraint::Length(BAR));
    for kind in &Spent::ALL[..6] {
        names.push(kind.name().to_owned());
        widths.push(Constraint::Length(6));
    }
    if past > 4 {
        names.push("busy until now".to_owned());
        widths.push(Constraint::Length(past));
    }
    names.push("for".to_owned());
    widths.push(Constraint::Length(6));
    names.push("doing".to_owned());
    widths.push(Constraint::Min(10));
    let rows = view
        .rows()
        .into_iter()
        .map(|worker| row(view, worker, has_gpus, past));
    let title = format!("workers, {}", view.order.words());
    let table = Table::new(rows, widths)
        .header(Row::new(names).style(Style::new().add_modifier(Modifier::BOLD)))
        .column_spacing(1)
        .block(Block::bordered().title(title));
    frame.render_widget(table, area);
}

fn row(view: &View, worker: &WorkerLook, has_gpus: bool, past: u16) -> Row<'static> {
    let shares = view.shares(worker);
    let here = worker.seat == SeatState::Occupied;
    let condition = worker.condition();
    let style = match condition {
        "alive" => Style::new(),
        "left" | "not there" => Style::new().fg(Color::DarkGray),
        "traced" => Style::new().fg(Color::Cyan),
        _ => Style::new()
            .fg(Color::LightRed)
            .add_modifier(Modifier::BOLD),
    };
    let restarts = if worker.restarts > 0 {
        format!(" ↻{}", worker.restarts)
    } else {
        String::new()
    };
    let mut cells = vec![
        Cell::from(format!("{}{restarts}", worker.name)),
        Cell::from(worker.place.clone().unwrap_or_else(|| "-".to_owned())),
        Cell::from(condition),
        Cell::from(if here {
            short(view.tokens_per_s(worker))
        } else {
            String::new()
        }),
        Cell::from(
            worker
                .cpu
                .map_or(String::new(), |cores| format!("{:4.0}%", 100.0 * cores)),
        ),
    ];
    if has_gpus {
        cells.push(Cell::from(view.gpu(worker).map_or(String::new(), |gpu| {
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            format!(
                "{:3.0}% {:.0}/{:.0} GiB",
                100.0 * gpu.busy,
                gib(gpu.used),
                gib(gpu.total)
            )
        })));
    }
    let bar = stacked(&shares, usize::from(BAR));
    let bar: Vec<Span<'static>> = bar
        .into_iter()
        .map(|(kind, count)| Span::from(letter(kind).repeat(count)).fg(color(kind)))
        .collect();
    cells.push(Cell::from(Line::from(if here { bar } else { Vec::new() })));
    for kind in &Spent::ALL[..6] {
        let share = shares.share(*kind);
        let text = if here {
            format!("{:4.0}%", 100.0 * share)
        } else {
            String::new()
        };
        let dim = share < 0.005;
        let style = Style::new().fg(if dim { Color::DarkGray } else { color(*kind) });
        cells.push(Cell::from(text).style(style));
    }
    if past > 4 {
        let all = view.pasts.get(&worker.name);
        let text = all.map_or(String::new(), |past_shares| {
            let busy = past_shares.shares.iter();
            spark(
                busy.map(|shares| shares.share(Spent::Busy)),
                1.0,
                usize::from(past),
            )
        });
        cells.push(Cell::from(text).style(Style::new().fg(Color::Green)));
    }
    cells.push(Cell::from(if here {
        format!("{:.1}s", worker.for_s)
    } else {
        String::new()
    }));
    cells.push(Cell::from(worker.doing.clone()));
    Row::new(cells).style(style)
}

fn draw_ring(frame: &mut Frame<'_>, view: &View, area: Rect) {
    let ring = view.look.ring;
    let title = format!(
        "ring: {} slots, {} free (.), {} being filled (f), {} ready (R), {} held (h)",
        ring.total(),
        ring.free,
        ring.filling,
        ring.ready,
        ring.held
    );
    let owner = |seat: Option<u32>| {
        let worker = view.look.workers.get(seat? as usize)?;
        Some(format!(
            "{}{}",
            &worker.name.role.to_string()[..1],
            worker.name.rank
        ))
    };
    let mut map = Vec::new();
    let mut owned: std::collections::BTreeMap<String, u32> = std::collections::BTreeMap::new();
    for slot in &view.slots {
        let (mark, color) = match slot.phase {
            SlotPhase::Free => (".", Color::DarkGray),
            SlotPhase::Filling => ("f", Color::Yellow),
            SlotPhase::Ready => ("R", Color::Green),
            SlotPhase::Held => ("h", Color::Blue),
        };
        map.push(Span::from(mark).fg(color));
        if let Some(owner) = owner(slot.seat) {
            *owned.entry(owner).or_default() += 1;
        }
    }
    let owned: Vec<String> = owned
        .into_iter()
        .map(|(owner, count)| format!("{owner} {count}"))
        .collect();
    map.push(Span::from(if owned.is_empty() {
        String::new()
    } else {
        format!("   in the hands of: {}", owned.join(", "))
    }));
    let width = usize::from(area.width.saturating_sub(24));
    let depths = view.ring.iter().map(|ring| f64::from(ring.ready));
    let depth = spark(depths, f64::from(ring.total()), width);
    let lines = vec![
        Line::from(map),
        Line::from(vec![Span::from("ready: "), Span::from(depth).green()]),
        Line::from(
            "empty for long: targets are too slow; full for long: drafters are too slow"
                .dark_gray(),
        ),
    ];
    let ring = Paragraph::new(lines).block(Block::bordered().title(title));
    frame.render_widget(ring, area);
}

fn draw_curves(frame: &mut Frame<'_>, view: &View, area: Rect) {
    let width = usize::from(area.width.saturating_sub(40)).min(super::KEPT);
    let curve = |name: &'static str, pick: fn(&crate::monitor::metrics::MetricsRecord) -> f64| {
        let values: Vec<f64> = view.steps.iter().map(pick).collect();
        let most = values.iter().copied().fold(0.0, f64::max);
        let last = values.last().copied().unwrap_or(0.0);
        Line::from(vec![
            Span::from(format!("{name:<16}{last:>8.3} ")),
            Span::from(spark(values.into_iter(), most, width)).cyan(),
        ])
    };
    let lines = if view.steps.is_empty() {
        vec![Line::from("no step has been committed yet".dark_gray())]
    } else {
        vec![
            curve("loss", |step| step.loss),
            curve("accepted length", |step| step.block_accepted_length),
            curve("gradient norm", |step| step.grad_norm),
        ]
    };
    let title = format!("the last {} steps", view.steps.len());
    frame.render_widget(
        Paragraph::new(lines).block(Block::bordered().title(title)),
        area,
    );
}

fn keys_line(view: &View) -> Line<'static> {
    let paused = if view.paused { "PAUSED  " } else { "" };
    Line::from(vec![
        Span::from(paused).yellow().bold(),
        Span::from(format!(
            "q quit  p pause  s sort  +/- interval ({:.1} s)  ? help",
            view.every_s
        ))
        .dark_gray(),
    ])
}

fn draw_help(frame: &mut Frame<'_>) {
    let mut lines = vec![Line::from(
        "What the time of each worker went to, over the last looks:".bold(),
    )];
    for kind in Spent::ALL {
        lines.push(Line::from(vec![
            Span::from(format!("  {} ", letter(kind).repeat(3))).fg(color(kind)),
            Span::from(format!("{:<8}{}", kind.name(), kind.meaning())),
        ]));
    }
    lines.extend([
        Line::from(""),
        Line::from("Targets fill slots, drafters train on them. A drafter that waits for data"),
        Line::from("needs more or faster targets; a target that waits for a slot is ahead of the"),
        Line::from("drafters, which is harmless. Reduce and peers: drafters wait for each other."),
        Line::from("CPU is processor time, 100 % for each thread; much less than busy means that"),
        Line::from("more threads want to compute than the machine has."),
        Line::from(""),
        Line::from("q quit, p pause and go on, s sort rows, + and - change the interval"),
    ]);
    let whole = frame.area();
    let (width, height) = (
        80.min(whole.width),
        (lines.len() as u16 + 2).min(whole.height),
    );
    let area = Rect::new(
        (whole.width - width) / 2,
        (whole.height - height) / 2,
        width,
        height,
    );
    frame.render_widget(Clear, area);
    let help = Paragraph::new(Text::from(lines)).block(Block::bordered().title("help"));
    frame.render_widget(help, area);
}

/// The frame as plain lines, `width` columns wide.
pub fn once(view: &View, width: u16) -> String {
    let height = view.look.workers.len() as u16 + 18;
    let mut terminal = match Terminal::new(TestBackend::new(width.max(20), height)) {
        Ok(terminal) => terminal,
        Err(never) => match never {},
    };
    let drawn = terminal.draw(|frame| draw(frame, view));
    if let Err(never) = drawn {
        match never {}
    }
    let buffer = terminal.backend().buffer();
    let area = buffer.area;
    let mut lines: Vec<String> = (0..area.height)
        .map(|y| {
            let cells = (0..area.width).map(|x| buffer[(x, y)].symbol());
            cells.collect::<String>().trim_end().to_owned()
        })
        .collect();
    // The keys are of no use on paper.
    lines.pop();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::monitor::look::tests::look;
    use crate::monitor::metrics::MetricsRecord;
    use crate::monitor::shares::Shares;
    use crate::monitor::top::Order;
    use crate::shm::{RunId, Segment};

    fn view(change: impl FnOnce(&mut crate::monitor::look::Look)) -> View {
        let geometry = crate::shm::testing::geometry(2, 2, 13, 100);
        let segment = Segment::create(&geometry, RunId::fresh()).expect("a segment");
        let mut look = look();
        change(&mut look);
        let steps: VecDeque<MetricsRecord> = (1..=5)
            .map(|step| MetricsRecord {
                step,
                loss: f64::from(6 - step),
                block_accepted_length: f64::from(step),
                ..MetricsRecord::default()
            })
            .collect();
        View::new(look, &segment.snapshot(), &steps)
    }

    #[test]
    fn a_frame_says_who_does_what_and_what_holds_the_run_up() {
        let view = view(|look| {
            for worker in &mut look.workers[2..] {
                worker.shares = Shares([0.6, 0.0, 0.4, 0.0, 0.0, 0.0, 0.0]);
            }
            look.workers[1].restarts = 2;
        });
        let text = once(&view, 160);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("runs/a training ██████░"), "{text}");
        assert!(
            lines[0]
                .contains("30 %  30 of 100 units  step 7  loss 1.250  accepted 2.50  1:30 left"),
            "{text}"
        );
        assert!(
            lines[2].starts_with(
                "> drafters wait 40 % of the time for data: targets are the bottleneck"
            ),
            "{text}"
        );
        let row = |name: &str| {
            let found = lines.iter().find(|line| line.contains(name));
            *found.unwrap_or_else(|| panic!("no {name} in {text}"))
        };
        assert!(row("drafter-0").contains("bbbbbbbbbbbbdddddddd"), "{text}");
        assert!(row("drafter-0").contains("60%") && row("drafter-0").contains("40%"));
        assert!(row("target-1").contains("↻2"), "{text}");
        // Nobody has claimed one of the thirteen slots.
        assert!(text.contains("│............. "), "{text}");
        assert!(!text.contains("in the hands of"), "{text}");
        assert!(row("accepted length").contains("5.000"), "{text}");
        assert!(!text.contains("q quit"));
    }

    #[test]
    fn rows_are_sorted_and_every_worker_has_one() {
        let mut view = view(|look| {
            look.workers[3].shares = Shares([0.1, 0.0, 0.9, 0.0, 0.0, 0.0, 0.0]);
            look.workers[2].tokens_per_s = 1.0;
        });
        let order = |view: &View| -> Vec<String> {
            view.rows()
                .iter()
                .map(|worker| worker.name.to_string())
                .collect()
        };
        assert_eq!(order(&view)[0], "target-0");
        view.order = Order::Role.next();
        assert_eq!(order(&view)[0], "drafter-1");
        view.order = view.order.next();
        assert_eq!(order(&view)[0], "drafter-0");
        assert_eq!(view.order.next(), Order::Role);
        for width in [120, 160, 250] {
            let text = once(&view, width);
            assert!(text.contains("drafter-1"), "{width}: {text}");
        }
    }
}
