"""One completion over engines that are slow, hang, or die: nothing that is long is lost for it."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hpc_swe.base.errors import EngineError, NoAnswer, Overdue
from hpc_swe.base.records import Endpoint, EndpointTable, IdArray, Node, Sampling, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.models.engines.base import NEW, Completion, Prefix
from hpc_swe.models.engines.scripted import Scripted, ScriptedReply
from hpc_swe.roles.inference.supervisor import free_port
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.roles.rollout.sampler import Sampled, Sampler
from tests.kit.waiting import until

PROMPT = np.asarray([5, 6], "<i4")
V1 = WeightVersion(step=1)
WAIT_S = 0.5


def list_engines(run: RunDir, **urls: str) -> None:
    found = [Endpoint(owner=o, url=url, versions=[V1], updating=False) for o, url in urls.items()]
    for owner in urls:
        atomic.put(
            run.node(owner), Node(owner=owner, role="inference", beat=1, host="h", pid=1, versions=[V1])
        )
    atomic.put(run.endpoints, EndpointTable(beat=1, endpoints=found, newest=V1))


def let_sleep(run: RunDir, *, sleeping: bool) -> None:
    table = atomic.get(run.endpoints, EndpointTable)
    found = [msgspec.structs.replace(each, sleeping=sleeping) for each in table.endpoints]
    atomic.put(run.endpoints, msgspec.structs.replace(table, endpoints=found))


@contextmanager
def serving(folder: Path, *replies: ScriptedReply) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A server of the scripted engine: its address and process."""
    (folder / "replies.json").write_bytes(msgspec.json.encode(replies))
    engine, port = Scripted(replies=str(folder / "replies.json")), free_port("127.0.0.1")
    command = engine.command(folder, "127.0.0.1", port, "test", 2048)
    with subprocess.Popen(command, env=engine.environment("secret")) as child:
        url = f"http://127.0.0.1:{port}"
        try:
            until(lambda: engine.is_healthy(url), "the engine's health")
            yield url, child
        finally:
            child.kill()


def ask(run: RunDir, engine: object, max_tokens: int = 100, part: int = 100) -> Sampled:
    endpoints = Endpoints(run, max_lag=1, fresh_s=0.0)
    return Sampler(engine, endpoints, "secret", WAIT_S, part).sample(
        PROMPT, Sampling(max_tokens=max_tokens), ""
    )  # type: ignore[arg-type]


class Counting(Scripted, frozen=True):
    """Answers with the numbers 0, 1, 2 ..., each with a log-probability of its own, 10 in all."""

    asked: list[int] = []
    failures: list[Callable[[], None]] = []

    def generate(
        self,
        url: str,
        token: str,
        prompt: IdArray,
        sampling: Sampling,
        timeout_s: float,
        prefix: Prefix = NEW,
    ) -> Completion:
        self.asked.append(sampling.max_tokens)
        if self.failures:
            self.failures.pop(0)()
        begin = len(prompt) - len(PROMPT)
        assert prompt[len(PROMPT) :].tolist() == list(range(begin))
        ids = list(range(begin, min(begin + sampling.max_tokens, 10)))
        ends = "stop" if ids[-1] == 9 else "length"
        rows = [*prompt.tolist(), *ids][prefix.routed : -1]
        routing = np.asarray(rows, np.uint8)[:, None] if self.return_routing else None
        return Completion(ids, [-0.1 * (i + 1) for i in ids], ends, [(0, len(ids), V1)], routing)


def counting(*failures: Callable[[], None]) -> Counting:
    return Counting(replies="", asked=[], failures=[*failures])


@pytest.mark.parametrize("routed", [0, 1])
@pytest.mark.parametrize("size", [1, 3, 10])
def test_parts_make_the_routing_of_each_token_once(run, size, routed):
    list_engines(run, a="http://a")
    engine = msgspec.structs.replace(counting(), return_routing=True)
    sampler = Sampler(engine, Endpoints(run, max_lag=1, fresh_s=0.0), "secret", WAIT_S, size)
    found = sampler.sample(PROMPT, Sampling(max_tokens=100), "", Prefix(routed))
    assert list(found.routing) == [*PROMPT.tolist(), *range(9)][routed:], "the last token was never computed"


