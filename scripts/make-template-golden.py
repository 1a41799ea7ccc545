#!/usr/bin/env python3
"""Writes tests/templates/expected.json: what `transformers` makes of the conversations in cases.json.

For each case: the text and ids of the whole conversation, the text up to the last assistant turn with the
generation prompt, and whether that text is how the whole begins; or the message that the template raises.

    python -m venv /tmp/venv && /tmp/venv/bin/pip install transformers jinja2
    /tmp/venv/bin/python scripts/make-template-golden.py

Run it again after changing a template or a case, and look at the difference.
"""

import json
import os
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import jinja2
import transformers

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "templates"


def render(tokenizer, case, messages, prompt):
    template = (FOLDER / f"{case['template']}.jinja").read_text(encoding="utf-8")
    arguments = {
        "chat_template": template,
        "tools": case["row"].get("tools"),
        "add_generation_prompt": prompt,
        **case.get("kwargs", {}),
    }
    text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
    return text, ids


def expected(tokenizer, case):
    messages = case["row"]["messages"]
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    try:
        text, ids = render(tokenizer, case, messages, False)
        prompt, _ = render(tokenizer, case, messages[:last], True)
    except jinja2.exceptions.TemplateError as error:
        return {"name": case["name"], "raises": str(error)}
    return {
        "name": case["name"],
        "text": text,
        "ids": ids,
        "prompt": prompt,
        "prompt_begins_text": text.startswith(prompt),
    }


def main():
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "assets" / "tiny-target")
    cases = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))
    lines = [json.dumps(expected(tokenizer, case), ensure_ascii=False) for case in cases]
    made_with = f"transformers {transformers.__version__}, jinja2 {jinja2.__version__}"
    text = json.dumps({"made_with": made_with})[:-1] + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n"
    (FOLDER / "expected.json").write_text(text, encoding="utf-8")
    print(f"{len(cases)} cases by {made_with}")


if __name__ == "__main__":
    main()
