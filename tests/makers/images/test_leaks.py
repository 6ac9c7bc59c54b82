"""What an image must not show: the solution in a copy of the package, or the future in another clone."""

import functools
import gzip
import html
import io
import json
import os
import py_compile
import shutil
import tarfile
import textwrap
import zipfile
from pathlib import Path
from py_compile import PycInvalidationMode

import msgspec
import pyarrow as pa
import pytest

from hpc_swe.base.errors import DeadlineError, HpcSweError
from hpc_swe.base.records import Start, Task, TestPlan
from hpc_swe.makers.images.contents import contents
from hpc_swe.makers.images.leaks import search
from hpc_swe.makers.images.repository import stage
from tests.kit.toy import BROKEN, MENDED, MORE_UNITTESTS, UNITTESTS, git, make_repository, patch

SHORT = MENDED.replace("a + b", "a.__add__(b) if hasattr(a, '__add__') else b")
LONG = BROKEN + "".join(f"\n\ndef function_{n}(number):\n    return number * {n}00_000\n" for n in range(3))

TASK = Task(
    task_id="one",
    taskset="swebench",
    prompt="",
    image="calc",
    workdir="/testbed",
    tests=TestPlan(command="", fail_to_pass=[], timeout_s=1),
)


@pytest.fixture(scope="module")
def staged(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    stage(repository[0], repository[1], folder / "testbed")
    return folder


@pytest.fixture
def tree(staged, tmp_path):
    """An image with nothing in it but the work tree."""
    return Path(shutil.copytree(staged, tmp_path / "image", symlinks=True))


@pytest.mark.parametrize(
    ("path", "after"),
    [
        ("opt/site-packages/calc/core.py", LONG),
        ("opt/site-packages/renamed.py", LONG),
        ("testbed/build/lib/calc/core.py", LONG),
        ("root/fix.patch", LONG),
        ("opt/site-packages/calc/core.py", SHORT),
        ("opt/site-packages/renamed.py", SHORT),
        ("opt/site-packages/calc/core.py", MENDED),
    ],
    ids=["copy", "renamed", "built", "patch", "one line", "one line elsewhere", "a line of no distinction"],
)
def test_a_copy_of_the_solution_is_found(repository, tree, path, after):
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(after)
    reference = patch("calc/core.py", BROKEN, after)
    assert search(tree, "/testbed", repository[1], reference) == [path]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("opt/site-packages/calc/core.py", BROKEN),
        ("testbed/build/lib/calc/core.py", BROKEN),
        ("opt/site-packages/tests/test_core.py", UNITTESTS),
    ],
    ids=["installed", "built", "hidden test"],
)
def test_a_copy_of_what_a_start_takes_away_is_found(repository, tree, path, text):
    """The image's commit is sound, and its tests are shown, until a sandbox is opened."""
    fault = patch("calc/core.py", BROKEN, BROKEN.replace("2 * a", "7777 * a"))
    start = Start(patch=fault, hidden=("tests/test_core.py",))
    task = msgspec.structs.replace(TASK, base_commit="HEAD", start=start)
    where = tree / path
    compiled = tree / "testbed/calc/__pycache__/core.cpython-38.pyc"  # it goes when the start is made
    compiled.parent.mkdir()
    compiled.write_bytes(b"\0\0\r\n" + b"7777 double" * 3 + BROKEN.encode())
    assert search(tree, "/testbed", "HEAD", started=[(task, [])]) == []
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(text)
    assert search(tree, "/testbed", "HEAD", started=[(task, [])]) == [path]
    assert search(tree, "/testbed", repository[1]) == []


def test_a_start_that_does_not_fit_names_the_instance(tree):
    task = msgspec.structs.replace(TASK, start=Start(patch=patch("calc/core.py", MENDED, BROKEN)))
    with pytest.raises(HpcSweError, match=r"one: its start .*commit \(error: patch failed.* leave the inst"):
        search(tree, "/testbed", "HEAD", started=[(task, [])])


