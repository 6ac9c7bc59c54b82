"""Every path has one name, and a new run is whole and private."""

import os
import stat

import pytest

from hpc_swe.base.records import WeightVersion
from hpc_swe.base.rundir import SPOOLS, RunDir
from hpc_swe.base.store.spool import STATES


@pytest.fixture
def run(tmp_path):
    before = os.umask(0o077)  # as every entry point sets it
    made = RunDir(tmp_path / "runs" / "my run")
    made.make()
    yield made
    os.umask(before)


def test_a_new_run_has_every_folder_that_a_process_writes_into(run):
    for folder in (
        run.nodes,
        run.control,
        run.endpoints.parent,
        run.batch(0).parent,
        run.weight(WeightVersion()).parent,
        run.checkpoint(0, 1).parent,
        run.incarnations,
        run.eval_table("e").parent,
        run.archive(0).parent,
        run.metric_log("w").parent,
    ):
        assert folder.is_dir(), folder
    for name in SPOOLS:
        assert sorted(path.name for path in run.spool(name).iterdir()) == sorted(STATES)


def test_a_new_run_is_its_owner_s_alone(run):
    for folder in (run.root, *(path for path in run.root.rglob("*") if path.is_dir())):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


def test_the_run_folder_itself_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    RunDir(tmp_path / "run").make()
    os.umask(before)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
