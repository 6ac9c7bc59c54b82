"""Plugins that hang, alive, when a test asks for it: in the open of a FIFO that nobody writes to."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.base.records import Batch, Task
from hpc_swe.models.engines.scripted import Scripted
from hpc_swe.models.policies.base import Kept, Learner, Objective, OptimizerConfig
from hpc_swe.models.policies.megatron import Megatron
from tests.kit.toy import Checkout


def hang(folder: str) -> None:
    """Hang if the folder has a FIFO named as this job's module; a name that ends in `always` stays there."""
    name = sys.argv[0].rpartition("/")[2].removesuffix(".py")
    if (Path(folder) / f"{name}.always").exists():
        wait_for_ever(Path(folder) / f"{name}.always")
    try:
        (Path(folder) / name).rename(taken := Path(folder) / f"{name}.taken")
    except FileNotFoundError:
        return
    wait_for_ever(taken)


def wait_for_ever(fifo: Path) -> None:
    with fifo.open("rb") as file:
        file.read()


class HangingCheckout(Checkout, frozen=True, kw_only=True):
    """Hangs in the thread of an episode or of a grading."""

    fifos: str

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        hang(self.fifos)
        with super().open(task) as sandbox:
            yield sandbox


class HangingEngine(Scripted, frozen=True, kw_only=True):
    fifos: str

    def is_healthy(self, url: str) -> bool:
        hang(self.fifos)
        return super().is_healthy(url)


class HangingMegatron(Megatron, frozen=True, kw_only=True):
    """Hangs in the main thread of a rank, at the begin of a step."""

    fifos: str

    def build(
        self,
        model: Path,
        optimizer: OptimizerConfig,
        reference: Path | None,
        tokens: int = 0,
        kept: Sequence[Kept] = (),
    ) -> Learner:
        learner = super().build(model, optimizer, reference, tokens, kept)
        train = learner.train

        def hanging(batch: Batch, objective: Objective) -> dict[str, float]:
            hang(self.fifos)
            return train(batch, objective)

        learner.train = hanging
        return learner


def make(folder: Path, *names: str) -> None:
    for name in names:
        os.mkfifo(folder / name)
