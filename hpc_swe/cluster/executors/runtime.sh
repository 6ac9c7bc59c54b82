# shellcheck shell=bash
# A job sources this, `. runtime.sh FILE CODE`, to import nothing from the shared file system. FILE, which
# containers/build_runtime.sh has made, and CODE/code.tar are unpacked once on this node, for all jobs of this user.
# Afterwards `python` is the interpreter there, and PYTHONPATH names the packages there.
# A job holds a shared lock on what it uses until it ends; what nobody holds is removed before something is unpacked.

runtime_fail() { echo "error: [executor] runtime: $*" >&2; exit 2; }

runtime_unpack() { # FILE FOLDER
    if [[ $1 = *.tar ]]; then
        mkdir "$2" && tar -xf "$1" -C "$2"
    else
        unsquashfs -quiet -no-progress -no-xattrs -dest "$2" "$1" >/dev/null
        [ ! -d "$2/base" ] || sed -i "s|^home = .*|home = ${2%.partial}/base/bin|" "$2/pyvenv.cfg"
    fi
}

runtime_take() { # FILE: `taken` is the folder of this node with what the file holds
    local file=$1 version lock
    version=$(stat -Lc '%s-%Y-%d-%i' "$file") || runtime_fail "$file cannot be read"
    taken=$runtime_node/$version
    exec {lock}>"$taken.lock" && flock -s "$lock" || runtime_fail "$taken.lock cannot be locked"
    [ ! -d "$taken" ] || return 0
    (
        flock 7
        [ ! -d "$taken" ] || exit 0
        rm -rf "$runtime_node"/*.partial
        for old in "$runtime_node"/*.lock; do
            [ "$old" = "$taken.lock" ] || flock -n "$old" rm -rf "${old%.lock}" || true # somebody uses it
        done
        runtime_unpack "$file" "$taken.partial" && mv -T "$taken.partial" "$taken"
    ) 7>"$runtime_node/lock" || runtime_fail "$file cannot be unpacked into $runtime_node; is there space and unsquashfs?"
}

if [ "${SLURM_JOB_NUM_NODES:-1}" = 1 ]; then # the processes of other nodes would not find the folder
    runtime_node=${TMPDIR:-/tmp}/hpc_swe-runtime-$UID
    mkdir -p -m 700 "$runtime_node" && [ -O "$runtime_node" ] && [ ! -L "$runtime_node" ] ||
        runtime_fail "$runtime_node is not a folder of this user's"
    runtime_take "$1"
    python=$taken/bin/python
    if [ -e "$2/code.tar" ]; then # runs of older releases have none
        runtime_take "$2/code.tar"
        export PYTHONPATH=$taken${PYTHONPATH#"$2"}
    fi
fi
