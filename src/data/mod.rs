//! Conversations to token ids and loss masks, and from there to work units in a known order.
//!
//! [`prepare`] reads JSON lines of conversations, renders each through the model's chat template,
//! tokenises the render and finds which tokens the assistant wrote. The result is a [`TokenSet`]: one
//! file, keyed by everything it was made from, that all processes of a run map. [`split`] holds
//! documents out for evaluation, [`units`] packs the others and orders them by (seed, epoch).
//!
//! Rows that cannot be used are skipped and counted by reason; a file, tokenizer or template that
//! cannot be used is a [`DataError`].

mod agree;
mod columns;
pub mod demo;
mod error;
mod files;
mod jinja;
mod mask;
mod mask_token;
mod parquet;
mod prepare;
mod prompts;
mod python;
mod records;
mod report;
mod row_tokens;
mod rows;
mod set;
pub mod split;
pub mod statistics;
mod template;
mod tokenizer;
pub mod units;
mod weights;
mod workload;

pub use agree::{ModelVocabulary, check_vocabulary};
pub use error::DataError;
pub use files::is_lfs_pointer;
pub use mask_token::{MaskTokenRequest, choose_mask_token};
pub use prepare::{
    Inspection, PrepareRequest, Prepared, Progress, RowTokens, TextOptions, check, check_files,
    default_cache_dir, encode_row, inspect, prepare,
};
pub use prompts::{Conversation, Prompts, read_prompts};
pub use report::{DataReport, EXAMPLES, SkipCount, SkipExample, SkipReason};
pub use set::{Document, DocumentInfo, TokenSet};
pub use template::{ChatTemplate, parse_template_kwarg};
pub use tokenizer::{ChatTokenizer, Tokens};
pub use workload::{Workload, WorkloadSpec};

/// Positions p with `mask[p] == 1 && mask[p + 1] == 1`, where an anchor may stand: the anchor itself
/// and the token its first slot predicts are both supervised.
pub fn eligible(mask: &[u8]) -> u32 {
    mask.windows(2).filter(|w| w[0] == 1 && w[1] == 1).count() as u32
}
