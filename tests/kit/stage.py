"""A run folder with one task, and workers on a toy engine and unisolated sandboxes."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.agents.loops.base import Agent, Chat, Result
from hpc_swe.agents.loops.tool_agent import ToolAgent
from hpc_swe.agents.sandboxes.base import Sandbox, Sandboxes
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.records import (
    Endpoint,
    EndpointTable,
    Episode,
    ExitStatus,
    Message,
    RolloutRequest,
    Sampling,
    Task,
    WeightVersion,
)
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.base.store.lease import Lease
from hpc_swe.base.store.spool import Spool
from hpc_swe.config.settings import RolloutConfig
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.roles.rollout.episode import RolloutResources
from hpc_swe.roles.rollout.sampler import Sampler
from hpc_swe.roles.rollout.worker import worker
from hpc_swe.roles.worker import Worker
from tests.kit.scripted import SMALL
from tests.kit.toy_engine import ToyEngine
from tests.kit.toy_model import HERMES, make_model
from tests.kit.waiting import DEADLINE_S, until

V1 = WeightVersion(step=1)
TASK = msgspec.structs.replace(SMALL, files={"m.py": "def f(x, y):\n    return x - y\n"})


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


REPLIES = [
    "Look.\n" + call("view", '{"path": "m.py"}'),
    call("view", '{"path": "<|im_end|>"}') + "\n" + call("nothing", "{}"),
    "<tool_call>oops</tool_call>",
    call("replace", '{"path": "m.py", "line": 2, "old": "-", "new": "+"}'),
    call("submit", "{}"),
]


class Doing(Agent):
    """An agent made of one function."""

    budget_s = math.inf

    def __init__(self, act: Callable[[Sandbox, Chat], ExitStatus]) -> None:
        self._act = act

    def solve(self, task: Task, sandbox: Sandbox, chat: Chat) -> Result:
        return Result(self._act(sandbox, chat), [Message(role="user", content=task.prompt)], tools_s=0.5)


@dataclass
class Rig:
    run: RunDir
    engine: ToyEngine
    means: RolloutResources

    @property
    def requests(self) -> Spool[RolloutRequest]:
        return Spool(self.run.requests, RolloutRequest)

    @property
    def episodes(self) -> dict[str, Episode]:
        spool = Spool(self.run.episodes, Episode)
        found = {address.identity: spool.read(address) for address in spool.addresses("ready")}
        return {name: episode for name, episode in found.items() if episode is not None}

    def ask(self, count: int = 1, task_id: str = "t") -> None:
        for index in range(count):
            request = RolloutRequest(
                group_id=0, index=index, task_id=task_id, seed=index, sampling=Sampling(max_tokens=200)
            )
            self.requests.put(request.name, request)

    def shown(self) -> dict[str, list[str]]:
        return {
            state: sorted(atomic.names(self.run.requests / state)) for state in ("ready", "claimed", "dead")
        }

    def worker(self, lease: Lease, hung_s: float = 60.0) -> Worker[RolloutRequest, Episode]:
        return worker(self.run, lease, self.means, 0.1, hung_s)

    def lease(self) -> Lease:
        return Lease(self.run, "rollout", "test", 0.2)

    def drain(self) -> None:
        """Let a worker do what is there, then end."""
        with self.lease() as lease:
            worker = self.worker(lease)
            self.finish(worker)

    def finish(self, worker: Worker[RolloutRequest, Episode]) -> None:
        def order() -> None:
            try:
                until(lambda: not any(self.shown()[s] for s in ("ready", "claimed")), "the work")
            finally:
                self.run.drain.touch()

        thread = threading.Thread(target=order)
        thread.start()
        try:
            worker.work()
        finally:
            thread.join()

    @contextmanager
    def working(self, hung_s: float = 60.0) -> Iterator[Worker[RolloutRequest, Episode]]:
        """A worker in a thread, told to stop at the end."""
        with self.lease() as lease:
            worker = self.worker(lease, hung_s)
            thread = threading.Thread(target=worker.work)
            thread.start()
            try:
                yield worker
            finally:
                self.run.stop.touch()
                thread.join(DEADLINE_S)
                assert not thread.is_alive()


def rig(
    root: Path,
    model: Path,
    agent: Agent | None = None,
    sandboxes: Sandboxes | None = None,
    replies: list[str] = REPLIES,
    wait_s: float = 60.0,
    **config: object,
) -> Rig:
    """Who is to see engines fail names a shorter `wait_s`: an engine that failed once rests for a second."""
    run = RunDir(root)
    run.make()
    endpoint = Endpoint(owner="a", url="http://a", versions=[V1], updating=False)
    atomic.put(run.endpoints, EndpointTable(beat=1, endpoints=[endpoint], newest=V1))
    builder = TokenBuilder(make_model(model, HERMES))
    engine = ToyEngine(builder, replies, version=V1)
    means = RolloutResources(
        tasks={"t": TASK},
        sandboxes=sandboxes or Process(),
        agent=agent or ToolAgent(),
        builder=builder,
        sampler=Sampler(engine, Endpoints(run, 0), "secret", wait_s),
        config=RolloutConfig(slots=4, **config),
    )
    return Rig(run, engine, means)
