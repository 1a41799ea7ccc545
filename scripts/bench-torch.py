#!/usr/bin/env python3
"""The operations of `cargo bench --bench cuda` in PyTorch, for comparison on the same GPU in the same hour.

Qwen3-8B shapes, random data, medians of CUDA-event times after a warm-up. `--model` also times a whole prefill
of Hugging Face's Qwen3 (8 documents of 2048 tokens, random weights), eager and compiled.
"""
import argparse
import torch
import torch.nn.functional as F

TOKENS, DOCUMENT, HIDDEN, MLP, VOCABULARY = 16384, 2048, 4096, 12288, 151936
Q, KV, DIM = 32, 8, 128
ANCHORS, BLOCK, DOCUMENTS = 512, 16, 2


def median_ms(run, repeats=9):
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def show(name, work, unit, run):
    ms = median_ms(run)
    print(f"{name:44} {ms:9.3f} ms {work / ms * 1e3:9.1f} {unit}", flush=True)


def products():
    for name, inner, outer in [("qkv", HIDDEN, 6144), ("o", HIDDEN, HIDDEN), ("gate+up", HIDDEN, 2 * MLP),
                               ("down", MLP, HIDDEN)]:
        x, w = torch.randn(TOKENS, inner).to(x_type), torch.randn(outer, inner).to(x_type)
        show(f"product {name}", 2e-12 * TOKENS * inner * outer, "TFLOP/s", lambda: F.linear(x, w))


def causal():
    q = torch.randn(8, Q, DOCUMENT, DIM).to(x_type)
    k, v = torch.randn(8, KV, DOCUMENT, DIM).to(x_type), torch.randn(8, KV, DOCUMENT, DIM).to(x_type)
    work = 4e-12 * 8 * DOCUMENT * (DOCUMENT + 1) / 2 * Q * DIM
    show("causal attention, 8 x 2048", work, "TFLOP/s",
         lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def blocks():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    rows, context = DOCUMENTS * ANCHORS * BLOCK, DOCUMENTS * DOCUMENT
    anchors = torch.arange(ANCHORS).repeat(DOCUMENTS) * (DOCUMENT // ANCHORS)
    starts = torch.arange(DOCUMENTS).repeat_interleave(ANCHORS) * DOCUMENT

    def mask(b, h, query, key):
        n = query // BLOCK
        in_context = (key < context) & (key >= starts[n]) & (key < starts[n] + anchors[n])
        return in_context | ((key >= context) & ((key - context) // BLOCK == n))

    visible = create_block_mask(mask, 1, 1, rows, context + rows, device="cuda", _compile=True)
    attend = torch.compile(flex_attention)
    q = torch.randn(1, Q, rows, DIM).to(x_type).requires_grad_()
    k = torch.randn(1, KV, context + rows, DIM).to(x_type).requires_grad_()
    v = torch.randn(1, KV, context + rows, DIM).to(x_type).requires_grad_()
    d_out = torch.randn(1, Q, rows, DIM).to(x_type)
    pairs = float(anchors.sum()) * BLOCK + rows * BLOCK
    work = 4e-12 * pairs * Q * DIM
    show("block attention", work, "TFLOP/s", lambda: attend(q, k, v, block_mask=visible, enable_gqa=True))
    out = attend(q, k, v, block_mask=visible, enable_gqa=True)
    show("block attention backward", 2.5 * work, "TFLOP/s",
         lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True))


def head():
    rows = DOCUMENTS * ANCHORS * (BLOCK - 1)
    x = torch.randn(rows, HIDDEN).to(x_type).requires_grad_()
    w, label = torch.randn(VOCABULARY, HIDDEN).to(x_type), torch.randint(VOCABULARY, (rows,))

    def run():
        for part in range(0, rows, 2048):
            z = F.linear(x[part:part + 2048], w).float()
            torch.autograd.grad(F.cross_entropy(z, label[part:part + 2048], reduction="sum"), x)

    show("head and loss", 4e-12 * rows * HIDDEN * VOCABULARY, "TFLOP/s", run)


def model():
    from transformers import Qwen3Config, Qwen3Model
    config = Qwen3Config(hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=36, num_attention_heads=Q,
                         num_key_value_heads=KV, head_dim=DIM, vocab_size=VOCABULARY, rope_theta=1e6,
                         max_position_embeddings=40960, attn_implementation="sdpa")
    torch.set_default_dtype(torch.bfloat16)
    net = Qwen3Model(config).eval()
    ids = torch.randint(VOCABULARY, (8, DOCUMENT))

    def run(net):
        with torch.no_grad():
            states = net(ids, use_cache=False, output_hidden_states=True).hidden_states
            torch.cat([states[i + 1] for i in (1, 9, 17, 25, 33)], -1)

    for name, network in [("prefill, eager", net), ("prefill, compiled", torch.compile(net))]:
        ms = median_ms(lambda: run(network), 5)
        print(f"{name:44} {ms:9.3f} ms {TOKENS / ms * 1e3:9.0f} tokens/s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="store_true", help="also a whole prefill")
    arguments = parser.parse_args()
    torch.set_default_device("cuda")
    x_type = torch.bfloat16
    print(torch.cuda.get_device_name(), torch.__version__)
    for part in [products, causal, head, blocks] + [model] * arguments.model:
        part()
        torch.cuda.empty_cache()
