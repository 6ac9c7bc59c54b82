"""A machine that cannot open sandboxes says so in one line, with the remedy."""

import os

import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import FAILURES_BEFORE_CHECK, WatchedSandboxes
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError, NodeError, SandboxError
from hpc_swe.cluster.processes import descendants
from tests.kit.constants import varied


def test_no_apptainer(tmp_path):
    with pytest.raises(ConfigError, match="no apptainer-9 on PATH: install Apptainer"):
        varied(Apptainer, executable="apptainer-9")(images=str(tmp_path)).check()


def test_no_image(tmp_path):
    with pytest.raises(ConfigError, match=r"no \.sif file in .*build_image\.sh"):
        varied(Apptainer, executable="true")(images=str(tmp_path)).check()


def test_an_image_that_a_task_names_is_missing(tmp_path, task):
    with (
        pytest.raises(ConfigError, match=r"no python-pytest\.sif in"),
        Apptainer(images=str(tmp_path)).open(task),
    ):
        pass


def test_an_apptainer_that_fails_tells_why(tmp_path, task):
    (tmp_path / "python-pytest.sif").write_text("no image")
    broken = varied(Apptainer, executable="false")(images=str(tmp_path))
    with pytest.raises(ConfigError, match=r"python-pytest\.sif cannot be run here"):
        broken.check()
    with pytest.raises(SandboxError, match="did not start"), broken.open(task):
        pass


@pytest.mark.parametrize(("place", "mode"), [("file", 0o664), ("file", 0o646), ("folder", 0o777)])
def test_an_image_that_others_may_write_is_refused(tmp_path, place, mode):
    images = tmp_path / "images"
    images.mkdir(mode=0o755)
    file = images / "x.sif"
    file.write_text("no image")
    file.chmod(0o755)
    assert Apptainer(images=str(images)).image("x") == file
    (file if place == "file" else images).chmod(mode)
    with pytest.raises(ConfigError, match=r"others may write .*: run chmod go-w"):
        Apptainer(images=str(images)).image("x")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_an_image_of_another_user_is_refused(tmp_path):
    file = tmp_path / "x.sif"
    file.write_text("no image")
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345; copy it"):
        Apptainer(images=str(tmp_path)).image("x")


def test_a_container_killed_at_the_check_does_not_blame_the_configuration(tmp_path, apptainer):
    """The first start dies; the second is Apptainer's own."""
    dies_once = tmp_path / "apptainer"
    mark = tmp_path / "died"
    dies_once.write_text(
        f'#!/bin/sh\n[ -e {mark} ] || {{ touch {mark}; kill -9 $$; }}\nexec apptainer "$@"\n'
    )
    dies_once.chmod(0o755)
    varied(Apptainer, executable=str(dies_once))(images=apptainer.images).check()
    assert mark.exists()


@pytest.mark.slow
def test_a_good_machine_passes_and_keeps_nothing_running(apptainer):
    before = set(descendants(os.getpid()))
    apptainer.check()
    assert set(descendants(os.getpid())) <= before, "the trial container still runs"


@pytest.mark.slow
def test_a_warm_up_that_fails_is_told(apptainer, task):
    broken = varied(Apptainer, warm_up="import nothing_like_this")(images=apptainer.images)
    with pytest.raises(SandboxError, match="No module named 'nothing_like_this'"), broken.open(task):
        pass


def test_a_node_that_opens_none_ends_its_worker_before_it_has_failed_many(tmp_path, task):
    (tmp_path / "python-pytest.sif").write_text("no image")
    broken = varied(Apptainer, executable="false")(images=str(tmp_path))
    sick = WatchedSandboxes(broken)
    for _ in range(FAILURES_BEFORE_CHECK - 1):
        with pytest.raises(SandboxError), sick.open(task):
            pass
    with pytest.raises(NodeError, match="8 sandboxes in a row could not be opened on"), sick.open(task):
        pass


def test_a_broken_image_of_one_task_does_not_make_the_node_sick(tmp_path, task):
    class Mostly(Process):
        def open(self, task):
            raise SandboxError("this image is broken")

    well = WatchedSandboxes(Mostly())
    for _ in range(3 * FAILURES_BEFORE_CHECK):
        with pytest.raises(SandboxError), well.open(task):
            pass


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to somebody else")
def test_an_unpacked_image_of_somebody_else_is_passed_over(tmp_path):
    (tmp_path / "i").mkdir()
    (tmp_path / "i.sif").touch()
    sandboxes = Apptainer(images=str(tmp_path))
    assert sandboxes.image("i") == tmp_path / "i"
    os.chown(tmp_path / "i", 2001, 2001)
    assert sandboxes.image("i") == tmp_path / "i.sif"
