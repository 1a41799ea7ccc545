//! The cache of tokenised sets: when one is reused, when it is made anew, and that a damaged one is
//! never trusted.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use slipstream::data::{
    ChatTokenizer, DataError, MaskTokenRequest, ModelVocabulary, PrepareRequest, Prepared,
    TokenSet, Workload, WorkloadSpec, check_vocabulary, choose_mask_token, demo, prepare,
    split::{SplitOptions, split, whole},
    units::{Order, PackLimits, pack, write_units},
};
use tempfile::TempDir;

/// A folder with a copy of the demo's model, some conversations and a cache.
struct World {
    dir: TempDir,
    model_dir: PathBuf,
    data: PathBuf,
}

impl World {
    fn new(rows: usize) -> World {
        let dir = tempfile::tempdir().unwrap();
        let demo = demo::write(dir.path()).unwrap();
        let world = World {
            model_dir: demo.model_dir,
            data: dir.path().join("chat.jsonl"),
            dir,
        };
        let text = fs::read_to_string(demo.data).unwrap();
        let lines: Vec<&str> = text.lines().take(rows).collect();
        fs::write(&world.data, lines.join("\n") + "\n").unwrap();
        world
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    fn request(&self) -> PrepareRequest {
        PrepareRequest {
            data: vec![self.data.clone()],
            flag: "--data",
            model_dir: self.model_dir.clone(),
            chat_template: None,
            options: Default::default(),
            cache_dir: self.cache(),
        }
    }
}

fn run(request: &PrepareRequest) -> Prepared {
    prepare(request, &mut |_| ControlFlow::Continue(())).unwrap()
}

fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("assets")
        .join(name)
}

