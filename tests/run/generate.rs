//! `launcher generate`: answers by the target itself, and by a server.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Scene, asset, rows};

fn target() -> String {
    asset("tiny-target").display().to_string()
}

/// The rows of an output by prompt and sample.
fn by_source(scene: &Scene, name: &str) -> BTreeMap<(u64, u64), Value> {
    let text = std::fs::read_to_string(scene.path(name)).expect("the output");
    let mut found = BTreeMap::new();
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).expect("a row");
        let number = |key: &str| row["source"][key].as_u64().expect("a number");
        let key = (number("row"), number("sample"));
        assert!(found.insert(key, row).is_none(), "{key:?} twice");
    }
    found
}

fn said(row: &Value) -> Vec<(String, String)> {
    let messages = row["messages"].as_array().expect("messages");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    messages
        .iter()
        .map(|m| (text(&m["role"]), text(&m["content"])))
        .collect()
}

/// The demo's answers are the tiny target's own greedy ones, so it gives them again, in any company.
#[test]
fn the_target_gives_its_own_greedy_answers_again_and_goes_on_after_a_kill() {
    let scene = Scene::with_rows(30);
    let words = |more: &[&str]| {
        let mut words = vec![
            "generate",
            "--cpu",
            "--prompts",
            "data.jsonl",
            "--batch",
            "7",
        ];
        let target = target();
        words.extend(["--target-model", &target, "--output", "made.jsonl"]);
        words.extend(more);
        scene.launcher(&words)
    };
    scene.succeeds(words(&["--limit", "9"]));
    assert_eq!(by_source(&scene, "made.jsonl").len(), 9);
    let ended = scene.play(words(&[]));
    assert_eq!(ended.code(), Some(2), "{ended}");
    assert!(
        ended.stderr.contains("--resume makes what is missing"),
        "{ended}"
    );

    // A kill in the middle of a line.
    let path = scene.path("made.jsonl");
    let whole = std::fs::read(&path).expect("the output");
    std::fs::write(&path, &whole[..whole.len() - 20]).expect("a shorter file");
    let ended = scene.play(words(&["--resume", "--temperature", "0.5"]));
    assert_eq!(ended.code(), Some(2), "{ended}");
    assert!(
        ended.stderr.contains("was made with another model"),
        "{ended}"
    );
    let ended = scene.succeeds(words(&["--resume"]));
    assert!(ended.stdout.contains("22 conversations"), "{ended}");

    let made = by_source(&scene, "made.jsonl");
    assert_eq!(made.len(), 30);
    for (line, ((row, _), answered)) in rows(0, 30).lines().zip(&made) {
        let given: Value = serde_json::from_str(line).expect("a row");
        assert_eq!(said(answered), said(&given), "row {row}");
        let reason = given.get("finish_reason").unwrap_or(&Value::Null);
        assert!(reason.is_null() || *reason == answered["finish_reason"]);
        assert_eq!(answered["source"]["file"], "data.jsonl");
    }

    // What was made trains a drafter.
    let run = scene.run("run");
    scene.succeeds(scene.train(&run, "1:1", &["--data", "made.jsonl", "--max-steps", "1"]));
    assert!(
        run.summary()["skipped"]
            .as_object()
            .is_some_and(|s| s.is_empty())
    );
}

#[test]
fn samples_differ_and_repeat_with_their_seed() {
    let scene = Scene::with_rows(6);
    let make = |output: &str, batch: &str, seed: &str| {
        let target = target();
        scene.succeeds(scene.launcher(&[
            "generate",
            "--cpu",
            "--prompts",
            "data.jsonl",
            "--target-model",
            &target,
            "--output",
            output,
            "--batch",
            batch,
            "--seed",
            seed,
            "--temperature",
            "1.2",
            "--samples",
            "3",
            "--max-new-tokens",
            "24",
        ]));
        let made = by_source(&scene, output);
        made.into_iter()
            .map(|(key, row)| (key, said(&row)))
            .collect::<BTreeMap<_, _>>()
    };
    let once = make("once.jsonl", "3", "1");
    assert_eq!(once.len(), 18);
    assert_eq!(once, make("again.jsonl", "16", "1"));
    assert_ne!(once, make("other.jsonl", "16", "2"));
    let same = |row: u64| once[&(row, 0)] == once[&(row, 1)] && once[&(row, 1)] == once[&(row, 2)];
    // The target is sure of most of its answers.
    assert!((0..6).any(|row| !same(row)), "{once:?}");
}

