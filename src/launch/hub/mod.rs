//! Models by their names on a hub: `owner/name`, fetched once into the cache that all Hugging Face tools share.
//!
//! A name is resolved to a commit first, and every file is taken from that commit, so that a model which changes
//! while it is fetched does not come out mixed. Where things lie and who asks is said by the usual variables:
//! `HF_HUB_CACHE`, `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` (or the file that `hf auth login` writes) and
//! `HF_HUB_OFFLINE`.

#[cfg(test)]
mod server;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use crate::model::{ModelError, TargetConfig};

const ENDPOINT: &str = "https://huggingface.co";
const INDEX: &str = "model.safetensors.index.json";
/// Files beside the weights that a run may read, in the order in which they are fetched.
const SMALL: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
];
/// How often a fetch that was cut off is taken up again.
const RETRIES: usize = 5;
/// How often progress is told.
const TELL: Duration = Duration::from_secs(2);

/// A model on a hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    repo: String,
    revision: String,
}

impl HubName {
    /// `owner/name` or `owner/name@revision`; `None` for what can only be a path, or is one that exists.
    pub fn parse(given: &Path) -> Option<Self> {
        let text = given.to_str().filter(|_| !given.exists())?;
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, revision),
            None => (text, "main"),
        };
        let (owner, name) = repo.split_once('/')?;
        let is_part = |part: &str| {
            part.starts_with(|c: char| c.is_ascii_alphanumeric())
                && part
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let is_revision = !revision.is_empty()
            && !revision.contains("..")
            && revision
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c));
        (is_part(owner) && is_part(name) && is_revision).then(|| Self {
            repo: repo.to_string(),
            revision: revision.to_string(),
        })
    }

    fn at(&self, revision: &str) -> Repo {
        Repo::with_revision(self.repo.clone(), RepoType::Model, revision.to_string())
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        if self.revision == "main" {
            return Ok(());
        }
        write!(f, "@{}", self.revision)
    }
}

/// Where models come from and where they are kept.
#[derive(Clone, Debug)]
pub struct Hub {
    cache: PathBuf,
    endpoint: String,
    token: Option<String>,
    offline: bool,
}

/// A model that was fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Its files.
    pub dir: PathBuf,
    /// Its name and commit, `owner/name@commit`.
    pub source: String,
}

