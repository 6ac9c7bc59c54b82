"""The worker: every request becomes one episode, whatever the agent, the host, the disk or a person does."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hpc_swe.agents.loops.base import Chat, ContextFull
from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import AgentError, EngineError, SandboxError
from hpc_swe.base.records import EngineStages, Episode, ExitStatus, Message, Node, Task, float_array, id_array
from hpc_swe.base.store import atomic
from tests.kit.checkout import environment
from tests.kit.stage import REPLIES, V1, Doing, Rig, rig
from tests.kit.toy_engine import cut_at
from tests.kit.waiting import DEADLINE_S, until

NAME = "train-000000-00"
ASK = [Message(role="user", content="x")]


@pytest.fixture
def made(tmp_path: Path) -> Rig:
    return rig(tmp_path / "run", tmp_path / "model")


def one(tmp_path: Path, agent: object = None, sandboxes: object = None, **config: object) -> Episode:
    """The episode of one request."""
    made = rig(tmp_path / "run", tmp_path / "model", agent, sandboxes, **config)
    made.ask()
    made.drain()
    assert made.shown() == {"ready": [], "claimed": [], "dead": []}
    assert list(made.episodes) == [NAME]
    return made.episodes[NAME]


def test_an_episode_holds_every_sampled_token_and_the_work(made):
    made.ask(6)
    made.engine.faults = deque([cut_at(3), EngineError("gone"), None, None, cut_at(2)])
    made.drain()
    assert made.shown() == {"ready": [], "claimed": [], "dead": []}
    assert sorted(made.episodes) == [f"train-000000-0{index}" for index in range(6)]
    sampled = sum(len(episode.turns) for episode in made.episodes.values())
    assert sampled == 6 * len(REPLIES)
    answers = [(call.prompt, call.answer) for call in made.engine.calls if call.answer]
    stages = sum((episode.timing.stages for episode in made.episodes.values()), EngineStages())
    assert stages.prompt_tokens == sum(len(prompt) for prompt, _ in answers)
    for episode in made.episodes.values():
        assert (episode.exit_status, episode.error) == (ExitStatus.SUBMITTED, "")
        assert episode.submission.splitlines()[-2:] == ["-    return x - y", "+    return x + y"]
        assert episode.counts["chains"] == 1
        assert episode.counts["parse_errors"] == 1
        assert episode.timing.total_s >= episode.timing.engine_s
        kept: list[int] = []
        for turn in episode.turns:
            kept += id_array(turn.appended_ids).tolist()
            said, logprobs = turn.completion.tolist(), float_array(turn.logprobs)
            while said:  # one answer, or the parts of a continued one
                answer = next(
                    answer
                    for prompt, answer in answers
                    if (prompt, answer.token_ids) == (kept, said[: len(answer.token_ids)])
                    and (np.float32(answer.logprobs) == logprobs[: len(answer.logprobs)]).all()
                )
                said, logprobs = said[len(answer.token_ids) :], logprobs[len(answer.token_ids) :]
                kept += answer.token_ids
            assert {(span.oldest, span.newest) for span in turn.spans} == {(V1, V1)}


def test_a_claim_is_named_by_the_lease_while_it_is_held(tmp_path):
    seen: list[Node] = []

    def look(sandbox: Sandbox, chat: object) -> ExitStatus:
        (cell,) = (tmp_path / "run" / "nodes").glob("*.json")
        until(lambda: atomic.get(cell, Node).claims, "a beat that names the claim")
        seen.append(atomic.get(cell, Node))
        return ExitStatus.SUBMITTED

    one(tmp_path, Doing(look))
    assert (seen[0].claims, seen[0].slots, seen[0].state) == ([NAME], 4, "ready")


class Failing:
    """Sandboxes whose host is broken."""

    def __init__(self, opening: bool) -> None:
        self.opening = opening

    def check(self) -> None:
        pass

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        if self.opening:
            raise SandboxError("no room on the host")
        with Process().open(task) as sandbox:
            yield sandbox
        raise SandboxError("cannot remove it")


def raising(error: Exception) -> Doing:
    def act(sandbox: Sandbox, chat: object) -> ExitStatus:
        sandbox.write("m.py", b"half done\n")
        raise error

    return Doing(act)


def swallow(sandbox: Sandbox, chat: object) -> ExitStatus:
    """As a program that prints its model's errors and exits 0."""
    with contextlib.suppress(EngineError):
        chat(ASK)
    return ExitStatus.SUBMITTED


def test_a_sandbox_that_does_not_close_costs_nothing(tmp_path):
    episode = one(tmp_path, sandboxes=Failing(opening=False))
    assert episode.exit_status == ExitStatus.SUBMITTED
    assert "+    return x + y" in episode.submission


