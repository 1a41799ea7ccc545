#!/usr/bin/env python3
"""The operations of `cargo bench --bench cuda` in PyTorch, for comparison on the same GPU in the same hour.

Qwen3-8B shapes, random data, medians of CUDA-event times after a warm-up. `--models` also times a whole prefill
of Hugging Face's Qwen3 (8 documents of 2048 tokens, random weights), eager and compiled, and training steps of a
DFlash drafter with flex attention, float32 masters and fused AdamW. With several GPUs, also an all-reduce over all.
"""
import argparse
import time
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


def copies():
    size = 1 << 30
    host, device = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True), torch.empty(size, dtype=torch.uint8)
    show("pinned copy to the host", 1e-9 * size, "GB/s", lambda: host.copy_(device, non_blocking=True))
    show("pinned copy to the GPU", 1e-9 * size, "GB/s", lambda: device.copy_(host, non_blocking=True))


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


class Layer(torch.nn.Module):
    """A drafter's layer: queries of the blocks only, keys and values of context and blocks."""

    def __init__(self):
        super().__init__()
        linear = lambda inner, outer: torch.nn.Linear(inner, outer, bias=False)
        self.q, self.k, self.v = linear(HIDDEN, Q * DIM), linear(HIDDEN, KV * DIM), linear(HIDDEN, KV * DIM)
        self.o, self.gate, self.up, self.down = (linear(Q * DIM, HIDDEN), linear(HIDDEN, MLP), linear(HIDDEN, MLP),
                                                 linear(MLP, HIDDEN))
        self.norms = torch.nn.ModuleList([torch.nn.RMSNorm(HIDDEN, 1e-6), torch.nn.RMSNorm(HIDDEN, 1e-6)])
        self.q_norm, self.k_norm = torch.nn.RMSNorm(DIM, 1e-6), torch.nn.RMSNorm(DIM, 1e-6)

    def forward(self, h, context, attend, turn):
        x = self.norms[0](h)
        both = torch.cat([context, x], 0)
        heads = lambda t: t.view(1, t.shape[0], -1, DIM).transpose(1, 2)
        q, k = turn(self.q_norm(heads(self.q(x))), True), turn(self.k_norm(heads(self.k(both))), False)
        out = attend(q, k, heads(self.v(both)))
        h = h + self.o(out.transpose(1, 2).reshape(h.shape[0], -1))
        x = self.norms[1](h)
        return h + self.down(F.silu(self.gate(x)) * self.up(x))


class Drafter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = torch.nn.Linear(5 * HIDDEN, HIDDEN, bias=False), torch.nn.RMSNorm(HIDDEN, 1e-6)
        self.layers, self.last = torch.nn.ModuleList([Layer() for _ in range(5)]), torch.nn.RMSNorm(HIDDEN, 1e-6)

    def forward(self, h, states, attend, turn):
        context = self.norm(self.fc(states))
        for layer in self.layers:
            h = layer(h, context, attend, turn)
        return self.last(h)


