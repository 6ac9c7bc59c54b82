#!/usr/bin/env bash
# TensorBoard of a run, or of all runs in a folder, for this machine's own users: sbatch/tensorboard.sh FOLDER [PORT]
set -euo pipefail
port=${2:-6006}
curves=
for folder in "${1:?usage: sbatch/tensorboard.sh FOLDER [PORT]}"/tensorboard "$1"/*/tensorboard; do
    [ -d "$folder" ] || continue
    run=$(realpath "${folder%/tensorboard}")
    curves+=${curves:+,}$(basename "$run"):$run/tensorboard
done
[ -n "$curves" ] || { echo "$1: no run here: nothing has a folder tensorboard/" >&2; exit 2; }
echo "on your own machine: ssh -N -L $port:localhost:$port ${USER:-$(id -un)}@$(hostname -f)"
echo "and there: http://localhost:$port"
exec "$(dirname "$0")/python" -m tensorboard.main --logdir_spec "$curves" --host 127.0.0.1 --port "$port"
