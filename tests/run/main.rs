//! The built launcher and its workers, from the outside: what a run leaves behind, how it ends, what it refuses.

mod best;
mod complete;
mod debugged;
mod decode;
mod full_disk;
mod generate;
mod hub;
mod killed;
mod memory;
mod records;
mod refused;
mod repeat;
mod resume;
mod stopped;
mod support;
mod watched;
