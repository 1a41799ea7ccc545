//! Any bytes as the text of a chat template.
#![no_main]

#[allow(dead_code, reason = "each target calls one of the entries")]
#[path = "../../tests/fuzz_entries/mod.rs"]
mod fuzz_entries;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_entries::template(bytes));
