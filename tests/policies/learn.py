"""One rank of a learner on a run folder: python learn.py RUN MODEL STEPS DATA_PARALLEL."""

import json
import signal
import sys
import threading
from pathlib import Path


def main() -> None:
    from hpc_swe.plugins.policies.base import LossConfig, OptimizerConfig
    from hpc_swe.plugins.policies.megatron import Megatron
    from hpc_swe.roles.learner.feed import Feed
    from hpc_swe.roles.learner.loop import Plan, learn
    from hpc_swe.roles.learner.loss import PolicyObjective
    from hpc_swe.rundir import RunDir

    run, model, steps, data_parallel = RunDir(Path(sys.argv[1])), Path(sys.argv[2]), *map(int, sys.argv[3:5])
    interrupted = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: interrupted.set())
    policy = Megatron(tensor_parallel=2 // data_parallel, dtype="float32")
    learner = policy.build(model, OptimizerConfig(lr=1e-3), None)

    def tell(step: int, metrics: dict[str, float]) -> None:
        if learner.ranks.rank == 0:
            with (run.root / "told.jsonl").open("a") as file:
                print(json.dumps({"step": step} | metrics), file=file)

    plan = Plan(steps, export_every=1, checkpoint_every=2, writer="learner-test")
    feed = Feed(run, wait_s=60.0, poll_s=0.05, interrupted=interrupted.is_set)
    learn(run, learner, PolicyObjective(LossConfig()), plan, feed, tell)
    learner.close()


if __name__ == "__main__":
    main()
