//! `launcher generate`: answers to prompts by the target itself, or by a server, as training data.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use minijinja::Value;

use super::answers::{Output, Row, RowSource};
use super::devices::Devices;
use super::endpoint::{ChatRequest, Endpoint, EndpointError, EndpointOptions};
use super::options::{Answerer, GenerateOptions, TargetOptions};
use super::places::Device;
use super::prepare::Refusal;
use super::sources::locate;
use crate::data::{self, ChatTemplate, ChatTokenizer, Conversation, demo, read_prompts};
use crate::engine::Engine;
use crate::engine::cpu::Cpu;
use crate::engine::cuda::Cuda;
use crate::eval::decode::Limits;
use crate::eval::generate::{self, Finish, Question};
use crate::model::{BatchDecoder, Target, TargetFiles, TargetNeeds, end_token_ids};
use crate::monitor::console::Console;

/// How often progress is told.
const TOLD: Duration = Duration::from_secs(5);
/// Sequences at a time when nobody says.
const ON_CPU: usize = 16;
const ON_GPU: usize = 256;
/// Skipped rows that are named.
const NAMED: usize = 5;

/// Generates; returns the launcher's exit code.
pub fn generate(options: &GenerateOptions) -> u8 {
    let devices = Devices::choose(&options.device).map_err(Stop::Refused);
    finish(devices.and_then(|devices| run(options, &devices)))
}

/// The same where the devices are chosen already.
pub fn generate_on(options: &GenerateOptions, devices: &Devices) -> u8 {
    finish(run(options, devices))
}

fn finish(result: Result<(), Stop>) -> u8 {
    match result {
        Ok(()) => 0,
        Err(Stop::Refused(Refusal(lines))) => {
            for line in lines {
                eprintln!("error: {line}");
            }
            2
        }
        Err(Stop::Failed(what)) => {
            eprintln!("error: {what}");
            eprintln!("  what is answered so far is kept: go on with --resume");
            1
        }
    }
}

/// Why there is no whole result.
enum Stop {
    /// Before anything was done.
    Refused(Refusal),
    /// In the middle.
    Failed(String),
}

impl<E> From<E> for Stop
where
    Refusal: From<E>,
{
    fn from(error: E) -> Self {
        Self::Refused(error.into())
    }
}

fn run(options: &GenerateOptions, devices: &Devices) -> Result<(), Stop> {
    let console = Console::new(options.quiet);
    let mut paths = options.prompts.clone();
    let demo = match &options.answerer {
        Answerer::Model { target, .. } if target.model.is_none() => {
            Some(demo::write(&data::default_cache_dir().join("demo"))?)
        }
        _ => None,
    };
    if paths.is_empty() {
        paths.extend(demo.iter().map(|demo| demo.data.clone()));
    }
    let mut prompts = read_prompts(&paths, "--prompts")?;
    for line in prompts.report.example_lines() {
        console.line(&format!("  {line}"));
    }
    if let Some(limit) = options.limit {
        prompts.conversations.truncate(limit);
    }
    let names: Vec<String> = prompts.report.files.clone();
    let mut settings = blake3::Hasher::new();
    settings.update(prompts.hash.as_bytes());
    let (most, longest) = (options.max_new_tokens, options.max_length);
    let how = format!("{most} {longest} {} {}", options.temperature, options.seed);
    settings.update(how.as_bytes());
    let job = |settings: &blake3::Hasher| -> Result<(Work<'_>, Output), Refusal> {
        let settings = settings.finalize().to_hex()[..16].to_owned();
        let output = Output::open(options, settings)?;
        let work = Work {
            conversations: &prompts.conversations,
            samples: options.samples as u64,
            made: output.made.clone(),
            next: 0,
            again: VecDeque::new(),
            skipped: Vec::new(),
            stopped: false,
        };
        if !output.made.is_empty() {
            let made = output.made.len();
            console.line(&format!("{made} conversations were answered earlier"));
        }
        Ok((work, output))
    };
    match &options.answerer {
        Answerer::Model {
            target,
            template_kwargs,
            batch,
            prefill_tokens,
        } => {
            let given = target.model.as_deref();
            let located = given.map(|given| locate(given, &console)).transpose()?;
            let dir = located.map(|(dir, _)| dir);
            let dir = dir.or(demo.map(|demo| demo.model_dir));
            let model = Model::open(&dir.unwrap_or_default(), target, template_kwargs)?;
            settings.update(model.files.hash().as_bytes());
            settings.update(model.template.hash().as_bytes());
            let (work, output) = job(&settings)?;
            console.line(&format!(
                "answering {} conversations on {devices}",
                work.left()
            ));
            let speaker = Speaker {
                model: &model,
                options,
                batch: *batch,
                prefill_tokens: *prefill_tokens,
            };
            let workers: Vec<_> = devices
                .all()
                .iter()
                .map(|&device| {
                    let speaker = &speaker;
                    move |work: &Mutex<Work<'_>>, out: &mpsc::Sender<Row>| match device {
                        Device::Cpu { threads } => {
                            let engine = Cpu::new(threads).map_err(|e| e.to_string())?;
                            speaker.answer_on(&engine, || None, work, out)
                        }
                        Device::Gpu { ordinal } => {
                            let engine = Cuda::new(ordinal as usize).map_err(|e| e.to_string())?;
                            let free = || Some(engine.memory_use().ok()?.free);
                            speaker.answer_on(&engine, free, work, out)
                        }
                    }
                })
                .collect();
            collect(workers, work, output, &names, &console)
        }
        Answerer::Endpoint {
            url,
            model,
            concurrency,
            retries,
            timeout,
        } => {
            let endpoint = Endpoint::connect(
                url,
                model.as_deref(),
                EndpointOptions {
                    retries: *retries,
                    timeout: *timeout,
                    key: std::env::var("OPENAI_API_KEY").ok(),
                },
            )?;
            settings.update(endpoint.model().as_bytes());
            let (work, output) = job(&settings)?;
            console.line(&format!(
                "asking {} of {url} to answer {} conversations",
                endpoint.model(),
                work.left()
            ));
            let endpoint = &endpoint;
            let worker = move |work: &Mutex<Work<'_>>, out: &mpsc::Sender<Row>| {
                ask_on(endpoint, options, work, out)
            };
            collect(vec![worker; *concurrency], work, output, &names, &console)
        }
    }
}

