//! The two places where a chat template sees Python: `json.dumps` and `datetime.strftime`.
//!
//! Templates are written against `transformers`, whose `tojson` is plain `json.dumps` with
//! `ensure_ascii=False`; its separators and number forms are part of what the model was trained on.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// More would be a template's mistake, and take memory by the depth of what it shows.
const WIDEST_INDENT: usize = 256;

/// How [`dump_json`] lays out its text; the fields are `json.dumps`'s parameters.
#[derive(Debug, Clone)]
pub(super) struct JsonLayout {
    ensure_ascii: bool,
    sort_keys: bool,
    /// One level of indentation; without it all is one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

impl JsonLayout {
    /// Reads `ensure_ascii` (which may also be given by position), `indent`, `separators` and
    /// `sort_keys`.
    pub(super) fn from_kwargs(
        ensure_ascii: Option<bool>,
        kwargs: &Kwargs,
    ) -> Result<JsonLayout, Error> {
        let flag = |name: &str| -> Result<bool, Error> {
            Ok(kwargs
                .get::<Option<Value>>(name)?
                .is_some_and(|v| v.is_true()))
        };
        let indent = match kwargs.get::<Option<Value>>("indent")? {
            None => None,
            Some(v) if v.is_none() => None,
            Some(v) => Some(match v.as_str() {
                Some(text) => text.to_owned(),
                None => match usize::try_from(v)? {
                    width if width <= WIDEST_INDENT => " ".repeat(width),
                    width => {
                        let what = format!("tojson: an indent of {width} is too wide");
                        return Err(Error::new(ErrorKind::InvalidOperation, what));
                    }
                },
            }),
        };
        let separators = kwargs
            .get::<Option<Value>>("separators")?
            .filter(|v| !v.is_none());
        let (item_separator, key_separator) = match separators {
            Some(pair) => (
                pair.get_item_by_index(0)?.to_string(),
                pair.get_item_by_index(1)?.to_string(),
            ),
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
        };
        let layout = JsonLayout {
            ensure_ascii: flag("ensure_ascii")? || ensure_ascii == Some(true),
            sort_keys: flag("sort_keys")?,
            indent,
            item_separator,
            key_separator,
        };
        kwargs.assert_all_used()?;
        Ok(layout)
    }
}

/// `json.dumps(value)` in the given layout.
pub(super) fn dump_json(value: &Value, layout: &JsonLayout) -> Result<String, Error> {
    let mut out = String::new();
    write_json(&mut out, value, layout, 0)?;
    Ok(out)
}

fn write_json(
    out: &mut String,
    value: &Value,
    layout: &JsonLayout,
    depth: usize,
) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number if value.is_integer() => push(out, value),
        ValueKind::Number => out.push_str(&float_json(f64::try_from(value.clone())?)),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), layout),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_items(out, ('[', ']'), items.len(), layout, depth, |out, i| {
                write_json(out, &items[i], layout, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if layout.sort_keys {
                keys.sort();
            }
            write_items(out, ('{', '}'), keys.len(), layout, depth, |out, i| {
                write_string(out, &keys[i].to_string(), layout);
                out.push_str(&layout.key_separator);
                write_json(out, &value.get_item(&keys[i])?, layout, depth + 1)
            })?;
        }
        other => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("a value of type {other} is not JSON serializable"),
            ));
        }
    }
    Ok(())
}

