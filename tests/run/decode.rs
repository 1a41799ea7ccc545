//! A drafter that has learnt something: it decodes as its run's figures say, and depends on what it is given.

use std::ops::ControlFlow;
use std::path::Path;

use serde_json::Value;
use slipstream::data::{self, PrepareRequest, TextOptions};
use slipstream::engine::cpu::Cpu;
use slipstream::engine::{Engine, Half};
use slipstream::eval::walk::{HeldOutUnit, WalkOptions, walk};
use slipstream::model::drafter::{BlockPlan, Document, DrafterModel, HostPlan};
use slipstream::model::{Captured, Target, TargetFiles, TargetHead, TargetNeeds};
use slipstream::train::anchors::eligible;
use slipstream::train::export::load_serving;

use crate::support::{Scene, asset};

/// Rows of conversations that are learnt, those held out of them included.
const LEARNT: usize = 400;
const BLOCK: usize = 8;

/// What a drafter learns quickly with.
const QUICK: [&str; 14] = [
    "--epochs",
    "3",
    "--block-size",
    "8",
    "--slot-tokens",
    "512",
    "--unit-anchors",
    "48",
    "--batch-anchors",
    "48",
    "--anchors",
    "24",
    "--lr",
    "5e-3",
];

fn accepted(value: &Value) -> f64 {
    value.as_f64().expect("an accepted length")
}

#[test]
fn decoding_accepts_what_the_run_said_and_changes_no_token() {
    let scene = Scene::with_rows(LEARNT);
    let run = scene.run("run");
    // Of one layer, so that reading another one instead shows.
    let more = ["--target-layers", "6", "--eval-fraction", "0.2"];
    scene.succeeds(scene.train(&run, "1:1", &[&QUICK[..], &more].concat()));
    let summary = run.summary();
    let length = &summary["accepted_length"];
    let (before, after) = (accepted(&length["before"]), accepted(&length["after"]));
    assert!(before < 1.2 && after > 1.8, "{before} {after}");

    // The documents that the run held out, as the walk did.
    let ended = scene.succeeds(scene.launcher(&["eval", "run", "--cpu"]));
    let text = std::fs::read_to_string(run.file("eval/eval.json")).expect("the figures");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(report["plain"]["prompts"], 80, "{ended}");
    let chain = accepted(&report["drafts"][0]["accepted_length"]);
    assert!(
        (chain / after - 1.0).abs() < 0.05,
        "{chain} decoding, {after} by the run"
    );

    // Two sets of prompts, 200 in all.
    let rows = std::fs::read_to_string(scene.path("data.jsonl")).expect("the rows");
    let lines: Vec<&str> = rows.split_inclusive('\n').collect();
    scene.write("some.jsonl", lines[..150].concat());
    scene.write("others.jsonl", lines[150..200].concat());
    let output = scene.path("eval.json").display().to_string();
    let words = [
        "eval",
        "run",
        "--cpu",
        "--prompts",
        "some.jsonl",
        "others.jsonl",
        "--tree",
        "1,8",
        "64",
        "--max-new-tokens",
        "24",
        "--json",
        &output,
        "--output",
        "figures",
    ];
    let ended = scene.succeeds(scene.launcher(&words));
    let text = std::fs::read_to_string(&output).expect("the figures");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(report["plain"]["prompts"], 200);
    let sets = report["sets"].as_array().expect("a list");
    let names: Vec<&Value> = sets.iter().map(|set| &set["name"]).collect();
    assert_eq!(names, ["some", "others"]);
    assert_eq!(sets[1]["plain"]["prompts"], 50);
    let drafts = report["drafts"].as_array().expect("a list");
    let names: Vec<&Value> = drafts.iter().map(|draft| &draft["draft"]).collect();
    assert_eq!(names, ["chain", "tree 1", "tree 8", "tree 64"]);
    for draft in drafts {
        assert_eq!(draft["differ"], 0, "{draft}");
        let count = |key: &str| draft[key].as_u64().expect("a count");
        assert_eq!(count("equal") + count("ties"), 200, "{draft}");
        assert!(count("ties") < 5, "{draft}");
        let name = draft["draft"].as_str().expect("a name");
        assert!(ended.stdout.contains(name), "{ended}");
    }
    assert!(ended.stdout.contains("best tree budget: "), "{ended}");
    for name in [
        "eval.json",
        "accepted_by_position.svg",
        "accepted_by_budget.svg",
    ] {
        assert!(scene.path("figures").join(name).is_file(), "{name}");
    }
    let lengths: Vec<f64> = drafts
        .iter()
        .map(|draft| accepted(&draft["accepted_length"]))
        .collect();
    let [chain, one, eight, many] = lengths[..] else {
        panic!("{lengths:?}");
    };
    assert!(
        one < chain && chain < many && eight < many && one <= 2.0,
        "{lengths:?}"
    );
    // A tree of one node accepts one token or none, and the target adds one, except in a round that ends an answer.
    let share = accepted(&drafts[1]["by_position"][0]);
    let ends = 200.0 / accepted(&drafts[1]["rounds"]);
    let cut = share - (one - 1.0);
    assert!((-1e-9..=ends).contains(&cut), "{share} {one} {ends}");

    // Drawn tokens are those of plain decoding with the same draws.
    let words = [
        "eval",
        "run",
        "--cpu",
        "--temperature",
        "0.9",
        "--tree",
        "8",
        "--documents",
        "8",
        "--json",
        &output,
    ];
    let ended = scene.succeeds(scene.launcher(&words));
    assert!(
        ended
            .stdout
            .contains("8 of 8 answers equal to plain sampled (temperature 0.9) decoding"),
        "{ended}"
    );
    mistakes_in_what_is_served_lower_acceptance(&scene);
}

