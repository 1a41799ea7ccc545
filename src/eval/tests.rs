//! Decoding with a random target and a random drafter: whatever is drafted, the output is the target's own.

use std::collections::BTreeMap;

use super::decode::{Agreement, Choice, Decoder, Draft, DrawKeys, Limits, Speculative};
use crate::engine::cpu::Cpu;
use crate::model::drafter::{DraftOptions, DrafterConfig, DrafterModel, Params};
use crate::model::testing::Made;
use crate::model::{Target, TargetFiles, TargetNeeds};

const VOCABULARY: usize = 40;
const ALL_DRAFTS: [Draft; 6] = [
    Draft::CHAIN,
    Draft::Chain(1),
    Draft::Tree(1),
    Draft::Tree(3),
    Draft::Tree(8),
    Draft::Tree(64),
];

/// A target and a drafter that nobody trained.
struct Bench {
    engine: Cpu,
    target: Target<Cpu>,
    drafter: DrafterModel<Cpu>,
}

impl Bench {
    fn new() -> Self {
        let engine = Cpu::new(1).unwrap();
        let dir = tempfile::tempdir().unwrap();
        Made::new(true, true).write(dir.path());
        let files = TargetFiles::open(dir.path(), false).unwrap();
        let options = DraftOptions {
            layers: Some(1),
            block_size: Some(4),
            target_layers: Some(vec![1]),
            ..DraftOptions::default()
        };
        let config = DrafterConfig::for_target(&files.config().sizes(), 3, &options).unwrap();
        let needs = TargetNeeds {
            capture: config.target_layer_ids.clone(),
            final_hidden: true,
            lm_head: true,
        };
        let params = Params::init(&engine, &config, 1).unwrap();
        Self {
            target: Target::load(&engine, &files, needs).unwrap(),
            drafter: DrafterModel::new(&engine, config, params).unwrap(),
            engine,
        }
    }

    fn decoder(&mut self) -> Decoder<'_, Cpu> {
        Decoder::new(&self.engine, &mut self.target, &mut self.drafter, 60, 64).unwrap()
    }
}

fn prompt(number: u64) -> Vec<u32> {
    (0..2 + number % 5)
        .map(|i| ((number * 11 + i * 7) % 40) as u32)
        .collect()
}

fn limits(new_tokens: usize) -> Limits<'static> {
    Limits {
        new_tokens,
        end: &[13],
    }
}

#[test]
fn speculative_output_is_the_plain_one_greedily_and_with_the_same_draws() {
    let mut bench = Bench::new();
    let mut decoder = bench.decoder();
    let mut accepted = BTreeMap::new();
    for number in 0..12 {
        let prompt = prompt(number);
        for temperature in [0.0, 0.6, 2.0] {
            let mut keys = DrawKeys::new(5, number);
            let mut choice = match temperature {
                0.0 => Choice::Greedy,
                temperature => Choice::Sampled {
                    temperature,
                    keys: &mut keys,
                },
            };
            let plain = decoder
                .plain(&prompt, limits(25), &mut choice)
                .unwrap()
                .tokens;
            for draft in ALL_DRAFTS {
                let Speculative {
                    tokens,
                    accepted: rounds,
                    ..
                } = decoder
                    .speculative(&prompt, draft, limits(25), &mut choice)
                    .unwrap();
                assert_eq!(tokens, plain, "{draft:?} at {temperature}");
                assert_eq!(
                    decoder
                        .compare(&prompt, &plain, &tokens, &mut choice)
                        .unwrap(),
                    Agreement::Equal
                );
                let all: &mut Vec<usize> = accepted.entry(format!("{draft:?}")).or_default();
                all.extend(rounds);
            }
        }
    }
    assert_eq!(accepted["Tree(1)"], accepted["Chain(1)"]);
    let total = |draft: &str| accepted[draft].iter().sum::<usize>();
    assert!(total("Tree(64)") > total("Tree(8)") && total("Tree(8)") > total("Tree(1)"));
    assert!(total("Tree(1)") > 0, "{accepted:?}");
}

#[test]
fn a_difference_is_a_tie_only_where_the_target_is_undecided() {
    let mut bench = Bench::new();
    let mut decoder = bench.decoder();
    let prompt = prompt(3);
    let plain = decoder
        .plain(&prompt, limits(9), &mut Choice::Greedy)
        .unwrap()
        .tokens;
    let mut other = plain.clone();
    other[4] = (other[4] + 1) % 40;
    let mut compare = |answer: &[u32]| {
        decoder
            .compare(&prompt, &plain, answer, &mut Choice::Greedy)
            .unwrap()
    };
    assert_eq!(compare(&other), Agreement::Differs { at: 4 });
    assert_eq!(compare(&plain[..5]), Agreement::Differs { at: 5 });
    let longer = [&plain[..], &[1]].concat();
    assert_eq!(compare(&longer), Agreement::Differs { at: plain.len() });
    drop(decoder);

    // Two tokens with one embedding, which is also the head, always tie: the lower one is the greedy choice.
    let dir = tempfile::tempdir().unwrap();
    let mut made = Made::new(true, true);
    let (_, values) = made.tensors.get_mut("model.embed_tokens.weight").unwrap();
    let greedy = plain[0] as usize;
    let twin = if greedy == 39 { 38 } else { 39 };
    values.copy_within(greedy * 24..(greedy + 1) * 24, twin * 24);
    made.write(dir.path());
    let files = TargetFiles::open(dir.path(), false).unwrap();
    let needs = bench.target.needs().clone();
    bench.target = Target::load(&bench.engine, &files, needs).unwrap();
    let mut decoder = bench.decoder();
    let (low, high) = (greedy.min(twin) as u32, greedy.max(twin) as u32);
    let plain = decoder
        .plain(&prompt, limits(1), &mut Choice::Greedy)
        .unwrap()
        .tokens;
    assert_eq!(plain, [low]);
    let agreement = decoder
        .compare(&prompt, &plain, &[high], &mut Choice::Greedy)
        .unwrap();
    assert_eq!(agreement, Agreement::Tie { at: 0 });
}

