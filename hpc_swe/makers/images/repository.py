"""Make the repository of an image: it holds the task's base commit, and nothing that shows another one."""

from collections.abc import Collection
from pathlib import Path

from hpc_swe.base.errors import HpcSweError
from hpc_swe.makers.images.commands import git, remove, run

# Copying an image changes all times but the time of last modification.
_CONFIG = {"core.checkStat": "minimal", "core.trustctime": "false", "gc.auto": "0"}
_MOST_SET_UP = 50
_SET_UP = "What the image's maker changed"


def stage(repository: Path, commit: str, folder: Path) -> None:
    """Check a commit out into a new repository that holds this one commit and no other.

    Raise HpcSweError if the commit is missing, or if the repository holds something younger.
    """
    folder.mkdir(parents=True, exist_ok=True)
    here = git(folder)
    run("git", "init", "--quiet", "--template=", str(folder))
    for name, value in _CONFIG.items():
        run(*here, "config", name, value)
    upload = "--upload-pack=git -c safe.directory=* -c uploadpack.allowAnySHA1InWant=true upload-pack"
    source = repository.absolute().as_uri()
    run(*here, "fetch", "--quiet", "--depth=1", "--no-tags", upload, source, commit)
    run(*here, "update-ref", "refs/heads/main", "FETCH_HEAD")  # the commit may be called HEAD
    run(*here, "symbolic-ref", "HEAD", "refs/heads/main")
    run(*here, "reset", "--quiet", "--hard")
    for name in ("FETCH_HEAD", "ORIG_HEAD"):
        (folder / ".git" / name).unlink(missing_ok=True)
    (folder / ".git" / "info").mkdir(exist_ok=True)
    _refuse_foreign_objects(folder, commit)


def begin(folder: Path) -> None:
    """Make a repository of a folder that has none: all its files become the only commit.

    Raise HpcSweError if a folder in it has a repository: its files would be lost.
    """
    if inner := sorted(folder.rglob(".git")):
        raise HpcSweError(
            f"{inner[0].parent.relative_to(folder)} in the work directory is a repository of its own, whose "
            "files would be in no patch: remove its .git in the Dockerfile"
        )
    here = git(folder, "user.name=images", "user.email=images")
    run("git", "init", "--quiet", "--template=", str(folder))
    run(*here, "add", "--all", "--force")
    run(*here, "commit", "--quiet", "--no-verify", "--allow-empty", "--message=The image's files")


def restage(folder: Path, commit: str, scratch: Path, exact: Collection[str] | None) -> list[str]:
    """Replace the repository of an existing image by a staged one; return the files that its maker changed.

    Untracked files stay, since the maker's build products are among them. Changes of tracked files stay too,
    in a commit on top of the base, so that an agent's patch does not contain them; but the files named in
    `exact` are restored to the base. None restores all, for a work tree of another commit. Raise HpcSweError
    if the base commit is missing, or if the work tree is of another one.
    """
    gone = ("diff-tree", "-r", "-z", "--name-only", "--diff-filter=D", "HEAD", commit)
    left = _names(run(*git(folder), *gone)) if exact is None else set()
    _take_staged(folder, commit, scratch / "staged")
    here = git(folder, "user.name=images", "user.email=images")
    for entry in run(*here, "ls-files", "--stage", "-z").split("\0"):
        mode, _, path = entry.partition("\t")
        if mode.startswith("160000"):  # a submodule, whose history was removed
            remove(folder / path / ".git")
    if left:  # git follows no link of the image
        run(*here, "--literal-pathspecs", "clean", "--quiet", "-fx", "--", *sorted(left))
    contents = git(folder, "core.fileMode=false")
    differ = _names(run(*contents, "diff", "--name-only", "-z", "HEAD"))
    changed = set() if exact is None else differ - set(exact)
    if len(changed) > _MOST_SET_UP:
        raise HpcSweError(
            f"{len(changed)} tracked files of the image differ from {commit}: it is of another commit"
        )
    others = _names(run(*here, "diff", "--name-only", "-z", "HEAD")) - changed
    if others:
        words = ("checkout", "--quiet", "HEAD", "--pathspec-from-file=-", "--pathspec-file-nul")
        run(*git(folder, "core.quotePath=false"), *words, stdin="\0".join(others))
    tip = commit
    if changed:
        date = run(*here, "log", "-1", "--format=%cI").strip()
        when = {"GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date}
        run(*here, "commit", "--quiet", "--no-verify", "--all", f"--message={_SET_UP}", settings=when)
        (folder / ".git" / "COMMIT_EDITMSG").unlink(missing_ok=True)
        tip = run(*here, "rev-parse", "HEAD").strip()
    run(*here, "update-index", "-q", "--refresh")
    _refuse_foreign_objects(folder, tip)
    return sorted(changed)


def _take_staged(folder: Path, commit: str, staged: Path) -> None:
    stage(folder, commit, staged)
    remove(folder / ".git")
    (staged / ".git").rename(folder / ".git")
    remove(staged)
    (folder / ".git" / "index").unlink()  # it describes the staged files, not these
    run(*git(folder), "read-tree", "HEAD")


def foreign_objects(folder: Path, commit: str) -> list[str]:
    """List objects, references and remotes of a repository that show more than `commit` does."""
    here = git(folder)
    held = {line.split()[0] for line in run(*here, "rev-list", "--objects", commit).splitlines()}
    there = run(*here, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    refs = run(*here, "for-each-ref", "--format=%(refname)").split()
    found = [name for name in there if name not in held]
    found += [ref for ref in refs if ref != "refs/heads/main"]
    found += run(*here, "remote").split()
    files = ("logs", "FETCH_HEAD", "ORIG_HEAD", "packed-refs", "objects/info/alternates")
    return found + [name for name in files if (folder / ".git" / name).exists()]


def unchanged(folder: Path, commit: str) -> set[str]:
    """Return the tracked files that equal those of the base commit."""
    here = git(folder)
    return _names(run(*here, "ls-files", "-z")) - _names(run(*here, "diff", "--name-only", "-z", commit))


def _refuse_foreign_objects(folder: Path, commit: str) -> None:
    found = foreign_objects(folder, commit)
    if found:
        raise HpcSweError(f"{folder}: {len(found)} objects are not part of {commit}: {found[:5]}")


def _names(listing: str) -> set[str]:
    return {name for name in listing.split("\0") if name}
