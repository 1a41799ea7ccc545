use super::*;
use crate::engine::cpu::Cpu;
use crate::model::testing::Made;

fn files(qwen3: bool, tied: bool) -> (tempfile::TempDir, TargetFiles) {
    let dir = tempfile::tempdir().unwrap();
    Made::new(qwen3, tied).write(dir.path());
    let files = TargetFiles::open(dir.path(), false).unwrap();
    (dir, files)
}

fn needs(capture: &[usize], final_hidden: bool) -> TargetNeeds {
    TargetNeeds {
        capture: capture.to_vec(),
        final_hidden,
        lm_head: false,
    }
}

/// Captured states and the final hidden state, on the host.
fn run(target: &mut Target<Cpu>, ids: &[u32], offsets: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let engine = Cpu::new(1).unwrap();
    let width = target.needs().capture.len() * 24;
    let mut states = engine.half(ids.len(), width).unwrap();
    let mut last = engine.half(ids.len(), 24).unwrap();
    let wants_last = target.needs().final_hidden;
    let out = Captured {
        states: states.view_mut(),
        final_hidden: wants_last.then(|| last.view_mut()),
    };
    target.prefill(&engine, ids, offsets, out).unwrap();
    (
        engine.download_half(states.view()).unwrap(),
        if wants_last {
            engine.download_half(last.view()).unwrap()
        } else {
            vec![]
        },
    )
}

#[test]
fn packing_and_loading_less_change_no_bit() {
    let engine = Cpu::new(1).unwrap();
    let ids: Vec<u32> = (0..30).map(|i| i * 7 % 40).collect();
    for qwen3 in [false, true] {
        let (_dir, files) = files(qwen3, false);
        let mut whole = Target::load(&engine, &files, needs(&[0, 1], true)).unwrap();
        assert_eq!(whole.layers(), 3);
        let (states, last) = run(&mut whole, &ids, &[0, 11, 11, 30]);
        for (begin, end) in [(0, 11), (11, 30)] {
            let alone = run(&mut whole, &ids[begin..end], &[0, (end - begin) as u32]);
            assert_eq!(alone.0, states[begin * 48..end * 48]);
            assert_eq!(alone.1, last[begin * 24..end * 24]);
        }
        let mut less = Target::load(&engine, &files, needs(&[1], false)).unwrap();
        assert_eq!(less.layers(), 2);
        let captured = run(&mut less, &ids, &[0, 11, 30]).0;
        let of_layer_1: Vec<f32> = states
            .chunks(48)
            .flat_map(|row| row[24..].to_vec())
            .collect();
        assert_eq!(captured, of_layer_1);
        let mut turned = Target::load(&engine, &files, needs(&[1, 0, 1], false)).unwrap();
        let (captured, _) = run(&mut turned, &ids, &[0, 11, 30]);
        for (row, of) in captured.chunks(72).zip(states.chunks(48)) {
            assert_eq!(row, [&of[24..], &of[..24], &of[24..]].concat());
        }
    }
}

#[test]
fn a_sliding_layer_forgets_what_is_far() {
    let engine = Cpu::new(1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut made = Made::new(true, true);
    made.config["layer_types"] =
        serde_json::json!(["sliding_attention", "full_attention", "full_attention"]);
    made.config["sliding_window"] = serde_json::json!(4);
    made.write(dir.path());
    let files = TargetFiles::open(dir.path(), false).unwrap();
    let mut target = Target::load(&engine, &files, needs(&[0, 1], false)).unwrap();
    let mut ids: Vec<u32> = (0..12).collect();
    let before = run(&mut target, &ids, &[0, 12]).0;
    ids[2] = 30;
    let after = run(&mut target, &ids, &[0, 12]).0;
    let changed = |row: usize, slot: usize| {
        let range = row * 48 + slot * 24..row * 48 + (slot + 1) * 24;
        before[range.clone()] != after[range]
    };
    for row in 0..12 {
        assert_eq!(
            changed(row, 0),
            (2..6).contains(&row),
            "row {row} of the sliding layer"
        );
        assert_eq!(changed(row, 1), row >= 2, "row {row} of the full layer");
    }
}

#[test]
fn a_drafter_loads_only_the_tables() {
    let engine = Cpu::new(1).unwrap();
    let (_dir, untied) = files(false, false);
    let head = TargetHead::load(&engine, &untied).unwrap();
    let made = Made::new(false, false);
    let tables = head.tables();
    let read = |view| engine.download_half(view).unwrap();
    assert_eq!(
        read(tables.embedding),
        made.tensors["model.embed_tokens.weight"].1
    );
    assert_eq!(read(tables.lm_head), made.tensors["lm_head.weight"].1);
    let (_dir, tied) = files(false, true);
    let head = TargetHead::load(&engine, &tied).unwrap();
    assert_eq!(read(head.lm_head()), read(head.embedding()));
}

#[test]
fn wrong_requests_are_refused() {
    let engine = Cpu::new(1).unwrap();
    let (_dir, files) = files(false, false);
    let refused = |result: Result<(), ModelError>, says: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    };
    refused(
        Target::load(&engine, &files, needs(&[3], false)).map(|_| ()),
        "layer 3 cannot be captured: layers are 0 to 2",
    );
    let mut target = Target::load(&engine, &files, needs(&[0], false)).unwrap();
    refused(target.head().map(|_| ()), "without its head");
    let mut prefill = |ids: &[u32], offsets: &[u32], cols: usize, last: bool| {
        let mut states = engine.half(2, cols).unwrap();
        let mut hidden = engine.half(2, 24).unwrap();
        let out = Captured {
            states: states.view_mut(),
            final_hidden: last.then(|| hidden.view_mut()),
        };
        target.prefill(&engine, ids, offsets, out)
    };
    refused(
        prefill(&[1, 40], &[0, 2], 24, false),
        "token 40 is outside its 40 embeddings",
    );
    refused(
        prefill(&[1, 2], &[0, 1], 24, false),
        "do not run from 0 to 2 tokens",
    );
    refused(
        prefill(&[1, 2], &[], 24, false),
        "do not run from 0 to 2 tokens",
    );
    refused(
        prefill(&[1, 2], &[0, 2, 1, 2], 24, false),
        "do not run from 0",
    );
    refused(
        prefill(&[1, 2], &[0, 2], 25, false),
        "captured states are [2, 24], not [2, 25]",
    );
    refused(
        prefill(&[1, 2], &[0, 2], 24, true),
        "without its final norm",
    );
    prefill(&[1, 2], &[0, 2], 24, false).unwrap();
}
