#!/usr/bin/env python3
"""Trains the demo's drafter in one plain PyTorch process: the peer for acceptance and speed at equal steps.

    scripts/torch_reference_train.py [--documents N] [--epochs N] [options of the run]
    scripts/torch_reference_train.py --evaluate EXPORT_DIR

Prefills a Llama target over a file of conversations, keeps the captured hidden states in memory, trains a DFlash drafter
(arXiv 2602.06036; full attention only) with torch's own autograd and AdamW, and prints the accepted length of the
decoding walk over the held-out conversations. --evaluate prints the walk of an exported drafter over all documents
instead. Options have the meaning and the defaults of the demo; the draw of documents and anchors is this script's own.

Needs torch (1.13 or newer), numpy, tokenizers and jinja2. Exit codes: 0 done, 2 usage, 1 anything else.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from tensorfile import TensorFile, write

ASSETS = Path(__file__).resolve().parent.parent / "assets"
GENERATED = "assistant"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target-model", type=Path, default=ASSETS / "tiny-target")
    add("--data", type=Path, default=ASSETS / "demo-chat.jsonl")
    add("--documents", type=int, help="use only the first N conversations")
    add("--eval-documents", type=int, default=23)
    add("--evaluate", type=Path, metavar="DIR", help="an exported drafter to measure instead of training")
    add("--save", type=Path, metavar="DIR", help="write the trained drafter in serving format")
    add("--target-layers", default="1,3,5")
    add("--draft-layers", type=int, default=2)
    add("--block-size", type=int, default=8)
    add("--mask-token-id", type=int, default=3)
    add("--init", choices=("normal", "fan-in"), default="normal", help="matrices from N(0, 0.02) or N(0, 1/sqrt(in))")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1)
    add("--device", default="cpu", help="cpu, or cuda with torch 2.0 or newer")
    add("--epochs", type=float, default=4)
    add("--max-steps", type=int, help="stop after so many steps; the schedule does not depend on it")
    add("--anchors", type=int, default=24)
    add("--batch-anchors", type=int, default=96)
    add("--lr", type=float, default=3e-3)
    add("--schedule", choices=("cosine", "constant", "wsd"), default="cosine")
    add("--warmup", type=float, default=0.04)
    add("--weight-decay", type=float, default=0.01)
    add("--beta2", type=float, default=0.95)
    add("--clip", type=float, default=1.0)
    add("--gamma", type=float, default=7.0)
    add("--streak-alpha", type=float, default=0.0)
    add("--dpace-alpha", type=float)
    add("--use-soft-labels", action="store_true")
    add("--kl-temperature", type=float, default=1.0)
    add("--kl-weight", type=float, default=0.5)
    add("--cap-lambda", type=float, default=0.0)
    return parser


def main():
    options = arguments().parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.device != "cpu":
        torch.set_default_device(options.device)
        torch.set_float32_matmul_precision("high")
    layers = [int(i) for i in options.target_layers.split(",")]
    exported = None
    if options.evaluate:
        exported = json.loads((options.evaluate / "config.json").read_text(encoding="utf-8"))
        layers = exported["dflash_config"]["target_layer_ids"]
    target = Target(options.target_model)

    start = time.time()
    documents = read_documents(options.data, options.target_model, options.documents)
    tokens = sum(len(document.ids) for document in documents)
    for document in documents:
        target.prefill(document, layers)
    took = time.time() - start
    print(f"prefilled {len(documents)} documents, {tokens} tokens in {took:.1f} s ({tokens / took:.0f} tokens/s)")

    if exported:
        shape = Shape.of_export(exported)
        weights = TensorFile(options.evaluate / "model.safetensors")
        params = {name: on_device(weights[name]) for name in weights}
        print(f"accepted length over all documents: {walk(params, shape, target, documents):.3f}")
        return 0

    shape = Shape.of_target(target.config, layers, options)
    order = shuffled(len(documents), host_generator(options.seed))
    held_out = [documents[i] for i in order[: options.eval_documents]]
    training = [documents[i] for i in order[options.eval_documents :] if documents[i].eligible]
    params = initial_params(shape, options.init)
    print(f"accepted length before: {walk(params, shape, target, held_out):.3f} on {len(held_out)} held-out documents")
    train(params, shape, target, training, options, report=print)
    print(f"accepted length after: {walk(params, shape, target, held_out):.3f}")
    if options.save:
        save(options.save, params, shape, target.config)
    return 0


def on_device(values):
    """A numpy array as a tensor on the default device."""
    return torch.from_numpy(values).to(torch.empty(0).device)


def host_generator(seed):
    """Draws that are the same whatever the device."""
    return torch.Generator("cpu").manual_seed(seed)


def shuffled(count, generator):
    return torch.randperm(count, generator=generator, device="cpu").tolist()


@dataclass
class Document:
    ids: list  # token ids [S]
    mask: list  # 1 where the token is supervised [S]
    states: torch.Tensor = None  # captured hidden states [S, K*H]
    final: torch.Tensor = None  # the target's hidden state after its final norm [S, H]

    @property
    def eligible(self):
        """Positions that may be an anchor: supervised, and so is the next."""
        return [p for p in range(len(self.ids) - 1) if self.mask[p] and self.mask[p + 1]]


def read_documents(path, model, limit):
    """Conversations as token ids and a mask of the answers, by render boundaries."""
    from jinja2 import Environment
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    beside = model / "chat_template.jinja"
    template = Environment().from_string(beside.read_text(encoding="utf-8") if beside.exists() else settings["chat_template"])
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def render(messages, prompt):
        return template.render(messages=messages, add_generation_prompt=prompt)

    documents = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if len(documents) == limit:
                break
            row = json.loads(line)
            messages = row["messages"]
            whole = render(messages, False)
            encoded = tokenizer.encode(whole, add_special_tokens=False)
            mask = [0] * len(encoded.ids)
            for turn, message in enumerate(messages):
                if message["role"] != GENERATED:
                    continue
                opened, closed = render(messages[:turn], True), render(messages[: turn + 1], False)
                if not (whole.startswith(opened) and whole.startswith(closed)):
                    continue  # the template rewrites this turn, so where it stands is not known
                inside = [i for i, (a, b) in enumerate(encoded.offsets) if len(opened) <= a and b <= len(closed)]
                text_end = len(opened) + len(message["content"])
                text = [i for i in inside if encoded.offsets[i][1] <= text_end]
                cut = row.get("finish_reason") == "length" and turn == len(messages) - 1
                ends = [] if cut else [i for i in inside if encoded.ids[i] in special]
                for i in inside:
                    mask[i] = int(i <= max(ends or text, default=-1))
            documents.append(Document(encoded.ids, mask))
    return documents


def rms_norm(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


class Rotary:
    """cos and sin of every position, applied to [..., positions, d] with halves turning together."""

    def __init__(self, length, d, theta):
        angles = torch.arange(length)[:, None] * theta ** (-torch.arange(0, d, 2) / d)[None]
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x, positions):
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Target:
    """A Llama model with tied or separate lm_head, run one document at a time without gradients."""

    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if self.config["model_type"] != "llama":
            raise SystemExit(f"{directory} is a {self.config['model_type']} model; only llama is run here")
        file = TensorFile(directory / "model.safetensors")
        self.weights = {name: on_device(file[name]) for name in file}
        self.embed = self.weights["model.embed_tokens.weight"]
        self.lm_head = self.weights.get("lm_head.weight", self.embed)
        self.theta = self.config.get("rope_parameters", self.config)["rope_theta"]
        self.d = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        self.rotary = Rotary(self.config["max_position_embeddings"], self.d, self.theta)

    @torch.no_grad()
    def prefill(self, document, layers):
        config, eps, length = self.config, self.config["rms_norm_eps"], len(document.ids)
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        positions = torch.arange(length)
        hidden_later = positions[None] > positions[:, None]
        h, captured = self.embed[document.ids], []
        for i in range(config["num_hidden_layers"]):

            def linear(x, name, i=i):
                return F.linear(x, self.weights[f"model.layers.{i}.{name}.weight"])

            def heads(x, name, linear=linear):
                return linear(x, f"self_attn.{name}_proj").view(length, -1, self.d).transpose(0, 1)

            x = rms_norm(h, self.weights[f"model.layers.{i}.input_layernorm.weight"], eps)
            q, k = self.rotary(heads(x, "q"), positions), self.rotary(heads(x, "k"), positions)
            scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(self.d)
            mixed = scores.masked_fill(hidden_later, -math.inf).softmax(-1) @ heads(x, "v").repeat_interleave(group, 0)
            h = h + linear(mixed.transpose(0, 1).reshape(length, -1), "self_attn.o_proj")
            x = rms_norm(h, self.weights[f"model.layers.{i}.post_attention_layernorm.weight"], eps)
            h = h + linear(F.silu(linear(x, "mlp.gate_proj")) * linear(x, "mlp.up_proj"), "mlp.down_proj")
            if i in layers:
                captured.append(h)
        document.states = torch.cat(captured, -1)
        document.final = rms_norm(h, self.weights["model.norm.weight"], eps)


@dataclass
class Shape:
    """The sizes of a drafter."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    d: int
    eps: float
    theta: float
    block: int
    mask_token: int
    captured: list
    positions: int

    @classmethod
    def of_target(cls, config, captured, options):
        d = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return cls(
            config["hidden_size"], config["intermediate_size"], options.draft_layers, config["num_attention_heads"],
            config["num_key_value_heads"], d, config["rms_norm_eps"], config.get("rope_parameters", config)["rope_theta"],
            options.block_size, options.mask_token_id, captured, config["max_position_embeddings"],
        )  # fmt: skip

    @classmethod
    def of_export(cls, config):
        if set(config["layer_types"]) != {"full_attention"}:
            raise SystemExit("a drafter with sliding layers is not run here; see check-export.py")
        dflash = config["dflash_config"]
        return cls(
            config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"], config["num_attention_heads"],
            config["num_key_value_heads"], config["head_dim"], config["rms_norm_eps"], config["rope_theta"],
            config["block_size"], dflash["mask_token_id"], dflash["target_layer_ids"], config["max_position_embeddings"],
        )  # fmt: skip

    def params(self):
        """Every tensor's shape by its name in the serving format."""
        h, q, kv = self.hidden, self.heads * self.d, self.kv_heads * self.d
        shapes = {"fc": (h, len(self.captured) * h), "hidden_norm": (h,), "norm": (h,)}
        for i in range(self.layers):
            prefix = f"layers.{i}."
            attention = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q), "q_norm": (self.d,), "k_norm": (self.d,)}
            mlp = {"gate_proj": (self.inner, h), "up_proj": (self.inner, h), "down_proj": (h, self.inner)}
            shapes.update({prefix + "input_layernorm": (h,), prefix + "post_attention_layernorm": (h,)})
            shapes.update({f"{prefix}self_attn.{name}": shape for name, shape in attention.items()})
            shapes.update({f"{prefix}mlp.{name}": shape for name, shape in mlp.items()})
        return {f"{name}.weight": shape for name, shape in shapes.items()}