/// Serving files with the mistakes that trainers make on their way out: still lossless, but decoding accepts less.
fn mistakes_in_what_is_served_lower_acceptance(scene: &Scene) {
    let target = asset("tiny-target").display().to_string();
    let decoded = |name: &str, spoil: &dyn Fn(&Path)| {
        scene.succeeds(scene.launcher(&["export", "run", name]));
        spoil(&scene.path(name));
        let figures = format!("{name}.json");
        let mut words = vec!["eval", name, "--cpu", "--prompts", "some.jsonl"];
        words.extend(["--documents", "24", "--json", &figures]);
        words.extend(["--target-model", &target]);
        scene.succeeds(scene.launcher(&words));
        let text = std::fs::read_to_string(scene.path(&figures)).expect("the figures");
        let report: Value = serde_json::from_str(&text).expect("JSON");
        accepted(&report["drafts"][0]["accepted_length"])
    };
    let sound = decoded("sound", &|_| {});
    let shifted = decoded("shifted", &|served| {
        let path = served.join("config.json");
        let text = std::fs::read_to_string(&path).expect("the config");
        let mut config: Value = serde_json::from_str(&text).expect("JSON");
        for id in config["dflash_config"]["target_layer_ids"]
            .as_array_mut()
            .expect("layers")
        {
            *id = (id.as_u64().expect("a layer") + 1).into();
        }
        std::fs::write(&path, config.to_string()).expect("the config");
    });
    let forgotten = decoded("forgotten", &|served| {
        let path = served.join("model.safetensors");
        let mut bytes = std::fs::read(&path).expect("weights");
        forget_norms(&mut bytes);
        std::fs::write(&path, bytes).expect("weights");
    });
    println!("{sound} served, {shifted} of shifted layers, {forgotten} without trained norms");
    assert!(shifted - 1.0 < 0.8 * (sound - 1.0), "{shifted} of {sound}");
    assert!(forgotten < sound, "{forgotten} of {sound}");
}

/// Sets all norms of a safetensors file to 1, where their training began.
fn forget_norms(bytes: &mut [u8]) {
    let (size, rest) = bytes.split_at_mut(8);
    let header = u64::from_le_bytes(size.try_into().expect("eight bytes")) as usize;
    let (header, data) = rest.split_at_mut(header);
    let header: Value = serde_json::from_slice(header).expect("a header");
    let tensors = header.as_object().expect("tensors");
    for (_, tensor) in tensors.iter().filter(|(name, _)| name.contains("norm")) {
        let offset = |i: usize| tensor["data_offsets"][i].as_u64().expect("an offset") as usize;
        let values = &mut data[offset(0)..offset(1)];
        // 1.0 in bfloat16.
        values
            .chunks_exact_mut(2)
            .for_each(|value| value.copy_from_slice(&0x3f80u16.to_le_bytes()));
    }
}

