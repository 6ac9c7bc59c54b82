#!/usr/bin/env bash
# One tick of a run, or of all runs in a folder, for cron: tick.sh FOLDER. Runs are passed over whose order to end
# is a day old. logs/tick.log has what ticks did. A failure is said here, too, but once in the same words (tick.failed).
set -uo pipefail
umask 077
export PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/opt/slurm/bin"
folder=$(realpath -e "${1:?usage: sbatch/tick.sh FOLDER}") || exit 2
cd "$(dirname "$(realpath "$0")")/.." || exit 2
[ -e "$folder"/run.json ] || compgen -G "$folder/*/run.json" > /dev/null ||
    { echo "$folder: no run here: neither it nor a folder in it has a run.json" >&2; exit 2; }
over=(\( -name FINISHED -o -name STOP -o -name DRAIN \) -mmin +1440) worst=0
output=$(mktemp) && trap 'rm -f "$output"' EXIT # not a pipe, which jobs on this machine would hold open
for config in "$folder"/run.json "$folder"/*/run.json; do
    run=${config%/run.json}
    [ -e "$config" ] && [ -z "$(find "$run/control" "${over[@]}" 2> /dev/null)" ] || continue
    python=sbatch/python # but the jobs of a run that has noted none get that of its ticks
    grep -qs HPC_SWE_PYTHON "$run/MANIFEST.json" || python=${HPC_SWE_PYTHON:-.venv/bin/python}
    PYTHONPATH=$run/code timeout --kill-after=10 300 "$python" -P -m hpc_swe.launch tick "$run" > "$output" 2>&1
    code=$? said=$(sed -E 's/^[0-9]{4}-[0-9-]+ [0-9:,]+ //' "$output") failed=$run/logs/tick.failed
    [ "$code" != 0 ] || rm -f "$failed"
    [[ "$code $said" != "0 $run: submitted nothing"?(: *) ]] || continue
    mkdir -p "$run/logs"
    printf '%(%FT%T)T exit code %d: %s\n' -1 "$code" "$said" >> "$run/logs/tick.log"
    [ "$code" != 0 ] || continue
    worst=$code text="$run: exit code $code: $said"
    [ "$text" = "$(cat "$failed" 2> /dev/null)" ] || echo "$text" | tee "$failed" >&2
done
exit "$worst"