def test_experts_come_over_the_wire_as_vllm_sends_them(run, tmp_path):
    reply = ScriptedReply(token_ids=[9, 3, 12], logprobs=[-1.0] * 3)
    with serving(tmp_path, reply) as (url, _):
        list_engines(run, a=url)
        engine = Scripted(replies="", return_routing=True)
        found = ask(run, engine, part=100)
    ids = [*PROMPT.tolist(), 9, 3]
    assert list(found.routing) == [expert for i in ids for expert in (i % 8, i // 2 % 8)]


def fail(error: EngineError, after_s: float = 0.0) -> Callable[[], None]:
    def act() -> None:
        time.sleep(after_s)
        raise error

    return act


@pytest.mark.parametrize("size", [1, 3, 5, 10, 11])
def test_parts_make_the_same_completion(run, size):
    list_engines(run, a="http://a")
    engine = counting()
    found = ask(run, engine, part=size)
    assert found.token_ids == list(range(10))
    assert found.logprobs == [-0.1 * (i + 1) for i in range(10)]
    assert [(span.start, span.end) for span in found.spans][-1][1] == 10
    assert (found.finish_reason, found.continued) == ("stop", 0)
    assert engine.asked == [size] * -(-10 // size)


def test_the_last_part_is_no_longer_than_what_was_asked_for(run):
    list_engines(run, a="http://a")
    engine = counting()
    found = ask(run, engine, max_tokens=7, part=4)
    assert (found.token_ids, found.finish_reason) == (list(range(7)), "length")
    assert engine.asked == [4, 3]


def test_an_engine_that_dies_costs_one_part(run):
    list_engines(run, a="http://a", b="http://b")
    engine = counting(lambda: None, fail(NoAnswer("killed")))
    assert ask(run, engine, part=4).token_ids == list(range(10))
    assert engine.asked == [4, 4, 4, 4]


def test_time_that_an_engine_worked_is_no_wait_for_an_engine(run):
    list_engines(run, a="http://a", b="http://b")
    assert ask(run, counting(fail(NoAnswer("killed"), 2 * WAIT_S))).finish_reason == "stop"


def test_a_request_that_an_engine_lost_fails_alone(run):
    list_engines(run, a="http://a")
    endpoints = Endpoints(run, max_lag=1, fresh_s=0.0)
    asking = Sampler(counting(fail(Overdue("lost"), WAIT_S)), endpoints, "secret", WAIT_S)
    with pytest.raises(Overdue):
        asking.sample(PROMPT, Sampling(max_tokens=2), "")
    with endpoints.take("a", 0.0) as endpoint:
        assert endpoint.owner == "a"


def test_time_in_which_the_learner_has_the_gpus_is_no_wait_for_an_engine(run):
    list_engines(run, a="http://a")
    endpoints = Endpoints(run, max_lag=1, fresh_s=0.0)

    def sleep() -> None:
        let_sleep(run, sleeping=True)
        until(lambda: not endpoints.has_engine(), "the engine to be asleep")
        time.sleep(2 * WAIT_S)
        threading.Timer(2 * WAIT_S, let_sleep, [run], {"sleeping": False}).start()
        raise Overdue("asked before it slept")

    asking = Sampler(counting(sleep), endpoints, "secret", WAIT_S)
    found = asking.sample(PROMPT, Sampling(max_tokens=10), "")
    assert (found.finish_reason, found.continued) == ("stop", 1)


@pytest.mark.slow
def test_a_stopped_engine_is_left_for_another(run, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (
        serving(tmp_path / "one", ScriptedReply(token_ids=[1], logprobs=[-0.5])) as (stopped, process),
        serving(tmp_path / "two", ScriptedReply(token_ids=[2], logprobs=[-0.5])) as (working, _),
    ):
        list_engines(run, a=stopped, b=working)
        asking = Sampler(Scripted(replies=""), Endpoints(run, max_lag=1, fresh_s=0.0), "secret", 5.0)
        assert asking.sample(PROMPT, Sampling(max_tokens=1), "a").token_ids == [1]
        os.kill(process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: stat.read_text().rpartition(") ")[2][0] == "T", "the engine to stop")
        assert asking.sample(PROMPT, Sampling(max_tokens=1), "a").token_ids == [2]


def test_a_new_episode_reads_which_weights_it_is_for(run):
    endpoints, other = Endpoints(run, 0, fresh_s=1000.0), Endpoints(run, 1, fresh_s=1000.0)
    list_engines(run, a="http://a")
    with endpoints.take("", WAIT_S), other.take("", WAIT_S):
        pass
    table = atomic.get(run.endpoints, EndpointTable)
    atomic.put(run.endpoints, msgspec.structs.replace(table, newest=WeightVersion(step=2)))
    with endpoints.take("a", WAIT_S), other.take("", WAIT_S):  # an episode under way; one that may be stale
        pass
    with pytest.raises(EngineError, match="within 0 steps of"), endpoints.take("", 0.0):
        pass
