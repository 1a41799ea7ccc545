#!/usr/bin/env python3
"""Tokenising speed beside `datasets.map` with the fast tokenizer: same rows, same cores, one after the other.

    python -m venv /tmp/venv && /tmp/venv/bin/pip install transformers datasets jinja2
    /tmp/venv/bin/python scripts/bench-tokenising.py LAUNCHER [MODEL_DIR] [--megabytes 64] [--rounds 2]

`datasets.map` is given its best form here: batches, one process a core, the template rendered and the texts
tokenised by the batch. It makes ids; the launcher makes ids, finds the loss mask from several renders of each
conversation, and writes, hashes and measures the set. Rows are the repository's demo conversations, varied so that
no two are alike, joined into conversations of several turns.
"""

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
ROOT = Path(__file__).resolve().parent.parent


def write_rows(path, megabytes):
    rows = [json.loads(line) for line in (ROOT / "assets" / "demo-chat.jsonl").read_text().splitlines()]
    longer = ROOT / "assets" / "smollm2-chat.jsonl"
    if longer.exists():
        rows += [json.loads(line) for line in longer.read_text().splitlines()]
    draw = random.Random(7)
    size = count = 0
    with path.open("w", encoding="utf-8") as out:
        while size < megabytes * 1_000_000:
            messages = []
            for _ in range(draw.randint(1, 4)):
                turn = [m for m in draw.choice(rows)["messages"] if m["role"] != "system"]
                messages += [dict(m, content=f"{m['content']} {draw.randint(0, 10**9)}") for m in turn]
            line = json.dumps({"messages": messages}, ensure_ascii=False) + "\n"
            size += len(line.encode())
            count += 1
            out.write(line)
    return size, count


def by_datasets(path, model, cores, folder):
    import datasets
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder))

    def tokenise(batch):
        texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in batch["messages"]]
        return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}

    began = time.perf_counter()
    done = rows.map(tokenise, batched=True, num_proc=cores, remove_columns=rows.column_names, load_from_cache_file=False)
    seconds = time.perf_counter() - began
    return seconds, sum(len(ids) for ids in done["input_ids"])


def by_launcher(path, model, launcher, folder):
    environment = dict(os.environ, SLIPSTREAM_CACHE=str(folder))
    began = time.perf_counter()
    words = [launcher, "check-data", str(path), "--target-model", str(model), "--json", "--max-length", "1048576"]
    output = subprocess.run(words, env=environment, check=True, capture_output=True).stdout
    seconds = time.perf_counter() - began
    return seconds, json.loads(output)["tokens"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launcher")
    parser.add_argument("model", nargs="?", default=ROOT / "assets" / "tiny-target", type=Path)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    cores = multiprocessing.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        path = folder / "rows.jsonl"
        size, count = write_rows(path, arguments.megabytes)
        print(f"{size / 1e6:.1f} MB, {count} rows, {cores} cores")
        best = {}
        for turn in range(arguments.rounds):
            for name, run in (
                ("datasets.map", lambda: by_datasets(path, arguments.model, cores, folder / f"datasets-{turn}")),
                ("check-data", lambda: by_launcher(path, arguments.model, arguments.launcher, folder / f"cache-{turn}")),
            ):
                seconds, tokens = run()
                best[name] = min(best.get(name, seconds), seconds)
                print(f"{name:>12}: {seconds:6.2f} s, {size / 1e6 / seconds:6.2f} MB/s, {tokens} tokens", flush=True)
        print(f"ratio of the best rounds: {best['datasets.map'] / best['check-data']:.2f}")


if __name__ == "__main__":
    main()