/// Why a model cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// No place for the cache.
    #[error(
        "no folder for models: neither HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME nor HOME is set; set HF_HOME"
    )]
    NoCache,
    /// The network may not be used, and the cache lacks the model.
    #[error(
        "{name} is no directory and not in the cache {}, and HF_HUB_OFFLINE keeps this program from fetching it; unset it, or give a directory",
        cache.display()
    )]
    Offline {
        /// The model.
        name: HubName,
        /// Where it was looked for.
        cache: PathBuf,
    },
    /// The hub wants to know who asks, or does not let them.
    #[error(
        "{endpoint} does not give {name} ({status}): {hint}",
        hint = if *with_token {
            "the token that was sent may not read it; ask for access on its page, or use another HF_TOKEN"
        } else {
            "set HF_TOKEN or run `hf auth login`, and ask for access on its page if it asks for that"
        }
    )]
    Denied {
        /// The hub.
        endpoint: String,
        /// The model.
        name: HubName,
        /// The hub's status.
        status: u16,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The hub has no such model or revision.
    #[error(
        "{endpoint} has no model {name}, and there is no directory of that name; check the spelling, or set HF_TOKEN if it is private"
    )]
    Absent {
        /// The hub.
        endpoint: String,
        /// The model.
        name: HubName,
    },
    /// The hub cannot be reached, and the cache lacks the model.
    #[error(
        "{endpoint} cannot be asked for {name} ({error}), there is no directory of that name, and {} does not hold it; check the network and HF_ENDPOINT, or give a directory",
        cache.display()
    )]
    Unreachable {
        /// The hub.
        endpoint: String,
        /// The model.
        name: HubName,
        /// What went wrong.
        error: String,
        /// Where it was looked for.
        cache: PathBuf,
    },
    /// The repository holds no model that can be read.
    #[error("{name} {what}")]
    Unfit {
        /// The model.
        name: HubName,
        /// What it lacks.
        what: String,
    },
    /// A file did not come through.
    #[error("{name}: {file}: {error}; run again to take it up where it stopped")]
    File {
        /// The model.
        name: HubName,
        /// The file.
        file: String,
        /// What went wrong.
        error: String,
    },
    /// A config that cannot be run, found before its weights are fetched.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Hub {
    /// As the environment says.
    ///
    /// # Errors
    /// [`HubError::NoCache`].
    pub fn from_env() -> Result<Self, HubError> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let path = |name: &str| set(name).map(PathBuf::from);
        let text = |name: &str| set(name)?.into_string().ok();
        let home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| path("HOME").map(|home| home.join(".cache/huggingface")));
        let cache = path("HF_HUB_CACHE")
            .or_else(|| home.as_ref().map(|home| home.join("hub")))
            .ok_or(HubError::NoCache)?;
        let stored = || {
            let file = path("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")))?;
            std::fs::read_to_string(file).ok()
        };
        let is_on = |name: &str| {
            text(name).is_some_and(|value| {
                ["1", "on", "true", "yes"].contains(&value.to_lowercase().as_str())
            })
        };
        Ok(Self {
            cache: std::path::absolute(&cache).unwrap_or(cache),
            endpoint: text("HF_ENDPOINT")
                .unwrap_or_else(|| ENDPOINT.to_string())
                .trim_end_matches('/')
                .to_string(),
            token: text("HF_TOKEN")
                .or_else(stored)
                .map(|token| token.trim().to_string())
                .filter(|token| !token.is_empty()),
            offline: is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE"),
        })
    }

    /// Fetches what is missing of a model, and tells about it in lines.
    ///
    /// Where the hub cannot be reached, what the cache holds is used, and told.
    ///
    /// # Errors
    /// [`HubError`]; a config that cannot be run is found before its weights are fetched.
    pub fn fetch(&self, name: &HubName, tell: &dyn Fn(&str)) -> Result<Fetched, HubError> {
        let cached = self.cached(name);
        if self.offline {
            let offline = || HubError::Offline {
                name: name.clone(),
                cache: self.cache.clone(),
            };
            return cached.ok_or_else(offline);
        }
        let api = self.api().map_err(|error| self.refusal(name, error))?;
        tell(&format!("asking {} for {name}", self.endpoint));
        let info = match api.repo(name.at(&name.revision)).info() {
            Ok(info) => info,
            Err(error) => {
                let refusal = self.refusal(name, error);
                return match (refusal, cached) {
                    (HubError::Unreachable { error, .. }, Some(found)) => {
                        tell(&format!(
                            "{} cannot be asked for {name} ({error}): using {} of the cache",
                            self.endpoint, found.source
                        ));
                        Ok(found)
                    }
                    (refusal, _) => Err(refusal),
                };
            }
        };
        if info.sha.is_empty() || !info.sha.chars().all(|c| c.is_ascii_alphanumeric()) {
            return Err(HubError::Unfit {
                name: name.clone(),
                what: format!("is said to be at commit `{}`, which is none", info.sha),
            });
        }
        let there: BTreeSet<String> = info.siblings.into_iter().map(|f| f.rfilename).collect();
        let fetch = Fetch {
            name,
            repo: api.repo(name.at(&info.sha)),
            dir: self.snapshot(name, &info.sha),
            tell,
        };
        for file in SMALL.iter().filter(|file| there.contains(**file)) {
            fetch.file(file)?;
            if *file == "config.json" {
                TargetConfig::read(&fetch.dir)?;
            }
        }
        if !there.contains("config.json") {
            return Err(fetch.unfit("is no model: it has no config.json"));
        }
        for file in fetch.weights(&there)? {
            fetch.file(&file)?;
        }
        // The cache works without it; only a later run without a network would miss the name.
        let _ = Cache::new(self.cache.clone())
            .repo(name.at(&name.revision))
            .create_ref(&info.sha);
        Ok(self.fetched(name, &info.sha))
    }

    fn api(&self) -> Result<Api, ApiError> {
        ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_endpoint(self.endpoint.clone())
            .with_token(self.token.clone())
            .with_progress(false)
            .with_retries(RETRIES)
            .with_user_agent(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"))
            .build()
    }

    fn snapshot(&self, name: &HubName, commit: &str) -> PathBuf {
        let cache = Cache::new(self.cache.clone());
        cache.repo(name.at(commit)).pointer_path(commit)
    }

    fn fetched(&self, name: &HubName, commit: &str) -> Fetched {
        Fetched {
            dir: self.snapshot(name, commit),
            source: format!("{}@{commit}", name.repo),
        }
    }

    /// What the cache holds of the revision, if it has begun to hold it.
    fn cached(&self, name: &HubName) -> Option<Fetched> {
        let refs = self.cache.join(name.at("main").folder_name()).join("refs");
        let commit = std::fs::read_to_string(refs.join(&name.revision));
        let commit = commit.map_or(name.revision.clone(), |commit| commit.trim().to_string());
        let found = self.fetched(name, &commit);
        found.dir.join("config.json").exists().then_some(found)
    }

    fn refusal(&self, name: &HubName, error: ApiError) -> HubError {
        let (endpoint, name) = (self.endpoint.clone(), name.clone());
        match status(&error) {
            Some(status @ (401 | 403)) => HubError::Denied {
                endpoint,
                name,
                status,
                with_token: self.token.is_some(),
            },
            Some(404) => HubError::Absent { endpoint, name },
            _ => HubError::Unreachable {
                endpoint,
                name,
                error: error.to_string(),
                cache: self.cache.clone(),
            },
        }
    }
}

