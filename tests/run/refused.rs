//! Inputs that cannot be used: one clear line, exit code 2, and nothing has been started.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{Ended, Run, Scene, asset};

/// Refused with one line, which holds all of `words`; no worker was started, no run was begun.
fn is_refused(scene: &Scene, ended: &Ended, run: &Run, words: &[&str]) {
    assert_eq!(ended.code(), Some(2), "{ended}");
    let errors: Vec<&str> = ended
        .stderr
        .lines()
        .filter(|line| line.starts_with("error: "))
        .collect();
    assert_eq!(errors.len(), 1, "{ended}");
    assert_eq!(
        ended.stderr.lines().last(),
        errors.first().copied(),
        "{ended}"
    );
    for word in words {
        assert!(errors[0].contains(word), "`{word}`: {ended}");
    }
    assert!(ended.stdout.is_empty(), "{ended}");
    scene.is_clean();
    for name in [
        "run.json",
        "plan.toml",
        "units.jsonl",
        "trained.jsonl",
        "checkpoints",
    ] {
        assert!(!run.file(name).exists(), "{name}");
    }
    let logs = fs::read_dir(run.file("logs"))
        .into_iter()
        .flatten()
        .flatten();
    let logs: Vec<PathBuf> = logs.map(|entry| entry.path()).collect();
    assert!(logs.is_empty(), "{logs:?}");
}

fn data_is_refused(name: &str, content: Option<&[u8]>, words: &[&str]) {
    let scene = Scene::new();
    let path = scene.path(name);
    if let Some(content) = content {
        scene.write(name, content);
    }
    let run = scene.run("run");
    let data = path.display().to_string();
    let ended = scene.play(scene.train(&run, "2:2", &["--data", &data]));
    is_refused(&scene, &ended, &run, &[&[name], words].concat());
}

#[test]
fn conversations_that_cannot_be_used_are_one_line() {
    data_is_refused("missing.jsonl", None, &["--data", "no such file"]);
    data_is_refused("empty.jsonl", Some(b""), &["holds no record"]);
    data_is_refused("blank.jsonl", Some(b"\n \n\n"), &["no "]);
    let malformed = b"{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}\n";
    data_is_refused(
        "malformed.jsonl",
        Some(malformed),
        &[":1:", "not valid JSON"],
    );
    data_is_refused("no-json.jsonl", Some(b"once upon a time\n"), &[":1:1"]);
    let foreign = b"{\"title\":\"Hi\",\"body\":\"Hello\"}\n";
    data_is_refused(
        "foreign.jsonl",
        Some(foreign),
        &[":1", "messages", "title, body"],
    );
    let silent = b"{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}\n";
    data_is_refused("silent.jsonl", Some(silent), &["no_assistant"]);
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123\n";
    data_is_refused(
        "pointer.jsonl",
        Some(pointer),
        &["Git LFS pointer", "git lfs pull"],
    );
}

/// The tiny target, in a folder where it may be spoilt.
fn model(scene: &Scene, name: &str) -> PathBuf {
    let path = scene.path(name);
    fs::create_dir(&path).expect("a folder");
    for entry in fs::read_dir(asset("tiny-target"))
        .expect("the model")
        .flatten()
    {
        fs::copy(entry.path(), path.join(entry.file_name())).expect("a copy");
    }
    path
}

fn model_is_refused(spoil: impl Fn(&Path), words: &[&str]) {
    let scene = Scene::new();
    let path = model(&scene, "spoilt-model");
    spoil(&path);
    let run = scene.run("run");
    let model = path.display().to_string();
    let ended = scene.play(scene.train(&run, "2:2", &["--target-model", &model]));
    is_refused(&scene, &ended, &run, &[&["spoilt-model"], words].concat());
}

