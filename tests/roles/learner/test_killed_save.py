"""A rank is killed or stopped while a checkpoint is written: the other one ends or waits; none is torn."""

import os
import re
import signal
import sys

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from hpc_swe.base.store import atomic  # noqa: E402
from jobs.run import ProcessGroup, supervise  # noqa: E402
from tests.kit.checkout import environment  # noqa: E402
from tests.kit.ranks import launcher  # noqa: E402
from tests.kit.ranks.training import STEPS, assert_same, make_run, reported, start, weights  # noqa: E402
from tests.kit.waiting import until  # noqa: E402

FIRST, LAST = "step_000002-i01", "step_000004-i01"
OF_RANK_1, LAST_FILE = "__1_3.distcp", ".MANIFEST*"


@pytest.mark.parametrize("file", [OF_RANK_1, "__0_5.distcp", ".metadata*", "metadata.json", LAST_FILE])
def test_a_rank_killed_in_a_save_ends_the_other_and_what_was_whole_stays(
    whole, model, sequences, tmp_path, monkeypatch, file
):
    run = make_run(tmp_path / "run", sequences, STEPS)
    monkeypatch.setenv("DIES_AT", str(run.checkpoints / f".tmp-{LAST}*" / file))
    children = start(run, model)
    outputs = [child.communicate(timeout=600)[0] for child in children]
    assert sorted(child.returncode for child in children) == [-signal.SIGKILL, 1], outputs
    lost = re.compile("Connection (closed|reset) by peer|Broken pipe")
    assert any(map(lost.search, outputs)), outputs
    assert os.listdir(run.checkpoints) == [FIRST], "the other rank has removed what was torn"
    if file not in (OF_RANK_1, LAST_FILE):  # a start finds the same as after these two
        return
    monkeypatch.delenv("DIES_AT")
    launcher.launch(2, "learn", str(run.root), str(model), str(STEPS), "1")
    assert [line["step"] for line in reported(run)] == [0, 1, 2, 3, 4, 2, 3, 4]
    assert atomic.names(run.checkpoints) == [FIRST, "step_000004-i02"]
    assert_same(weights(run, STEPS, 2), weights(whole, STEPS, 1))


@pytest.mark.parametrize("file", [OF_RANK_1, ".metadata*"])
def test_a_save_waits_for_a_rank_that_is_stopped_for_a_while(
    whole, model, sequences, tmp_path, monkeypatch, file
):
    run = make_run(tmp_path / "run", sequences, STEPS)
    monkeypatch.setenv("STOPS_AT", str(run.checkpoints / f".tmp-{FIRST}*" / file))
    children = start(run, model)
    until(lambda: any(child.is_stopped() for child in children), "a stop")
    assert atomic.names(run.checkpoints) == []
    for child in children:
        child.send_signal(signal.SIGCONT)
    outputs = [child.communicate(timeout=600)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert atomic.names(run.checkpoints) == [FIRST, LAST]
    assert_same(weights(run, STEPS, 1), weights(whole, STEPS, 1))


def test_a_watchdog_starts_all_again_when_a_rank_stays_stopped_in_a_save(
    whole, model, sequences, tmp_path, monkeypatch
):
    run = make_run(tmp_path / "run", sequences, STEPS)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STOPS_AT", str(run.checkpoints / f".tmp-{LAST}*" / "__1_3*"))
    words = [sys.executable, "-m", "tests.kit.ranks.learn", str(run.root), str(model), str(STEPS), "1"]
    assert supervise(ProcessGroup([words, words]), run, max_restarts=1) == 0
    assert [line["step"] for line in reported(run)] == [0, 1, 2, 3, 4, 2, 3, 4]
    assert atomic.names(run.checkpoints) == [FIRST, "step_000004-i02"]
    assert_same(weights(run, STEPS, 2), weights(whole, STEPS, 1))
