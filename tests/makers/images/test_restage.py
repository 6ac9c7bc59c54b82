"""An image of somebody else's gets our repository: no future, and what its maker made stays."""

import shutil

import pytest

from hpc_swe.base.errors import HpcSweError
from hpc_swe.makers.images.repository import foreign_objects, restage, unchanged
from tests.kit.toy import BROKEN, FILES, MENDED, git


@pytest.fixture
def testbed(repository, tmp_path):
    """As official images have it: everything fetched, a commit of the maker's upon the base."""
    folder = tmp_path / "testbed"
    shutil.copytree(repository[0], folder, symlinks=True)
    git(folder, "reset", "-q", "--hard", repository[1])
    (folder / "tests/__init__.py").write_text("# set up\n")
    git(folder, "commit", "-qam", "Set up")
    (folder / "build").mkdir()
    (folder / "build/core.so").write_bytes(b"\x7fELF")
    (folder / "calc.egg-info").write_text("Name: calc")
    return folder


@pytest.mark.slow
def test_what_the_maker_made_stays_and_the_future_goes(repository, testbed, tmp_path):
    source, base = repository
    assert restage(testbed, base, tmp_path, exact={"calc/core.py"}) == ["tests/__init__.py"]
    assert git(testbed, "rev-parse", "HEAD~") == base
    assert git(testbed, "log", "--all", "--reflog", "--format=%an", "-1") == "images"
    assert git(testbed, "status", "--porcelain") == "?? calc.egg-info"
    assert (testbed / "build/core.so").exists(), "ignored, and needed all the same"
    assert git(testbed, "diff", "--name-only", base) == "tests/__init__.py"
    assert git(testbed, "tag") == git(testbed, "remote") == git(testbed, "reflog") == ""
    assert git(testbed, "cat-file", "-t", base) == "commit"
    for younger in ("main", "v2", "later"):
        assert git(source, "rev-parse", younger) not in git(
            testbed, "cat-file", "--batch-all-objects", "--batch-check"
        )
    assert foreign_objects(testbed, git(testbed, "rev-parse", "HEAD")) == []
    assert unchanged(testbed, base) == {*FILES, "link"} - {"tests/__init__.py"}


@pytest.mark.slow
def test_two_images_of_one_task_have_one_commit(repository, testbed, tmp_path):
    shutil.copytree(testbed, tmp_path / "again", symlinks=True)
    for folder in (testbed, tmp_path / "again"):
        restage(folder, repository[1], tmp_path, exact=())
    assert git(testbed, "rev-parse", "HEAD") == git(tmp_path / "again", "rev-parse", "HEAD")


@pytest.mark.slow
def test_files_of_the_reference_become_the_base_s_and_so_do_rights(repository, testbed, tmp_path):
    (testbed / "calc/core.py").write_text(MENDED)
    (testbed / "README.md").chmod(0o777)
    (testbed / "latin.txt").unlink()
    changed = restage(testbed, repository[1], tmp_path, exact={"calc/core.py", "calc/absent.py"})
    assert changed == ["latin.txt", "tests/__init__.py"]
    assert (testbed / "calc/core.py").read_text() == BROKEN
    assert (testbed / "README.md").stat().st_mode & 0o111 == 0
    assert not (testbed / "latin.txt").exists()


def test_a_submodule_s_files_stay_without_its_history(tmp_path):
    folder = tmp_path / "testbed"
    (folder / "sub").mkdir(parents=True)
    git(folder, "init", "-q")
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    git(folder, "commit", "-qm", "base")
    base = git(folder, "rev-parse", "HEAD")
    (folder / ".git/modules/sub").mkdir(parents=True)
    (folder / "sub/.git").write_text("gitdir: ../.git/modules/sub\n")
    (folder / "sub/code.py").write_text("")
    assert restage(folder, base, tmp_path, exact=()) == []
    assert [path.name for path in (folder / "sub").iterdir()] == ["code.py"]
    assert git(folder, "status", "--porcelain") == ""


@pytest.mark.slow
def test_an_image_that_is_said_to_be_of_an_older_commit_gets_the_base(repository, testbed, tmp_path):
    base = repository[1]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/old.py").write_text("")
    git(testbed, "checkout", "-q", f"{base}~")
    (testbed / "gone").mkdir()
    (testbed / "gone/old.py").write_text("")
    (testbed / "gone.py").write_text("")
    git(testbed, "add", "gone", "gone.py")
    git(testbed, "commit", "-qm", "files that the base has no more")
    shutil.rmtree(testbed / "gone")
    (testbed / "gone").symlink_to(tmp_path / "mine")
    assert restage(testbed, base, tmp_path, exact=None) == []
    assert git(testbed, "rev-parse", "HEAD") == base
    assert git(testbed, "status", "--porcelain") == "?? calc.egg-info\n?? gone"
    assert (testbed / "build/core.so").exists()
    assert (tmp_path / "mine/old.py").exists()


def test_an_image_of_another_commit_is_refused(repository, testbed, tmp_path):
    for number in range(60):
        (testbed / f"calc/more_{number}.py").write_text(f"# {number}\n")
    git(testbed, "add", "calc")
    git(testbed, "commit", "-qm", "many")
    other = git(testbed, "rev-parse", "HEAD")
    git(testbed, "checkout", "-q", repository[1])
    with pytest.raises(HpcSweError, match="it is of another commit"):
        restage(testbed, other, tmp_path, exact=())


def test_an_image_without_the_base_commit_is_refused(testbed, tmp_path):
    with pytest.raises(HpcSweError, match="0123456789"):
        restage(testbed, "0123456789" * 4, tmp_path, exact=())
