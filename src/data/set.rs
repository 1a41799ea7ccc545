//! The tokenised set: one file, memory-mapped by every process of a run.
//!
//! ```text
//! header     256 bytes, `Header`
//! documents  one after the other: ids u32 [tokens], mask u8 [tokens], padding to 4 bytes
//! index      `Entry` [documents]
//! ids        one bit for each token id that occurs
//! report     JSON
//! ```
//!
//! All numbers are little-endian. A file is written under a temporary name and renamed when complete.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use memmap2::Mmap;
use tempfile::NamedTempFile;

use super::mask::Encoded;
use super::report::DataReport;
use super::{DataError, eligible};

/// Raised with every change of this layout or of what tokenising yields.
pub(super) const VERSION: u32 = 2;
const MAGIC: [u8; 8] = *b"SLIPSET\0";

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct Header {
    magic: [u8; 8],
    version: u32,
    reserved: u32,
    length: u64,
    documents: u64,
    tokens: u64,
    index_at: u64,
    ids_at: u64,
    report_at: u64,
    key: [u8; 32],
    documents_hash: [u8; 32],
    index_hash: [u8; 32],
    /// Of everything behind the index.
    tail_hash: [u8; 32],
    padding: [u8; 32],
    /// Of the header up to here.
    checksum: [u8; 32],
}

const HEADER: usize = size_of::<Header>();
const _: () = assert!(HEADER == 256 && cfg!(target_endian = "little"));

impl Header {
    fn sum(&self) -> [u8; 32] {
        let bytes = bytemuck::bytes_of(self);
        *blake3::hash(&bytes[..HEADER - 32]).as_bytes()
    }
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct Entry {
    at: u64,
    row: u64,
    line: u64,
    file: u32,
    tokens: u32,
    supervised: u32,
    eligible: u32,
}

/// One tokenised conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Document<'a> {
    /// Token ids, `[tokens]`.
    pub ids: &'a [u32],
    /// 1 where the token is supervised, `[tokens]`.
    pub mask: &'a [u8],
    /// Row over all data files, from 0, blank lines not counted.
    pub row: u64,
    /// Positions p with `mask[p] == 1 && mask[p + 1] == 1`, where an anchor may stand.
    pub eligible: u32,
}

impl<'a> Document<'a> {
    /// The stretches of supervised tokens, in order: one for each answer that is supervised.
    pub fn answers(self) -> impl Iterator<Item = Range<usize>> + 'a {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = at + self.mask[at..].iter().position(|&m| m == 1)?;
            let length = self.mask[start..].iter().take_while(|&&m| m == 1).count();
            at = start + length;
            Some(start..at)
        })
    }
}

/// What is known of a document without touching its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DocumentInfo {
    /// Row over all data files, from 0, blank lines not counted.
    pub row: u64,
    /// Position of its file in the list of data files.
    pub file: u32,
    /// Line in that file, from 1.
    pub line: u64,
    /// Tokens.
    pub tokens: u32,
    /// Supervised tokens.
    pub supervised: u32,
    /// Positions where an anchor may stand.
    pub eligible: u32,
}

/// A tokenised set, mapped read-only. Cloning shares the mapping.
#[derive(Debug, Clone)]
pub struct TokenSet {
    map: Arc<Mmap>,
    header: Header,
    path: PathBuf,
}

