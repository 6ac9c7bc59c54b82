#!/usr/bin/env bash
# Makes a fresh Debian or Ubuntu machine ready for the demo and the tests: system packages, .venv, Apptainer.
# Each step looks first and acts only on what is missing. PYTHON picks the interpreter of a new .venv; the
# system's own is the default, because the users of a Slurm job cannot read one under somebody's home.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

python=${PYTHON:-/usr/bin/python3}
lock=containers/requirements-cpu.txt

main() {
    mkdir -p .cache
    exec 9>.cache/setup.lock
    flock 9 || say "this file system has no locks: do not run this twice at once"
    install_packages
    make_venv
    install_apptainer
    open_fuse
}

say() { printf 'setup: %s\n' "$*" >&2; }

is_root() { [ "$(id -u)" = 0 ]; }

missing_packages() {
    "$python" -c 'import ensurepip' 2>/dev/null || echo python3-venv
    /sbin/ldconfig -p | grep 'libnuma\.so\.1 ' >/dev/null || echo libnuma1
    command -v git >/dev/null || echo git
    # an ordinary user has another way to the task image
    if is_root && ! command -v mmdebstrap >/dev/null; then echo mmdebstrap; fi
}

install_packages() {
    local missing
    missing=$(missing_packages | xargs)
    [ -n "$missing" ] || return 0
    if ! is_root || ! command -v apt-get >/dev/null; then
        say "this machine lacks: $missing. Ask its administrator to run: apt-get install $missing"
        exit 1
    fi
    say "installing $missing"
    # shellcheck disable=SC2086
    apt_install $missing >/dev/null 2>&1 || { apt-get update -qq && apt_install $missing >/dev/null; }
}

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$@"
}

make_venv() {
    local wanted stamp=.venv/setup.stamp
    wanted=$(sha256sum "$lock" pyproject.toml containers/vllm-name/pyproject.toml)
    [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        say "$python is $("$python" --version); 3.11 or newer is needed. Name one with PYTHON=/path/to/python3"
        exit 1
    fi
    say "filling .venv; the first time takes a minute or two"
    [ -x .venv/bin/pip ] || "$python" -m venv .venv
    install_lock
    pip_install --no-build-isolation containers/vllm-name
    pip_install --no-build-isolation --editable .
    echo "$wanted" >"$stamp"
}

install_lock() {
    local torch
    torch=$(grep '^torch==' "$lock")
    if ! pip_install --only-binary=:all: "$torch"; then
        say "pip did not find $torch. Set PIP_EXTRA_INDEX_URL (or PIP_FIND_LINKS) to where PyTorch publishes" \
            "its CPU wheels"
        exit 1
    fi
    pip_install --only-binary=:all: --requirement "$lock"
}

pip_install() {
    .venv/bin/python -m pip --disable-pip-version-check -qq install --no-deps "$@"
}

install_apptainer() {
    command -v apptainer >/dev/null && return 0
    if is_root && containers/install_apptainer.sh; then return 0; fi
    say "no Apptainer here: the process sandbox works, the apptainer sandbox and its tests do not." \
        "An administrator can run containers/install_apptainer.sh"
}

# A machine without udev leaves the device to root alone, and then no ordinary user can mount an image.
open_fuse() {
    if is_root && [ -c /dev/fuse ]; then chmod 0666 /dev/fuse; fi
}

main
