"""A run in small: a coordinator, and the other roles played by functions that do their work at once."""

import hashlib
from functools import partial

from msgspec.structs import replace

from hpc_swe.base import records
from hpc_swe.base.metrics import Log
from hpc_swe.base.records import (
    BatchManifest,
    CheckpointManifest,
    Message,
    Node,
    RolloutRequest,
    Sampling,
    Score,
    ScoredEpisode,
    ToolCall,
    WeightManifest,
    WeightVersion,
)
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders, weights
from hpc_swe.base.store.spool import Spool
from hpc_swe.base.store.task_history import RunHistory
from hpc_swe.config.settings import (
    BatchesConfig,
    CurriculumConfig,
    EvalConfig,
    GroupsConfig,
    LeaseConfig,
    RetentionConfig,
)
from hpc_swe.models.advantages.grpo import Grpo
from hpc_swe.roles.coordinator.batching import batches
from hpc_swe.roles.coordinator.batching.batches import BatchSettings
from hpc_swe.roles.coordinator.curriculum import TaskPlan, WeightedTasks
from hpc_swe.roles.coordinator.dispatch import RequestPlan
from hpc_swe.roles.coordinator.maintenance import Maintenance
from hpc_swe.roles.coordinator.modes.evaluation import Evaluator
from hpc_swe.roles.coordinator.modes.training import Training
from tests.kit.constants import varied
from tests.kit.made_episodes import episode, turn

STEPS = 3
NEVER_OLD = 99
"""Steps of the weights that sample, unless a test says how many: no batch finds them too old."""
CALL = ToolCall(name="view", arguments='{"path": "m.py"}')
TASKS = ("ant", "bee", "cat", "dog")
ALIKE = CurriculumConfig()
KEPT = varied(RetentionConfig, keep_last=2, free_space_floor_gb=0)()
LIMITS = GroupsConfig(group_size=2, groups_per_step=2, max_staleness=1)
STRAGGLER_S = 100.0
HELD_OUT = EvalConfig(samples=2, decodings={"plain": Sampling(), "cool": Sampling(temperature=0.5)})


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def rundir(root) -> RunDir:
    run = RunDir(root / "run")
    run.make()
    return run


def make_maintenance(run, clock=None, beats=4, max_losses=2, retention=None) -> Maintenance:
    kept = retention or KEPT
    return Maintenance(run, kept, varied(LeaseConfig, beats=beats)(ttl_s=beats), max_losses, clock or Clock())


def plan_tasks(requests, tasks=TASKS, curriculum=ALIKE, sources=()):
    """What `Training` plans its groups with: one taskset, unless `sources` names several."""
    return partial(TaskPlan, requests, sources or [WeightedTasks("", tuple(tasks))], curriculum)


def requests_of(group):
    """The requests of a group, consumed or not, of `training` with its defaults."""
    return plan_tasks(RequestPlan(5, LIMITS.group_size, Sampling()))(RunHistory()).requests(group)


def training(
    run, limits=LIMITS, every=0, eval_tasks=(), owner="coordinator", steps=STEPS, **planned
) -> Training:
    log = Log(run.metric_log(owner))
    evaluator = Evaluator(run, eval_tasks, HELD_OUT, 5, log, every)
    batch_settings = BatchSettings(
        limits, BatchesConfig(microbatch_tokens=64), Grpo(), 2, straggler_s=STRAGGLER_S
    )
    plan = plan_tasks(RequestPlan(5, limits.group_size, Sampling()), **planned)
    return Training(run, plan, batch_settings, steps, evaluator, log)


def reward(name: str) -> float:
    """The same for a name on every machine and day; two groups in three have signal."""
    return float(hashlib.sha256(name.encode()).digest()[0] % 3 == 0)


def result(request: RolloutRequest, value: float | None = 0.0, version=NEVER_OLD) -> ScoredEpisode:
    """What the workers make of a request; None is an infrastructure failure."""
    ids = list(hashlib.sha256(request.name.encode()).digest()[: 3 + request.index])
    sampled = replace(
        turn(None, [1, 2], ids, version),
        logprobs=records.floats([-i / 256 for i in ids]),
        sampling=request.sampling,
        routing=bytes(range(1, 2 + len(ids))) if request.index else b"",
    )
    messages = [
        Message(role="user", content="mend it"),
        Message(role="assistant", content="d\u00f6ne", tool_calls=[CALL]),
    ]
    played = replace(episode([sampled]), request=request, messages=messages, submission="diff")
    outcome = "infra_error" if value is None else "resolved" if value else "unresolved"
    return ScoredEpisode(episode=played, score=Score(outcome=outcome, reward=value))


def work(run, keep=lambda name: True, judge=reward, version=NEVER_OLD) -> list[str]:
    """All requests through rollout and reward."""
    names = []
    scored = Spool(run.scored, ScoredEpisode)
    for claim in list(Spool(run.requests, RolloutRequest).claims("rollout-1-00000000")):
        if keep(claim.name):
            scored.put(claim.name, result(claim.message, judge(claim.name), version))
            claim.finish()
            names.append(claim.name)
        else:
            claim.give_back()
    return names


def show(run, owner, beat=1, role="rollout", **shown) -> Node:
    """Write the cell of a process."""
    node = Node(owner=owner, role=role, beat=beat, host="h", pid=1, **shown)
    atomic.put(run.node(owner), node, durable=False)
    return node


def learn(run, steps=STEPS) -> None:
    """The learner trains the batch it is at, if it is there, and exports; at the end it saves."""
    newest = weights.newest(run) or WeightVersion()
    if newest.step < steps and run.batch(newest.step).exists():
        export(run, WeightVersion(incarnation=newest.incarnation, step=newest.step + 1))
        if newest.step + 1 == steps:
            save(run, steps, newest.incarnation)


def save(run, step, incarnation=0) -> None:
    manifest = CheckpointManifest(writer="l", files={}, step=step, incarnation=incarnation, tensor_parallel=1)
    folders.publish(run.checkpoint(step, incarnation), lambda _: manifest)


def export(run, version, parent=None) -> None:
    folders.publish(
        run.weight(version),
        lambda _: WeightManifest(writer="l", files={}, version=version, tensors={}, parent=parent),
    )


def finish(run, rounds=60, steps=STEPS, **options):
    """Everyone by turns until the coordinator says that all is done."""
    clock = Clock()
    maintenance, mode = make_maintenance(run, clock), training(run, steps=steps, **options)
    for _ in range(rounds):
        clock.now += 2.0
        if not mode.iterate(maintenance.snapshot()).waits_for:
            return mode
        work(run)
        learn(run, steps)
    raise AssertionError(f"not done after {rounds} rounds; batches {batches.published_steps(run)}")


def published(run) -> dict[str, object]:
    """What the learner sees of all batches, bit for bit, and the state after each."""
    seen: dict[str, object] = {}
    for step in batches.published_steps(run):
        manifest = folders.manifest(run.batch(step), BatchManifest)
        ranks = {name: folders.read(run.batch(step), name, manifest) for name in sorted(manifest.files)}
        seen[f"batch {step}"] = (manifest.groups, manifest.closed, manifest.after, manifest.stats, ranks)
    return seen
