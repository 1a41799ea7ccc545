//! The model's tokenizer (`tokenizer.json`) with its special tokens and byte offsets.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use tokenizers::{PostProcessor, PostProcessorWrapper, Tokenizer};

use super::DataError;
use super::files::is_lfs_pointer;

/// The names under which a chat template sees special tokens.
const SPECIAL_NAMES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// A tokenizer that never adds tokens to a rendered template, and knows where each token came from.
#[derive(Debug)]
pub struct ChatTokenizer {
    inner: Tokenizer,
    /// Kept aside: it adds special tokens, and some kinds also trim offsets.
    post_processor: Option<PostProcessorWrapper>,
    specials: BTreeMap<String, String>,
    special_ids: HashSet<u32>,
    ids: u32,
    path: PathBuf,
    hash: blake3::Hash,
}

/// Token ids of a text, with the bytes of the text that each came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokens {
    /// Token ids, `[tokens]`.
    pub ids: Vec<u32>,
    /// Start and end of each token in the text, in bytes, `[tokens]`.
    pub offsets: Vec<(usize, usize)>,
}

impl ChatTokenizer {
    /// Reads `tokenizer.json`, and the names of special tokens from `tokenizer_config.json` and
    /// `special_tokens_map.json` where they exist.
    ///
    /// # Errors
    /// A missing folder or file, a Git LFS pointer, or a file that is not a tokenizer.
    pub fn load(dir: &Path) -> Result<ChatTokenizer, DataError> {
        let path = dir.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => missing(dir),
            _ => DataError::Read {
                path: path.clone(),
                source,
            },
        })?;
        if is_lfs_pointer(&bytes) {
            return Err(DataError::LfsPointer { path });
        }
        let mut inner = Tokenizer::from_bytes(&bytes).map_err(|e| DataError::BadTokenizer {
            path: path.clone(),
            message: e.to_string(),
        })?;
        let post_processor = inner.get_post_processor().cloned();
        inner.with_post_processor(None::<PostProcessorWrapper>);
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|e| DataError::BadTokenizer {
                path: path.clone(),
                message: e.to_string(),
            })?;

        let specials = special_names(dir)?;
        let special_ids = inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| id)
            .chain(specials.values().filter_map(|t| inner.token_to_id(t)))
            .collect();
        let ids = inner
            .get_vocab(true)
            .into_values()
            .max()
            .map_or(0, |highest| highest + 1);
        let mut hasher = blake3::Hasher::new();
        hasher.update(&bytes);
        for (name, token) in &specials {
            hasher.update(format!("{name}={token}\n").as_bytes());
        }
        Ok(ChatTokenizer {
            inner,
            post_processor,
            specials,
            special_ids,
            ids,
            path,
            hash: hasher.finalize(),
        })
    }

    /// Tokenises text as it stands; special tokens written in it are recognised, none is added.
    ///
    /// # Errors
    /// The tokenizer's own message (a model without an unknown token may meet text it cannot spell).
    pub fn encode(&self, text: &str) -> Result<Tokens, String> {
        let encoding = self.inner.encode(text, false).map_err(|e| e.to_string())?;
        Ok(tokens(&encoding))
    }

    /// Tokenises plain text as the model expects it, with the special tokens the tokenizer adds
    /// (a beginning-of-sequence token, for most that have one).
    ///
    /// # Errors
    /// The tokenizer's own message.
    pub fn encode_plain(&self, text: &str) -> Result<Tokens, String> {
        let encoding = self.inner.encode(text, false).map_err(|e| e.to_string())?;
        let encoding = match &self.post_processor {
            Some(p) => p.process(encoding, None, true).map_err(|e| e.to_string())?,
            None => encoding,
        };
        Ok(tokens(&encoding))
    }

    /// The text of `ids`, special tokens included.
    ///
    /// # Errors
    /// The tokenizer's own message.
    pub fn decode(&self, ids: &[u32]) -> Result<String, String> {
        self.inner.decode(ids, false).map_err(|e| e.to_string())
    }

    /// One more than the highest token id.
    pub fn ids(&self) -> u32 {
        self.ids
    }

    /// Whether `id` is a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// Ids of all special tokens, ascending.
    pub fn special_ids(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = self.special_ids.iter().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// Special tokens by name (`bos_token`, `eos_token`, …).
    pub fn special_tokens(&self) -> impl Iterator<Item = (&str, &str)> {
        self.specials.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }

    /// Id of the special token called `name` (`bos_token`, `mask_token`, …), if there is one.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.inner.token_to_id(self.specials.get(name)?)
    }

    /// The tokenizer's own spelling of a token.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Hash of the tokenizer file and of the names of its special tokens.
    pub fn hash(&self) -> blake3::Hash {
        self.hash
    }

    /// Where the tokenizer was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn tokens(encoding: &tokenizers::Encoding) -> Tokens {
    Tokens {
        ids: encoding.get_ids().to_vec(),
        offsets: encoding.get_offsets().to_vec(),
    }
}

/// Reads a small JSON file of a model folder.
pub(super) fn read_json(path: &Path) -> Result<serde_json::Value, DataError> {
    let bytes = std::fs::read(path).map_err(|source| DataError::Read {
        path: path.to_owned(),
        source,
    })?;
    if is_lfs_pointer(&bytes) {
        return Err(DataError::LfsPointer {
            path: path.to_owned(),
        });
    }
    serde_json::from_slice(&bytes).map_err(|e| DataError::BadTokenizer {
        path: path.to_owned(),
        message: e.to_string(),
    })
}

/// Special tokens by name; a token is given as its text or as an object with `content`.
fn special_names(dir: &Path) -> Result<BTreeMap<String, String>, DataError> {
    let mut names = BTreeMap::new();
    for file in ["special_tokens_map.json", "tokenizer_config.json"] {
        let path = dir.join(file);
        if !path.exists() {
            continue;
        }
        let config = read_json(&path)?;
        for name in SPECIAL_NAMES {
            let token = config
                .get(name)
                .and_then(|v| v.as_str().or_else(|| v.get("content")?.as_str()));
            if let Some(token) = token {
                names.insert(name.to_owned(), token.to_owned());
            }
        }
    }
    Ok(names)
}

fn missing(dir: &Path) -> DataError {
    if !dir.is_dir() {
        return DataError::Missing {
            path: dir.to_owned(),
            flag: "--target-model",
        };
    }
    let slow = ["tokenizer.model", "vocab.json", "vocab.txt"]
        .into_iter()
        .find(|name| dir.join(name).exists());
    let hint = match slow {
        Some(name) => format!(
            "it has only {name}; convert it with: python -c \"from transformers import AutoTokenizer as T; d='{0}'; T.from_pretrained(d).save_pretrained(d)\"",
            dir.display()
        ),
        None => "copy it from the model's repository".to_owned(),
    };
    DataError::NoTokenizer {
        dir: dir.to_owned(),
        hint,
    }
}
