//! Any bytes as a target's config.json.
#![no_main]

#[allow(dead_code, reason = "each target calls one of the entries")]
#[path = "../../tests/fuzz_entries/mod.rs"]
mod fuzz_entries;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_entries::config(bytes));