def drafter():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    torch.set_default_dtype(torch.float32)
    net = Drafter().to(x_type)
    masters = [p.detach().float().clone() for p in net.parameters()]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    lm_head, embedding = torch.randn(VOCABULARY, HIDDEN).to(x_type) * 0.02, torch.randn(VOCABULARY, HIDDEN).to(x_type)
    compiled_attention = torch.compile(flex_attention)

    for anchors_each, length, documents in [(512, 2048, 2), (256, 550, 4)]:
        blocks, context = documents * anchors_each, documents * length
        rows = blocks * BLOCK
        anchors = (torch.arange(anchors_each) * (length - 1) // anchors_each).repeat(documents)
        starts = torch.arange(documents).repeat_interleave(anchors_each) * length

        def mask(b, h, query, key):
            n = query // BLOCK
            in_context = (key < context) & (key >= starts[n]) & (key < starts[n] + anchors[n])
            return in_context | ((key >= context) & ((key - context) // BLOCK == n))

        visible = create_block_mask(mask, 1, 1, rows, context + rows, device="cuda", _compile=True)
        own = (anchors[:, None] + torch.arange(BLOCK)).flatten()
        positions = torch.cat([torch.arange(length).repeat(documents), own])
        angles = positions[:, None] / 1e6 ** (torch.arange(0, DIM, 2) / DIM)
        cos, sin = (torch.cat([f(angles)] * 2, -1).to(x_type) for f in (torch.cos, torch.sin))

        def turn(x, queries):
            c, s = (cos[context:], sin[context:]) if queries else (cos, sin)
            low, high = x.chunk(2, -1)
            return x * c + torch.cat([-high, low], -1) * s

        def attend(q, k, v):
            return compiled_attention(q, k, v, block_mask=visible, enable_gqa=True)

        states = torch.randn(context, 5 * HIDDEN).to(x_type)
        ids, label = torch.randint(VOCABULARY, (rows,)), torch.randint(VOCABULARY, (rows,))
        weight = torch.exp(-(torch.arange(BLOCK) - 1) / 7.0)
        weight[0] = 0
        weight = weight.repeat(blocks)
        scored, weight_sum = weight > 0, weight.sum().item()

        def run(forward):
            hidden = forward(embedding[ids], states, attend, turn)
            d_hidden = torch.zeros_like(hidden)
            x, of, w = hidden.detach()[scored], label[scored], weight[scored]
            parts = []
            for part in range(0, x.shape[0], 2048):
                piece = x[part:part + 2048].requires_grad_()
                losses = F.cross_entropy(F.linear(piece, lm_head).float(), of[part:part + 2048], reduction="none")
                parts.append(torch.autograd.grad((losses * w[part:part + 2048]).sum(), piece)[0])
            d_hidden[scored] = torch.cat(parts)
            hidden.backward(d_hidden)
            for p, master in zip(net.parameters(), masters):
                master.grad.copy_(p.grad)
                p.grad = None
            with torch.no_grad():
                torch._foreach_div_([m.grad for m in masters], weight_sum)
                torch.nn.utils.clip_grad_norm_(masters, 1.0)
                optimizer.step()
                torch._foreach_copy_(list(net.parameters()), masters)

        for name, forward in [("eager", net), ("compiled", torch.compile(net))]:
            ms = median_ms(lambda: run(forward), 5)
            what = f"drafter, {anchors_each} anchors, {length} tokens, {documents} documents, {name}"
            print(f"{what:58} {ms:9.3f} ms {documents / ms * 1e3:9.2f} samples/s", flush=True)


def sum_of(rank, count):
    import torch.distributed as dist
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29531", rank=rank, world_size=count,
                            device_id=torch.device("cuda", rank))
    values, times = torch.zeros(1 << 28, device="cuda"), []
    for _ in range(12):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        dist.all_reduce(values)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    seconds = min(times)
    speed = 2e-9 * (count - 1) / count * 4 * values.numel() / seconds
    print(f"all-reduce of 1 GiB float32, rank {rank} of {count} {1e3 * seconds:9.3f} ms {speed:9.1f} GB/s bus", flush=True)
    dist.destroy_process_group()


def sums():
    count = torch.cuda.device_count()
    if count > 1:
        torch.multiprocessing.spawn(sum_of, (count,), count)


PARTS = {part.__name__: part for part in [products, causal, head, blocks, copies, sums, model, drafter]}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", action="store_true", help="also a whole prefill and training steps")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be given again")
    arguments = parser.parse_args()
    torch.set_default_device("cuda")
    x_type = torch.bfloat16
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in arguments.only or [name for name in PARTS if arguments.models or name not in ("model", "drafter")]:
        try:
            PARTS[name]()
        except Exception as error:  # the other lines still count
            print(f"{name}: {error}", flush=True)
        torch.cuda.empty_cache()
