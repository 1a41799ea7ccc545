#!/usr/bin/env python3
"""Checks an exported DFlash drafter, independently of the code that wrote it.

    scripts/check-export.py DIR [--target MODEL_DIR] [--inputs FILE [--expect FILE] [--tolerance X] [--write FILE]]

DIR holds config.json and model.safetensors. Without more, names, shapes and dtypes of the tensors (exactly
2 + 1 + 11 per layer, bfloat16) and the fields of config.json are checked. With --target, also that the drafter fits
that model. With --inputs (a safetensors file with ids [S], ctx [S, K*H], anchors [A], embed [V, H] and lm_head [V, H];
embed and lm_head may come from --target instead), the drafter runs in float32 and its hidden states [A, B, H] and
logits [A, B, V] are compared with those of --expect (either or both; per row |a-b|/|b|).

Needs numpy; where the safetensors package is installed, it must read the file as well.
Exit codes: 0 everything holds, 1 something does not, 2 usage or a file that cannot be read.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from tensorfile import TensorFile, write

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_target_layers",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--target", type=Path, metavar="MODEL_DIR", help="the target's Hugging Face directory")
    parser.add_argument("--inputs", type=Path, metavar="FILE", help="inputs of a forward pass")
    parser.add_argument("--expect", type=Path, metavar="FILE", help="hidden and/or logits to compare with")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative distance of a row (default 1e-4)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="save the computed hidden and logits")
    args = parser.parse_args()
    if (args.expect or args.write) and not args.inputs:
        parser.error("--expect and --write need --inputs")
    try:
        problems = run(args)
    except (OSError, ValueError, KeyError) as error:
        text = f"no field or tensor {error}" if isinstance(error, KeyError) else error
        print(f"check-export: {text}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"FAIL {problem}")
    print(f"check-export: {args.dir}: {f'{len(problems)} problems' if problems else 'ok'}")
    return 1 if problems else 0


def run(args):
    """Every problem found, as lines of text."""
    config = json.loads((args.dir / "config.json").read_text(encoding="utf-8"))
    weights = TensorFile(args.dir / "model.safetensors")
    problems = config_problems(config)
    if problems:
        return problems  # the shapes below follow from these fields
    problems = tensor_problems(config, weights) + package_problems(weights)
    if args.target:
        problems += target_problems(config, json.loads((args.target / "config.json").read_text(encoding="utf-8")))
    layers = config["num_hidden_layers"]
    print(f"{len(list(weights))} tensors for {layers} layers (2 + 1 + 11 * {layers} = {3 + 11 * layers}), metadata {weights.metadata}")
    if problems or not args.inputs:
        return problems
    given = TensorFile(args.inputs)
    embed, lm_head = (given["embed"], given["lm_head"]) if "embed" in given else target_ends(args.target)
    params = {name: weights[name] for name in weights}
    hidden = drafter_hidden(params, config, embed, given["ids"], given["ctx"], given["anchors"])
    result = {"hidden": hidden, "logits": hidden @ lm_head.T}
    if args.write:
        write(args.write, result)
    return problems + (expectation_problems(result, TensorFile(args.expect), args.tolerance) if args.expect else [])


def config_problems(config):
    problems = []

    def check(holds, text):
        if not holds:
            problems.append(f"config.json: {text}")

    def whole(value, least):
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    exact = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    for field, value in exact.items():
        check(field in config and config[field] == value, f"{field} is {config.get(field)!r}, expected {value!r}")
    for field in SIZES:
        check(whole(config.get(field), 1), f"{field} is {config.get(field)!r}, expected a positive integer")
    check(whole(config.get("block_size"), 2), f"block_size is {config.get('block_size')!r}, expected an integer of at least 2")
    eps = config.get("rms_norm_eps")
    check(isinstance(eps, float) and 0 < eps < 0.01, f"rms_norm_eps is {eps!r}, expected a small positive number")

    rope, theta = config.get("rope_parameters"), config.get("rope_theta")
    check(isinstance(rope, dict), f"rope_parameters is {rope!r}, expected an object")
    check(isinstance(theta, (int, float)) and theta > 0, f"rope_theta is {theta!r}, expected a positive number")
    if isinstance(rope, dict):
        check(rope.get("rope_type") == "default", f"rope type {rope.get('rope_type')!r} is not computed here")
        check(rope.get("rope_theta") == theta, f"rope_parameters has theta {rope.get('rope_theta')!r}, rope_theta is {theta!r}")
    check(config.get("rope_scaling") is None, f"rope_scaling is {config.get('rope_scaling')!r} beside the default rope type")

    types, window = config.get("layer_types"), config.get("sliding_window")
    known = isinstance(types, list) and set(types) <= {"full_attention", "sliding_attention"}
    check(known and len(types) == config.get("num_hidden_layers"), f"layer_types is {types!r}, expected one known type per layer")
    check("sliding_window" in config, "sliding_window is absent, expected null or a number")
    check(window is None or whole(window, 1), f"sliding_window is {window!r}")
    if known and "sliding_attention" in types:
        check(window is not None, "a layer slides but sliding_window is null")

    dflash = config.get("dflash_config")
    dflash = dflash if isinstance(dflash, dict) else {}
    mask, ids = dflash.get("mask_token_id"), dflash.get("target_layer_ids")
    check(whole(mask, 0), f"dflash_config.mask_token_id is {mask!r}, expected a token id")
    listed = isinstance(ids, list) and bool(ids) and all(whole(i, 0) for i in ids)
    check(listed and ids == sorted(set(ids)), f"dflash_config.target_layer_ids is {ids!r}, expected rising layer numbers")
    if not problems:
        check(mask < config["vocab_size"], f"mask_token_id {mask} is not below vocab_size {config['vocab_size']}")
        check(ids[-1] < config["num_target_layers"], f"target layer {ids[-1]} of {config['num_target_layers']}")
        check(config["num_attention_heads"] % config["num_key_value_heads"] == 0, "the heads are no multiple of the key-value heads")
        check(config["head_dim"] % 2 == 0, f"head_dim {config['head_dim']} is odd, rotary needs pairs")
    return problems


def expected_shapes(config):
    """Every tensor of a drafter with its shape, projections as [out, in]."""
    h, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    layer = {
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "mlp.gate_proj": (inner, h),
        "mlp.up_proj": (inner, h),
        "mlp.down_proj": (h, inner),
    }
    captured = len(config["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (h, captured * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for i in range(config["num_hidden_layers"]):
        shapes.update({f"layers.{i}.{name}.weight": shape for name, shape in layer.items()})
    return shapes


def tensor_problems(config, weights):
    expected = expected_shapes(config)
    problems = [f"missing tensor {name}" for name in expected if name not in weights]
    problems += [f"unexpected tensor {name}" for name in weights if name not in expected]
    for name, shape in expected.items():
        if name not in weights:
            continue
        if weights.shapes[name] != shape:
            problems.append(f"{name} has shape {list(weights.shapes[name])}, expected {list(shape)}")
        if weights.dtypes[name] != "BF16":
            problems.append(f"{name} has dtype {weights.dtypes[name]}, expected BF16")
        if not np.isfinite(weights[name]).all():
            problems.append(f"{name} holds NaN or infinite values")
    return problems


def package_problems(weights):
    """What the safetensors package, where it is installed, sees differently."""
    try:
        from safetensors import safe_open
    except ImportError:
        return []
    with safe_open(weights.path, "numpy") as file:
        seen = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    return [] if seen == weights.shapes else ["the safetensors package reads other names or shapes than this"]


def target_problems(config, target):
    same = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_target_layers": "num_hidden_layers"}
    same["max_position_embeddings"] = "max_position_embeddings"
    return [
        f"{ours} is {config[ours]}, the target's {theirs} is {target.get(theirs)}"
        for ours, theirs in same.items()
        if config[ours] != target.get(theirs)
    ]


def target_ends(directory):
    """The target's embedding and lm_head, both [V, H], of a model of one file."""
    if directory is None:
        raise ValueError("the inputs hold no embed and lm_head; name the target with --target")
    file = TensorFile(directory / "model.safetensors")
    embed = np.asarray(file["model.embed_tokens.weight"], np.float32)
    return embed, np.asarray(file["lm_head.weight"], np.float32) if "lm_head.weight" in file else embed


