//! A target's files: `config.json` and safetensors, memory-mapped, checked whole before anything is loaded.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use half::bf16;
use memmap2::{Mmap, MmapMut};
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde_json::Value;

use super::config::{Family, TargetConfig};
use super::error::{ModelError, Problems};
use crate::engine::{Encoding, Engine, Float, Half};

/// Names in a message before it says how many more there are.
const NAMED: usize = 8;
/// Tensors up to this size go into the hash whole, larger ones by [`SAMPLES`] pieces of [`SAMPLE`] bytes.
const HASHED_WHOLE: usize = 1 << 20;
const SAMPLES: usize = 16;
const SAMPLE: usize = 1 << 16;

/// One file of tensors.
struct Shard {
    path: PathBuf,
    map: Mmap,
}

/// Where a tensor is.
struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    begin: usize,
    end: usize,
}

/// The files of a target, every tensor's place and shape checked against the config.
pub struct TargetFiles {
    dir: PathBuf,
    config: TargetConfig,
    config_text: Vec<u8>,
    shards: Vec<Shard>,
    tensors: HashMap<String, Entry>,
    /// Before `embed_tokens`, `layers` and `norm`.
    prefix: &'static str,
}

impl TargetFiles {
    /// Looks at the files in `dir`. `assume_tied` takes the embedding as head where an untied model lacks one.
    ///
    /// # Errors
    /// Everything that is wrong with the config and the files, in one [`ModelError::Refused`].
    pub fn open(dir: &Path, assume_tied: bool) -> Result<Self, ModelError> {
        let mut problems = Problems::default();
        if !dir.is_dir() {
            problems.add("is no folder; a model folder holds config.json and *.safetensors");
            problems.refuse(dir)?;
        }
        let config = match TargetConfig::read(dir) {
            Ok(config) => Some(config),
            Err(ModelError::Refused { problems: some, .. }) => {
                for problem in some.0 {
                    problems.add(format!("config.json: {problem}"));
                }
                None
            }
            Err(ModelError::Io { error, .. }) => {
                problems.add(format!("config.json: {error}"));
                None
            }
            Err(other) => return Err(other),
        };
        let mut shards = Vec::new();
        let mut tensors = HashMap::new();
        for path in shard_paths(dir, &mut problems) {
            open_shard(path, &mut shards, &mut tensors, &mut problems);
        }
        let Some(config) = config.filter(|_| problems.0.is_empty()) else {
            problems.refuse(dir)?;
            unreachable!("a config is absent only where a problem was added");
        };
        let bare = tensors.contains_key("embed_tokens.weight");
        let mut files = Self {
            dir: dir.to_path_buf(),
            config,
            config_text: read(&dir.join("config.json"))?,
            shards,
            tensors,
            prefix: if bare { "" } else { "model." },
        };
        files.check(assume_tied, &mut problems);
        problems.refuse(dir)?;
        Ok(files)
    }

