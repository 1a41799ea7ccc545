"""Converts a Llama GGUF file with a SmolLM tokenizer into a Hugging Face model directory (float32).

    gguf_to_hf.py FILE.gguf DIR [--sha256 HEX] [--source TEXT]     convert
    gguf_to_hf.py --check DIR [--sha256 HEX] [--force]             is it there? standard library only

Every tensor and every size is accounted for: a tensor this does not know, a missing one, a rope scaling or another
pre-tokenizer refuses, because a model converted by guesswork runs without an error and answers nonsense.

Exit codes: 0 done or already there, 3 (only --check) to be written, 2 refused, 1 anything else.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

RECORD = "source.json"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

# GGUF's token types (llama.cpp's enum llama_token_type) that may occur in a byte-level vocabulary.
NORMAL, CONTROL = 1, 3

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Refused(Exception):
    """The input or the output directory is not what this can handle; the message says what to do."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", nargs="?", type=Path, help="the GGUF file")
    parser.add_argument("dir", nargs="?", type=Path, help="the directory to write")
    parser.add_argument("--check", type=Path, metavar="DIR", help="only say whether DIR is complete")
    parser.add_argument("--sha256", help="the SHA-256 that the GGUF file must have")
    parser.add_argument("--source", default="", help="where the file came from, for the record")
    parser.add_argument("--force", action="store_true", help="with --check: count a complete directory as to be written")
    args = parser.parse_args()
    try:
        if args.check:
            return check(args.check.resolve(), args.sha256, args.force)
        if not args.gguf or not args.dir:
            parser.error("FILE.gguf and DIR are needed")
        convert(args.gguf, args.dir, args.sha256, args.source)
        return 0
    except Refused as refusal:
        print(f"gguf_to_hf: {refusal}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"gguf_to_hf: {error}", file=sys.stderr)
        return 1


def check(directory, sha256, force):
    """0 if `directory` is whole and of the file `sha256`, 3 if it is to be written; raises Refused if it is not ours."""
    if not directory.exists():
        return 3
    if not directory.is_dir():
        raise Refused(f"{directory} exists and is not a directory; choose another with --output")
    if not any(directory.iterdir()):
        return 3
    record = read_record(directory)
    if record is None:
        raise Refused(f"{directory} holds files that this did not write (no {RECORD}); move it away or choose another with --output")
    if force:
        return 3
    changed = [name for name in FILES if size_of(directory / name) != record["sizes"].get(name)]
    if sha256 and record["sha256"] != sha256:
        changed.append("the GGUF file")
    if changed:
        print(f"gguf_to_hf: {directory} is incomplete or outdated ({', '.join(changed)}); writing it again")
        return 3
    print(f"gguf_to_hf: {directory} is already complete")
    return 0


def read_record(directory):
    """The record of an earlier conversion, or None where there is none."""
    try:
        record = json.loads((directory / RECORD).read_text())
        return record if isinstance(record["sizes"], dict) and "sha256" in record else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def size_of(path):
    return path.stat().st_size if path.is_file() else None


def convert(gguf, directory, sha256, source):
    found = file_sha256(gguf)
    if sha256 and found != sha256:
        raise Refused(f"{gguf} has SHA-256 {found}, not {sha256}: it is another file than the one this was checked with")
    model = Gguf(gguf)
    directory = directory.resolve()
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and renamed, so that a directory of this name is always whole.
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        temporary.chmod(0o755)
        write_json(temporary / "config.json", model.config())
        write_json(temporary / "tokenizer.json", model.tokenizer())
        write_json(temporary / "tokenizer_config.json", model.tokenizer_config())
        from safetensors.numpy import save_file

        save_file(model.tensors(), temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "model.safetensors").chmod(0o644)
        sizes = {name: size_of(temporary / name) for name in FILES}
        write_json(temporary / RECORD, {"source": source, "file": gguf.name, "sha256": found, "sizes": sizes})
        if directory.exists():
            if any(directory.iterdir()) and read_record(directory) is None:
                raise Refused(f"{directory} holds files that this did not write; move it away")
            shutil.rmtree(directory)
        os.rename(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"gguf_to_hf: wrote {directory} ({sum(sizes.values()) / 2**20:.0f} MiB)")


def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class Gguf:
    """One GGUF file, read as what a Hugging Face directory says about a model."""

    def __init__(self, path):
        from gguf import GGUFReader

        reader = GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.stored = {tensor.name: tensor for tensor in reader.tensors}
        self.require("general.architecture", "llama")
        self.require("tokenizer.ggml.model", "gpt2")
        self.require("tokenizer.ggml.pre", "smollm")
        unknown = [name for name in self.fields if "rope.scaling" in name or "expert" in name]
        if unknown or "rope_freqs.weight" in self.stored:
            raise Refused(f"the model uses what this does not convert: {', '.join(unknown) or 'rope_freqs.weight'}")
        self.layers = self.fields["llama.block_count"]
        self.heads = self.fields["llama.attention.head_count"]
        self.kv_heads = self.fields["llama.attention.head_count_kv"]
        self.hidden = self.fields["llama.embedding_length"]
        self.vocab = self.fields["llama.vocab_size"]
        self.head_dim = self.fields["llama.rope.dimension_count"]
        self.tied = "output.weight" not in self.stored

    def require(self, name, value):
        if self.fields.get(name) != value:
            raise Refused(f"{name} is {self.fields.get(name)!r}; only {value!r} is converted")

    def special(self, name):
        return self.fields[f"tokenizer.ggml.{name}_token_id"]

    def config(self):
        theta = float(self.fields["llama.rope.freq_base"])
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.fields["llama.feed_forward_length"],
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.fields["llama.context_length"],
            "hidden_act": "silu",
            "rms_norm_eps": shortest_float32(self.fields["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "initializer_range": 0.02,
            "tie_word_embeddings": self.tied,
            "use_cache": True,
            "bos_token_id": self.special("bos"),
            "eos_token_id": self.special("eos"),
            "pad_token_id": self.special("padding"),
            "dtype": "float32",
            "torch_dtype": "float32",
        }

    def tensors(self):
        """All weights in float32 by Hugging Face's names: projections are [out, in]."""
        import numpy as np

        inner = self.fields["llama.feed_forward_length"]
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "attn_norm": (self.hidden,),
            "attn_q": (q_rows, self.hidden),
            "attn_k": (kv_rows, self.hidden),
            "attn_v": (kv_rows, self.hidden),
            "attn_output": (self.hidden, q_rows),
            "ffn_norm": (self.hidden,),
            "ffn_gate": (inner, self.hidden),
            "ffn_up": (inner, self.hidden),
            "ffn_down": (self.hidden, inner),
        }
        plan = {
            "token_embd.weight": ("model.embed_tokens.weight", (self.vocab, self.hidden), None),
            "output_norm.weight": ("model.norm.weight", (self.hidden,), None),
        }
        if not self.tied:
            plan["output.weight"] = ("lm_head.weight", (self.vocab, self.hidden), None)
        for layer in range(self.layers):
            for short, name in LAYER_TENSORS.items():
                heads = {"attn_q": self.heads, "attn_k": self.kv_heads}.get(short)
                plan[f"blk.{layer}.{short}.weight"] = (f"model.layers.{layer}.{name}.weight", shapes[short], heads)
        missing, extra = plan.keys() - self.stored.keys(), self.stored.keys() - plan.keys()
        if missing or extra:
            raise Refused(f"tensors missing: {sorted(missing)}; not known: {sorted(extra)}")
        result = {}
        for stored, (name, shape, heads) in plan.items():
            values = self.dequantised(stored)
            if values.shape != shape:
                raise Refused(f"{stored} has shape {list(values.shape)}, expected {list(shape)}")
            if not np.isfinite(values).all():
                raise Refused(f"{stored} holds NaN or infinite values")
            result[name] = np.ascontiguousarray(rotate_half_rows(values, heads) if heads else values)
        return result

    def dequantised(self, name):
        import numpy as np
        from gguf import dequantize

        tensor = self.stored[name]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def tokenizer(self):
        """tokenizer.json: byte-level BPE behind SmolLM's pre-tokenizer, which splits digits one by one and then
        cuts words as GPT-2 does."""
        tokens, types = self.fields["tokenizer.ggml.tokens"], self.fields["tokenizer.ggml.token_type"]
        if len(tokens) != self.vocab or len(types) != self.vocab or len(set(tokens)) != self.vocab:
            found = f"{len(tokens)} tokens, {len(set(tokens))} of them distinct, {len(types)} types"
            raise Refused(f"the vocabulary has {found}; expected {self.vocab}")
        if not set(types) <= {NORMAL, CONTROL}:
            raise Refused(f"token types {sorted(set(types))} occur; only normal and control tokens are converted")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, **added_token(tokens[i])} for i in self.control_ids()],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                ],
            },
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": self.fields["tokenizer.ggml.merges"],
            },
        }

    def control_ids(self):
        return [i for i, kind in enumerate(self.fields["tokenizer.ggml.token_type"]) if kind == CONTROL]

    def tokenizer_config(self):
        tokens = self.fields["tokenizer.ggml.tokens"]
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": self.fields["tokenizer.ggml.add_space_prefix"],
            "add_bos_token": self.fields["tokenizer.ggml.add_bos_token"],
            "bos_token": tokens[self.special("bos")],
            "eos_token": tokens[self.special("eos")],
            "pad_token": tokens[self.special("padding")],
            "unk_token": tokens[self.special("unknown")],
            "added_tokens_decoder": {str(i): added_token(tokens[i]) for i in self.control_ids()},
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.fields["llama.context_length"],
            "chat_template": self.fields["tokenizer.chat_template"],
        }


def added_token(content):
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def rotate_half_rows(weight, heads):
    """Rows [heads * head_dim, in] from llama.cpp's order back to Hugging Face's.

    llama.cpp turns neighbouring rows (2i, 2i+1) of a head together; Hugging Face turns rows i and i + head_dim/2. A
    converter interleaves the two halves of each head, and this takes them apart again.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def shortest_float32(value):
    """The shortest decimal that names the same float32: GGUF stores 1e-05 as 9.99999974e-06."""
    import numpy as np

    return float(str(np.float32(value)))


if __name__ == "__main__":
    sys.exit(main())