@pytest.mark.parametrize(
    ("path", "after"),
    [("opt/site-packages/renamed.py", SHORT), ("opt/site-packages/calc/core.py", MENDED)],
    ids=["one line elsewhere", "a line of no distinction"],
)
def test_too_little_for_a_copy_is_none(repository, tree, path, after):
    """Such lines are in files that have nothing to do with the solution."""
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(after.partition("\n\n\n")[0])
    assert search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, after)) == []


def test_an_image_without_it_is_clean(repository, tree):
    (tree / "opt").mkdir()
    (tree / "opt/core.py").write_text(BROKEN)
    (tree / "opt/link.py").symlink_to("/nowhere")
    assert search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, LONG)) == []


def test_lines_that_the_base_commit_has_elsewhere_tell_nothing(repository, tree):
    known = "def test_double(self):\n        self.assertEqual(double(4), 8)\n"
    (tree / "opt/calc").mkdir(parents=True)
    (tree / "opt/calc/core.py").write_text(BROKEN.replace("double", "twice") + known)
    assert search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, BROKEN + known)) == []


def test_a_set_up_that_holds_the_solution_is_found(repository, tree):
    (tree / "testbed/tests/test_plain.py").write_text(LONG)
    reference = patch("calc/core.py", BROKEN, LONG)
    assert search(tree, "/testbed", repository[1], reference) == ["testbed/tests/test_plain.py"]


def _wheel(path, name, text):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, text)


def _sdist(path, name, text):
    kind = path.suffix.removeprefix(".") if path.suffix in (".gz", ".bz2", ".xz") else ""
    with tarfile.open(path, f"w:{kind}") as archive:
        member = tarfile.TarInfo(f"calc-2/{name}")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))


def _wheel_in_sdist(path, name, text):
    _wheel(path.with_name("inner.whl"), name, text)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(path.with_name("inner.whl"), "dist/inner.whl")
    path.with_name("inner.whl").unlink()


def _zstd(path, name, text):
    with pa.output_stream(path, compression="zstd") as stream:
        stream.write(text.encode())


def _deb(path, name, text):
    _sdist(path.with_name("data.tar.xz"), name, text)
    inner = path.with_name("data.tar.xz").read_bytes()
    head = b"%-16s%-12d%-6d%-6d%-8d%-10d`\n" % (b"data.tar.xz", 0, 0, 0, 0o644, len(inner))
    path.write_bytes(b"!<arch>\n" + head + inner)
    path.with_name("data.tar.xz").unlink()


def _compiled(path, name, text, **more):
    source = path.with_name("source.py")
    source.write_text(text)
    py_compile.compile(str(source), str(path), doraise=True, **more)
    source.unlink()


def _compiled_elsewhere(path, name, text):
    """Of another release: neither its instructions nor its header tell us anything."""
    _compiled(path, name, text)
    data = bytearray(path.read_bytes())
    data[0], data[8:16] = (data[0] + 1) % 256, bytes(8)
    path.write_bytes(bytes(data))


def _changelog(path, name, text):
    path.write_text("Version 2\n---------\n\n" + textwrap.indent(patch(name, BROKEN, text), "    "))


def _page(path, name, text):
    words = (f'<span class="k">{html.escape(word)}</span>' for word in text.split(" "))
    path.write_text(f"<html><pre>{' '.join(words)}</pre></html>")


def _notebook(path, name, text):
    path.write_text(json.dumps({"cells": [{"source": text.splitlines(True)}]}))


def _bundle(path, name, text):
    scratch = path.with_name("scratch")
    make_repository(scratch)
    (scratch / name).write_text(text)
    git(scratch, "commit", "-qam", "mended")
    git(scratch, "bundle", "create", str(path), "HEAD")
    shutil.rmtree(scratch)


