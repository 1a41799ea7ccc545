//! What must hold of the drafter whatever its weights are, on the CPU engine.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::config::tests::small_config;
use super::*;
use crate::engine::cpu::Cpu;
use crate::engine::{Half, LossOptions};
use crate::train::micro_step::{MicroStepOut, UnitBatch, micro_step};

/// A document with random ids, mask, states and teacher.
pub(crate) struct Sample {
    pub(crate) ids: Vec<u32>,
    pub(crate) mask: Vec<u8>,
    pub(crate) anchors: Vec<u32>,
    pub(crate) states: Vec<f32>,
    pub(crate) teacher: Vec<f32>,
}

impl Sample {
    pub(crate) fn random(config: &DrafterConfig, length: usize, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut uniform = |n: usize| -> Vec<f32> {
            (0..n)
                .map(|_| (rng.next_u32() as f32 / u32::MAX as f32 - 0.5) * 4.0)
                .collect()
        };
        let states = uniform(length * config.captured() * config.hidden_size);
        let teacher = uniform(length * config.hidden_size);
        let ids = (0..length).map(|_| 4 + rng.next_u32() % 40).collect();
        let mask: Vec<u8> = (0..length)
            .map(|p| u8::from(p >= length / 3 && rng.next_u32() % 8 != 0))
            .collect();
        let anchors = crate::train::anchors::eligible(&mask)
            .filter(|_| rng.next_u32() % 3 != 0)
            .collect();
        Self {
            ids,
            mask,
            anchors,
            states,
            teacher,
        }
    }

    fn document(&self) -> Document<'_> {
        Document {
            ids: &self.ids,
            mask: &self.mask,
            anchors: &self.anchors,
        }
    }
}

/// A model with random weights and random frozen tables.
pub(crate) struct Fixture {
    pub(crate) engine: Cpu,
    pub(crate) model: DrafterModel<Cpu>,
    embedding: Half<Cpu>,
    lm_head: Half<Cpu>,
}

impl Fixture {
    pub(crate) fn new(config: DrafterConfig) -> Self {
        let engine = Cpu::new(1).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(99);
        let table: Vec<f32> = (0..2 * config.vocab_size * config.hidden_size)
            .map(|_| rng.next_u32() as f32 / u32::MAX as f32 - 0.5)
            .collect();
        let (embedding, lm_head) = table.split_at(table.len() / 2);
        let upload = |values| engine.upload_half(values, config.hidden_size).unwrap();
        let (embedding, lm_head) = (upload(embedding), upload(lm_head));
        let mut params = Params::init(&engine, &config, 5).unwrap();
        // Larger weights than at the start of a training, so that everything matters.
        let values = engine.download_float(params.masters.view()).unwrap();
        let matrices = params.layout().matrix_len();
        let values: Vec<f32> = values
            .iter()
            .enumerate()
            .map(|(i, v)| if i < matrices { v * 8.0 } else { *v })
            .collect();
        engine
            .write_float(params.masters.view_mut(), &values)
            .unwrap();
        params.refresh(&engine).unwrap();
        Self {
            model: DrafterModel::new(&engine, config, params).unwrap(),
            engine,
            embedding,
            lm_head,
        }
    }

    /// Hidden states of all blocks of `samples` packed together.
    fn hidden(&mut self, samples: &[&Sample]) -> Vec<f32> {
        let config = self.model.config().clone();
        let documents: Vec<_> = samples.iter().map(|s| s.document()).collect();
        let host = HostPlan::new(&config, &documents).unwrap();
        let plan = BlockPlan::upload(&self.engine, &config, host).unwrap();
        let states = self.states(samples);
        let tables = tables(&self.embedding, &self.lm_head);
        self.model
            .forward(&self.engine, tables, &plan, states.view(), false)
            .unwrap();
        self.engine.download_half(self.model.hidden()).unwrap()
    }

    fn states(&self, samples: &[&Sample]) -> Half<Cpu> {
        let config = self.model.config();
        let all: Vec<f32> = samples.iter().flat_map(|s| s.states.clone()).collect();
        self.engine
            .upload_half(&all, config.captured() * config.hidden_size)
            .unwrap()
    }

