//! What decoding a set of prompts showed: accepted length, speed, and whether the output is the target's own.

use std::time::Duration;

use serde::Serialize;

use super::decode::{Plain, Speculative};

/// Spacing of the compute type's numbers around 1 beyond which two logits are told apart: products are summed in
/// another order for one row than for many, so float32 logits are trusted to about 15 bits and bfloat16 ones to 6.
pub fn resolution(half_bytes: usize) -> f32 {
    match half_bytes {
        4 => 2.0f32.powi(-15),
        _ => 2.0f32.powi(-6),
    }
}

/// How a speculative answer compares with the plain one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// Token for token the same.
    Equal,
    /// They part where the target's two best logits tie within the resolution.
    Tie {
        /// At which token.
        at: usize,
    },
    /// They part although the target was sure.
    Differs {
        /// At which token.
        at: usize,
    },
}

/// Compares an answer with the plain greedy one.
pub fn compare(plain: &Plain, tokens: &[u32], resolution: f32) -> Agreement {
    let parts = (0..plain.tokens.len().max(tokens.len()))
        .find(|&at| plain.tokens.get(at) != tokens.get(at));
    match parts {
        None => Agreement::Equal,
        Some(at) => match (plain.margins.get(at), plain.logits.get(at)) {
            (Some(margin), Some(logit)) if *margin <= resolution * logit.abs().max(1.0) => {
                Agreement::Tie { at }
            }
            _ => Agreement::Differs { at },
        },
    }
}

/// Plain greedy decoding of all prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PlainFigures {
    /// Prompts.
    pub prompts: usize,
    /// Tokens of the answers.
    pub tokens: usize,
    /// Tokens a second behind the prefill.
    pub tokens_per_s: f64,
}

/// Speculative decoding of all prompts with one kind of draft.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// `chain`, or `tree N`.
    pub draft: String,
    /// Mean tokens a round, the target's own included.
    pub accepted_length: f64,
    /// Share of rounds in which at least k drafted tokens stood, k = 1 first.
    pub by_position: Vec<f64>,
    /// Rounds.
    pub rounds: usize,
    /// Tokens a second behind the prefill.
    pub tokens_per_s: f64,
    /// Seconds spent drafting.
    pub draft_s: f64,
    /// Seconds spent verifying.
    pub verify_s: f64,
    /// Answers equal to plain greedy decoding.
    pub equal: usize,
    /// Answers that part from it where logits tie.
    pub ties: usize,
    /// Answers that part from it elsewhere: an error.
    pub differ: usize,
}

/// All figures of an evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EvalReport {
    /// Which checkpoint.
    pub checkpoint: String,
    /// Without a drafter.
    pub plain: PlainFigures,
    /// One for each kind of draft.
    pub drafts: Vec<Figures>,
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

/// Adds up speculative answers and compares each with the plain one.
pub fn figures(
    draft: String,
    plain: &[Plain],
    answers: &[Speculative],
    resolution: f32,
) -> Figures {
    let mut out = Figures {
        draft,
        ..Figures::default()
    };
    let mut produced = 0;
    let mut reached: Vec<usize> = Vec::new();
    for (plain, answer) in plain.iter().zip(answers) {
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
        match compare(plain, &answer.tokens, resolution) {
            Agreement::Equal => out.equal += 1,
            Agreement::Tie { .. } => out.ties += 1,
            Agreement::Differs { .. } => out.differ += 1,
        }
    }
    let rounds = out.rounds.max(1) as f64;
    out.accepted_length = produced as f64 / rounds;
    out.by_position = reached.iter().map(|&count| count as f64 / rounds).collect();
    out.tokens_per_s = rate(
        produced,
        Duration::from_secs_f64(out.draft_s + out.verify_s),
    );
    out
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        tokens as f64 / time.as_secs_f64()
    }
}

impl EvalReport {
    /// The table for people.
    pub fn table(&self) -> String {
        let plain = &self.plain;
        let mut lines = vec![
            format!(
                "{} prompts, {} tokens of plain greedy decoding at {:.0} tokens/s",
                plain.prompts, plain.tokens, plain.tokens_per_s
            ),
            format!(
                "{:<10} {:>8} {:>10} {:>8} {:>9} {:>9}  {}",
                "draft", "accepted", "tokens/s", "speed-up", "draft s", "verify s", "by position"
            ),
        ];
        for draft in &self.drafts {
            let by_position: Vec<String> = draft
                .by_position
                .iter()
                .map(|share| format!("{share:.2}"))
                .collect();
            lines.push(format!(
                "{:<10} {:>8.3} {:>10.0} {:>7.2}x {:>9.2} {:>9.2}  {}",
                draft.draft,
                draft.accepted_length,
                draft.tokens_per_s,
                draft.tokens_per_s / plain.tokens_per_s.max(f64::MIN_POSITIVE),
                draft.draft_s,
                draft.verify_s,
                by_position.join(" ")
            ));
        }
        for draft in &self.drafts {
            lines.push(format!(
                "{}: {} of {} answers equal to plain greedy decoding, {} part where logits tie, {} differ",
                draft.draft, draft.equal, plain.prompts, draft.ties, draft.differ
            ));
        }
        lines.join("\n")
    }

    /// Whether every output is the target's own.
    pub fn is_lossless(&self) -> bool {
        self.drafts.iter().all(|draft| draft.differ == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(tokens: &[u32], margins: &[f32]) -> Plain {
        Plain {
            tokens: tokens.to_vec(),
            margins: margins.to_vec(),
            logits: vec![4.0; tokens.len()],
            time: Duration::from_secs(1),
        }
    }

    #[test]
    fn answers_part_by_a_tie_or_by_mistake() {
        let answer = plain(&[1, 2, 3], &[0.5, 1e-6, 0.5]);
        let compare = |tokens: &[u32]| compare(&answer, tokens, resolution(4));
        assert_eq!(compare(&[1, 2, 3]), Agreement::Equal);
        assert_eq!(compare(&[1, 9, 3]), Agreement::Tie { at: 1 });
        assert_eq!(compare(&[1, 2, 9]), Agreement::Differs { at: 2 });
        assert_eq!(compare(&[1, 2]), Agreement::Differs { at: 2 });
        assert_eq!(compare(&[1, 2, 3, 4]), Agreement::Differs { at: 3 });
    }

    #[test]
    fn accepted_length_counts_the_targets_own_token() {
        let answers = [Speculative {
            tokens: vec![1, 2, 3, 4, 5, 6],
            accepted: vec![2, 1],
            ..Speculative::default()
        }];
        let plain = [plain(&[1, 2, 3, 4, 5, 6], &[1.0; 6])];
        let out = figures("chain".to_owned(), &plain, &answers, resolution(4));
        assert_eq!(out.accepted_length, 2.5);
        assert_eq!(out.by_position, [1.0, 0.5]);
        assert_eq!((out.equal, out.ties, out.differ), (1, 0, 0));
    }
}
