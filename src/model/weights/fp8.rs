//! Matrices of 8-bit floating-point numbers (E4M3, arXiv 2209.05433) with a scale for each block, as DeepSeek-V3
//! (arXiv 2412.19437) and the FP8 forms of Qwen3 are stored.

/// Decodes rows of `width` numbers that lie in one row of blocks: `scales[j]` multiplies columns
/// `j · cols..(j + 1) · cols`. Overwrites `values`.
pub(super) fn decode(
    bytes: &[u8],
    scales: &[f32],
    [width, cols]: [usize; 2],
    values: &mut Vec<f32>,
) {
    let table: [f32; 256] = std::array::from_fn(|byte| number(byte as u8));
    values.clear();
    values.reserve(bytes.len());
    for row in bytes.chunks_exact(width) {
        for (bytes, scale) in row.chunks(cols).zip(scales) {
            values.extend(bytes.iter().map(|&byte| table[usize::from(byte)] * scale));
        }
    }
}

/// A sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities, all bits but the sign set is NaN.
fn number(byte: u8) -> f32 {
    let sign = if byte >> 7 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa * 2f32.powi(-9),
        _ => sign * (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_format() {
        for (byte, want) in [
            (0x00, 0.0),
            (0x01, 2f32.powi(-9)),
            (0x08, 2f32.powi(-6)),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0xb8, -1.0),
            (0x7e, 448.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(number(byte), want, "{byte:#x}");
        }
        assert!(number(0x7f).is_nan() && number(0xff).is_nan());
    }

    #[test]
    fn each_block_has_its_scale_and_the_last_may_be_cut() {
        let mut values = vec![9.0];
        let one = 0x38;
        decode(&[one; 10], &[2.0, 3.0, 5.0], [5, 2], &mut values);
        assert_eq!(values, [2.0, 2.0, 3.0, 3.0, 5.0, 2.0, 2.0, 3.0, 3.0, 5.0]);
    }
}
