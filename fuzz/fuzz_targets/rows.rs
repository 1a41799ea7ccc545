//! Any bytes as a record of a data file.
#![no_main]

#[allow(dead_code, reason = "each target calls one of the entries")]
#[path = "../../tests/fuzz_entries/mod.rs"]
mod fuzz_entries;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_entries::row(bytes));