    /// A target of the shape of `dir`'s config.json with random weights, for measuring speed without its files:
    /// norms are 1, matrices have the deviation that models start from, and all of them share one block of numbers.
    ///
    /// # Errors
    /// What is wrong with the config, or no memory for the largest matrix.
    pub fn dummy(dir: &Path) -> Result<Self, ModelError> {
        let config = TargetConfig::read(dir)?;
        let path = dir.join("config.json");
        let mut files = Self {
            dir: dir.to_path_buf(),
            config_text: read(&path)?,
            config,
            shards: Vec::new(),
            tensors: HashMap::new(),
            prefix: "model.",
        };
        let c = &files.config;
        let mut expected = vec![
            (
                files.name("embed_tokens.weight"),
                vec![c.vocab_size, c.hidden_size],
            ),
            (
                "lm_head.weight".to_owned(),
                vec![c.vocab_size, c.hidden_size],
            ),
            (files.name("norm.weight"), vec![c.hidden_size]),
        ];
        for i in 0..c.num_hidden_layers {
            for (part, shape) in layer_tensors(c) {
                expected.push((files.layer_name(i, part), shape));
            }
        }
        let bytes = |shape: &[usize]| 2 * shape.iter().product::<usize>();
        for (shard, number) in [dummy_matrix as fn(usize) -> bf16, |_| bf16::ONE]
            .into_iter()
            .enumerate()
        {
            let of_shard = |shape: &[usize]| shape.len() == 2 - shard;
            let longest = expected
                .iter()
                .filter(|(_, shape)| of_shard(shape))
                .map(|(_, shape)| bytes(shape))
                .max()
                .unwrap_or(0);
            let io = |error| ModelError::Io {
                path: path.clone(),
                error,
            };
            let mut map = MmapMut::map_anon(longest.max(1)).map_err(io)?;
            for (i, place) in map.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                *place = number(i).to_le_bytes();
            }
            files.shards.push(Shard {
                path: path.clone(),
                map: map.make_read_only().map_err(io)?,
            });
            for (name, shape) in expected.iter().filter(|(_, shape)| of_shard(shape)) {
                let entry = Entry {
                    shard,
                    dtype: Dtype::BF16,
                    shape: shape.clone(),
                    begin: 0,
                    end: bytes(shape),
                };
                files.tensors.insert(name.clone(), entry);
            }
        }
        Ok(files)
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The config; its vocabulary is the embedding's rows, and `tie_word_embeddings` says what is used as head.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// Compares every tensor that a forward pass may need with the config.
    fn check(&mut self, assume_tied: bool, problems: &mut Problems) {
        let embedding = self.name("embed_tokens.weight");
        if let Some(entry) = self.tensors.get(&embedding)
            && let [rows, _] = entry.shape[..]
        {
            self.config.vocab_size = rows;
        }
        if !self.config.tie_word_embeddings && !self.tensors.contains_key("lm_head.weight") {
            if assume_tied {
                self.config.tie_word_embeddings = true;
            } else {
                problems.add(
                    "has no lm_head.weight though tie_word_embeddings is false; --assume-tied uses the embedding as head",
                );
            }
        }
        let c = &self.config;
        let mut expected = vec![
            (embedding, vec![c.vocab_size, c.hidden_size]),
            (self.name("norm.weight"), vec![c.hidden_size]),
        ];
        if !c.tie_word_embeddings {
            expected.push((
                "lm_head.weight".to_string(),
                vec![c.vocab_size, c.hidden_size],
            ));
        }
        for i in 0..c.num_hidden_layers {
            for (part, shape) in layer_tensors(c) {
                expected.push((self.layer_name(i, part), shape));
            }
        }
        let (mut missing, mut shapes, mut types) = (Vec::new(), Vec::new(), Vec::new());
        for (name, shape) in &expected {
            match self.tensors.get(name) {
                None => missing.push(name.clone()),
                Some(entry) => {
                    if entry.shape != *shape {
                        shapes.push(format!("{name} is {:?}, not {shape:?}", entry.shape));
                    }
                    if encoding(entry.dtype).is_none() {
                        types.push(format!("{name} ({})", entry.dtype));
                    }
                }
            }
        }
        missing.retain(|name| name != "lm_head.weight");
        list("lacks tensors", &missing, problems);
        list(
            "has tensors of another shape than config.json says",
            &shapes,
            problems,
        );
        list(
            "has tensors that are no float32, float16 or bfloat16",
            &types,
            problems,
        );
        let mut strangers: Vec<String> = self
            .tensors
            .keys()
            .filter(|name| {
                [
                    ".bias",
                    ".qweight",
                    ".scales",
                    "weight_scale",
                    "weight_scale_inv",
                    "weight_packed",
                ]
                .iter()
                .any(|end| name.ends_with(end))
            })
            .cloned()
            .collect();
        strangers.sort();
        list(
            "has biases or quantised weights, which are not implemented",
            &strangers,
            problems,
        );
    }

    fn name(&self, rest: &str) -> String {
        format!("{}{rest}", self.prefix)
    }