PLACES = {
    "a compiled file": ("calc/__pycache__/core.cpython-311.pyc", _compiled),
    "a checked hash": (
        "calc/__pycache__/core.cpython-311.pyc",
        functools.partial(_compiled, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH),
    ),
    "another release's": ("calc/core.pyc", _compiled_elsewhere),
    "a wheel": ("calc-2-py3-none-any.whl", _wheel),
    "a source distribution": ("calc-2.tar.gz", _sdist),
    "bzip2": ("calc-2.tar.bz2", _sdist),
    "xz": ("calc-2.tar.xz", _sdist),
    "a plain archive": ("calc-2.bin", _sdist),
    "nested": ("all.tgz", _wheel_in_sdist),
    "a Debian package": ("calc.deb", _deb),
    "zstd": ("core.zst", _zstd),
    "gzip": ("core.gz", lambda path, name, text: path.write_bytes(gzip.compress(text.encode()))),
    "a backup": ("calc/core.py~", lambda path, name, text: path.write_text(text)),
    "text": ("notes.txt", lambda path, name, text: path.write_text(text)),
    "without a suffix": ("notes", lambda path, name, text: path.write_text(text)),
    "cython": (
        "calc/core.pyx",
        lambda path, name, text: path.write_text("# cython: language_level=3\n" + text),
    ),
    "another encoding": ("notes.txt", lambda path, name, text: path.write_text(text, encoding="utf-16")),
    "a changelog": ("CHANGES", _changelog),
    "a page": ("_modules/calc/core.html", _page),
    "a notebook": ("fix.ipynb", _notebook),
    "a bundle": ("calc.bundle", _bundle),
}
LINE = BROKEN.replace("return a - b", "summed = a + b  # not minus\n    return summed")
"""A solution of so few lines that only place, code or identity can tell it."""


def _fill(tree, text):
    """One file of each form; their paths."""
    for kind, (place, write) in PLACES.items():
        path = tree / "opt" / kind / place
        path.parent.mkdir(parents=True)
        write(path, "calc/core.py", text)
    return {f"opt/{kind}/{place}" for kind, (place, _) in PLACES.items()}


@pytest.mark.parametrize("after", [LONG, LINE], ids=["long", "short"])
def test_the_solution_is_found_in_any_form(repository, tree, after):
    paths = _fill(tree, after)
    found = search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, after))
    assert {path.partition("!")[0] for path in found} == paths


@pytest.mark.parametrize("mode", ["timestamp", "checked-hash"])
def test_names_in_a_compiled_file_beside_its_source_show_nothing(repository, tree, mode):
    """A solution that uses a library has names of that library's interface."""
    names = "".join(f"def interface_name_{n}():\n    pass\n" for n in range(5))
    uses = BROKEN + "".join(f"\nlibrary.interface_name_{n}()" for n in range(5)) + "\n"
    path = tree / "usr/lib/python3/library.py"
    path.parent.mkdir(parents=True)
    path.write_text(names)
    modes = {"timestamp": PycInvalidationMode.TIMESTAMP, "checked-hash": PycInvalidationMode.CHECKED_HASH}
    compiled = py_compile.compile(str(path), invalidation_mode=modes[mode], doraise=True)
    reference = patch("calc/core.py", BROKEN, uses)
    assert search(tree, "/testbed", repository[1], reference) == []
    path.write_text("# of another release\n")
    assert search(tree, "/testbed", repository[1], reference) == [str(Path(compiled).relative_to(tree))]


def test_what_was_there_before_the_solution_shows_nothing(repository, tree):
    _fill(tree, BROKEN + "\n# of an older release\n")
    assert search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, LONG)) == []


def test_a_binary_solution_is_compared_byte_for_byte(repository, tree, tmp_path):
    table = bytes(range(256)) * 8
    git(tmp_path, "init", "-q")
    (tmp_path / "table.db").write_bytes(table)
    git(tmp_path, "add", "table.db")
    reference = git(tmp_path, "diff", "--cached", "--binary") + "\n\n"
    (tree / "letters.so").write_bytes(b"".join(bytes([n, 0]) for n in table))
    assert search(tree, "/testbed", repository[1], reference) == []
    (tree / "cache").write_bytes(b"packed" + table)
    assert search(tree, "/testbed", repository[1], reference) == ["cache"]


