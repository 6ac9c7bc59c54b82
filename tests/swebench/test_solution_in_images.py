"""What an image must not show: the solution in a copy of the package, or the future in another clone."""

import shutil

import pytest
from toy import BROKEN, MENDED, git, patch

from jobs.images.leaks import search
from jobs.images.repository import stage

SHORT = MENDED.replace("a + b", "a.__add__(b) if hasattr(a, '__add__') else b")
LONG = BROKEN + "".join(f"\n\ndef function_{n}(number):\n    return number * {n}00_000\n" for n in range(3))


@pytest.fixture
def tree(repository, tmp_path):
    """An image with nothing in it but the work tree."""
    stage(repository[0], repository[1], tmp_path / "image/testbed")
    return tmp_path / "image"


@pytest.mark.parametrize(
    ("path", "after", "is_found"),
    [
        ("opt/site-packages/calc/core.py", LONG, True),
        ("opt/site-packages/renamed.py", LONG, True),
        ("testbed/build/lib/calc/core.py", LONG, True),
        ("root/fix.patch", LONG, True),
        ("opt/site-packages/calc/core.py", SHORT, True),
        ("opt/site-packages/renamed.py", SHORT, False),
        ("opt/site-packages/calc/core.py", MENDED, False),
    ],
    ids=["copy", "renamed", "built", "patch", "one line", "one line elsewhere", "a line of no distinction"],
)
def test_a_copy_of_the_solution_is_found(repository, tree, path, after, is_found):
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(after)
    reference = patch("calc/core.py", BROKEN, after)
    assert search(tree, "/testbed", repository[1], reference) == ([path] if is_found else [])


def test_a_reference_need_not_be_in_the_words_of_git(repository, tree):
    (tree / "opt").mkdir()
    (tree / "opt/core.py").write_text(LONG)
    reference = patch("calc/core.py", BROKEN, LONG).split("\n", 1)[1]
    assert reference.startswith("--- a/")
    assert search(tree, "/testbed", repository[1], reference) == ["opt/core.py"]


def test_an_image_without_it_is_clean(repository, tree):
    (tree / "opt").mkdir()
    (tree / "opt/core.py").write_text(BROKEN)
    (tree / "opt/link.py").symlink_to("/nowhere")
    assert search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, LONG)) == []


def test_lines_that_the_base_commit_has_elsewhere_tell_nothing(repository, tree):
    known = "def test_double(self):\n        self.assertEqual(double(4), 8)\n"
    (tree / "opt/calc").mkdir(parents=True)
    (tree / "opt/calc/core.py").write_text(BROKEN + known)
    assert search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, BROKEN + known)) == []


def test_a_set_up_that_holds_the_solution_is_found(repository, tree):
    (tree / "testbed/tests/test_plain.py").write_text(LONG)
    reference = patch("calc/core.py", BROKEN, LONG)
    assert search(tree, "/testbed", repository[1], reference) == ["testbed/tests/test_plain.py"]


@pytest.mark.parametrize("form", ["clone", "bare"])
def test_another_clone_is_found(repository, tree, form):
    if form == "clone":
        shutil.copytree(repository[0], tree / "srv/calc")
    else:
        git(tree, "clone", "--quiet", "--bare", str(repository[0]), "srv/calc.git")
    place = "srv/calc/.git" if form == "clone" else "srv/calc.git"
    assert search(tree, "/testbed", repository[1], patch("calc/core.py", BROKEN, MENDED)) == [place]
