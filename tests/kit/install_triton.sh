#!/usr/bin/env bash
# Installs Triton and fla-core in .cache/triton, where only the tests of kernels see them: they interpret the kernels on a
# CPU. Where it cannot, it says why on one line and ends well: those tests are then skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

version=3.6.0 fla=0.6.0 # as containers/requirements-gpu.txt has them
place=.cache/triton

mkdir -p .cache
exec 9>.cache/setup.lock
flock 9
[ ! -d "$place/triton-$version.dist-info" ] || [ ! -d "$place/fla_core-$fla.dist-info" ] || exit 0
echo "triton: installing $version, and fla-core $fla" >&2
rm -rf "$place"
.venv/bin/python -m pip install --quiet --no-deps --target "$place" "triton==$version" "fla-core==$fla" >&2 ||
    echo "triton: pip could not install it, so the tests of kernels are skipped" >&2