fn write_items(
    out: &mut String,
    (open, close): (char, char),
    len: usize,
    layout: &JsonLayout,
    depth: usize,
    mut item: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let new_line = |out: &mut String, depth: usize| {
        if let Some(indent) = &layout.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    };
    out.push(open);
    for i in 0..len {
        if i > 0 {
            out.push_str(&layout.item_separator);
        }
        new_line(out, depth + 1);
        item(out, i)?;
    }
    if len > 0 {
        new_line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn write_string(out: &mut String, text: &str, layout: &JsonLayout) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (layout.ensure_ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    push(out, format_args!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// A float as `json.dumps` writes it.
fn float_json(x: f64) -> String {
    match x {
        x if x.is_nan() => "NaN".to_owned(),
        f64::INFINITY => "Infinity".to_owned(),
        f64::NEG_INFINITY => "-Infinity".to_owned(),
        x => float_str(x),
    }
}

/// A float as Python's `str` writes it: the shortest digits that read back the same, with an exponent
/// below 1e-4 and from 1e16 on.
pub(super) fn float_str(x: f64) -> String {
    if x.is_nan() {
        return "nan".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific
        .split_once('e')
        .expect("`{:e}` always writes an exponent");
    let exponent: i32 = exponent
        .parse()
        .expect("the exponent of an f64 is a small integer");
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.abs())
    } else if exponent < 0 {
        // `{:?}` turns to an exponent too early.
        format!("{x}")
    } else {
        format!("{x:?}")
    }
}

fn push(out: &mut String, value: impl std::fmt::Display) {
    write!(out, "{value}").expect("writing to a String does not fail");
}

/// `datetime.fromtimestamp(seconds).strftime(format)` in the machine's time zone.
///
/// # Errors
/// A format that holds a NUL byte or yields more than 4 KiB.
pub(super) fn strftime(format: &str, seconds: i64) -> Result<String, Error> {
    let refused = |why: &str| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now({format:?}): {why}"),
        )
    };
    // A trailing mark tells an empty result from a buffer that is too small.
    let marked =
        std::ffi::CString::new(format!("{format}.")).map_err(|_| refused("NUL in the format"))?;
    let time = nix::libc::time_t::from(seconds);
    let mut broken_down = std::mem::MaybeUninit::<nix::libc::tm>::zeroed();
    let mut text = vec![0u8; 4096];
    // SAFETY: `localtime_r` gets a valid time and room for one `tm`, which `zeroed` already makes a
    // valid value (integers and a pointer that may be null), so it is initialised even on failure;
    // `strftime` gets the buffer's true length and a NUL-terminated format.
    let written = unsafe {
        if nix::libc::localtime_r(&time, broken_down.as_mut_ptr()).is_null() {
            return Err(refused("the clock is out of range"));
        }
        let tm = broken_down.assume_init();
        nix::libc::strftime(text.as_mut_ptr().cast(), text.len(), marked.as_ptr(), &tm)
    };
    if written == 0 {
        return Err(refused("the result is too long"));
    }
    text.truncate(written - 1);
    String::from_utf8(text).map_err(|_| refused("the result is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dump(json: &str, kwargs: &[(&str, Value)]) -> String {
        let value: Value = serde_json::from_str(json).unwrap();
        let layout =
            JsonLayout::from_kwargs(None, &Kwargs::from_iter(kwargs.iter().cloned())).unwrap();
        dump_json(&value, &layout).unwrap()
    }

    #[test]
    fn json_is_what_python_writes() {
        let text = r#"{"b":[1,2.0,true,null,"é\n\u0001<"],"a":{},"c":[]}"#;
        assert_eq!(
            dump(text, &[]),
            "{\"b\": [1, 2.0, true, null, \"é\\n\\u0001<\"], \"a\": {}, \"c\": []}"
        );
        assert_eq!(
            dump(r#"{"b":[1,{"x":2}],"a":{}}"#, &[("indent", 2.into())]),
            "{\n  \"b\": [\n    1,\n    {\n      \"x\": 2\n    }\n  ],\n  \"a\": {}\n}"
        );
        assert_eq!(
            dump(
                r#"{"b":1,"a":"é🦇"}"#,
                &[("sort_keys", true.into()), ("ensure_ascii", true.into())]
            ),
            "{\"a\": \"\\u00e9\\ud83e\\udd87\", \"b\": 1}"
        );
        assert_eq!(
            dump("[1,2]", &[("separators", Value::from(vec![",", ":"]))]),
            "[1,2]"
        );
    }

    #[test]
    fn floats_are_what_python_writes() {
        for (x, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(float_str(x), text);
        }
        assert_eq!(float_json(f64::NEG_INFINITY), "-Infinity");
        assert_eq!(float_json(1e16), "1e+16");
    }

    #[test]
    fn dates_follow_the_format() {
        let text = strftime("%Y %%", 86_400 * 200).unwrap();
        assert_eq!(text, "1970 %");
        assert_eq!(strftime("", 0).unwrap(), "");
        assert!(strftime("a\0b", 0).is_err());
    }
}