#[test]
fn what_cannot_be_generated_is_refused_at_once() {
    let scene = Scene::with_rows(2);
    let target = target();
    for (words, says) in [
        (vec!["--target-model", &target], "--prompts: is missing"),
        (vec!["--samples", "2"], "--samples: would all be the same"),
        (vec!["--concurrency", "2"], "--concurrency: is for a server"),
        (
            vec![
                "--endpoint",
                "http://x",
                "--prompts",
                "data.jsonl",
                "--batch",
                "2",
            ],
            "--batch: has no meaning with --endpoint",
        ),
        (
            vec![
                "--endpoint",
                "ftp://x",
                "--prompts",
                "data.jsonl",
                "--model",
                "m",
            ],
            "is no address such as",
        ),
        (vec!["--gpus", "0", "--cpu"], "--gpus: and --cpu exclude"),
        (vec!["--prompts", "none.jsonl"], "none.jsonl"),
        (vec!["--resume", "--overwrite"], "--overwrite: would remove"),
    ] {
        let words: Vec<&str> = std::iter::once("generate").chain(words).collect();
        let ended = scene.play(scene.launcher(&words));
        assert_eq!(ended.code(), Some(2), "{words:?} {ended}");
        assert!(ended.stderr.contains(says), "{says}: {ended}");
    }
}

/// A server that answers each question with itself, after some failures.
struct Server {
    address: String,
    seen: Mutex<Vec<Value>>,
    open: AtomicUsize,
    most_open: AtomicUsize,
    failures: AtomicUsize,
    /// Every answer to a chat request is this status, where it is not 200.
    status: u16,
}

impl Server {
    /// Serves while `play` runs.
    fn with(status: u16, failures: usize, play: impl FnOnce(&Self)) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let server = Self {
            address: format!("http://{address}"),
            seen: Mutex::default(),
            open: AtomicUsize::new(0),
            most_open: AtomicUsize::new(0),
            failures: AtomicUsize::new(failures),
            status,
        };
        let over = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for connection in listener.incoming() {
                    if over.load(Ordering::Relaxed) > 0 {
                        return;
                    }
                    let connection = connection.expect("a connection");
                    scope.spawn(|| server.serve(connection));
                }
            });
            let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| play(&server)));
            over.store(1, Ordering::Relaxed);
            let _ = TcpStream::connect(address);
            if let Err(panic) = played {
                std::panic::resume_unwind(panic);
            }
        });
    }

    fn serve(&self, mut connection: TcpStream) {
        let mut reader = BufReader::new(connection.try_clone().expect("a clone"));
        let mut first = String::new();
        while reader.read_line(&mut first).is_ok_and(|n| n > 0) {
            let mut length = 0;
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|n| n > 0) && !line.trim().is_empty() {
                let lower = line.to_lowercase();
                if let Some(value) = lower.strip_prefix("content-length:") {
                    length = value.trim().parse().expect("a length");
                }
                line.clear();
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).expect("the body");
            let open = self.open.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_open.fetch_max(open, Ordering::SeqCst);
            let (status, answer) = self.answer(&first, &body);
            self.open.fetch_sub(1, Ordering::SeqCst);
            // Status 0: the connection breaks.
            if status == 0 {
                return;
            }
            let answer = answer.to_string();
            let head = format!(
                "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nretry-after: 0\r\ncontent-length: {}\r\n\r\n",
                answer.len()
            );
            if connection.write_all((head + &answer).as_bytes()).is_err() {
                return;
            }
            first.clear();
        }
    }

    fn answer(&self, first: &str, body: &[u8]) -> (u16, Value) {
        if first.starts_with("GET /v1/models ") {
            return (200, json!({"data": [{"id": "echo"}]}));
        }
        assert!(first.starts_with("POST /v1/chat/completions "), "{first}");
        if self.status != 200 {
            return (self.status, json!({"error": "no key"}));
        }
        let failed = self
            .failures
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if let Ok(left) = failed {
            return (
                if left % 2 == 0 { 0 } else { 503 },
                json!({"error": "busy"}),
            );
        }
        std::thread::sleep(Duration::from_millis(30));
        let request: Value = serde_json::from_slice(body).expect("JSON");
        let messages = request["messages"].as_array().expect("messages");
        let last = messages.last().expect("a message")["content"]
            .as_str()
            .expect("a text");
        let answer = match last {
            "too long" => return (400, json!({"error": "context length"})),
            "cut" => {
                json!({"message": {"role": "assistant", "content": "begun"}, "finish_reason": "length"})
            }
            last => json!({
                "message": {"role": "assistant", "content": format!("{last}, after {}", messages.len() - 1)},
                "finish_reason": "stop"
            }),
        };
        self.seen.lock().expect("the list").push(request);
        (
            200,
            json!({"choices": [answer], "usage": {"completion_tokens": 5}}),
        )
    }
}

