#!/usr/bin/env bash
# Makes a fresh machine ready, containers/setup.sh [cpu | gpu]: system packages, an environment, Apptainer. For CPUs, as
# the demo and the tests need it, the environment is .venv; for GPUs it is .venv-gpu, which no other verb touches.
# Each step looks first and acts only on what is missing. PYTHON picks the interpreter of a new environment; the
# system's own is the default, because the users of a Slurm job cannot read one under somebody's home.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

kind=${1:-cpu}
lock=containers/requirements-$kind.txt
case $kind in
    cpu) venv=.venv ;;
    gpu) venv=.venv-gpu ;;
    *) echo "usage: containers/setup.sh [cpu | gpu]" >&2; exit 2 ;;
esac

main() {
    mkdir -p .cache
    exec 9>.cache/setup.lock
    flock 9 || say "this file system has no locks: do not run this twice at once"
    find_python
    install_packages
    make_venv
    install_apptainer
    open_fuse
    [ -z "${filled:-}" ] || say "ready: type source $venv/bin/activate"
}

say() { printf 'setup: %s\n' "$*" >&2; }

is_root() { [ "$(id -u)" = 0 ]; }

uses_uv() { [ "$kind" = gpu ] && command -v uv >/dev/null; }

choose_python() {
    for python in "${PYTHON:-/usr/bin/python3}" python3.12 python3.13 python3.11; do
        if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then return 0; fi
        [ -z "${PYTHON:-}" ] || break
    done
    return 1
}

find_python() {
    choose_python && return 0
    if [ ! -e /usr/bin/python3 ] && can_install && ! uses_uv; then # as in a small Debian or Ubuntu
        add_packages python3-venv
        choose_python && return 0
    fi
    python='>=3.11,<3.14' # which uv fetches
    if [ -n "${PYTHON:-}" ] || ! uses_uv; then
        say "no Python of 3.11 to 3.13 in ${PYTHON:-/usr/bin/python3 and PATH}; name one with PYTHON=/path/to/python3"
        exit 1
    fi
}

missing_packages() {
    uses_uv || "$python" -c 'import ensurepip' 2>/dev/null || echo python3-venv
    [ "$kind" = gpu ] || /sbin/ldconfig -p | grep 'libnuma\.so\.1 ' >/dev/null || echo libnuma1
    command -v git >/dev/null || echo git
    # an ordinary user has another way to the task image
    if is_root && ! command -v mmdebstrap >/dev/null; then echo mmdebstrap; fi
}

install_packages() {
    local missing
    missing=$(missing_packages | xargs)
    [ -n "$missing" ] || return 0
    if ! can_install; then
        say "this machine lacks: $missing. Ask its administrator to run: apt-get install $missing"
        exit 1
    fi
    # shellcheck disable=SC2086
    add_packages $missing || [ "$missing" = mmdebstrap ] # which the demo's image alone needs
}

can_install() { is_root && command -v apt-get >/dev/null; }

add_packages() {
    say "installing $*"
    apt_install "$@" >/dev/null 2>&1 || { apt-get update -qq && apt_install "$@" >/dev/null; }
}

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$@"
}

make_venv() {
    local wanted stamp=$venv/setup.stamp
    wanted=$(sha256sum "$lock" pyproject.toml containers/vllm-name/pyproject.toml)
    if has_another_python; then require_unused; rm -rf "$venv"; fi
    [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    require_unused
    say "filling $venv: the first time downloads gigabytes, which takes minutes"
    rm -f "$stamp" # an environment that is half filled is none
    if uses_uv; then
        [ -x "$venv/bin/python" ] || uv --quiet venv --python "$python" "$venv"
    else
        [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
    fi
    install_lock
    [ "$kind" = gpu ] || install --no-build-isolation containers/vllm-name
    install --no-build-isolation --editable .
    echo "$wanted" >"$stamp"
    filled=yes
}

# An environment keeps the Python that it was made with, unless PYTHON names another.
has_another_python() {
    local version='import sys; print(sys.base_prefix, sys.version)'
    [ -n "${PYTHON:-}" ] && [ -x "$venv/bin/python" ] || return 1
    [ "$("$PYTHON" -c "$version")" != "$("$venv/bin/python" -c "$version")" ]
}

# Each start of a run that has jobs leaves a link to the run in its environment.
require_unused() {
    local run
    for run in "$venv"/runs/*; do
        [ -e "$run/run.json" ] || continue
        [ -z "$(find "$run/control/" -name FINISHED -o -name STOP -o -name DRAIN)" ] || continue
        run=$(realpath "$run")
        say "$venv is to be filled anew, but the run $run uses it: nothing is changed. Let the run finish, or stop it" \
            "(python -m hpc_swe.launch stop $run), and run this again; or use a second checkout"
        exit 1
    done
}

install_lock() {
    local torch
    torch=$(grep '^torch==' "$lock")
    if ! install --only-binary=:all: "$torch"; then
        say "$torch was not found. For CPUs, set PIP_EXTRA_INDEX_URL (or PIP_FIND_LINKS) to where PyTorch publishes" \
            "its CPU wheels; see docs/install.md"
        exit 1
    fi
    install --only-binary=:all: --requirement "$lock"
}

install() {
    if uses_uv; then
        uv --quiet pip install --python "$venv/bin/python" --no-deps "$@"
    else
        "$venv/bin/python" -m pip --disable-pip-version-check -qq install --no-deps "$@"
    fi
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