    /// One micro-step over `samples` packed together.
    pub(crate) fn micro_step(
        &mut self,
        samples: &[&Sample],
        options: &LossOptions,
    ) -> MicroStepOut {
        let documents: Vec<_> = samples.iter().map(|s| s.document()).collect();
        let states = self.states(samples);
        let teacher: Vec<f32> = samples.iter().flat_map(|s| s.teacher.clone()).collect();
        let teacher = self
            .engine
            .upload_half(&teacher, self.model.config().hidden_size)
            .unwrap();
        let unit = UnitBatch {
            documents: &documents,
            states: states.view(),
            teacher: Some(teacher.view()),
        };
        let tables = tables(&self.embedding, &self.lm_head);
        micro_step(&self.engine, &mut self.model, tables, &unit, options).unwrap()
    }

    /// The gradients since the last call.
    pub(crate) fn take_gradients(&mut self) -> Vec<f32> {
        let grads = self
            .engine
            .download_float(self.model.params.grads.view())
            .unwrap();
        self.model.params.zero_grads(&self.engine).unwrap();
        grads
    }

    /// Engine, model and tables, for calls that need all three.
    pub(crate) fn parts(&mut self) -> (&Cpu, &mut DrafterModel<Cpu>, Tables<'_, Cpu>) {
        let tables = tables(&self.embedding, &self.lm_head);
        (&self.engine, &mut self.model, tables)
    }
}

fn tables<'a>(embedding: &'a Half<Cpu>, lm_head: &'a Half<Cpu>) -> Tables<'a, Cpu> {
    Tables {
        embedding: embedding.view(),
        lm_head: lm_head.view(),
    }
}

fn sliding() -> DrafterConfig {
    DrafterConfig {
        layer_types: vec![LayerType::Sliding, LayerType::Full],
        sliding_window: Some(5),
        ..small_config()
    }
}

fn everything() -> LossOptions {
    LossOptions {
        streak_alpha: 0.5,
        use_soft_labels: true,
        kl_temperature: 1.5,
        cap_lambda: 0.2,
        ..LossOptions::default()
    }
}

/// ‖a − b‖ / ‖b‖ of every parameter, the worst.
fn worst(layout: &ParamLayout, a: &[f32], b: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    layout
        .params()
        .iter()
        .map(|p| {
            let range = p.window.offset..p.window.offset + p.window.len();
            let (a, b) = (&a[range.clone()], &b[range]);
            let difference = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
            let reference = norm(&mut b.iter().map(|&b| f64::from(b)));
            assert!(reference > 0.0, "{} has no gradient", p.name);
            difference / reference
        })
        .fold(0.0, f64::max)
}

#[test]
fn a_block_does_not_see_its_anchor_or_what_follows() {
    for config in [small_config(), sliding()] {
        let mut fixture = Fixture::new(config.clone());
        let width = config.captured() * config.hidden_size;
        let rows = config.block_size * config.hidden_size;
        let other = Sample::random(&config, 11, 1);
        let mut sample = Sample::random(&config, 24, 2);
        assert!(sample.anchors.len() > 4, "{:?}", sample.anchors);
        let before = fixture.hidden(&[&other, &sample]);
        for position in 0..sample.ids.len() {
            let kept = sample.states.clone();
            for value in &mut sample.states[position * width..(position + 1) * width] {
                *value = 3.0 - *value;
            }
            let after = fixture.hidden(&[&other, &sample]);
            sample.states = kept;
            // The other document's blocks come first.
            let first = other.anchors.len();
            assert_eq!(before[..first * rows], after[..first * rows]);
            for (i, &anchor) in sample.anchors.iter().enumerate() {
                let block = (first + i) * rows..(first + i + 1) * rows;
                let equal = before[block.clone()] == after[block];
                assert_eq!(
                    equal,
                    position >= anchor as usize,
                    "anchor {anchor}, position {position}"
                );
            }
        }
    }
}

#[test]
fn a_block_does_not_see_other_blocks() {
    let config = small_config();
    let rows = config.block_size * config.hidden_size;
    let mut fixture = Fixture::new(config.clone());
    let sample = Sample::random(&config, 30, 3);
    let together = fixture.hidden(&[&sample]);
    for (i, &anchor) in sample.anchors.iter().enumerate() {
        let alone = Sample {
            ids: sample.ids.clone(),
            mask: sample.mask.clone(),
            anchors: vec![anchor],
            states: sample.states.clone(),
            teacher: Vec::new(),
        };
        let alone = fixture.hidden(&[&alone]);
        for (a, b) in alone.iter().zip(&together[i * rows..]) {
            assert!((a - b).abs() < 1e-5, "anchor {anchor}: {a} {b}");
        }
    }
}

