//! TensorBoard event files: TFRecord framing around `Event` messages in protocol buffers, as TensorBoard's
//! `event.proto` and `summary.proto` number their fields.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// One event file.
#[derive(Debug)]
pub struct EventFile {
    file: File,
}

impl EventFile {
    /// A new one in `folder`, which is made if need be. Each file of a folder adds to the same run, so a resumed
    /// run goes on in one of its own.
    ///
    /// # Errors
    /// A folder or file that cannot be made.
    pub fn create(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let seconds = now().floor();
        let name = format!("events.out.tfevents.{seconds}.{}", std::process::id());
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(folder.join(name))?;
        let mut events = Self { file };
        let mut version = Message::default();
        version.double(1, now());
        version.bytes(3, b"brain.Event:2");
        events.write(&version.0)?;
        Ok(events)
    }

    /// Adds values of one step, in one write.
    ///
    /// # Errors
    /// A write that fails.
    pub fn add(&mut self, step: u64, values: &[(String, f64)]) -> io::Result<()> {
        let mut summary = Message::default();
        for (tag, value) in values {
            let mut one = Message::default();
            one.bytes(1, tag.as_bytes());
            one.float(2, *value as f32);
            summary.bytes(1, &one.0);
        }
        let mut event = Message::default();
        event.double(1, now());
        event.varint(2, step);
        event.bytes(5, &summary.0);
        self.write(&event.0)
    }

    /// One TFRecord: length, its checksum, the bytes, their checksum.
    fn write(&mut self, event: &[u8]) -> io::Result<()> {
        let length = (event.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(event.len() + 16);
        record.extend_from_slice(&length);
        record.extend_from_slice(&masked(crc32c(&length)).to_le_bytes());
        record.extend_from_slice(event);
        record.extend_from_slice(&masked(crc32c(event)).to_le_bytes());
        self.file.write_all(&record)
    }
}

/// Seconds of the wall clock.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// A protocol-buffers message that is being written.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u64, wire: u64) {
        self.raw_varint(field << 3 | wire);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.key(field, 2);
        self.raw_varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend_from_slice(&value.to_le_bytes());
    }
}

/// CRC-32C (Castagnoli, RFC 3720), bit by bit: event files are small.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            let carry = crc & 1;
            crc >>= 1;
            if carry == 1 {
                crc ^= 0x82f6_3b78;
            }
        }
    }
    !crc
}

/// A checksum as TFRecord stores it, so that a checksum of data with checksums in it keeps its strength.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&rising), 0x46dd_794e);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_file_is_whole_records_with_the_values_in_them() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(&folder.path().join("tb")).unwrap();
        events
            .add(
                300,
                &[("train/loss".to_owned(), 1.5), ("x".to_owned(), -2.0)],
            )
            .unwrap();
        let entry = fs::read_dir(folder.path().join("tb"))
            .unwrap()
            .next()
            .unwrap()
            .unwrap();
        assert!(
            entry
                .file_name()
                .to_string_lossy()
                .starts_with("events.out.tfevents.")
        );
        let bytes = fs::read(entry.path()).unwrap();
        let mut at = 0;
        let mut records = Vec::new();
        while at < bytes.len() {
            let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
            assert_eq!(number(at + 8), masked(crc32c(&bytes[at..at + 8])));
            let event = &bytes[at + 12..at + 12 + length];
            assert_eq!(number(at + 12 + length), masked(crc32c(event)));
            records.push(event.to_vec());
            at += length + 16;
        }
        assert_eq!(at, bytes.len());
        assert_eq!(records.len(), 2);
        assert!(records[0].ends_with(b"\x1a\x0dbrain.Event:2"));
        // Step 300 as a varint in field 2, and both values as float32 behind their tags.
        let second = &records[1];
        assert_eq!(&second[9..12], &[0x10, 0xac, 0x02]);
        let find = |part: &[u8]| second.windows(part.len()).any(|window| window == part);
        assert!(find(b"\x0a\x0atrain/loss\x15\x00\x00\xc0\x3f"));
        assert!(find(b"\x0a\x01x\x15\x00\x00\x00\xc0"));
    }
}
