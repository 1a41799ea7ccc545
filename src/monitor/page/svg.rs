//! Plots as inline SVG: curves, bars of shares, a histogram. No script, no font, nothing from elsewhere.

use std::fmt::Write;

use crate::monitor::shares::{Shares, Spent};

/// Size of a plot in its own units; the page scales it.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 230.0;
/// Room for the axes' numbers.
const LEFT: f64 = 62.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 40.0;
/// Points drawn of one curve; more are averaged.
const POINTS: usize = 500;

/// Colours of curves, told apart also by those who see few colours.
const COLORS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6a00", "#555555",
];

/// A named curve.
#[derive(Clone, Debug)]
pub struct Curve {
    /// What it is.
    pub name: String,
    /// Its points, x rising.
    pub points: Vec<(f64, f64)>,
}

/// What a plot of curves says of itself.
#[derive(Clone, Copy, Debug)]
pub struct Axes {
    /// Under the plot.
    pub x: &'static str,
    /// Beside it.
    pub y: &'static str,
    /// The y axis begins at 0.
    pub from_zero: bool,
}

/// Text as it may stand in HTML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// A number in few characters.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if size >= 1e6 {
        format!("{:.1}M", value / 1e6)
    } else if size >= 1e4 {
        format!("{:.1}k", value / 1e3)
    } else if size >= 100.0 {
        format!("{value:.0}")
    } else if size >= 1.0 {
        trimmed(format!("{value:.2}"))
    } else if size >= 1e-3 {
        trimmed(format!("{value:.4}"))
    } else {
        format!("{value:.1e}")
    }
}

fn trimmed(text: String) -> String {
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Steps of 1, 2 or 5 times a power of ten that cut `low..=high` into about five.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let span = high - low;
    if !(span.is_finite() && span > 0.0) {
        return vec![low];
    }
    let rough = span / 5.0;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= rough)
        .unwrap_or(10.0 * power);
    let first = (low / step).ceil();
    let mut all = Vec::new();
    let mut count = 0.0;
    while (first + count) * step <= high + step * 1e-9 {
        all.push((first + count) * step);
        count += 1.0;
    }
    all
}

/// Means of consecutive points, so that at most [`POINTS`] are left.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let finite: Vec<(f64, f64)> = points
        .iter()
        .copied()
        .filter(|(x, y)| x.is_finite() && y.is_finite())
        .collect();
    let each = finite.len().div_ceil(POINTS).max(1);
    let mean = |part: &[(f64, f64)]| {
        let (x, y) = part
            .iter()
            .fold((0.0, 0.0), |(x, y), point| (x + point.0, y + point.1));
        (x / part.len() as f64, y / part.len() as f64)
    };
    finite.chunks(each).map(mean).collect()
}

struct Frame {
    x: (f64, f64),
    y: (f64, f64),
}

impl Frame {
    fn around(curves: &[Vec<(f64, f64)>], from_zero: bool) -> Option<Self> {
        let all = || curves.iter().flatten();
        let fold = |pick: fn(&(f64, f64)) -> f64, start: f64, with: fn(f64, f64) -> f64| {
            all().map(pick).fold(start, with)
        };
        all().next()?;
        let x = (
            fold(|p| p.0, f64::INFINITY, f64::min),
            fold(|p| p.0, f64::NEG_INFINITY, f64::max),
        );
        let mut y = (
            fold(|p| p.1, f64::INFINITY, f64::min),
            fold(|p| p.1, f64::NEG_INFINITY, f64::max),
        );
        if from_zero {
            y.0 = y.0.min(0.0);
        }
        let margin = if y.1 > y.0 { 0.05 * (y.1 - y.0) } else { 0.5 };
        let x = if x.1 > x.0 { x } else { (x.0 - 0.5, x.0 + 0.5) };
        let low = if from_zero { y.0 } else { y.0 - margin };
        Some(Self {
            x,
            y: (low, y.1 + margin),
        })
    }

    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let across = (x - self.x.0) / (self.x.1 - self.x.0);
        let up = (y - self.y.0) / (self.y.1 - self.y.0);
        (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )
    }

    fn axes(&self, svg: &mut String, axes: Axes) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        // Writing to a String cannot fail, here and below.
        for tick in ticks(self.y.0, self.y.1) {
            let (_, y) = self.place((self.x.0, tick));
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 5.0,
                y + 4.0,
                number(tick)
            );
        }
        for tick in ticks(self.x.0, self.x.1) {
            let (x, _) = self.place((tick, self.y.0));
            let _ = write!(
                svg,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 15.0,
                number(tick)
            );
        }
        let _ = write!(
            svg,
            "<line class=\"axis\" x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{right}\" y2=\"{bottom}\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text><text transform=\"translate(13 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            (LEFT + right) / 2.0,
            HEIGHT - 6.0,
            escaped(axes.x),
            (TOP + bottom) / 2.0,
            escaped(axes.y)
        );
    }
}

