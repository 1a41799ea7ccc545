//! Finding data files and looking at their beginnings.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use minijinja::Value;
use minijinja::value::ValueKind;

use super::DataError;
use super::records::{Records, head};
use super::rows::{self, Form};

const LFS: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Whether a file's first bytes are those of a Git LFS pointer
/// (<https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md>).
pub fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(LFS)
}

/// What a list of paths names.
#[derive(Debug, Default)]
pub(super) struct DataFiles {
    /// The files, in order.
    pub(super) files: Vec<PathBuf>,
    /// For each file, which of the paths it came from.
    pub(super) sources: Vec<u32>,
    /// No file begins with a row that a chat template would have to render.
    pub(super) need_no_template: bool,
}

/// The files that `paths` name: folders stand for their data files by name. Every problem that can be
/// seen without reading a whole file is added to `problems`.
pub(super) fn list(
    paths: &[PathBuf],
    flag: &'static str,
    raw_text: bool,
    problems: &mut Vec<DataError>,
) -> DataFiles {
    if paths.is_empty() {
        problems.push(DataError::NoData { flag });
    }
    let mut found = DataFiles::default();
    for (source, path) in paths.iter().enumerate() {
        match expand(path, flag) {
            Ok(files) => {
                found.sources.extend(files.iter().map(|_| source as u32));
                found.files.extend(files);
            }
            Err(e) => problems.push(e),
        }
    }
    let mut rendered = found.files.is_empty();
    for file in &found.files {
        match sniff(file, flag, raw_text) {
            Ok(form) => rendered |= !matches!(form, Some(Form::Tokens | Form::Text)),
            Err(e) => problems.push(e),
        }
    }
    found.need_no_template = !rendered;
    found
}

/// Endings of the files that a folder stands for. Inside a file its first bytes decide.
const ENDINGS: [&str; 7] = [
    ".jsonl",
    ".ndjson",
    ".jsonl.gz",
    ".ndjson.gz",
    ".jsonl.zst",
    ".ndjson.zst",
    ".parquet",
];

fn expand(path: &Path, flag: &'static str) -> Result<Vec<PathBuf>, DataError> {
    let unreadable = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => DataError::Missing {
            path: path.to_owned(),
            flag,
        },
        _ => DataError::Read {
            path: path.to_owned(),
            source,
        },
    };
    if !fs::metadata(path).map_err(unreadable)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(unreadable)? {
        let file = entry.map_err(unreadable)?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        if ENDINGS.iter().any(|ending| name.ends_with(ending)) && file.is_file() {
            files.push(file);
        }
    }
    files.sort();
    match files.is_empty() {
        true => Err(DataError::EmptyFolder {
            path: path.to_owned(),
            flag,
        }),
        false => Ok(files),
    }
}

/// Looks at a file's first bytes and first record, and says what that record is.
fn sniff(path: &Path, flag: &'static str, raw_text: bool) -> Result<Option<Form>, DataError> {
    let head = head(path)?;
    if is_lfs_pointer(&head) {
        return Err(DataError::LfsPointer {
            path: path.to_owned(),
        });
    }
    if let Some((found, hint)) = other_format(&head) {
        return Err(DataError::NotJsonLines {
            path: path.to_owned(),
            found,
            hint,
        });
    }
    let mut records = Records::open(path, 0, 0)?;
    if let Some(columns) = records.columns() {
        // Its first row may hold nothing under a column that others fill.
        check_columns(path, &columns, raw_text)?;
    }
    let is_table = records.columns().is_some();
    let mut any = false;
    loop {
        let record = match records.next() {
            Ok(Some(record)) => record,
            Ok(None) => break,
            Err(DataError::LongLine { line: 1, .. }) if head.trim_ascii().starts_with(b"[") => {
                return Err(json_array(path));
            }
            Err(e) => return Err(e),
        };
        any = true;
        if record.row == 0 && record.bytes.trim_ascii() == b"[" {
            return Err(json_array(path));
        }
        let Ok(row) = serde_json::from_slice::<Value>(&record.bytes) else {
            continue;
        };
        if !is_table {
            check_first_record(path, record.line, &row, raw_text)?;
        }
        return Ok(rows::form(&row, raw_text));
    }
    match any {
        // Lines, but no JSON: the count of malformed lines will say so.
        true => Ok(None),
        false => Err(DataError::EmptyFile {
            path: path.to_owned(),
            flag,
        }),
    }
}

