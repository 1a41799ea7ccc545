//! Answers by the target itself, many at a time.
//!
//! Every pass continues all sequences in hand by one token; a place that becomes free is taken by the next prompt
//! in the same pass in which the others go on. A sequence's tokens depend on its prompt, its seed and its stream
//! alone, not on its company.

use std::ops::ControlFlow;

use super::decode::{DrawKeys, Limits};
use crate::engine::{Draws, Engine};
use crate::model::{BatchDecoder, ModelError, NewTokens, Target};

/// What is to be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Whatever the caller knows it by.
    pub id: u64,
    /// Its tokens, at least one.
    pub prompt: Vec<u32>,
    /// Names its draws under the seed.
    pub stream: u64,
}

/// Why an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By a token that ends answers.
    Stop,
    /// At its longest.
    Length,
}

impl Finish {
    /// As servers call it, and as data files have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Of which question.
    pub id: u64,
    /// Its tokens; the one that ends it belongs to it.
    pub tokens: Vec<u32>,
    /// Why it ends.
    pub finish: Finish,
}

/// How answers are made.
#[derive(Clone, Copy, Debug)]
pub struct GenerateOptions<'a> {
    /// Sequences at a time.
    pub sequences: usize,
    /// Longest prompt and answer together.
    pub capacity: usize,
    /// Tokens of a pass beyond which no further prompt begins in it.
    pub prefill_tokens: usize,
    /// When an answer ends.
    pub limits: Limits<'a>,
    /// 0: greedily.
    pub temperature: f32,
    /// Of the draws.
    pub seed: u64,
}

/// A sequence in hand.
struct Active {
    question: Question,
    tokens: Vec<u32>,
    keys: DrawKeys,
    longest: usize,
}

impl Active {
    fn new(question: Question, options: &GenerateOptions<'_>) -> Result<Self, ModelError> {
        let room = options.capacity.saturating_sub(question.prompt.len());
        if question.prompt.is_empty() || room == 0 {
            return Err(ModelError::Request(format!(
                "a prompt of {} tokens leaves no room in sequences of {}",
                question.prompt.len(),
                options.capacity
            )));
        }
        Ok(Self {
            keys: DrawKeys::new(options.seed, question.stream),
            tokens: Vec::new(),
            longest: room.min(options.limits.new_tokens),
            question,
        })
    }

    /// What its cache does not hold yet.
    fn new_tokens(&self) -> &[u32] {
        match self.tokens.last() {
            None => &self.question.prompt,
            Some(last) => std::slice::from_ref(last),
        }
    }

    fn finish(&self, limits: &Limits<'_>) -> Option<Finish> {
        let last = self.tokens.last()?;
        if limits.end.contains(last) {
            Some(Finish::Stop)
        } else if self.tokens.len() >= self.longest {
            Some(Finish::Length)
        } else {
            None
        }
    }
}

