//! How numbers stand in a checkpoint's files.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// A floating-point format, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// 4 bytes.
    F32,
    /// 2 bytes, IEEE half precision.
    F16,
    /// 2 bytes, the upper half of a float32.
    Bf16,
}

impl Encoding {
    /// Bytes of one number.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Widens `bytes` to float32, exactly. `out` has a place for each number.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(
            bytes.len(),
            out.len() * self.bytes(),
            "bytes of the numbers"
        );
        match self {
            Self::F32 => {
                for (x, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *x = f32::from_le_bytes(*bytes);
                }
            }
            Self::Bf16 => {
                for (x, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *x = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
                }
            }
            Self::F16 => {
                // Files promise no alignment; the conversion of whole slices needs it.
                let mut aligned = [f16::ZERO; 1024];
                for (out, bytes) in out.chunks_mut(1024).zip(bytes.chunks(2048)) {
                    let aligned = &mut aligned[..out.len()];
                    for (x, bytes) in aligned.iter_mut().zip(bytes.as_chunks::<2>().0) {
                        *x = f16::from_le_bytes(*bytes);
                    }
                    aligned.convert_to_f32_slice(out);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_widened_exactly_from_any_address() {
        let values: Vec<f32> = (0..3000).map(|i| (i as f32 - 1500.0) / 256.0).collect();
        for encoding in [Encoding::F32, Encoding::F16, Encoding::Bf16] {
            let mut bytes = vec![0xAB];
            let mut expected = Vec::new();
            for &x in &values {
                match encoding {
                    Encoding::F32 => {
                        bytes.extend(x.to_le_bytes());
                        expected.push(x);
                    }
                    Encoding::F16 => {
                        bytes.extend(f16::from_f32(x).to_le_bytes());
                        expected.push(f16::from_f32(x).to_f32());
                    }
                    Encoding::Bf16 => {
                        bytes.extend(half::bf16::from_f32(x).to_le_bytes());
                        expected.push(half::bf16::from_f32(x).to_f32());
                    }
                }
            }
            let mut out = vec![0.0; values.len()];
            encoding.decode(&bytes[1..], &mut out);
            assert_eq!(out, expected, "{encoding:?}");
        }
    }
}
