"""Run one side of the benchmark of versions: python -m hpc_swe.view.benchmarks.hop learner|engine PLAN.

The learner's side moves each value by the learning rate in a random direction, and publishes as a run's
learner does. The engine's side is a run's inference supervisor.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from hpc_swe.base import loader
from hpc_swe.base.errors import ConfigError, DeadlineError
from hpc_swe.base.records import Node, Record, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.base.store.lease import Lease
from hpc_swe.config.settings import InferenceConfig, LeaseConfig
from hpc_swe.models.engines.base import Weights
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies.base import SteppedPolicy, SteppingLearner
from hpc_swe.roles.inference.supervisor import Supervisor
from hpc_swe.roles.learner.collective import on_rank_zero
from hpc_swe.roles.learner.probe import probe_ids
from hpc_swe.roles.learner.publish import Publisher, Snapshots, take_incarnation
from hpc_swe.view.benchmarks import gap, stages
from hpc_swe.view.benchmarks.limits import Rates, measure_limits

POLL_S = 0.005
WRITTEN = 1 << 28
"""Bytes written to measure the disk."""
FIRST = WeightVersion(incarnation=1)


class Alternating:
    """Be an engine that discards cached keys and values at versions of odd steps, and else keeps them."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._table, self._engine = table, loader.load("engines", table)

    def reload(self, url: str, token: str, weights: Weights) -> None:
        engine = loader.load("engines", self._table | {"kv_on_update": kv_of(weights.version)})
        engine.reload(url, token, weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def kv_of(version: WeightVersion) -> str:
    """Return what happens to cached keys and values when a version is loaded."""
    return "recompute" if version.step % 2 else "keep"


class HopPlan(Record, frozen=True, kw_only=True):
    """A plan says what both sides do."""

    run: str
    model: str
    """Folder with a config.json."""
    policy: dict[str, Any]
    """The table [policy]."""
    engine: dict[str, Any]
    """The table [engine]."""
    ranks: int = 1
    """Processes of the learner, one a GPU."""
    deltas: int
    """Versions after the first, before one that is full again."""
    lr: float
    settle_s: float
    """Seconds between a swap and the next step."""
    timeout_s: float
    answers: int = 0
    """Answers of the last version whose log-probabilities are compared with the learner's."""
    reloads: int = 0
    """How often vLLM itself loads the last version at the end; the last time is shown."""


class Published(Record, frozen=True, kw_only=True):
    """Hold the times at which a version was made, in seconds since the epoch."""

    version: WeightVersion
    trained: float
    """When its optimizer step ended."""
    published: float


class HopFigures(Record, frozen=True, kw_only=True):
    """Hold the figures of the learner's side, which writes them last."""

    rates: Rates
    disk_bytes: float
    """Bytes a second that one thread writes into the run's folder."""
    versions: list[Published]
    gaps: dict[str, gap.Gap] = {}


def serving(run: RunDir) -> Node | None:
    """Return the cell of the engine's supervisor, if it serves."""
    for name in atomic.names(run.nodes):
        if name.startswith("inference"):
            node = atomic.get(run.nodes / name, Node)
            return node if node.state == "ready" and node.url else None
    return None


def await_version(run: RunDir, version: WeightVersion, timeout_s: float) -> Node:
    """Wait until the engine serves a version; raise DeadlineError."""
    deadline = time.monotonic() + timeout_s
    while (node := serving(run)) is None or node.versions != [version]:
        if time.monotonic() > deadline or run.stop.exists():
            raise DeadlineError(f"the engine does not serve {version.name} after {timeout_s:g} s: {node}")
        time.sleep(POLL_S)
    return node


def learn(plan: HopPlan, out: Path) -> None:
    """Publish the first version, then a delta after each step, and a full version after the last step."""
    import torch

    from hpc_swe.view.benchmarks.random_weights import RandomWeights

    run, is_first = RunDir(Path(plan.run)), os.environ["RANK"] == "0"
    limits = (measure_limits(), _disk_rate(run.root)) if is_first else None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # 8B needs nearly all of a GPU
    policy, model = loader.load("policies", plan.policy), Path(plan.model)
    if not isinstance(policy, SteppedPolicy):
        raise ConfigError(f"[policy] type = {plan.policy['type']!r} has no steps for this benchmark")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random = RandomWeights(ModelShape.read(model), getattr(torch, plan.policy["dtype"]), device)
    learner = policy.build_stepped(model, plan.lr, random)
    last = plan.deltas + 1
    incarnation = on_rank_zero(learner.ranks, lambda: take_incarnation(run))
    snapshots, probe = Snapshots(last + 1, last=last), probe_ids(model, learner.vocabulary)
    publisher = Publisher(run, learner, incarnation, "benchmark", snapshots, probe)
    versions = _publish(run, plan, learner, publisher)
    gaps: dict[str, gap.Gap] = {}
    if plan.answers:
        url = await_version(run, versions[-1].version, plan.timeout_s).url
        engine = loader.load("engines", plan.engine)
        gaps = gap.compare(learner, engine, url, run.token.read_text(), plan.answers)
    if limits is not None:
        figures = HopFigures(rates=limits[0], disk_bytes=limits[1], versions=versions, gaps=gaps)
        atomic.write(out, msgspec.json.encode(figures))
    learner.close()


def _publish(
    run: RunDir, plan: HopPlan, learner: SteppingLearner, publisher: Publisher[SteppingLearner]
) -> list[Published]:
    publisher.publish_weights()
    versions = []
    for step in range(1, plan.deltas + 2):
        await_version(run, msgspec.structs.replace(FIRST, step=step - 1), plan.timeout_s)
        time.sleep(plan.settle_s)
        learner.ranks.gather(None)
        learner.take_step()
        trained = time.time()
        publisher.publish_weights()
        version = msgspec.structs.replace(FIRST, step=step)
        versions.append(Published(version=version, trained=trained, published=time.time()))
    await_version(run, versions[-1].version, plan.timeout_s)
    return versions


def serve(plan: HopPlan) -> None:
    """Supervise one engine that starts with the first version."""
    run, leases = RunDir(Path(plan.run)), LeaseConfig(beat_s=1.0)
    with Lease(run, "inference", "benchmark", leases.beat_s) as lease:
        Supervisor(
            run=run,
            lease=lease,
            engine=Alternating(plan.engine),
            config=InferenceConfig(poll_s=0.02, max_restarts=0, start_timeout_s=plan.timeout_s),
            leases=leases,
            model=run.weight(FIRST),
            host="127.0.0.1",
        ).serve()


def _disk_rate(folder: Path) -> float:
    data, path = bytes(WRITTEN), folder / "written"
    began = time.perf_counter()
    path.write_bytes(data)
    seconds = time.perf_counter() - began
    path.unlink()
    return len(data) / seconds


def main() -> None:
    """Run the side that the first argument names."""
    plan = msgspec.convert(json.loads(Path(sys.argv[2]).read_text()), HopPlan)
    if os.environ.get("RANK", "0") == "0":
        stages.note(Path(sys.argv[2]).with_name(f"{sys.argv[1]}.moments"))
    learn(plan, Path(sys.argv[3])) if sys.argv[1] == "learner" else serve(plan)


if __name__ == "__main__":
    main()
