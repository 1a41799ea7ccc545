//! Whether a tokenizer and a model belong together.

use super::{ChatTokenizer, DataError};

/// What a model says of its vocabulary.
#[derive(Debug, Clone)]
pub struct ModelVocabulary<'a> {
    /// Rows of the embedding tensor; the tensor decides, not `vocab_size`.
    pub embedding_rows: usize,
    /// `eos_token_id` of `config.json`: none, one or several.
    pub eos_ids: &'a [u32],
}

/// Compares a tokenizer with a model. More embedding rows than ids are fine (rows are padded to round
/// numbers), up to an eighth of all rows or 4,096.
///
/// # Errors
/// Ids without an embedding row; far fewer ids than rows; an end token of the model that is an
/// ordinary piece of text to the tokenizer.
pub fn check_vocabulary(
    tokenizer: &ChatTokenizer,
    model: &ModelVocabulary<'_>,
) -> Result<(), DataError> {
    let rows = model.embedding_rows;
    let ids = tokenizer.ids() as usize;
    if ids > rows {
        return Err(DataError::TokenizerTooLarge {
            tokenizer: tokenizer.path().to_owned(),
            highest: tokenizer.ids() - 1,
            rows,
        });
    }
    if rows - ids > (rows / 8).max(4096) {
        return Err(DataError::TokenizerTooSmall {
            tokenizer: tokenizer.path().to_owned(),
            ids: tokenizer.ids(),
            rows,
        });
    }
    for &id in model.eos_ids {
        if tokenizer.is_special(id) {
            continue;
        }
        return Err(DataError::TokenizerForeign {
            tokenizer: tokenizer.path().to_owned(),
            id,
            token: match tokenizer.token(id) {
                Some(token) => format!("{token:?}"),
                None => "no token".to_owned(),
            },
        });
    }
    Ok(())
}
