//! The Jinja2 that chat templates expect, on minijinja.
//!
//! `transformers` compiles templates with blocks trimmed, loop controls, `tojson` as `json.dumps`,
//! `raise_exception` and `strftime_now`, and templates call Python's methods. Here is what minijinja
//! lacks or does otherwise; what is left (`%` on strings, `varargs`, unary plus) fails with an error
//! instead of rendering something else, but comparing values of unlike types does not raise.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value, escape_formatter};
use minijinja_contrib::pycompat;

use super::python::{JsonLayout, dump_json, float_str, strftime};

/// An environment as `transformers` sets it up. `date_used` is set when a template asks for the date.
pub(super) fn environment(date_used: Arc<AtomicBool>) -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .expect("the delimiters are the usual ones");
    env.set_syntax(syntax);
    minijinja_contrib::add_to_environment(&mut env);
    env.set_unknown_method_callback(method);
    env.set_formatter(|out, state, value| match as_float(value) {
        Some(x) => out.write_str(&float_str(x)).map_err(Error::from),
        None => escape_formatter(out, state, value),
    });
    env.add_filter("string", string);
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("tojson", tojson);
    env.add_filter("fromjson", fromjson);
    env.add_test("iterable", is_iterable);
    env.add_test("sequence", is_iterable);
    env.add_function("raise_exception", raise_exception);
    // One instant for all renders of a run: a conversation's beginning must render as it does in the
    // whole, also around midnight.
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs() as i64);
    env.add_function("strftime_now", move |format: &str| {
        date_used.store(true, Ordering::Relaxed);
        strftime(format, now)
    });
    env
}

fn refuse(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

fn as_float(value: &Value) -> Option<f64> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok())?
}

/// Python's None is not iterable, and its strings and dicts are sequences.
fn is_iterable(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), Iterable | Map | Seq | String | Undefined)
}

fn string(state: &State, value: &Value) -> Result<Value, Error> {
    match as_float(value) {
        Some(x) => Ok(Value::from(float_str(x))),
        None => minijinja::filters::string(state, value),
    }
}

/// `default(value, default_value="", boolean=False)`.
fn default(
    value: Value,
    default_value: Option<Value>,
    boolean: Option<bool>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let named_value: Option<Value> = kwargs.get("default_value")?;
    let named_boolean: Option<bool> = kwargs.get("boolean")?;
    kwargs.assert_all_used()?;
    let boolean = boolean.or(named_boolean).unwrap_or(false);
    if value.is_undefined() || (boolean && !value.is_true()) {
        return Ok(default_value
            .or(named_value)
            .unwrap_or_else(|| Value::from("")));
    }
    Ok(value)
}

fn tojson(value: Value, ensure_ascii: Option<bool>, kwargs: Kwargs) -> Result<String, Error> {
    let layout = JsonLayout::from_kwargs(ensure_ascii, &kwargs)?;
    dump_json(&value, &layout)
}

fn fromjson(text: &str) -> Result<Value, Error> {
    serde_json::from_str(text).map_err(|e| refuse(format!("fromjson: not JSON: {e}")))
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(refuse(message))
}

