"""A run on the test cluster as an ordinary user has it, what a watcher sees of it, and its books at the end.

All is real but the engine, which plays written replies. Ticks are called as cron would call them.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from hpc_swe.base.records import BatchManifest, MetricLine, Node
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders
from hpc_swe.models.engines.scripted import ScriptedReply
from tests.kit.checkout import ROOT
from tests.kit.cluster.cluster import Cluster
from tests.kit.cluster.configuration import USERS
from tests.kit.cluster.hosts import PATIENCE_S

SETTINGS = {"SelectTypeParameters": "CR_CPU_Memory,CR_LLN"}  # spreads the workers over the nodes
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)}
COUNTS = {"coordinator": 1, "learner": 1, "inference": 2, "rollout": 4, "reward": 2}
GROUP = 4
TICK_S = 5.0
STILL_S = 4.0
"""A process whose cell has not changed for so long does not count as living; it beats each second."""
SAID = [
    '<tool_call>\n{"name": "view", "arguments": {"path": "mod.py"}}\n</tool_call>',
    '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "replace", "arguments": '
    '{"path": "mod.py", "line": 3, "old": "<", "new": ">"}}\n</tool_call>',
]
OVERLAY = """
steps = 100000
counts = { inference = 2, rollout = 4, reward = 2 }
poll_s = 0.4
lease = { ttl_s = 6.0 }
rollout.slots = 4 # so that the episodes of two steps keep all workers busy
eval.every = 0

[tasks]
train = 512
eval = 8

[groups]
group_size = 4
groups_per_step = 2
resample = false

[batches]
overlong = "train"

[agent]
max_turns = 3

[engine]
type = "tests.kit.by_heart:ByHeart"
replies = "@replies@"

[learner]
checkpoint_every = 5
optimizer = { decay_share = 0, lr = 1e-6 } # another end is set to a run that exists

[executor]
type = "slurm"
partition = "cpu"
notice_s = 20

[executor.roles.learner]
partition = "preemptible"
nodes = 2
options = { constraint = "gpu" }
mem_gb = 2.5
cpus_per_task = 1
timeout_min = 30
"""
TABLE = """
[executor.roles.{role}]
partition = "{partition}"
cpus_per_task = 1
mem_gb = 1
timeout_min = {minutes}
options = {{ constraint = "cpu" }}
"""


class Job(NamedTuple):
    """A job of the run as the controller knows it; elements of an array are jobs of their own."""

    name: str
    """What scancel takes."""
    id: str
    role: str
    state: str
    node: str
    restarts: int


class Books(NamedTuple):
    """What the run folder says of some steps."""

    episodes: int
    lost: int
    """Members of consumed groups of which there is no result."""
    twice: int
    """Results or groups that were consumed more than once."""


@dataclass
class Sight:
    """A process's cell, and when it changed last."""

    node: Node
    at: float


