#!/usr/bin/env bash
# Installs Triton in .cache/triton, where only the tests of kernels see it: they interpret the kernels on a CPU. Where it
# cannot, it says why on one line and ends well: those tests are then skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

version=3.6.0 # of torch 2.11.0, as the extra `gpu` has it
place=.cache/triton

mkdir -p .cache
exec 9>.cache/setup.lock
flock 9
[ ! -d "$place/triton-$version.dist-info" ] || exit 0
echo "triton: installing $version" >&2
rm -rf "$place"
.venv/bin/python -m pip install --quiet --no-deps --target "$place" "triton==$version" >&2 ||
    echo "triton: pip could not install it, so the tests of kernels are skipped" >&2
