#!/usr/bin/env python3
"""Writes the packed files of tests/inputs/packed/: the same conversations in every format that is read.

    python -m venv /tmp/venv && /tmp/venv/bin/pip install pyarrow zstandard
    /tmp/venv/bin/python scripts/make-input-files.py
"""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "inputs" / "packed"

CHAT = [
    {"messages": [{"role": "user", "content": "How many legs has a spider?"}, {"role": "assistant", "content": "A spider has eight legs."}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye."}, {"role": "assistant", "content": "Goodbye."}]},
    {"messages": [{"role": "user", "content": "Alone."}]},
    {"messages": [{"role": "user", "content": "Grüße 🦇"}, {"role": "assistant", "content": "Grüße zurück 世界"}]},
    {"messages": [{"role": "user", "content": "Count to 5."}, {"role": "assistant", "content": "1 2 3 4 5"}]},
]
COLUMNS = [
    {"prompt": "How many legs has a spider?", "response": "A spider has eight legs.", "score": 0.5},
    {"prompt": "Hi.", "response": None, "score": None},
    {"prompt": "Bye.", "response": "Goodbye.", "score": 1.0},
]
TOKENS = [
    {"input_ids": [1, 88, 901, 202, 42, 734, 2], "loss_mask": [0, 0, 0, 0, 1, 1, 1]},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 1, 0, 1]},
]


def write(name, content):
    (FOLDER / name).write_bytes(content)


def lines(rows):
    return [(json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows]


def main():
    FOLDER.mkdir(exist_ok=True)
    chat = lines(CHAT)
    write("chat.jsonl", b"".join(chat))
    # Two members and two frames, cut within a line, as `cat` and parallel packers write them.
    halves = b"".join(chat)[:333], b"".join(chat)[333:]
    packed_gz = b"".join(gzip.compress(half, mtime=0) for half in halves)
    packed_zst = b"".join(zstandard.ZstdCompressor(level=19, write_checksum=True).compress(half) for half in halves)
    write("chat.jsonl.gz", packed_gz)
    write("chat.jsonl.zst", packed_zst)
    pq.write_table(pa.Table.from_pylist(CHAT), FOLDER / "chat.parquet", row_group_size=2)
    pq.write_table(pa.Table.from_pylist(COLUMNS), FOLDER / "columns.parquet", compression="zstd", use_dictionary=False)
    schema = pa.schema([("input_ids", pa.large_list(pa.int32())), ("loss_mask", pa.list_(pa.int8()))])
    pq.write_table(pa.Table.from_pylist(TOKENS, schema), FOLDER / "tokens.parquet", compression="gzip", data_page_version="2.0")
    no_key = pa.Table.from_pylist([{"title": "x", "body": "y"}])
    pq.write_table(no_key, FOLDER / "no_key.parquet", compression="none")
    write("columns.jsonl", b"".join(lines(COLUMNS)))
    write("tokens.jsonl", b"".join(lines(TOKENS)))
    write("cut.jsonl.gz", packed_gz[:-20])
    write("cut.jsonl.zst", packed_zst[:-20])
    parquet = (FOLDER / "chat.parquet").read_bytes()
    write("cut.parquet", parquet[:-100])
    # Its footer is whole; its pages are not.
    spoilt = bytearray(parquet)
    spoilt[4:200] = bytes(196)
    write("spoilt.parquet", bytes(spoilt))


if __name__ == "__main__":
    main()
