//! Durable writes: what a checkpoint does to the file system, one counted operation after the other.
//!
//! Every function states the file it worked on in its error. Tests make any single operation fail, to show that
//! a kill or a full disk at that point leaves the earlier checkpoint whole.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A file-system operation that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}: {source}", path.display())]
pub struct DiskError {
    /// The operation.
    pub what: &'static str,
    /// On what.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// What a file holds, to be compared when it is read again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Its length.
    pub bytes: u64,
    /// Hash of its contents, in hex.
    pub blake3: String,
}

impl Written {
    /// Reads a file and says what differs, if anything does.
    pub fn difference(&self, path: &Path) -> Option<String> {
        let hash = || -> io::Result<blake3::Hash> {
            let mut hasher = blake3::Hasher::new();
            hasher.update_reader(File::open(path)?)?;
            Ok(hasher.finalize())
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match fs::metadata(path) {
            Err(e) => Some(format!("{name}: {e}")),
            Ok(found) if found.len() != self.bytes => Some(format!(
                "{name} has {} bytes instead of {}",
                found.len(),
                self.bytes
            )),
            Ok(_) => match hash() {
                Err(e) => Some(format!("{name}: {e}")),
                Ok(hash) if hash.to_hex().as_str() != self.blake3 => {
                    Some(format!("{name} has other contents than were written"))
                }
                Ok(_) => None,
            },
        }
    }
}

/// The file system, as a checkpoint uses it.
#[derive(Debug, Default)]
pub struct Disk {
    #[cfg(test)]
    pub(super) fault: Option<fault::Fault>,
}

impl Disk {
    /// Creates a directory and its parents.
    pub fn create_dir(&mut self, path: &Path) -> Result<(), DiskError> {
        self.run("create the directory", path, || fs::create_dir_all(path))
    }

    /// Writes a whole file through `fill` and syncs it.
    pub fn write(
        &mut self,
        path: &Path,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<Written, DiskError> {
        let file = self.run("create", path, || File::create(path))?;
        let mut out = BufWriter::with_capacity(
            1 << 20,
            Counted {
                file,
                bytes: 0,
                hasher: blake3::Hasher::new(),
                disk: self,
            },
        );
        fill(&mut out)
            .and_then(|()| out.flush())
            .map_err(|source| error("write", path, source))?;
        let counted = out
            .into_inner()
            .map_err(|e| error("write", path, e.into_error()))?;
        let written = Written {
            bytes: counted.bytes,
            blake3: counted.hasher.finalize().to_hex().to_string(),
        };
        let file = counted.file;
        self.sync("sync", path, || file.sync_all())?;
        Ok(written)
    }

    /// Makes the names inside a directory durable.
    pub fn sync_dir(&mut self, path: &Path) -> Result<(), DiskError> {
        self.sync("sync the directory", path, || File::open(path)?.sync_all())
    }

    /// Renames `from` to `to`; where `to` is a directory already, the two change places in one operation.
    pub fn place(&mut self, from: &Path, to: &Path) -> Result<(), DiskError> {
        self.run("rename to", to, || {
            if to.is_dir() {
                use rustix::fs::{CWD, RenameFlags, renameat_with};
                return Ok(renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE)?);
            }
            fs::rename(from, to)
        })
    }

    /// Points the link `path` at `target`, over whatever link was there, in one rename.
    pub fn link(&mut self, target: &str, path: &Path, temporary: &Path) -> Result<(), DiskError> {
        self.run("link", temporary, || {
            match fs::remove_file(temporary) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            symlink(target, temporary)
        })?;
        self.run("move the link", path, || fs::rename(temporary, path))
    }

    /// Removes a directory with all it holds.
    pub fn remove_dir(&mut self, path: &Path) -> Result<(), DiskError> {
        self.run("remove", path, || fs::remove_dir_all(path))
    }

    /// A sync is an operation like any other, but tests with faults need not wait for the device.
    fn sync(
        &mut self,
        what: &'static str,
        path: &Path,
        operation: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), DiskError> {
        #[cfg(test)]
        if self.fault.is_some() {
            return self.run(what, path, || Ok(()));
        }
        self.run(what, path, operation)
    }

    fn run<T>(
        &mut self,
        what: &'static str,
        path: &Path,
        operation: impl FnOnce() -> io::Result<T>,
    ) -> Result<T, DiskError> {
        self.gate()
            .and_then(|()| operation())
            .map_err(|source| error(what, path, source))
    }

    #[cfg(not(test))]
    fn gate(&mut self) -> io::Result<()> {
        Ok(())
    }

    #[cfg(test)]
    fn gate(&mut self) -> io::Result<()> {
        self.fault.as_mut().map_or(Ok(()), fault::Fault::gate)
    }
}

fn error(what: &'static str, path: &Path, source: io::Error) -> DiskError {
    DiskError {
        what,
        path: path.to_path_buf(),
        source,
    }
}

/// A file whose writes are counted.
struct Counted<'a> {
    file: File,
    bytes: u64,
    hasher: blake3::Hasher,
    disk: &'a mut Disk,
}

impl Write for Counted<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if let Err(fault) = self.disk.gate() {
            // A write that is cut short leaves its first half.
            self.file.write_all(&data[..data.len() / 2])?;
            return Err(fault);
        }
        let n = self.file.write(data)?;
        self.bytes += n as u64;
        self.hasher.update(&data[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
pub(super) mod fault {
    use std::io;

    /// How the counted operation fails.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in crate::train) enum Kind {
        /// Nothing happens any more, clean-up included.
        Killed,
        /// This one fails, what follows works.
        Full,
    }

    /// Fails operation number `at`.
    #[derive(Debug)]
    pub(in crate::train) struct Fault {
        pub(in crate::train) at: usize,
        pub(in crate::train) kind: Kind,
        pub(in crate::train) seen: usize,
    }

    impl Fault {
        pub(super) fn gate(&mut self) -> io::Result<()> {
            let number = self.seen;
            self.seen += 1;
            match self.kind {
                Kind::Killed if number >= self.at => Err(io::Error::other("killed")),
                Kind::Full if number == self.at => Err(io::ErrorKind::StorageFull.into()),
                _ => Ok(()),
            }
        }
    }
}
