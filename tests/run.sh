#!/usr/bin/env bash
# Run every test in parts side by side, which take about as long: tests on the cluster wait most of their time, those
# of engines and learners start large processes, those of sandboxes start many small ones, and the others compute. The
# output of the others is shown as it comes, and that of the rest after it. Each part names its slowest tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

engines=(tests/pipeline tests/models/engines)
learners=(tests/models/policies tests/roles/inference tests/roles/learner)
sandboxes=(tests/cheats tests/tasks/graders tests/agents/sandboxes tests/makers)
sandboxes+=(tests/docs) # so that the parts end at about the same time
unset PYTHONDONTWRITEBYTECODE # or each of some thousand processes compiles the project once more
export OMP_NUM_THREADS=1 # or torch's threads spin on cores that the other parts use
shared=$(mktemp -d)
export HPC_SWE_TEST_SHARED=$shared # what one part has made, and others need as well
parts=()
slowest=(--durations=10 --durations-min=10)
trap 'for part in "${parts[@]}"; do kill "${part%:*}"; done 2>/dev/null; rm -rf "$shared"' EXIT

begin() { # NAME ARGUMENT...
  .venv/bin/python -m pytest "${slowest[@]}" "${@:2}" >"$shared/$1.log" 2>&1 &
  parts+=("$!:$1")
}

set -m # else what runs in the background, and all that it starts, ignores SIGINT
begin engines -m "not cluster" "${engines[@]}"
begin learners -m "not cluster" "${learners[@]}"
begin cluster -m cluster tests/cluster
begin sandboxes -m "not cluster" "${sandboxes[@]}"
PYTHONPATH=.cache/triton begin kernels tests/kernels # elsewhere nothing may find Triton
set +m
elsewhere=("${engines[@]}" "${learners[@]}" "${sandboxes[@]}" tests/kernels)
.venv/bin/python -m pytest "${slowest[@]}" -m "not cluster" "${elsewhere[@]/#/--ignore=}"
failed=$?
for part in "${parts[@]}"; do
  wait "${part%:*}" || failed=1
  cat "$shared/${part#*:}.log"
done
exit "$failed"
