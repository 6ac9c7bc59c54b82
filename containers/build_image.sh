#!/usr/bin/env bash
# Builds the demo's task image twice over in a folder, by default .cache/images: python-pytest.sif, one file to copy to
# a cluster, and python-pytest/, the same tree unpacked, in which programs start faster because no read goes through
# FUSE. Usage: build_image.sh [FOLDER].
# Debian's packages bring their .pyc files along, so nothing is compiled when a task runs.
set -euo pipefail
images=${1:+$(realpath -m "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

images=${images:-$PWD/.cache/images}
packages="python3 python3-pytest procps git libstdc++6" # the last for wheels such as numpy

main() {
    local wanted
    if ! command -v apptainer >/dev/null; then
        say "no Apptainer here, so no image; the process sandbox needs none"
        exit 0
    fi
    mkdir -p "$images"
    exec 9>"$images/lock"
    flock 9 || say "this file system has no locks: do not run this twice at once"
    wanted=$(sha256sum containers/build_image.sh containers/task.def)
    [ "$(cat "$images/python-pytest.stamp" 2>/dev/null)" != "$wanted" ] || exit 0
    work=$(mktemp -d "$images/work.XXXXXX")
    trap 'chmod -R u+rwX "$work"; rm -rf "$work"' EXIT
    say "building python-pytest; this takes a minute"
    if is_root && command -v mmdebstrap >/dev/null; then
        build_from_mirror
    elif ! build_from_definition; then
        say "no image: task.def, which starts from a registry's Debian, failed. Copy .cache/images from where root ran" \
            "'make image'; until then the process sandbox works and the apptainer sandbox does not"
        exit 0
    fi
    put_in_place
    echo "$wanted" >"$images/python-pytest.stamp"
}

say() { printf 'image: %s\n' "$*" >&2; }

is_root() { [ "$(id -u)" = 0 ]; }

# Root in a container may lack a capability that Apptainer would ask for. And gzip, mksquashfs's default, takes
# twenty times the CPU of this for nearly the same size.
build() {
    APPTAINER_DROP_CAPS=CAP_SYS_RESOURCE apptainer --quiet build \
        --mksquashfs-args '-comp zstd -Xcompression-level 3' "$@"
}

build_from_mirror() {
    local mirror components=main
    # shellcheck source=/dev/null
    . /etc/os-release
    [ "$ID" != ubuntu ] || components=main,universe
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' \
        "Origin: ${ID^}" "Codename: $VERSION_CODENAME" 'Component: main' | head -n 1)
    chmod 755 "$work"  # apt reads the tree as its own user
    # shellcheck disable=SC2016
    mmdebstrap --quiet --variant=essential --components="$components" --include="${packages// /,}" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --customize-hook='mkdir "$1/testbed" "$1/io"' \
        "$VERSION_CODENAME" "$work/tree" "$mirror"
    build "$work/image.sif" "$work/tree"
}

build_from_definition() {
    build --build-arg "PACKAGES=$packages" "$work/image.sif" containers/task.def &&
        build --sandbox "$work/tree" "$work/image.sif"
}

put_in_place() {
    rm -rf "$images/python-pytest" "$images/python-pytest.stamp"
    mv "$work/image.sif" "$images/python-pytest.sif"
    mv "$work/tree" "$images/python-pytest"
}

main