/// A conversation that is being answered.
#[derive(Clone, Debug)]
struct Job<'a> {
    conversation: &'a Conversation,
    sample: u64,
    answers: Vec<Value>,
    tokens: u64,
    finish_reason: String,
}

impl Job<'_> {
    /// Names the draws of the next answer.
    fn stream(&self) -> u64 {
        (self.conversation.row << 32) ^ (self.sample << 12) ^ self.answers.len() as u64
    }

    /// Takes an answer in; whether another turn follows. A cut answer is the last one.
    fn add(&mut self, answer: Value, finish_reason: String, tokens: u64) -> bool {
        self.answers.push(answer);
        self.tokens += tokens;
        self.finish_reason = finish_reason;
        self.finish_reason == "stop" && self.answers.len() < self.conversation.turns()
    }

    fn row(&self) -> Row {
        let messages = self.conversation.answered(&self.answers);
        let json = |m: &Value| serde_json::to_value(m).expect("a message came from JSON");
        Row {
            messages: messages.iter().map(json).collect(),
            finish_reason: self.finish_reason.clone(),
            tokens: self.tokens,
            source: RowSource {
                file: String::new(),
                row: self.conversation.row,
                sample: self.sample,
                settings: String::new(),
            },
        }
    }
}

/// What is still to be answered.
struct Work<'a> {
    conversations: &'a [Conversation],
    samples: u64,
    /// Row and sample of what earlier calls made.
    made: HashSet<(u64, u64)>,
    next: u64,
    /// Conversations whose next turn is due.
    again: VecDeque<Job<'a>>,
    /// Rows that cannot be answered, and why.
    skipped: Vec<(u64, String)>,
    /// Nothing more is to be begun.
    stopped: bool,
}

impl<'a> Work<'a> {
    fn left(&self) -> usize {
        let rows = self.conversations.iter().map(|c| c.row);
        let all = rows.flat_map(|row| (0..self.samples).map(move |sample| (row, sample)));
        all.filter(|key| !self.made.contains(key)).count()
    }

    /// Later turns first: their conversations are the oldest.
    fn take(&mut self) -> Option<Job<'a>> {
        if self.stopped {
            return None;
        }
        if let Some(job) = self.again.pop_front() {
            return Some(job);
        }
        loop {
            let place = (self.next / self.samples) as usize;
            let conversation = self.conversations.get(place)?;
            let sample = self.next % self.samples;
            self.next += 1;
            if !self.made.contains(&(conversation.row, sample)) {
                return Some(Job {
                    conversation,
                    sample,
                    answers: Vec::new(),
                    tokens: 0,
                    finish_reason: String::new(),
                });
            }
        }
    }

    /// A conversation that cannot go on: what it has so far is kept, if it has an answer.
    fn give_up(&mut self, job: &Job<'_>, what: String, out: &mpsc::Sender<Row>) {
        if job.answers.is_empty() {
            self.skipped.push((job.conversation.row, what));
        } else {
            send(out, job);
        }
    }
}

