#!/usr/bin/env bash
# Run the tests that need no cluster and no seconds each, in two halves side by side. The output of the first half is
# shown as it comes, and that of the second after it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

unset PYTHONDONTWRITEBYTECODE # or each process compiles the project once more
export OMP_NUM_THREADS=1 # or torch's threads spin on the core that the other half uses
half=(tests/roles tests/agents tests/models tests/tasks)
log=$(mktemp)
quick=(.venv/bin/python -m pytest -q -m "not slow and not cluster")
"${quick[@]}" "${half[@]}" >"$log" 2>&1 &
trap 'kill $! 2>/dev/null; rm -f "$log"' EXIT
"${quick[@]}" "${half[@]/#/--ignore=}" "$@"
failed=$?
wait $! || failed=1
cat "$log"
exit "$failed"