@dataclass
class Run:
    """One run, from outside."""

    cluster: Cluster
    dir: RunDir
    counts: Mapping[str, int]
    manifests: dict[int, BatchManifest] = field(default_factory=dict)
    """All that were ever seen; retention takes the folders."""
    sights: dict[str, Sight] = field(default_factory=dict)
    _ticked: float = 0.0
    _closed: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return str(json.loads(self.dir.manifest.read_text())["run_id"])

    @property
    def model(self) -> Path:
        return self.cluster.shared / "model"

    @property
    def overlay(self) -> Path:
        return self.cluster.shared / "overlay.toml"

    # what it is told

    def start(self, *words: str) -> None:
        """Also goes on with it."""
        files = ("configs/demo.toml", str(self.overlay))
        self.launch("start", *files, f"model={self.model}", *words, "--run", str(self.dir.root))

    def launch(self, verb: str, *words: str, check: bool = True, **env: str) -> int:
        command = [sys.executable, "-m", "hpc_swe.launch", verb, *words]
        environment = {**ENVIRONMENT, **env}
        return self.cluster.run(*command, cwd=ROOT, env=environment, check=check).returncode

    def tick(self) -> None:
        self.launch("tick", str(self.dir.root), check=False)
        self._ticked = time.monotonic()

    # what is seen

    def jobs(self, role: str = "") -> list[Job]:
        form = "%i|%A|%T|%N|%j"
        listing = self.cluster.run("squeue", "-h", "-a", "-r", "-o", form, user="root").stdout
        restarts = {job.id: job.restarts for job in self.cluster.jobs()}
        found = []
        for line in listing.splitlines():
            name, number, state, node, title = line.split("|", 4)
            owner, _, run = title.partition(":")
            if run == self.name and role in ("", owner):
                found.append(Job(name, number, owner, state, node, restarts.get(name, 0)))
        return found

    def keep_looking(self) -> None:
        """In a thread, since cluster's commands take longer than retention."""
        while not self._closed.wait(0.25):
            self._look()

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        now = time.monotonic()
        for name in atomic.names(self.dir.batches):
            step = int(name.removeprefix("step_"))
            if step not in self.manifests:
                self._keep(step)
        for name in atomic.names(self.dir.nodes):
            self._see(name, now)

    def _keep(self, step: int) -> None:
        try:
            self.manifests[step] = folders.manifest(self.dir.batch(step), BatchManifest)
        except FileNotFoundError:
            return  # retention has just taken it; the archive has its episodes

    def _see(self, name: str, now: float) -> None:
        try:
            node = msgspec.json.decode((self.dir.nodes / name).read_bytes(), type=Node)
        except (FileNotFoundError, msgspec.DecodeError):
            return  # its process has just ended, or its node
        if node.owner not in self.sights or self.sights[node.owner].node.beat != node.beat:
            self.sights[node.owner] = Sight(node, now)

    def alive(self, role: str) -> list[Node]:
        """Processes that beat and are at work."""
        now = time.monotonic()
        return [
            s.node
            for s in list(self.sights.values())
            if s.node.role == role
            and now - s.at < STILL_S
            and s.node.state in ("ready", "updating")
            and self.dir.node(s.node.owner).exists()
        ]

    @property
    def steps(self) -> list[tuple[float, int]]:
        """When each optimizer step ended, and which; a step may be there more than once."""
        found = []
        for path in self.dir.metrics.glob("learner-*.jsonl"):
            for text in path.read_bytes().rpartition(b"\n")[0].splitlines():
                line = msgspec.json.decode(text, type=MetricLine)
                found.append((line.time, line.step))
        return sorted(found)

    @property
    def newest(self) -> int:
        return max((step for _, step in self.steps), default=-1)

    def is_whole(self, *roles: str) -> bool:
        """Whether all jobs of these roles run and beat; the queue is asked only when they beat."""
        if any(len(self.alive(role)) < self.counts[role] for role in roles):
            return False
        running = Counter(job.role for job in self.jobs() if job.state == "RUNNING")
        return all(running[role] >= self.counts[role] for role in roles)

    def is_all_whole(self) -> bool:
        return self.is_whole(*self.counts)

    def submissions(self, role: str = "") -> set[str]:
        """All that were taken."""
        taken = [self.dir.launches / each for each in ([role] if role else self.counts)]
        return {f"{f.name}/{name}" for f in taken for name in atomic.names(f) if name.isdecimal()}

    @property
    def repeated(self) -> int:
        """Optimizer steps that were taken once more, so far."""
        steps = [step for _, step in self.steps]
        return len(steps) - len(set(steps))

    # waiting

    def until(
        self, what: str, predicate: Callable[[], Any], *, ticks: bool = True, most_s: float = 2 * PATIENCE_S
    ) -> Any:
        """The first true value of the predicate; meanwhile it is cron does its work."""
        deadline = time.monotonic() + most_s
        while True:
            if value := predicate():
                return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {most_s:g} s in vain for {what}\n{self.state()}")
            if ticks and time.monotonic() - self._ticked > TICK_S:
                self.tick()
            time.sleep(0.5)

    def state(self) -> str:
        """For people, when something did not come to pass."""
        alive = {role: [node.owner for node in self.alive(role)] for role in self.counts}
        lines = [f"alive: {alive}", f"newest step {self.newest}"]
        fields = "JobArrayID:8,Name:40,State:12,RestartCnt:12,NodeList:10,Reason:40"
        for command in ("squeue", "-a", "-r", "-O", fields), ("sinfo", "-a", "-N", "-o", "%N %T %E"):
            lines.append(self.cluster.run(*command, user="root", check=False).stdout)
        if self.dir.status.exists():
            lines.append(self.dir.status.read_text()[:2000])
        return "\n".join(lines)

    # the books

    def books(self, first: int, last: int) -> Books:
        """Of batches `first` up to `last`."""
        groups: Counter[int] = Counter()
        names: Counter[tuple[int, int]] = Counter()
        for step in range(first, last):
            manifest = self.manifests[step]
            groups.update([*manifest.groups, *manifest.closed])
            table = pq.read_table(self.dir.archive(step), columns=["group_id", "index", "reward"]).to_pylist()
            names.update((row["group_id"], row["index"]) for row in table if row["reward"] is not None)
        twice = sum(count - 1 for count in (*groups.values(), *names.values()))
        return Books(len(names), GROUP * len(groups) - len(names), twice)

    def require_nothing_left(self) -> None:
        """No job, and no process on any host."""

        def left() -> list[str]:
            hosts = [None, *self.cluster.layout.nodes]
            found = [process for host in hosts for process in self.cluster.processes(host)]
            return [" ".join(process.arguments) for process in found if process.uid == USERS["alice"]]

        self.until("the end of all jobs", lambda: not self.jobs(), ticks=False)
        self.cluster.wait_for("the end of all processes", lambda: not left())


@contextmanager
def running(reward_min: int = 30) -> Iterator[Run]:
    """As a user starts it, on a cluster of its own; all jobs are at work."""
    with Cluster.start(settings=SETTINGS) as cluster:
        run = Run(cluster, RunDir(cluster.shared / "run"), COUNTS)
        make = (sys.executable, "-m", "hpc_swe.demo.model", "--out", run.model)
        cluster.run(*make, cwd=ROOT, env=ENVIRONMENT)
        replies = cluster.shared / "replies.json"
        replies.write_bytes(msgspec.json.encode(written_replies(run.model)))
        run.overlay.write_text(configuration(str(replies), reward_min))
        run.start()
        watcher = threading.Thread(target=run.keep_looking, daemon=True)
        watcher.start()
        try:
            run.until("all jobs at work", run.is_all_whole)
            yield run
        finally:
            run.close()
            watcher.join(30)


def configuration(replies: str, reward_min: int) -> str:
    tables = [
        TABLE.format(
            role=role,
            partition="preemptcancel" if role == "rollout" else "cpu",
            minutes=reward_min if role == "reward" else 30,
        )
        for role in ("coordinator", "inference", "rollout", "reward")
    ]
    return OVERLAY.replace("@replies@", replies) + "".join(tables)


def written_replies(model: Path, delay_s: float = 0.5) -> Sequence[ScriptedReply]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids for text in SAID]
    return [ScriptedReply(token_ids=ids, logprobs=[-1.0] * len(ids), delay_s=delay_s) for ids in texts]