#[test]
fn decoding_with_a_cache_equals_the_training_forward() {
    for config in [small_config(), sliding()] {
        let width = config.captured() * config.hidden_size;
        let rows = config.block_size * config.hidden_size;
        let mut fixture = Fixture::new(config.clone());
        let samples = [
            Sample::random(&config, 26, 4),
            Sample::random(&config, 19, 5),
        ];
        let expected = fixture.hidden(&[&samples[0], &samples[1]]);
        let mut block = 0;
        let mut cache = DraftCache::new(&fixture.engine, &fixture.model, 3, 32).unwrap();
        for (number, sample) in samples.iter().enumerate() {
            // Sequence 0 stays empty; the samples are 2 and 1.
            let sequence = 2 - number;
            for &anchor in &sample.anchors {
                let states = fixture.engine.upload_half(&sample.states, width).unwrap();
                let new = states.rows_view(cache.length(sequence), anchor as usize);
                cache
                    .extend(&fixture.engine, &mut fixture.model, sequence, new)
                    .unwrap();
                let tables = tables(&fixture.embedding, &fixture.lm_head);
                let id = sample.ids[anchor as usize];
                let hidden = cache
                    .draft(
                        &fixture.engine,
                        &mut fixture.model,
                        tables,
                        &[(0, 7), (sequence, id)],
                    )
                    .unwrap();
                let hidden = fixture.engine.download_half(hidden).unwrap();
                for (a, b) in hidden[rows..].iter().zip(&expected[block * rows..]) {
                    assert!((a - b).abs() < 1e-5, "anchor {anchor}: {a} {b}");
                }
                block += 1;
            }
        }
        assert_eq!(block * rows, expected.len());
        let states = fixture
            .engine
            .upload_half(&samples[0].states, width)
            .unwrap();
        let full = cache.extend(&fixture.engine, &mut fixture.model, 2, states.view());
        assert!(full.unwrap_err().to_string().contains("at most 32"));
        cache.clear(2);
        assert_eq!(cache.length(2), 0);
    }
}

#[test]
fn packed_documents_and_split_batches_give_the_same_gradients() {
    let config = sliding();
    let samples: Vec<Sample> = (0..8)
        .map(|i| Sample::random(&config, 9 + 3 * i, 20 + i as u64))
        .collect();
    let refs: Vec<&Sample> = samples.iter().collect();
    let options = everything();
    let mut one = Fixture::new(config.clone());
    let together = one.micro_step(&refs, &options);
    let expected = one.take_gradients();
    let layout = one.model.params.layout().clone();
    for split in [vec![1, 7], vec![1; 8], vec![4, 4]] {
        let mut total = vec![0.0; expected.len()];
        let mut sums = MicroStepOut::default();
        let mut rest = refs.as_slice();
        for count in split {
            let (mine, others) = rest.split_at(count);
            rest = others;
            // Another drafter of the same weights.
            let mut drafter = Fixture::new(config.clone());
            sums.add(&drafter.micro_step(mine, &options));
            for (t, g) in total.iter_mut().zip(drafter.take_gradients()) {
                *t += g;
            }
        }
        let off = worst(&layout, &total, &expected);
        assert!(off < 1e-5, "{off:e}");
        for (a, b) in [
            (sums.loss_sum, together.loss_sum),
            (sums.weight_sum, together.weight_sum),
        ] {
            assert!((a - b).abs() < 1e-5 * b.abs(), "{a} {b}");
        }
        assert_eq!(sums.correct, together.correct);
        assert_eq!(sums.accepted, together.accepted);
    }
}

