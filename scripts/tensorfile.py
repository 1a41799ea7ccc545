"""Reads and writes safetensors files with numpy alone.

numpy has no bfloat16, so those tensors are widened to float32 on reading (exact) and rounded to nearest even on writing.
The format: an 8-byte little-endian header length, a JSON header of {name: {dtype, shape, data_offsets}}, then the data,
which the tensors must cover without a gap or an overlap.
"""

import json
import math
import struct
from pathlib import Path

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"}


class TensorFile:
    """One safetensors file: `dtypes` and `shapes` by name, `metadata`, and the values on request."""

    def __init__(self, path):
        self.path = Path(path)
        with open(self.path, "rb") as file:
            prefix = file.read(8)
            size = self.path.stat().st_size
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > size - 8:
                raise ValueError(f"{self.path} is not a safetensors file, or is cut off in its header")
            header = json.loads(file.read(length))
        self.metadata = header.pop("__metadata__", {})
        self.dtypes = {name: entry["dtype"] for name, entry in header.items()}
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        self.spans = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
        self.start = 8 + length
        self.check_layout(size - self.start)

    def check_layout(self, data_bytes):
        end = 0
        for name, (first, last) in sorted(self.spans.items(), key=lambda item: item[1]):
            width = 2 if self.dtypes[name] == "BF16" else np.dtype(DTYPES[self.dtypes[name]]).itemsize
            if first != end or last - first != width * math.prod(self.shapes[name]):
                raise ValueError(f"{self.path}: the bytes of {name} ({first}..{last}) do not fit its shape or its neighbour")
            end = last
        if end != data_bytes:
            raise ValueError(f"{self.path} holds {data_bytes} bytes of data, its header names {end}")

    def __contains__(self, name):
        return name in self.dtypes

    def __iter__(self):
        return iter(self.dtypes)

    def __getitem__(self, name):
        first, last = self.spans[name]
        dtype = "<u2" if self.dtypes[name] == "BF16" else DTYPES[self.dtypes[name]]
        count = (last - first) // np.dtype(dtype).itemsize
        values = np.fromfile(self.path, dtype, count, offset=self.start + first).reshape(self.shapes[name])
        return widen(values) if self.dtypes[name] == "BF16" else values


def widen(bits):
    """bfloat16 patterns -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values):
    """float32 -> bfloat16 patterns, to nearest even; finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write(path, tensors, bfloat16=False, metadata=None):
    """Writes `tensors` {name: array}; with `bfloat16`, float32 arrays are stored as BF16."""
    names = {np.dtype(code): name for name, code in DTYPES.items()}
    header, pieces, end = {"__metadata__": metadata} if metadata else {}, [], 0
    for name, values in tensors.items():
        rounded = bfloat16 and values.dtype == np.float32
        data = (narrow(values) if rounded else values).tobytes()
        dtype = "BF16" if rounded else names[values.dtype]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [end, end + len(data)]}
        pieces.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(pieces)