/// Answers what `next` asks until it has nothing more to ask and all answers are given. `done` may ask for more,
/// through `next`, or stop.
///
/// # Errors
/// A target that was not loaded for generation, a prompt that does not fit, or the engine's.
pub fn generate<E: Engine>(
    engine: &E,
    target: &mut Target<E>,
    options: &GenerateOptions<'_>,
    next: &mut dyn FnMut() -> Option<Question>,
    done: &mut dyn FnMut(Answer) -> ControlFlow<()>,
) -> Result<(), ModelError> {
    let mut decoder = BatchDecoder::new(engine, target, options.sequences, options.capacity)?;
    target.reserve(engine, options.capacity)?;
    let mut seats: Vec<Option<Active>> = (0..options.sequences).map(|_| None).collect();
    loop {
        let mut rows = seats.iter().flatten().count();
        let in_hand = rows;
        for seat in seats.iter_mut().filter(|seat| seat.is_none()) {
            if rows > in_hand && rows >= options.prefill_tokens {
                break;
            }
            let Some(question) = next() else { break };
            rows += question.prompt.len();
            *seat = Some(Active::new(question, options)?);
        }
        let mut parts = Vec::new();
        let mut keys = Vec::new();
        for (sequence, seat) in seats.iter_mut().enumerate() {
            let Some(active) = seat else { continue };
            keys.push(active.keys.at(active.tokens.len()));
            parts.push(NewTokens {
                sequence,
                ids: active.new_tokens(),
            });
        }
        if parts.is_empty() {
            return Ok(());
        }
        let hidden = decoder.step(engine, target, &parts)?;
        let mut ids = engine.upload_index(&vec![0; parts.len()])?;
        let draws = (options.temperature > 0.0).then_some(Draws {
            temperature: options.temperature,
            cap: target.config().final_cap.map(|cap| cap as f32),
            keys: &keys,
        });
        let head = target.head()?.lm_head();
        engine.choose(hidden.view(), head, draws, ids.view_mut())?;
        let ids = engine.download_index(ids.view())?;

        let active = seats.iter_mut().enumerate().filter(|(_, s)| s.is_some());
        for ((sequence, seat), id) in active.zip(ids) {
            let Some(active) = seat else { continue };
            active.tokens.push(id);
            let Some(finish) = active.finish(&options.limits) else {
                continue;
            };
            decoder.clear(sequence);
            if let Some(Active {
                question, tokens, ..
            }) = seat.take()
            {
                let answer = Answer {
                    id: question.id,
                    tokens,
                    finish,
                };
                if done(answer).is_break() {
                    return Ok(());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::engine::cpu::Cpu;
    use crate::model::testing::Made;

    fn options(sequences: usize, temperature: f32) -> GenerateOptions<'static> {
        GenerateOptions {
            sequences,
            capacity: 40,
            prefill_tokens: 8,
            limits: Limits {
                new_tokens: 12,
                end: &[7, 11],
            },
            temperature,
            seed: 3,
        }
    }

    /// All answers by id, and in which order they came.
    fn answers(
        options: &GenerateOptions<'_>,
        questions: &[Question],
    ) -> (BTreeMap<u64, Answer>, Vec<u64>) {
        let engine = Cpu::new(1).unwrap();
        let mut target = Made::target(&engine, true, &[]);
        let mut questions = questions.iter().cloned();
        let (mut found, mut order) = (BTreeMap::new(), Vec::new());
        generate(
            &engine,
            &mut target,
            options,
            &mut || questions.next(),
            &mut |answer| {
                order.push(answer.id);
                assert!(found.insert(answer.id, answer).is_none());
                ControlFlow::Continue(())
            },
        )
        .unwrap();
        (found, order)
    }

    fn questions(count: u64) -> Vec<Question> {
        let prompt = |id: u64| (0..1 + id % 9).map(move |i| ((id * 7 + i * 5) % 40) as u32);
        (0..count)
            .map(|id| Question {
                id,
                prompt: prompt(id).collect(),
                stream: id,
            })
            .collect()
    }

    #[test]
    fn answers_do_not_depend_on_their_company() {
        let questions = questions(23);
        for temperature in [0.0, 1.3] {
            let (alone, in_order) = answers(&options(1, temperature), &questions);
            assert!(in_order.is_sorted());
            for sequences in [4, 64] {
                let (together, order) = answers(&options(sequences, temperature), &questions);
                assert_eq!(together, alone);
                assert!(!order.is_sorted(), "places are taken over at once");
            }
            let ends = |finish| alone.values().filter(|a| a.finish == finish).count();
            assert!(ends(Finish::Length) > 0, "{alone:?}");
            for answer in alone.values() {
                let stops = answer
                    .tokens
                    .iter()
                    .filter(|t| [7, 11].contains(*t))
                    .count();
                assert_eq!(stops, usize::from(answer.finish == Finish::Stop));
                assert!(answer.tokens.len() <= 12);
            }
            if temperature > 0.0 {
                assert!(ends(Finish::Stop) > 0, "{alone:?}");
                let mut other = options(4, temperature);
                other.seed = 4;
                assert_ne!(answers(&other, &questions).0, alone);
            }
        }
    }

    #[test]
    fn an_answer_ends_where_its_sequence_is_full_and_a_prompt_must_fit() {
        let long = Question {
            id: 0,
            prompt: vec![3; 35],
            stream: 0,
        };
        let mut options = options(2, 0.0);
        options.limits.end = &[];
        let (found, _) = answers(&options, &[long]);
        assert_eq!(
            (found[&0].tokens.len(), found[&0].finish),
            (5, Finish::Length)
        );

        let engine = Cpu::new(1).unwrap();
        let mut target = Made::target(&engine, true, &[]);
        let mut asked = Some(Question {
            id: 0,
            prompt: vec![3; 40],
            stream: 0,
        });
        let error = generate(
            &engine,
            &mut target,
            &options,
            &mut || asked.take(),
            &mut |_| ControlFlow::Continue(()),
        );
        let error = error.unwrap_err().to_string();
        assert!(error.contains("leaves no room"), "{error}");
    }

    #[test]
    fn an_answer_may_ask_for_more_or_stop() {
        let engine = Cpu::new(1).unwrap();
        let mut target = Made::target(&engine, true, &[]);
        let asked = std::cell::RefCell::new(questions(1));
        let mut count = 0;
        generate(
            &engine,
            &mut target,
            &options(2, 0.0),
            &mut || asked.borrow_mut().pop(),
            &mut |answer| {
                count += 1;
                asked.borrow_mut().push(Question {
                    id: answer.id + 1,
                    prompt: vec![1, 2],
                    stream: 0,
                });
                match count {
                    5 => ControlFlow::Break(()),
                    _ => ControlFlow::Continue(()),
                }
            },
        )
        .unwrap();
        assert_eq!(count, 5);
    }
}