#[test]
fn models_that_cannot_be_used_are_one_line() {
    let remove = |path: &Path| fs::remove_dir_all(path).expect("removed");
    model_is_refused(remove, &["--target-model", "no such file"]);
    let weights = |path: &Path| path.join("model.safetensors");
    model_is_refused(
        |path| fs::remove_file(weights(path)).expect("removed"),
        &["no *.safetensors"],
    );
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 3223536\n";
    model_is_refused(
        |path| fs::write(weights(path), pointer).expect("written"),
        &["model.safetensors", "Git LFS pointer", "git lfs pull"],
    );
    let cut = |path: &Path| {
        let bytes = fs::read(weights(path)).expect("weights");
        fs::write(weights(path), &bytes[..bytes.len() / 2]).expect("written");
    };
    model_is_refused(cut, &["model.safetensors", "truncated"]);
    let another = |path: &Path| {
        let config = fs::read_to_string(path.join("config.json")).expect("its config");
        let config = config.replace("LlamaForCausalLM", "MambaForCausalLM");
        fs::write(path.join("config.json"), config).expect("written");
    };
    model_is_refused(
        another,
        &["config.json", "MambaForCausalLM", "LlamaForCausalLM"],
    );
    let remove =
        |name: &'static str| move |path: &Path| fs::remove_file(path.join(name)).expect("removed");
    model_is_refused(remove("config.json"), &["config.json", "No such file"]);
    model_is_refused(remove("tokenizer.json"), &["tokenizer.json"]);
    model_is_refused(
        remove("chat_template.jinja"),
        &["chat template", "--chat-template"],
    );
}

#[test]
fn output_directories_that_cannot_be_used_are_one_line() {
    let scene = Scene::new();
    let run = scene.run("run");
    scene.succeeds(scene.train(&run, "1:1", &["--max-steps", "1"]));
    let ended = scene.play(scene.train(&run, "1:1", &[]));
    assert_eq!(ended.code(), Some(2), "{ended}");
    let line = ended.last_block();
    assert!(
        line[0].contains("already holds a run") && line.len() == 1,
        "{ended}"
    );
    assert!(
        line[0].contains("--resume") && line[0].contains("--overwrite"),
        "{ended}"
    );
    assert_eq!(run.latest(), Some(1), "it is as it was");

    for (path, words) in [
        // Not even root can make a directory in either.
        ("/proc/self/slipstream", "cannot make the directory"),
        ("data.jsonl/run", "cannot make the directory"),
        (".", "holds no run"),
    ] {
        let place = scene.run(path);
        for more in [&[][..], &["--overwrite"]] {
            let ended = scene.play(scene.train(&place, "1:1", more));
            is_refused(&scene, &ended, &place, &[words, "choose another --output"]);
        }
    }
}

/// A disk without room is found before anything is loaded: the test write meets the limit.
#[test]
fn an_output_directory_without_room_is_one_line() {
    let scene = Scene::new();
    let run = scene.run("run");
    let mut command = scene.train(&run, "1:1", &[]);
    crate::full_disk::limit_files(&mut command, 1 << 20);
    let ended = scene.play(command);
    is_refused(&scene, &ended, &run, &["cannot write into it", "make room"]);
}

#[test]
fn all_that_is_wrong_is_told_at_once() {
    let scene = Scene::new();
    let run = scene.run("run");
    let path = model(&scene, "spoilt-model");
    fs::write(path.join("model.safetensors"), "short").expect("written");
    let (model, data) = (path.display().to_string(), "/no/such.jsonl");
    let more = [
        "--data",
        data,
        "--target-model",
        "/no/model",
        "--chat-template",
        "/no/template",
    ];
    let ended = scene.play(scene.train(&run, "1:1", &more));
    assert_eq!(ended.code(), Some(2), "{ended}");
    for word in [data, "/no/model", "/no/template"] {
        let line = ended.stderr.lines().find(|line| line.contains(word));
        assert!(
            line.is_some_and(|line| line.starts_with("error: ")),
            "{word}: {ended}"
        );
    }
    let empty = scene.write("empty.jsonl", "").display().to_string();
    let more = ["--data", &empty, "--target-model", &model];
    let ended = scene.play(scene.train(&run, "1:1", &more));
    assert_eq!(ended.code(), Some(2), "{ended}");
    for word in ["empty.jsonl", "spoilt-model"] {
        assert!(ended.stderr.contains(word), "{word}: {ended}");
    }
    assert_eq!(ended.stderr.lines().count(), 2, "{ended}");
}

#[test]
fn eval_and_export_refuse_what_is_no_checkpoint() {
    let scene = Scene::new();
    let words: [&[&str]; 3] = [
        &["eval", "nowhere"],
        &["export", "nowhere", "exported"],
        &["eval", "tmp", "--prompts", "data.jsonl"],
    ];
    for words in words {
        let ended = scene.play(scene.launcher(words));
        assert_eq!(ended.code(), Some(2), "{ended}");
        assert_eq!(ended.last_block().len(), 1, "{ended}");
        assert!(ended.stderr.contains("neither a checkpoint"), "{ended}");
    }
    assert!(!scene.path("exported").exists());
}
