#!/usr/bin/env python3
"""Trains a drafter with each option of the loss for the same number of steps, with several seeds, and tabulates acceptance.

    scripts/ablation.py [--steps N] [--seeds N] [--only NAME,...] [--table FILE] [-- OPTIONS OF THE LAUNCHER]

Each run is decoded for real with the chain and with draft trees (launcher eval), greedily, over the same held-out
prompts for all runs of a seed. The table gives mean and standard deviation over the seeds. Without options of the
launcher the built-in demo is trained; for a model on a GPU, for instance:

    scripts/ablation.py --steps 1000 -- --gpus 0 --target-model models/smollm2 --data answers.jsonl \\
        --batch-anchors 1024 --anchors 128

Runs that are there already are not repeated, so an interrupted call can be given again. Needs python3 (3.9 or newer) and
a built launcher. Exit codes: 0 done, 2 usage, 1 a run failed.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = {
    "default (gamma 7)": [],
    "gamma off": ["--gamma", "0"],
    "gamma 4": ["--gamma", "4"],
    "streak 0.5": ["--streak-alpha", "0.5"],
    "streak 1": ["--streak-alpha", "1"],
    "D-PACE 0.5": ["--gamma", "0", "--dpace-alpha", "0.5"],
    "soft labels": ["--use-soft-labels"],
    "soft labels T 2": ["--use-soft-labels", "--kl-temperature", "2"],
    "soft labels alone": ["--use-soft-labels", "--kl-weight", "1"],
    "confidence 0.05": ["--cap-lambda", "0.05"],
}
TREES = [16, 64]


def arguments(words):
    cut = words.index("--") if "--" in words else len(words)
    own, passed = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", type=Path, default=ROOT / "target/release/launcher")
    parser.add_argument("--steps", type=int, default=600, help="steps of each run (default 600)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant (default 3)")
    parser.add_argument("--only", help="variants to run, by name, separated by commas")
    parser.add_argument("--documents", type=int, default=64, help="held-out prompts decoded (default 64)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/ablation", help="where the runs go")
    parser.add_argument("--table", type=Path, help="also write the table here")
    options = parser.parse_args(own)
    options.passed = passed
    return options


def run(command, log):
    with open(log, "w", encoding="utf-8") as file:
        ended = subprocess.run([str(word) for word in command], stdout=file, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        sys.exit(f"ablation: exit code {ended.returncode} of {' '.join(map(str, command))}; see {log}")


def measured(options, name, seed):
    """Accepted lengths of one run: the walk, the chain, each tree."""
    directory = options.runs / f"{name.replace(' ', '-')}-{options.steps}-{seed}"
    figures = directory / "figures.json"
    if not figures.exists():
        options.runs.mkdir(parents=True, exist_ok=True)
        log = options.runs / f"{directory.name}.log"
        run(
            [options.launcher, *options.passed, *VARIANTS[name], "--seed", seed, "--max-steps", options.steps,
             "--output", directory, "--overwrite", "--quiet"],
            log,
        )  # fmt: skip
        place = [word for word in ("--cpu",) if word in options.passed]
        run(
            [options.launcher, "eval", directory, *place, "--documents", options.documents, "--tree", ",".join(map(str, TREES)),
             "--json", figures],
            log,
        )  # fmt: skip
    walk = json.loads((directory / "summary.json").read_text(encoding="utf-8"))["accepted_length"]["after"]
    drafts = json.loads(figures.read_text(encoding="utf-8"))["drafts"]
    return [walk] + [draft["accepted_length"] for draft in drafts]


def table(results):
    heads = ["walk", "chain"] + [f"tree {nodes}" for nodes in TREES]
    lines = ["| loss | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, rows in results.items():
        cells = []
        for values in zip(*rows):
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.3f} ± {spread:.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    options = arguments(sys.argv[1:])
    if not options.launcher.exists():
        sys.exit(f"ablation: {options.launcher} is not built: cargo build --release, or give --launcher")
    names = options.only.split(",") if options.only else list(VARIANTS)
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        print(f"ablation: no variant {unknown}; there are {', '.join(VARIANTS)}", file=sys.stderr)
        return 2
    results = {name: [] for name in names}
    # Seed by seed: what is there after an interruption is comparable.
    for seed in range(options.seeds):
        for name in names:
            figures = measured(options, name, seed)
            results[name].append(figures)
            print(f"seed {seed}, {name}: " + " ".join(f"{value:.3f}" for value in figures), flush=True)
    text = table(results)
    print(text)
    if options.table:
        options.table.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
