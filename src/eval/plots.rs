//! Accepted length as pictures: by position in the draft, and by the budget of the tree.
//!
//! Lines and text in SVG, which browsers and papers show; a drawing library would bring more than is drawn here.

use std::fmt::Write as _;
use std::path::Path;

use super::report::{EvalReport, Figures};

/// Size of the picture, and its margins: left, right, top, bottom.
const SIZE: (f64, f64) = (720.0, 420.0);
const MARGINS: [f64; 4] = [60.0, 130.0, 44.0, 52.0];
/// Marks on an axis, about.
const MARKS: f64 = 6.0;
/// Told apart also by those who see fewer colours (Okabe and Ito's set).
const COLORS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// A line's name and its points.
type Line = (String, Vec<(f64, f64)>);

/// What is drawn.
struct Picture<'a> {
    title: &'a str,
    x: &'a str,
    y: &'a str,
    lines: Vec<Line>,
}

/// Writes `accepted_by_position.svg` and, where trees were decoded with, `accepted_by_budget.svg` into `dir`.
///
/// # Errors
/// In words: a file that cannot be written.
pub fn write(report: &EvalReport, dir: &Path) -> Result<(), String> {
    let shares = |draft: &Figures| {
        let points = (1..).zip(&draft.by_position);
        points.map(|(k, &share)| (f64::from(k), share)).collect()
    };
    let drafts = report.all.drafts.iter();
    let by_position = Picture {
        title: "Drafted tokens that stood",
        x: "position in the draft",
        y: "share of rounds",
        lines: drafts.map(|d| (d.draft.clone(), shares(d))).collect(),
    };
    let sets = report.sets.iter().map(|set| {
        let trees = set.drafts.iter();
        let mut points: Vec<(f64, f64)> = trees
            .filter_map(|draft| Some((draft.nodes? as f64, draft.accepted_length)))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        (set.name.clone(), points)
    });
    let by_budget = Picture {
        title: "Accepted length with draft trees",
        x: "nodes of the tree",
        y: "tokens a round",
        lines: sets.filter(|(_, points)| !points.is_empty()).collect(),
    };
    let save = |picture: &Picture<'_>, name: &str| {
        let path = dir.join(name);
        std::fs::write(&path, picture.svg()).map_err(|error| format!("{}: {error}", path.display()))
    };
    save(&by_position, "accepted_by_position.svg")?;
    match by_budget.lines.is_empty() {
        true => Ok(()),
        false => save(&by_budget, "accepted_by_budget.svg"),
    }
}

impl Picture<'_> {
    fn svg(&self) -> String {
        let (width, height) = SIZE;
        let [left, right, top, bottom] = MARGINS;
        let points = || {
            self.lines
                .iter()
                .flat_map(|(_, points)| points.iter().copied())
        };
        let across = Axis::over(points().map(|p| p.0), left, width - right);
        let up = Axis::over(points().map(|p| p.1), height - bottom, top);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        let mut text = |x: f64, y: f64, how: &str, words: &str| {
            let words = escaped(words);
            // Writing to a string cannot fail.
            let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" {how}>{words}</text>");
        };
        let middle = (left + width - right) / 2.0;
        text(
            middle,
            24.0,
            "text-anchor=\"middle\" font-size=\"16\"",
            self.title,
        );
        text(middle, height - 12.0, "text-anchor=\"middle\"", self.x);
        let turned = format!(
            "text-anchor=\"middle\" transform=\"rotate(-90 16 {0:.1})\"",
            height / 2.0
        );
        text(16.0, height / 2.0, &turned, self.y);
        for mark in across.marks() {
            let name = format!("{}", (mark * 1e6).round() / 1e6);
            text(
                across.at(mark),
                height - bottom + 18.0,
                "text-anchor=\"middle\"",
                &name,
            );
        }
        for mark in up.marks() {
            let name = format!("{}", (mark * 1e6).round() / 1e6);
            text(left - 8.0, up.at(mark) + 4.0, "text-anchor=\"end\"", &name);
        }
        for (i, (name, _)) in self.lines.iter().enumerate() {
            let how = format!("fill=\"{}\"", COLORS[i % COLORS.len()]);
            text(
                width - right + 14.0,
                top + 16.0 * i as f64 + 8.0,
                &how,
                name,
            );
        }
        for mark in up.marks() {
            let _ = writeln!(
                svg,
                "<path d=\"M{left} {y:.1}H{end}\" stroke=\"#ddd\"/>",
                y = up.at(mark),
                end = width - right,
            );
        }
        for (i, (_, points)) in self.lines.iter().enumerate() {
            let color = COLORS[i % COLORS.len()];
            let places: Vec<(f64, f64)> = points
                .iter()
                .map(|&(x, y)| (across.at(x), up.at(y)))
                .collect();
            let path: Vec<String> = places
                .iter()
                .map(|(x, y)| format!("{x:.1},{y:.1}"))
                .collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>",
                path.join(" ")
            );
            for (x, y) in places {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"/>"
                );
            }
        }
        svg + "</svg>\n"
    }
}

