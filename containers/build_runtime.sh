#!/usr/bin/env bash
# Packs an environment into one file: containers/build_runtime.sh ENVIRONMENT FILE, for example .venv-gpu and
# /shared/me/runtime.sqfs. With `executor.runtime = FILE` each job unpacks it on its node, or finds it unpacked there, so
# that thousands of workers do not import thousands of files each from the shared file system. A Python that does not
# lie below /usr is packed, too. Needs mksquashfs here and unsquashfs on the nodes (squashfs-tools, as Apptainer does).
set -euo pipefail

usage="usage: containers/build_runtime.sh ENVIRONMENT FILE"
[ "${1:-}" != --help ] || { echo "$usage"; exit 0; }
[ $# = 2 ] || { echo "$usage" >&2; exit 2; }
environment=$(realpath "$1") file=$(realpath -m "$2")

say() { printf 'runtime: %s\n' "$*" >&2; }

[ -x "$environment/bin/python" ] || { say "$environment is no environment: it has no bin/python"; exit 2; }
[ -d "${file%/*}/" ] || { say "${file%/*}: no such folder; make it"; exit 2; }
command -v mksquashfs >/dev/null || { say "no mksquashfs here: install squashfs-tools"; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work" "$file.partial"' EXIT

# Scripts name the environment's Python by its path; these find the one beside them.
cp -a "$environment/bin" "$work/bin"
while IFS= read -r -d '' script; do
    sed -i "1c #!/bin/sh\n'''exec' \"\$(dirname \"\$0\")/python\" \"\$0\" \"\$@\"\n' '''" "$script"
done < <(grep -d skip -lIZ "^#!$environment/bin/python" "$work"/bin/* || true)
base=$("$environment/bin/python" -c 'import sys; print(sys.base_prefix)')
case $base in
    /usr | /usr/*) ;;
    *)
        say "packing $base, too, since nodes may not have it"
        cp -a "$base" "$work/base"
        interpreter=$(basename "$(realpath "$environment/bin/python")")
        for name in "$work"/bin/python*; do
            [ ! -L "$name" ] || ln -sfn "../base/bin/$interpreter" "$name"
        done
        ;;
esac

mapfile -t parts < <(find "$environment" -mindepth 1 -maxdepth 1 ! -name bin ! -name runs ! -name setup.stamp)
rm -f "$file.partial"
mksquashfs "${parts[@]}" "$work"/* "$file.partial" -quiet -no-progress -no-xattrs -all-root \
    -comp zstd -Xcompression-level 3 >/dev/null
mv "$file.partial" "$file"
say "$file: $(du -h "$file" | cut -f 1). Use it with executor.runtime=\"$file\""
