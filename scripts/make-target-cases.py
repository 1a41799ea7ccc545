#!/usr/bin/env python3
"""Writes small models with random weights and what Hugging Face's transformers computes with them.

    make-target-cases.py FOLDER [--model DIR]...

For a Qwen3, a Llama with scaled rotary frequencies, and each DIR, FOLDER gets a folder with `model` (a link to DIR)
and `expected.safetensors`: ids, the residual stream after chosen layers, the final hidden state and logits, computed
in float32 from weights rounded to bf16. `TARGET_CASES=FOLDER` makes tests/golden.rs compare both engines with them.
Prints how far transformers itself is off when it computes in bf16.
"""
import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

TOKENS = 200


def random_models():
    shared = dict(vocab_size=4096, num_hidden_layers=8, rms_norm_eps=1e-6, max_position_embeddings=4096,
                  initializer_range=0.02)
    yield "qwen3", Qwen3Config(hidden_size=1024, intermediate_size=2560, num_attention_heads=8,
                               num_key_value_heads=2, head_dim=128, rope_theta=1e6, tie_word_embeddings=False, **shared)
    yield "llama", LlamaConfig(hidden_size=768, intermediate_size=2048, num_attention_heads=12,
                               num_key_value_heads=4, head_dim=64, tie_word_embeddings=True, rope_theta=5e5,
                               rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                                 high_freq_factor=4.0, original_max_position_embeddings=64), **shared)


def run(model, ids, layers):
    """The residual stream after `layers`, the final hidden state and the logits, in float32."""
    taken = {}

    def take(i):
        def hook(_module, _inputs, output):
            taken[i] = (output[0] if isinstance(output, tuple) else output)[0].float()
        return hook

    handles = [model.model.layers[i].register_forward_hook(take(i)) for i in layers]
    with torch.no_grad():
        final = model.model(ids[None]).last_hidden_state
        logits = model.lm_head(final)[0].float()
    for handle in handles:
        handle.remove()
    return torch.stack([taken[i] for i in layers]), final[0].float(), logits


def worst_row(a, b):
    return ((a - b).norm(dim=-1) / b.norm(dim=-1)).max().item()


def write(name, model, folder):
    count, vocabulary = model.config.num_hidden_layers, model.config.vocab_size
    layers = sorted({0, 1, count // 2, count - 2, count - 1})
    ids = torch.randint(vocabulary, (TOKENS,))
    half = run(model, ids, layers)
    exact = run(model.float(), ids, layers)
    for what, a, b in zip(["layers", "final hidden", "logits"], half, exact):
        rows = [f"{worst_row(x, y):.1e}" for x, y in zip(a, b)] if what == "layers" else f"{worst_row(a, b):.1e}"
        print(f"{name}: transformers in bf16 is off by {rows} in the worst row of its {what}", flush=True)
    tensors = dict(zip(["layer_outputs", "final_hidden", "logits"], exact), ids=ids)
    save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, folder / "expected.safetensors",
              metadata={"layers": json.dumps(layers)})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, action="append", default=[], help="a model directory to compare too")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    for name, config in random_models():
        folder = arguments.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.bfloat16).eval()
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.data = (1 + 0.1 * torch.randn_like(weight.float())).to(torch.bfloat16)
            elif "embed" in key:  # as in trained models, a layer adds less than what is there
                weight.data = torch.randn_like(weight.float()).to(torch.bfloat16)
        model.save_pretrained(folder / "model")
        with torch.device(device):
            write(name, model.to(device), folder)
    for path in arguments.model:
        folder = arguments.folder / path.name
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / "model"
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.bfloat16).eval()
        with torch.device(device):
            write(path.name, model.to(device), folder)


if __name__ == "__main__":
    main()
