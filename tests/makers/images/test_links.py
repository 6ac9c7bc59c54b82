"""Images that share files by links are made and removed only while no test runs in one of them."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import DeadlineError
from hpc_swe.makers import history
from hpc_swe.makers.images import links
from hpc_swe.makers.images.repository import stage
from hpc_swe.makers.images.sources import Built
from hpc_swe.makers.images.store import ImageStore
from hpc_swe.makers.mine_history import Sifting, run
from hpc_swe.makers.mining import ImageBuilder, Trial
from tests.kit.histories import make
from tests.kit.waiting import DEADLINE_S


@dataclass
class Watching:
    """A grader that looks at a file of its task's image before and after the tests."""

    images: Path
    changed: list[str] = field(default_factory=list)

    def outcomes(self, task, patch, sandboxes):
        file = self.images / task.image / "usr/shared"
        before = file.stat()
        time.sleep(0.2)
        if file.stat().st_ctime_ns != before.st_ctime_ns:
            self.changed.append(task.task_id)
        return {"test": "passed"}, ""


class Failing:
    """A grader whose tests never run."""

    def outcomes(self, task, patch, sandboxes):
        return {}, "it does not start"


@dataclass
class Whole:
    """A source that makes each image of files of its own."""

    repository: Path

    def origin(self, task):
        return "whole"

    digest = origin

    def lay_out(self, task, exact, work):
        stage(self.repository, task.base_commit, work / "tree" / task.workdir.lstrip("/"))
        return []


@pytest.fixture
def candidates(tmp_path, monkeypatch):
    make(tmp_path / "calc", tmp_path / "looks")
    found, _ = Sifting(tmp_path / "calc", history.TESTS, {}).sift(history.commits(tmp_path / "calc"), 3)
    apptainer = tmp_path / "bin/apptainer"  # it makes images of no bytes
    apptainer.parent.mkdir()
    apptainer.write_text('#!/bin/sh\nwhile [ -n "$2" ]; do made=$1; shift; done; touch "$made"\n')
    apptainer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{apptainer.parent}:{os.environ['PATH']}")
    return found


@pytest.mark.slow
def test_no_file_of_an_image_changes_while_its_tests_run(tmp_path, candidates):
    """A grader would blame the host for it."""
    images, base, needs = tmp_path / "images", tmp_path / "base", tmp_path / "requirements"
    needs.touch()
    (base / "usr/bin").mkdir(parents=True)
    source = Built(images, base, tmp_path / "calc", needs)
    shared = images / f".environment-{source.digest(None)}/usr/shared"
    shared.parent.mkdir(parents=True)
    shared.touch()
    grader = Watching(images)
    trial = Trial("calc", "pytest", 60.0, 3, grader, Process(), ImageBuilder(ImageStore(images), source))
    verdicts = [one.verdict for one in run(trial, candidates, tmp_path / "trials", jobs=2)]
    assert verdicts == ["nothing_fails"] * len(candidates)
    assert grader.changed == []


def test_an_image_without_links_is_made_and_removed_while_tests_run(tmp_path, candidates):
    store = ImageStore(tmp_path / "images")
    with ThreadPoolExecutor(1) as pool, links.kept(), store.locked():
        made = ImageBuilder(store, Whole(tmp_path / "calc"))
        trial = Trial("calc", "pytest", 60.0, 1, Failing(), Process(), made)
        verdict = pool.submit(trial.run, candidates[0]).result(DEADLINE_S).verdict
    assert verdict == "does_not_run"
    assert [path.name for path in store.images.iterdir()] == [".builder"]


def test_a_run_of_tests_that_never_ends_is_named_after_a_deadline():
    with (
        links.kept(),
        pytest.raises(DeadlineError, match="1 runs of tests have not ended"),
        links.changing(0.1),
    ):
        pass
    with links.changing():
        pass
