#!/usr/bin/env bash
# Installs the headless browser in which the report's pages are tested, where this machine lacks one. Where it
# cannot, it says why on one line and ends well: those tests are then skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

package=chromium-headless-shell # half the size of chromium, which does as well where it is there

main() {
    local program
    for program in chromium-headless-shell chromium; do
        if command -v "$program" >/dev/null; then return 0; fi
    done
    [ "$(id -u)" = 0 ] || { cannot "only root can install $package"; return 0; }
    command -v apt-get >/dev/null || { cannot "there is no apt-get to install $package"; return 0; }
    mkdir -p .cache
    exec 9>.cache/setup.lock
    flock 9
    say "installing $package"
    apt_install || { apt-get update -qq && apt_install; } || cannot "apt-get could not install $package"
}

say() { printf 'browser: %s\n' "$*" >&2; }

cannot() { say "no browser here, so the tests of the report's pages are skipped: $*"; }

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends \
        "$package" >/dev/null 2>&1
}

main