/// The status with which a hub answered, where that was the error.
fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(status) => Some(status),
            _ => None,
        },
        ApiError::TooManyRetries(error) => status(error),
        _ => None,
    }
}

/// One commit of one model on its way.
struct Fetch<'a> {
    name: &'a HubName,
    repo: ApiRepo,
    dir: PathBuf,
    tell: &'a dyn Fn(&str),
}

impl Fetch<'_> {
    fn unfit(&self, what: impl Into<String>) -> HubError {
        HubError::Unfit {
            name: self.name.clone(),
            what: what.into(),
        }
    }

    /// Takes a file into the cache unless it is there. Another process that is about to bring it is waited for.
    fn file(&self, file: &str) -> Result<(), HubError> {
        let path = self.dir.join(file);
        let failed = |error: String| HubError::File {
            name: self.name.clone(),
            file: file.to_string(),
            error,
        };
        while !path.exists() {
            let size = Rc::new(Cell::new(0));
            let told = Told {
                tell: self.tell,
                file: file.to_string(),
                size: Rc::clone(&size),
                done: 0,
                spoken: Instant::now(),
            };
            match self.repo.download_with_progress(file, told) {
                Ok(_) => {
                    let length = std::fs::metadata(&path)
                        .map_err(|e| failed(e.to_string()))?
                        .len();
                    if length != size.get() as u64 {
                        // Left there, it would be taken for whole.
                        let blob = std::fs::canonicalize(&path);
                        for part in [Ok(path.clone()), blob].into_iter().flatten() {
                            let _ = std::fs::remove_file(part);
                        }
                        let size = size.get();
                        return Err(failed(format!("came as {length} bytes, not {size}")));
                    }
                }
                Err(ApiError::LockAcquisition(_)) => (self.tell)(&format!(
                    "waiting for another process that fetches {} {file}",
                    self.name
                )),
                Err(error) => return Err(failed(error.to_string())),
            }
        }
        Ok(())
    }

    /// The files of weights: those of the index, or the only one.
    fn weights(&self, there: &BTreeSet<String>) -> Result<Vec<String>, HubError> {
        let in_root = there.iter().filter(|file| !file.contains('/'));
        let found: Vec<&String> = in_root.filter(|f| f.ends_with(".safetensors")).collect();
        if there.contains(INDEX) {
            self.file(INDEX)?;
            let named = self.index()?;
            let missing: Vec<&str> = named.difference(there).map(String::as_str).collect();
            if !missing.is_empty() {
                let missing = missing.join(", ");
                return Err(self.unfit(format!("lacks files that its {INDEX} names: {missing}")));
            }
            return Ok(named.into_iter().collect());
        }
        match found.as_slice() {
            _ if there.contains("model.safetensors") => Ok(vec!["model.safetensors".to_string()]),
            [only] => Ok(vec![(*only).clone()]),
            [] => Err(self.unfit(
                "has no *.safetensors; what works are models in that format, unquantised or fp8",
            )),
            several => Err(self.unfit(format!(
                "has {} *.safetensors but no {INDEX} that says which of them belong to the model",
                several.len()
            ))),
        }
    }

    /// The distinct files that the index names.
    fn index(&self) -> Result<BTreeSet<String>, HubError> {
        let text = std::fs::read(self.dir.join(INDEX)).unwrap_or_default();
        let index: serde_json::Value = serde_json::from_slice(&text)
            .map_err(|error| self.unfit(format!("has a broken {INDEX}: {error}")))?;
        let files = index.get("weight_map").and_then(|map| map.as_object());
        files
            .into_iter()
            .flat_map(|map| map.values())
            .map(|file| match file.as_str() {
                Some(file) if !file.is_empty() && !file.contains('/') => Ok(file.to_string()),
                _ => Err(self.unfit(format!("has an {INDEX} that names {file}, not a file"))),
            })
            .collect()
    }
}

/// Progress of one file, in lines.
struct Told<'a> {
    tell: &'a dyn Fn(&str),
    file: String,
    /// In bytes, once it is known.
    size: Rc<Cell<usize>>,
    done: usize,
    spoken: Instant,
}

impl Progress for Told<'_> {
    fn init(&mut self, size: usize, _file: &str) {
        // It is called again at each retry, which goes on where the one before was cut off.
        self.size.set(size);
        self.done = 0;
    }

    fn update(&mut self, size: usize) {
        self.done += size;
        if self.spoken.elapsed() >= TELL {
            self.spoken = Instant::now();
            let share = 100.0 * self.done as f64 / self.size.get().max(1) as f64;
            (self.tell)(&format!(
                "fetching {}: {share:.0} % of {:.1} MB",
                self.file,
                self.size.get() as f64 / 1e6
            ));
        }
    }

    fn finish(&mut self) {
        if self.size.get() >= 1_000_000 {
            (self.tell)(&format!("fetched {}", self.file));
        }
    }
}
