#!/usr/bin/env python3
"""Measures how far PyTorch itself is off the golden files when it computes in bf16: what tests/golden.rs holds a GPU to.

    bf16-bounds.py [--smollm2 DIR]          writes tests/golden/bf16.json

A row's error is the norm of the difference from the golden row over the golden row's norm. For each tensor the file
gets the median row, the row that nine in ten are better than, and the worst row. Targets are run by transformers; the
drafter by the forward below, in the roundings of Hugging Face's Qwen3 (norms in float32, rounded before and after the
weight; rotary tables in bf16; softmax in float32). Needs torch, transformers and safetensors.
"""
import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden"


def read(name):
    with safe_open(GOLDEN / name, "pt") as file:
        meta = {key: json.loads(text) for key, text in (file.metadata() or {}).items() if text[:1] in "{["}
        return {key: file.get_tensor(key) for key in file.keys()}, meta


def spread(got, want):
    """[median, ninth decile, worst] relative error of rows."""
    got, want = (t.double().reshape(-1, t.shape[-1]) for t in (got, want))
    errors = ((got - want).norm(dim=-1) / want.norm(dim=-1)).sort().values
    return [float(f"{errors[min(len(errors) - 1, int(len(errors) * share))]:.3g}") for share in (0.5, 0.9, 1.0)]


def rms_norm(x, weight, eps):
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x, positions, theta):
    """x[n, heads, d]"""
    angles = positions.float()[:, None] / theta ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def drafter(params, config, embed, ids, context, anchors):
    """Final hidden states [anchors, block, H] of DFlash blocks (arXiv 2602.06036)."""
    eps, dim, block = config["rms_norm_eps"], config["head_dim"], config["block_size"]
    heads, groups = config["num_attention_heads"], config["num_attention_heads"] // config["num_key_value_heads"]
    anchor = anchors.long().repeat_interleave(block)
    number = torch.arange(len(anchors)).repeat_interleave(block)
    slot = torch.arange(block).repeat(len(anchors))
    before = torch.arange(len(ids))
    positions = torch.cat([before, anchor + slot])
    h = embed[torch.where(slot == 0, ids.long()[anchor], config["mask_token_id"])]
    c = rms_norm(F.linear(context, params["fc.weight"]), params["hidden_norm.weight"], eps)
    for layer in range(config["num_hidden_layers"]):
        of = lambda name: params[f"layers.{layer}.{name}.weight"]
        project = lambda t, name: F.linear(t, of("self_attn." + name)).view(len(t), -1, dim)
        in_context, own = before[None] < anchor[:, None], number[:, None] == number[None]
        if config["layer_types"][layer] == "sliding_attention":
            window = config["sliding_window"]
            in_context &= before[None] > (anchor + slot)[:, None] - window
            behind = slot[:, None] - slot[None]
            own = own & (behind >= 0) & (behind < window)
        visible = torch.cat([in_context, own], 1)
        x = rms_norm(h, of("input_layernorm"), eps)
        both = torch.cat([c, x])
        q = rotate(rms_norm(project(x, "q_proj"), of("self_attn.q_norm"), eps), anchor + slot, config["rope_theta"])
        k = rotate(rms_norm(project(both, "k_proj"), of("self_attn.k_norm"), eps), positions, config["rope_theta"])
        q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(groups, 1),
                                               project(both, "v_proj").repeat_interleave(groups, 1)))
        scores = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(~visible, float("-inf"))
        attention = scores.float().softmax(-1).to(v.dtype) @ v
        h = h + F.linear(attention.transpose(0, 1).reshape(len(h), heads * dim), of("self_attn.o_proj"))
        x = rms_norm(h, of("post_attention_layernorm"), eps)
        h = h + F.linear(F.silu(F.linear(x, of("mlp.gate_proj"))) * F.linear(x, of("mlp.up_proj")), of("mlp.down_proj"))
    return rms_norm(h, params["norm.weight"], eps)


def of_drafter(name):
    expected, meta = read(name)
    inputs, _ = read("dflash_inputs.safetensors")
    half = {key: value.to(torch.bfloat16) for key, value in inputs.items() if value.is_floating_point()}
    params = {key.removeprefix("param."): value for key, value in half.items() if key.startswith("param.")}
    got = drafter(params, meta["config"], half["embed"], inputs["ids"], half["ctx"], inputs["anchors"])
    return {"hidden": spread(got, expected["hidden"])}


def of_target(name, folder):
    from transformers import AutoModelForCausalLM

    expected, meta = read(name)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.bfloat16).eval()
    taken = {}
    for i in meta["layers"]:
        def take(_module, _inputs, output, i=i):
            taken[i] = (output[0] if isinstance(output, tuple) else output)[0]
        model.model.layers[i].register_forward_hook(take)
    with torch.no_grad():
        final = model.model(expected["ids"].long()[None]).last_hidden_state
        logits = model.lm_head(final)[0].float()
    found = {"layers": [spread(taken[i], want) for i, want in zip(meta["layers"], expected["layer_outputs"])],
             "final hidden": spread(final[0], expected["final_hidden"])}
    if "logits" in expected:
        found["logits"] = spread(logits, expected["logits"])
    if "top_logits" in expected:
        found["top logits"] = spread(logits.gather(1, expected["top_ids"].long()), expected["top_logits"])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", type=Path, default=ROOT / "models/smollm2", help="where SmolLM2 is")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    found = {path.name: of_drafter(path.name) for path in sorted(GOLDEN.glob("dflash_*.safetensors"))
             if path.name != "dflash_inputs.safetensors"}
    found["target_tiny.safetensors"] = of_target("target_tiny.safetensors", ROOT / "assets/tiny-target")
    found["target_smollm2.safetensors"] = of_target("target_smollm2.safetensors", arguments.smollm2)
    lines = [f"  {json.dumps(name)}: {json.dumps(errors)}" for name, errors in found.items()]
    (GOLDEN / "bf16.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
