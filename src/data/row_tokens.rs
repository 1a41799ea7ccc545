//! Rows that were tokenised elsewhere: `{input_ids, loss_mask}`, and the same by other names.

use minijinja::Value;

use super::report::{Skip, SkipReason};
use super::rows::{Row, field, has_key, items};

const IDS: &str = "input_ids";
/// Names of a mask that is 1 where a token is supervised.
const MASKS: [&str; 3] = ["loss_mask", "assistant_masks", "completion_mask"];
/// Ids again, with [`IGNORED`] where a token is not supervised. Not shifted: position p says what token p is.
const LABELS: &str = "labels";
const IGNORED: i64 = -100;

/// The key that says what is supervised, if the row has one beside its ids.
pub(super) fn keys(row: &Value) -> Option<&'static str> {
    let mask = MASKS.into_iter().chain([LABELS]);
    has_key(row, IDS).then(|| mask.into_iter().find(|k| has_key(row, k)))?
}

/// Whether a key of this name is read here.
pub(super) fn is_known_key(name: &str) -> bool {
    name == IDS || name == LABELS || MASKS.contains(&name)
}

/// Reads such a row. Whether the ids are a tokenizer's is not looked at here.
pub(super) fn read(row: &Value) -> Result<Row, Skip> {
    let bad = |what: String| Skip::new(SkipReason::BadTokens, what);
    let key = keys(row).ok_or_else(|| bad(format!("no `{IDS}`")))?;
    let numbers = |key: &str| -> Result<Vec<i64>, Skip> {
        let list = field(row, key).ok_or_else(|| bad(format!("`{key}` is null")))?;
        let list = items(&list, &format!("`{key}`"))?;
        let number = |(at, value): (usize, &Value)| {
            i64::try_from(value.clone())
                .map_err(|_| bad(format!("`{key}` holds {value} at position {at}")))
        };
        list.iter().enumerate().map(number).collect()
    };
    let ids = numbers(IDS)?;
    let marks = numbers(key)?;
    if ids.is_empty() {
        return Err(Skip::new(SkipReason::Empty, "no tokens"));
    }
    if ids.len() != marks.len() {
        return Err(bad(format!(
            "{} `{IDS}` but {} `{key}`",
            ids.len(),
            marks.len()
        )));
    }
    let id = |(at, &id): (usize, &i64)| {
        u32::try_from(id).map_err(|_| bad(format!("`{IDS}` holds {id} at position {at}")))
    };
    let mark = |(at, (&mark, &id)): (usize, (&i64, &i64))| match (key, mark) {
        (LABELS, IGNORED) => Ok(0),
        (LABELS, mark) if mark == id => Ok(1),
        (LABELS, mark) => Err(bad(format!(
            "`{LABELS}` holds {mark} at position {at}, neither {IGNORED} nor the token there ({id})"
        ))),
        (_, 0 | 1) => Ok(mark as u8),
        _ => Err(bad(format!(
            "`{key}` holds {mark} at position {at}, neither 0 nor 1"
        ))),
    };
    Ok(Row::Tokens {
        mask: marks
            .iter()
            .zip(&ids)
            .enumerate()
            .map(mark)
            .collect::<Result<_, _>>()?,
        ids: ids.iter().enumerate().map(id).collect::<Result<_, _>>()?,
    })
}