#[test]
fn the_same_content_is_tokenised_once() {
    let world = World::new(200);
    let mut calls = 0;
    let first = prepare(&world.request(), &mut |p| {
        calls += 1;
        assert!(p.bytes <= p.total_bytes);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(!first.reused && calls > 0);
    assert_eq!(first.set.len(), 200);

    let again = prepare(&world.request(), &mut |_| panic!("tokenised again")).unwrap();
    assert!(again.reused);
    assert_eq!(again.set.content_hash(), first.set.content_hash());
    assert_eq!(again.report, first.report);

    // Another name for the same bytes.
    let moved = world.dir.path().join("moved.jsonl");
    fs::rename(&world.data, &moved).unwrap();
    let request = PrepareRequest {
        data: vec![moved.clone()],
        ..world.request()
    };
    let renamed = run(&request);
    assert!(renamed.reused);
    assert_eq!(renamed.report.files, [moved.display().to_string()]);

    // What a worker sees.
    let mapped = TokenSet::open(&first.cache_path).unwrap();
    assert_eq!(mapped.content_hash(), first.set.content_hash());
    assert!(mapped.documents().eq(first.set.documents()));
    assert_eq!(fs::read_dir(world.cache()).unwrap().count(), 1);
}

#[test]
fn whatever_changes_the_tokens_changes_the_set() {
    let world = World::new(40);
    let first = run(&world.request());
    let mut keys = vec![first.set.key()];
    let mut expect_new = |request: &PrepareRequest, what: &str| {
        let made = run(request);
        assert!(!made.reused, "{what}");
        assert!(!keys.contains(&made.set.key()), "{what}");
        keys.push(made.set.key());
    };

    let mut request = world.request();
    request.options.max_length = 30;
    expect_new(&request, "max length");
    let mut request = world.request();
    request.options.min_loss_tokens = 3;
    expect_new(&request, "min loss tokens");
    let mut request = world.request();
    request.options.last_turn_only = true;
    expect_new(&request, "last turn only");
    let mut request = world.request();
    request.options.raw_text = true;
    expect_new(&request, "raw text");
    let mut request = world.request();
    request.options.template_kwargs = vec![("k".to_owned(), true.into())];
    expect_new(&request, "template variable");

    let template = world.model_dir.join("chat_template.jinja");
    let text = fs::read_to_string(&template).unwrap();
    fs::write(&template, format!("!{text}")).unwrap();
    expect_new(&world.request(), "template");
    fs::write(&template, text).unwrap();

    let config = world.model_dir.join("tokenizer_config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("<|endoftext|>", "<|mask|>")).unwrap();
    expect_new(&world.request(), "special tokens");
    fs::write(&config, text).unwrap();

    // As long as before, so only the content tells.
    let text = fs::read_to_string(&world.data).unwrap();
    fs::write(&world.data, text.replacen("add", "sum", 1)).unwrap();
    expect_new(&world.request(), "data");
    fs::write(&world.data, text).unwrap();

    let back = run(&world.request());
    assert!(back.reused);
    assert_eq!(back.set.key(), first.set.key());
}

#[test]
fn a_damaged_set_is_made_anew() {
    let world = World::new(60);
    let first = run(&world.request());
    let path = first.cache_path.clone();
    let hash = first.set.content_hash();
    let whole = fs::read(&path).unwrap();
    drop(first);

    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let long = [whole.as_slice(), b"x"].concat();
    let damages = [
        ("magic", flipped(0)),
        ("version", flipped(8)),
        ("length", flipped(16)),
        ("key", flipped(64)),
        ("checksum", flipped(255)),
        ("first token", flipped(256)),
        ("some mask", flipped(whole.len() / 3)),
        ("report", flipped(whole.len() - 2)),
        ("cut", whole[..whole.len() - 1].to_vec()),
        ("cut in the header", whole[..100].to_vec()),
        ("empty", Vec::new()),
        ("longer", long),
        ("something else", b"not a set".to_vec()),
    ];
    for (what, bytes) in damages {
        fs::write(&path, bytes).unwrap();
        let opened = TokenSet::open(&path).and_then(|set| set.verify());
        assert!(opened.is_err(), "{what} went unnoticed");
        let made = run(&world.request());
        assert!(!made.reused, "{what}");
        assert_eq!(made.set.content_hash(), hash, "{what}");
        assert_eq!(fs::read(&path).unwrap(), whole, "{what}");
    }

    // Each bit of the index is covered, without reading the tokens.
    let index_at = u64::from_le_bytes(whole[40..48].try_into().unwrap()) as usize;
    for at in (index_at..whole.len()).step_by(97) {
        fs::write(&path, flipped(at)).unwrap();
        assert!(TokenSet::open(&path).is_err(), "byte {at}");
    }
}

#[test]
fn nothing_half_done_is_left() {
    let world = World::new(100);
    let stopped = prepare(&world.request(), &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(DataError::Interrupted)));
    assert_eq!(fs::read_dir(world.cache()).unwrap().count(), 0);

    // What a killed process left stays for a day, then goes.
    let old = world.cache().join(".writing-old");
    let new = world.cache().join(".writing-new");
    for path in [&old, &new] {
        fs::write(path, "half").unwrap();
    }
    let day = Duration::from_secs(25 * 3600);
    fs::File::options()
        .write(true)
        .open(&old)
        .unwrap()
        .set_modified(SystemTime::now() - day)
        .unwrap();
    let made = run(&world.request());
    assert!(!made.reused);
    assert!(!old.exists() && new.exists());
}

#[test]
fn a_file_that_grows_meanwhile_refuses() {
    let world = World::new(20);
    let second = world.dir.path().join("second.jsonl");
    fs::copy(&world.data, &second).unwrap();
    let request = PrepareRequest {
        data: vec![world.data.clone(), second.clone()],
        ..world.request()
    };
    let text = fs::read_to_string(&second).unwrap();
    let mut first = true;
    let result = prepare(&request, &mut |_| {
        if std::mem::take(&mut first) {
            fs::write(&second, format!("{text}{text}")).unwrap();
        }
        ControlFlow::Continue(())
    });
    let error = result.unwrap_err().to_string();
    assert!(
        error.contains("second.jsonl: the file changed while it was being read"),
        "{error}"
    );
}

#[test]
fn a_cache_that_cannot_be_written_says_so() {
    let world = World::new(5);
    let request = PrepareRequest {
        cache_dir: world.data.clone(),
        ..world.request()
    };
    let error = prepare(&request, &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, DataError::WriteCache { .. }));
    assert!(error.to_string().contains("SLIPSTREAM_CACHE"), "{error}");
}

#[test]
fn threads_do_not_change_the_set() {
    let world = World::new(300);
    let many = run(&world.request()).set.content_hash();
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    let request = PrepareRequest {
        cache_dir: world.dir.path().join("other"),
        ..world.request()
    };
    let one = pool.install(|| run(&request)).set.content_hash();
    assert_eq!(one, many);
}

#[test]
fn the_demo_is_whole() {
    let world = World::new(1);
    let request = PrepareRequest {
        data: vec![world.dir.path().join("demo-chat.jsonl")],
        ..world.request()
    };
    let demo = run(&request);
    assert_eq!(demo.set.len(), 2220);
    assert_eq!(demo.report.skipped_rows(), 0);
    assert_eq!(demo.report.tokens, demo.set.tokens());
    assert!(demo.set.documents().all(|d| d.eligible > 0));
    // Written twice, nothing changes.
    let before = fs::metadata(&request.data[0]).unwrap().modified().unwrap();
    demo::write(world.dir.path()).unwrap();
    let after = fs::metadata(&request.data[0]).unwrap().modified().unwrap();
    assert_eq!(before, after);
}

#[test]
fn documents_are_held_out_by_seed() {
    let world = World::new(2000);
    let set = run(&world.request()).set;
    let options = SplitOptions::default();
    let first = split(&set, &options);
    assert_eq!(first.eval.len(), 20);
    let mut all = [first.train.clone(), first.eval.clone()].concat();
    all.sort_unstable();
    assert_eq!(all, (0..2000).collect::<Vec<u32>>());
    assert!(first.train.is_sorted() && first.eval.is_sorted());
    assert_eq!(split(&set, &options), first);
    let other = split(&set, &SplitOptions { seed: 1, ..options });
    assert_ne!(other.eval, first.eval);

    let none = SplitOptions {
        fraction: 0.0,
        ..options
    };
    assert!(split(&set, &none).eval.is_empty());

    let tight = SplitOptions {
        tokens: 200,
        ..options
    };
    let few = split(&set, &tight).eval;
    let tokens = |docs: &[u32]| -> u64 {
        docs.iter()
            .map(|&d| u64::from(set.info(d as usize).tokens))
            .sum()
    };
    assert!(!few.is_empty() && few.len() < 20 && tokens(&few) <= 200);
    assert!(few.iter().all(|d| first.eval.contains(d)));
    assert_eq!(
        split(
            &set,
            &SplitOptions {
                tokens: 1,
                ..options
            }
        )
        .eval
        .len(),
        1
    );
    let part = whole(&set, 1000);
    assert_eq!(part, (0..part.len() as u32).collect::<Vec<_>>());
    assert!(tokens(&part) <= 1000);
}

#[test]
fn tiny_sets_still_train() {
    for (rows, held_out) in [(1, 0), (2, 1), (3, 1), (20, 10), (32, 16), (100, 16)] {
        let world = World::new(rows);
        let set = run(&world.request()).set;
        let split = split(&set, &SplitOptions::default());
        assert_eq!(split.eval.len(), held_out, "{rows} rows");
        assert_eq!(split.train.len(), rows - held_out, "{rows} rows");
    }
}

#[test]
fn units_are_written_as_rows() {
    let world = World::new(50);
    // Row 1 is skipped, so documents and rows are numbered differently.
    let text = fs::read_to_string(&world.data).unwrap();
    let (head, tail) = text.split_once('\n').unwrap();
    fs::write(&world.data, format!("{head}\n{{\"messages\": []}}\n{tail}")).unwrap();
    let set = run(&world.request()).set;
    let limits = PackLimits {
        slot_tokens: 256,
        unit_anchors: 96,
        anchors: 24,
    };
    let documents: Vec<u32> = (0..set.len() as u32).collect();
    let units = pack(&set, &documents, limits).unwrap();
    let order = Order::new(3, units.len(), 2).unwrap();
    let path = world.dir.path().join("units.jsonl");
    write_units(&path, &set, &units, &order).unwrap();

    let text = fs::read_to_string(path).unwrap();
    let lines: Vec<serde_json::Value> = text
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(lines.len(), units.len() as usize + 2);
    let mut rows = Vec::new();
    for (u, line) in lines[..units.len() as usize].iter().enumerate() {
        assert_eq!(line["unit"], u);
        assert_eq!(line["tokens"], units.unit(u as u32).tokens);
        assert_eq!(line["anchors"], units.unit(u as u32).anchors);
        rows.extend(line["documents"].as_array().unwrap().clone());
    }
    let expected: Vec<u64> = (0..51).filter(|&r| r != 1).collect();
    assert_eq!(rows, expected);
    for epoch in 0..2 {
        let line = &lines[(units.len() + epoch) as usize];
        assert_eq!(line["epoch"], epoch);
        for g in epoch * units.len()..(epoch + 1) * units.len() {
            let place = (g - epoch * units.len()) as usize;
            assert_eq!(line["order"][place], order.unit(g));
        }
    }
}

#[test]
fn the_mask_token_is_never_text() {
    let world = World::new(100);
    let made = run(&world.request());
    let sets = [&made.set];
    let request = |given, rows| MaskTokenRequest {
        given,
        tokenizer: &made.tokenizer,
        embedding_rows: rows,
        sets: &sets,
        template_ids: &[],
    };
    // The demo target: 1,024 rows for 1,024 ids, no mask token by name.
    assert_eq!(choose_mask_token(&request(None, 1024)).unwrap(), 3);
    // Padded rows come first.
    assert_eq!(choose_mask_token(&request(None, 1088)).unwrap(), 1024);
    assert_eq!(choose_mask_token(&request(Some(3), 1024)).unwrap(), 3);
    assert!(matches!(
        choose_mask_token(&request(Some(1024), 1024)),
        Err(DataError::MaskTokenOutOfRange {
            id: 1024,
            rows: 1024
        })
    ));
    assert!(made.set.contains_id(1));
    assert!(matches!(
        choose_mask_token(&request(Some(1), 1024)),
        Err(DataError::MaskTokenOccurs { id: 1 })
    ));
    let in_template = MaskTokenRequest {
        template_ids: &[3],
        ..request(None, 1024)
    };
    assert!(matches!(
        choose_mask_token(&in_template),
        Err(DataError::NoMaskToken { rows: 1024 })
    ));

    // A mask token by name wins over padded rows, unless it occurs in the data.
    let config = world.model_dir.join("tokenizer_config.json");
    let text = fs::read_to_string(&config).unwrap();
    for (token, id) in [("<|mask|>", 3), ("<|im_end|>", 1024)] {
        let named = format!("{{\"mask_token\": \"{token}\",");
        fs::write(&config, text.replacen('{', &named, 1)).unwrap();
        let tokenizer = ChatTokenizer::load(&world.model_dir).unwrap();
        let named = MaskTokenRequest {
            tokenizer: &tokenizer,
            ..request(None, 1088)
        };
        assert_eq!(choose_mask_token(&named).unwrap(), id);
    }
}

#[test]
fn the_seen_ids_are_those_of_the_documents() {
    let world = World::new(30);
    let set = run(&world.request()).set;
    let seen: std::collections::HashSet<u32> =
        set.documents().flat_map(|d| d.ids.to_vec()).collect();
    for id in 0..2000 {
        assert_eq!(set.contains_id(id), seen.contains(&id), "id {id}");
    }
    assert!(!set.contains_id(u32::MAX));
}

#[test]
fn a_tokenizer_of_another_model_refuses() {
    let tokenizer = ChatTokenizer::load(&asset("tiny-target")).unwrap();
    let check = |embedding_rows, eos_ids: &[u32]| {
        check_vocabulary(
            &tokenizer,
            &ModelVocabulary {
                embedding_rows,
                eos_ids,
            },
        )
        .map_err(|e| e.to_string())
    };
    assert_eq!(check(1024, &[2]), Ok(()));
    assert_eq!(check(1088, &[2, 0]), Ok(()));
    let message = check(1000, &[2]).unwrap_err();
    assert!(message.contains("the highest token id is 1023, but the model embeds only 1000 ids"));
    let message = check(151_936, &[2]).unwrap_err();
    assert!(message.contains("1024 token ids, but the model embeds 151936"));
    let message = check(1024, &[524]).unwrap_err();
    assert!(
        message.contains("the model's eos_token_id 524 is"),
        "{message}"
    );
    assert!(check(4096, &[3000]).unwrap_err().contains("is no token"));
}

#[test]
fn a_model_folder_without_its_parts_refuses() {
    let world = World::new(3);
    let dir = &world.model_dir;
    let error = || {
        prepare(&world.request(), &mut |_| ControlFlow::Continue(()))
            .unwrap_err()
            .to_string()
    };
    let template = dir.join("chat_template.jinja");
    let text = fs::read_to_string(&template).unwrap();
    fs::write(&template, "{% if %}").unwrap();
    assert!(error().contains("the chat template does not compile"));
    fs::remove_file(&template).unwrap();
    let message = error();
    assert!(message.contains("no chat template"), "{message}");
    assert!(message.contains("--chat-template FILE") && message.contains("--raw-text"));

    // As a string, or one of several by name, in the tokenizer's config.
    let config = dir.join("tokenizer_config.json");
    let plain: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let mut string = plain.clone();
    string["chat_template"] = text.clone().into();
    fs::write(&config, string.to_string()).unwrap();
    let by_string = run(&world.request()).set.content_hash();
    let mut list = plain;
    list["chat_template"] = serde_json::json!([
        {"name": "tool_use", "template": "{{ raise_exception('no tools here') }}"},
        {"name": "default", "template": text},
    ]);
    fs::write(&config, list.to_string()).unwrap();
    assert_eq!(run(&world.request()).set.content_hash(), by_string);

    let tokenizer = dir.join("tokenizer.json");
    fs::write(
        &tokenizer,
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    )
    .unwrap();
    assert!(error().contains("git lfs pull"));
    fs::write(&tokenizer, "{}").unwrap();
    assert!(error().contains("not a usable tokenizer file"));
    fs::remove_file(&tokenizer).unwrap();
    assert!(error().contains("no tokenizer.json; copy it from the model's repository"));
    fs::write(dir.join("tokenizer.model"), "x").unwrap();
    assert!(error().contains("it has only tokenizer.model; convert it with: python -c"));
}

#[test]
fn two_beginnings_become_one() {
    // A tokenizer that adds a beginning-of-sequence token, and a template that writes one.
    let world = World::new(3);
    let path = world.model_dir.join("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    });
    json["truncation"] = serde_json::json!(
        {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    );
    fs::write(&path, json.to_string()).unwrap();
    let template = world.model_dir.join("chat_template.jinja");
    let text = fs::read_to_string(&template).unwrap();
    fs::write(&template, format!("{{{{ pad_token }}}}{text}")).unwrap();
    let made = run(&world.request());
    for document in made.set.documents() {
        assert_eq!(document.ids.iter().filter(|&&id| id == 0).count(), 1);
        assert!(
            document.ids.len() > 4,
            "the tokenizer's own truncation is off"
        );
    }
    // Plain text gets the tokenizer's own, once, unsupervised.
    let mut request = world.request();
    request.options.raw_text = true;
    let plain = run(&request);
    let document = plain.set.document(0);
    assert_eq!((document.ids[0], document.mask[0]), (0, 0));
    assert_eq!(document.ids.iter().filter(|&&id| id == 0).count(), 1);
}

#[test]
fn files_appear_as_often_as_their_weights_say() {
    let world = World::new(400);
    let second = world.dir.path().join("second.jsonl");
    let text = fs::read_to_string(&world.data).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    fs::write(&world.data, lines[..100].join("\n")).unwrap();
    fs::write(&second, lines[100..].join("\n")).unwrap();
    let request = PrepareRequest {
        data: vec![world.data.clone(), second],
        ..world.request()
    };
    let made = run(&request);
    assert_eq!(made.sources, [0, 1]);
    let spec = |weights: &[f64], seed| WorkloadSpec {
        tokens: made.cache_path.clone(),
        eval_tokens: None,
        split: SplitOptions {
            fraction: 0.05,
            seed,
            ..SplitOptions::default()
        },
        weights: weights.to_vec(),
        limits: PackLimits {
            slot_tokens: 512,
            unit_anchors: 128,
            anchors: 32,
        },
        epochs: 1,
    };
    let counts = |weights: &[f64], seed| {
        let work = Workload::open(&spec(weights, seed)).unwrap();
        let mut counts = vec![0u32; made.set.len()];
        for unit in work.units.iter() {
            // No document meets its own copy.
            assert!(unit.documents.is_sorted_by(|a, b| a != b));
            for &d in unit.documents {
                counts[d as usize] += 1;
            }
        }
        for unit in work.eval_units.iter() {
            assert!(unit.documents.iter().all(|&d| counts[d as usize] == 0));
        }
        counts
    };
    let once = counts(&[], 0);
    assert_eq!(counts(&[1.0, 1.0], 0), once);
    let weighted = counts(&[3.0, 0.5], 0);
    for (d, (&n, &plain)) in weighted.iter().zip(&once).enumerate() {
        match d < 100 {
            true => assert_eq!(n, 3 * plain),
            false => assert!(n <= plain),
        }
    }
    let half: u32 = weighted[100..].iter().sum();
    assert!((110..180).contains(&half), "{half} of about 285");
    assert_ne!(counts(&[3.0, 0.5], 1), weighted);

    let none = Workload::open(&spec(&[1e-9, 1e-9], 0)).unwrap_err();
    assert!(none.to_string().contains("--data-weights"), "{none}");
}