def initial_params(shape, init):
    params = {}
    for name, size in shape.params().items():
        if len(size) == 1:
            params[name] = torch.ones(size)
        else:
            params[name] = torch.randn(size) * (0.02 if init == "normal" else size[1] ** -0.5)
    return {name: value.requires_grad_() for name, value in params.items()}


class Batch:
    """Blocks of several documents, padded to D documents of S tokens with A anchors each.

    A padding anchor sees no context and has no valid slot.
    """

    def __init__(self, documents, anchors, shape):
        count, width = len(documents), max(len(each) for each in anchors)
        longest = max(len(document.ids) for document in documents)
        far = longest + shape.block
        ids = torch.zeros(count, far, dtype=torch.long)
        mask = torch.zeros(count, far, dtype=torch.long)
        self.states = torch.zeros(count, longest, documents[0].states.shape[1])
        self.final = torch.zeros(count, far, documents[0].final.shape[1])
        self.anchors = torch.zeros(count, width, dtype=torch.long)
        real = torch.zeros(count, width, dtype=torch.bool)
        for row, (document, chosen) in enumerate(zip(documents, anchors)):
            length = len(document.ids)
            ids[row, :length] = torch.tensor(document.ids)
            mask[row, :length] = torch.tensor(document.mask)
            self.states[row, :length] = document.states
            self.final[row, :length] = document.final
            self.anchors[row, : len(chosen)] = torch.tensor(chosen)
            real[row, : len(chosen)] = True
        rows = torch.arange(count)[:, None, None]
        slots = torch.arange(shape.block)
        self.positions = self.anchors[..., None] + slots  # [D, A, B]
        self.first = ids[rows[..., 0], self.anchors]
        self.labels = ids[rows, self.positions][..., 1:]
        self.valid = (mask[rows, self.positions] > 0)[..., 1:] & real[..., None]
        self.before = self.final[rows, self.positions - 1][..., 1:, :]
        self.visible = (torch.arange(longest) < self.anchors[..., None]) & real[..., None]  # [D, A, S]


