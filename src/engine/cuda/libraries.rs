//! Finding the CUDA libraries. They are opened at run time, by name, by `cudarc`, which panics when one is
//! missing; so each is probed before its first use, and the folders that hold them are put on the loader's
//! path before a worker starts.

use std::path::{Path, PathBuf};

use super::super::EngineError;
use super::kernels::cache_folder;

/// A library of CUDA that a worker opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// Matrix products.
    CublasLt,
    /// The run-time compiler of the kernels.
    Nvrtc,
    /// All-reduce among GPUs.
    Nccl,
}

impl Library {
    /// All of them.
    pub const ALL: [Library; 3] = [Library::CublasLt, Library::Nvrtc, Library::Nccl];

    /// How its file's name begins.
    fn stem(self) -> &'static str {
        match self {
            Library::CublasLt => "libcublasLt.so",
            Library::Nvrtc => "libnvrtc.so",
            Library::Nccl => "libnccl.so",
        }
    }

    /// How to get it, for messages.
    pub fn remedy(self) -> &'static str {
        match self {
            Library::CublasLt => {
                "cuBLASLt was not found: install a CUDA 12 or 13 toolkit, or `pip install nvidia-cublas` \
                 (CUDA 12: nvidia-cublas-cu12), or put its folder on LD_LIBRARY_PATH"
            }
            Library::Nvrtc => {
                "NVRTC was not found: install a CUDA 12 or 13 toolkit, or `pip install nvidia-cuda-nvrtc` \
                 (CUDA 12: nvidia-cuda-nvrtc-cu12), or put its folder on LD_LIBRARY_PATH"
            }
            Library::Nccl => {
                "NCCL was not found: install libnccl2, or `pip install nvidia-nccl-cu13` (CUDA 12: \
                 nvidia-nccl-cu12), or put its folder on LD_LIBRARY_PATH"
            }
        }
    }

    /// Whether the loader finds it from here.
    fn is_present(self) -> bool {
        // SAFETY: opens and closes a library of NVIDIA's, whose initialisers do nothing but set themselves up.
        unsafe {
            match self {
                Library::CublasLt => cudarc::cublaslt::sys::is_culib_present(),
                Library::Nvrtc => cudarc::nvrtc::sys::is_culib_present(),
                Library::Nccl => cudarc::nccl::sys::is_culib_present(),
            }
        }
    }
}

/// Fails with a remedy unless the loader finds `library`.
///
/// # Errors
/// [`EngineError::Device`], in the name of `device`.
pub fn require(device: &str, library: Library) -> Result<(), EngineError> {
    if library.is_present() {
        return Ok(());
    }
    Err(EngineError::Device {
        device: device.to_owned(),
        what: "loading a CUDA library",
        message: library.remedy().to_owned(),
    })
}

/// Fails with a remedy unless the loader finds the driver.
pub(super) fn require_driver(device: &str) -> Result<(), EngineError> {
    // SAFETY: opens and closes the driver's library.
    if unsafe { cudarc::driver::sys::is_culib_present() } {
        return Ok(());
    }
    Err(EngineError::Device {
        device: device.to_owned(),
        what: "loading the NVIDIA driver",
        message: "libcuda.so was not found: install the NVIDIA driver (in a container, start it with GPU \
                  access), or train on CPUs with --cpu"
            .to_owned(),
    })
}

/// Folders to put on a worker's `LD_LIBRARY_PATH`, in order, so that every library of [`Library::ALL`] that
/// this machine has is found: toolkits under /usr/local and pip's `nvidia/*/lib` folders of the virtual
/// environment or of the system's Pythons. Reads directories only; opens no library.
pub fn library_folders() -> Vec<PathBuf> {
    let mut places = vec![PathBuf::from("/usr/local/cuda/lib64")];
    places.extend(sorted_children(Path::new("/usr/local"), "cuda-").map(|p| p.join("lib64")));
    for root in python_roots() {
        for python in sorted_children(&root.join("lib"), "python3") {
            for kind in ["site-packages", "dist-packages"] {
                places.extend(
                    sorted_children(&python.join(kind).join("nvidia"), "").map(|p| p.join("lib")),
                );
            }
        }
    }
    let mut folders: Vec<PathBuf> = Vec::new();
    for place in places {
        let useful = Library::ALL.iter().any(|l| holds(&place, *l));
        if useful && !folders.contains(&place) {
            folders.push(place);
        }
    }
    folders
}

