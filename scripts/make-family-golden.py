#!/usr/bin/env python3
"""Writes a tiny model with random weights for each family of targets, and what transformers computes with it.

    make-family-golden.py FOLDER [CASE]...

Each case gets FOLDER/CASE with `model` (config.json and model.safetensors, weights in bf16) and
`expected.safetensors`, computed in float32 from those weights:

    ids                   [tokens]
    layer_outputs         [layers, tokens, H]   the residual stream after each layer
    final_hidden          [tokens, H]           after the final norm
    logits                [tokens, V]
    decode_layer_outputs  [layers, steps, H]    the same for the last tokens, one at a time behind a cache that a
    decode_final_hidden   [steps, H]            first pass over the others filled
    decode_logits         [steps, V]

and in the metadata `layers`, the layers' numbers, `first`, the tokens of the first pass, `transformers`, its version,
and `bf16`, how far transformers itself is off in the worst row of any of these when it computes in bf16. Tests compare
with tests/golden/families, or with the folder that FAMILY_GOLDEN_DIR names. Needs torch and transformers.
"""
import argparse
import json
import warnings
import zlib
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS, FIRST = 24, 12
SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
             pad_token_id=None)


def rope(kind, theta=10000.0, **fields):
    return dict(rope_type=kind, rope_theta=theta, **fields)


GEMMA = dict(query_pre_attn_scalar=5, sliding_window=5, initializer_range=0.4)
CASES = {
    "llama2": ("llama", dict(num_key_value_heads=4)),
    "llama3": ("llama", dict(tie_word_embeddings=True, rope_parameters=rope(
        "llama3", 100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32))),
    "llama-linear": ("llama", dict(rope_parameters=rope("linear", factor=3.0))),
    "llama-dynamic": ("llama", dict(max_position_embeddings=16, rope_parameters=rope("dynamic", 100.0, factor=2.5))),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("mistral", dict(sliding_window=6)),
    "mixtral": ("mixtral", dict(sliding_window=None, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2-yarn-windows": ("qwen2", dict(
        use_sliding_window=True, sliding_window=5, max_window_layers=1, rope_parameters=rope(
            "yarn", 100.0, factor=4.0, original_max_position_embeddings=16))),
    "qwen3": ("qwen3", dict(rope_parameters=rope("default", 1e6))),
    "qwen3-yarn": ("qwen3", dict(rope_parameters=rope(
        "yarn", 1000.0, factor=2.0, original_max_position_embeddings=32, beta_fast=4, beta_slow=1.5, truncate=False,
        mscale=0.8, mscale_all_dim=1.2))),
    "qwen3-moe": ("qwen3_moe", dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=8,
                                    norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3-moe-raw": ("qwen3_moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
                                        norm_topk_prob=False, decoder_sparse_step=2)),
    "gemma2": ("gemma2", dict(attn_logit_softcapping=1.5, final_logit_softcapping=2.0, **GEMMA)),
    "gemma3": ("gemma3_text", dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                                   rope_parameters=dict(full_attention=rope("linear", 1000.0, factor=4.0),
                                                        sliding_attention=rope("default", 50.0)), **GEMMA)),
    "phi3": ("phi3", dict(sliding_window=7, head_dim=None, hidden_size=32, rope_parameters=rope(
        "default", 100.0, partial_rotary_factor=0.5))),
}
# Whose config is written in the older form, with flat rotary fields.
FLAT = {"llama3", "gemma3", "qwen2-yarn-windows"}


def make(kind, fields):
    fields = {"initializer_range": 0.3, "tie_word_embeddings": False, **SIZES, **fields}
    if fields["head_dim"] is None:
        del fields["head_dim"]
    config = AutoConfig.for_model(kind, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data = 0.3 * torch.randn_like(weight) + (0 if "gemma" in kind else 1)
        elif name.endswith("bias"):
            weight.data = 0.5 * torch.randn_like(weight)
        elif "embed" in name and "gemma" not in kind:
            weight.data = torch.randn_like(weight)
        elif ".gate." in name or "router" in name:  # no two experts as good as equal
            weight.data = 2 * torch.randn_like(weight)
        weight.data = weight.data.to(torch.bfloat16).float()
    return model.eval()


def run(model, ids, cache=None):
    """The residual stream after each layer, the final hidden state and the logits."""
    taken = []
    handles = [
        layer.register_forward_hook(
            lambda _module, _inputs, output: taken.append(output[0] if isinstance(output, tuple) else output))
        for layer in model.model.layers
    ]
    finals = []
    handles.append(model.model.norm.register_forward_hook(lambda _module, _inputs, output: finals.append(output)))
    with torch.no_grad():
        output = model(ids[None], past_key_values=cache, use_cache=True)
    for handle in handles:
        handle.remove()
    return (torch.stack([layer[0] for layer in taken]), finals[0][0], output.logits[0]), output.past_key_values


def outputs(model, ids):
    """All expected tensors of a model that has seen no sequence yet."""
    whole, _ = run(model, ids)
    # What a longer sequence leaves behind in the rotary tables must not reach the second run.
    fresh = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager", experts_implementation="eager")
    fresh.load_state_dict(model.state_dict())
    fresh.to(model.dtype).eval()
    _, cache = run(fresh, ids[:FIRST])
    steps = []
    for at in range(FIRST, TOKENS):
        step, cache = run(fresh, ids[at:at + 1], cache)
        steps.append(step)
    keys = ["layer_outputs", "final_hidden", "logits"]
    tensors = dict(zip(keys, whole))
    for i, key in enumerate(keys):
        tensors[f"decode_{key}"] = torch.cat([step[i] for step in steps], dim=1 if i == 0 else 0)
    return tensors


def flatten(path):
    """Rewrites the rotary fields of a config.json as they were before `rope_parameters`."""
    config = json.loads(path.read_text())
    fields = config.pop("rope_parameters")
    if "full_attention" in fields:
        config["rope_local_base_freq"] = fields["sliding_attention"]["rope_theta"]
        fields = fields["full_attention"]
    config["rope_theta"] = fields.pop("rope_theta")
    config["rope_scaling"] = fields
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write(name, folder):
    kind, fields = CASES[name]
    torch.manual_seed(zlib.crc32(name.encode()))
    model = make(kind, fields)
    ids = torch.randint(model.config.vocab_size, (TOKENS,))
    tensors = outputs(model, ids)
    model.to(torch.bfloat16)
    half = outputs(model, ids)
    off = max(((half[key].float() - x).norm(dim=-1) / x.norm(dim=-1)).max().item() for key, x in tensors.items())
    tensors["ids"] = ids
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "model")
    (folder / "model" / "generation_config.json").unlink(missing_ok=True)
    if name in FLAT:
        flatten(folder / "model" / "config.json")
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "expected.safetensors",
              metadata={"layers": json.dumps(list(range(model.config.num_hidden_layers))), "first": str(FIRST), "bf16": f"{off:.1e}",
                        "transformers": transformers.__version__})
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{name}: {size / 1024:.0f} KiB; transformers is off by {off:.1e} in bf16")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in arguments.cases or CASES:
        write(name, arguments.folder / name)


if __name__ == "__main__":
    main()