@pytest.mark.parametrize(
    ("error", "status", "works"),
    [
        (SandboxError("host"), ExitStatus.INFRA_ERROR, False),
        (EngineError("engine"), ExitStatus.INFRA_ERROR, False),
        (AgentError("program"), ExitStatus.AGENT_ERROR, True),
        (ContextFull("full"), ExitStatus.CONTEXT, True),
    ],
)
def test_errors_are_blamed_on_whom_they_name(tmp_path, error, status, works):
    episode = one(tmp_path, raising(error))
    assert (episode.exit_status, episode.error) == (status, str(error))
    assert bool(episode.submission) == works


def test_what_the_policy_breaks_in_its_sandbox_is_its_own(tmp_path):
    def wreck(sandbox: Sandbox, chat: object) -> ExitStatus:
        chat(ASK)
        sandbox.run("rm -rf ./* .[a-z]*; mkdir m.py; kill -9 $$", 60)
        return ExitStatus.AGENT_ERROR

    episode = one(tmp_path, Doing(wreck))
    assert episode.exit_status == ExitStatus.AGENT_ERROR
    assert "+++ /dev/null" in episode.submission, "the file is gone, and that is what is graded"


def test_an_engine_error_that_a_program_swallows_is_still_infrastructure(tmp_path):
    made = rig(tmp_path / "run", tmp_path / "model", Doing(swallow), wait_s=1.0)
    made.engine.faults = deque([EngineError("gone")] * 1000)
    made.ask()
    made.drain()
    episode = made.episodes[NAME]
    assert episode.exit_status == ExitStatus.INFRA_ERROR
    assert "gone" in episode.error
    assert episode.submission == ""


def test_a_hanging_episode_is_given_up_from_outside_once(tmp_path):
    hanging = threading.Event()

    def hang(sandbox: Sandbox, chat: object) -> ExitStatus:
        hanging.wait(DEADLINE_S)
        return ExitStatus.SUBMITTED

    made = rig(tmp_path / "run", tmp_path / "model", Doing(hang), episode_timeout_s=0.2)
    made.ask()
    with made.working(hung_s=0.2):
        until(lambda: made.episodes)
        hanging.set()
        time.sleep(0.2)
    assert "hangs" in made.episodes[NAME].error
    assert made.episodes[NAME].exit_status == ExitStatus.INFRA_ERROR
    assert made.shown()["claimed"] == []


def test_a_hanging_episode_does_not_hide_behind_a_busy_one(tmp_path):
    go, first = threading.Event(), threading.Lock()

    def act(sandbox: Sandbox, chat: Chat) -> ExitStatus:
        chat(ASK)
        while first.acquire(blocking=False) is False and not go.is_set():
            chat(ASK)
        go.wait(DEADLINE_S)
        return ExitStatus.SUBMITTED

    made = rig(tmp_path / "run", tmp_path / "model", Doing(act))
    made.ask(2)
    with made.working() as worker:
        until(lambda: sorted(worker.lease.node.steps)[:1] == [1] and max(worker.lease.node.steps) > 9)
        go.set()
        until(lambda: len(made.episodes) == 2)


def test_a_corrupt_request_is_put_aside_and_the_others_are_done(made):
    made.ask(3)
    (made.run.requests / "ready" / f"{NAME}~0").write_bytes(b"\x00half")
    made.drain()
    assert made.shown() == {"ready": [], "claimed": [], "dead": [f"{NAME}~0"]}
    assert sorted(made.episodes) == ["train-000000-01", "train-000000-02"]


def waiting(go: threading.Event) -> Doing:
    def act(sandbox: Sandbox, chat: object) -> ExitStatus:
        go.wait(DEADLINE_S)
        chat(ASK)
        return ExitStatus.SUBMITTED

    return Doing(act)


def test_drain_finishes_what_is_at_work_and_claims_no_more(tmp_path):
    go = threading.Event()
    made = rig(tmp_path / "run", tmp_path / "model", waiting(go))
    made.ask(6)
    with made.lease() as lease:
        thread = threading.Thread(target=made.worker(lease).work)
        thread.start()
        until(lambda: len(made.shown()["claimed"]) == 4)
        made.run.drain.touch()
        until(lambda: lease.node.state == "draining")
        go.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert len(made.episodes) == 4
    assert [len(names) for names in made.shown().values()] == [2, 0, 0]


@pytest.mark.parametrize("order", ["stop", "finished"])
def test_stop_gives_claims_back_and_publishes_nothing_more(tmp_path, order):
    go = threading.Event()
    made = rig(tmp_path / "run", tmp_path / "model", waiting(go))
    made.ask(6)
    before = made.shown()
    with made.working():
        until(lambda: len(made.shown()["claimed"]) == 4)
        getattr(made.run, order).touch()
        until(lambda: not made.shown()["claimed"])
        go.set()
    assert made.shown() == before, "no loss is counted"
    assert made.episodes == {}
    assert made.engine.calls == [], "a stopped episode samples no more"


