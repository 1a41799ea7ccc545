#!/usr/bin/env python3
"""Writes small models with random weights and what Hugging Face's transformers computes with them.

    make-target-cases.py FOLDER [--model DIR]...

For a Qwen3, a Llama, and each DIR, FOLDER gets a folder with `model` (a link to DIR)
and `expected.safetensors`: ids, the residual stream after chosen layers, the final hidden state and logits, computed
in float32 from weights rounded to bf16, and how far transformers itself is off when it computes in bf16: the median
row, the row that nine in ten are better than, the worst. `TARGET_CASES=FOLDER` makes tests/golden.rs compare both
engines with them. The ids are random, but for a DIR the text of this script, since a trained model answers noise with
noise: a rounding more or less then changes whole rows.
"""
import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

TOKENS = 200


def random_models():
    shared = dict(vocab_size=4096, num_hidden_layers=8, rms_norm_eps=1e-6, max_position_embeddings=4096,
                  initializer_range=0.02)
    yield "qwen3", Qwen3Config(hidden_size=1024, intermediate_size=2560, num_attention_heads=8,
                               num_key_value_heads=2, head_dim=128, rope_theta=1e6, tie_word_embeddings=False, **shared)
    yield "llama", LlamaConfig(hidden_size=768, intermediate_size=2048, num_attention_heads=12,
                               num_key_value_heads=4, head_dim=64, tie_word_embeddings=True, rope_theta=5e5, **shared)


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


def spread(got, want):
    """[median, ninth decile, worst] relative error of rows."""
    errors = ((got - want).norm(dim=-1) / want.norm(dim=-1)).sort().values
    return [float(f"{errors[min(len(errors) - 1, int(len(errors) * share))]:.3g}") for share in (0.5, 0.9, 1.0)]


def write(name, model, folder, ids):
    count = model.config.num_hidden_layers
    layers = sorted({0, 1, count // 2, count - 2, count - 1})
    half = run(model, ids, layers)
    exact = run(model.float(), ids, layers)
    in_bf16 = {"layers": [spread(a, b) for a, b in zip(half[0], exact[0])], "final hidden": spread(half[1], exact[1]),
               "logits": spread(half[2], exact[2])}
    for what, errors in in_bf16.items():
        print(f"{name}: transformers in bf16 is off by {errors} in its {what}", flush=True)
    tensors = dict(zip(["layer_outputs", "final_hidden", "logits"], exact), ids=ids)
    save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, folder / "expected.safetensors",
              metadata={"layers": json.dumps(layers), "bf16": json.dumps(in_bf16)})


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
            write(name, model.to(device), folder, torch.randint(config.vocab_size, (TOKENS,)))
    for path in arguments.model:
        folder = arguments.folder / path.name
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / "model"
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.bfloat16).eval()
        with torch.device(device):
            text = AutoTokenizer.from_pretrained(path)(Path(__file__).read_text(), return_tensors="pt")
            write(path.name, model.to(device), folder, text.input_ids[0, :TOKENS].to(device))


if __name__ == "__main__":
    main()
