//! A target by its name: fetched from a hub on this machine, recorded with its commit, and used again without one.

#[path = "../../src/launch/hub/server.rs"]
mod server;

use std::collections::BTreeMap;
use std::fs;

use crate::support::{Scene, asset};
use server::{COMMIT, Served, Server};

#[test]
fn a_target_is_fetched_by_name_and_its_commit_recorded() {
    let files: BTreeMap<String, Vec<u8>> = fs::read_dir(asset("tiny-target"))
        .expect("the model")
        .flatten()
        .map(|entry| {
            let name = entry.file_name().into_string().expect("a name");
            (name, fs::read(entry.path()).expect("a file"))
        })
        .collect();
    let server = Server::start(Served {
        repo: "some-lab/tiny".to_owned(),
        files,
        token: Some("secret".to_owned()),
        cut: None,
    });
    let scene = Scene::with_rows(24);
    let run = |name: &str, variables: &[(&str, &str)]| {
        let run = scene.run(name);
        let words = ["--target-model", "some-lab/tiny", "--max-steps", "1"];
        let mut command = scene.train(&run, "1:1", &words);
        command
            .env("HF_HOME", scene.path("hf"))
            .env("HF_ENDPOINT", &server.endpoint)
            .envs(variables.iter().copied());
        for name in ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
            if variables.iter().all(|(given, _)| *given != name) {
                command.env_remove(name);
            }
        }
        (scene.play(command), run)
    };
    let (ended, refused) = run("refused", &[]);
    assert_eq!(ended.code(), Some(2), "{ended}");
    assert!(
        ended.stderr.contains("does not give some-lab/tiny (401)"),
        "{ended}"
    );
    assert!(!refused.file("plan.toml").exists());

    let (ended, fetched) = run("fetched", &[("HF_TOKEN", "secret")]);
    assert_eq!(ended.code(), Some(0), "{ended}");
    let source = format!("some-lab/tiny@{COMMIT}");
    assert!(ended.stderr.contains(&source), "{ended}");
    let plan = fs::read_to_string(fetched.file("plan.toml")).expect("the plan");
    assert!(plan.contains(&format!("hub = \"{source}\"")), "{plan}");
    assert!(plan.contains(&format!("/snapshots/{COMMIT}\"")), "{plan}");

    server.requests();
    let (ended, _) = run("offline", &[("HF_HUB_OFFLINE", "1")]);
    assert_eq!(ended.code(), Some(0), "{ended}");
    assert_eq!(server.requests(), Vec::<String>::new());
}