def drafter_hidden(params, config, embed, ids, ctx, anchors):
    """The drafter's hidden states after its final norm, [A, B, H].

    Block by block, as decoding does it: the context's keys and values of all layers come first, then each block runs
    through the layers against those strictly before its anchor.
    """
    d, eps, size = config["head_dim"], config["rms_norm_eps"], config["block_size"]
    layers = range(config["num_hidden_layers"])
    cos, sin = rotary_tables(len(ids) + size, d, config["rope_theta"])

    def weight(i, name):
        return params[f"layers.{i}.{name}.weight"]

    def heads(x, i, name, positions):
        """Projection, norm of each head, rotation: [n, heads, d]."""
        y = (x @ weight(i, f"self_attn.{name}_proj").T).reshape(len(x), -1, d)
        return rotate(rms_norm(y, weight(i, f"self_attn.{name}_norm"), eps), cos[positions], sin[positions])

    def values(x, i):
        return (x @ weight(i, "self_attn.v_proj").T).reshape(len(x), -1, d)

    context = rms_norm(ctx @ params["fc.weight"].T, params["hidden_norm.weight"], eps)
    everywhere = np.arange(len(ids))
    stored = [(heads(context, i, "k", everywhere), values(context, i)) for i in layers]

    def block(anchor):
        tokens = np.full(size, config["dflash_config"]["mask_token_id"])
        tokens[0] = ids[anchor]
        positions = anchor + np.arange(size)
        h = embed[tokens]
        for i in layers:
            x = rms_norm(h, weight(i, "input_layernorm"), eps)
            keys = np.concatenate([stored[i][0][:anchor], heads(x, i, "k", positions)])
            vals = np.concatenate([stored[i][1][:anchor], values(x, i)])
            at = np.concatenate([everywhere[:anchor], positions])
            visible = np.ones((size, len(at)), bool)
            if config["layer_types"][i] == "sliding_attention":
                distance = positions[:, None] - at[None, :]
                visible = (distance >= 0) & (distance < config["sliding_window"])
            h = h + attention(heads(x, i, "q", positions), keys, vals, visible) @ weight(i, "self_attn.o_proj").T
            y = rms_norm(h, weight(i, "post_attention_layernorm"), eps)
            gate = y @ weight(i, "mlp.gate_proj").T
            h = h + (gate / (1 + np.exp(-gate)) * (y @ weight(i, "mlp.up_proj").T)) @ weight(i, "mlp.down_proj").T
        return rms_norm(h, params["norm.weight"], eps)

    return np.stack([block(int(anchor)) for anchor in anchors])


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(eps)) * weight


