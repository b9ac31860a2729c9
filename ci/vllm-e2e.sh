#!/usr/bin/env bash
# Real vLLM (CPU build) with the connector: installs it, builds the wheel, runs pairs of engines and checks their answers.
#
#   ci/vllm-e2e.sh [--full] [WORK]
#
# WORK (default: target/vllm) gets the environment (3 GB), models and logs. Without --full: a plain pair, the edges of the
# protocol, and a producer that is killed; some five minutes on two cores. With it: every case of kv-python/e2e/matrix.py, and
# vLLM's own tests of connectors; some forty.
set -euo pipefail
cd "$(dirname "$0")/.."

full=
if [ "${1:-}" = --full ]; then full=1; shift; fi
work=$(mkdir -p "${1:-target/vllm}" && cd "${1:-target/vllm}" && pwd)
step() { printf '\n== %s\n' "$*"; }

step "environment"
command -v g++ >/dev/null || { apt-get update && apt-get install -y --no-install-recommends g++; }
unset PYTHONDONTWRITEBYTECODE
SLIM=1 WITH_TESTS=$full sh kv-python/e2e/install.sh "$work/venv" "${PYTHON:-python3}"
# shellcheck disable=SC1091
. "$work/venv/bin/activate"

step "wheel"
python -m pip install -q ./kv-python pytest

step "models"
python kv-python/e2e/make_model.py "$work/llama"
python kv-python/e2e/make_model.py "$work/wide" --layers 8 --kv-heads 4 --head-dim 128

step "tests of the package"
python -m pytest -q -W ignore kv-python/tests

step "pairs of engines"
cases=(plain bad-input kill-p negative-control)
if [ -n "$full" ]; then cases=(); fi
python kv-python/e2e/matrix.py --model "$work/llama" --wide "$work/wide" --out "$work/matrix" \
    ${cases[@]+--only "${cases[@]}"}

if [ -n "$full" ]; then
    step "vLLM's own tests"
    sh kv-python/e2e/lifecycle.sh "$work/tests"
fi