/// Values from 0 to `high`, drawn from `begin` to `end`.
struct Axis {
    high: f64,
    begin: f64,
    end: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, begin: f64, end: f64) -> Self {
        let high = values.fold(0.0, f64::max);
        Self {
            high: if high > 0.0 { high } else { 1.0 },
            begin,
            end,
        }
    }

    fn at(&self, value: f64) -> f64 {
        self.begin + value / self.high * (self.end - self.begin)
    }

    /// Multiples of 1, 2 or 5 times a power of ten.
    fn marks(&self) -> Vec<f64> {
        let rough = self.high / MARKS;
        let power = 10.0f64.powf(rough.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
        let step = steps.into_iter().find(|&step| step >= rough * 0.999);
        let step = step.unwrap_or(rough);
        let count = (self.high / step * 1.001).floor() as u32;
        (0..=count).map(|i| f64::from(i) * step).collect()
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::report::SetFigures;

    fn figures(nodes: Option<usize>, accepted_length: f64, by_position: &[f64]) -> Figures {
        Figures {
            draft: nodes.map_or("chain".to_owned(), |nodes| format!("tree {nodes}")),
            nodes,
            accepted_length,
            by_position: by_position.to_vec(),
            ..Figures::default()
        }
    }

    #[test]
    fn axes_are_marked_at_round_numbers() {
        let marks = |high| {
            let axis = Axis {
                high,
                begin: 0.0,
                end: 1.0,
            };
            axis.marks()
        };
        assert_eq!(marks(7.0), [0.0, 2.0, 4.0, 6.0]);
        assert_eq!(marks(64.0), [0.0, 20.0, 40.0, 60.0]);
        assert_eq!(marks(0.6).len(), 7);
        assert_eq!(marks(1.0).last(), Some(&1.0));
    }

    #[test]
    fn both_pictures_are_drawn_and_name_their_lines() {
        let dir = tempfile::tempdir().unwrap();
        let set = SetFigures {
            name: "a<b".to_owned(),
            drafts: vec![
                figures(None, 2.0, &[0.8, 0.2]),
                figures(Some(64), 3.0, &[0.9, 0.6, 0.4]),
                figures(Some(8), 2.5, &[0.9, 0.4, 0.2]),
            ],
            ..SetFigures::default()
        };
        let mut report = EvalReport {
            all: set.clone(),
            sets: vec![set],
            ..EvalReport::default()
        };
        write(&report, dir.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        let by_position = read("accepted_by_position.svg");
        for word in ["chain", "tree 8", "tree 64", "position in the draft"] {
            assert!(by_position.contains(&format!(">{word}<")), "{word}");
        }
        assert_eq!(by_position.matches("<polyline").count(), 3);
        assert_eq!(by_position.matches("<circle").count(), 8);
        // Rising budgets, and the largest at the right end.
        let by_budget = read("accepted_by_budget.svg");
        assert!(by_budget.contains("a&lt;b"));
        let line = by_budget.split("points=\"").nth(1).unwrap();
        let line = line.split('"').next().unwrap();
        assert_eq!(line, "126.2,98.0 590.0,44.0");
        // Nothing accepted anywhere, and no tree: one picture, without points.
        for figures in [&mut report.all, &mut report.sets[0]] {
            figures.drafts.truncate(1);
            figures.drafts[0].by_position.clear();
        }
        let other = tempfile::tempdir().unwrap();
        write(&report, other.path()).unwrap();
        assert!(!other.path().join("accepted_by_budget.svg").exists());
        let error = write(&report, &other.path().join("no/such")).unwrap_err();
        assert!(error.contains("accepted_by_position.svg"), "{error}");
    }
}
