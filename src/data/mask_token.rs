//! Which embedding row stands for a masked slot.

use super::{ChatTokenizer, DataError, TokenSet};

/// What the choice depends on.
#[derive(Debug)]
pub struct MaskTokenRequest<'a> {
    /// `--mask-token-id`, if given.
    pub given: Option<u32>,
    /// The model's tokenizer.
    pub tokenizer: &'a ChatTokenizer,
    /// Rows of the target's embedding.
    pub embedding_rows: usize,
    /// Every set the run reads. They hold what the template writes, since each document is a render.
    pub sets: &'a [&'a TokenSet],
    /// Ids of further template output, for example of a generation prompt.
    pub template_ids: &'a [u32],
}

/// Chooses an unused row of the target's embedding: the given one; else the tokenizer's mask token;
/// else the first row past the tokenizer's ids; else the lowest special token that is not bos, eos,
/// pad or unk; never an id that occurs in the data or in the template's output.
///
/// # Errors
/// A given id that is out of range or occurs in the data; no free row.
pub fn choose_mask_token(request: &MaskTokenRequest<'_>) -> Result<u32, DataError> {
    let rows = request.embedding_rows;
    let occurs = |id: u32| {
        request.template_ids.contains(&id) || request.sets.iter().any(|s| s.contains_id(id))
    };
    if let Some(id) = request.given {
        return match id {
            id if id as usize >= rows => Err(DataError::MaskTokenOutOfRange { id, rows }),
            id if occurs(id) => Err(DataError::MaskTokenOccurs { id }),
            id => Ok(id),
        };
    }
    let tokenizer = request.tokenizer;
    let named =
        ["bos_token", "eos_token", "pad_token", "unk_token"].map(|name| tokenizer.special_id(name));
    let special = tokenizer
        .special_ids()
        .into_iter()
        .filter(|&id| !named.contains(&Some(id)));
    tokenizer
        .special_id("mask_token")
        .into_iter()
        .chain([tokenizer.ids()])
        .chain(special)
        .find(|&id| (id as usize) < rows && !occurs(id))
        .ok_or(DataError::NoMaskToken { rows })
}