/// A folder in which NCCL has the only name that it is looked for under, `libnccl.so`, where it is installed as
/// `libnccl.so.2` alone, as by pip and by most distributions; none where that is not so, or cannot be helped.
pub fn linked_nccl() -> Option<PathBuf> {
    let library = Library::Nccl;
    let mut folders = library_folders();
    folders.extend(["/usr/lib/x86_64-linux-gnu", "/usr/lib64"].map(PathBuf::from));
    if folders.iter().any(|f| f.join(library.stem()).exists()) {
        return None;
    }
    let file = folders
        .iter()
        .find_map(|folder| sorted_children(folder, library.stem()).next())?;
    let hash = blake3::hash(file.as_os_str().as_encoded_bytes()).to_hex();
    link_nccl(
        &file,
        &cache_folder()?.join(format!("nccl-{}", &hash[..16])),
    )
}

fn link_nccl(file: &Path, folder: &Path) -> Option<PathBuf> {
    let link = folder.join(Library::Nccl.stem());
    if std::fs::read_link(&link).ok().as_deref() != Some(file) {
        std::fs::create_dir_all(folder).ok()?;
        // Whoever starts at the same time makes the same link.
        match std::os::unix::fs::symlink(file, &link) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return None,
            _ => {}
        }
    }
    Some(folder.to_path_buf())
}

/// A file of `library` in one of the [`library_folders`].
pub fn find_library(library: Library) -> Option<PathBuf> {
    let mut folders = library_folders().into_iter();
    folders.find_map(|folder| sorted_children(&folder, library.stem()).next())
}

/// Where Pythons keep their packages: the active environment first.
fn python_roots() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .iter()
        .filter_map(std::env::var_os)
        .map(PathBuf::from)
        .collect();
    // The environment of the `python3` that a shell would run, active or not.
    if let Some(path) = std::env::var_os("PATH") {
        let python = std::env::split_paths(&path)
            .map(|folder| folder.join("python3"))
            .find(|file| file.exists());
        roots.extend(python.and_then(|file| Some(file.parent()?.parent()?.to_path_buf())));
    }
    roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
    if let Some(home) = std::env::var_os("HOME") {
        roots.push(PathBuf::from(home).join(".local"));
    }
    roots
}

/// Whether `folder` has a file of `library`.
fn holds(folder: &Path, library: Library) -> bool {
    sorted_children(folder, library.stem()).next().is_some()
}

/// Entries of `folder` whose name begins with `prefix`, the highest version first; none if it is no folder.
fn sorted_children(folder: &Path, prefix: &str) -> impl Iterator<Item = PathBuf> + use<> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found.into_iter().rev()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_counts_only_if_it_holds_a_wanted_library() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("libcufft.so.12"), b"").unwrap();
        assert!(Library::ALL.iter().all(|l| !holds(dir.path(), *l)));
        std::fs::write(dir.path().join("libnvrtc.so.13"), b"").unwrap();
        assert!(holds(dir.path(), Library::Nvrtc));
        assert!(!holds(dir.path(), Library::Nccl));
    }

    #[test]
    fn nccl_is_linked_under_the_name_that_is_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let (file, folder) = (dir.path().join("libnccl.so.2"), dir.path().join("linked"));
        std::fs::write(&file, b"library").unwrap();
        for _ in 0..2 {
            assert_eq!(link_nccl(&file, &folder), Some(folder.clone()));
            assert_eq!(
                std::fs::read(folder.join("libnccl.so")).unwrap(),
                b"library"
            );
        }
    }

    #[test]
    fn a_missing_library_names_what_to_install() {
        for library in Library::ALL {
            assert!(library.remedy().contains("pip install"), "{library:?}");
        }
    }
}
