#!/usr/bin/env bash
# Runs every test that needs a GPU, on the first visible one, and says at the end which failed.
#
#   scripts/gpu-tests.sh                    build the tests with cargo, run them
#   scripts/gpu-tests.sh --build FOLDER     build them and put the programs, stripped, into FOLDER
#   scripts/gpu-tests.sh FOLDER             run programs from such a folder: the GPU machine needs no Rust
#
# GPU tests are `#[ignore]`d: all of a program whose name begins with `cuda`, and those of other programs with
# `cuda` in their path. SANITIZE=memcheck (or racecheck) runs them under compute-sanitizer.
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

wrapper=()
if [[ -n ${SANITIZE:-} ]]; then
    wrapper=(compute-sanitizer --tool "$SANITIZE" --error-exitcode 9 --print-limit 20)
fi

if [[ -n ${1:-} ]]; then
    programs=$(for program in "$1"/*; do echo "$(basename "$program") $program"; done)
else
    programs=$(build)
fi
failed=()
while read -r name program; do
    filter=()
    [[ $name == cuda* ]] || filter=(cuda)
    echo "== $name"
    "${wrapper[@]}" "$program" "${filter[@]}" --ignored --test-threads=1 || failed+=("$name")
done <<<"$programs"
if ((${#failed[@]})); then
    echo "FAILED: ${failed[*]}"
    exit 1
fi
echo "all GPU tests passed"
