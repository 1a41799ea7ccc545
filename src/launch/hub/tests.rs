use std::cell::RefCell;
use std::collections::BTreeMap;

use super::server::{COMMIT, Served, Server};
use super::*;
use crate::model::TargetFiles;
use crate::model::testing::Made;

const NAME: &str = "some-lab/tiny.1";

fn name() -> HubName {
    HubName::parse(Path::new(NAME)).unwrap()
}

/// A model in one file, beside files that nobody needs.
fn served() -> Served {
    let dir = tempfile::tempdir().unwrap();
    Made::new(true, true).write(dir.path());
    let mut files = BTreeMap::new();
    for file in ["config.json", "model.safetensors"] {
        files.insert(
            file.to_string(),
            std::fs::read(dir.path().join(file)).unwrap(),
        );
    }
    for file in [
        "README.md",
        "pytorch_model.bin",
        "original/model.safetensors",
    ] {
        files.insert(file.to_string(), b"no".to_vec());
    }
    files.insert("tokenizer.json".to_string(), b"{}".to_vec());
    Served {
        repo: NAME.to_string(),
        files,
        ..Served::default()
    }
}

/// The hub at `endpoint`, with its cache in `home`.
fn hub(endpoint: &str, home: &Path, more: &[(&str, &str)]) -> Hub {
    Hub::from_variables(|name| match name {
        "HF_ENDPOINT" => Some(endpoint.into()),
        "HF_HOME" => Some(home.into()),
        _ => {
            let found = more.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.into())
        }
    })
    .unwrap()
}

fn fetch(hub: &Hub) -> Result<Fetched, HubError> {
    hub.fetch(&name(), &|_| {})
}

#[test]
fn names_and_paths_are_told_apart() {
    let parsed = |text: &str| HubName::parse(Path::new(text)).map(|name| name.to_string());
    for text in [
        "Qwen/Qwen3-8B",
        "a/b.c_d",
        "some-lab/m@refs/pr/3",
        "a/b@v1.0",
    ] {
        assert_eq!(parsed(text).as_deref(), Some(text));
    }
    assert_eq!(parsed("a/b@main").as_deref(), Some("a/b"));
    for text in [
        "model",
        "/a/b",
        "./a/b",
        "../b",
        "a/b/c",
        "a//b",
        "a/",
        "/a",
        "~/b",
        "a/b@",
        "a/b@../c",
        "a b/c",
        "src/launch",
    ] {
        assert_eq!(parsed(text), None, "{text}");
    }
}

#[test]
fn the_environment_says_where_and_who() {
    let of = |variables: &[(&str, &str)]| {
        Hub::from_variables(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.into())
        })
    };
    assert!(matches!(of(&[]), Err(HubError::NoCache)));
    for (variables, cache) in [
        (&[("HOME", "/h")][..], "/h/.cache/huggingface/hub"),
        (
            &[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")],
            "/x/huggingface/hub",
        ),
        (&[("HOME", "/h"), ("HF_HOME", "/f")], "/f/hub"),
        (&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")], "/c"),
    ] {
        let hub = of(variables).unwrap();
        assert_eq!(hub.cache, Path::new(cache));
        assert_eq!(hub.endpoint, ENDPOINT);
        assert!(hub.token.is_none() && !hub.offline);
    }
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("token"), "stored\n").unwrap();
    let stored = hub("http://there/", home.path(), &[]);
    assert_eq!(stored.token.as_deref(), Some("stored"));
    assert_eq!(stored.endpoint, "http://there");
    let given = hub(
        "x",
        home.path(),
        &[("HF_TOKEN", "given"), ("HF_HUB_OFFLINE", "1")],
    );
    assert_eq!(given.token.as_deref(), Some("given"));
    assert!(given.offline);
}