def test_a_repository_whose_work_tree_and_head_are_empty_is_searched(repository, tree):
    srv = tree / "srv/mirror"
    srv.mkdir(parents=True)
    git(srv, "init", "-q")
    (srv / "core.py").write_text(LONG)
    git(srv, "add", "-A")
    git(srv, "commit", "-qm", "all of it")
    git(srv, "rm", "-q", "core.py")
    git(srv, "commit", "-qm", "nothing")
    for packed in (False, True):
        if packed:
            git(srv, "gc", "-q")
        (shown,) = search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, LONG))
        assert shown.startswith("srv/mirror/.git/objects/")


def _break_git(folder, monkeypatch, command, does):
    """Let one command of git do something else, as a shell says it."""
    folder.mkdir()
    line = f'case "$*" in *{command}*) {does};; esac'
    (folder / "git").write_text(f'#!/bin/sh\n{line}\nexec {shutil.which("git")} "$@"\n')
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize("command", ["init", "index-pack", "cat-file"])
def test_a_pack_that_git_never_ends_to_unpack_is_not_called_clean(tmp_path, monkeypatch, command):
    """A frozen file system holds git so; nobody has seen what is in the pack."""
    _bundle(tmp_path / "calc.bundle", "calc/core.py", LONG)
    _break_git(tmp_path / "bin", monkeypatch, command, "exec sleep 60")
    with pytest.raises(DeadlineError, match=f"^opt/calc.bundle: .*{command}.* timed out"):
        list(contents("opt/calc.bundle", (tmp_path / "calc.bundle").read_bytes(), git_s=8.0))


@pytest.mark.parametrize(
    ("command", "does"),
    [
        ("init", "exit 128"),
        ("index-pack", "echo fatal: No space left on device >&2; exit 128"),
        ("index-pack", "kill -9 $$"),
        ("index-pack", "echo fatal: unable to create thread >&2; exit 128"),
        ("cat-file", "echo 0123 blob 10; echo half; kill -9 $$"),
        ("cat-file", "printf 01; exit 128"),
    ],
)
def test_a_pack_that_git_cannot_unpack_here_is_not_called_clean(tmp_path, monkeypatch, command, does):
    """The disk is full, or the memory."""
    _bundle(tmp_path / "calc.bundle", "calc/core.py", LONG)
    _break_git(tmp_path / "bin", monkeypatch, command, does)
    with pytest.raises(HpcSweError, match=f"^opt/calc.bundle: .*{command}.* (status|code|<Signals.SIGKILL)"):
        list(contents("opt/calc.bundle", (tmp_path / "calc.bundle").read_bytes()))


def test_a_damaged_package_ends_no_search(repository, tree):
    """Its member has a negative size, so the next would begin where this one does."""
    (tree / "opt").mkdir()
    (tree / "opt/calc.deb").write_bytes(b"!<arch>\n" + b"%-48s%-10d`\n" % (b"data.tar", -60))
    assert search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, LONG)) == []


def test_hidden_tests_in_an_installed_copy_are_found(repository, tree):
    (tree / "opt/calc/tests").mkdir(parents=True)
    (tree / "opt/calc/tests/test_core.py").write_text(UNITTESTS + MORE_UNITTESTS)
    tests = patch("tests/test_core.py", UNITTESTS, UNITTESTS + MORE_UNITTESTS)
    found = search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, MENDED), tests)
    assert found == ["opt/calc/tests/test_core.py"]


@pytest.mark.parametrize("form", ["clone", "bare"])
def test_another_clone_is_found(repository, tree, form):
    if form == "clone":
        shutil.copytree(repository[0], tree / "srv/calc")
    else:
        git(tree, "clone", "--quiet", "--bare", str(repository[0]), "srv/calc.git")
    place = "srv/calc/.git" if form == "clone" else "srv/calc.git"
    assert search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, MENDED))[:1] == [place]
