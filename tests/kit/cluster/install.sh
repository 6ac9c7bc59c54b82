#!/usr/bin/env bash
# Installs what the test cluster needs and this machine lacks: Slurm's daemons and their kin, none of them
# started. Where it cannot, it says why on one line and ends well: those tests are then skipped, for the
# reason that is left in .cache/cluster-unavailable.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
PATH=$PATH:/usr/sbin:/sbin

declare -A package=(
    [slurmctld]=slurmctld [slurmd]=slurmd [slurmdbd]=slurmdbd [sbatch]=slurm-client [munged]=munge
    [mariadbd]=mariadb-server [cron]=cron [ip]=iproute2
)
policy=/usr/sbin/policy-rc.d
unavailable=.cache/cluster-unavailable

main() {
    local missing
    mkdir -p .cache
    exec 9>.cache/setup.lock
    flock 9
    missing=$(missing_packages | xargs)
    if [ -z "$missing" ]; then
        rm -f "$unavailable"
        return 0
    fi
    [ "$(id -u)" = 0 ] || { cannot "only root can install $missing"; return 0; }
    command -v apt-get >/dev/null || { cannot "there is no apt-get to install $missing"; return 0; }
    say "installing $missing"
    forbid_starts
    # shellcheck disable=SC2086
    if apt_install $missing || { apt-get update -qq && apt_install $missing; }; then
        rm -f "$unavailable"
    else
        cannot "apt-get could not install $missing"
    fi
}

say() { printf 'cluster: %s\n' "$*" >&2; }

cannot() {
    say "no test cluster here: $*"
    echo "$*" >"$unavailable"
}

missing_packages() {
    local program
    for program in "${!package[@]}"; do
        command -v "$program" >/dev/null || echo "${package[$program]}"
    done | sort
}

# Packages start their daemons where there is an init, unless this file says no.
forbid_starts() {
    [ ! -e "$policy" ] || return 0
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 0755 "$policy"
}

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends \
        "$@" >/dev/null 2>&1
}

main