fn conversation(texts: &[&str]) -> String {
    let messages: Vec<Value> = texts
        .iter()
        .flat_map(|text| {
            [
                json!({"role": "user", "content": text}),
                json!({"role": "assistant", "content": "?"}),
            ]
        })
        .collect();
    json!({ "messages": messages }).to_string() + "\n"
}

#[test]
fn a_server_is_asked_at_once_and_again() {
    let scene = Scene::with_rows(1);
    let mut prompts: String = (0..12)
        .map(|i| conversation(&[&format!("q{i}"), "more"]))
        .collect();
    prompts += &conversation(&["too long"]);
    prompts += &conversation(&["cut", "never asked"]);
    prompts += &conversation(&["fine", "too long"]);
    scene.write("prompts.jsonl", prompts);
    Server::with(200, 4, |server| {
        let ended = scene.succeeds(scene.launcher(&[
            "generate",
            "--endpoint",
            &server.address,
            "--prompts",
            "prompts.jsonl",
            "--output",
            "made.jsonl",
            "--concurrency",
            "4",
            "--temperature",
            "0.7",
            "--max-new-tokens",
            "99",
        ]));
        let made = by_source(&scene, "made.jsonl");
        assert_eq!(made.len(), 14, "{ended}");
        assert!(
            ended
                .stdout
                .contains("14 conversations, 1 of them cut by length, 1 rows skipped"),
            "{ended}"
        );
        assert!(
            ended.stderr.contains("row 12 is not answered")
                && ended.stderr.contains("context length"),
            "{ended}"
        );
        let texts: Vec<String> = said(&made[&(3, 0)])
            .into_iter()
            .map(|(_, text)| text)
            .collect();
        assert_eq!(texts, ["q3", "q3, after 0", "more", "more, after 2"]);
        assert_eq!(
            (&made[&(3, 0)]["tokens"], &made[&(3, 0)]["finish_reason"]),
            (&json!(10), &json!("stop"))
        );
        assert_eq!(
            (
                said(&made[&(13, 0)]).len(),
                &made[&(13, 0)]["finish_reason"]
            ),
            (2, &json!("length"))
        );
        // What was answered before a refusal is kept.
        assert_eq!(said(&made[&(14, 0)]).len(), 2);
        let seen = server.seen.lock().expect("the list");
        assert!(
            seen.iter()
                .all(|request| request["model"] == "echo" && request["max_tokens"] == 99)
        );
        assert!((2..=4).contains(&server.most_open.load(Ordering::SeqCst)));
    });
}

#[test]
fn a_server_that_will_not_answer_ends_it_with_a_word_how_to_go_on() {
    let scene = Scene::with_rows(1);
    scene.write("prompts.jsonl", conversation(&["q"]));
    let ask = |address: &str, more: &[&str]| {
        let mut words = vec![
            "generate",
            "--endpoint",
            address,
            "--prompts",
            "prompts.jsonl",
        ];
        words.extend(["--retries", "1", "--model", "m"]);
        words.extend(more);
        scene.play(scene.launcher(&words))
    };
    Server::with(401, 0, |server| {
        let ended = ask(&server.address, &[]);
        assert_eq!(ended.code(), Some(1), "{ended}");
        assert!(
            ended.stderr.contains("status 401") && ended.stderr.contains("--resume"),
            "{ended}"
        );
    });
    // Nobody listens there any more.
    let gone = TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("its address");
    let ended = ask(&format!("http://{gone}/v1"), &["--resume"]);
    assert_eq!(ended.code(), Some(1), "{ended}");
    assert!(ended.stderr.contains("tried 2 times"), "{ended}");
}
