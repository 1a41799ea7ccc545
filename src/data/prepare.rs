//! From data files to a tokenised set, or to one that was made earlier from the same things.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime};

use rayon::prelude::*;

use super::files;
use super::mask::{self, Encoded};
use super::records::{self, FileFacts, Record, Records};
use super::report::{DataReport, Skip, SkipReason};
use super::set::{SetWriter, TEMPORARY, TokenSet, VERSION};
use super::{ChatTemplate, ChatTokenizer, DataError, rows};

/// How rows become tokens; part of the set's key.
#[derive(Debug, Clone, PartialEq)]
pub struct TextOptions {
    /// Tokens kept of a document (`--max-length`).
    pub max_length: usize,
    /// Rows with fewer supervised tokens are skipped (`--min-loss-tokens`).
    pub min_loss_tokens: usize,
    /// Only the last assistant turn is supervised (`--last-turn-only`).
    pub last_turn_only: bool,
    /// No chat template: rows are plain text under `text`, wholly supervised, or conversations whose
    /// texts follow each other on lines of their own (`--raw-text`).
    pub raw_text: bool,
    /// Extra variables of the template (`--template-kwarg`).
    pub template_kwargs: Vec<(String, serde_json::Value)>,
}

impl Default for TextOptions {
    fn default() -> Self {
        TextOptions {
            max_length: 3072,
            min_loss_tokens: 2,
            last_turn_only: false,
            raw_text: false,
            template_kwargs: Vec::new(),
        }
    }
}

/// What to tokenise, and with what.
#[derive(Debug, Clone)]
pub struct PrepareRequest {
    /// Files of JSON lines (plain, gzip or zstd) or Parquet, or folders of them.
    pub data: Vec<PathBuf>,
    /// The flag that `data` was given to, for messages (`--data`, `--eval-data`).
    pub flag: &'static str,
    /// Folder of the target model, with its `tokenizer.json`.
    pub model_dir: PathBuf,
    /// A template to use instead of the model's (`--chat-template`).
    pub chat_template: Option<PathBuf>,
    /// How rows become tokens.
    pub options: TextOptions,
    /// Where tokenised sets are kept; see [`default_cache_dir`].
    pub cache_dir: PathBuf,
}

/// A tokenised set with what made it.
#[derive(Debug)]
pub struct Prepared {
    /// The set.
    pub set: TokenSet,
    /// What the data held.
    pub report: DataReport,
    /// The set's file, for [`TokenSet::open`] in other processes.
    pub cache_path: PathBuf,
    /// The set had been made earlier.
    pub reused: bool,
    /// For each data file, in the order of the report, which path of the request it came from.
    pub sources: Vec<u32>,
    /// The model's tokenizer.
    pub tokenizer: ChatTokenizer,
    /// The chat template; none with `raw_text`, or where the model has none and no row needs one.
    pub template: Option<ChatTemplate>,
}

/// How far tokenising has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the data files done.
    pub bytes: u64,
    /// Bytes of all data files.
    pub total_bytes: u64,
    /// Rows done.
    pub rows: u64,
    /// Tokens written.
    pub tokens: u64,
}