def drafter_hidden(params, shape, target, batch, rotary):
    """-> hidden states after the final norm [D, A, B, H]."""
    documents, count = batch.anchors.shape
    block, d, group = shape.block, shape.d, shape.heads // shape.kv_heads
    longest = batch.states.shape[1]
    everywhere = torch.arange(longest)
    unseen = ~batch.visible[:, None, :, None].expand(-1, 1, -1, block, -1).reshape(documents, 1, count * block, longest)
    tokens = torch.full((documents, count, block), shape.mask_token)
    tokens[..., 0] = batch.first
    h = target.embed[tokens].view(documents, count * block, -1)
    context = rms_norm(F.linear(batch.states, params["fc.weight"]), params["hidden_norm.weight"], shape.eps)
    positions = batch.positions.view(documents, 1, count * block)

    for i in range(shape.layers):

        def weight(name, i=i):
            return params[f"layers.{i}.{name}.weight"]

        def heads(x, name, weight=weight):
            y = F.linear(x, weight(f"self_attn.{name}_proj")).view(documents, x.shape[1], -1, d)
            if name != "v":
                y = rms_norm(y, weight(f"self_attn.{name}_norm"), shape.eps)
            return y.transpose(1, 2)

        def key(x, at, heads=heads):
            return rotary(heads(x, "k"), at).repeat_interleave(group, 1)

        def per_block(x):
            return x.reshape(documents, shape.heads, count, block, d)

        x = rms_norm(h, weight("input_layernorm"), shape.eps)
        q = rotary(heads(x, "q"), positions) / math.sqrt(d)
        toward_context = (q @ key(context, everywhere).transpose(2, 3)).masked_fill(unseen, -math.inf)
        toward_block = per_block(q) @ per_block(key(x, positions)).transpose(3, 4)
        share = torch.cat([toward_context, toward_block.flatten(2, 3)], -1).softmax(-1)
        mixed = share[..., :longest] @ heads(context, "v").repeat_interleave(group, 1)
        own = per_block_shares(share[..., longest:], count) @ per_block(heads(x, "v").repeat_interleave(group, 1))
        mixed = mixed + own.flatten(2, 3)
        h = h + F.linear(mixed.transpose(1, 2).flatten(2), weight("self_attn.o_proj"))
        x = rms_norm(h, weight("post_attention_layernorm"), shape.eps)
        h = h + F.linear(F.silu(F.linear(x, weight("mlp.gate_proj"))) * F.linear(x, weight("mlp.up_proj")), weight("mlp.down_proj"))
    return rms_norm(h, params["norm.weight"], shape.eps).view(documents, count, block, -1)