fn lock<'m, 'a>(work: &'m Mutex<Work<'a>>) -> MutexGuard<'m, Work<'a>> {
    work.lock().unwrap_or_else(PoisonError::into_inner)
}

fn send(out: &mpsc::Sender<Row>, job: &Job<'_>) {
    // Without a receiver the output has failed, and `stopped` ends the work.
    let _ = out.send(job.row());
}

/// Runs the workers and writes what they finish.
fn collect<'a, W>(
    workers: Vec<W>,
    work: Work<'a>,
    mut output: Output,
    names: &[String],
    console: &Console,
) -> Result<(), Stop>
where
    W: FnOnce(&Mutex<Work<'a>>, &mpsc::Sender<Row>) -> Result<(), String> + Send,
{
    let all = work.left();
    let files: HashMap<u64, u32> = work.conversations.iter().map(|c| (c.row, c.file)).collect();
    let work = Mutex::new(work);
    let (out, rows) = mpsc::channel();
    let began = Instant::now();
    let mut told = began;
    let mut tally = Tally::default();
    let result = std::thread::scope(|scope| {
        let threads: Vec<_> = workers
            .into_iter()
            .map(|worker| {
                let (work, out) = (&work, out.clone());
                scope.spawn(move || {
                    let ended = worker(work, &out);
                    if ended.is_err() {
                        lock(work).stopped = true;
                    }
                    ended
                })
            })
            .collect();
        drop(out);
        let mut written = Ok(());
        for mut row in rows {
            let file = files.get(&row.source.row).map_or(0, |&file| file as usize);
            row.source.file = names.get(file).cloned().unwrap_or_default();
            written = written.and_then(|()| output.add(&row));
            if written.is_err() {
                lock(&work).stopped = true;
            }
            tally.add(&row);
            if told.elapsed() > TOLD {
                told = Instant::now();
                console.line(&format!("{} of {all}: {}", tally.rows, tally.rate(began)));
            }
        }
        let ended = threads.into_iter().map(|thread| match thread.join() {
            Ok(ended) => ended,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        // All are waited for, then the first failure is told.
        let ended: Vec<Result<(), String>> = ended.collect();
        written.and(ended.into_iter().collect::<Result<(), String>>())
    });
    let skipped = std::mem::take(&mut lock(&work).skipped);
    for (row, what) in skipped.iter().take(NAMED) {
        console.warn(&format!("row {row} is not answered: {what}"));
    }
    result.map_err(Stop::Failed)?;
    output.finish().map_err(Stop::Failed)?;
    println!(
        "{}: {} conversations, {} of them cut by length, {} rows skipped; {}",
        output.path.display(),
        tally.rows,
        tally.cut,
        skipped.len(),
        tally.rate(began)
    );
    Ok(())
}

/// What was made so far.
#[derive(Default)]
struct Tally {
    rows: u64,
    cut: u64,
    tokens: u64,
}

impl Tally {
    fn add(&mut self, row: &Row) {
        self.rows += 1;
        self.cut += u64::from(row.finish_reason == "length");
        self.tokens += row.tokens;
    }

    fn rate(&self, began: Instant) -> String {
        let seconds = began.elapsed().as_secs_f64();
        let rate = self.tokens as f64 / seconds.max(1e-3);
        format!(
            "{} tokens in {seconds:.1} s, {rate:.0} tokens/s",
            self.tokens
        )
    }
}

/// A model that answers, and its text.
struct Model {
    files: TargetFiles,
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    end: Vec<u32>,
}

impl Model {
    fn open(
        dir: &Path,
        target: &TargetOptions,
        template_kwargs: &[(String, serde_json::Value)],
    ) -> Result<Self, Refusal> {
        let tokenizer = ChatTokenizer::load(dir)?;
        let explicit = target.chat_template.as_deref();
        let end = end_token_ids(dir);
        if end.is_empty() {
            return Err(Refusal(vec![format!(
                "{}: neither generation_config.json nor config.json names an eos_token_id, so no answer would end",
                dir.display()
            )]));
        }
        Ok(Self {
            files: TargetFiles::open(dir, target.assume_tied)?,
            template: ChatTemplate::load(dir, explicit, &tokenizer, template_kwargs)?,
            tokenizer,
            end,
        })
    }

    fn prompt(&self, job: &Job<'_>) -> Result<Vec<u32>, String> {
        let messages = job.conversation.messages(&job.answers);
        let text = self.template.render(&messages, None, true)?;
        Ok(self.tokenizer.encode(&text)?.ids)
    }
}

/// A model's answers, on any engine.
struct Speaker<'a> {
    model: &'a Model,
    options: &'a GenerateOptions,
    batch: Option<usize>,
    prefill_tokens: usize,
}

impl Speaker<'_> {
    /// Answers until there is no more work. `free` says how many bytes the device has left, if it is a GPU.
    fn answer_on<E: Engine>(
        &self,
        engine: &E,
        free: impl Fn() -> Option<u64>,
        work: &Mutex<Work<'_>>,
        out: &mpsc::Sender<Row>,
    ) -> Result<(), String> {
        let needs = TargetNeeds {
            capture: Vec::new(),
            final_hidden: true,
            lm_head: true,
        };
        let model = self.model;
        let loaded = Target::load(engine, &model.files, needs);
        let mut target = loaded.map_err(|error| error.to_string())?;
        let context = target.config().max_position_embeddings;
        let capacity = self.options.max_length.min(context);
        let sequences = self.batch.unwrap_or_else(|| {
            let bytes = BatchDecoder::bytes(&target, 1, capacity);
            free().map_or(ON_CPU, |free| {
                // The rest is for what a forward needs.
                ON_GPU.min((free / 2 / bytes.max(1)) as usize).max(1)
            })
        });
        let how = generate::GenerateOptions {
            sequences: sequences.min(lock(work).left().max(1)),
            capacity,
            prefill_tokens: self.prefill_tokens,
            limits: Limits {
                new_tokens: self.options.max_new_tokens,
                end: &model.end,
            },
            temperature: self.options.temperature as f32,
            seed: self.options.seed,
        };
        let in_hand = Mutex::new((0u64, HashMap::new()));
        let mut next = || loop {
            let job = lock(work).take()?;
            match model.prompt(&job) {
                Ok(prompt) if prompt.len() < capacity => {
                    let mut in_hand = in_hand.lock().unwrap_or_else(PoisonError::into_inner);
                    let (id, stream) = (in_hand.0, job.stream());
                    in_hand.0 += 1;
                    in_hand.1.insert(id, job);
                    return Some(Question { id, prompt, stream });
                }
                Ok(prompt) => {
                    let what = format!("{} tokens leave no room for an answer", prompt.len());
                    lock(work).give_up(&job, what, out);
                }
                Err(what) => lock(work).give_up(&job, what, out),
            }
        };
        let mut problem = None;
        let mut done = |answer: generate::Answer| {
            let mut in_hand = in_hand.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(mut job) = in_hand.1.remove(&answer.id) else {
                return ControlFlow::Continue(());
            };
            let text = match answer.finish {
                Finish::Stop => &answer.tokens[..answer.tokens.len() - 1],
                Finish::Length => &answer.tokens,
            };
            let content = match model.tokenizer.decode(text) {
                Ok(content) => content,
                Err(what) => {
                    problem = Some(what);
                    return ControlFlow::Break(());
                }
            };
            let message = Value::from_pairs([
                ("role", Value::from("assistant")),
                ("content", Value::from(content)),
            ]);
            let tokens = answer.tokens.len() as u64;
            if job.add(message, answer.finish.name().to_owned(), tokens) {
                lock(work).again.push_back(job);
            } else {
                send(out, &job);
            }
            ControlFlow::Continue(())
        };
        generate::generate(engine, &mut target, &how, &mut next, &mut done)
            .map_err(|error| error.to_string())?;
        problem.map_or(Ok(()), Err)
    }
}

/// Asks a server until there is no more work.
fn ask_on(
    endpoint: &Endpoint,
    options: &GenerateOptions,
    work: &Mutex<Work<'_>>,
    out: &mpsc::Sender<Row>,
) -> Result<(), String> {
    // Taken under a lock that ends with the statement.
    let take = || lock(work).take();
    while let Some(mut job) = take() {
        loop {
            let messages = job.conversation.messages(&job.answers);
            let request = ChatRequest {
                messages: &messages,
                max_tokens: options.max_new_tokens,
                temperature: options.temperature,
                seed: options.seed ^ job.stream(),
            };
            match endpoint.answer(&request) {
                Ok(answer) => {
                    if !job.add(answer.message, answer.finish_reason, answer.tokens) {
                        send(out, &job);
                        break;
                    }
                }
                Err(error @ EndpointError::Refused { .. }) => {
                    lock(work).give_up(&job, error.to_string(), out);
                    break;
                }
                Err(error) => return Err(error.to_string()),
            }
        }
    }
    Ok(())
}
