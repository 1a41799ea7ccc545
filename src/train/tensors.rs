//! Safetensors files, written tensor by tensor and read tensor by tensor, so that no file is ever whole in memory.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

/// Elements converted at a time.
const PIECE: usize = 1 << 16;

/// A tensor to write: float32 values, stored as they are or rounded to bf16.
pub struct Source<'a> {
    /// Name in the file.
    pub name: String,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// Row-major values.
    pub values: &'a [f32],
}

/// Writes a safetensors file; `dtype` is F32 or BF16, rounded to nearest even.
///
/// # Errors
/// The writer's.
pub fn write(out: &mut dyn Write, sources: &[Source<'_>], dtype: Dtype) -> io::Result<()> {
    let size = dtype.bitsize() / 8;
    let mut end = 0;
    let infos = sources
        .iter()
        .map(|s| {
            let begin = end;
            end += s.values.len() * size;
            let info = TensorInfo {
                dtype,
                shape: s.shape.clone(),
                data_offsets: (begin, end),
            };
            (s.name.clone(), info)
        })
        .collect();
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let metadata = Metadata::new(Some(format), infos).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    let mut bytes = Vec::with_capacity(PIECE * size);
    for piece in sources.iter().flat_map(|s| s.values.chunks(PIECE)) {
        bytes.clear();
        match dtype {
            Dtype::BF16 => piece
                .iter()
                .for_each(|&v| bytes.extend(bf16::from_f32(v).to_le_bytes())),
            _ => piece.iter().for_each(|v| bytes.extend(v.to_le_bytes())),
        }
        out.write_all(&bytes)?;
    }
    Ok(())
}

/// Why a tensor could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TensorFileError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no whole safetensors file.
    #[error("{} is no whole safetensors file: {what}; copy it again", path.display())]
    Broken {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The tensor is not there or not as expected.
    #[error("{}: tensor {name} {what}", path.display())]
    Tensor {
        /// Which file.
        path: PathBuf,
        /// Which tensor.
        name: String,
        /// What is wrong with it.
        what: String,
    },
}

/// A safetensors file that is open for reading.
pub struct TensorFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    data: u64,
}

impl TensorFile {
    /// Opens a file and reads its header; the data must be as long as the header says.
    pub fn open(path: &Path) -> Result<Self, TensorFileError> {
        let io = |source| TensorFileError::Io {
            path: path.to_path_buf(),
            source,
        };
        let broken = |what: String| TensorFileError::Broken {
            path: path.to_path_buf(),
            what,
        };
        let file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let mut size = [0; 8];
        if length < 8 {
            return Err(broken(format!("it has {length} bytes")));
        }
        file.read_exact_at(&mut size, 0).map_err(io)?;
        let header_size = u64::from_le_bytes(size);
        if header_size > length - 8 {
            return Err(broken(format!(
                "its header claims {header_size} of {length} bytes"
            )));
        }
        let mut header = vec![0; header_size as usize];
        file.read_exact_at(&mut header, 8).map_err(io)?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|e| broken(e.to_string()))?;
        let data = 8 + header_size;
        let expected = data + metadata.data_len() as u64;
        if length != expected {
            return Err(broken(format!(
                "it has {length} bytes instead of {expected}"
            )));
        }
        Ok(Self {
            path: path.to_path_buf(),
            file,
            metadata,
            data,
        })
    }

    /// Names in the file, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names = self.metadata.offset_keys();
        names.sort();
        names
    }

    /// Reads a tensor of the given shape as float32; F32, BF16 and F16 are understood.
    pub fn read(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, TensorFileError> {
        let wrong = |what: String| TensorFileError::Tensor {
            path: self.path.clone(),
            name: name.to_string(),
            what,
        };
        let info = self
            .metadata
            .info(name)
            .ok_or_else(|| wrong("is missing".to_string()))?;
        if info.shape != shape {
            return Err(wrong(format!("is {:?}, expected {shape:?}", info.shape)));
        }
        let (begin, end) = info.data_offsets;
        let mut bytes = vec![0; end - begin];
        self.file
            .read_exact_at(&mut bytes, self.data + begin as u64)
            .map_err(|source| TensorFileError::Io {
                path: self.path.clone(),
                source,
            })?;
        let values = match info.dtype {
            Dtype::F32 => numbers(&bytes, f32::from_le_bytes),
            Dtype::BF16 => numbers(&bytes, |b| bf16::from_le_bytes(b).to_f32()),
            Dtype::F16 => numbers(&bytes, |b| f16::from_le_bytes(b).to_f32()),
            other => return Err(wrong(format!("has dtype {other:?}, expected a float"))),
        };
        Ok(values)
    }
}

/// Decodes little-endian numbers of `N` bytes.
fn numbers<const N: usize>(bytes: &[u8], decode: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    let (numbers, _) = bytes.as_chunks::<N>();
    numbers.iter().map(|&number| decode(number)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(values: &[f32]) -> Vec<Source<'_>> {
        vec![
            Source {
                name: "b".into(),
                shape: vec![2, 3],
                values: &values[..6],
            },
            Source {
                name: "a".into(),
                shape: vec![2],
                values: &values[6..8],
            },
        ]
    }

    #[test]
    fn files_are_read_as_written_and_by_the_safetensors_crate() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let values: Vec<f32> = (0..8).map(|i| 1.0 + i as f32 / 1000.0).collect();
        for (dtype, tolerance) in [(Dtype::F32, 0.0), (Dtype::BF16, 0.004)] {
            let mut bytes = Vec::new();
            write(&mut bytes, &sources(&values), dtype).unwrap();
            let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(theirs.tensor("b").unwrap().shape(), [2, 3]);
            assert_eq!(theirs.tensor("b").unwrap().dtype(), dtype);
            std::fs::write(&path, &bytes).unwrap();
            let file = TensorFile::open(&path).unwrap();
            assert_eq!(file.names(), ["a", "b"]);
            let mut read = file.read("b", &[2, 3]).unwrap();
            read.extend(file.read("a", &[2]).unwrap());
            for (a, b) in read.iter().zip(&values) {
                assert!((a - b).abs() <= tolerance, "{a} {b}");
            }
            for (name, shape, word) in [("c", [2, 3], "missing"), ("b", [3, 2], "expected [3, 2]")]
            {
                let error = file.read(name, &shape).unwrap_err().to_string();
                assert!(error.contains(word), "{error}");
            }
        }
    }

    #[test]
    fn every_truncation_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let mut bytes = Vec::new();
        write(&mut bytes, &sources(&[0.0; 8]), Dtype::F32).unwrap();
        for length in 0..bytes.len() {
            std::fs::write(&path, &bytes[..length]).unwrap();
            assert!(TensorFile::open(&path).is_err(), "{length} bytes");
        }
        std::fs::write(&path, &bytes).unwrap();
        assert!(TensorFile::open(&path).is_ok());
    }
}
