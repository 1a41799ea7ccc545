//! Packs the small fields of a state into a few words. One visit describes both directions, so writing and
//! reading cannot disagree.

/// Visits fields one after the other: a [`Writer`] takes their values, a [`Reader`] sets them.
pub trait Codec {
    /// A field of at most `width` bits.
    fn bits(&mut self, field: &mut u8, width: u32);

    /// A field of one bit.
    fn flag(&mut self, field: &mut bool) {
        let mut bit = u8::from(*field);
        self.bits(&mut bit, 1);
        *field = bit == 1;
    }

    /// An enumeration, by its place in the list of all its values.
    fn choice<T: Copy + PartialEq>(&mut self, field: &mut T, all: &[T]) {
        let place = all.iter().position(|value| value == field);
        let mut place = place.expect("the list holds every value of the enumeration") as u8;
        self.bits(&mut place, all.len().next_power_of_two().trailing_zeros());
        *field = all[place as usize];
    }
}

/// Fills a key of `N` words from the lowest bit up.
pub struct Writer<const N: usize> {
    key: [u64; N],
    full: usize,
    /// The word being filled, wide enough for a field that goes on in the next one.
    word: u128,
    bits: u32,
}

impl<const N: usize> Writer<N> {
    /// An empty key.
    pub fn new() -> Self {
        Self {
            key: [0; N],
            full: 0,
            word: 0,
            bits: 0,
        }
    }

    /// The filled key.
    pub fn finish(mut self) -> [u64; N] {
        if self.bits > 0 {
            self.key[self.full] = self.word as u64;
        }
        self.key
    }
}

impl<const N: usize> Codec for Writer<N> {
    #[inline(always)]
    fn bits(&mut self, field: &mut u8, width: u32) {
        assert!(
            u32::from(*field) < 1 << width,
            "a field needs more bits than it has"
        );
        self.word |= u128::from(*field) << self.bits;
        self.bits += width;
        if self.bits >= 64 {
            self.key[self.full] = self.word as u64;
            self.full += 1;
            self.word >>= 64;
            self.bits -= 64;
        }
    }
}

/// Takes the fields back out of a key.
pub struct Reader<'k> {
    key: &'k [u64],
    at: u32,
}

impl<'k> Reader<'k> {
    /// Reads `key` from its lowest bit.
    pub fn new(key: &'k [u64]) -> Self {
        Self { key, at: 0 }
    }
}

impl Codec for Reader<'_> {
    #[inline(always)]
    fn bits(&mut self, field: &mut u8, width: u32) {
        let (word, bit) = ((self.at / 64) as usize, self.at % 64);
        let mut value = self.key[word] >> bit;
        if bit + width > 64 {
            value |= self.key[word + 1] << (64 - bit);
        }
        *field = (value & ((1 << width) - 1)) as u8;
        self.at += width;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_what_was_written_across_words() {
        let mut writer = Writer::<2>::new();
        for value in 0..20_u8 {
            writer.bits(&mut { value }, 5);
            writer.flag(&mut { value % 3 == 0 });
        }
        let key = writer.finish();
        let mut reader = Reader::new(&key);
        for value in 0..20_u8 {
            let (mut read, mut flag) = (0, false);
            reader.bits(&mut read, 5);
            reader.flag(&mut flag);
            assert_eq!((read, flag), (value, value % 3 == 0));
        }
    }
}
