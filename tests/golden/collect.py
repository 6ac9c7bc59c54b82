"""What must stay the same when the code is moved, renamed or merged: python -m tests.golden.collect FOLDER.

Writes one text file for each promise: records as bytes, run.json of every configuration, batch scripts and
tables of a dry run, status screens, exit codes, metric names and the losses of a fixed batch. `diff -r` of
two folders shows what a change has changed. The names in a run's folder are those of docs/protocol.md.
"""

import inspect
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec.inspect import (
    BoolType,
    BytesType,
    DictType,
    EnumType,
    Field,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    Metadata,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from tests.kit.checkout import ROOT

CONFIGURATIONS = {
    "demo": ["demo"],
    "demo_eval": ["demo", "demo_eval"],
    "demo_sft": ["demo", "demo_sft"],
    "demo_rejection": ["demo", "demo_rejection"],
    "slurm_demo": ["demo", "slurm_demo"],
    "swebench": ["swebench", "slurm"],
    "swebench_qwen_code": ["swebench", "slurm", "agents/qwen_code"],
    "swepdb_4b": ["swepdb", "slurm", "swepdb_4b"],
    "swepdb_14b_rewrite": ["swepdb", "slurm", "swepdb_14b", "swepdb_14b_rewrite"],
    "swepdb_30b": ["swepdb", "slurm", "recipes/8xh100", "models/qwen3_coder_30b_a3b"],
}


def records() -> Iterator[str]:
    """Every record, with a value in every field, as the bytes that cross processes."""
    from hpc_swe.base import records as module

    for name, kind in sorted(vars(module).items()):
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind is not module.Record:
            value = msgspec.convert(_value(type_info(kind), name), kind)
            yield f"{name} {msgspec.json.encode(value).decode()}"
            yield f"{name} {msgspec.msgpack.encode(value).hex()}"


def _value(kind: Type, name: str) -> Any:
    if isinstance(kind, Metadata):
        return _value(kind.type, name)
    if isinstance(kind, StructType):
        return {field.encode_name: _of_field(field) for field in kind.fields}
    if isinstance(kind, ListType | VarTupleType):
        return [_value(kind.item_type, name)]
    if isinstance(kind, DictType):
        return {"a": _value(kind.value_type, name)}
    if isinstance(kind, UnionType):
        return _value(next(each for each in kind.types if not isinstance(each, NoneType)), name)
    if isinstance(kind, EnumType):
        return _plain(next(iter(kind.cls)))
    if isinstance(kind, LiteralType):
        return sorted(kind.values)[0]
    values: dict[type[Type], Any] = {StrType: name, IntType: 3, FloatType: 0.5, BoolType: True}
    return values.get(type(kind), "AACAPw==" if isinstance(kind, BytesType) else {})


def _of_field(field: Field) -> Any:
    return _value(field.type, field.name)


def _plain(value: Enum) -> Any:
    return value.value


def run_json() -> Iterator[str]:
    """What each configuration says, with all defaults."""
    from hpc_swe.config import config as configuration

    def listing(config: Any) -> Iterator[tuple[str, str]]:
        table = ""
        for line in configuration.toml(configuration.dump(config)):
            table = line if line.startswith("[") else table
            key, equals, value = line.partition(" = ")
            if equals:
                yield f"{table} {key}", equals + value

    yield from _differences(listing)


def _differences(listing: Callable[[Any], Iterable[tuple[str, str]]]) -> Iterator[str]:
    """The first configuration in full, and each other one as what it changes in the nearest before it."""
    from hpc_swe.config import config as configuration

    before: dict[str, dict[str, str]] = {}
    for name, files in CONFIGURATIONS.items():
        new = dict(listing(configuration.read(*(ROOT / f"configs/{file}.toml" for file in files))))
        changes = {other: _changes(old, new) for other, old in (before or {"nothing": {}}).items()}
        nearest = min(changes, key=lambda other: len(changes[other]))
        yield from (f"{name} like {nearest}", *changes[nearest])
        before[name] = new


def _changes(old: dict[str, str], new: dict[str, str]) -> list[str]:
    gone = [f"without {key}" for key in old if key not in new]
    return gone + [f"{key}{value}".strip() for key, value in new.items() if old.get(key) != value]


def exit_codes() -> Iterator[str]:
    from hpc_swe.base import errors

    for name, kind in sorted(vars(errors).items()):
        if inspect.isclass(kind) and issubclass(kind, errors.HpcSweError):
            yield f"{name} {kind.exit_code}"


def metrics() -> Iterator[str]:
    from hpc_swe.base.metrics import METRICS

    yield from sorted(METRICS)


def losses() -> Iterator[str]:
    """Loss, gradient and what is told of fixed tokens, under each objective."""
    import torch

    from hpc_swe.models.policies.base import LossConfig
    from hpc_swe.roles.learner.loss import PolicyObjective

    torch.manual_seed(0)
    tokens = [torch.randn(64, dtype=torch.float64) for _ in range(4)]
    for objective in ("sampler_ratio", "decoupled", "sft", "gspo", "cispo"):
        for more in ({}, {"kl_coefficient": 0.1}):
            loss = PolicyObjective(LossConfig(objective=objective, **more))
            yield f"{objective} {more} {_losses(loss, tokens)}"


def _losses(objective: Any, tokens: Any) -> str:
    import torch

    from hpc_swe.models.policies.base import TrainedTokens

    policy = (-tokens[0].abs()).requires_grad_()
    loss, sums, largest = objective(
        TrainedTokens(
            logprobs=policy,
            entropy=tokens[3].abs(),
            sampler=-tokens[1].abs(),
            advantages=tokens[2],
            weights=tokens[2].abs() / 64,
            reference=-tokens[3].abs(),
            sequence=torch.arange(64) // 16,
            sequences=4,
        )
    )
    loss.backward()
    told = {f"slope {index:02d}": slope for index, slope in enumerate(policy.grad.tolist())}
    told |= objective.metrics(sums.tolist(), largest.tolist()) | {"loss": loss.item()}
    return " ".join(f"{name}={value:.9g}" for name, value in sorted(told.items()))


def batch_scripts() -> Iterator[str]:
    """What sbatch would be given, by role, in an environment that is the same everywhere."""
    from hpc_swe.base.rundir import RunDir
    from hpc_swe.launch import preview
    from hpc_swe.launch.plan import RunPlan

    def listing(config: Any) -> Iterator[tuple[str, str]]:
        for script in preview.scripts(RunPlan(RunDir(Path("/shared/run")), config)):
            title, *lines = map(_of_any_machine, script.splitlines())
            yield title, ""
            for line in lines:
                words = re.match(r"(#SBATCH --[^=]*|exec|.*)(.*)", line)
                yield f"{title.split(':')[0]} {words[1]}", words[2]

    yield from _differences(listing)


def estimates() -> Iterator[str]:
    """The tables of a dry run for a dense model and one with experts."""
    from hpc_swe.base.rundir import RunDir
    from hpc_swe.config import config as configuration
    from hpc_swe.launch import preview
    from hpc_swe.launch.plan import RunPlan
    from hpc_swe.models import shapes

    dense = shapes.SHAPES["4B"]
    experts = dense | shapes.EXPERTS | {"num_key_value_heads": 8}
    for name, shape in {"dense": dense, "experts": experts}.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape))
            files = [ROOT / f"configs/{file}.toml" for file in CONFIGURATIONS["swepdb_4b"]]
            config = configuration.read(*files, overrides=[f"model={folder}"])
            for table in preview.cost_tables(RunPlan(RunDir(Path(folder) / "run"), config)):
                yield from (f"{name} {line}" for line in _drawn(table, 100))


