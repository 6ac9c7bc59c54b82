#!/usr/bin/env bash
# Run every test, or with the word `quick` those that need no cluster and no seconds. They run in parts, a few side by
# side; the next part begins when one ends. The longest come first, and of these those on the cluster, which mostly
# wait: so that all cores have work until the end. What a part printed is shown when it has ended.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind="not cluster" at_once=$(($(nproc) + 3)) # since many tests wait, and the clusters most
# All parts of quick at once: they are short, and the longest would run alone at the end.
[ "${1:-}" = quick ] && kind="not slow and not cluster" at_once=$(($(nproc) + 8))
unset PYTHONDONTWRITEBYTECODE # or each of some thousand processes compiles the project once more
export OMP_NUM_THREADS=1 # or torch's threads spin on cores that the other parts use
shared=$(mktemp -d)
export HPC_SWE_TEST_SHARED=$shared # what one part has made, and others need as well
end() {
  kill -INT -- $(cat "$shared"/*.group 2>/dev/null) 2>/dev/null
  kill -- $(jobs -p | sed s/^/-/) 2>/dev/null
  rm -rf "$shared"
}
trap end EXIT
set -m # else what runs in the background, and all that it starts, ignores SIGINT

run() { # NAME ARGUMENT...
  # In a session of its own: the kernel may divide the processors among these, as among those of engines and jobs.
  setsid sh -c 'echo "-$$" >"$0.group"; exec .venv/bin/python -m pytest "$@" >"$0.log" 2>&1' "$shared/$1" \
    --durations=10 --durations-min=10 -m "$kind" "${@:2}" && touch "$shared/$1.passed"
  rm "$shared/$1.group"
  flock "$shared" cat "$shared/$1.log"
}

part() { # NAME FOLDER...
  named+=("${@:2}") begun+=("$shared/$1.passed")
  while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n; done
  run "$@" &
}

named=(tests/kernels)
if [ "$kind" = "not cluster" ]; then
  kind=cluster part faults tests/cluster/test_faults.py
  kind=cluster part cluster --ignore=tests/cluster/test_faults.py tests/cluster
  part repairs tests/pipeline/test_{chaos,hybrid,killed_run}.py # one of them makes the model for all
  part runs tests/pipeline/test_{sft,stuck_run}.py
fi
part cheats tests/cheats
part graders tests/tasks
part makers tests/makers tests/docs
part learners tests/models/policies tests/roles/learner
part engines tests/models/engines tests/roles/inference
part agents tests/agents
part view tests/view tests/demo
part roles tests/roles/coordinator tests/roles/rollout tests/roles/reward
part launch tests/launch tests/jobs tests/cluster tests/test_one_command.py
[ "$kind" = "not cluster" ] && PYTHONPATH=.cache/triton part kernels tests/kernels # elsewhere nothing may find Triton
part others "${named[@]/#/--ignore=}" tests
while [ "$(jobs -rp | wc -l)" -gt 0 ]; do wait -n; done
ls "${begun[@]}" >/dev/null # a part that was killed has not passed
