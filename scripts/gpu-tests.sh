#!/usr/bin/env bash
# Runs everything that needs GPUs, on the visible ones, and says at the end what failed.
#
#   scripts/gpu-tests.sh                    build with cargo, run
#   scripts/gpu-tests.sh --build FOLDER     build and put the programs, stripped, into FOLDER
#   scripts/gpu-tests.sh FOLDER             run programs from such a folder: the GPU machine needs no Rust
#
# First the tests, which are `#[ignore]`d: all of a program whose name begins with `cuda`, and those of other programs
# with `cuda` in their path; golden files of random models, where python3 has torch and transformers to make them.
# Then whole runs (gpu-runs.py). At last, where compute-sanitizer is installed, memcheck over the kernels' tests and a
# short run of both roles, and racecheck over the attention kernels; SANITIZE=no leaves that out. What needs two GPUs
# is left out aloud where there is one.
set -euo pipefail
cd "$(dirname "$0")/.."

# Programs that hold GPU tests.
build() {
    cargo test --release --no-run --message-format=json 2>/dev/null |
        python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line) if line.startswith("{") else {}
    if message.get("executable") and message.get("profile", {}).get("test"):
        print(message["target"]["name"], message["executable"])
' | while read -r name program; do
        if [[ $name == cuda* ]] || "$program" --ignored --list 2>/dev/null | grep -q cuda; then
            echo "$name $program"
        fi
    done
    for name in launcher target_worker drafter_worker; do
        echo "$name target/release/$name"
    done
}

if [[ ${1:-} == --build ]]; then
    mkdir -p "$2"
    build | while read -r name program; do
        strip -o "$2/$name" "$program"
        echo "$2/$name"
    done
    exit
fi

# The libraries: a toolkit's, else pip's beside the python3 that a shell runs.
folders=(/usr/local/cuda/lib64 /usr/local/cuda-*/lib64)
if command -v python3 >/dev/null; then
    site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    folders+=("$site"/nvidia/*/lib)
fi
for folder in "${folders[@]}"; do
    if ls "$folder" 2>/dev/null | grep -q '^lib\(cublasLt\|nvrtc\|nccl\)\.so'; then
        LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
    fi
done
export LD_LIBRARY_PATH

if [[ -n ${1:-} ]]; then
    programs=$(for program in "$1"/*; do echo "$(basename "$program") $program"; done)
else
    programs=$(build)
fi
path_of() { awk -v name="$1" '$1 == name { print $2 }' <<<"$programs"; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=()
part() {
    local name=$1
    shift
    echo "== $name"
    "$@" </dev/null || failed+=("$name")
}

if [[ -z ${TARGET_CASES:-} ]] && python3 -c 'import torch, transformers' 2>/dev/null; then
    export TARGET_CASES=$work/cases
    models=()
    [[ -d models/smollm2 ]] && models=(--model models/smollm2)
    part "golden files of random models" python3 scripts/make-target-cases.py "$TARGET_CASES" "${models[@]}"
fi
while read -r name program; do
    [[ $name == launcher || $name == *_worker ]] && continue
    filter=()
    [[ $name == cuda* ]] || filter=(cuda)
    part "$name" "$program" "${filter[@]}" --ignored --test-threads=1
done <<<"$programs"
launcher=$(path_of launcher)
part "whole runs" python3 scripts/gpu-runs.py "$launcher"
if [[ ${SANITIZE:-} != no ]] && command -v compute-sanitizer >/dev/null; then
    sanitize=(compute-sanitizer --error-exitcode 9 --print-limit 20)
    kernels=$(path_of cuda_kernels)
    part "memcheck of the kernels" "${sanitize[@]}" --tool memcheck "$kernels" --ignored --test-threads=1
    part "racecheck of attention" "${sanitize[@]}" --tool racecheck "$kernels" attention --ignored --test-threads=1
    part "memcheck of a run" "${sanitize[@]}" --tool memcheck --target-processes all \
        "$launcher" --gpus 0 --max-steps 2 --output "$work/checked"
fi
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "everything on GPUs passed"