#[test]
fn gradients_add_up_and_smaller_units_reuse_the_workspace() {
    let config = small_config();
    let mut fixture = Fixture::new(config.clone());
    let (large, small) = (
        Sample::random(&config, 40, 7),
        Sample::random(&config, 12, 8),
    );
    let options = LossOptions::default();
    fixture.micro_step(&[&small], &options);
    let first = fixture.take_gradients();
    fixture.micro_step(&[&large], &options);
    fixture.take_gradients();
    fixture.micro_step(&[&small], &options);
    assert_eq!(first, fixture.take_gradients());
    fixture.micro_step(&[&small], &options);
    fixture.micro_step(&[&small], &options);
    let twice = fixture.take_gradients();
    for (a, b) in twice.iter().zip(&first) {
        assert!((a - 2.0 * b).abs() <= 1e-5 * b.abs() + 1e-6, "{a} {b}");
    }
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    // Central differences of the loss sum, along the gradient of each tensor.
    let config = sliding();
    let mut fixture = Fixture::new(config.clone());
    let sample = Sample::random(&config, 20, 9);
    // No weight may depend on the parameters here: weights carry no gradient.
    let options = LossOptions {
        streak_alpha: 0.0,
        cap_lambda: 0.0,
        ..everything()
    };
    fixture.micro_step(&[&sample], &options);
    let gradient = fixture.take_gradients();
    let masters = fixture
        .engine
        .download_float(fixture.model.params.masters.view())
        .unwrap();
    for p in fixture.model.params.layout().params().to_vec() {
        let range = p.window.offset..p.window.offset + p.window.len();
        let square: f64 = gradient[range.clone()]
            .iter()
            .map(|&g| f64::from(g).powi(2))
            .sum();
        let step = 2e-3 / square.sqrt();
        let mut loss = |sign: f64| {
            let mut moved = masters.clone();
            for i in range.clone() {
                moved[i] += (sign * step * f64::from(gradient[i])) as f32;
            }
            let params = &mut fixture.model.params;
            fixture
                .engine
                .write_float(params.masters.view_mut(), &moved)
                .unwrap();
            params.refresh(&fixture.engine).unwrap();
            fixture.micro_step(&[&sample], &options).loss_sum
        };
        let slope = (loss(1.0) - loss(-1.0)) / (2.0 * step);
        assert!(
            (slope / square - 1.0).abs() < 0.02,
            "{}: {slope} {square}",
            p.name
        );
    }
}

#[test]
fn a_unit_without_labels_costs_nothing_and_yields_zeros() {
    let config = small_config();
    let mut fixture = Fixture::new(config.clone());
    let mut sample = Sample::random(&config, 10, 10);
    let anchors = std::mem::take(&mut sample.anchors);
    let out = fixture.micro_step(&[&sample], &LossOptions::default());
    assert_eq!((out.loss_sum, out.weight_sum), (0.0, 0.0));
    assert!(out.accepted.is_empty());
    sample.anchors = anchors;
    sample.mask.fill(0);
    let out = fixture.micro_step(&[&sample], &LossOptions::default());
    assert_eq!(out.weight_sum, 0.0);
    assert_eq!(out.accepted, vec![1; sample.anchors.len()]);
    assert!(fixture.take_gradients().iter().all(|&g| g == 0.0));
}

#[test]
fn what_does_not_fit_is_refused() {
    let config = small_config();
    let mut fixture = Fixture::new(config.clone());
    let sample = Sample::random(&config, 10, 11);
    let documents = [sample.document()];
    let short = fixture
        .engine
        .half(9, config.captured() * config.hidden_size)
        .unwrap();
    let unit = UnitBatch {
        documents: &documents,
        states: short.view(),
        teacher: None,
    };
    for (options, word) in [
        (LossOptions::default(), "[10, 96]"),
        (everything(), "soft labels"),
    ] {
        let tables = tables(&fixture.embedding, &fixture.lm_head);
        let error = micro_step(&fixture.engine, &mut fixture.model, tables, &unit, &options);
        let text = error.unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn the_workspace_estimate_is_what_is_kept() {
    let config = small_config();
    let mut fixture = Fixture::new(config.clone());
    fixture.model.reserve(&fixture.engine, 50, 9, 50).unwrap();
    let model = &fixture.model;
    let kept = workspace::tests::held(&model.context, &model.blocks, &model.gradients);
    let bytes = DrafterModel::<Cpu>::workspace_bytes(&config, 50, 9);
    assert_eq!(bytes, 4 * kept);
}