    pub(super) fn layer_name(&self, layer: usize, part: &str) -> String {
        format!("{}layers.{layer}.{part}.weight", self.prefix)
    }

    /// Numbers of a checked tensor.
    fn numbers(&self, name: &str) -> Result<(&Entry, Encoding, &[u8]), ModelError> {
        let found = self.tensors.get(name).and_then(|entry| {
            let bytes = &self.shards[entry.shard].map[entry.begin..entry.end];
            Some((entry, encoding(entry.dtype)?, bytes))
        });
        found.ok_or_else(|| {
            ModelError::Request(format!("{} has no tensor {name}", self.dir.display()))
        })
    }

    /// Matrices with equal columns, one below the other, in the compute type.
    pub(super) fn stacked<E: Engine>(
        &self,
        engine: &E,
        names: &[String],
    ) -> Result<Half<E>, ModelError> {
        let parts: Vec<_> = names
            .iter()
            .map(|name| self.numbers(name))
            .collect::<Result<_, _>>()?;
        let rows: usize = parts.iter().map(|(entry, ..)| entry.shape[0]).sum();
        let cols = parts.first().map_or(0, |(entry, ..)| entry.shape[1]);
        let mut whole = engine.half(rows, cols)?;
        let mut begin = 0;
        for (entry, encoding, bytes) in parts {
            let end = begin + entry.shape[0];
            engine.decode_half(whole.view_mut().row_range(begin, end), encoding, bytes)?;
            begin = end;
        }
        Ok(whole)
    }

    /// A vector in float32.
    pub(super) fn vector<E: Engine>(&self, engine: &E, name: &str) -> Result<Float<E>, ModelError> {
        let (entry, encoding, bytes) = self.numbers(name)?;
        let mut values = vec![0.0; entry.shape[0]];
        encoding.decode(bytes, &mut values);
        Ok(engine.upload_float(&values, values.len())?)
    }

    /// `[V, H]` the embedding.
    pub(super) fn embedding<E: Engine>(&self, engine: &E) -> Result<Half<E>, ModelError> {
        self.stacked(engine, &[self.name("embed_tokens.weight")])
    }

    /// `[V, H]` the head, where it is not the embedding.
    pub(super) fn lm_head<E: Engine>(&self, engine: &E) -> Result<Option<Half<E>>, ModelError> {
        if self.config.tie_word_embeddings {
            return Ok(None);
        }
        self.stacked(engine, &["lm_head.weight".to_string()])
            .map(Some)
    }

    /// `[1, H]` the final norm.
    pub(super) fn final_norm<E: Engine>(&self, engine: &E) -> Result<Float<E>, ModelError> {
        self.vector(engine, &self.name("norm.weight"))
    }

    /// What the files hold, in hexadecimal: BLAKE3 of the config and of every tensor's name, type, shape and
    /// numbers, the numbers of large tensors by evenly spaced samples. File names, times and the cut into
    /// shards do not matter.
    pub fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(&self.config_text);
        let sorted: BTreeMap<_, _> = self.tensors.iter().collect();
        for (name, entry) in sorted {
            part(name.as_bytes());
            part(format!("{} {:?}", entry.dtype, entry.shape).as_bytes());
            let bytes = &self.shards[entry.shard].map[entry.begin..entry.end];
            if bytes.len() <= HASHED_WHOLE {
                part(bytes);
            } else {
                for i in 0..SAMPLES {
                    let begin = (bytes.len() - SAMPLE) / (SAMPLES - 1) * i;
                    part(&bytes[begin..begin + SAMPLE]);
                }
            }
        }
        hasher.finalize().to_hex().to_string()
    }
}

