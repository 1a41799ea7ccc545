//! Finding data files and reading their lines.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use minijinja::Value;
use minijinja::value::ValueKind;

use super::DataError;
use super::rows::CONVERSATION_KEYS;

const BOM: &[u8] = b"\xef\xbb\xbf";
const LFS: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Whether a file's first bytes are those of a Git LFS pointer
/// (<https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md>).
pub fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(LFS)
}

/// One line that is not blank, without its line end and without a byte order mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    /// Position of the file in the list.
    pub(super) file: u32,
    /// Line of the file, from 1, blank ones counted.
    pub(super) line: u64,
    /// Row over all files, from 0, blank lines not counted.
    pub(super) row: u64,
    pub(super) bytes: Vec<u8>,
}

/// The files that `paths` name: folders stand for their `.jsonl` files by name. Every problem that
/// can be seen without reading a whole file is added to `problems`.
pub(super) fn list(
    paths: &[PathBuf],
    flag: &'static str,
    raw_text: bool,
    problems: &mut Vec<DataError>,
) -> Vec<PathBuf> {
    if paths.is_empty() {
        problems.push(DataError::NoData { flag });
    }
    let mut files = Vec::new();
    for path in paths {
        match expand(path, flag) {
            Ok(found) => files.extend(found),
            Err(e) => problems.push(e),
        }
    }
    for file in &files {
        if let Err(e) = sniff(file, flag, raw_text) {
            problems.push(e);
        }
    }
    files
}

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
        let wanted = file
            .extension()
            .is_some_and(|e| e == "jsonl" || e == "ndjson");
        if wanted && file.is_file() {
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

/// Looks at a file's first bytes and first record.
fn sniff(path: &Path, flag: &'static str, raw_text: bool) -> Result<(), DataError> {
    let read_error = |source| DataError::Read {
        path: path.to_owned(),
        source,
    };
    let mut head = Vec::new();
    File::open(path)
        .and_then(|f| f.take(64).read_to_end(&mut head))
        .map_err(read_error)?;
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
    let mut lines = Lines::open(path, 0, 0)?;
    let mut any = false;
    while let Some(line) = lines.next()? {
        any = true;
        if line.row == 0 && line.bytes.trim_ascii() == b"[" {
            return Err(json_array(path));
        }
        let Ok(row) = serde_json::from_slice::<Value>(&line.bytes) else {
            continue;
        };
        return check_first_record(path, line.line, &row, raw_text);
    }
    match any {
        // Lines, but no JSON: the count of malformed lines will say so.
        true => Ok(()),
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
    let unpack = "unpack it first";
    let convert = "convert it to JSON lines first";
    [
        (&b"\x1f\x8b"[..], "a gzip file", unpack),
        (b"\x28\xb5\x2f\xfd", "a zstd file", unpack),
        (b"\xfd7zXZ", "an xz file", unpack),
        (b"BZh", "a bzip2 file", unpack),
        (b"PK\x03\x04", "a zip file", unpack),
        (b"PAR1", "a Parquet file", convert),
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

fn check_first_record(
    path: &Path,
    line: u64,
    row: &Value,
    raw_text: bool,
) -> Result<(), DataError> {
    let refuse = |keys: String, hint: &str| {
        Err(DataError::NoConversationKey {
            path: path.to_owned(),
            line,
            keys,
            hint: hint.to_owned(),
        })
    };
    let map = "rename the key that holds the list of messages";
    if row.kind() == ValueKind::Seq {
        return match row.len() {
            Some(0) => Ok(()),
            _ if line == 1 && row.get_item_by_index(0).is_ok_and(|m| has_key(&m)) => {
                Err(json_array(path))
            }
            _ => refuse(
                "none, the row is a list".to_owned(),
                "put the list under `messages`",
            ),
        };
    }
    if row.kind() != ValueKind::Map {
        return refuse(format!("none, the row is a {}", row.kind()), map);
    }
    let has_text = row
        .get_attr("text")
        .is_ok_and(|v| v.kind() == ValueKind::String);
    if has_key(row) || (raw_text && has_text) {
        return Ok(());
    }
    let keys: Vec<String> = row
        .try_iter()
        .map(|keys| keys.map(|k| k.to_string()).collect())
        .unwrap_or_default();
    let keys = match keys.is_empty() {
        true => "none".to_owned(),
        false => keys.join(", "),
    };
    match has_text {
        true => refuse(keys, "train on the plain text under `text` with --raw-text"),
        false => refuse(keys, map),
    }
}

fn has_key(row: &Value) -> bool {
    CONVERSATION_KEYS
        .iter()
        .any(|key| row.get_attr(key).is_ok_and(|v| !v.is_undefined()))
}

/// The lines of one file.
pub(super) struct Lines {
    reader: BufReader<File>,
    path: PathBuf,
    file: u32,
    line: u64,
    row: u64,
    bytes: u64,
    hasher: blake3::Hasher,
}

impl Lines {
    /// Opens the `file`-th file of a list, whose first row is number `row`.
    pub(super) fn open(path: &Path, file: u32, row: u64) -> Result<Lines, DataError> {
        let open = File::open(path).map_err(|source| DataError::Read {
            path: path.to_owned(),
            source,
        })?;
        Ok(Lines {
            reader: BufReader::with_capacity(1 << 18, open),
            path: path.to_owned(),
            file,
            line: 0,
            row,
            bytes: 0,
            hasher: blake3::Hasher::new(),
        })
    }

    /// The next line that is not blank.
    pub(super) fn next(&mut self) -> Result<Option<Line>, DataError> {
        loop {
            let mut bytes = Vec::new();
            let read = self
                .reader
                .read_until(b'\n', &mut bytes)
                .map_err(|source| DataError::Read {
                    path: self.path.clone(),
                    source,
                })?;
            if read == 0 {
                return Ok(None);
            }
            self.hasher.update(&bytes);
            self.bytes += read as u64;
            self.line += 1;
            if bytes.starts_with(BOM) {
                bytes.drain(..BOM.len());
            }
            let end = bytes.trim_ascii_end().len();
            bytes.truncate(end);
            if bytes.is_empty() {
                continue;
            }
            self.row += 1;
            return Ok(Some(Line {
                file: self.file,
                line: self.line,
                row: self.row - 1,
                bytes,
            }));
        }
    }

    /// The row that the next file begins with.
    pub(super) fn rows(&self) -> u64 {
        self.row
    }

    /// Bytes read so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Hash of what was read so far.
    pub(super) fn hash(&self) -> blake3::Hash {
        self.hasher.finalize()
    }
}

/// Hash and size of a file's content.
pub(super) fn hash_file(path: &Path) -> Result<(blake3::Hash, u64), DataError> {
    let read = || -> io::Result<(blake3::Hash, u64)> {
        let mut file = File::open(path)?;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            let n = file.read(&mut buffer)?;
            if n == 0 {
                return Ok((hasher.finalize(), hasher.count()));
            }
            hasher.update(&buffer[..n]);
        }
    };
    read().map_err(|source| DataError::Read {
        path: path.to_owned(),
        source,
    })
}
