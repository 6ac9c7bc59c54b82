"""Leave the GPUs to the engines of the same node until the learner needs them again."""

import logging
import time
from collections.abc import Callable

from hpc_swe.base.records import BatchManifest
from hpc_swe.cluster.gpu_turns import LearnerTurn
from hpc_swe.models.policies.base import Learner
from hpc_swe.roles.learner.batch_source import Order
from hpc_swe.roles.learner.collective import on_all_ranks

log = logging.getLogger(__name__)


def rest(
    learner: Learner, turn: LearnerTurn, wait: Callable[[], BatchManifest | Order]
) -> tuple[BatchManifest | Order, dict[str, float]]:
    """Free the GPUs, give the turn, `wait`, and take the turn again; return what came, and metrics.

    After STOP nothing more is computed, so the GPUs stay with the engines. Raise DeadlineError if an engine
    keeps the GPUs, and NodeError if memory is short, both on all ranks.
    """
    times = [time.monotonic()]
    left = on_all_ranks(learner.ranks, learner.release_memory)
    turn.give()
    times.append(time.monotonic())
    decision = wait()
    if decision is Order.STOP:
        return decision, {}
    times.append(time.monotonic())
    on_all_ranks(learner.ranks, turn.take)
    times.append(time.monotonic())
    found = on_all_ranks(learner.ranks, learner.restore_memory)
    times.append(time.monotonic())
    parts = ("offload", "engines", "sleep", "load")
    seconds = [end - begin for begin, end in zip(times, times[1:], strict=False)]
    metrics = {f"turn/{part}_s": value for part, value in zip(parts, seconds, strict=True)}
    sizes = {"turn/left_by_learner_gib": left, "turn/left_by_engines_gib": found}
    metrics |= {name: size for name, size in sizes.items() if size is not None}
    log.info("rested: %s", ", ".join(f"{name} {value:.2f}" for name, value in metrics.items()))
    gathered = learner.ranks.gather(metrics)
    return decision, {name: max(each.get(name, 0.0) for each in gathered) for name in metrics}
