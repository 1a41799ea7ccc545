//! Reading the records of a data file, whatever it is packed as.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::SystemTime;

use super::DataError;
use super::parquet::ParquetRows;
use super::rows::is_known_key;

const BOM: &[u8] = b"\xef\xbb\xbf";
const BUFFER: usize = 1 << 18;
/// The longest line that is read; more is one file on one line, not JSON lines.
const LONGEST_LINE: usize = 64 << 20;

/// How the records of a file are packed. Told from its first bytes, not from its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// JSON lines as they are.
    Lines,
    /// JSON lines in gzip members (RFC 1952).
    Gzip,
    /// JSON lines in Zstandard frames (RFC 8878).
    Zstd,
    /// Parquet (<https://parquet.apache.org/docs/file-format/>).
    Parquet,
}

impl Format {
    /// The format of a file that begins with `head`, as far as it is one that is read.
    pub(super) fn of(head: &[u8]) -> Format {
        match head {
            [0x1f, 0x8b, ..] => Format::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Format::Zstd,
            // A skippable frame may come first (`pzstd`).
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Format::Zstd,
            [b'P', b'A', b'R', b'1', ..] => Format::Parquet,
            _ => Format::Lines,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Format::Lines => "text",
            Format::Gzip => "gzip",
            Format::Zstd => "zstd",
            Format::Parquet => "Parquet",
        }
    }
}

/// One record: a line that is not blank, without its line end and without a byte order mark, or a row of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    /// Position of the file in the list.
    pub(super) file: u32,
    /// Line of the unpacked file, from 1, blank ones counted; the row's number, from 1, in a table.
    pub(super) line: u64,
    /// Row over all files, from 0, blank lines not counted.
    pub(super) row: u64,
    /// JSON text.
    pub(super) bytes: Vec<u8>,
}

/// What is known of a file before it is read as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileFacts {
    /// Of its bytes as they lie on the disk.
    pub(super) hash: blake3::Hash,
    /// How many there are.
    pub(super) bytes: u64,
    changed: Option<SystemTime>,
}

/// The records of one file.
pub(super) struct Records {
    source: Source,
    path: PathBuf,
    format: Format,
    file: u32,
    line: u64,
    row: u64,
}

enum Source {
    Lines {
        reader: Box<dyn BufRead>,
        tally: Rc<RefCell<Tally>>,
    },
    Table {
        rows: Box<ParquetRows>,
        bytes: u64,
    },
}

/// The bytes that were read from the disk so far.
#[derive(Default)]
struct Tally {
    bytes: u64,
    hasher: blake3::Hasher,
}

struct Tallied {
    file: File,
    tally: Rc<RefCell<Tally>>,
}

impl Read for Tallied {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(buffer)?;
        let mut tally = self.tally.borrow_mut();
        tally.bytes += n as u64;
        tally.hasher.update(&buffer[..n]);
        Ok(n)
    }
}

impl Records {
    /// Opens the `file`-th file of a list, whose first row is number `row`.
    pub(super) fn open(path: &Path, file: u32, row: u64) -> Result<Records, DataError> {
        let read_error = |source| DataError::Read {
            path: path.to_owned(),
            source,
        };
        let head = head(path)?;
        let format = Format::of(&head);
        let source = match format {
            Format::Parquet => {
                let rows = ParquetRows::open(path, is_known_key)
                    .map_err(|message| damaged(path, format, 0, message))?;
                let bytes = std::fs::metadata(path).map_err(read_error)?.len();
                Source::Table {
                    rows: Box::new(rows),
                    bytes,
                }
            }
            _ => {
                let tally = Rc::new(RefCell::new(Tally::default()));
                let raw = BufReader::with_capacity(
                    BUFFER,
                    Tallied {
                        file: File::open(path).map_err(read_error)?,
                        tally: tally.clone(),
                    },
                );
                let reader: Box<dyn BufRead> = match format {
                    Format::Gzip => Box::new(BufReader::with_capacity(
                        BUFFER,
                        flate2::bufread::MultiGzDecoder::new(raw),
                    )),
                    Format::Zstd => Box::new(BufReader::with_capacity(
                        BUFFER,
                        zstd::stream::read::Decoder::with_buffer(raw).map_err(read_error)?,
                    )),
                    _ => Box::new(raw),
                };
                Source::Lines { reader, tally }
            }
        };
        Ok(Records {
            source,
            path: path.to_owned(),
            format,
            file,
            line: 0,
            row,
        })
    }

    /// The next record.
    pub(super) fn next(&mut self) -> Result<Option<Record>, DataError> {
        loop {
            let bytes = match &mut self.source {
                Source::Table { rows, .. } => {
                    let next = rows.next();
                    next.map_err(|what| damaged(&self.path, self.format, self.line, what))?
                }
                Source::Lines { reader, .. } => {
                    let next = next_line(reader, LONGEST_LINE);
                    next.map_err(|source| self.line_error(source))?
                }
            };
            let Some(mut bytes) = bytes else {
                return Ok(None);
            };
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
            return Ok(Some(Record {
                file: self.file,
                line: self.line,
                row: self.row - 1,
                bytes,
            }));
        }
    }