fn open(svg: &mut String, height: f64, label: &str) {
    let _ = write!(
        svg,
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">",
        escaped(label)
    );
}

/// A figure with a heading, a sentence about it, and a drawing.
pub fn figure(title: &str, about: &str, drawing: &str) -> String {
    format!(
        "<figure><h3>{}</h3><p>{}</p>{drawing}</figure>\n",
        escaped(title),
        escaped(about)
    )
}

/// Curves over a common x axis, with a legend when there are several.
pub fn curves(curves: &[Curve], axes: Axes) -> String {
    let thin: Vec<Vec<(f64, f64)>> = curves.iter().map(|curve| thinned(&curve.points)).collect();
    let Some(frame) = Frame::around(&thin, axes.from_zero) else {
        return "<p class=\"none\">nothing was recorded</p>".to_owned();
    };
    let mut svg = String::new();
    open(&mut svg, HEIGHT, axes.y);
    frame.axes(&mut svg, axes);
    for (place, points) in thin.iter().enumerate() {
        let color = COLORS[place % COLORS.len()];
        let path: Vec<String> = points
            .iter()
            .map(|point| {
                let (x, y) = frame.place(*point);
                format!("{x:.1},{y:.1}")
            })
            .collect();
        if let [only] = path.as_slice() {
            let (x, y) = only.split_once(',').unwrap_or(("0", "0"));
            let _ = write!(
                svg,
                "<circle cx=\"{x}\" cy=\"{y}\" r=\"4\" fill=\"{color}\"/>"
            );
        } else {
            let _ = write!(
                svg,
                "<polyline points=\"{}\" stroke=\"{color}\"/>",
                path.join(" ")
            );
        }
    }
    svg.push_str("</svg>");
    if curves.len() > 1 {
        let entries = curves.iter().enumerate().map(|(place, curve)| {
            let color = COLORS[place % COLORS.len()];
            let last = curve.points.last().map_or(0.0, |point| point.1);
            (
                color,
                format!("{} ({})", escaped(&curve.name), number(last)),
            )
        });
        svg += &legend(entries);
    }
    svg
}

fn legend<'a>(entries: impl Iterator<Item = (&'a str, String)>) -> String {
    let entries: Vec<String> = entries
        .map(|(color, name)| format!("<span><i style=\"background:{color}\"></i>{name}</span>"))
        .collect();
    format!("<div class=\"legend\">{}</div>", entries.join(" "))
}

fn color(kind: Spent) -> &'static str {
    match kind {
        Spent::Busy => "#009e73",
        Spent::Slot => "#e69f00",
        Spent::Data => "#d55e00",
        Spent::Reduce => "#0072b2",
        Spent::Peers => "#cc79a7",
        Spent::Idle => "#999999",
        Spent::Load => "#56b4e9",
    }
}

/// One bar for each row, cut by what the time went to.
pub fn bars(rows: &[(String, Shares)]) -> String {
    if rows.is_empty() {
        return "<p class=\"none\">nothing was recorded</p>".to_owned();
    }
    const ROW: f64 = 26.0;
    const NAMES: f64 = 90.0;
    let mut svg = String::new();
    open(
        &mut svg,
        rows.len() as f64 * ROW + 4.0,
        "shares of each worker's time",
    );
    for (place, (name, shares)) in rows.iter().enumerate() {
        let y = place as f64 * ROW + 2.0;
        let _ = write!(
            svg,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            NAMES - 6.0,
            y + 16.0,
            escaped(name)
        );
        let mut x = NAMES;
        for (kind, share) in shares.iter() {
            let width = share * (WIDTH - NAMES - RIGHT);
            if width < 0.05 {
                continue;
            }
            let percent = format!("{:.0}%", 100.0 * share);
            let _ = write!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{}: {} {percent}</title></rect>",
                ROW - 5.0,
                color(kind),
                escaped(name),
                kind.meaning()
            );
            if width > 34.0 {
                let _ = write!(
                    svg,
                    "<text class=\"in\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{percent}</text>",
                    x + width / 2.0,
                    y + 15.0
                );
            }
            x += width;
        }
    }
    svg.push_str("</svg>");
    let used = Spent::ALL
        .into_iter()
        .filter(|kind| rows.iter().any(|(_, shares)| shares.share(*kind) > 0.0005));
    svg + &legend(used.map(|kind| (color(kind), kind.meaning().to_owned())))
}

