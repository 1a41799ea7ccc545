//! The private folder in which the sockets of a start-up live.
//!
//! ipc-channel binds its one-shot sockets below the process's temporary directory and cuts their path at the
//! 107 bytes that the system allows without saying so. So the launcher points `tempfile`, which ipc-channel
//! uses, at a short folder of its own; it is gone as soon as every worker has said Hello.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use super::ControlError;

const PREFIX: &str = "slipstream-";
/// Length of the longest socket path, without its final NUL.
const SOCKET_PATH: usize = 107;
/// What ipc-channel appends: a folder of its own and the socket.
const APPENDED: usize = "/.tmpXXXXXX/socket".len();

/// The process's folder for sockets; removed with the last copy of this handle.
#[derive(Clone, Debug)]
pub struct SocketFolder {
    shared: Arc<Folder>,
}

#[derive(Debug)]
struct Folder {
    path: PathBuf,
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What stays is named in run.json and removed by the next start.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

impl SocketFolder {
    /// Makes the folder, readable by this user only, or shares the one that this process already has.
    ///
    /// # Errors
    ///
    /// [`ControlError::SocketFolder`] when no temporary directory is short enough and writable.
    pub fn create() -> Result<Self, ControlError> {
        /// Chosen once, because `tempfile` can be pointed only once.
        static CHOSEN: OnceLock<PathBuf> = OnceLock::new();
        static LIVE: Mutex<Weak<Folder>> = Mutex::new(Weak::new());

        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = live.upgrade() {
            return Ok(Self { shared });
        }
        let path = match CHOSEN.get() {
            Some(path) => {
                make_private(path).map_err(|source| ControlError::SocketFolder {
                    path: path.clone(),
                    source,
                })?;
                path.clone()
            }
            None => {
                let path = choose()?;
                // Another part of this process may have pointed it elsewhere; then the path is checked per socket.
                let _ = tempfile::env::override_temp_dir(&path);
                CHOSEN.get_or_init(|| path).clone()
            }
        };
        let shared = Arc::new(Folder { path });
        *live = Arc::downgrade(&shared);
        Ok(Self { shared })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Whether ipc-channel's socket at `path` can be reached by that path.
    pub(super) fn fits(path: &str) -> bool {
        path.len() <= SOCKET_PATH
    }
}

fn make_private(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().mode(0o700).create(path)
}

fn choose() -> Result<PathBuf, ControlError> {
    let mut refused = None;
    for parent in [
        std::env::temp_dir(),
        PathBuf::from("/tmp"),
        PathBuf::from("/var/tmp"),
    ] {
        let length = parent.as_os_str().len() + 1 + PREFIX.len() + 6 + APPENDED;
        if length > SOCKET_PATH {
            refused = Some((parent, io::Error::from(io::ErrorKind::InvalidFilename)));
            continue;
        }
        // A temporary directory of `tempfile` has mode 0700.
        match tempfile::Builder::new()
            .prefix(PREFIX)
            .rand_bytes(6)
            .tempdir_in(&parent)
        {
            Ok(folder) => return Ok(folder.keep()),
            Err(source) => refused = Some((parent, source)),
        }
    }
    let (path, source) = refused.expect("at least one directory was tried");
    Err(ControlError::SocketFolder { path, source })
}

/// Removes the folder that a launcher left behind when it was killed during start-up. Only a real directory of
/// this user with the name that [`SocketFolder`] gives is touched.
pub fn clean_stale(path: &Path) {
    let named = path
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
    let Ok(found) = path.symlink_metadata() else {
        return;
    };
    if named && found.is_dir() && found.uid() == rustix::process::geteuid().as_raw() {
        // It holds sockets that nobody listens to; if it cannot be removed it does no harm.
        let _ = std::fs::remove_dir_all(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_folders_are_removed_and_nothing_else() {
        let parent = tempfile::tempdir_in(std::env::temp_dir()).unwrap();
        let stale = parent.path().join("slipstream-abc123");
        let other = parent.path().join("precious");
        let link = parent.path().join("slipstream-link");
        std::fs::create_dir_all(stale.join(".tmpq")).unwrap();
        std::fs::create_dir(&other).unwrap();
        std::os::unix::fs::symlink(&other, &link).unwrap();
        for path in [&stale, &other, &link] {
            clean_stale(path);
        }
        assert!(!stale.exists());
        assert!(other.exists() && link.exists());
    }
}
