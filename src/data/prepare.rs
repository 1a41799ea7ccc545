//! From data files to a tokenised set, or to one that was made earlier from the same things.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rayon::prelude::*;

use super::files::{self, Line, Lines};
use super::mask::{self, Encoded};
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
    /// Files of JSON lines, or folders of them.
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
    /// The model's tokenizer.
    pub tokenizer: ChatTokenizer,
    /// The chat template; none with `raw_text`.
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
    let options = &request.options;
    let mut problems = Vec::new();
    let paths = files::list(&request.data, request.flag, options.raw_text, &mut problems);
    let text = load_text(request, &mut problems);
    DataError::from_list(problems)?;
    let (tokenizer, template) = text.expect("without problems the tokenizer was loaded");

    let hashes = paths
        .iter()
        .map(|p| files::hash_file(p))
        .collect::<Result<Vec<_>, _>>()?;
    let key = key(&hashes, &tokenizer, template.as_ref(), options);
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
                hashes: &hashes,
                names: &names,
                tokenizer: &tokenizer,
                template: template.as_ref(),
                options,
            };
            job.run(SetWriter::create(&cache_path, key)?, progress)?;
            TokenSet::open(&cache_path)?
        }
    };
    let report = set.report(names)?;
    Ok(Prepared {
        set,
        report,
        cache_path,
        reused,
        tokenizer,
        template,
    })
}

/// The problems of a request that can be seen without reading all data, for a preflight that shows
/// them together with those of other areas.
pub fn check(request: &PrepareRequest) -> Vec<DataError> {
    let mut problems = Vec::new();
    files::list(
        &request.data,
        request.flag,
        request.options.raw_text,
        &mut problems,
    );
    load_text(request, &mut problems);
    problems
}

fn load_text(
    request: &PrepareRequest,
    problems: &mut Vec<DataError>,
) -> Option<(ChatTokenizer, Option<ChatTemplate>)> {
    let options = &request.options;
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
            return None;
        }
    };
    if options.raw_text {
        return Some((tokenizer, None));
    }
    let explicit = request.chat_template.as_deref();
    match ChatTemplate::load(
        &request.model_dir,
        explicit,
        &tokenizer,
        &options.template_kwargs,
    ) {
        Ok(template) => Some((tokenizer, Some(template))),
        Err(e) => {
            problems.push(e);
            None
        }
    }
}

/// Hash of all that decides a set's content.
fn key(
    files: &[(blake3::Hash, u64)],
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
    for (hash, _) in files {
        hasher.update(hash.as_bytes());
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

/// Bytes of lines that are tokenised at a time, per thread.
const BATCH: usize = 256 << 10;

struct Job<'a> {
    paths: &'a [PathBuf],
    hashes: &'a [(blake3::Hash, u64)],
    names: &'a [String],
    tokenizer: &'a ChatTokenizer,
    template: Option<&'a ChatTemplate>,
    options: &'a TextOptions,
}

impl Job<'_> {
    fn run(
        &self,
        mut writer: SetWriter,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<(), DataError> {
        let mut report = DataReport {
            files: self.names.to_vec(),
            ..DataReport::default()
        };
        let total_bytes = self.hashes.iter().map(|(_, bytes)| bytes).sum();
        let batch_bytes = BATCH * rayon::current_num_threads();
        let mut done = 0;
        for (file, path) in self.paths.iter().enumerate() {
            let mut lines = Lines::open(path, file as u32, report.rows)?;
            loop {
                let mut batch = Vec::new();
                let mut bytes = 0;
                while bytes < batch_bytes
                    && let Some(line) = lines.next()?
                {
                    bytes += line.bytes.len();
                    batch.push(line);
                }
                if batch.is_empty() {
                    break;
                }
                self.tokenise(&batch, &mut report, &mut writer)?;
                report.rows = lines.rows();
                let now = Progress {
                    bytes: done + lines.bytes(),
                    total_bytes,
                    rows: report.rows,
                    tokens: report.tokens,
                };
                if progress(now).is_break() {
                    return Err(DataError::Interrupted);
                }
            }
            if lines.hash() != self.hashes[file].0 {
                return Err(DataError::Changed { path: path.clone() });
            }
            done += lines.bytes();
        }
        report.uses_date = self.template.is_some_and(ChatTemplate::date_used);
        refuse_malformed(&report)?;
        if report.documents == 0 {
            return Err(DataError::NoDocuments {
                rows: report.rows,
                reasons: report.reasons(),
            });
        }
        writer.finish(&report)
    }

    fn tokenise(
        &self,
        batch: &[Line],
        report: &mut DataReport,
        writer: &mut SetWriter,
    ) -> Result<(), DataError> {
        let outcomes: Vec<Outcome> = batch.par_iter().map(|line| self.row(line)).collect();
        for (line, outcome) in batch.iter().zip(outcomes) {
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
                    writer.push(&row, line.row, line.file, line.line)?;
                }
                Err(skip) => {
                    if skip.reason == SkipReason::NoLossTokensAfterTruncation {
                        report.truncated_tokens += outcome
                            .tokens_before
                            .saturating_sub(self.options.max_length as u64);
                    }
                    report.add(skip, line.file, line.line);
                }
            }
        }
        Ok(())
    }

    fn row(&self, line: &Line) -> Outcome {
        let encoded = rows::parse(&line.bytes, self.options.raw_text).and_then(|row| {
            mask::encode(
                &row,
                self.tokenizer,
                self.template,
                self.options.last_turn_only,
            )
        });
        match encoded {
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

/// What became of one line.
struct Outcome {
    row: Result<Encoded, Skip>,
    tokens_before: u64,
    context_only: u64,
}

fn refuse_malformed(report: &DataReport) -> Result<(), DataError> {
    let Some(skip) = report.skipped.get(&SkipReason::Malformed) else {
        return Ok(());
    };
    if skip.count * 100 <= report.rows {
        return Ok(());
    }
    let examples: Vec<String> = skip
        .examples
        .iter()
        .map(|e| format!("{}: {}", report.place(e), e.message))
        .collect();
    Err(DataError::Malformed {
        malformed: skip.count,
        rows: report.rows,
        examples: examples.join("; "),
    })
}
