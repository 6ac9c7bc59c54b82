"""Measure steps of the learner: python -m hpc_swe.benchmarks.learner --shape 4B --lengths 16384.

It starts its ranks on this node itself, one a GPU, with random weights of the shape. The table has the tokens
a second, the utilization by the formula of `hpc_swe.view.benchmarks.flops`, the seconds by part and the peak
memory.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from hpc_swe.base import cli, loader, tables
from hpc_swe.base.errors import ConfigError
from hpc_swe.cluster import gpus
from hpc_swe.config import config
from hpc_swe.models import shapes
from hpc_swe.models.costs import GIB
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies.base import Policy
from hpc_swe.view.benchmarks import flops
from hpc_swe.view.benchmarks.ranks import run_ranks
from hpc_swe.view.benchmarks.records import PARTS, Measured, Plan
from hpc_swe.view.benchmarks.workload import Workload, parse_lengths

LEVELS = ("none", "elementwise", "products", "full")
HOSTED = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def read_policy(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the table [policy] with the device of this machine, changed by `policy.key=value` words.

    Raise ConfigError for a word that sets another table, and for wrong keys and values.
    """
    table: dict[str, Any] = {"type": "megatron", "dtype": "bfloat16"}
    table["device"] = "gpu" if gpus.usable(os.environ) else "cpu"
    for word in overrides:
        _, tree = config.parse_override(word)
        if tree.keys() != {"policy"} or not isinstance(tree["policy"], dict):
            raise ConfigError(f"{word!r}: a benchmark takes keys of [policy] only, as policy.recompute=full")
        table |= tree["policy"]
    loader.load("policies", table)
    return table


def require_ranks(table: dict[str, Any], ranks: int, model: Path) -> None:
    """Raise ConfigError where so many ranks cannot train the model by the table [policy]."""
    settings: Policy = loader.load("policies", table)
    if ranks % settings.processes:
        raise ConfigError(f"--ranks {ranks} is no multiple of the {settings.processes} of [policy]")
    settings.check_model(model, ranks // settings.processes)


def figures(plan: Plan, ranks: int, found: Measured) -> dict[str, str]:
    """Return what was measured: name -> cell."""
    work, shape = plan.workload, ModelShape.read(Path(plan.model))
    steps = range(plan.warm, plan.warm + plan.steps)
    packs = [pack for step in steps for pack in work.packs_of(step)]
    is_lora = bool(plan.policy.get("lora_rank"))
    needed = sum(flops.step_flops(shape, *pack, only_adapters=is_lora) for pack in packs) / len(steps)
    rate = needed / found.step_s / ranks
    peak = flops.datasheet_rate(found.device)
    estimate = _estimate(plan, {"recompute": found.recompute} if found.recompute else {}, found.data_ranks)
    others_s = max(0.0, found.step_s - sum(found.seconds.values()))
    cells = {
        "attention": found.attention,
        "recompute": found.recompute,
        "tokens/s": f"{work.packs * sum(work.lengths) / found.step_s:,.0f}",
        "MFU %": f"{100 * rate / peak:.1f}" if peak else "-",
        "of one large product %": f"{100 * rate / found.product_flops:.1f}",
        "step ms": f"{1e3 * found.step_s:,.0f}",
        **{f"{part} ms": f"{1e3 * found.seconds[part]:,.0f}" for part in PARTS},
        "other ms": f"{1e3 * others_s:,.0f}",
        "peak GiB": f"{found.peak_bytes / GIB:.1f}" if found.peak_bytes else "-",
        "estimate GiB": f"{estimate / GIB:.1f}",
        "loss": f"{found.loss:.5f}",
        "grad norm": f"{found.grad_norm:.4g}",
    }
    return cells | ({"expert load": f"{found.expert_load:.2f}"} if found.expert_load > 1 else {})


def estimates(plan: Plan, ranks: int) -> Table:
    """Return the estimated peaks of each GPU by what backward recomputes and by the share in host memory."""
    table = tables.table(("peak GiB",), tuple(f"offload {share:g}" for share in HOSTED))
    copies = ranks // loader.load("policies", plan.policy).processes
    for level in LEVELS:
        changes = ({"recompute": level, "offload_optimizer": share} for share in HOSTED)
        table.add_row(level, *(f"{_estimate(plan, each, copies) / GIB:.1f}" for each in changes))
    return table


def _estimate(plan: Plan, chosen: dict[str, Any], copies: int) -> float:
    policy: Policy = loader.load("policies", plan.policy | chosen)
    estimate = policy.memory(Path(plan.model), copies, sum(plan.workload.lengths))
    return estimate.total.bytes if estimate and estimate.total else 0.0


def describe(plan: Plan, ranks: int, lengths: str) -> str:
    """Return what is trained, as one line."""
    work, tokens = plan.workload, sum(plan.workload.lengths)
    device = "GPU" if plan.policy["device"] == "gpu" else "CPU"
    trained = sum(trained for _, trained in work.packs_of(0))
    varied = ", drawn anew around these" if work.vary else ""
    return (
        f"{ranks} x {device}; packs of a step: {work.packs}, of {tokens:,} tokens; lengths {lengths}"
        f"{varied}, {100 * trained / work.packs / tokens:.1f} % in the loss"
    )


def _arguments() -> argparse.Namespace:
    examples = (
        "--shape tiny --lengths 64x2,32 --profile",
        "--shape 4B --lengths 16384 --mask-share 0.5 policy.recompute=elementwise",
        "--shape 30B-A3B --lengths 65536 --ranks 4 policy.expert_parallel=4 --estimate",
    )
    what = "Measure steps of the learner with random weights."
    parser = cli.parser("hpc_swe.benchmarks.learner", what, *examples)
    parser.add_argument("overrides", nargs="*", metavar="policy.KEY=VALUE", help="key of [policy]")
    known, count, share = ", ".join(shapes.SHAPES), cli.number(int, 1), cli.number(float, 0.001, 1)
    parser.add_argument("--shape", default="tiny", help=f"sizes of the model: {known}; or a model's folder")
    parser.add_argument(
        "--lengths", default="64x2,32", help="lengths of the sequences of a pack, as in 8192x2,1024x8"
    )
    parser.add_argument("--mask-share", type=share, default=1.0, help="share of the tokens in the loss")
    parser.add_argument("--vary", action="store_true", help="give each pack other lengths around these")
    parser.add_argument("--packs", type=count, default=0, help="packs of a step (default: one for each rank)")
    parser.add_argument("--ranks", type=count, default=1, help="processes, one for each GPU")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest, too")
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="print the memory that each setting would need, and run nothing",
    )
    parser.add_argument(
        "--warm", type=count, default=3, help="take so many steps before those that are timed"
    )
    parser.add_argument("--steps", type=count, default=5, help="time so many steps")
    parser.add_argument(
        "--timeout-s", type=cli.number(float, 1), default=900.0, help="end the ranks after so long"
    )
    return cli.parse(parser)


