"""Measure steps of the learner: python -m hpc_swe.benchmarks.learner --shape 4B --lengths 16384.

It starts its ranks on this node itself, one a GPU, with random weights of the shape. The table has the tokens
a second, the utilization by the formula of `hpc_swe.view.benchmarks.flops`, the seconds by part and the peak
memory.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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
from hpc_swe.models.policies.base import EstimatedPolicy, Policy
from hpc_swe.view.benchmarks import flops, limits
from hpc_swe.view.benchmarks.column import PARTS, Measured, Plan
from hpc_swe.view.benchmarks.kernels import CLASSES, COMMUNICATION, IDLE, NAME_WIDTH, OTHER
from hpc_swe.view.benchmarks.limits import Rates
from hpc_swe.view.benchmarks.peers import NEXT, PEERS, parse_peers
from hpc_swe.view.benchmarks.ranks import OUT_OF_MEMORY, run_ranks
from hpc_swe.view.benchmarks.workload import Workload, parse_lengths, spell_lengths

OURS = "hpc_swe"
NUMBERS = ("tokens/s", "MFU %", "of product %", "step ms", *(f"{part} ms" for part in PARTS), "other ms")
NUMBERS += ("peak GiB", "estimate GiB", "loss", "grad norm")
LEVELS = ("none", "elementwise", "products", "selective", "full")
HOSTED = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class Benchmark:
    """Hold what all columns share."""

    ranks: int
    timeout_s: float
    plan: Plan
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return bool(self.plan.policy["device"] == "gpu")

    def run(self, column: str, ranks: int) -> bytes | str:
        """Return what a column's ranks wrote, or why they failed."""
        plan, out = self.folder / f"{column}.json", self.folder / f"{column}.out"
        plan.write_bytes(msgspec.json.encode(msgspec.structs.replace(self.plan, column=column)))
        words = (str(plan), str(out))
        failure = run_ranks(ranks, "hpc_swe.view.benchmarks.column", words, self.timeout_s, gpu=self.on_gpu)
        return failure or out.read_bytes()


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


def require_gpus(table: dict[str, Any], ranks: int) -> None:
    """Raise ConfigError where this node has too few GPUs for the table [policy]."""
    if table["device"] == "gpu":
        gpus.require("benchmark", gpus.needed(ranks, os.environ), os.environ)