impl TokenSet {
    /// Maps a set and checks its header, length, index and report (not the tokens: see
    /// [`TokenSet::verify`]).
    ///
    /// # Errors
    /// A file that cannot be read, of another version, cut or altered.
    pub fn open(path: &Path) -> Result<TokenSet, DataError> {
        let read = |source| DataError::Read {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(read)?;
        // SAFETY: the file was renamed into place complete and no process of ours writes to it again;
        // one that replaces it renames over it, which leaves this mapping on the old file.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        let header = check(&map).map_err(|reason| DataError::BadCache {
            path: path.to_owned(),
            reason,
        })?;
        Ok(TokenSet {
            map: Arc::new(map),
            header,
            path: path.to_owned(),
        })
    }

    /// Reads all tokens once and compares their hash.
    ///
    /// # Errors
    /// [`DataError::BadCache`] if they are not what was written.
    pub fn verify(&self) -> Result<(), DataError> {
        let documents = &self.map[HEADER..self.header.index_at as usize];
        match *blake3::hash(documents).as_bytes() == self.header.documents_hash {
            true => Ok(()),
            false => Err(DataError::BadCache {
                path: self.path.clone(),
                reason: "its tokens were altered".to_owned(),
            }),
        }
    }

    /// Documents in the set.
    pub fn len(&self) -> usize {
        self.header.documents as usize
    }

    /// Whether there is no document; never so for a set that [`prepare`](super::prepare) made.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of all documents.
    pub fn tokens(&self) -> u64 {
        self.header.tokens
    }

    /// The `i`-th document in data order.
    ///
    /// # Panics
    /// If `i >= self.len()`.
    pub fn document(&self, i: usize) -> Document<'_> {
        let entry = self.index()[i];
        let tokens = entry.tokens as usize;
        let at = entry.at as usize;
        Document {
            ids: bytemuck::cast_slice(&self.map[at..at + 4 * tokens]),
            mask: &self.map[at + 4 * tokens..at + 5 * tokens],
            row: entry.row,
            eligible: entry.eligible,
        }
    }

    /// What is known of the `i`-th document without touching its tokens.
    ///
    /// # Panics
    /// If `i >= self.len()`.
    pub fn info(&self, i: usize) -> DocumentInfo {
        let entry = self.index()[i];
        DocumentInfo {
            row: entry.row,
            file: entry.file,
            line: entry.line,
            tokens: entry.tokens,
            supervised: entry.supervised,
            eligible: entry.eligible,
        }
    }

    /// All documents in data order.
    pub fn documents(&self) -> impl ExactSizeIterator<Item = Document<'_>> {
        (0..self.len()).map(|i| self.document(i))
    }

    /// Whether a token id occurs in any document.
    pub fn contains_id(&self, id: u32) -> bool {
        let bits = &self.map[self.header.ids_at as usize..self.header.report_at as usize];
        bits.get(id as usize / 8)
            .is_some_and(|byte| byte >> (id % 8) & 1 == 1)
    }

    /// Hash of all ids, masks and row numbers: equal for equal sets, wherever they lie.
    pub fn content_hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.header.documents_hash);
        hasher.update(&self.header.index_hash);
        hasher.finalize()
    }

    /// Hash of everything that the set was made from.
    pub fn key(&self) -> blake3::Hash {
        blake3::Hash::from_bytes(self.header.key)
    }

    /// Where the set lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the data held; `files` are the data files' names as they are now.
    ///
    /// # Errors
    /// [`DataError::BadCache`] if the report cannot be read.
    pub fn report(&self, files: Vec<String>) -> Result<DataReport, DataError> {
        let text = &self.map[self.header.report_at as usize..];
        let mut report: DataReport =
            serde_json::from_slice(text).map_err(|e| DataError::BadCache {
                path: self.path.clone(),
                reason: e.to_string(),
            })?;
        report.files = files;
        Ok(report)
    }

    fn index(&self) -> &[Entry] {
        bytemuck::cast_slice(&self.map[self.header.index_at as usize..self.header.ids_at as usize])
    }
}

/// Checks everything but the tokens.
fn check(map: &[u8]) -> Result<Header, String> {
    let bytes = map.get(..HEADER).ok_or("it is shorter than its header")?;
    let header: Header = bytemuck::pod_read_unaligned(bytes);
    if header.magic != MAGIC {
        return Err("it does not begin as one".to_owned());
    }
    if header.version != VERSION {
        return Err(format!("it has version {}, not {VERSION}", header.version));
    }
    if header.checksum != header.sum() {
        return Err("its header was altered".to_owned());
    }
    if header.length != map.len() as u64 {
        return Err(format!(
            "it should have {} bytes, not {}",
            header.length,
            map.len()
        ));
    }
    let index = &map[header.index_at as usize..header.ids_at as usize];
    let tail = &map[header.ids_at as usize..];
    if *blake3::hash(index).as_bytes() != header.index_hash
        || *blake3::hash(tail).as_bytes() != header.tail_hash
    {
        return Err("its index was altered".to_owned());
    }
    Ok(header)
}

/// Writes a set, one document after the other. The index, which follows the documents, is kept in a file
/// of its own until then: memory does not grow with the number of rows.
pub(super) struct SetWriter {
    out: BufWriter<NamedTempFile>,
    path: PathBuf,
    key: blake3::Hash,
    hasher: blake3::Hasher,
    index: BufWriter<File>,
    index_hasher: blake3::Hasher,
    documents: u64,
    seen: Vec<u8>,
    at: u64,
    tokens: u64,
}

