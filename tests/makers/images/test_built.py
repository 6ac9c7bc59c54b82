"""An image holds the base commit and nothing younger, and opens as a sandbox under the task's name."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.errors import ConfigError, DeadlineError
from hpc_swe.makers.images.commands import remove
from hpc_swe.makers.images.repository import foreign_objects, stage
from hpc_swe.makers.images.sources import Built
from hpc_swe.makers.images.store import ImageStore, Problem
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.patch import take
from tests.kit.crash import FORK, in_child
from tests.kit.images import UNPACKED, require_apptainer
from tests.kit.toy import git, gold, task


def test_nothing_younger_than_the_base_commit_can_be_read(repository, tmp_path):
    source, base = repository
    folder = tmp_path / "testbed"
    stage(source, base, folder)
    assert git(folder, "rev-parse", "HEAD") == base
    assert git(folder, "status", "--porcelain") == ""
    assert git(folder, "log", "--all", "--format=%s") == "base"
    assert git(folder, "reflog") == git(folder, "tag") == git(folder, "remote") == ""
    assert "the future" not in git(folder, "log", "--all", "--reflog", "--format=%s")
    for younger in ("main", "v2"):
        commit = git(source, "rev-parse", younger)
        looked = subprocess.run(["git", "cat-file", "-e", commit], cwd=folder, capture_output=True)
        assert looked.returncode != 0
    assert foreign_objects(folder, base) == []


@pytest.mark.parametrize(
    "leak",
    [
        ["tag", "v3"],
        ["branch", "other"],
        ["remote", "add", "origin", "https://example.invalid"],
        ["hash-object", "-w", "extra"],
        ["pack-refs", "--all"],
        ["-c", "core.logAllRefUpdates=true", "commit", "-qm", "x", "--allow-empty"],
    ],
)
def test_whatever_could_tell_of_the_future_is_found(repository, tmp_path, leak):
    source, base = repository
    folder = tmp_path / "testbed"
    stage(source, base, folder)
    (folder / "extra").write_text("extra")
    git(folder, *leak)
    assert foreign_objects(folder, base) != []


def test_a_base_that_is_no_unpacked_image_is_refused(repository, tmp_path):
    (tmp_path / "requirements").write_text("")
    recipe = Built(tmp_path / "images", tmp_path, repository[0], tmp_path / "requirements")
    with pytest.raises(ConfigError, match="is not an unpacked image"):
        ImageStore(recipe.images).build(recipe, Problem(task(tmp_path, "unittest", repository[1]), gold()))


def lay_out_as_an_ordinary_user(recipe, task, sender):
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        recipe.lay_out(task, (), recipe.images)
    except ConfigError as error:
        sender.send(str(error))


@pytest.mark.parametrize("name", ["etc/shadow", "etc"])
def test_a_base_that_its_user_cannot_read_is_refused_with_the_remedy(repository, tmp_path, name):
    """Images of some distributions have files of mode 0, which root alone reads."""
    folder = Path(tempfile.mkdtemp(prefix="hpc_swe-base-"))  # others cannot enter tmp_path
    try:
        base, images = folder / "base", folder / "images"
        (base / "usr/bin").mkdir(parents=True)
        (base / "etc").mkdir()
        (base / "etc/shadow").touch()
        (folder / "requirements").touch()
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        (base / name).chmod(0)
        images.mkdir()
        images.chmod(0o777)
        recipe = Built(images, base, repository[0], folder / "requirements")
        receiver, sender = FORK.Pipe(duplex=False)
        assert in_child(lay_out_as_an_ordinary_user, recipe, task(tmp_path, "unittest", "0"), sender) == 0
        assert receiver.poll(5)
        expected = f"--base {base}: permission to read {base}/{name} is denied: run chmod -R u+rX {base}"
        assert receiver.recv().startswith(expected)
    finally:
        remove(folder)


def test_two_builders_of_one_folder_do_not_meet_and_a_dead_one_is_swept(tmp_path):
    left = tmp_path / ".work.dead" / "tree"
    left.mkdir(parents=True)
    left.chmod(0)
    with ImageStore(tmp_path).locked():
        assert list(tmp_path.glob(".work.*")) == []
        mine = tmp_path / ".work.mine"
        mine.mkdir()
        with pytest.raises(DeadlineError, match="another builder"), ImageStore(tmp_path, wait_s=0.3).locked():
            pass
        assert mine.exists()
    with ImageStore(tmp_path, wait_s=0.3).locked():
        assert not mine.exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["folder", "sif"])
def test_a_built_image_opens_grades_and_gives_submissions(repository, tmp_path, form):
    require_apptainer(UNPACKED)
    source, base = repository
    (tmp_path / "requirements").write_text("")
    recipe = Built(tmp_path / "images", UNPACKED, source, tmp_path / "requirements")
    toy = task(tmp_path, "unittest", base)
    shelf = ImageStore(recipe.images)
    with shelf.locked():
        assert shelf.build(recipe, Problem(toy, gold())) is True
        assert shelf.build(recipe, Problem(toy, gold())) is False, "what is there is not built again"
    if form == "sif":
        shutil.rmtree(recipe.images / toy.image)
    sandboxes = Apptainer(images=str(recipe.images))
    sandboxes.check()
    with sandboxes.open(toy) as sandbox:
        done = sandbox.run(
            "git log --format=%s; . /opt/miniconda3/bin/activate; conda activate testbed; which python", 60
        )
        assert done.output == "base\n/opt/miniconda3/envs/testbed/bin/python\n"
        sandbox.run("rm -rf .git; sed -i 's/a - b/a + b/' calc/core.py; ln -s / root; chmod +x README.md", 60)
        text = take(toy, sandbox, sandboxes)
    assert [line for line in text.splitlines() if line.startswith("diff")] == [
        f"diff --git a/{path} b/{path}" for path in ("README.md", "calc/core.py", "root")
    ]
    for patch, outcome in ((gold(), "resolved"), (text, "resolved"), ("", "unresolved")):
        score = Swebench().examine(toy, patch, sandboxes)
        assert score.outcome == outcome, score
