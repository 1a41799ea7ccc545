//! Reading golden files: a directory of safetensors and JSON files made by the reference.
//!
//! The directory is `tests/golden`, where every file must be present, or the one that `GOLDEN_DIR` names, where
//! an absent file is skipped aloud.

mod chat;
mod families;

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Where a golden file is; `None` (and a line on stderr) if `GOLDEN_DIR` has none of that name.
pub fn path(name: &str) -> Option<PathBuf> {
    let (directory, given) = match std::env::var_os("GOLDEN_DIR") {
        Some(directory) => (PathBuf::from(directory), true),
        None => (
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"),
            false,
        ),
    };
    let path = directory.join(name);
    if path.is_file() {
        return Some(path);
    }
    assert!(given, "{} is missing from tests/golden", name);
    skipped(&format!("{name} is not in {}", directory.display()));
    None
}

/// Says that a test checks nothing, past the harness, which hides what passing tests print.
pub fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// A golden JSON file.
pub fn json(name: &str) -> Option<Value> {
    let text = std::fs::read(path(name)?).unwrap();
    Some(serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{name}: {e}")))
}

/// One tensor, as the numbers it holds.
#[derive(Clone, Debug)]
pub struct Golden {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Row-major values; integers are exact up to 2^53.
    pub values: Vec<f64>,
}

impl Golden {
    /// As float32, which loses nothing of a float32 tensor.
    pub fn f32(&self) -> Vec<f32> {
        self.values.iter().map(|&v| v as f32).collect()
    }

    /// As ids or positions.
    pub fn u32(&self) -> Vec<u32> {
        self.values.iter().map(|&v| v as u32).collect()
    }
}

/// A golden safetensors file: its tensors, and its metadata parsed as JSON.
pub struct GoldenFile {
    name: String,
    tensors: HashMap<String, Golden>,
    metadata: HashMap<String, Value>,
}

impl GoldenFile {
    /// Reads the golden file of that name whole.
    pub fn open(name: &str) -> Option<Self> {
        Some(Self::read(&path(name)?))
    }

    /// Reads a file of the same form whole.
    pub fn read(path: &Path) -> Self {
        let name = path.display();
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{name}: {e}"));
        let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().clone().unwrap_or_default();
        let parse = |text: &str| {
            serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_string()))
        };
        let tensors = file.iter().map(|(name, view)| {
            let golden = Golden {
                shape: view.shape().to_vec(),
                values: numbers(view.dtype(), view.data()),
            };
            (name.to_string(), golden)
        });
        Self {
            name: name.to_string(),
            tensors: tensors.collect(),
            metadata: metadata
                .iter()
                .map(|(key, text)| (key.clone(), parse(text)))
                .collect(),
        }
    }

    /// A tensor by name.
    pub fn get(&self, tensor: &str) -> &Golden {
        self.tensors
            .get(tensor)
            .unwrap_or_else(|| panic!("{} has no tensor {tensor}", self.name))
    }

    /// Whether it holds a tensor.
    pub fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// The tensors whose names begin with `prefix`, without it, by name.
    pub fn with_prefix(&self, prefix: &str) -> Vec<(String, &Golden)> {
        let mut found: Vec<_> = self
            .tensors
            .iter()
            .filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?.to_string(), tensor)))
            .collect();
        found.sort_by(|a, b| a.0.cmp(&b.0));
        found
    }

    /// A metadata entry that holds JSON.
    pub fn meta(&self, key: &str) -> &Value {
        self.metadata
            .get(key)
            .unwrap_or_else(|| panic!("{} has no metadata {key}", self.name))
    }
}

fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    fn decode<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes
            .as_chunks::<N>()
            .0
            .iter()
            .map(|&b| number(b))
            .collect()
    }
    match dtype {
        Dtype::F64 => decode(bytes, f64::from_le_bytes),
        Dtype::F32 => decode(bytes, |b| f64::from(f32::from_le_bytes(b))),
        Dtype::BF16 => decode(bytes, |b| half::bf16::from_le_bytes(b).to_f64()),
        Dtype::I64 => decode(bytes, |b| i64::from_le_bytes(b) as f64),
        Dtype::I32 => decode(bytes, |b| f64::from(i32::from_le_bytes(b))),
        Dtype::U8 | Dtype::BOOL => decode(bytes, |[b]| f64::from(b)),
        other => panic!("golden tensors are not {other:?}"),
    }
}

/// ‖a − b‖ / ‖b‖.
pub fn relative(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(&a, &b)| f64::from(a) - b));
    let reference = norm(&mut b.iter().copied());
    if difference == 0.0 {
        return 0.0;
    }
    difference / reference
}

/// The cosine of the angle between two tensors.
pub fn cosine(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let dot = |x: &mut dyn Iterator<Item = (f64, f64)>| x.map(|(x, y)| x * y).sum::<f64>();
    let a = || a.iter().map(|&a| f64::from(a));
    let b = || b.iter().copied();
    let lengths = dot(&mut a().zip(a())) * dot(&mut b().zip(b()));
    if lengths == 0.0 {
        return 1.0;
    }
    dot(&mut a().zip(b())) / lengths.sqrt()
}

/// The [`relative`] difference of the median row of `cols` values, of the row that nine in ten are better than, and
/// of the worst row.
pub fn row_spread(a: &[f32], b: &[f64], cols: usize) -> [f64; 3] {
    assert_eq!(a.len(), b.len());
    let rows = a.chunks(cols).zip(b.chunks(cols));
    let mut errors: Vec<f64> = rows.map(|(a, b)| relative(a, b)).collect();
    errors.sort_by(f64::total_cmp);
    let rank = |tenths: usize| (errors.len() * tenths / 10).min(errors.len() - 1);
    [5, 9, 10].map(|tenths| errors[rank(tenths)])
}