def per_block_shares(share, count):
    return share.unflatten(2, (count, share.shape[2] // count))


def slot_weights(chance, valid, options):
    """The weight of every slot [.., B-1] from the drafter's probability of the label; no gradient."""
    weights = valid.float()
    if options.gamma:
        weights = weights * torch.exp(-torch.arange(valid.shape[-1]) / options.gamma)
    if options.streak_alpha:
        survived = torch.where(valid, chance, torch.ones(())).cumprod(-1)
        survived = F.pad(survived, (1, 0), value=1.0)[..., :-1]
        weights = weights * (1 - options.streak_alpha + options.streak_alpha * survived)
    if options.dpace_alpha is not None:
        smoothed = (1 - options.dpace_alpha) * chance + options.dpace_alpha
        reach = torch.where(valid, smoothed, torch.ones(())).cumprod(-1) * valid
        weights = weights * (reach.sum(-1, keepdim=True) - reach.cumsum(-1) + reach)
    return weights


def loss_terms(hidden, target, batch, options):
    """-> (loss sum, weight sum, correct slots, valid slots). Only valid slots reach the head."""
    valid = batch.valid
    logits = F.linear(hidden[..., 1:, :][valid], target.lm_head)
    labels = batch.labels[valid]
    log_chance = logits.log_softmax(-1)
    own = log_chance.gather(1, labels[:, None])[:, 0]
    chance = torch.ones(valid.shape).masked_scatter(valid, own.detach().exp())
    weights = slot_weights(chance, valid, options)[valid]
    terms = -own
    if options.use_soft_labels:
        wanted = (F.linear(batch.before[valid], target.lm_head) / options.kl_temperature).log_softmax(-1)
        softened = (logits / options.kl_temperature).log_softmax(-1)
        divergence = (wanted.exp() * (wanted - softened)).sum(-1) * options.kl_temperature**2
        terms = (1 - options.kl_weight) * terms + options.kl_weight * divergence
    correct = logits.argmax(-1) == labels
    if options.cap_lambda:
        terms = terms - options.cap_lambda * correct * (log_chance.exp() * log_chance).sum(-1)
    return (weights * terms).sum(), weights.sum(), int(correct.sum()), len(labels)


def learning_rate(options, done):
    """The rate after a share `done` of the planned anchors."""
    if done < options.warmup:
        return options.lr * done / options.warmup
    floor, after = 0.1, (done - options.warmup) / (1 - options.warmup)
    if options.schedule == "cosine":
        return options.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * after)))
    if options.schedule == "wsd" and done > 0.8:
        return options.lr * (1 - (1 - floor) * (done - 0.8) / 0.2)
    return options.lr


