//! The newest records of a file of lines that another process writes.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

/// How much of a file that exists already is read at first.
const FIRST: u64 = 512 << 10;

/// Follows a `.jsonl` file and keeps its last records.
#[derive(Debug)]
pub struct Tail<T> {
    path: PathBuf,
    at: u64,
    keep: usize,
    records: VecDeque<T>,
}

impl<T: DeserializeOwned> Tail<T> {
    /// Of the file at `path`, which need not exist yet; at most `keep` records are kept.
    pub fn new(path: &Path, keep: usize) -> Self {
        Self {
            path: path.to_owned(),
            at: 0,
            keep,
            records: VecDeque::new(),
        }
    }

    /// Reads what was added. A file that has become shorter was cut back to a checkpoint: what was read is void.
    pub fn look(&mut self) {
        let Ok(mut file) = File::open(&self.path) else {
            return;
        };
        let length = file.metadata().map_or(0, |found| found.len());
        if length < self.at {
            self.records.clear();
            self.at = 0;
        }
        let first = self.at == 0;
        if first {
            self.at = length.saturating_sub(FIRST);
        }
        let mut text = Vec::new();
        let read = file
            .seek(SeekFrom::Start(self.at))
            .and_then(|_| file.take(length - self.at).read_to_end(&mut text));
        let end = text.iter().rposition(|byte| *byte == b'\n');
        let (Ok(_), Some(end)) = (read, end) else {
            return;
        };
        let begun_inside = first && self.at > 0;
        self.at += end as u64 + 1;
        let lines = text[..end].split(|byte| *byte == b'\n');
        // A line that does not read is the rest of one that began before the part that was read.
        for line in lines.skip(usize::from(begun_inside)) {
            if let Ok(record) = serde_json::from_slice(line) {
                self.records.push_back(record);
            }
            if self.records.len() > self.keep {
                self.records.pop_front();
            }
        }
    }

    /// The records, oldest first.
    pub fn records(&self) -> &VecDeque<T> {
        &self.records
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn whole_lines_are_read_once_and_a_cut_starts_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("numbers.jsonl");
        let mut tail = Tail::<u32>::new(&path, 3);
        tail.look();
        assert!(tail.records().is_empty());
        let mut file = File::create(&path).unwrap();
        file.write_all(b"1\n2\n3").unwrap();
        tail.look();
        assert_eq!(tail.records(), &[1, 2]);
        file.write_all(b"\n4\n5\n").unwrap();
        tail.look();
        assert_eq!(tail.records(), &[3, 4, 5]);
        std::fs::write(&path, "1\n").unwrap();
        tail.look();
        assert_eq!(tail.records(), &[1]);
    }
}