/// `SLIPSTREAM_CACHE`, else `slipstream` in `XDG_CACHE_HOME` or `~/.cache`, else in the system's
/// folder for temporary files.
pub fn default_cache_dir() -> PathBuf {
    let var = |name: &str| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    var("SLIPSTREAM_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|d| d.join("slipstream")))
        .or_else(|| var("HOME").map(|d| d.join(".cache/slipstream")))
        .unwrap_or_else(|| std::env::temp_dir().join("slipstream"))
}

/// Tokenises the request's data, or finds the set that was made from the same content earlier.
///
/// `progress` is called between batches of rows; it may stop the work.
///
/// # Errors
/// All problems of files, tokenizer and template that can be seen beforehand, together; then what
/// only a full reading shows (over 1 % malformed lines, no usable row).
pub fn prepare(
    request: &PrepareRequest,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Prepared, DataError> {
    let inspection = inspect(request, progress)?;
    match inspection.refusal {
        Some(error) => Err(error),
        None => Ok(inspection.prepared),
    }
}

/// The same for a person who wants to see what the data holds even where no run would take it.
#[derive(Debug)]
pub struct Inspection {
    /// What was read; the set may be empty where there is a refusal.
    pub prepared: Prepared,
    /// Why no run would take it.
    pub refusal: Option<DataError>,
}

/// Tokenises as [`prepare`] does, but hands over what was read also where that refuses. Such a set is not
/// kept.
///
/// # Errors
/// What can be seen without reading everything, as in [`prepare`].
pub fn inspect(
    request: &PrepareRequest,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Inspection, DataError> {
    let options = &request.options;
    let mut problems = Vec::new();
    let found = files::list(&request.data, request.flag, options.raw_text, &mut problems);
    let text = load_text(request, found.need_no_template, &mut problems);
    DataError::from_list(problems)?;
    let (tokenizer, template) = text.expect("without problems the tokenizer was loaded");

    let paths = found.files;
    let facts = paths
        .par_iter()
        .map(|p| records::facts(p))
        .collect::<Result<Vec<_>, _>>()?;
    let key = key(&facts, &tokenizer, template.as_ref(), options);
    let cache_path = request
        .cache_dir
        .join(format!("{}.tokens", &key.to_hex()[..32]));
    let names: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();

    let earlier = reuse(&cache_path, key);
    let reused = earlier.is_some();
    let set = match earlier {
        Some(set) => set,
        None => {
            remove_abandoned(&request.cache_dir);
            let job = Job {
                paths: &paths,
                facts: &facts,
                names: &names,
                tokenizer: &tokenizer,
                template: template.as_ref(),
                options,
            };
            job.run(SetWriter::create(&cache_path, key)?, progress)?
        }
    };
    let report = set.report(names)?;
    let refusal = refusal(&report);
    let prepared = Prepared {
        set,
        report,
        cache_path,
        reused,
        sources: found.sources,
        tokenizer,
        template,
    };
    Ok(Inspection { prepared, refusal })
}

/// What one record becomes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowTokens {
    /// Token ids, `[tokens]`.
    pub ids: Vec<u32>,
    /// 1 where the token is supervised, `[tokens]`.
    pub mask: Vec<u8>,
}

/// Tokenises one record, JSON text without its line end, as [`prepare`] does.
///
/// # Errors
/// The reason why it would be skipped, and what was seen.
pub fn encode_row(
    record: &[u8],
    tokenizer: &ChatTokenizer,
    template: Option<&ChatTemplate>,
    options: &TextOptions,
) -> Result<RowTokens, (SkipReason, String)> {
    let Encoded { ids, mask, .. } = encode(record, tokenizer, template, options)
        .and_then(|row| mask::truncate(row, options))
        .map_err(|skip| (skip.reason, skip.message))?;
    Ok(RowTokens { ids, mask })
}

fn encode(
    record: &[u8],
    tokenizer: &ChatTokenizer,
    template: Option<&ChatTemplate>,
    options: &TextOptions,
) -> Result<Encoded, Skip> {
    let row = rows::parse(record, options.raw_text)?;
    mask::encode(&row, tokenizer, template, options)
}

/// The problems of a request that can be seen without reading all data, for a preflight that shows
/// them together with those of other areas.
pub fn check(request: &PrepareRequest) -> Vec<DataError> {
    let mut problems = Vec::new();
    let found = files::list(
        &request.data,
        request.flag,
        request.options.raw_text,
        &mut problems,
    );
    load_text(request, found.need_no_template, &mut problems);
    problems
}

/// The problems of data files alone.
pub fn check_files(paths: &[PathBuf], flag: &'static str, raw_text: bool) -> Vec<DataError> {
    let mut problems = Vec::new();
    files::list(paths, flag, raw_text, &mut problems);
    problems
}

fn load_text(
    request: &PrepareRequest,
    need_no_template: bool,
    problems: &mut Vec<DataError>,
) -> Option<(ChatTokenizer, Option<ChatTemplate>)> {
    let options = &request.options;
    let explicit = request.chat_template.as_deref();
    for (flag, zero) in [
        ("--max-length", options.max_length == 0),
        ("--min-loss-tokens", options.min_loss_tokens == 0),
    ] {
        if zero {
            problems.push(DataError::ZeroLimit { flag });
        }
    }
    let tokenizer = match ChatTokenizer::load(&request.model_dir) {
        Ok(tokenizer) => tokenizer,
        Err(e) => {
            problems.push(e);
            problems.extend(explicit.and_then(|path| ChatTemplate::check(path).err()));
            return None;
        }
    };
    if options.raw_text {
        return Some((tokenizer, None));
    }
    match ChatTemplate::load(
        &request.model_dir,
        explicit,
        &tokenizer,
        &options.template_kwargs,
    ) {
        Ok(template) => Some((tokenizer, Some(template))),
        Err(DataError::NoTemplate { .. }) if need_no_template => Some((tokenizer, None)),
        Err(e) => {
            problems.push(e);
            None
        }
    }
}

/// Hash of all that decides a set's content.
fn key(
    files: &[FileFacts],
    tokenizer: &ChatTokenizer,
    template: Option<&ChatTemplate>,
    options: &TextOptions,
) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&VERSION.to_le_bytes());
    hasher.update(tokenizer.hash().as_bytes());
    match template {
        Some(t) => hasher.update(t.hash().as_bytes()),
        None => hasher.update(&[0; 32]),
    };
    for number in [options.max_length, options.min_loss_tokens] {
        hasher.update(&(number as u64).to_le_bytes());
    }
    hasher.update(&[u8::from(options.last_turn_only), u8::from(options.raw_text)]);
    for file in files {
        hasher.update(file.hash.as_bytes());
    }
    hasher.finalize()
}

