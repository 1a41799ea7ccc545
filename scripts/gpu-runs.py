#!/usr/bin/env python3
"""Whole runs of the built launcher on this machine's GPUs, with what must come of them.

    gpu-runs.py LAUNCHER [--kills N] [--only PART]...

Parts: forms (wrong flags about GPUs, each with its own line), one (the demo on one GPU, and decoding with what it
trained), two (the demo on two GPUs), four (two targets and two drafters that share two GPUs), gradients (two drafters
against one on the same documents), kills (drafters killed while they train). All but the first two need two GPUs.
Prints a line for each part; the exit code is that of the worst. Needs numpy and safetensors for the gradients.
"""
import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ACCEPTED = 5.6  # of the demo, whose drafters reach 5.9 on CPUs
FOLDER = Path(tempfile.mkdtemp(prefix="gpu-runs-"))


def launch(*words, code=0, limit=240):
    begin = time.time()
    done = subprocess.run([LAUNCHER, *map(str, words)], capture_output=True, text=True, timeout=limit)
    text = done.stdout + done.stderr
    assert done.returncode == code, f"exit code {done.returncode} of {words}:\n{text[-3000:]}"
    return text, time.time() - begin


def summary(run):
    return json.loads((run / "summary.json").read_text())


def processes():
    """Workers and launchers that run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            name = (entry / "comm").read_text().strip()
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            continue
        if name in ("launcher", "target_worker", "drafter_worker") and state != "Z":
            found.append(int(entry.name))
    return found


def gpu_memory():
    text = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True).stdout
    return [int(line) for line in text.split()]


def count():
    return len(gpu_memory())


def forms():
    for words, line in [
        (["--gpus", ""], "the list is empty"),
        (["--gpus", "0,0"], "GPU 0 is named twice"),
        (["--gpus", "1-0"], "`1-0` runs backwards"),
        (["--gpus", "0-99"], f"there is no GPU {count()}: {count()} visible"),
        (["--gpus", "0-99999"], "more GPUs than any machine has"),
        (["--gpus", "zero"], "no GPU number"),
        (["--gpus", "0", "--cpu", "1:1"], "exclude each other"),
        (["--gpus", "0", "--split", "1:2"], "two drafters on one GPU would only take turns"),
        (["--targets", "0"], "needs --drafters beside it"),
        (["--targets", "0", "--drafters", "0,0"], "two drafters on one GPU would only take turns"),
        (["--targets", "0", "--drafters", "99"], "--drafters: there is no GPU 99"),
    ]:
        text, _ = launch(*words, "--output", FOLDER / "refused", code=2)
        assert line in text, f"{words}: {text}"
        assert not (FOLDER / "refused/trained.jsonl").exists()
    for shown, line in [("", "hides all of them"), ("-1", "hides all of them"), ("GPU-0000", "`GPU-0000` names no GPU")]:
        done = subprocess.run([LAUNCHER, "--gpus", "0", "--output", FOLDER / "refused"], capture_output=True, text=True,
                              env={**os.environ, "CUDA_VISIBLE_DEVICES": shown})
        assert done.returncode == 2 and line in done.stdout + done.stderr, done.stdout + done.stderr
    return "every wrong form has its line"


def demo(name, *words):
    run = FOLDER / name
    text, took = launch(*words, "--seed", 5, "--output", run)
    found = summary(run)
    after = found["accepted_length"]["after"]
    assert found["outcome"] == "complete" and found["units_done"] == found["units_total"], found
    assert after >= ACCEPTED, f"accepted length {after}\n{text}"
    assert not processes()
    notes = [line.split("NCCL", 1)[1] for log in (run / "logs").glob("drafter-0.log")
             for line in log.read_text().splitlines() if "NCCL" in line]
    peaks = [line for line in text.splitlines() if "of GPU memory at most" in line]
    return f"{took:.1f} s, accepted length {after:.3f}" + "".join(f"; NCCL{note}" for note in notes[:1]) + \
        "".join(f"; {line}" for line in peaks)


def one():
    told = demo("one", "--gpus", 0)
    text, took = launch("eval", FOLDER / "one", "--gpus", 0, "--documents", 32, "--tree", 16)
    return f"{told}\n{text}decoded in {took:.1f} s"


def two():
    return demo("two", "--gpus", "0,1")


def four():
    return demo("four", "--gpus", "0,1", "--split", "2:2")


def moments(run):
    """First moments after one step without clipping: a tenth of the gradient each."""
    from safetensors import safe_open
    with safe_open(run / "checkpoints/latest/training.safetensors", "np") as file:
        return {key: file.get_tensor(key).astype("float64") for key in file.keys() if key.startswith("m.")}


def gradients():
    import numpy as np
    found = {}
    for name, places, units in [
        ("alone", ["--gpus", "0"], {"0": list(range(8))}),
        ("even", ["--gpus", "0,1", "--split", "2:2"], {"0": [0, 2, 4, 6], "1": [1, 3, 5, 7]}),
        ("uneven", ["--gpus", "0,1", "--split", "1:2"], {"0": [5], "1": [7, 0, 1, 2, 3, 4, 6]}),
        ("listed", ["--targets", "1", "--drafters", "0-1"], {"0": [3, 2, 1], "1": [0, 4, 5, 6, 7]}),
    ]:
        record = FOLDER / f"{name}.jsonl"
        record.write_text(json.dumps({"step": 1, "units": units}) + "\n")
        launch(*places, "--seed", 5, "--replay", record, "--clip", 0, "--batch-anchors", 100000, "--output", FOLDER / name)
        found[name] = moments(FOLDER / name)
    worst = {}
    for name in list(found)[1:]:
        apart = [np.linalg.norm(found[name][key] - want) / np.linalg.norm(want) for key, want in found["alone"].items()]
        worst[name] = max(apart)
        assert worst[name] <= 1e-3, f"{name}: {worst}"
    return f"{len(found['alone'])} gradients of two drafters are those of one: {worst}"


def kills():
    before, lines = gpu_memory(), []
    for kill in range(KILLS):
        run = FOLDER / f"kill-{kill}"
        with (FOLDER / f"kill-{kill}.txt").open("w") as out:
            launcher = subprocess.Popen([LAUNCHER, "--gpus", "0,1", "--split", "2:2", "--epochs", "50", "--output", run],
                                        stdout=out, stderr=out)
        name = f"drafter-{kill % 2}"
        begin = time.time()
        while sum(1 for _ in (run / "trained.jsonl").open()) < 20 if (run / "trained.jsonl").exists() else True:
            assert time.time() - begin < 60 and launcher.poll() is None, Path(out.name).read_text()
            time.sleep(0.05)
        time.sleep(0.013 * kill % 0.1)
        victim = next(pid for pid in processes() if is_worker(pid, name, launcher.pid))
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        code = launcher.wait(timeout=60)
        took = time.time() - killed
        cause = summary(run)["root_cause"]
        assert (cause["role"], cause["rank"], cause["pid"]) == ("drafter", kill % 2, victim), cause
        assert code == 128 + 9 and took < 15, (code, took)
        assert not processes(), processes()
        lines.append(f"{name} killed: ended {took:.2f} s later, {cause['what']}")
    time.sleep(1)
    after = gpu_memory()
    assert all(a <= b + 64 for a, b in zip(after, before)), (before, after)
    return "\n".join(lines) + f"\nGPU memory before {before} and after {after} MiB"


def is_worker(pid, name, launcher):
    words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
    role, rank = name.split("-")
    stat = (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    return words[0].endswith(f"{role}_worker".encode()) and words[words.index(b"--rank") + 1] == rank.encode() \
        and int(stat[1]) == launcher


def main():
    parts = {part.__name__: part for part in [forms, one, two, four, gradients, kills]}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("launcher", help="beside it lie the workers")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", choices=parts, action="append")
    arguments = parser.parse_args()
    global LAUNCHER, KILLS
    LAUNCHER, KILLS = str(Path(arguments.launcher).resolve()), arguments.kills
    chosen = arguments.only or [name for name in parts if count() > 1 or name in ("forms", "one")]
    failed = []
    for name in chosen:
        begin = time.time()
        try:
            print(f"== {name}: {parts[name]()} ({time.time() - begin:.1f} s)", flush=True)
        except (AssertionError, OSError, subprocess.TimeoutExpired, StopIteration, KeyError) as error:
            failed.append(name)
            print(f"== {name} FAILED: {type(error).__name__}: {error}", flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
