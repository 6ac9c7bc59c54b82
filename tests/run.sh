#!/usr/bin/env bash
# Every test, in two halves side by side: those on the cluster wait most of their time, the others compute.
# The first half's output comes after the second's.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=$(mktemp)
set -m # else what runs in the background, and all that it starts, ignores SIGINT
.venv/bin/python -m pytest -m cluster >"$log" 2>&1 &
cluster=$!
set +m
trap 'kill "$cluster" 2>/dev/null; rm -f "$log"' EXIT

.venv/bin/python -m pytest -m "not cluster"
others=$?
wait "$cluster"
on_cluster=$?
cat "$log"
exit $((others || on_cluster))