def steps_of_epoch(documents, options, generator):
    """Documents in a new order with their anchors, cut into steps of at most --batch-anchors."""
    step, size = [], 0
    for i in shuffled(len(documents), generator):
        eligible = documents[i].eligible
        chosen = shuffled(len(eligible), generator)[: options.anchors]
        if step and size + len(chosen) > options.batch_anchors:
            yield step
            step, size = [], 0
        step.append((documents[i], sorted(eligible[j] for j in chosen)))
        size += len(chosen)
    if step:
        yield step


def train(params, shape, target, documents, options, report=lambda line: None):
    generator = host_generator(options.seed + 1)
    rotary = Rotary(shape.positions + shape.block, shape.d, shape.theta)
    optimizer = torch.optim.AdamW(params.values(), lr=options.lr, betas=(0.9, options.beta2), weight_decay=options.weight_decay)
    per_epoch = sum(min(options.anchors, len(document.eligible)) for document in documents)
    planned, seen, steps, start = per_epoch * options.epochs, 0, 0, time.time()
    right = slots = 0
    while seen < planned:
        for step in steps_of_epoch(documents, options, generator):
            batch = Batch([document for document, _ in step], [anchors for _, anchors in step], shape)
            hidden = drafter_hidden(params, shape, target, batch, rotary)
            loss_sum, weight_sum, correct, valid = loss_terms(hidden, target, batch, options)
            optimizer.zero_grad()
            (loss_sum / weight_sum).backward()
            if options.clip:
                torch.nn.utils.clip_grad_norm_(params.values(), options.clip)
            seen += sum(len(anchors) for _, anchors in step)
            optimizer.param_groups[0]["lr"] = learning_rate(options, min(1.0, seen / planned))
            optimizer.step()
            steps, right, slots = steps + 1, right + correct, slots + valid
            if steps % 200 == 0:
                took = time.time() - start
                loss = float(loss_sum / weight_sum)
                report(f"step {steps} loss {loss:.3f} slots right {right / slots:.3f} {seen / took:.0f} anchors/s {took:.0f} s")
                right = slots = 0
            if seen >= planned or steps == options.max_steps:
                planned = seen
                break
    took = time.time() - start
    report(f"{steps} steps, {seen} anchors in {took:.1f} s ({seen / took:.0f} anchors/s)")
    return steps, took


@torch.no_grad()
def walk(params, shape, target, documents):
    """Tokens per round of decoding: a block at the first supervised position, then again behind what was accepted."""
    rotary = Rotary(shape.positions + shape.block, shape.d, shape.theta)
    tokens = rounds = 0
    for document in documents:
        eligible = document.eligible
        if not eligible:
            continue
        batch = Batch([document], [eligible], shape)
        hidden = drafter_hidden(params, shape, target, batch, rotary)
        right = (F.linear(hidden[0, :, 1:], target.lm_head).argmax(-1) == batch.labels[0]) & batch.valid[0]
        accepted = dict(zip(eligible, right.long().cumprod(-1).sum(-1).tolist()))
        for start in eligible:
            if start > 0 and start - 1 in accepted:
                continue  # not the first of its answer
            at = start
            while at in accepted:
                following = at + accepted[at] + 1
                last = following
                while last - 1 not in accepted:
                    last -= 1  # the answer ended inside this round
                tokens, rounds = tokens + last - at, rounds + 1
                at = following
    return tokens / max(rounds, 1)


def save(directory, params, shape, target):
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
        "hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.d,
        "vocab_size": target["vocab_size"], "max_position_embeddings": shape.positions, "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta, "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "layer_types": ["full_attention"] * shape.layers, "sliding_window": None, "tie_word_embeddings": False,
        "dtype": "bfloat16", "block_size": shape.block, "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": shape.mask_token, "target_layer_ids": shape.captured},
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: value.detach().cpu().numpy() for name, value in params.items()}
    write(directory / "model.safetensors", tensors, bfloat16=True)


if __name__ == "__main__":
    sys.exit(main())