    fn line_error(&self, source: io::Error) -> DataError {
        if source.kind() == io::ErrorKind::FileTooLarge {
            return DataError::LongLine {
                path: self.path.clone(),
                line: self.line + 1,
                most: LONGEST_LINE >> 20,
            };
        }
        match self.format {
            Format::Lines => DataError::Read {
                path: self.path.clone(),
                source,
            },
            format => damaged(&self.path, format, self.line, source.to_string()),
        }
    }

    /// Columns of a table, or `None` for lines.
    pub(super) fn columns(&self) -> Option<Vec<String>> {
        match &self.source {
            Source::Table { rows, .. } => Some(rows.names()),
            Source::Lines { .. } => None,
        }
    }

    /// The row that the next file begins with.
    pub(super) fn rows(&self) -> u64 {
        self.row
    }

    /// Bytes of the file on the disk that are done.
    pub(super) fn bytes(&self) -> u64 {
        match &self.source {
            Source::Lines { tally, .. } => tally.borrow().bytes,
            Source::Table { rows, bytes } => (rows.share() * *bytes as f64) as u64,
        }
    }

    /// Whether the file, read to its end, is the one that `facts` were taken of.
    pub(super) fn unchanged(&self, facts: &FileFacts) -> bool {
        match &self.source {
            Source::Lines { tally, .. } => tally.borrow().hasher.finalize() == facts.hash,
            // A table is read here and there; only its size and time can be compared.
            Source::Table { .. } => size_and_time(&self.path) == Ok((facts.bytes, facts.changed)),
        }
    }
}

fn damaged(path: &Path, format: Format, line: u64, message: String) -> DataError {
    DataError::Damaged {
        path: path.to_owned(),
        format: format.name(),
        line,
        message,
    }
}

/// The first bytes of a file.
pub(super) fn head(path: &Path) -> Result<Vec<u8>, DataError> {
    let mut head = Vec::new();
    File::open(path)
        .and_then(|file| file.take(64).read_to_end(&mut head))
        .map_err(|source| DataError::Read {
            path: path.to_owned(),
            source,
        })?;
    Ok(head)
}

/// A line with its end, `None` at the end of the file; [`io::ErrorKind::FileTooLarge`] past `most` bytes.
fn next_line(reader: &mut dyn BufRead, most: usize) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    reader.take(most as u64 + 1).read_until(b'\n', &mut line)?;
    match line.len() {
        0 => Ok(None),
        n if n > most => Err(io::ErrorKind::FileTooLarge.into()),
        _ => Ok(Some(line)),
    }
}

/// Reads a file once, for the key of what is made from it.
pub(super) fn facts(path: &Path) -> Result<FileFacts, DataError> {
    let read = || -> io::Result<FileFacts> {
        let mut file = File::open(path)?;
        let changed = file.metadata()?.modified().ok();
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            let n = file.read(&mut buffer)?;
            if n == 0 {
                return Ok(FileFacts {
                    hash: hasher.finalize(),
                    bytes: hasher.count(),
                    changed,
                });
            }
            hasher.update(&buffer[..n]);
        }
    };
    read().map_err(|source| DataError::Read {
        path: path.to_owned(),
        source,
    })
}

fn size_and_time(path: &Path) -> Result<(u64, Option<SystemTime>), ()> {
    let metadata = std::fs::metadata(path).map_err(drop)?;
    Ok((metadata.len(), metadata.modified().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_may_be_cut_anywhere_but_not_be_endless() {
        let text = b"ab\n\ncdef\nlast";
        for capacity in 1..8 {
            let mut reader = BufReader::with_capacity(capacity, &text[..]);
            let mut lines = Vec::new();
            while let Some(line) = next_line(&mut reader, 5).unwrap() {
                lines.push(line);
            }
            assert_eq!(lines, [&b"ab\n"[..], b"\n", b"cdef\n", b"last"]);
            let mut reader = BufReader::with_capacity(capacity, &text[..]);
            let error = std::iter::from_fn(|| next_line(&mut reader, 4).transpose())
                .find_map(Result::err)
                .unwrap();
            assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        }
    }

    #[test]
    fn the_format_is_told_from_the_first_bytes() {
        for (head, format) in [
            (&b"{\"a\":1}"[..], Format::Lines),
            (b"", Format::Lines),
            (b"\x1f\x8b\x08", Format::Gzip),
            (b"\x28\xb5\x2f\xfd\x04", Format::Zstd),
            (b"\x50\x2a\x4d\x18\x04", Format::Zstd),
            (b"PAR1\x15", Format::Parquet),
            (b"PAR", Format::Lines),
        ] {
            assert_eq!(Format::of(head), format, "{head:?}");
        }
    }
}