#[test]
fn the_export_is_what_serves() {
    let scene = Scene::new();
    let run = scene.run("run");
    // By a path that holds only where the run was started.
    let more = ["--max-steps", "2", "--data", "data.jsonl"];
    scene.succeeds(scene.train(&run, "1:1", &more));
    let mut elsewhere = scene.launcher(&["eval", "../run", "--cpu", "--documents", "1"]);
    elsewhere.current_dir(scene.path("tmp"));
    scene.succeeds(elsewhere);
    let ended = scene.succeeds(scene.launcher(&["export", "run", "served"]));
    assert!(ended.stdout.contains("served"), "{ended}");
    for name in ["model.safetensors", "config.json", "provenance.json"] {
        let bytes = std::fs::read(scene.path("served").join(name)).expect("an exported file");
        assert!(bytes == run.checkpoint_file(name), "{name}");
    }
    let bytes = std::fs::read(scene.path("served/model.safetensors")).expect("weights");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    assert_eq!(file.len(), 2 + 1 + 11, "one layer");
    assert!(
        file.iter()
            .all(|(_, view)| view.dtype() == safetensors::Dtype::BF16)
    );
    assert!(!scene.path("served/training.safetensors").exists());
    let again = scene.play(scene.launcher(&["export", "run", "served"]));
    assert_eq!(again.code(), Some(2), "{again}");
    scene.succeeds(scene.launcher(&["export", "run", "served", "--overwrite"]));

    // Without the run it needs to be told what it is for.
    let target = asset("tiny-target").display().to_string();
    let ended = scene.play(scene.launcher(&["eval", "served", "--cpu", "--prompts", "data.jsonl"]));
    assert_eq!(ended.code(), Some(2), "{ended}");
    assert!(
        ended.stderr.contains("--target-model is missing"),
        "{ended}"
    );
    let words = [
        "eval",
        "served",
        "--cpu",
        "--prompts",
        "data.jsonl",
        "--documents",
        "3",
        "--target-model",
        &target,
    ];
    let ended = scene.succeeds(scene.launcher(&words));
    assert!(
        ended.stdout.contains("chain: 3 of 3 answers equal"),
        "{ended}"
    );
}

/// Sentences of which only the first word tells how they go on and end, so that a draft needs its anchor at
/// their beginnings and its context behind.
fn sentences(rows: u64, seed: u64) -> String {
    let begin = "Ben,Ada,It,One,The,Make,Then,First".split(',');
    let next = "has,found,lives,word,add,slice,salad,spoons".split(',');
    let end = "garden,river,basket,blanket,forest,thunder,cucumber,path".split(',');
    let all: Vec<String> = begin
        .zip(next)
        .zip(end)
        .map(|((begin, next), end)| format!("{begin} {next} the old {end}."))
        .collect();
    let mut state = seed;
    let mut draw = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        all[(state >> 33) as usize % all.len()].as_str()
    };
    let row = |_| {
        let text: Vec<&str> = (0..14).map(|_| draw()).collect();
        serde_json::json!({ "text": text.join(" ") }).to_string() + "\n"
    };
    (0..rows).map(row).collect()
}

/// A drafter that knows the sentences, its target, and rows that it has not seen.
struct Bench {
    engine: Cpu,
    files: TargetFiles,
    model: DrafterModel<Cpu>,
    prepared: data::Prepared,
}

/// Which blocks are looked at.
#[derive(Clone, Copy)]
enum Blocks {
    All,
    /// Those whose anchor is the first word of a sentence.
    Beginnings,
}