fn json_array(path: &Path) -> DataError {
    DataError::NotJsonLines {
        path: path.to_owned(),
        found: "one JSON array",
        hint: "write one record per line, for example with `jq -c '.[]'`",
    }
}

fn other_format(head: &[u8]) -> Option<(&'static str, &'static str)> {
    let unpack = "unpack it, or pack it with gzip or zstd";
    let convert = "convert it to Parquet or to JSON lines first";
    [
        (&b"\xfd7zXZ"[..], "an xz file", unpack),
        (b"BZh", "a bzip2 file", unpack),
        (b"PK\x03\x04", "a zip file", unpack),
        (b"ARROW1", "an Arrow file", convert),
        (
            b"\xff\xfe",
            "UTF-16 text",
            "convert it with iconv -f UTF-16 -t UTF-8",
        ),
        (
            b"\xfe\xff",
            "UTF-16 text",
            "convert it with iconv -f UTF-16 -t UTF-8",
        ),
    ]
    .into_iter()
    .find(|(magic, ..)| head.starts_with(magic))
    .map(|(_, found, hint)| (found, hint))
}

/// The advice for a row without any known key.
const RENAME: &str = "rename the key that holds the list of messages to `messages`, or those of question and answer to `prompt` and `response`";
const RAW: &str = "train on the plain text under `text` with --raw-text";

fn refuse_keys(path: &Path, line: u64, keys: &[String], hint: &str) -> Result<(), DataError> {
    Err(DataError::NoConversationKey {
        path: path.to_owned(),
        line,
        keys: match keys.is_empty() {
            true => "none".to_owned(),
            false => keys.join(", "),
        },
        hint: hint.to_owned(),
    })
}

fn check_columns(path: &Path, columns: &[String], raw_text: bool) -> Result<(), DataError> {
    let row = Value::from_pairs(columns.iter().map(|name| (name.clone(), "")));
    match rows::form(&row, raw_text) {
        Some(_) => Ok(()),
        None => refuse_keys(path, 1, columns, hint(&row)),
    }
}

fn hint(row: &Value) -> &'static str {
    match rows::form(row, true) {
        Some(Form::Text) => RAW,
        _ if rows::has_key(row, "input_ids") => {
            "say which tokens are supervised under `loss_mask` (1) or `labels` (not -100)"
        }
        _ => RENAME,
    }
}

fn check_first_record(
    path: &Path,
    line: u64,
    row: &Value,
    raw_text: bool,
) -> Result<(), DataError> {
    if row.kind() == ValueKind::Seq {
        let is_row = |m: &Value| rows::form(m, true).is_some();
        return match row.len() {
            Some(0) => Ok(()),
            _ if line == 1 && row.get_item_by_index(0).is_ok_and(|m| is_row(&m)) => {
                Err(json_array(path))
            }
            _ => {
                let keys = ["the row is a list".to_owned()];
                refuse_keys(path, line, &keys, "put the list under `messages`")
            }
        };
    }
    if row.kind() != ValueKind::Map {
        let keys = [format!("the row is a {}", row.kind())];
        return refuse_keys(path, line, &keys, RENAME);
    }
    if rows::form(row, raw_text).is_some() {
        return Ok(());
    }
    let keys: Vec<String> = row
        .try_iter()
        .map(|keys| keys.map(|k| k.to_string()).collect())
        .unwrap_or_default();
    refuse_keys(path, line, &keys, hint(row))
}
