#!/usr/bin/env bash
# Every test, in three parts side by side: those on the cluster wait most of their time, those of engines and
# learners start many processes, and the others compute. The output of the others is shown as it comes, that
# of the first two after it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

shared=$(mktemp -d)
export HPC_SWE_TEST_SHARED=$shared # what one part has made, and others need as well
heavy=(tests/pipeline tests/plugins/engines tests/plugins/policies tests/roles/inference tests/roles/learner)
set -m # else what runs in the background, and all that it starts, ignores SIGINT
.venv/bin/python -m pytest -m cluster tests/cluster >"$shared/cluster.log" 2>&1 &
cluster=$!
.venv/bin/python -m pytest -m "not cluster" "${heavy[@]}" >"$shared/heavy.log" 2>&1 &
processes=$!
set +m
trap 'kill "$cluster" "$processes" 2>/dev/null; rm -rf "$shared"' EXIT

.venv/bin/python -m pytest -m "not cluster" "${heavy[@]/#/--ignore=}"
failed=$?
for part in "$processes:heavy" "$cluster:cluster"; do
  wait "${part%:*}" || failed=1
  cat "$shared/${part#*:}.log"
done
exit "$failed"