/// Number `i` of a random matrix with deviation 0.02 (uniform, splitmix64).
fn dummy_matrix(i: usize) -> bf16 {
    let mut z = (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    let unit = (z >> 40) as f32 / (1 << 23) as f32 - 1.0;
    bf16::from_f32(unit * 0.02 * 3f32.sqrt())
}

/// The weights of one layer and their shapes.
fn layer_tensors(c: &TargetConfig) -> Vec<(&'static str, Vec<usize>)> {
    let (h, q, kv, i) = (
        c.hidden_size,
        c.query_size(),
        c.key_size(),
        c.intermediate_size,
    );
    let mut tensors = vec![
        ("input_layernorm", vec![h]),
        ("self_attn.q_proj", vec![q, h]),
        ("self_attn.k_proj", vec![kv, h]),
        ("self_attn.v_proj", vec![kv, h]),
        ("self_attn.o_proj", vec![h, q]),
        ("post_attention_layernorm", vec![h]),
        ("mlp.gate_proj", vec![i, h]),
        ("mlp.up_proj", vec![i, h]),
        ("mlp.down_proj", vec![h, i]),
    ];
    if c.family == Family::Qwen3 {
        tensors.push(("self_attn.q_norm", vec![c.head_dim]));
        tensors.push(("self_attn.k_norm", vec![c.head_dim]));
    }
    tensors
}

fn encoding(dtype: Dtype) -> Option<Encoding> {
    match dtype {
        Dtype::F32 => Some(Encoding::F32),
        Dtype::F16 => Some(Encoding::F16),
        Dtype::BF16 => Some(Encoding::Bf16),
        _ => None,
    }
}

/// Adds one problem that names the first of `items`.
fn list(what: &str, items: &[String], problems: &mut Problems) {
    if items.is_empty() {
        return;
    }
    let named = items
        .iter()
        .take(NAMED)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    let more = match items.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    problems.add(format!("{what}: {named}{more}"));
}

fn read(path: &Path) -> Result<Vec<u8>, ModelError> {
    std::fs::read(path).map_err(|error| ModelError::Io {
        path: path.to_path_buf(),
        error,
    })
}

/// The files of tensors: those of the index, or the only one.
fn shard_paths(dir: &Path, problems: &mut Problems) -> Vec<PathBuf> {
    const INDEX: &str = "model.safetensors.index.json";
    let index = dir.join(INDEX);
    if index.exists() {
        let names = std::fs::read_to_string(&index)
            .map_err(|error| error.to_string())
            .and_then(|text| names_of_index(&text));
        let names = match names {
            Ok(names) => names,
            Err(problem) => {
                problems.add(format!("{INDEX}: {problem}"));
                return Vec::new();
            }
        };
        let (there, missing): (Vec<String>, Vec<String>) =
            names.into_iter().partition(|name| dir.join(name).exists());
        list(
            &format!("{INDEX} names files that are missing"),
            &missing,
            problems,
        );
        return there.iter().map(|name| dir.join(name)).collect();
    }
    let names: BTreeSet<String> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    let shards: Vec<&String> = names
        .iter()
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    let single = names.get("model.safetensors");
    match (single, shards.as_slice()) {
        (Some(name), _) => vec![dir.join(name)],
        (None, [name]) => vec![dir.join(name)],
        (None, []) => {
            let other = names.iter().find(|name| {
                [".bin", ".pt", ".pth", ".gguf"]
                    .iter()
                    .any(|end| name.ends_with(end))
            });
            problems.add(match other {
                Some(other) => format!(
                    "has no *.safetensors; {other} is of a format that is not read: convert it with Hugging Face transformers (save_pretrained)"
                ),
                None => "has no *.safetensors".to_string(),
            });
            Vec::new()
        }
        (None, several) => {
            problems.add(format!(
                "has {} *.safetensors but no {INDEX} that says which of them belong to the model",
                several.len()
            ));
            Vec::new()
        }
    }
}

/// The distinct file names of an index.
fn names_of_index(text: &str) -> Result<BTreeSet<String>, String> {
    let index: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let map = index
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or("has no object weight_map")?;
    map.values()
        .map(|name| match name.as_str() {
            Some(name) if !name.contains('/') && !name.is_empty() => Ok(name.to_string()),
            _ => Err(format!("weight_map names {name}, not a file of the folder")),
        })
        .collect()
}

/// Maps a file and notes its tensors.
fn open_shard(
    path: PathBuf,
    shards: &mut Vec<Shard>,
    tensors: &mut HashMap<String, Entry>,
    problems: &mut Problems,
) {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let map = match map(&path) {
        Ok(Some(map)) => map,
        Ok(None) => {
            let dir = path.parent().unwrap_or(Path::new("."));
            return problems.add(format!(
                "{name} is a Git LFS pointer, not the weights; run `git lfs pull` in {}",
                dir.display()
            ));
        }
        Err(error) => return problems.add(format!("{name}: {error}")),
    };
    let (header, metadata) = match SafeTensors::read_metadata(&map) {
        Ok(found) => found,
        Err(SafeTensorError::MetadataIncompleteBuffer | SafeTensorError::InvalidHeaderLength) => {
            return problems.add(format!(
                "{name} is truncated: its {} bytes are not what its header announces; download it again",
                map.len()
            ));
        }
        Err(error) => {
            return problems.add(format!(
                "{name} is no safetensors file ({error}); download it again"
            ));
        }
    };
    let data = 8 + header;
    let shard = shards.len();
    for (tensor, info) in metadata.tensors() {
        let entry = Entry {
            shard,
            dtype: info.dtype,
            shape: info.shape.clone(),
            begin: data + info.data_offsets.0,
            end: data + info.data_offsets.1,
        };
        if let Some(other) = tensors.insert(tensor.clone(), entry) {
            let other: &Shard = &shards[other.shard];
            problems.add(format!(
                "{name} and {} both hold {tensor}",
                other.path.display()
            ));
        }
    }
    shards.push(Shard { path, map });
}

/// The file in memory; `None` for a Git LFS pointer.
fn map(path: &Path) -> std::io::Result<Option<Mmap>> {
    const POINTER: &[u8] = b"version https://git-lfs";
    let mut file = File::open(path)?;
    let mut start = Vec::new();
    file.by_ref()
        .take(POINTER.len() as u64)
        .read_to_end(&mut start)?;
    if start == POINTER {
        return Ok(None);
    }
    // SAFETY: the map is read-only and private to this process; weights are not written while a run reads them,
    // as for every reader of memory-mapped checkpoints.
    unsafe { Mmap::map(&file) }.map(Some)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::engine::cpu::Cpu;
    use crate::model::testing::Made;

    fn folder() -> TempDir {
        tempfile::tempdir().unwrap()
    }

    fn refusal(dir: &Path) -> String {
        let error = TargetFiles::open(dir, false)
            .map(|_| ())
            .unwrap_err()
            .to_string();
        let start = format!("{}: ", dir.display());
        error
            .strip_prefix(&start)
            .unwrap_or_else(|| panic!("{error}"))
            .to_string()
    }

    #[test]
    fn one_file_and_shards_hold_the_same_model() {
        let made = Made::new(true, false);
        let (one, cut, bare) = (folder(), folder(), folder());
        made.write(one.path());
        made.write_config(cut.path());
        made.write_shard(cut.path(), "a.safetensors", Dtype::F32, |name| {
            name.contains("layers.1")
        });
        made.write_shard(cut.path(), "b.safetensors", Dtype::F32, |name| {
            !name.contains("layers.1")
        });
        let map: Value = made
            .tensors
            .keys()
            .map(|name| {
                let file = if name.contains("layers.1") { "a" } else { "b" };
                (name.clone(), Value::String(format!("{file}.safetensors")))
            })
            .collect::<serde_json::Map<_, _>>()
            .into();
        let index = serde_json::json!({ "metadata": {}, "weight_map": map });
        std::fs::write(
            cut.path().join("model.safetensors.index.json"),
            index.to_string(),
        )
        .unwrap();
        let mut without = Made::new(true, false);
        without.tensors = without
            .tensors
            .into_iter()
            .map(|(name, tensor)| {
                (
                    name.strip_prefix("model.").unwrap_or(&name).to_string(),
                    tensor,
                )
            })
            .collect();
        without.write_config(bare.path());
        without.write_shard(bare.path(), "weights.safetensors", Dtype::F32, |_| true);

        let engine = Cpu::new(1).unwrap();
        let load = |dir: &TempDir| {
            let files = TargetFiles::open(dir.path(), false).unwrap();
            let names =
                ["self_attn.q_proj", "self_attn.k_proj"].map(|part| files.layer_name(1, part));
            let stacked = files.stacked(&engine, &names).unwrap();
            (engine.download_half(stacked.view()).unwrap(), files.hash())
        };
        let of = |name: &str| {
            made.tensors[&format!("model.layers.1.self_attn.{name}.weight")]
                .1
                .clone()
        };
        let expected = [of("q_proj"), of("k_proj")].concat();
        let (one, cut, bare) = (load(&one), load(&cut), load(&bare));
        assert_eq!(one.0, expected);
        assert_eq!(one, cut, "shards do not matter, to the hash neither");
        assert_eq!(bare.0, expected);
    }

    #[test]
    fn half_precision_is_widened() {
        let made = Made::new(false, true);
        let engine = Cpu::new(1).unwrap();
        for dtype in [Dtype::F16, Dtype::BF16] {
            let dir = folder();
            made.write_config(dir.path());
            made.write_shard(dir.path(), "model.safetensors", dtype, |_| true);
            let files = TargetFiles::open(dir.path(), false).unwrap();
            let got = engine
                .download_half(files.embedding(&engine).unwrap().view())
                .unwrap();
            let norm = engine
                .download_float(files.final_norm(&engine).unwrap().view())
                .unwrap();
            for (got, name) in [
                (got, "model.embed_tokens.weight"),
                (norm, "model.norm.weight"),
            ] {
                for (got, want) in got.iter().zip(&made.tensors[name].1) {
                    assert!(
                        (got - want).abs() <= want.abs() / 200.0,
                        "{dtype}: {got} {want}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_vocabulary_is_the_embeddings_rows() {
        let dir = folder();
        let mut made = Made::new(false, true);
        made.add("model.embed_tokens.weight", &[48, 24]);
        made.write(dir.path());
        assert_eq!(
            TargetFiles::open(dir.path(), false)
                .unwrap()
                .config()
                .vocab_size,
            48
        );
    }

    #[test]
    fn the_hash_follows_every_number_and_the_config() {
        let hash = |made: &Made| {
            let dir = folder();
            made.write(dir.path());
            TargetFiles::open(dir.path(), false).unwrap().hash()
        };
        let mut made = Made::new(false, true);
        let first = hash(&made);
        assert_eq!(hash(&made), first);
        assert_eq!(first.len(), 64);
        made.tensors.get_mut("model.norm.weight").unwrap().1[3] += 1e-3;
        let second = hash(&made);
        assert_ne!(second, first);
        made.config["rms_norm_eps"] = serde_json::json!(1e-6);
        assert_ne!(hash(&made), second);
    }

    #[test]
    fn a_missing_head_needs_a_flag() {
        let dir = folder();
        let mut made = Made::new(false, false);
        made.tensors.remove("lm_head.weight");
        made.write(dir.path());
        assert_eq!(
            refusal(dir.path()),
            "has no lm_head.weight though tie_word_embeddings is false; --assume-tied uses the embedding as head"
        );
        let files = TargetFiles::open(dir.path(), true).unwrap();
        assert!(files.config().tie_word_embeddings);
        assert!(files.lm_head(&Cpu::new(1).unwrap()).unwrap().is_none());
    }

    #[test]
    fn folders_without_weights_are_refused() {
        assert!(refusal(Path::new("/nowhere")).starts_with("is no folder"));
        let dir = folder();
        let error = refusal(dir.path());
        assert!(
            error.contains("config.json: No such file") && error.contains("has no *.safetensors"),
            "{error}"
        );
        let made = Made::new(false, true);
        made.write_config(dir.path());
        std::fs::write(dir.path().join("pytorch_model.bin"), "x").unwrap();
        assert!(refusal(dir.path()).contains("pytorch_model.bin is of a format that is not read"));
        for name in ["a.safetensors", "b.safetensors"] {
            made.write_shard(dir.path(), name, Dtype::F32, |_| true);
        }
        assert!(
            refusal(dir.path()).contains("has 2 *.safetensors but no model.safetensors.index.json")
        );
    }

    #[test]
    fn all_missing_and_unfetched_shards_are_named() {
        let dir = folder();
        let mut made = Made::new(false, true);
        made.config["quantization_config"] = serde_json::json!({"quant_method": "gptq"});
        made.write_config(dir.path());
        let map = serde_json::json!({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"}});
        std::fs::write(
            dir.path().join("model.safetensors.index.json"),
            map.to_string(),
        )
        .unwrap();
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n";
        std::fs::write(dir.path().join("2.safetensors"), pointer).unwrap();
        let error = refusal(dir.path());
        assert!(error.starts_with("3 problems\n"), "{error}");
        assert!(error.contains("quantised (gptq)"), "{error}");
        assert!(
            error.contains("names files that are missing: 1.safetensors, 3.safetensors"),
            "{error}"
        );
        let hint = format!(
            "2.safetensors is a Git LFS pointer, not the weights; run `git lfs pull` in {}",
            dir.path().display()
        );
        assert!(error.contains(&hint), "{error}");
        for (text, says) in [
            ("{", "EOF"),
            ("{}", "has no object weight_map"),
            (
                r#"{"weight_map": {"a": "../x"}}"#,
                "not a file of the folder",
            ),
        ] {
            std::fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
            assert!(refusal(dir.path()).contains(says), "{text}");
        }
    }

    #[test]
    fn damaged_files_are_refused() {
        let dir = folder();
        let made = Made::new(false, true);
        made.write(dir.path());
        let path = dir.path().join("model.safetensors");
        let whole = std::fs::read(&path).unwrap();
        for (bytes, says) in [
            (&whole[..whole.len() - 1], "model.safetensors is truncated"),
            (&whole[..100], "model.safetensors is truncated"),
            (&whole[..3], "model.safetensors is no safetensors file"),
            (&b""[..], "model.safetensors"),
            (
                &b"PK\x03\x04 something else entirely"[..],
                "model.safetensors is no safetensors file",
            ),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = refusal(dir.path());
            assert!(error.contains(says) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn tensors_that_do_not_fit_the_config_are_refused() {
        let says = |change: &dyn Fn(&mut Made)| {
            let dir = folder();
            let mut made = Made::new(false, false);
            change(&mut made);
            made.write(dir.path());
            refusal(dir.path())
        };
        let error = says(&|made| {
            made.tensors.remove("model.layers.2.mlp.up_proj.weight");
        });
        assert_eq!(error, "lacks tensors: model.layers.2.mlp.up_proj.weight");
        let error = says(&|made| made.add("model.layers.0.self_attn.k_proj.weight", &[32, 24]));
        assert!(
            error.contains("another shape")
                && error.contains("k_proj.weight is [32, 24], not [16, 24]"),
            "{error}"
        );
        let error = says(&|made| made.add("lm_head.weight", &[41, 24]));
        assert!(
            error.contains("lm_head.weight is [41, 24], not [40, 24]"),
            "{error}"
        );
        let error = says(&|made| made.add("model.layers.0.self_attn.q_proj.bias", &[32]));
        assert!(
            error.contains("has biases") && error.contains("q_proj.bias"),
            "{error}"
        );
        let error = says(&|made| {
            made.tensors.retain(|name, _| !name.contains("mlp"));
        });
        assert!(error.ends_with("and 1 more"), "{error}");

        let dir = folder();
        let made = Made::new(false, true);
        made.write_config(dir.path());
        made.write_shard(dir.path(), "model.safetensors", Dtype::F64, |_| true);
        let error = refusal(dir.path());
        assert!(
            error.contains("are no float32, float16 or bfloat16: model.embed_tokens.weight (F64)"),
            "{error}"
        );
    }
}
