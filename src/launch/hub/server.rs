//! A hub on this machine, for tests: one model of some files at one commit.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// The commit of the model.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What a hub serves, and how.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// `owner/name`.
    pub repo: String,
    /// By name.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Who may read: everybody, or who sends this token.
    pub token: Option<String>,
    /// A file that is cut off after so many bytes when it is asked for whole.
    pub cut: Option<(String, usize)>,
}

/// A hub that serves until the process ends.
pub struct Server {
    /// For `HF_ENDPOINT`.
    pub endpoint: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// Starts on a free port of this machine.
    pub fn start(served: Served) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // A client that goes away in the middle is its own affair.
                let _ = stream.and_then(|stream| answer(stream, &served, &log));
            }
        });
        Self { endpoint, requests }
    }

    /// The paths that were asked for since the last time, first to last.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.requests.lock().unwrap())
    }
}

fn answer(mut stream: TcpStream, served: &Served, log: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let path = first.split(' ').nth(1).unwrap_or_default().to_string();
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(':') else {
            break;
        };
        headers.insert(name.to_lowercase(), value.trim().to_string());
    }
    log.lock().unwrap().push(path.clone());
    let mut reply = |status: &str, more: &str, body: &[u8], length: usize| {
        let head = format!(
            "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{more}\r\n"
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)
    };
    if let Some(token) = &served.token
        && headers.get("authorization") != Some(&format!("Bearer {token}"))
    {
        return reply("401 Unauthorized", "", b"", 0);
    }
    let api = [COMMIT, "main"].map(|at| format!("/api/models/{}/revision/{at}", served.repo));
    if api.contains(&path) {
        let names: Vec<String> = served
            .files
            .keys()
            .map(|name| format!(r#"{{"rfilename": "{name}"}}"#))
            .collect();
        let names = names.join(", ");
        let info = format!(r#"{{"sha": "{COMMIT}", "siblings": [{names}]}}"#);
        return reply("200 OK", "", info.as_bytes(), info.len());
    }
    let root = format!("/{}/resolve/{COMMIT}/", served.repo);
    let name = path.strip_prefix(&root).unwrap_or_default();
    let Some(file) = served.files.get(name) else {
        return reply("404 Not Found", "", b"", 0);
    };
    let range = headers.get("range").and_then(|r| r.strip_prefix("bytes="));
    let (begin, end) = range.and_then(|r| r.split_once('-')).unwrap_or(("0", ""));
    let begin: usize = begin.parse().unwrap_or(0);
    let end = end
        .parse()
        .map_or(file.len(), |end: usize| end + 1)
        .min(file.len());
    let more = format!(
        "ETag: \"{}-{name}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes {begin}-{}/{}\r\n",
        file.len(),
        end.saturating_sub(1),
        file.len()
    );
    let body = &file[begin.min(end)..end];
    let sent = match &served.cut {
        Some((cut, at)) if cut == name && begin == 0 && body.len() > *at => &body[..*at],
        _ => body,
    };
    reply("206 Partial Content", &more, sent, body.len())
}
