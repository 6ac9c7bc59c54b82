#!/usr/bin/env bash
# Puts a Python into .cache/host-python, or the folder given, to be shown in sandboxes whose images have none that is
# new enough: configs/sandboxes/host_python.toml mounts it. It is PYTHON (python3.11 by default) with its standard
# library and all libraries that it needs, the C library too, so that it runs in old images, and in those of another C
# library.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

kit=$(realpath -ms -- "${1:-.cache/host-python}")
python=${PYTHON:-python3.11}

main() {
    local version stdlib dynamic loader
    [ -z "$(ls -A "$kit" 2>/dev/null)" ] || grep -qsF 'exec "$kit/lib/ld-linux' "$kit/bin/python3" ||
        fail "$kit holds something else than a Python of this script; name a new or empty folder"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "PYTHON=$python starts no Python 3.10 or newer"
    version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    dynamic=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("DESTSHARED"))')
    mkdir -p "$(dirname "$kit")"
    work=$(mktemp -d "$kit.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$work/bin" "$work/lib/$version"
    tar -C "$stdlib" --exclude=__pycache__ --exclude=test --exclude=idlelib --exclude=tkinter --exclude=ensurepip \
        --exclude='config-*' --exclude=site-packages --exclude=dist-packages -ch . | tar -C "$work/lib/$version" -x
    [ -d "$work/lib/$version/lib-dynload" ] || cp -rL "$dynamic" "$work/lib/$version/lib-dynload"
    cp -L "$("$python" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')" "$work/bin/$version"
    for needed in "$work/bin/$version" "$work/lib/$version/lib-dynload"/*.so; do
        ldd "$needed" | sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p; s/^\t\(\/[^ ]*\) .*/\1/p'
    done | sort -u | xargs cp -L -t "$work/lib"
    loader=$(cd "$work/lib" && ls ld-linux*)
    cat >"$work/bin/python3" <<END
#!/bin/sh
kit=\${0%/bin/*}
exec "\$kit/lib/$loader" --library-path "\$kit/lib" --argv0 "\$0" "\$kit/bin/$version" "\$@"
END
    chmod 755 "$work/bin/python3" "$work"
    "$work/bin/python3" -I -c 'import ctypes, hashlib, json, select, socket, zlib' || fail "the kit's Python does not start"
    rm -rf "$kit"
    mv "$work" "$kit"
    trap - EXIT
    echo "python: $kit has $version ($(du -sh "$kit" | cut -f 1))"
}

fail() {
    echo "python: $*" >&2
    exit 1
}

main
