"""Turns on the GPUs of one node, between processes that may die."""

import signal
import subprocess
import sys
import threading

import pytest

from hpc_swe.base.errors import DeadlineError
from hpc_swe.cluster.gpu_turns import EngineTurn, LearnerTurn
from hpc_swe.cluster.processes import descendants
from tests.kit.waiting import DEADLINE_S, until

ENGINE = """
import subprocess, sys, time
from pathlib import Path
from hpc_swe.cluster.gpu_turns import EngineTurn
turn = EngineTurn(Path(sys.argv[1]), 1)
print(turn.take(), flush=True)
subprocess.Popen(["cat"], pass_fds=turn.files)  # a guard that waits for the end of its standard input
time.sleep(600)
"""


def test_a_learner_waits_until_every_engine_has_given_its_turn(tmp_path):
    engines = [EngineTurn(tmp_path, 2, number) for number in range(2)]
    learners = [LearnerTurn(tmp_path, rank, DEADLINE_S) for rank in range(2)]
    assert [engine.take() for engine in engines] == [True, True]
    assert not engines[0].is_requested()
    taken = [threading.Thread(target=learner.take) for learner in learners]
    for thread in taken:
        thread.start()
    until(engines[1].is_requested, "the learner to ask")
    engines[0].give()
    assert not engines[0].take()
    assert all(thread.is_alive() for thread in taken)
    engines[1].give()
    for thread in taken:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in taken)
    learners[0].give()
    assert not engines[0].take(), "the other rank still uses its GPU"
    learners[1].give()
    assert engines[0].take()


def test_an_engine_that_keeps_its_turn_is_named_at_the_deadline(tmp_path):
    engine = EngineTurn(tmp_path, 1)
    assert engine.take()
    with pytest.raises(DeadlineError, match=r"an engine of this node has kept the GPUs for 0 s"):
        LearnerTurn(tmp_path, 0, wait_s=0.2).take()


def test_a_dead_supervisor_s_turn_is_free_once_its_guard_has_ended_too(tmp_path):
    words = [sys.executable, "-c", ENGINE, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout.readline() == "True\n"
        until(lambda: descendants(engine.pid), "the guard")
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        assert not LearnerTurn(tmp_path, 0, DEADLINE_S).take(lambda: True), "it waits, and can be interrupted"
        successor = EngineTurn(tmp_path, 1)
        assert not successor.take(), "the GPUs are not free yet"
        engine.stdin.close()
        until(successor.take, "the turn of the next engine")
        successor.give()
    assert LearnerTurn(tmp_path, 0, DEADLINE_S).take()