impl Bench {
    /// Trains it, on states of one layer of the target.
    fn new(layer: &str) -> Self {
        let scene = Scene::new();
        let run = scene.run("run");
        scene.write("data.jsonl", sentences(160, 1));
        let more = [&QUICK[..], &["--raw-text", "--target-layers", layer]].concat();
        scene.succeeds(scene.train(&run, "1:1", &more));
        let engine = Cpu::new(1).expect("an engine");
        let (config, params) =
            load_serving(&engine, &run.file("checkpoints/latest")).expect("the drafter");
        let request = PrepareRequest {
            data: vec![scene.write("unseen.jsonl", sentences(24, 2))],
            flag: "--data",
            model_dir: asset("tiny-target"),
            chat_template: None,
            options: TextOptions {
                raw_text: true,
                ..TextOptions::default()
            },
            cache_dir: scene.path("cache"),
        };
        let prepared = data::prepare(&request, &mut |_| ControlFlow::Continue(()));
        Self {
            model: DrafterModel::new(&engine, config, params).expect("the drafter"),
            files: TargetFiles::open(&asset("tiny-target"), false).expect("the target"),
            prepared: prepared.expect("a tokenised set"),
            engine,
        }
    }

    /// All norms at 1, where training began: as when their updates were lost in a narrow type, or not exported.
    fn forget_norms(&mut self) {
        let params = &mut self.model.params;
        for param in params.layout().params().to_vec() {
            if param.vector {
                let (offset, len) = (param.window.offset, param.window.len());
                let place = params.masters.window_mut(offset, 1, len);
                self.engine
                    .write_float(place, &vec![1.0; len])
                    .expect("memory");
            }
        }
        params.refresh(&self.engine).expect("the working copy");
    }

    /// `[tokens, H]` the output of a layer of the target, over all documents.
    fn states(&self, layer: usize) -> Half<Cpu> {
        let needs = TargetNeeds {
            capture: vec![layer],
            ..TargetNeeds::default()
        };
        let engine = &self.engine;
        let mut target = Target::load(engine, &self.files, needs).expect("the target");
        let mut ids = Vec::new();
        let mut offsets = vec![0];
        for document in self.prepared.set.documents() {
            ids.extend_from_slice(document.ids);
            offsets.push(ids.len() as u32);
        }
        let hidden = self.files.config().hidden_size;
        let mut states = engine.half(ids.len(), hidden).expect("memory");
        let out = Captured {
            states: states.view_mut(),
            final_hidden: None,
        };
        target
            .prefill(engine, &ids, &offsets, out)
            .expect("a prefill");
        states
    }

    /// Anchors of each document.
    fn anchors(&self, blocks: Blocks) -> Vec<Vec<u32>> {
        let tokenizer = &self.prepared.tokenizer;
        let begins = |ids: &[u32], anchor: u32| {
            let before = anchor.checked_sub(1).map(|before| ids[before as usize]);
            before.is_some_and(|id| {
                tokenizer
                    .decode(&[id])
                    .is_ok_and(|text| text.ends_with('.'))
            })
        };
        let of_document = |document: data::Document<'_>| {
            let all = eligible(document.mask);
            all.filter(|&anchor| match blocks {
                Blocks::All => true,
                Blocks::Beginnings => begins(document.ids, anchor),
            })
            .collect()
        };
        self.prepared.set.documents().map(of_document).collect()
    }

    /// Mean over the blocks of 1 + the length of the correct prefix, by a plan that was tampered with.
    fn accepted(
        &mut self,
        blocks: Blocks,
        states: &Half<Cpu>,
        tamper: impl Fn(&mut HostPlan),
    ) -> f64 {
        let anchors = self.anchors(blocks);
        let documents = self.prepared.set.documents().zip(&anchors);
        let documents: Vec<Document<'_>> = documents
            .map(|(document, anchors)| Document {
                ids: document.ids,
                mask: document.mask,
                anchors,
            })
            .collect();
        let (engine, config) = (&self.engine, self.model.config().clone());
        let mut host = HostPlan::new(&config, &documents).expect("a plan");
        tamper(&mut host);
        let head = TargetHead::load(engine, &self.files).expect("the head");
        let plan = BlockPlan::upload(engine, &config, host).expect("memory");
        let model = &mut self.model;
        model
            .encode_context(engine, &plan, states.view())
            .and_then(|()| model.forward_blocks(engine, head.tables(), &plan, false))
            .expect("a forward");
        let rows = plan.rows();
        let mut ids = engine.upload_index(&vec![0; rows]).expect("memory");
        let mut scores = engine.float(rows, 1).expect("memory");
        let best = ids.window_mut(0, rows, 1);
        engine
            .top_k(
                model.hidden(),
                head.tables().lm_head,
                1,
                best,
                scores.view_mut(),
            )
            .expect("the best tokens");
        let best = engine.download_index(ids.view()).expect("the best tokens");
        let host = &plan.host;
        let right = |slot: usize, depth: usize| {
            let found = best[host.slot_row[slot] as usize];
            host.slot_number[slot] as usize == depth && found == host.slot_label[slot]
        };
        let prefix = |range: &[u32]| {
            let slots = range[0] as usize..range[1] as usize;
            let depths = slots.zip(1..);
            depths
                .take_while(|&(slot, depth)| right(slot, depth))
                .count()
        };
        let total: usize = host.block_begin.windows(2).map(prefix).sum();
        1.0 + total as f64 / host.blocks() as f64
    }
}

