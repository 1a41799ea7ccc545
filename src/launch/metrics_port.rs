//! The Prometheus endpoint: `GET /metrics` over HTTP/1.1, answered from shared memory when somebody asks.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::process;
use super::recorder::Latest;
use crate::control::WorkerName;
use crate::monitor::look::Sight;
use crate::monitor::registry::Known;
use crate::shm::Segment;

/// How long one client may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often the thread looks whether it is to end.
const PAUSE: Duration = Duration::from_millis(50);
/// Most bytes of a request.
const REQUEST: usize = 8192;

/// A thread that answers until it is dropped.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

/// What it answers from.
struct Answers {
    run: String,
    segment: Segment,
    places: BTreeMap<WorkerName, String>,
    latest: Arc<Mutex<Latest>>,
}

impl MetricsServer {
    /// Listens on `address`; port 0 takes any free one.
    ///
    /// # Errors
    /// An address that cannot be had.
    pub fn start(
        address: SocketAddr,
        run: String,
        segment: Segment,
        places: BTreeMap<WorkerName, String>,
        latest: Arc<Mutex<Latest>>,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let answers = Answers {
            run,
            segment,
            places,
            latest,
        };
        let thread = thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || {
                while !stopping.load(Ordering::Acquire) {
                    match listener.accept() {
                        // One that hangs up early is of no concern.
                        Ok((client, _)) => drop(answers.serve(client)),
                        Err(_) => thread::sleep(PAUSE),
                    }
                }
            })?;
        Ok(Self {
            address,
            stop,
            thread: Some(thread),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic there was printed already.
            let _ = thread.join();
        }
    }
}

impl Answers {
    fn serve(&self, mut client: TcpStream) -> io::Result<()> {
        client.set_nonblocking(false)?;
        client.set_read_timeout(Some(PATIENCE))?;
        client.set_write_timeout(Some(PATIENCE))?;
        let mut request = Vec::new();
        let mut part = [0; 1024];
        while !request.windows(4).any(|window| window == b"\r\n\r\n") {
            let read = client.read(&mut part)?;
            request.extend_from_slice(&part[..read]);
            if read == 0 || request.len() > REQUEST {
                break;
            }
        }
        let text = String::from_utf8_lossy(&request);
        let mut words = text.split_whitespace();
        let (status, kind, body) = match (words.next(), words.next()) {
            (Some("GET"), Some("/metrics")) => (
                "200 OK",
                "text/plain; version=0.0.4; charset=utf-8",
                self.page(),
            ),
            (Some("GET"), Some(_)) => (
                "404 Not Found",
                "text/plain; charset=utf-8",
                "the metrics are at /metrics\n".to_owned(),
            ),
            _ => (
                "405 Method Not Allowed",
                "text/plain; charset=utf-8",
                "GET /metrics\n".to_owned(),
            ),
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        client.write_all(head.as_bytes())?;
        client.write_all(body.as_bytes())
    }

    fn page(&self) -> String {
        let me = std::process::id();
        let look = Sight {
            run: self.run.clone(),
            launcher: (me, process::start_time(me).unwrap_or(0)),
            now: &self.segment.snapshot(),
            before: None,
            cpu_before: &BTreeMap::new(),
            places: &self.places,
            metrics: &VecDeque::new(),
        }
        .look();
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        Known {
            look: &look,
            step: latest.step.as_ref(),
            evaluation: latest.evaluation.as_ref(),
        }
        .page()
    }
}

/// `PORT` on loopback, or `ADDRESS:PORT`.
///
/// # Errors
/// In words: neither.
pub fn read_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok(SocketAddr::from(([127, 0, 0, 1], port)));
    }
    text.parse().map_err(|_| {
        format!("`{text}` is no port such as 9400 and no ADDRESS:PORT such as 0.0.0.0:9400")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::testing::geometry;
    use crate::shm::{Geometry, RunId};

    #[test]
    fn ports_are_on_loopback_unless_told_otherwise() {
        assert_eq!(read_address("9400").unwrap().to_string(), "127.0.0.1:9400");
        assert_eq!(
            read_address("0.0.0.0:9400").unwrap().to_string(),
            "0.0.0.0:9400"
        );
        assert!(read_address("99999").unwrap_err().contains("no port"));
        assert!(read_address("localhost").is_err());
    }

    #[test]
    fn it_answers_one_page_and_nothing_else() {
        let geometry = Geometry {
            units_per_step: 2,
            ..geometry(1, 1, 6, 9)
        };
        let segment = Segment::create(&geometry, RunId::fresh()).unwrap();
        let server = MetricsServer::start(
            read_address("0").unwrap(),
            "runs/a".to_owned(),
            segment,
            BTreeMap::new(),
            Arc::default(),
        )
        .unwrap();
        let ask = |request: &str| {
            let mut client = TcpStream::connect(server.address()).unwrap();
            client.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).unwrap();
            answer
        };
        let page = ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
        assert!(
            page.contains("\nslipstream_units{state=\"pending\"} 9\n"),
            "{page}"
        );
        let (head, body) = page.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}", body.len())));
        assert!(ask("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(ask("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    }
}
