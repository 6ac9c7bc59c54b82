#!/usr/bin/env bash
# One tick of a run, or of every run in a folder, for cron: sbatch/tick.sh FOLDER. A run is passed over whose order to
# end (STOP, DRAIN, FINISHED) is a day old. What a tick did is in the run's logs/tick.log. What failed is said here, too,
# once as long as it fails in the same words: logs/tick.failed holds them, so that cron does not mail every five minutes.
set -uo pipefail
umask 077
export PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/opt/slurm/bin"
folder=$(realpath -e "${1:?usage: sbatch/tick.sh FOLDER}") || exit 2
cd "$(dirname "$(realpath "$0")")/.." || exit 2
[ -e "$folder"/run.json ] || compgen -G "$folder/*/run.json" > /dev/null ||
    { echo "$folder: no run here: neither it nor a folder in it has a run.json" >&2; exit 2; }
over=(\( -name FINISHED -o -name STOP -o -name DRAIN \) -mmin +1440) worst=0
output=$(mktemp) # not a pipe, which jobs on this machine would hold open
trap 'rm -f "$output"' EXIT
for config in "$folder"/run.json "$folder"/*/run.json; do
    run=${config%/run.json}
    [ -e "$config" ] && [ -z "$(find "$run/control" "${over[@]}" 2> /dev/null)" ] || continue
    PYTHONPATH=$run/code timeout --kill-after=10 300 sbatch/python -P -m hpc_swe.launch tick "$run" > "$output" 2>&1
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
