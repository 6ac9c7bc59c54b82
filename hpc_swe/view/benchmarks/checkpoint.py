"""Measure a checkpoint: python -m hpc_swe.benchmarks.checkpoint --shape 4B --ranks 2 FOLDER.

It starts the learner's ranks on this node, with random weights of the shape, and saves and loads below
FOLDER, which should be on the file system of your runs. The table compares that with plain writes of as many
bytes.
"""

import argparse
import tempfile
from pathlib import Path

import msgspec
from rich.table import Table

from hpc_swe.base import cli, tables
from hpc_swe.base.errors import ConfigError, NodeError
from hpc_swe.models import shapes
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.view.benchmarks.checkpoint_side import SaveTimes
from hpc_swe.view.benchmarks.column import Plan
from hpc_swe.view.benchmarks.learner import read_policy, require_gpus, require_ranks
from hpc_swe.view.benchmarks.ranks import run_ranks
from hpc_swe.view.benchmarks.workload import Workload, parse_lengths

LENGTHS = "64x2,32"
GB = 1e9


def rows(found: SaveTimes) -> Table:
    """Return a row for each way through the bytes of a checkpoint."""
    table = tables.table((f"checkpoint of {found.size / GB:.2f} GB",), ("seconds", "GB/s", "of plain %"))
    for name, seconds, is_written in (
        ("first one, without checksums", found.first_s, True),
        ("saved and published", found.saved_s, True),
        ("plain bytes, as many threads", found.plain_s, True),
        ("verified and loaded", found.loaded_s, False),
    ):
        share = f"{100 * found.plain_s / seconds:.0f}" if is_written else "-"
        table.add_row(name, f"{seconds:.2f}", f"{found.size / GB / seconds:.2f}", share)
    return table


def _arguments() -> argparse.Namespace:
    examples = ("/tmp", "--shape 4B --ranks 2 /lustre/me", "--shape 8B --tensor-parallel 2 --ranks 2 .")
    what = "Measure how long a checkpoint of the learner takes, with random weights."
    parser = cli.parser("hpc_swe.benchmarks.checkpoint", what, *examples)
    count = cli.number(int, 1)
    parser.add_argument(
        "folder", metavar="FOLDER", type=cli.folder, help="where to save; nothing is left there"
    )
    parser.add_argument("overrides", nargs="*", metavar="policy.KEY=VALUE", help="key of [policy]")
    known = ", ".join(shapes.SHAPES)
    parser.add_argument("--shape", default="tiny", help=f"sizes of the model: {known}; or a model's folder")
    parser.add_argument("--ranks", type=count, default=1, help="processes, one for each GPU")
    parser.add_argument(
        "--tensor-parallel", type=count, default=1, help="the same as policy.tensor_parallel=N"
    )
    parser.add_argument(
        "--timeout-s", type=cli.number(float, 1), default=1800.0, help="end the ranks after so long"
    )
    return cli.parse(parser)


def _plan(arguments: argparse.Namespace, folder: Path) -> Plan:
    model = shapes.find_or_write(arguments.shape, folder / "model")
    parallel = [f"policy.tensor_parallel={arguments.tensor_parallel}"] * (arguments.tensor_parallel > 1)
    policy = read_policy([*parallel, *arguments.overrides])
    require_gpus(policy, arguments.ranks)
    require_ranks(policy, arguments.ranks, model)
    workload = Workload(
        lengths=parse_lengths(LENGTHS),
        vary=False,
        mask_share=1.0,
        packs=arguments.ranks,
        vocab=ModelShape.read(model).vocab,
    )
    return Plan(
        column="checkpoint",
        model=str(model.absolute()),
        policy=policy,
        workload=workload,
        warm=0,
        steps=1,
        profile=False,
    )


def _measure(arguments: argparse.Namespace, folder: Path, place: str) -> SaveTimes:
    plan, path, out = _plan(arguments, folder), folder / "plan.json", folder / "out"
    path.write_bytes(msgspec.json.encode(plan))
    words = (str(path), str(out), place)
    on_gpu, limit_s = plan.policy["device"] == "gpu", arguments.timeout_s
    failure = run_ranks(
        arguments.ranks, "hpc_swe.view.benchmarks.checkpoint_side", words, limit_s, gpu=on_gpu
    )
    if failure:
        raise NodeError(f"the benchmark's ranks: {failure}")
    return msgspec.json.decode(out.read_bytes(), type=SaveTimes)


@cli.command
def main() -> int:
    """Print the table."""
    arguments = _arguments()
    try:
        place = tempfile.TemporaryDirectory(prefix="hpc_swe-checkpoint-", dir=arguments.folder)
    except OSError as error:
        raise ConfigError(f"{arguments.folder}: cannot make a folder there: {error.strerror}") from None
    with place, tempfile.TemporaryDirectory(prefix="hpc_swe-benchmark-") as name:
        tables.show(tables.console, rows(_measure(arguments, Path(name), place.name)))
    return 0


if __name__ == "__main__":
    main()