def require_ranks(table: dict[str, Any], ranks: int, model: Path) -> None:
    """Raise ConfigError where so many ranks cannot train the model by the table [policy]."""
    settings: Policy = loader.load("policies", table)
    if ranks % settings.processes:
        raise ConfigError(f"--ranks {ranks} is no multiple of the {settings.processes} of [policy]")
    if isinstance(settings, EstimatedPolicy):
        settings.check_model(model, ranks // settings.processes)


def measure_all(benchmark: Benchmark, columns: Sequence[str]) -> dict[str, Measured | str]:
    """Measure the columns; where one has too little memory, measure the one that needs less as well."""
    found: dict[str, Measured | str] = {}
    waiting = list(columns)
    while waiting:
        column = waiting.pop(0)
        answer = benchmark.run(column, benchmark.ranks)
        found[column] = answer if isinstance(answer, str) else msgspec.json.decode(answer, type=Measured)
        tables.say(f"{column}: {_brief(benchmark, found[column])}")
        less = NEXT.get(column)
        if answer == OUT_OF_MEMORY and less and less not in waiting:
            waiting.insert(0, less)
    return found


def _brief(benchmark: Benchmark, found: Measured | str) -> str:
    """Return what is known once a column ends; the table comes when all have."""
    return found if isinstance(found, str) else f"{_tokens(benchmark) / found.step_s:,.0f} tokens/s"


def _tokens(benchmark: Benchmark) -> int:
    """Return the tokens of a step."""
    return benchmark.plan.workload.packs * sum(benchmark.plan.workload.lengths)


def kernel_tables(found: dict[str, Measured]) -> list[Table]:
    """Return a table of milliseconds by class of kernel, and one of the longest kernels of each column."""
    kernels = {column: each.kernels for column, each in found.items() if each.kernels}
    kinds = [*(kind for kind, _ in CLASSES), OTHER, IDLE]
    classes = tables.table(("ms of one step",), tuple(kernels))
    for kind in kinds:
        cells = (f"{1e3 * each.seconds.get(kind, 0.0):,.1f}" for each in kernels.values())
        classes.add_row(kind, *cells)
        if kind == COMMUNICATION:
            waiting = (f"{1e3 * each.waiting:,.1f}" for each in kernels.values())
            classes.add_row("  with nothing beside it", *waiting)
    made = [classes]
    for column, each in kernels.items():
        longest = tables.table((f"longest of {column}",), ("ms", "calls"))
        for name, seconds, calls in each.longest:
            longest.add_row(name[:NAME_WIDTH], f"{1e3 * seconds:,.1f}", str(calls))
        made.append(longest)
    return made


def rows(benchmark: Benchmark, found: dict[str, Measured], best: Rates | str) -> Table:
    """Return the table, with a row for each column that ran."""
    table = tables.table(("back end",), NUMBERS)
    for name, measured in found.items():
        load = f"expert load {measured.expert_load:.2f}" if measured.expert_load > 1 else ""
        chosen = ", ".join(filter(None, (measured.recompute, measured.attention, load)))
        table.add_row(f"{name} ({chosen})" if chosen else name, *_figures(benchmark, name, measured, best))
    return table


def estimates(benchmark: Benchmark) -> Table:
    """Return the estimated peaks of each GPU by what backward recomputes and by the share in host memory."""
    table = tables.table(("peak GiB",), tuple(f"offload {share:g}" for share in HOSTED))
    copies = benchmark.ranks // loader.load("policies", benchmark.plan.policy).processes
    for level in LEVELS:
        changes = ({"recompute": level, "offload_optimizer": share} for share in HOSTED)
        table.add_row(level, *(f"{_estimate(benchmark, each, copies) / GIB:.1f}" for each in changes))
    return table


def agreement(found: dict[str, Measured]) -> str:
    """Return a line that says how far the first steps of the columns are apart; all trained the same."""
    ours, *others = found.values()
    losses = max(abs(each.loss - ours.loss) / abs(ours.loss) for each in others)
    norms = max(abs(each.grad_norm - ours.grad_norm) / abs(ours.grad_norm) for each in others)
    return f"first step: losses differ by {100 * losses:.2g} %, gradient norms by {100 * norms:.2g} %"


def _figures(benchmark: Benchmark, name: str, found: Measured, best: Rates | str) -> list[str]:
    work, shape = benchmark.plan.workload, ModelShape.read(Path(benchmark.plan.model))
    steps = range(benchmark.plan.warm, benchmark.plan.warm + benchmark.plan.steps)
    packs = [pack for step in steps for pack in work.packs_of(step)]
    is_lora = name == OURS and bool(benchmark.plan.policy.get("lora_rank"))
    needed = sum(flops.step_flops(shape, *pack, only_adapters=is_lora) for pack in packs) / len(steps)
    rate = needed / found.step_s / benchmark.ranks
    peak = flops.datasheet_rate(best.device) if isinstance(best, Rates) else None
    parts = [found.seconds[part] for part in PARTS]
    chosen = {"recompute": found.recompute} if found.recompute else {}
    return [
        f"{_tokens(benchmark) / found.step_s:,.0f}",
        f"{100 * rate / peak:.1f}" if peak else "-",
        f"{100 * rate / best.product_flops:.1f}" if isinstance(best, Rates) else "-",
        *(f"{1e3 * each:,.0f}" for each in (found.step_s, *parts, max(0.0, found.step_s - sum(parts)))),
        f"{found.peak_bytes / GIB:.1f}" if found.peak_bytes else "-",
        f"{_estimate(benchmark, chosen, found.data_ranks) / GIB:.1f}" if name == OURS else "-",
        f"{found.loss:.5f}",
        f"{found.grad_norm:.4g}",
    ]


def _estimate(benchmark: Benchmark, chosen: dict[str, Any], copies: int) -> float:
    policy = loader.load("policies", benchmark.plan.policy | chosen)
    if not isinstance(policy, EstimatedPolicy):
        return 0.0
    tokens = sum(benchmark.plan.workload.lengths)
    total = policy.memory(Path(benchmark.plan.model), copies, tokens).total
    return total.bytes if total else 0.0


def describe(benchmark: Benchmark) -> str:
    """Return what every column trains, as one line."""
    work, tokens = benchmark.plan.workload, sum(benchmark.plan.workload.lengths)
    device = "GPU" if benchmark.on_gpu else "CPU"
    trained = sum(trained for _, trained in work.packs_of(0))
    varied = ", drawn anew around these" if work.vary else ""
    return (
        f"{benchmark.ranks} x {device}; packs of a step: {work.packs}, of {tokens:,} tokens; lengths "
        f"{spell_lengths(work.lengths)}{varied}, {100 * trained / work.packs / tokens:.1f} % in the loss"
    )


def _arguments() -> argparse.Namespace:
    examples = (
        "--shape tiny --lengths 64x2,32 --peer fsdp2 --profile",
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
    parser.add_argument(
        "--tensor-parallel", type=count, default=1, help="the same as policy.tensor_parallel=N"
    )
    parser.add_argument("--peer", default="none", help=f"measure these, too: some of {','.join(PEERS)}")
    parser.add_argument("--profile", action="store_true", help="print milliseconds by class of kernel, too")
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
        "--timeout-s",
        type=cli.number(float, 1),
        default=900.0,
        help="end each row of the table after so long",
    )
    return cli.parse(parser)


def _benchmark(arguments: argparse.Namespace, folder: Path) -> Benchmark:
    model = shapes.find_or_write(arguments.shape, folder / "model")
    parallel = [f"policy.tensor_parallel={arguments.tensor_parallel}"] * (arguments.tensor_parallel > 1)
    policy = read_policy([*parallel, *arguments.overrides])
    if not arguments.estimate:
        require_gpus(policy, arguments.ranks)
    require_ranks(policy, arguments.ranks, model)
    workload = Workload(
        lengths=parse_lengths(arguments.lengths),
        vary=arguments.vary,
        mask_share=arguments.mask_share,
        packs=arguments.packs or arguments.ranks,
        vocab=ModelShape.read(model).vocab,
    )
    plan = Plan(
        column="",
        model=str(model.absolute()),
        policy=policy,
        workload=workload,
        warm=arguments.warm,
        steps=arguments.steps,
        profile=arguments.profile,
    )
    return Benchmark(arguments.ranks, arguments.timeout_s, plan, folder)


@cli.command
def main() -> int:
    """Print the table; return 1 when a column failed and none was tried in its place."""
    with tempfile.TemporaryDirectory(prefix="hpc_swe-benchmark-") as name:
        arguments = _arguments()
        peers, benchmark = parse_peers(arguments.peer), _benchmark(arguments, Path(name))
        tables.say(describe(benchmark))
        if arguments.estimate:
            tables.show(tables.console, estimates(benchmark))
            return 0
        answer = benchmark.run("limits", 1)
        best = answer if isinstance(answer, str) else msgspec.json.decode(answer, type=Rates)
        tables.say(f"limits: {best}" if isinstance(best, str) else limits.describe(best))
        found = measure_all(benchmark, [OURS, *peers])
        measured = {column: each for column, each in found.items() if isinstance(each, Measured)}
        tables.show(tables.console, rows(benchmark, measured, best))
        if OURS in measured and len(measured) > 1:
            tables.say(agreement(measured))
        if benchmark.plan.profile:
            tables.show(tables.console, *kernel_tables(measured))
    return int(any(isinstance(each, str) and NEXT.get(column) not in found for column, each in found.items()))


if __name__ == "__main__":
    main()