impl SetWriter {
    /// Opens a temporary file beside `path`.
    pub(super) fn create(path: &Path, key: blake3::Hash) -> Result<SetWriter, DataError> {
        let folder = path.parent().unwrap_or(Path::new("."));
        let open = || -> io::Result<(NamedTempFile, File)> {
            fs::create_dir_all(folder)?;
            let mut file = tempfile::Builder::new()
                .prefix(TEMPORARY)
                .tempfile_in(folder)?;
            file.seek(SeekFrom::Start(HEADER as u64))?;
            Ok((file, tempfile::tempfile_in(folder)?))
        };
        let (file, index) = open().map_err(|source| DataError::WriteCache {
            path: folder.to_owned(),
            source,
        })?;
        Ok(SetWriter {
            out: BufWriter::with_capacity(1 << 20, file),
            path: path.to_owned(),
            key,
            hasher: blake3::Hasher::new(),
            index: BufWriter::with_capacity(1 << 18, index),
            index_hasher: blake3::Hasher::new(),
            documents: 0,
            seen: Vec::new(),
            at: HEADER as u64,
            tokens: 0,
        })
    }

    /// Appends a document.
    pub(super) fn push(
        &mut self,
        row: &Encoded,
        number: u64,
        file: u32,
        line: u64,
    ) -> Result<(), DataError> {
        let mut bytes: Vec<u8> = bytemuck::cast_slice(&row.ids).to_vec();
        bytes.extend_from_slice(&row.mask);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        self.write(&bytes)?;
        self.hasher.update(&bytes);
        for &id in &row.ids {
            let byte = id as usize / 8;
            if byte >= self.seen.len() {
                self.seen.resize(byte + 1, 0);
            }
            self.seen[byte] |= 1 << (id % 8);
        }
        let entry = Entry {
            at: self.at,
            row: number,
            line,
            file,
            tokens: row.ids.len() as u32,
            supervised: row.mask.iter().map(|&m| u32::from(m)).sum(),
            eligible: eligible(&row.mask),
        };
        let entry = bytemuck::bytes_of(&entry);
        self.index
            .write_all(entry)
            .map_err(|source| self.write_error(source))?;
        self.index_hasher.update(entry);
        self.documents += 1;
        self.at += bytes.len() as u64;
        self.tokens += row.ids.len() as u64;
        Ok(())
    }

    /// Completes the file and moves it into place if it is to be kept; else it goes with the set that is
    /// returned.
    pub(super) fn finish(mut self, report: &DataReport, keep: bool) -> Result<TokenSet, DataError> {
        // The index's entries hold u64: they must begin at a multiple of 8.
        let index_at = self.at.next_multiple_of(8);
        let gap = vec![0; (index_at - self.at) as usize];
        self.hasher.update(&gap);
        let index_bytes = self.documents * size_of::<Entry>() as u64;
        let mut tail = std::mem::take(&mut self.seen);
        let ids_at = index_at + index_bytes;
        let report_at = ids_at + tail.len() as u64;
        tail.extend(serde_json::to_vec(report).expect("a report is plain data"));
        let mut header = Header {
            magic: MAGIC,
            version: VERSION,
            reserved: 0,
            length: ids_at + tail.len() as u64,
            documents: self.documents,
            tokens: self.tokens,
            index_at,
            ids_at,
            report_at,
            key: *self.key.as_bytes(),
            documents_hash: *self.hasher.finalize().as_bytes(),
            index_hash: *self.index_hasher.finalize().as_bytes(),
            tail_hash: *blake3::hash(&tail).as_bytes(),
            padding: [0; 32],
            checksum: [0; 32],
        };
        header.checksum = header.sum();
        self.write(&gap)?;
        self.append_index()?;
        self.write(&tail)?;
        let SetWriter { out, path, .. } = self;
        let failed = |source| DataError::WriteCache {
            path: path.clone(),
            source,
        };
        let complete = || -> io::Result<NamedTempFile> {
            let mut file = out.into_inner().map_err(|e| e.into_error())?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(bytemuck::bytes_of(&header))?;
            Ok(file)
        };
        let file = complete().map_err(failed)?;
        if !keep {
            return TokenSet::open(file.path());
        }
        file.as_file().sync_all().map_err(failed)?;
        file.persist(&path).map_err(|e| failed(e.error))?;
        TokenSet::open(&path)
    }

    fn append_index(&mut self) -> Result<(), DataError> {
        let mut append = || -> io::Result<()> {
            self.index.flush()?;
            let index = self.index.get_mut();
            index.seek(SeekFrom::Start(0))?;
            io::copy(index, &mut self.out)?;
            Ok(())
        };
        append().map_err(|source| self.write_error(source))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        let written = self.out.write_all(bytes);
        written.map_err(|source| self.write_error(source))
    }

    fn write_error(&self, source: io::Error) -> DataError {
        DataError::WriteCache {
            path: self.path.clone(),
            source,
        }
    }
}

/// Beginning of the names of sets being written.
pub(super) const TEMPORARY: &str = ".writing-";