def rotary_tables(length, d, theta):
    """cos and sin, each [length, 1, d/2]; the angles are taken in float64."""
    angles = np.arange(length)[:, None] * float(theta) ** (-np.arange(0, d, 2) / d)
    return np.cos(angles).astype(np.float32)[:, None], np.sin(angles).astype(np.float32)[:, None]


def rotate(x, cos, sin):
    """x [n, heads, d]: element j turns with element j + d/2."""
    first, second = np.split(x, 2, -1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(q, keys, vals, visible):
    """q [n, heads, d], keys and vals [m, kv_heads, d], visible [n, m] -> [n, heads * d]."""
    group = q.shape[1] // keys.shape[1]
    out = np.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ keys[:, head // group].T / np.float32(np.sqrt(q.shape[2]))
        scores = np.where(visible, scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = share / share.sum(-1, keepdims=True) @ vals[:, head // group]
    return out.reshape(len(q), -1)


def expectation_problems(result, expected, tolerance):
    names = [name for name in result if name in expected]
    if not names:
        return [f"{expected.path} holds neither hidden nor logits"]
    problems = []
    for name in names:
        want = expected[name].astype(np.float32)
        if want.shape != result[name].shape:
            problems.append(f"{name}: computed {list(result[name].shape)}, expected {list(want.shape)}")
            continue
        worst = np.max(np.linalg.norm(result[name] - want, axis=-1) / np.linalg.norm(want, axis=-1))
        print(f"{name}: largest relative distance of a row {worst:.2e}")
        if not worst <= tolerance:
            problems.append(f"{name} differs: a row's relative distance is {worst:.2e}, allowed {tolerance:.0e}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
