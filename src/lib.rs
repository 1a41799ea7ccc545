//! Slipstream trains the small drafter models of speculative decoding, online: target processes publish
//! hidden states into a shared-memory ring, drafter processes take them, train and all-reduce gradients.
//!
//! The modules follow the data: conversations ([`data`]) become units, a target ([`model`], on an
//! [`engine`]) prefills them into a slot ([`shm`]), a drafter takes the slot and makes a step ([`train`],
//! [`collective`]), and [`eval`] decodes with the result. [`launch`], [`control`] and [`worker`] are the
//! processes around that; [`monitor`] shows what they do.

pub mod collective;
pub mod control;
pub mod data;
pub mod engine;
pub mod eval;
pub mod launch;
pub mod model;
pub mod monitor;
pub mod shm;
pub mod train;
pub mod worker;