def status() -> Iterator[str]:
    """The screen of a run, at two widths."""
    from hpc_swe.base.records import Endpoint, RoleStatus, StatusReport, WeightVersion
    from hpc_swe.cluster.executors.base import Job
    from hpc_swe.launch.view import Queue, RunView
    from hpc_swe.view.status import render

    desired = {"coordinator": 1, "learner": 1, "inference": 4, "rollout": 16, "reward": 4}
    new, old = WeightVersion(incarnation=1, step=12), WeightVersion(incarnation=1, step=11)
    report = StatusReport(
        beat=7,
        roles=[RoleStatus(role=role, desired=n, alive=n, silent=n // 8) for role, n in desired.items()],
        spools={each: {"ready": 12, "claimed": 30, "dead": 1} for each in ("requests", "episodes", "scored")},
        oldest_s={"requests": 125.0},
        waits_for="results of train-000012-03",
        step=12,
        step_s=60.0,
        newest=new,
        recent={name: [step / 20 for step in range(20)] for name in ("reward/mean", "staleness/max")},
        errors=["train-000012-00 a0: the sandbox broke"],
    )
    jobs = [Job("rollout", f"7_{n}", 1, "running") for n in range(13)]
    jobs += [
        Job("rollout", "7_14", 1, "waiting", "Priority"),
        Job("rollout", "7_15", 1, "held", "JobHeldUser"),
    ]
    engines = [
        Endpoint(owner="e", url="http://e", versions=[*each], updating=len(each) > 1)
        for each in ((new,), (old, new))
    ]
    shared = {"name": "demo", "steps": 48, "desired": desired}
    views = {
        "training": RunView(**shared, orders=[], queue=Queue(jobs), report=report, engines=engines),
        "late": RunView(**shared, orders=["DRAIN"], queue=Queue(jobs), report=report, silent_s=4000.0),
        "new": RunView(**shared, orders=[], queue=Queue(silence="squeue did not answer")),
    }
    for name, view in views.items():
        for width in (80, 120):
            yield from (f"{name} {width} {line}" for line in _drawn(render(view, width), width))


def _drawn(part: Any, width: int) -> list[str]:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(part)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def _of_any_machine(line: str) -> str:
    for what, place in (("PYTHON", sys.executable), ("CHECKOUT", str(ROOT)), ("HOME", str(Path.home()))):
        line = line.replace(place, what)
    return line


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    part.__name__: part
    for part in (*(records, run_json, exit_codes, metrics, losses), *(batch_scripts, estimates, status))
}


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ.clear()
    os.environ["PATH"] = "/usr/bin:/bin"
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        (folder / f"{name}.txt").write_text("\n".join(part()) + "\n")


if __name__ == "__main__":
    main()
