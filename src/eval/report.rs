//! What decoding sets of prompts showed: accepted length, speed, and whether the output is the target's own.

use std::time::Duration;

use serde::Serialize;

use super::decode::{Agreement, Plain, Speculative};

/// Plain decoding of some prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PlainFigures {
    /// Prompts.
    pub prompts: usize,
    /// Tokens of the answers.
    pub tokens: usize,
    /// Tokens a second behind the prefill.
    pub tokens_per_s: f64,
}

/// Speculative decoding of some prompts with one kind of draft.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// `chain`, or `tree N`.
    pub draft: String,
    /// Nodes of the tree; none for a chain.
    pub nodes: Option<usize>,
    /// Mean tokens a round, the target's own included.
    pub accepted_length: f64,
    /// Share of rounds in which at least k drafted tokens stood, k = 1 first.
    pub by_position: Vec<f64>,
    /// Rounds.
    pub rounds: usize,
    /// Tokens a second behind the prefill.
    pub tokens_per_s: f64,
    /// Times as fast as plain decoding.
    pub speed_up: f64,
    /// Seconds spent drafting.
    pub draft_s: f64,
    /// Seconds spent verifying.
    pub verify_s: f64,
    /// Answers equal to plain decoding.
    pub equal: usize,
    /// Answers that part from it where the target's two tokens tie.
    pub ties: usize,
    /// Answers that part from it elsewhere: an error.
    pub differ: usize,
}

/// All figures of some prompts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SetFigures {
    /// Which prompts.
    pub name: String,
    /// Without a drafter.
    pub plain: PlainFigures,
    /// One for each kind of draft.
    pub drafts: Vec<Figures>,
    /// Nodes of the tree that gave the most tokens a second.
    pub best_tree: Option<usize>,
}

/// All figures of an evaluation; those of all sets together stand beside `sets`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EvalReport {
    /// Which checkpoint.
    pub checkpoint: String,
    /// On what it was decoded.
    pub device: String,
    /// 0: greedily.
    pub temperature: f64,
    /// Longest answer in tokens.
    pub max_new_tokens: usize,
    /// All prompts together.
    #[serde(flatten)]
    pub all: SetFigures,
    /// One for each set of prompts.
    pub sets: Vec<SetFigures>,
}

/// The answers of some prompts with one kind of draft.
#[derive(Clone, Debug, Default)]
pub struct Drafted {
    /// Nodes of the tree; none for a chain.
    pub nodes: Option<usize>,
    /// One for each prompt.
    pub answers: Vec<Speculative>,
    /// How each compares with the plain one.
    pub agreements: Vec<Agreement>,
}

impl SetFigures {
    /// Adds up the answers of prompts: plain ones, and those of each kind of draft, all in the same order.
    pub fn new(name: impl Into<String>, plain: &[Plain], drafted: &[Drafted]) -> Self {
        let plain = plain_figures(plain);
        let drafts: Vec<Figures> = drafted.iter().map(|d| figures(&plain, d)).collect();
        let trees = drafts.iter().filter(|draft| draft.nodes.is_some());
        let best = trees.max_by(|a, b| a.tokens_per_s.total_cmp(&b.tokens_per_s));
        Self {
            name: name.into(),
            best_tree: best.and_then(|draft| draft.nodes),
            plain,
            drafts,
        }
    }
}

/// Adds up plain answers.
pub fn plain_figures(answers: &[Plain]) -> PlainFigures {
    let tokens: usize = answers.iter().map(|answer| answer.tokens.len()).sum();
    let time: Duration = answers.iter().map(|answer| answer.time).sum();
    // The first token of each comes from the prefill.
    let timed = tokens - answers.len().min(tokens);
    PlainFigures {
        prompts: answers.len(),
        tokens,
        tokens_per_s: rate(timed, time),
    }
}

/// Adds up speculative answers.
pub fn figures(plain: &PlainFigures, drafted: &Drafted) -> Figures {
    let mut out = Figures {
        draft: drafted.name(),
        nodes: drafted.nodes,
        ..Figures::default()
    };
    let mut produced = 0;
    let mut reached: Vec<usize> = Vec::new();
    for answer in &drafted.answers {
        produced += answer.produced();
        out.rounds += answer.accepted.len();
        for &accepted in &answer.accepted {
            if reached.len() < accepted {
                reached.resize(accepted, 0);
            }
            reached[..accepted].iter_mut().for_each(|count| *count += 1);
        }
        out.draft_s += answer.draft_time.as_secs_f64();
        out.verify_s += answer.verify_time.as_secs_f64();
    }
    for agreement in &drafted.agreements {
        match agreement {
            Agreement::Equal => out.equal += 1,
            Agreement::Tie { .. } => out.ties += 1,
            Agreement::Differs { .. } => out.differ += 1,
        }
    }
    let rounds = out.rounds.max(1) as f64;
    out.accepted_length = produced as f64 / rounds;
    out.by_position = reached.iter().map(|&count| count as f64 / rounds).collect();
    let time = Duration::from_secs_f64(out.draft_s + out.verify_s);
    out.tokens_per_s = rate(produced, time);
    out.speed_up = out.tokens_per_s / plain.tokens_per_s.max(f64::MIN_POSITIVE);
    out
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        tokens as f64 / time.as_secs_f64()
    }
}

