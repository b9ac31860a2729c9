#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: the probe, the conformance suite with all memory on the device, and what reads from and to it
# cost. Under five minutes in all, the build included: what takes longer is ended and fails. Leaves the GPU's settings as they are.
#
#   ci/gpu-check.sh           exits 0 if all went well, 1 if not, and 3 on a machine without a usable GPU, which it says
#
# What comes with the build (a driver made of host memory) tests the same code elsewhere; this is for the real one.
set -euo pipefail
cd "$(dirname "$0")/.."
# Seconds for everything; each step gets what is left.
limit=${KV_GPU_LIMIT:-285}
left() { echo $((limit > SECONDS ? limit - SECONDS : 1)); }
within() {
    local code=0
    timeout --kill-after=5 "$(left)" "$@" || code=$?
    [ "$code" != 124 ] || echo "gpu-check: not done within $limit s in all: $*"
    return "$code"
}
step() { printf '\n== %s\n' "$*"; }

step "build"
within cargo build --locked --release -p kv-transport --example device_pull
within cargo test --locked -p kv-transport --test conformance_tcp_cuda --test cuda --no-run

target=${CARGO_TARGET_DIR:-target}
pull=$target/release/examples/device_pull

step "probe, and what a read costs"
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
code=0
within "$pull" 64 9 || code=$?
if [ "$code" = 3 ]; then
    echo "gpu-check: nothing was checked, there is no usable GPU here"
    exit 3
fi
[ "$code" = 0 ] || { echo "gpu-check: the reads failed (exit $code)"; exit 1; }

step "conformance suite, memory on the device"
out=$(mktemp)
trap 'rm -f "$out"' EXIT
within cargo test --locked -p kv-transport --test conformance_tcp_cuda 2>&1 | tee "$out" || exit 1
# A suite that ran with the fake driver must not look like one that ran with the GPU.
grep -q '\[tcp, CUDA memory\] .* ok' "$out" || { echo "gpu-check: the suite did not run on the GPU"; exit 1; }

step "done"
echo "gpu-check: probe, reads with every byte compared, and the conformance suite, all on the GPU"