#[test]
fn a_model_is_fetched_once_into_the_shared_cache() {
    let server = Server::start(served());
    let home = tempfile::tempdir().unwrap();
    let online = hub(&server.endpoint, home.path(), &[]);
    let fetched = fetch(&online).unwrap();
    assert_eq!(fetched.source, format!("{NAME}@{COMMIT}"));
    let layout = format!("hub/models--some-lab--tiny.1/snapshots/{COMMIT}");
    assert_eq!(fetched.dir, home.path().join(layout));
    TargetFiles::open(&fetched.dir, false).unwrap();
    let mut there: Vec<String> = std::fs::read_dir(&fetched.dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    there.sort();
    assert_eq!(
        there,
        ["config.json", "model.safetensors", "tokenizer.json"]
    );
    let asked = server.requests();
    assert!(
        asked
            .iter()
            .any(|path| path.ends_with("/model.safetensors")),
        "{asked:?}"
    );

    assert_eq!(fetch(&online).unwrap(), fetched);
    assert_eq!(
        server.requests(),
        [format!("/api/models/{NAME}/revision/main")]
    );

    let offline = hub(&server.endpoint, home.path(), &[("HF_HUB_OFFLINE", "1")]);
    assert_eq!(fetch(&offline).unwrap(), fetched);
    let pinned = HubName::parse(Path::new(&fetched.source)).unwrap();
    assert_eq!(offline.fetch(&pinned, &|_| {}).unwrap(), fetched);
    assert!(server.requests().is_empty());
}

#[test]
fn without_a_network_the_cache_is_used_and_told() {
    let server = Server::start(served());
    let home = tempfile::tempdir().unwrap();
    let fetched = fetch(&hub(&server.endpoint, home.path(), &[])).unwrap();
    // Nobody listens at a port that was just given up.
    let closed = {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", port.local_addr().unwrap())
    };
    let told = RefCell::new(Vec::new());
    let again = hub(&closed, home.path(), &[]).fetch(&name(), &|line| {
        told.borrow_mut().push(line.to_string());
    });
    assert_eq!(again.unwrap(), fetched);
    let told = told.into_inner().join("\n");
    assert!(
        told.contains(&closed) && told.contains("of the cache"),
        "{told}"
    );

    let empty = tempfile::tempdir().unwrap();
    let error = fetch(&hub(&closed, empty.path(), &[]))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("cannot be asked for some-lab/tiny.1"),
        "{error}"
    );
    assert!(error.contains(empty.path().to_str().unwrap()), "{error}");
    let error = fetch(&hub(&closed, empty.path(), &[("HF_HUB_OFFLINE", "1")]));
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("HF_HUB_OFFLINE keeps this program"),
        "{error}"
    );
}

#[test]
fn a_token_opens_what_is_closed() {
    let server = Server::start(Served {
        token: Some("secret".to_string()),
        ..served()
    });
    let home = tempfile::tempdir().unwrap();
    let error = fetch(&hub(&server.endpoint, home.path(), &[]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("(401): set HF_TOKEN"), "{error}");
    let wrong = [("HF_TOKEN", "wrong")];
    let error = fetch(&hub(&server.endpoint, home.path(), &wrong))
        .unwrap_err()
        .to_string();
    assert!(error.contains("the token that was sent"), "{error}");
    assert!(!error.contains("wrong"), "a token is not shown: {error}");
    fetch(&hub(
        &server.endpoint,
        home.path(),
        &[("HF_TOKEN", "secret")],
    ))
    .unwrap();
}

#[test]
fn a_name_that_nobody_has_is_refused() {
    let server = Server::start(served());
    let home = tempfile::tempdir().unwrap();
    let other = HubName::parse(Path::new("some-lab/other")).unwrap();
    let error = hub(&server.endpoint, home.path(), &[]).fetch(&other, &|_| {});
    let error = error.unwrap_err().to_string();
    assert!(error.contains("has no model some-lab/other"), "{error}");
}

#[test]
fn a_config_that_cannot_be_run_is_found_before_the_weights_come() {
    let mut served = served();
    served.files.insert(
        "config.json".to_string(),
        br#"{"architectures": ["GPT2LMHeadModel"]}"#.to_vec(),
    );
    let server = Server::start(served);
    let home = tempfile::tempdir().unwrap();
    let error = fetch(&hub(&server.endpoint, home.path(), &[]))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`GPT2LMHeadModel` is not supported"),
        "{error}"
    );
    let asked = server.requests();
    assert!(
        asked.iter().all(|path| !path.contains("safetensors")),
        "{asked:?}"
    );
}

#[test]
fn a_file_that_was_cut_off_is_taken_up_where_it_stopped() {
    let whole = served();
    let server = Server::start(Served {
        cut: Some(("model.safetensors".to_string(), 1000)),
        ..whole.clone()
    });
    let home = tempfile::tempdir().unwrap();
    let fetched = fetch(&hub(&server.endpoint, home.path(), &[])).unwrap();
    let got = std::fs::read(fetched.dir.join("model.safetensors")).unwrap();
    assert!(got == whole.files["model.safetensors"]);
}

#[test]
fn repositories_without_whole_weights_are_refused() {
    type Files = BTreeMap<String, Vec<u8>>;
    let says = |change: &dyn Fn(&mut Files)| {
        let mut served = served();
        change(&mut served.files);
        let server = Server::start(served);
        let home = tempfile::tempdir().unwrap();
        fetch(&hub(&server.endpoint, home.path(), &[]))
            .unwrap_err()
            .to_string()
    };
    let error = says(&|files| {
        files.remove("model.safetensors");
    });
    assert!(
        error.starts_with("some-lab/tiny.1 has no *.safetensors"),
        "{error}"
    );
    let error = says(&|files| {
        files.remove("config.json");
    });
    assert!(error.contains("it has no config.json"), "{error}");
    let error = says(&|files| {
        let index = br#"{"weight_map": {"a": "model.safetensors", "b": "2.safetensors"}}"#;
        files.insert(INDEX.to_string(), index.to_vec());
    });
    assert!(
        error.contains("lacks files that its model.safetensors.index.json names: 2.safetensors"),
        "{error}"
    );
    let error = says(&|files| {
        files.insert(
            INDEX.to_string(),
            br#"{"weight_map": {"a": "../x"}}"#.to_vec(),
        );
    });
    assert!(error.contains("names \"../x\", not a file"), "{error}");
}