/// Two-sample χ² of counts over the same cells: the statistic and its degrees of freedom. Cells that hold few counts
/// are thrown together.
fn chi_squared(one: &[u32], other: &[u32]) -> (f64, f64) {
    let total = |counts: &[u32]| f64::from(counts.iter().sum::<u32>());
    let (n, m) = (total(one), total(other));
    let mut cells: Vec<(f64, f64)> = Vec::new();
    let mut few = (0.0, 0.0);
    for (&a, &b) in one.iter().zip(other) {
        let (a, b) = (f64::from(a), f64::from(b));
        if a + b < 20.0 {
            few = (few.0 + a, few.1 + b);
        } else {
            cells.push((a, b));
        }
    }
    if few.0 + few.1 > 0.0 {
        cells.push(few);
    }
    let (k, l) = ((m / n).sqrt(), (n / m).sqrt());
    let term = |&(a, b): &(f64, f64)| (k * a - l * b).powi(2) / (a + b);
    (cells.iter().map(term).sum(), cells.len() as f64 - 1.0)
}

/// The point that a χ² variable exceeds once in 10,000 (Wilson and Hilferty's approximation).
fn critical(degrees: f64) -> f64 {
    let v = 2.0 / (9.0 * degrees);
    degrees * (1.0 - v + 3.719 * v.sqrt()).powi(3)
}

/// Counts of the second and third tokens of answers with other draws each: of each token, and of pairs of them.
fn counts(answers: impl Iterator<Item = Vec<u32>>) -> [Vec<u32>; 3] {
    let mut counts = [vec![0; VOCABULARY], vec![0; VOCABULARY], vec![0; 64]];
    for answer in answers {
        let [_, second, third] = answer[..] else {
            panic!("{answer:?} has not three tokens");
        };
        counts[0][second as usize] += 1;
        counts[1][third as usize] += 1;
        counts[2][(second % 8 * 8 + third % 8) as usize] += 1;
    }
    counts
}

/// The statistical test of losslessness at a temperature: plain and speculative answers with independent draws are
/// two samples of one distribution, by χ² tests of the tokens' and of pairs' frequencies.
#[test]
fn sampled_output_has_the_plain_distribution() {
    let mut bench = Bench::new();
    let mut decoder = bench.decoder();
    let prompt = prompt(2);
    let limits = Limits {
        new_tokens: 3,
        end: &[],
    };
    let draws = 3000;
    let mut answer = |draft: Option<Draft>, seed, number| {
        let mut keys = DrawKeys::new(seed, number);
        let mut choice = Choice::Sampled {
            temperature: 0.8,
            keys: &mut keys,
        };
        match draft {
            None => decoder.plain(&prompt, limits, &mut choice).unwrap().tokens,
            Some(draft) => {
                let found = decoder.speculative(&prompt, draft, limits, &mut choice);
                found.unwrap().tokens
            }
        }
    };
    let plain = counts((0..draws).map(|number| answer(None, 1, number)));
    for (seed, draft) in [(2, Draft::CHAIN), (3, Draft::Tree(8))] {
        let found = counts((0..draws).map(|number| answer(Some(draft), seed, number)));
        for (plain, found) in plain.iter().zip(&found) {
            let (statistic, degrees) = chi_squared(plain, found);
            assert!(degrees >= 4.0, "the draws are all alike: {plain:?}");
            assert!(
                statistic < critical(degrees),
                "{draft:?}: {statistic} at {degrees}"
            );
        }
    }
    // It tells apart what a lossy decoder would give: a neighbouring temperature, and answers of which one in ten
    // takes a drafted token whatever the target says, here always the same one.
    let mut decoder = bench.decoder();
    let mut other = |temperature, spoiled: fn(u64) -> bool| {
        counts((0..draws).map(|number| {
            let mut keys = DrawKeys::new(4, number);
            let mut choice = Choice::Sampled {
                temperature,
                keys: &mut keys,
            };
            let mut answer = decoder.plain(&prompt, limits, &mut choice).unwrap().tokens;
            if spoiled(number) {
                answer[1] = 0;
            }
            answer
        }))
    };
    for other in [other(1.6, |_| false), other(0.8, |number| number % 10 == 0)] {
        let (statistic, degrees) = chi_squared(&plain[0], &other[0]);
        assert!(statistic > critical(degrees), "{statistic} at {degrees}");
    }
    // And takes what has the same distribution for that, with independent draws.
    let again = other(0.8, |_| false);
    for (plain, again) in plain.iter().zip(&again) {
        let (statistic, degrees) = chi_squared(plain, again);
        assert!(statistic < critical(degrees), "{statistic} at {degrees}");
    }
}
