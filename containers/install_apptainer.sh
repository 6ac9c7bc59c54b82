#!/usr/bin/env bash
# Installs Apptainer as root. Where the distribution's archive has no package, Debian's sid has one, but built
# for a newer libc. That package is rebuilt with sid's libc in a folder of its own, so nothing of the system is
# upgraded and `apt-get purge apptainer` takes it all away. The mirror is the one this machine's apt uses; Ubuntu uses
# none, so there DEBIAN_MIRROR must hold the address of one.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

keyring=/usr/share/keyrings/debian-archive-keyring.gpg
helpers=(squashfuse fuse-overlayfs fuse2fs fakeroot)

main() {
    command -v apptainer >/dev/null && exit 0
    [ "$(id -u)" = 0 ] || fail "needs root"
    command -v apt-get >/dev/null || fail "this is no Debian or Ubuntu; see Apptainer's own installation guide"
    apt-get -qq update
    if ! apt_install apptainer "${helpers[@]}" 2>/dev/null; then install_from_sid; fi
    apptainer --version
}

fail() { printf 'install_apptainer: %s\n' "$*" >&2; exit 1; }

apt_install() {
    apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$@" >/dev/null
}

install_from_sid() {
    local mirror
    mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' \
        'Created-By: Packages' 'Origin: Debian' 'Label: Debian' 'Component: main' | head -n 1)}
    [ -n "$mirror" ] || fail "apt's sources have neither apptainer nor a Debian mirror; add the source that Apptainer's" \
        "installation guide names for this distribution, or set DEBIAN_MIRROR to the address of a mirror; then run this again"
    apt_install patchelf debian-archive-keyring
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    cd "$work"
    download_from_sid "$mirror" apptainer libc6
    dpkg-deb --raw-extract apptainer_*.deb package
    dpkg-deb --extract libc6_*.deb libc
    give_own_libc
    dpkg-deb -Znone --build package apptainer.deb >/dev/null
    chmod 755 "$work"  # apt reads the file as its own user
    apt_install ./apptainer.deb "${helpers[@]}"
}

# An apt state that knows nothing but sid, so that the machine's own sources and pins stay as they are. Sid's index is
# valid for a week; a mirror that is not renewed so often still serves, and its signature is verified as ever.
download_from_sid() {
    local mirror=$1 options
    shift
    mkdir -p lists/partial
    echo "deb [signed-by=$keyring] $mirror sid main" >sid.list
    options=(-qq -o Dir::Etc::sourcelist="$work/sid.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::Etc::preferencesparts=/dev/null -o Dir::State::lists="$work/lists"
        -o Dir::State::status=/dev/null -o APT::Sandbox::User=root -o Acquire::Check-Valid-Until=false)
    apt-get "${options[@]}" update
    apt-get "${options[@]}" download "$@" >/dev/null
}

give_own_libc() {
    local lib own program
    lib=$(cd libc && dirname "$(find usr/lib -name libc.so.6)")
    own=$lib/apptainer/libc
    mkdir -p "package/$own"
    cp -L libc/"$lib"/{ld-linux-*.so.*,libc.so.6,libm.so.6,libpthread.so.0,libdl.so.2,libresolv.so.2} "package/$own/"
    for program in package/usr/bin/apptainer "package/$lib/apptainer/bin/starter"; do
        patchelf --set-interpreter "/$own/$(cd "package/$own" && echo ld-linux-*)" \
            --force-rpath --set-rpath "/$own" "$program"
    done
    # the version tells the rebuilt package from the archive's
    sed -i -e 's/^Version: .*/&+ownlibc/' -e 's/libc6 ([^)]*)/libc6/' package/DEBIAN/control
    (cd package && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | xargs -0 md5sum >DEBIAN/md5sums)
}

main
