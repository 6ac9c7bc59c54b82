"""A learner of two real ranks on a run folder: what it trains, how it ends, and what it has published."""

import json
import signal
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from hpc_swe.base.records import Batch, BatchManifest, CoordinatorState, MicroBatch, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import folders
from tests.kit.ranks import launcher

STEPS = 4


def make_run(root: Path, sequences: list[MicroBatch], steps: int, ranks: int = 1) -> RunDir:
    run = RunDir(root)
    run.make()
    for step in range(steps):
        publish(run, step, sequences, ranks)
    return run


def publish(run: RunDir, step: int, sequences: list[MicroBatch], ranks: int = 1) -> None:
    turned = sequences[step % 4 :] + sequences[: step % 4]

    def fill(stage: Path) -> BatchManifest:
        files = {}
        for rank in range(ranks):
            batch, name = Batch(step=step, rank=rank, microbatches=turned[rank::ranks]), run.rank_file(rank)
            files[name] = folders.write(stage, name, msgspec.msgpack.encode(batch))
        after = CoordinatorState()
        return BatchManifest(writer="c", files=files, step=step, groups=[], closed=[], after=after, stats={})

    folders.publish(run.batch(step), fill)


def start(run: RunDir, model: Path, steps: int = STEPS) -> list[launcher.Rank]:
    return launcher.start(2, "learn", str(run.root), str(model), str(steps), "1")


def reported(run: RunDir) -> list[dict]:
    path = run.root / "told.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def end(children: list[launcher.Rank], number: signal.Signals) -> list[tuple[int, str]]:
    for child in children:
        child.send_signal(number)
    outputs = [child.communicate(timeout=600)[0] for child in children]
    return [(child.returncode, output) for child, output in zip(children, outputs, strict=True)]


def weights(run: RunDir, step: int, incarnation: int) -> dict[str, torch.Tensor]:
    folder = run.weight(WeightVersion(step=step, incarnation=incarnation))
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
