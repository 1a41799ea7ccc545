//! The file that `launcher generate` writes: one answered conversation a line, whole lines only.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::options::GenerateOptions;
use super::prepare::Refusal;

/// One line of the output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The conversation, answers included.
    pub messages: Vec<serde_json::Value>,
    /// Why its last answer ends: `stop` or `length`.
    pub finish_reason: String,
    /// Tokens of all answers.
    pub tokens: u64,
    /// Where the prompt comes from.
    pub source: RowSource,
}

/// Which answer to which prompt, made how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RowSource {
    /// The prompts' file.
    pub file: String,
    /// The prompt's row over all files, from 0.
    pub row: u64,
    /// Which of several answers to it, from 0.
    pub sample: u64,
    /// Hash of model, template, prompts, lengths, temperature and seed.
    pub settings: String,
}

/// The file of rows.
pub struct Output {
    /// Where it is.
    pub path: PathBuf,
    file: File,
    settings: String,
    /// Row and sample of what it held.
    pub made: HashSet<(u64, u64)>,
}

impl Output {
    /// Opens it: new, emptied, or with what it holds.
    ///
    /// # Errors
    /// A file that is there although nobody said what becomes of it, one that was made otherwise, or the file system's.
    pub fn open(options: &GenerateOptions, settings: String) -> Result<Self, Refusal> {
        let path = options.output.clone();
        let refuse = |what: String| Refusal(vec![format!("--output {}: {what}", path.display())]);
        let failed = |error: std::io::Error| refuse(error.to_string());
        let mut made = HashSet::new();
        let mut file = OpenOptions::new();
        file.read(true).append(true);
        let file = match file.open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if let Some(folder) = path.parent() {
                    std::fs::create_dir_all(folder).map_err(failed)?;
                }
                file.create_new(true).open(&path).map_err(failed)?
            }
            Err(error) => return Err(failed(error)),
            Ok(there) if options.overwrite => {
                there.set_len(0).map_err(failed)?;
                there
            }
            Ok(there) if options.resume => {
                let kept = read_rows(&there, &settings, &mut made).map_err(refuse)?;
                there.set_len(kept).map_err(failed)?;
                there
            }
            Ok(there) if there.metadata().map_err(failed)?.len() == 0 => there,
            Ok(_) => {
                return Err(refuse(
                    "is there already: --resume makes what is missing, --overwrite replaces it"
                        .to_owned(),
                ));
            }
        };
        Ok(Self {
            path,
            file,
            settings,
            made,
        })
    }

    /// Adds one line, in one write.
    ///
    /// # Errors
    /// The file system's, in words.
    pub fn add(&mut self, row: &Row) -> Result<(), String> {
        let mut row = row.clone();
        row.source.settings.clone_from(&self.settings);
        let mut line = serde_json::to_vec(&row).map_err(|error| error.to_string())?;
        line.push(b'\n');
        self.file
            .write_all(&line)
            .map_err(|error| format!("{}: {error}", self.path.display()))
    }

    /// Waits until all lines are on the disk.
    ///
    /// # Errors
    /// The file system's, in words.
    pub fn finish(&mut self) -> Result<(), String> {
        let synced = self.file.sync_all();
        synced.map_err(|error| format!("{}: {error}", self.path.display()))
    }
}

/// Notes the rows of an earlier call; the bytes of its whole lines. A last line without its end, left by a kill,
/// does not count.
fn read_rows(file: &File, settings: &str, made: &mut HashSet<(u64, u64)>) -> Result<u64, String> {
    let mut reader = BufReader::new(file);
    let mut kept = 0;
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = reader.read_until(b'\n', &mut line);
        read.map_err(|error| error.to_string())?;
        if line.last() != Some(&b'\n') {
            break;
        }
        let row: Row = serde_json::from_slice(&line)
            .map_err(|error| format!("line {number} is no row of `launcher generate`: {error}"))?;
        if row.source.settings != settings {
            return Err(format!(
                "line {number} was made with another model, template, prompts, lengths, temperature or seed; use another file, or --overwrite"
            ));
        }
        made.insert((row.source.row, row.source.sample));
        kept += line.len() as u64;
    }
    Ok(kept)
}