/// How often values fall into each of some equal ranges; the largest hundredth goes into the last one.
pub fn histogram(values: &[f64], x: &'static str) -> String {
    const BINS: usize = 40;
    let mut sorted: Vec<f64> = values
        .iter()
        .copied()
        .filter(|value| value.is_finite())
        .collect();
    sorted.sort_by(f64::total_cmp);
    let (Some(&low), Some(&high)) = (
        sorted.first(),
        sorted.get((sorted.len().saturating_sub(1)) * 99 / 100),
    ) else {
        return "<p class=\"none\">nothing was recorded</p>".to_owned();
    };
    let width = ((high - low) / BINS as f64).max(f64::MIN_POSITIVE);
    let mut counts = [0_u32; BINS];
    for value in &sorted {
        let bin = ((value - low) / width) as usize;
        counts[bin.min(BINS - 1)] += 1;
    }
    let most = f64::from(counts.iter().copied().max().unwrap_or(1));
    let frame = Frame {
        x: (low, high.max(low + f64::MIN_POSITIVE * 2.0 * BINS as f64)),
        y: (0.0, 1.05 * most),
    };
    let mut svg = String::new();
    open(&mut svg, HEIGHT, x);
    frame.axes(
        &mut svg,
        Axes {
            x,
            y: "steps",
            from_zero: true,
        },
    );
    for (bin, count) in counts.iter().enumerate() {
        let (left, top) = frame.place((low + bin as f64 * width, f64::from(*count)));
        let (right, bottom) = frame.place((low + (bin + 1) as f64 * width, 0.0));
        let _ = write!(
            svg,
            "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>",
            (right - left - 0.8).max(0.5),
            bottom - top,
            COLORS[0]
        );
    }
    svg + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    const AXES: Axes = Axes {
        x: "seconds",
        y: "loss <nats>",
        from_zero: true,
    };

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        let found = ticks(0.13, 0.88);
        assert!(found.len() >= 3 && found.iter().all(|t| (0.13..=0.881).contains(t)));
        assert_eq!(ticks(3.0, 3.0), [3.0]);
        assert_eq!(ticks(f64::NAN, 3.0).len(), 1);
    }

    #[test]
    fn curves_stay_inside_the_drawing_and_text_is_escaped() {
        let points: Vec<(f64, f64)> = (0..5000)
            .map(|i| (f64::from(i), (f64::from(i) / 50.0).sin()))
            .chain([(5000.0, f64::NAN)])
            .collect();
        let all = [
            Curve {
                name: "a<b".to_owned(),
                points,
            },
            Curve {
                name: "one".to_owned(),
                points: vec![(3.0, 0.5)],
            },
        ];
        let svg = curves(&all, AXES);
        assert!(svg.contains("a&lt;b") && svg.contains("loss &lt;nats&gt;"));
        assert!(svg.contains("<circle "));
        let line = svg.split("points=\"").nth(1).unwrap();
        let line = &line[..line.find('"').unwrap()];
        let count = line.split(' ').count();
        assert!((400..=POINTS).contains(&count), "{count}");
        for point in line.split(' ') {
            let (x, y) = point.split_once(',').unwrap();
            let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
            assert!((LEFT..=WIDTH).contains(&x) && (0.0..=HEIGHT - BOTTOM + 0.1).contains(&y));
        }
        assert!(curves(&[], AXES).contains("nothing was recorded"));
    }

    #[test]
    fn bars_add_up_to_the_whole_width() {
        let shares = Shares([0.5, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0]);
        let svg = bars(&[("drafter-0".to_owned(), shares)]);
        let widths: f64 = svg
            .split("<rect ")
            .skip(1)
            .map(|rect| {
                let width = rect.split("width=\"").nth(1).unwrap();
                width[..width.find('"').unwrap()].parse::<f64>().unwrap()
            })
            .sum();
        assert!((widths - (WIDTH - 90.0 - RIGHT)).abs() < 0.5, "{widths}");
        assert!(svg.contains(">50%<") && svg.contains("waiting for data"));
        assert!(!svg.contains("all-reduce"));
    }

    #[test]
    fn a_histogram_counts_every_value_once() {
        let values: Vec<f64> = (0..1000).map(f64::from).collect();
        let svg = histogram(&values, "seconds");
        assert_eq!(svg.matches("<rect ").count(), 40);
        assert!(histogram(&[2.0], "seconds").contains("<rect "));
        assert!(histogram(&[], "seconds").contains("nothing"));
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.25, "0.25"),
            (3.10, "3.1"),
            (250.4, "250"),
            (12_300.0, "12.3k"),
            (1.2e-5, "1.2e-5"),
        ] {
            assert_eq!(number(value), text);
        }
    }
}
