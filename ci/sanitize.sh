#!/usr/bin/env bash
# The unsafe modules under AddressSanitizer, and the threads that share memory under ThreadSanitizer. Needs a nightly
# toolchain; a machine without one is told so. Some ten minutes.
#
#   ci/sanitize.sh            both
#   ci/sanitize.sh address    one of them
#   ci/sanitize.sh thread
set -euo pipefail
cd "$(dirname "$0")/.."

target=$(rustc -vV | sed -n 's/^host: //p')
cargo +nightly --version >/dev/null 2>&1 || { echo "no nightly toolchain: rustup toolchain install nightly" >&2; exit 2; }

# Memory, mappings, vectored calls and everything that goes through them.
tests=(-p kv-transport --lib --test shm --test auto --test tcp --test device --test cuda)

address() {
    echo "== AddressSanitizer"
    # The tests end processes on purpose, which then leak.
    ASAN_OPTIONS=detect_leaks=0 RUSTFLAGS=-Zsanitizer=address \
        cargo +nightly test --locked --target "$target" --target-dir target/asan "${tests[@]}"
    # Copies between a device and the host pool.
    ASAN_OPTIONS=detect_leaks=0 RUSTFLAGS=-Zsanitizer=address \
        cargo +nightly test --locked --target "$target" --target-dir target/asan -p kv-testkit --test staging
}

thread() {
    echo "== ThreadSanitizer"
    # Left out: what compares every byte of many megabytes hundreds of times, which takes too long so.
    # The standard library is not instrumented; what it synchronises is known to the runtime all the same. KV memory itself is
    # raced for by design: who may touch a block is decided by leases, and reads that lose are thrown away.
    TSAN_OPTIONS="suppressions=$PWD/ci/tsan.supp halt_on_error=1" \
        RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" \
        cargo +nightly test --locked --target "$target" --target-dir target/tsan \
        -p kv-transport --lib --test shm --test auto -- --skip t3_ --skip t6_
    # Several connections of one peer, served by threads of their own, and requests that callers' threads write.
    TSAN_OPTIONS="suppressions=$PWD/ci/tsan.supp halt_on_error=1" \
        RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" \
        cargo +nightly test --locked --target "$target" --target-dir target/tsan \
        -p kv-transport --test tcp -- links:: shortcut::
    # The threads that copy. A fake driver is not instrumented, so CUDA has no place here.
    TSAN_OPTIONS="suppressions=$PWD/ci/tsan.supp halt_on_error=1" \
        RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" \
        cargo +nightly test --locked --target "$target" --target-dir target/tsan -p kv-transport --test device
}

case "${1:-both}" in
    address) address ;;
    thread) thread ;;
    both) address && thread ;;
    *) echo "usage: ci/sanitize.sh [address|thread]" >&2; exit 2 ;;
esac