/// Python's methods: those of minijinja's own list, and a few that templates use besides.
fn method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return match (value.kind(), method) {
            (ValueKind::Seq, "index") => index_of(value, args),
            _ => pycompat::unknown_method_callback(state, value, method, args),
        };
    };
    let tuple = |parts: [&str; 3]| Value::from(Tuple::from(parts.map(Value::from)));
    match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" => {
            let (mark,): (&str,) = from_args(args)?;
            Ok(match text.split_once(mark) {
                Some((before, after)) => tuple([before, mark, after]),
                None => tuple([text, "", ""]),
            })
        }
        "rpartition" => {
            let (mark,): (&str,) = from_args(args)?;
            Ok(match text.rsplit_once(mark) {
                Some((before, after)) => tuple([before, mark, after]),
                None => tuple(["", "", text]),
            })
        }
        "rsplit" => {
            let (mark, most): (&str, Option<i64>) = from_args(args)?;
            let mut parts: Vec<&str> = match most.and_then(|n| usize::try_from(n).ok()) {
                Some(n) => text.rsplitn(n.saturating_add(1), mark).collect(),
                None => text.rsplit(mark).collect(),
            };
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        _ => pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// `list.index(item)`, which raises where there is no such item.
fn index_of(list: &Value, args: &[Value]) -> Result<Value, Error> {
    let (item,): (&Value,) = from_args(args)?;
    let place = list.try_iter()?.position(|other| other == *item);
    place
        .map(Value::from)
        .ok_or_else(|| refuse(format!("{item} is not in list")))
}

/// Template text as Jinja2 would take it: every line end is one newline, and `{% generation %}`,
/// which marks the assistant's text for `transformers`, becomes an empty `with`, which keeps its
/// whitespace control and its scope (here spans come from render boundaries).
pub(super) fn as_jinja_reads(text: &str) -> String {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let replaced = [("endgeneration", "endwith"), ("generation", "with")]
            .into_iter()
            .find_map(|(word, by)| replace_tag(tag, word, by));
        match replaced {
            Some((new, len)) => {
                out.push_str(&new);
                rest = &tag[len..];
            }
            None => {
                out.push_str("{%");
                rest = &tag[2..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// If `text` begins with the tag `{% word %}`, the tag with `by` for the word, and its length.
fn replace_tag(text: &str, word: &str, by: &str) -> Option<(String, usize)> {
    let mark = |s: &str| s.chars().next().filter(|c| matches!(c, '-' | '+'));
    let inner = text.strip_prefix("{%")?;
    let open = mark(inner);
    let inner = &inner[open.map_or(0, char::len_utf8)..];
    let inner = inner.trim_start().strip_prefix(word)?.trim_start();
    let close = mark(inner);
    let after = inner[close.map_or(0, char::len_utf8)..].strip_prefix("%}")?;
    let sign = |c: Option<char>| c.map(String::from).unwrap_or_default();
    Some((
        format!("{{%{} {by} {}%}}", sign(open), sign(close)),
        text.len() - after.len(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(template: &str) -> Result<String, Error> {
        let mut env = environment(Arc::new(AtomicBool::new(false)));
        env.add_template_owned("chat", as_jinja_reads(template))?;
        let context: Value = serde_json::from_str(
            r#"{"s":"Ab c","xs":[3,1,2,2],"d":{"b":1,"a":null,"q":["it's",true,1.5]},
                "f":[1e16,0.00001,0.1,100.0],"e":"","u":"é🦇\n<a>",
                "ms":[{"role":"user","n":1},{"role":"assistant","n":2},{"role":"user","n":3}]}"#,
        )
        .unwrap();
        env.get_template("chat")?.render(context)
    }

    /// The right-hand sides were written by Jinja2 3.1.6, set up as `transformers` sets it up.
    #[test]
    fn renders_what_jinja2_renders() {
        for (template, text) in [
            (
                "{% for x in f %}{{ x }} {% endfor %}",
                "1e+16 1e-05 0.1 100.0 ",
            ),
            ("{{ f|map('string')|join(',') }}", "1e+16,1e-05,0.1,100.0"),
            ("{{ d }}", "{'b': 1, 'a': None, 'q': [\"it's\", True, 1.5]}"),
            ("{{ true }}{{ none }}{{ nope }}", "TrueNone"),
            (
                "{{ d|tojson }}",
                "{\"b\": 1, \"a\": null, \"q\": [\"it's\", true, 1.5]}",
            ),
            ("{{ u|tojson }}", "\"é🦇\\n<a>\""),
            ("{{ u|tojson(true) }}", "\"\\u00e9\\ud83e\\udd87\\n<a>\""),
            ("{{ xs|tojson(indent=1) }}", "[\n 3,\n 1,\n 2,\n 2\n]"),
            ("{{ ('{\"z\": 1, \"a\": [2]}'|fromjson).a[0] }}", "2"),
            ("{{ d|items|list|length }}{{ d.items()|length }}", "33"),
            ("{% for k, v in d.items() if v %}{{ k }}{% endfor %}", "bq"),
            ("{{ none is iterable }}{{ none is sequence }}", "FalseFalse"),
            (
                "{{ s is iterable }}{{ d is sequence }}{{ 1 is iterable }}",
                "TrueTrueFalse",
            ),
            (
                "{{ e|default('y', boolean=true) }}{{ e|d('y', true) }}",
                "yy",
            ),
            ("{{ nope|default('x') }}{{ none|default('x') }}", "xNone"),
            ("{{ nope|default(default_value='x') }}", "x"),
            (
                "{{ 'a,b,c'.rsplit(',', 1) }}{{ 'a,b'.rsplit(',') }}",
                "['a,b', 'c']['a', 'b']",
            ),
            (
                "{{ 'a=b=c'.partition('=')[2] }}{{ 'a=b=c'.rpartition('=')[0] }}",
                "b=ca=b",
            ),
            (
                "{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}",
                "bcab",
            ),
            ("{{ 'x</t>y'.split('</t>')[-1].lstrip('\\n') }}", "y"),
            (
                "{{ s.strip().upper() }}{{ s.startswith(('A', 'B')) }}",
                "AB CTrue",
            ),
            (
                "{{ d.get('b') }}{{ d.get('no') }}{{ d.get('no', 'x') }}",
                "1Nonex",
            ),
            (
                "{{ xs[::-1] }}{{ xs[1:] }}{{ xs[-1] }}{{ s[:2] }}",
                "[2, 2, 1, 3][1, 2, 2]2Ab",
            ),
            (
                "{% for x in xs %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% break %}{% endfor %}",
                "3",
            ),
            (
                "{% set ns = namespace(n=0) %}{% for x in xs %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}",
                "8",
            ),
            (
                "{{ ms|selectattr('role', 'equalto', 'user')|map(attribute='n')|join(',') }}",
                "1,3",
            ),
            (
                "{{ 7 // 2 }} {{ -7 // 2 }} {{ 4 / 2 }} {{ -7 % 3 }}",
                "3 -4 2.0 2",
            ),
            ("{{ 'a' ~ 1 ~ none ~ true }}", "a1NoneTrue"),
            ("{% set j = joiner(',') %}{{ j() }}a{{ j() }}b", "a,b"),
            // Blocks on lines of their own leave no trace; one newline at the end of the text goes.
            ("a\n  {% if s %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc"),
            ("a\r\n{% if s %}\r\nb\r\n{% endif %}\r\n\r\n", "a\nb\n"),
            ("x {%+ if s %}y{% endif %} z", "x y z"),
            // Generation blocks: whitespace control and scope stay.
            (
                "a\n  {% generation %}\n b\n  {% endgeneration %}\nc",
                "a\n b\nc",
            ),
            ("a {%- generation -%} b {%- endgeneration -%} c", "abc"),
            (
                "{%generation%}{% set q = 1 %}{{ q }}{%endgeneration%}{{ q }}",
                "1",
            ),
            ("{{ '{% generation' }}", "{% generation"),
        ] {
            assert_eq!(render(template).as_deref().ok(), Some(text), "{template}");
        }
    }

    /// Jinja2 raises for each of these, and so must we: a template tells by raising what it cannot do.
    #[test]
    fn raises_where_jinja2_raises() {
        for template in [
            "{{ raise_exception('no') }}",
            "{{ 'a' + none }}",
            "{{ 'a' + nope }}",
            "{{ 'a' + 1 }}",
            "{{ d.nope.more }}",
            "{{ nope.more }}",
            "{{ none|length }}",
            "{{ xs.append(1) }}",
            "{{ d.pop('a') }}",
            "{{ xs.index(9) }}",
            "{{ nope|tojson }}",
            "{{ 'a' in none }}",
            "{{ s|nosuchfilter }}",
        ] {
            assert!(render(template).is_err(), "{template}");
        }
        let message = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
        assert_eq!(message.detail(), Some("roles must alternate"));
    }
}
