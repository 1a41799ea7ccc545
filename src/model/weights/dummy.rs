//! Random weights of a config's shape, for measuring speed without a model's files.

use std::collections::HashMap;
use std::path::Path;

use half::bf16;
use memmap2::MmapMut;
use safetensors::Dtype;

use super::shards::{Entry, Shard};
use super::{TargetFiles, read};
use crate::model::config::TargetConfig;
use crate::model::error::ModelError;

impl TargetFiles {
    /// A target of the shape of `dir`'s config.json with random weights, for measuring speed without its files:
    /// vectors are 1, matrices have the deviation that models start from, and all of them share one block of
    /// numbers.
    ///
    /// # Errors
    /// What is wrong with the config, or no memory for the largest matrix.
    pub fn dummy(dir: &Path) -> Result<Self, ModelError> {
        let mut config = TargetConfig::read(dir)?;
        config.fp8_block = None;
        let path = dir.join("config.json");
        let mut files = Self {
            dir: dir.to_path_buf(),
            config_text: read(&path)?,
            config,
            shards: Vec::new(),
            tensors: HashMap::new(),
            prefix: "",
            head: "",
        };
        files.find_names();
        let expected = files.expected();
        let bytes = |shape: &[usize]| 2 * shape.iter().product::<usize>();
        for (shard, number) in [matrix as fn(usize) -> bf16, |_| bf16::ONE]
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
            let map = map.make_read_only().map_err(io)?;
            files.shards.push(Shard::made(path.clone(), map));
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
}

/// Number `i` of a random matrix with deviation 0.02 (uniform, splitmix64).
fn matrix(i: usize) -> bf16 {
    let mut z = (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    let unit = (z >> 40) as f32 / (1 << 23) as f32 - 1.0;
    bf16::from_f32(unit * 0.02 * 3f32.sqrt())
}
