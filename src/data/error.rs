//! What can be wrong with conversations, a tokenizer or a template.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// A reason to refuse to start. Problems of a single row are not errors: they are skips, counted in
/// [`DataReport`](super::DataReport).
#[derive(Debug, Error)]
pub enum DataError {
    /// Nothing was given to read.
    #[error("no conversations given; name a jsonl file or a folder of them with {flag}")]
    NoData {
        /// The flag that takes the files.
        flag: &'static str,
    },
    /// A path that does not exist.
    #[error("{path}: no such file or folder; check the path given to {flag}")]
    Missing {
        /// The path as given.
        path: PathBuf,
        /// The flag it was given to.
        flag: &'static str,
    },
    /// A folder without a data file.
    #[error(
        "{path}: the folder holds no .jsonl, .jsonl.gz, .jsonl.zst or .parquet file; give the files themselves to {flag}"
    )]
    EmptyFolder {
        /// The folder.
        path: PathBuf,
        /// The flag it was given to.
        flag: &'static str,
    },
    /// A data file without any record.
    #[error(
        "{path}: the file holds no record; {flag} needs one JSON object with a conversation per line"
    )]
    EmptyFile {
        /// The file.
        path: PathBuf,
        /// The flag it was given to.
        flag: &'static str,
    },
    /// The system refused to read a file.
    #[error("{path}: cannot be read: {source}; check the path and its permissions")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A packed file that breaks off or contradicts itself.
    #[error(
        "{path}: the {format} data cannot be read after row {line}: {message}; fetch or write the file again"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What it is packed as.
        format: &'static str,
        /// Lines or rows that could be read.
        line: u64,
        /// What the unpacker said.
        message: String,
    },
    /// A line that no record can have.
    #[error(
        "{path}:{line}: the line is longer than {most} MiB; write one record per line (`jq -c '.[]'` turns an array into lines)"
    )]
    LongLine {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// Longest accepted, in MiB.
        most: usize,
    },
    /// A Git LFS pointer where the file's content should be.
    #[error(
        "{path}: this is a Git LFS pointer, not the file; run `git lfs pull` in {}", .path.parent().unwrap_or(std::path::Path::new(".")).display()
    )]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// A data file in a form that is not read.
    #[error("{path}: this is {found}, not JSON lines in UTF-8 or Parquet; {hint}")]
    NotJsonLines {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        found: &'static str,
        /// How to convert it.
        hint: &'static str,
    },
    /// The first record has no conversation.
    #[error("{path}:{line}: row 1 has no known conversation key (keys: {keys}); {hint}")]
    NoConversationKey {
        /// The file.
        path: PathBuf,
        /// The line of its first record, from 1.
        line: u64,
        /// The keys found.
        keys: String,
        /// What to do.
        hint: String,
    },
    /// More than one line in a hundred is not JSON.
    #[error(
        "{malformed} of {rows} lines are not valid JSON (over 1 %): {examples}; repair or remove these lines"
    )]
    Malformed {
        /// Lines that could not be parsed.
        malformed: u64,
        /// Lines read, blank ones aside.
        rows: u64,
        /// The first of them.
        examples: String,
    },
    /// Every row was skipped.
    #[error("none of the {rows} rows can be trained on: {reasons}")]
    NoDocuments {
        /// Rows read.
        rows: u64,
        /// Count and first example for each reason.
        reasons: String,
    },
    /// A data file was written to while it was being read.
    #[error("{path}: the file changed while it was being read; start again when it is complete")]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The model folder has no `tokenizer.json`.
    #[error("{dir}: no tokenizer.json; {hint}")]
    NoTokenizer {
        /// The model folder.
        dir: PathBuf,
        /// What to run.
        hint: String,
    },
    /// A tokenizer file that cannot be understood.
    #[error(
        "{path}: not a usable tokenizer file: {message}; fetch it again from the model's repository"
    )]
    BadTokenizer {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        message: String,
    },
    /// The model has no chat template.
    #[error(
        "{dir}: no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json); give one with --chat-template FILE, or train on plain text with --raw-text"
    )]
    NoTemplate {
        /// The model folder.
        dir: PathBuf,
    },
    /// A chat template that does not compile.
    #[error(
        "{origin}: the chat template does not compile: {message}; give another with --chat-template FILE"
    )]
    BadTemplate {
        /// Where it came from.
        origin: String,
        /// The compiler's message.
        message: String,
    },
    /// An argument of `--template-kwarg` that is not `K=V`.
    #[error("--template-kwarg {argument}: expected KEY=VALUE, for example enable_thinking=false")]
    BadTemplateKwarg {
        /// The argument.
        argument: String,
    },
    /// The tokenizer has ids that the model has no embedding row for.
    #[error(
        "{tokenizer}: the highest token id is {highest}, but the model embeds only {rows} ids; this is the tokenizer of another model, use the model's own tokenizer.json"
    )]
    TokenizerTooLarge {
        /// The tokenizer's file.
        tokenizer: PathBuf,
        /// Its highest id.
        highest: u32,
        /// Rows of the embedding.
        rows: usize,
    },
    /// The tokenizer covers far fewer ids than the model embeds.
    #[error(
        "{tokenizer}: {ids} token ids, but the model embeds {rows}; this is the tokenizer of another model, use the model's own tokenizer.json"
    )]
    TokenizerTooSmall {
        /// The tokenizer's file.
        tokenizer: PathBuf,
        /// Ids it knows.
        ids: u32,
        /// Rows of the embedding.
        rows: usize,
    },
    /// An end token of the model is an ordinary piece of text to the tokenizer.
    #[error(
        "{tokenizer}: the model's eos_token_id {id} is {token} to this tokenizer, not a special token; this is the tokenizer of another model, use the model's own tokenizer.json"
    )]
    TokenizerForeign {
        /// The tokenizer's file.
        tokenizer: PathBuf,
        /// The id in the model's config.json.
        id: u32,
        /// What the tokenizer has there.
        token: String,
    },
    /// A mask token outside the embedding.
    #[error("--mask-token-id {id}: the model embeds ids 0 to {}", .rows.saturating_sub(1))]
    MaskTokenOutOfRange {
        /// The id given.
        id: u32,
        /// Rows of the embedding.
        rows: usize,
    },
    /// A mask token that is also text.
    #[error(
        "--mask-token-id {id}: this token occurs in the conversations, so a masked slot could not be told from text; choose an unused id"
    )]
    MaskTokenOccurs {
        /// The id given.
        id: u32,
    },
    /// No embedding row is free for the mask.
    #[error(
        "no unused token for the mask: the tokenizer names none, every embedding row ({rows}) belongs to a token, and every special token is in use; name one with --mask-token-id"
    )]
    NoMaskToken {
        /// Rows of the embedding.
        rows: usize,
    },
    /// A document that no slot can hold.
    #[error(
        "row {row} has {tokens} tokens, more than a slot's {slot_tokens}; raise --slot-tokens or lower --max-length to at most {slot_tokens}"
    )]
    DocumentTooLong {
        /// Row of the document.
        row: u64,
        /// Its tokens.
        tokens: u32,
        /// `--slot-tokens`.
        slot_tokens: u32,
    },
    /// A document may have more anchors than a unit.
    #[error(
        "--anchors {anchors} is more than --unit-anchors {unit_anchors}: one document would overfill a unit; lower --anchors or raise --unit-anchors"
    )]
    AnchorsExceedUnit {
        /// `--anchors`.
        anchors: u32,
        /// `--unit-anchors`.
        unit_anchors: u32,
    },
    /// A packing limit of zero.
    #[error("{flag} must be at least 1")]
    ZeroLimit {
        /// The flag.
        flag: &'static str,
    },
    /// Weights that leave no document.
    #[error("--data-weights leaves no document to train on; raise the weights")]
    NothingDrawn,
    /// More units than the ledger's numbers can hold.
    #[error("{units} units in {epochs} epochs are more than unit numbers can hold; lower --epochs")]
    TooManyUnits {
        /// Units per epoch.
        units: u64,
        /// Epochs.
        epochs: u32,
    },
    /// A tokenised set that cannot be used as it lies there.
    #[error("{path}: not a usable tokenised set: {reason}; delete it and start again")]
    BadCache {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The tokenised set could not be written.
    #[error(
        "{path}: the tokenised set cannot be written: {source}; free space there or choose another folder with SLIPSTREAM_CACHE"
    )]
    WriteCache {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another output file could not be written.
    #[error("{path}: cannot be written: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The caller asked to stop.
    #[error("stopped while tokenising; nothing was kept")]
    Interrupted,
    /// More than one problem, each on its own line.
    #[error("{}", lines(.0))]
    Several(Vec<DataError>),
}

impl DataError {
    /// One error out of a list: the only one itself, more as [`DataError::Several`], none as `Ok`.
    pub fn from_list(mut list: Vec<DataError>) -> Result<(), DataError> {
        match list.len() {
            0 => Ok(()),
            1 => Err(list.remove(0)),
            _ => Err(DataError::Several(list)),
        }
    }

    /// The problems one by one, to be shown together with those of other areas.
    pub fn into_list(self) -> Vec<DataError> {
        match self {
            DataError::Several(list) => list.into_iter().flat_map(DataError::into_list).collect(),
            one => vec![one],
        }
    }
}

fn lines(list: &[DataError]) -> String {
    list.iter()
        .map(DataError::to_string)
        .collect::<Vec<_>>()
        .join("\n")
}
