"""One rank of a learner on a run folder: python -m tests.kit.ranks.learn RUN MODEL STEPS COPIES [KEYS].

KEYS are those of the optimizer, in JSON. With DIES_AT in its environment it is killed when it opens a file
for writing whose path matches that pattern, and with STOPS_AT it is stopped there; with DIES_AFTER it is
killed when it opens any file once that path exists. With SNAPSHOTS one of so many versions is a full
snapshot. HOSTED is the share of the optimizer's state that is in host memory. SIGNS are keys of [stop].
BETA1 is that of the optimizer.
"""

import json
import os
import signal
import sys
import threading
import traceback
from fnmatch import fnmatch
from pathlib import Path


def interfere() -> None:
    """Let this rank die or stop instead of opening a file, when the environment says so."""
    places = {signal.SIGKILL: os.environ.get("DIES_AT", ""), signal.SIGSTOP: os.environ.get("STOPS_AT", "")}
    there = Path(os.environ.get("DIES_AFTER", "/never"))

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event != "open":
            return
        if int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR):
            for number, place in places.items():
                if fnmatch(str(arguments[0]), place):
                    os.kill(os.getpid(), number)
        if there.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def device() -> str:
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def main() -> None:
    from hpc_swe.base.errors import HpcSweError
    from hpc_swe.base.rundir import RunDir
    from hpc_swe.config.settings import StopConfig
    from hpc_swe.models.policies.base import LossConfig, OptimizerConfig
    from hpc_swe.models.policies.megatron import Megatron
    from hpc_swe.roles.learner.batch_source import BatchSource
    from hpc_swe.roles.learner.loop import LearnerPlan, learn
    from hpc_swe.roles.learner.loss import PolicyObjective
    from hpc_swe.roles.learner.publish import Snapshots

    run, model, steps, data_parallel = RunDir(Path(sys.argv[1])), Path(sys.argv[2]), *map(int, sys.argv[3:5])
    if {"DIES_AT", "STOPS_AT", "DIES_AFTER"} & set(os.environ):
        interfere()
    interrupted = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: interrupted.set())
    OptimizerConfig.beta1 = float(os.environ.get("BETA1", OptimizerConfig.beta1))
    policy = Megatron(
        tensor_parallel=2 // data_parallel,
        dtype="float32",
        offload_optimizer=float(os.environ.get("HOSTED", "0")),
        device=device(),
    )
    learner = policy.build(
        model, OptimizerConfig(**{"warmup_steps": 0} | json.loads([*sys.argv, '{"lr": 1e-3}'][5])), None
    )

    def tell(taken: int, step: int, metrics: dict[str, float]) -> None:
        if learner.ranks.rank == 0:
            with (run.root / "told.jsonl").open("a") as file:
                print(json.dumps({"step": taken, "of": step} | metrics), file=file)

    plan = LearnerPlan(
        steps,
        1,
        checkpoint_every=2,
        checkpoint_s=0,
        max_skipped=1,
        writer="learner-test",
        snapshots=Snapshots(int(os.environ.get("SNAPSHOTS", "1")), last=steps),
        stop=StopConfig(**json.loads(os.environ.get("SIGNS", "{}"))),
    )
    feed, objective = BatchSource(run, 600.0, 0.05, interrupted.is_set), PolicyObjective(LossConfig())
    try:
        learn(run, learner, objective, plan, feed, tell)
    except HpcSweError as error:
        traceback.print_exc()
        learner.close()
        sys.exit(error.exit_code)
    learner.close()


if __name__ == "__main__":
    main()