/// A set made earlier, if it is whole; anything else there is replaced.
fn reuse(path: &Path, key: blake3::Hash) -> Option<TokenSet> {
    if !path.exists() {
        return None;
    }
    let whole = TokenSet::open(path).and_then(|set| set.verify().map(|()| set));
    match whole {
        Ok(set) if set.key() == key => Some(set),
        Ok(_) => None,
        Err(e) => {
            tracing::warn!("tokenising again: {e}");
            None
        }
    }
}

/// Removes what killed processes left half-written, once it is a day old.
fn remove_abandoned(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        let age = entry
            .metadata()
            .and_then(|m| m.modified())
            .ok()
            .and_then(|t| SystemTime::now().duration_since(t).ok());
        let ours = entry.file_name().to_string_lossy().starts_with(TEMPORARY);
        if ours && age.is_some_and(|a| a > Duration::from_secs(24 * 3600)) {
            // Another process may have removed it first.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Bytes of records that are tokenised at a time, per thread.
const BATCH: usize = 64 << 10;

/// One pass over the data files in three stages, each a few batches of records ahead of the next at
/// most: a thread reads, all cores tokenise, a thread writes. What is in memory does not depend on how
/// large the files are.
struct Job<'a> {
    paths: &'a [PathBuf],
    facts: &'a [FileFacts],
    names: &'a [String],
    tokenizer: &'a ChatTokenizer,
    template: Option<&'a ChatTemplate>,
    options: &'a TextOptions,
}

/// Records in file order.
struct Batch {
    records: Vec<Record>,
    /// Rows up to its end.
    rows: u64,
    /// Bytes of the files up to its end.
    bytes: u64,
}

impl Job<'_> {
    fn run(
        &self,
        writer: SetWriter,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<TokenSet, DataError> {
        let (writer, mut report) = thread::scope(|scope| {
            let (to_workers, batches) = sync_channel(1);
            let (to_writer, outcomes) = sync_channel(1);
            let mut now = Progress {
                bytes: 0,
                total_bytes: self.facts.iter().map(|file| file.bytes).sum(),
                rows: 0,
                tokens: 0,
            };
            if progress(now).is_break() {
                return Err(DataError::Interrupted);
            }
            scope.spawn(move || {
                if let Err(error) = self.read(&to_workers) {
                    // Nobody left to tell: the work has ended for another reason.
                    let _ = to_workers.send(Err(error));
                }
            });
            let writing = scope.spawn(move || self.write(writer, &outcomes));
            let worked = self.work(batches, to_writer, |batch_end, tokens| {
                (now.rows, now.bytes) = batch_end;
                now.tokens += tokens;
                progress(now)
            });
            let written = writing
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // Work also ends when the writer cannot go on: then the writer knows why.
            let written = written?;
            worked.map(|()| written)
        })?;
        report.uses_date = self.template.is_some_and(ChatTemplate::date_used);
        writer.finish(&report, refusal(&report).is_none())
    }

    /// Sends all records; ends early where nobody takes them any more.
    fn read(&self, to_workers: &SyncSender<Result<Batch, DataError>>) -> Result<(), DataError> {
        let batch_bytes = BATCH * rayon::current_num_threads();
        let (mut rows, mut done) = (0, 0);
        for (file, path) in self.paths.iter().enumerate() {
            let mut reader = Records::open(path, file as u32, rows)?;
            loop {
                let mut records = Vec::new();
                let mut bytes = 0;
                while bytes < batch_bytes
                    && let Some(record) = reader.next()?
                {
                    bytes += record.bytes.len();
                    records.push(record);
                }
                if records.is_empty() {
                    break;
                }
                let batch = Batch {
                    records,
                    rows: reader.rows(),
                    bytes: done + reader.bytes(),
                };
                if to_workers.send(Ok(batch)).is_err() {
                    return Ok(());
                }
            }
            if !reader.unchanged(&self.facts[file]) {
                return Err(DataError::Changed { path: path.clone() });
            }
            rows = reader.rows();
            done += self.facts[file].bytes;
        }
        Ok(())
    }

    /// Tokenises batches; `done` hears of (rows, bytes) so far and of the batch's tokens.
    fn work(
        &self,
        batches: Receiver<Result<Batch, DataError>>,
        to_writer: SyncSender<(Batch, Vec<Outcome>)>,
        mut done: impl FnMut((u64, u64), u64) -> ControlFlow<()>,
    ) -> Result<(), DataError> {
        for batch in batches {
            let batch = batch?;
            let records = batch.records.par_iter();
            let outcomes: Vec<Outcome> = records.map(|record| self.row(record)).collect();
            let tokens = outcomes.iter().map(Outcome::tokens).sum();
            let end = (batch.rows, batch.bytes);
            if to_writer.send((batch, outcomes)).is_err() {
                return Ok(());
            }
            if done(end, tokens).is_break() {
                return Err(DataError::Interrupted);
            }
        }
        Ok(())
    }

    fn write(
        &self,
        mut writer: SetWriter,
        outcomes: &Receiver<(Batch, Vec<Outcome>)>,
    ) -> Result<(SetWriter, DataReport), DataError> {
        let mut report = DataReport {
            files: self.names.to_vec(),
            ..DataReport::default()
        };
        for (batch, outcomes) in outcomes {
            for (record, outcome) in batch.records.iter().zip(outcomes) {
                self.record(record, outcome, &mut report, &mut writer)?;
            }
            report.rows = batch.rows;
        }
        Ok((writer, report))
    }

    fn record(
        &self,
        record: &Record,
        outcome: Outcome,
        report: &mut DataReport,
        writer: &mut SetWriter,
    ) -> Result<(), DataError> {
        report.context_only_turns += outcome.context_only;
        report.tokens_before += outcome.tokens_before;
        match outcome.row {
            Ok(row) => {
                let lost = outcome.tokens_before - row.ids.len() as u64;
                report.documents += 1;
                report.tokens += row.ids.len() as u64;
                report.supervised += row.mask.iter().map(|&m| u64::from(m)).sum::<u64>();
                report.truncated += u64::from(lost > 0);
                report.truncated_tokens += lost;
                writer.push(&row, record.row, record.file, record.line)
            }
            Err(skip) => {
                if skip.reason == SkipReason::NoLossTokensAfterTruncation {
                    report.truncated_tokens += outcome
                        .tokens_before
                        .saturating_sub(self.options.max_length as u64);
                }
                report.add(skip, record.file, record.line);
                Ok(())
            }
        }
    }

    fn row(&self, record: &Record) -> Outcome {
        match encode(&record.bytes, self.tokenizer, self.template, self.options) {
            Ok(encoded) => Outcome {
                tokens_before: encoded.ids.len() as u64,
                context_only: encoded.context_only,
                row: mask::truncate(encoded, self.options),
            },
            Err(skip) => Outcome {
                row: Err(skip),
                tokens_before: 0,
                context_only: 0,
            },
        }
    }
}

/// What became of one record.
struct Outcome {
    row: Result<Encoded, Skip>,
    tokens_before: u64,
    context_only: u64,
}

impl Outcome {
    fn tokens(&self) -> u64 {
        self.row.as_ref().map_or(0, |row| row.ids.len() as u64)
    }
}

/// What only a full reading shows.
pub(super) fn refusal(report: &DataReport) -> Option<DataError> {
    if let Some(skip) = report.skipped.get(&SkipReason::Malformed)
        && skip.count * 100 > report.rows
    {
        let examples: Vec<String> = skip
            .examples
            .iter()
            .map(|e| format!("{}: {}", report.place(e), e.message))
            .collect();
        return Some(DataError::Malformed {
            malformed: skip.count,
            rows: report.rows,
            examples: examples.join("; "),
        });
    }
    (report.documents == 0).then(|| DataError::NoDocuments {
        rows: report.rows,
        reasons: report.reasons(),
    })
}
