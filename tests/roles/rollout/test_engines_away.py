"""Engines that are not there yet, or go away: what a worker leaves alone, gives back and counts."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_swe.agents.loops.base import Chat
from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.base.records import Endpoint, EndpointTable, ExitStatus, Message, Node
from hpc_swe.base.store import atomic
from tests.kit.stage import V1, Doing, Rig, rig
from tests.kit.waiting import DEADLINE_S, until

NAME = "train-000000-00"
ASK = [Message(role="user", content="x")]


@pytest.fixture
def made(tmp_path: Path) -> Rig:
    return rig(tmp_path / "run", tmp_path / "model")


def doing(made: Rig, agent: Doing) -> Rig:
    return replace(made, means=replace(made.means, agent=agent))


def list_engines(made: Rig, *owners: str) -> None:
    listed = [Endpoint(owner=owner, url=f"http://{owner}", versions=[V1], updating=False) for owner in owners]
    atomic.put(made.run.endpoints, EndpointTable(beat=2, endpoints=listed, newest=V1))


def lease_of(made: Rig) -> Node:
    (cell,) = made.run.nodes.glob("*.json")
    return atomic.get(cell, Node)


def see_beats(made: Rig, beats: int) -> None:
    """Wait for a worker's rounds: it makes two for each beat."""
    last = lease_of(made).beat + beats
    until(lambda: lease_of(made).beat >= last, "beats")


@pytest.mark.slow
@pytest.mark.parametrize("is_written", [False, True], ids=["no table", "none listed"])
def test_without_an_engine_nothing_is_claimed_and_no_attempt_is_burned(made, is_written):
    made.run.endpoints.unlink()
    if is_written:
        list_engines(made)
    made.ask(3)
    with made.working():
        until(lambda: list(made.run.nodes.glob("*.json")), "a lease")
        see_beats(made, 8)
        assert made.shown()["ready"] == [f"train-000000-0{index}~0" for index in range(3)]
        list_engines(made, "a")
        until(lambda: len(made.episodes) == 3, "the episodes")
    assert {episode.exit_status for episode in made.episodes.values()} == {ExitStatus.SUBMITTED}


@pytest.mark.slow
def test_a_request_goes_back_when_engines_vanish_before_any_sample(tmp_path):
    plays: list[str] = []

    def vanish(sandbox: Sandbox, chat: Chat) -> ExitStatus:
        if not plays:
            list_engines(made)
            time.sleep(1.1)  # the table is read once a second
        plays.append("begun")
        chat(ASK)
        return ExitStatus.SUBMITTED

    made = doing(rig(tmp_path / "run", tmp_path / "model", wait_s=0.3), Doing(vanish))
    made.ask()
    with made.working():
        until(lambda: plays, "the agent")
        until(lambda: made.shown()["ready"] == [f"{NAME}~0"], "the request to go back, without a loss")
        see_beats(made, 4)
        assert (plays, made.episodes) == (["begun"], {})
        list_engines(made, "a")
        until(lambda: made.episodes, "the episode")
    assert made.episodes[NAME].exit_status == ExitStatus.SUBMITTED


def test_engines_that_vanish_later_cost_the_attempt(tmp_path):
    """What was sampled is lost: given back without end, the longest episodes would never come."""

    def ask_twice(sandbox: Sandbox, chat: Chat) -> ExitStatus:
        chat(ASK)
        list_engines(made)
        time.sleep(1.1)
        chat(ASK)
        return ExitStatus.SUBMITTED

    made = doing(rig(tmp_path / "run", tmp_path / "model", wait_s=0.3), Doing(ask_twice))
    made.ask()
    with made.working():
        until(lambda: made.episodes, "the failure")
    assert made.episodes[NAME].exit_status == ExitStatus.INFRA_ERROR


@pytest.mark.slow
def test_the_clock_of_a_claim_stands_while_no_engine_serves(made):
    ends = threading.Event()

    def wait(sandbox: Sandbox, chat: Chat) -> ExitStatus:
        ends.wait(DEADLINE_S)
        return ExitStatus.SUBMITTED

    made = doing(made, Doing(wait))
    made.ask()
    with made.working():
        until(lambda: any(s > 0 for s in lease_of(made).worked_s), "the clock to run")
        list_engines(made)
        time.sleep(1.1)  # the table is read once a second
        see_beats(made, 8)
        stood = lease_of(made).worked_s
        see_beats(made, 8)
        assert lease_of(made).worked_s == stood
        list_engines(made, "a")
        until(lambda: lease_of(made).worked_s > stood, "the clock to run on")
        ends.set()
        until(lambda: made.episodes, "the episode")