@pytest.mark.parametrize("warning", [None, signal.SIGUSR2])
def test_a_process_that_must_end_gives_claims_back_a_warned_one_takes_none(tmp_path, made, warning):
    made.ask(2)
    before = made.shown()
    command = [sys.executable, "-m", "tests.kit.killed_worker", made.run.root, tmp_path / "model"]
    process = subprocess.Popen(command, env=environment())
    try:
        until(lambda: len(made.shown()["claimed"]) == 2)
        if warning:
            process.send_signal(warning)
            until(
                lambda: (
                    [atomic.get(cell, Node).state for cell in made.run.nodes.glob("rollout*")] == ["draining"]
                )
            )
            made.ask(3)  # of which two lie claimed
            time.sleep(0.5)
            assert len(made.shown()["claimed"]) == 2
            before = {**before, "ready": sorted([*before["ready"], "train-000000-02~0"])}
        process.send_signal(signal.SIGTERM)
        until(lambda: made.shown() == before)
    finally:
        process.kill()
        process.wait()


def test_a_lost_claim_is_harmless(tmp_path):
    go = threading.Event()
    made = rig(tmp_path / "run", tmp_path / "model", waiting(go))
    made.ask()
    with made.working() as worker:
        until(lambda: made.shown()["claimed"])
        made.requests.recover(lambda address: True, max_losses=10)
        go.set()
        until(lambda: made.episodes)
        until(lambda: made.shown()["ready"] == [])
        assert worker is not None
    assert list(made.episodes) == [NAME], "both attempts publish under the same name"


class Panic(BaseException):
    """As a library in Rust raises it; uncaught, it would end its thread and keep the claim for ever."""


@pytest.mark.parametrize("bug", [ZeroDivisionError, Panic])
def test_a_bug_ends_the_worker_and_gives_the_others_back(tmp_path, bug):
    first = threading.Event()

    def act(sandbox: Sandbox, chat: object) -> ExitStatus:
        if not first.is_set():
            first.set()
            until(lambda: len(made.shown()["claimed"]) == 3)
            raise bug("of ours")
        until(lambda: len(made.shown()["claimed"]) == 1, "the end of the worker")
        return ExitStatus.SUBMITTED

    made = rig(tmp_path / "run", tmp_path / "model", Doing(act))
    made.ask(3)
    with made.lease() as lease, pytest.raises(bug):
        made.worker(lease).work()
    assert len(made.shown()["ready"]) == 2
    assert len(made.shown()["claimed"]) == 1, "recovery counts its loss"


def test_what_breaks_our_code_after_the_policy_spoke_costs_one_episode(tmp_path):
    def act(sandbox: Sandbox, chat: Chat) -> ExitStatus:
        chat([Message(role="user", content="hello")])
        raise RecursionError("too deep: \ud800")

    made = rig(tmp_path / "run", tmp_path / "model", Doing(act))
    made.ask()
    with made.working() as worker:
        until(lambda: made.episodes)
        assert worker is not None
    (episode,) = made.episodes.values()
    assert episode.exit_status == ExitStatus.AGENT_ERROR
    assert len(episode.turns) == 1
    assert episode.error.startswith("the worker broke on it: RecursionError: too deep")


@pytest.fixture
def small(tmp_path: Path, tmpfs) -> Path:
    """A real file system of 256 KiB."""
    return tmpfs(tmp_path / "small", "size=256k")


def fill(path: Path) -> None:
    """Take what room there is; a lease that is replaced frees some."""
    with contextlib.suppress(OSError), path.open("ab", 0) as file:
        while True:
            file.write(b"x" * 4096)


@pytest.mark.parametrize("order", ["", "DRAIN", "STOP"])
def test_a_full_disk_costs_no_episode_and_a_worker_that_ends_no_loss(small, tmp_path, order):
    go, begun = threading.Event(), []

    def act(sandbox: Sandbox, chat: Chat) -> ExitStatus:
        begun.append(go.wait(DEADLINE_S))
        chat(ASK)
        return ExitStatus.SUBMITTED

    made = rig(small / "run", tmp_path / "model", Doing(act))
    made.ask()
    with made.lease() as lease:
        worker = made.worker(lease)
        thread = threading.Thread(target=worker.work)
        thread.start()
        until(lambda: made.shown()["claimed"])
        ballast = small / "ballast"
        fill(ballast)
        go.set()
        until(lambda: fill(ballast) or (worker._active and worker._active[0].has_result), "the result")
        assert made.episodes == {}
        if order:
            (made.run.control / order).touch()
        if order == "STOP":
            thread.join(DEADLINE_S)
            assert made.shown() == {"ready": [f"{NAME}~0"], "claimed": [], "dead": []}
            return
        until(lambda: not order or lease.node.state == "draining")
        ballast.unlink()
        until(lambda: made.episodes)
        made.run.drain.touch()
        thread.join(DEADLINE_S)
    assert begun == [True], "an episode of hours was played again"
    assert made.shown() == {"ready": [], "claimed": [], "dead": []}