def _plan(arguments: argparse.Namespace, folder: Path) -> Plan:
    model = shapes.find_or_write(arguments.shape, folder / "model")
    policy = read_policy(arguments.overrides)
    if policy["device"] == "gpu" and not arguments.estimate:
        gpus.require("benchmark", gpus.needed(arguments.ranks, os.environ), os.environ)
    require_ranks(policy, arguments.ranks, model)
    workload = Workload(
        lengths=parse_lengths(arguments.lengths),
        vary=arguments.vary,
        mask_share=arguments.mask_share,
        packs=arguments.packs or arguments.ranks,
        vocab=ModelShape.read(model).vocab,
    )
    return Plan(
        model=str(model.absolute()),
        policy=policy,
        workload=workload,
        warm=arguments.warm,
        steps=arguments.steps,
        profile=arguments.profile,
    )


def _measure(plan: Plan, ranks: int, timeout_s: float, folder: Path) -> Measured:
    path, out = folder / "plan.json", folder / "out.json"
    path.write_bytes(msgspec.json.encode(plan))
    words, on_gpu = (str(path), str(out)), plan.policy["device"] == "gpu"
    run_ranks(ranks, "hpc_swe.view.benchmarks.steps", words, folder, timeout_s, gpu=on_gpu)
    return msgspec.json.decode(out.read_bytes(), type=Measured)


@cli.command
def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="hpc_swe-benchmark-") as name:
        arguments = _arguments()
        plan, ranks = _plan(arguments, Path(name)), arguments.ranks
        tables.say(describe(plan, ranks, arguments.lengths))
        if arguments.estimate:
            tables.show(tables.console, estimates(plan, ranks))
            return
        found = _measure(plan, ranks, arguments.timeout_s, Path(name))
        table = tables.table(("figure",), (found.device,))
        for row, cell in figures(plan, ranks, found).items():
            table.add_row(row, cell)
        tables.show(tables.console, table)
        if found.kernels:
            tables.say(found.kernels)


if __name__ == "__main__":
    main()
