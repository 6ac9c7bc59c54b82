#!/usr/bin/env bash
# Installs packages where only those tests see them that need them: Triton and fla-core in .cache/triton, to interpret
# kernels on a CPU, and numba in .cache/numba, with which vLLM proposes tokens. Where it cannot, it says why on one line
# and ends well: those tests are then skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

install() { # NAME PACKAGE...
    local place=.cache/$1
    [ "$(cat "$place/installed" 2>/dev/null)" != "${*:2}" ] || return 0
    echo "$1: installing ${*:2}" >&2
    rm -rf "$place"
    if .venv/bin/python -m pip install --quiet --no-deps --target "$place" "${@:2}" >&2; then
        echo "${*:2}" >"$place/installed"
    else
        echo "$1: pip could not install it, so the tests that need it are skipped" >&2
    fi
}

mkdir -p .cache
exec 9>.cache/setup.lock
flock 9
install triton triton==3.6.0 fla-core==0.6.0 # as containers/requirements-gpu.txt has them
install numba numba==0.65.0 llvmlite==0.47.0 # as vLLM pins them