/// Each of these mistakes crashes nothing; only acceptance shows it.
#[test]
fn off_by_one_mistakes_ruin_acceptance() {
    let layer = 6;
    let mut bench = Bench::new("6");
    let states = bench.states(layer);
    let another_layer = bench.states(layer + 1);
    let untouched = |_: &mut HostPlan| {};
    let no_anchor = |plan: &mut HostPlan| {
        let mask = plan.block_ids[1];
        plan.block_ids
            .iter_mut()
            .step_by(BLOCK)
            .for_each(|id| *id = mask);
    };
    // As when a cache is extended by the anchor's own state before it drafts: the block then begins behind it.
    let anchor_in_context = |plan: &mut HostPlan| {
        plan.anchor.iter_mut().for_each(|anchor| *anchor += 1);
        plan.block_positions
            .iter_mut()
            .for_each(|position| *position += 1);
        plan.positions += 1;
    };
    let sound = bench.accepted(Blocks::All, &states, untouched);
    let sound_beginnings = bench.accepted(Blocks::Beginnings, &states, untouched);
    let mut figures = vec![
        (
            "the layer above",
            sound,
            bench.accepted(Blocks::All, &another_layer, untouched),
        ),
        (
            "the anchor in its own context",
            sound,
            bench.accepted(Blocks::All, &states, anchor_in_context),
        ),
        (
            "slot 0 without the anchor",
            sound_beginnings,
            bench.accepted(Blocks::Beginnings, &states, no_anchor),
        ),
    ];
    // The walk of a run goes over the same blocks.
    let documents = bench.prepared.set.documents();
    let documents: Vec<_> = documents
        .map(|document| (document.ids, document.mask))
        .collect();
    let unit = HeldOutUnit {
        documents: &documents,
        states: states.view(),
    };
    let options = WalkOptions {
        budgets: &[],
        blocks: 64,
    };
    let head = TargetHead::load(&bench.engine, &bench.files).expect("the head");
    let walked = walk(
        &bench.engine,
        &mut bench.model,
        head.tables(),
        &unit,
        options,
    );
    let walked = walked
        .expect("a walk")
        .chain
        .accepted_length()
        .expect("rounds");
    assert!(walked > 2.0, "{walked} walked, {sound} over all blocks");

    bench.forget_norms();
    let without = bench.accepted(Blocks::All, &states, untouched);
    figures.push(("norms that never moved", sound, without));
    println!("{figures:.3?}");
    assert!(sound > 2.5 && sound_beginnings > 1.6, "{figures:?}");
    // Norms hardly move in so short a run.
    let most = [0.7, 0.7, 0.7, 0.85];
    for ((what, sound, figure), most) in figures.into_iter().zip(most) {
        assert!(
            figure - 1.0 < most * (sound - 1.0),
            "{what}: {figure} of {sound}"
        );
    }
}
