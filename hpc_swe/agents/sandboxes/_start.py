"""Bring a sandbox to the state in which its task starts.

One image serves many such tasks, and holds the solution or the hidden tests of each. So the files that are
left become the only commit of the repository: no reference, log, object or compiled file shows what was there
before.
"""

import shlex

from hpc_swe.agents.sandboxes.base import Sandbox, add_files
from hpc_swe.base.errors import SandboxError
from hpc_swe.base.records import Task

START_S = 300.0
_PATCH = ".git/start.patch"
_WITHOUT_COMPILED = "find . -name __pycache__ -prune -exec rm -rf {} +"
# The commit has the date of the image's, so that all sandboxes of a task print the same. A pack of a large
# repository would be larger than `limits.file_mb` allows a file to be. All files of the kinds that the patch
# changes are written anew: times and inode numbers would name those that it changed.
_ONE_COMMIT = f"""base=$(git rev-parse HEAD)
export GIT_COMMITTER_DATE="$(git log -1 --format=%cI)"
export GIT_AUTHOR_DATE="$GIT_COMMITTER_DATE"
start=$(git -c user.name=images -c user.email=images commit-tree -m Start "$(git write-tree)")
set -f
kinds=$(git diff --name-only "$base" "$start" | sed -n 's/.*\\(\\.[A-Za-z0-9]*\\)$/*\\1/p' | sort -u)
git ls-files -z -- $kinds > .git/same
set +f
mkdir .git/again
xargs -0r cp -d --preserve=mode --parents -t .git/again < .git/same
xargs -0r rm -f < .git/same
cp -rd --preserve=mode .git/again/. .
git update-index -q --refresh || true
rm -rf .git/again .git/same {_PATCH} .git/logs .git/refs .git/packed-refs .git/shallow .git/*_HEAD
mkdir -p .git/refs/heads
echo "$start" > .git/refs/heads/main
echo "ref: refs/heads/main" > .git/HEAD
git -c pack.packSizeLimit=32m repack -adq
git prune --expire=now
if git cat-file -e "$base" 2>/dev/null; then echo "git still has $base"; exit 1; fi"""


def apply_start(sandbox: Sandbox, task: Task) -> None:
    """Apply `Task.start` before anybody acts in a sandbox; raise SandboxError if it does not fit."""
    if not task.start:
        return
    patch, inside = task.start.patch, task.start.inside
    lines = ["set -e", f"git cat-file -e {shlex.quote(task.base_commit)}", _WITHOUT_COMPILED]
    lines += [f"rm -rf {shlex.quote(path)}" for path in task.start.hidden if path not in inside]
    if patch or inside:
        lines.append("git update-index -q --refresh || true")
    if patch:
        add_files(sandbox, {_PATCH: patch}, f"write the start of {task.task_id}")
        lines.append(f"git apply --index --whitespace=nowarn {_PATCH}")
    if inside:
        lines.append(f"git rm -qf -- {shlex.join(inside)}")
    result = sandbox.run("\n".join([*lines, *([_ONE_COMMIT] if patch or inside else [])]), START_S)
    if result.exit_code:
        raise SandboxError(
            f"{task.task_id}: its start cannot be made from commit {task.base_commit} of image {task.image}: "
            f"{result.output[-500:]}"
        )