impl Drafted {
    /// `chain`, or `tree N`.
    pub fn name(&self) -> String {
        match self.nodes {
            None => "chain".to_owned(),
            Some(nodes) => format!("tree {nodes}"),
        }
    }
}

/// The table's line of one kind of draft.
pub fn row(draft: &Figures) -> String {
    let by_position: Vec<String> = draft
        .by_position
        .iter()
        .map(|share| format!("{share:.2}"))
        .collect();
    format!(
        "{:<10} {:>8.3} {:>10.0} {:>7.2}x {:>9.2} {:>9.2}  {}",
        draft.draft,
        draft.accepted_length,
        draft.tokens_per_s,
        draft.speed_up,
        draft.draft_s,
        draft.verify_s,
        by_position.join(" ")
    )
}

impl EvalReport {
    /// The part of the table for people that is about some prompts: head, rows, foot.
    pub fn part(&self, set: &SetFigures) -> String {
        let mut lines = vec![self.head(&set.name, &set.plain)];
        lines.extend(set.drafts.iter().map(row));
        lines.push(self.foot(set));
        lines.join("\n")
    }

    /// What stands before the rows.
    pub fn head(&self, name: &str, plain: &PlainFigures) -> String {
        let (prompts, tokens, rate) = (plain.prompts, plain.tokens, plain.tokens_per_s);
        let (how, device) = (self.how(), &self.device);
        format!(
            "{name}: {prompts} prompts, {tokens} tokens of plain {how} decoding at {rate:.0} tokens/s on {device}\n\
             {:<10} {:>8} {:>10} {:>8} {:>9} {:>9}  {}",
            "draft", "accepted", "tokens/s", "speed-up", "draft s", "verify s", "by position"
        )
    }

    /// What stands behind the rows.
    pub fn foot(&self, set: &SetFigures) -> String {
        let best = set.best_tree;
        let best = best.map(|nodes| format!("best tree budget: {nodes}"));
        let how = self.how();
        let lossless = |draft: &Figures| {
            format!(
                "{}: {} of {} answers equal to plain {how} decoding, {} part where logits tie, {} differ",
                draft.draft, draft.equal, set.plain.prompts, draft.ties, draft.differ
            )
        };
        let lines = best.into_iter().chain(set.drafts.iter().map(lossless));
        lines.collect::<Vec<_>>().join("\n")
    }

    /// How the target chose its tokens.
    fn how(&self) -> String {
        match self.temperature {
            0.0 => "greedy".to_owned(),
            temperature => format!("sampled (temperature {temperature})"),
        }
    }

    /// Whether every output is the target's own.
    pub fn is_lossless(&self) -> bool {
        self.all.drafts.iter().all(|draft| draft.differ == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepted_length_counts_the_targets_own_token() {
        let answer = |accepted: &[usize], tokens: usize, seconds| Speculative {
            tokens: vec![1; tokens],
            accepted: accepted.to_vec(),
            draft_time: Duration::from_secs(seconds),
            verify_time: Duration::from_secs(1),
        };
        let plain = Plain {
            tokens: vec![1; 6],
            time: Duration::from_secs(5),
        };
        let drafted = |nodes, seconds| Drafted {
            nodes,
            answers: vec![answer(&[2, 1], 6, seconds)],
            agreements: vec![Agreement::Tie { at: 3 }],
        };
        let drafted = [drafted(None, 4), drafted(Some(8), 0), drafted(Some(64), 1)];
        let set = SetFigures::new("held-out", &[plain], &drafted);
        let chain = &set.drafts[0];
        assert_eq!(chain.accepted_length, 2.5);
        assert_eq!(chain.by_position, [1.0, 0.5]);
        assert_eq!((chain.equal, chain.ties, chain.differ), (0, 1, 0));
        assert_eq!((set.plain.tokens_per_s, chain.speed_up), (1.0, 1.0));
        assert_eq!(set.best_tree, Some(8));
        let report = EvalReport {
            all: set.clone(),
            sets: vec![set],
            ..EvalReport::default()
        };
        let table = report.part(&report.all);
        assert!(table.contains("best tree budget: 8") && report.is_lossless());
        assert_eq!(table.matches("draft s").count(), 1);
    }
}
