"""Say what a delta between two full versions takes: python -m hpc_swe.benchmarks.delta OLD NEW.

Both are folders of Hugging Face weights, for example two successive versions of a run. Values are rounded to
bfloat16. `--share` takes a part of each value's step, as a lower learning rate would with Adam; that needs
float32, because a step between two rounded values is none, or at least one last place.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hpc_swe import cli, tables
from hpc_swe.errors import ConfigError
from hpc_swe.plugins.tensor_delta import changed, encode


@dataclass(frozen=True)
class DeltaSize:
    """Count values and bytes of a version, and those that its delta holds."""

    values: int
    changed: int
    whole_bytes: int
    delta_bytes: int


def pairs(old: Path, new: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor of two folders; raise ConfigError unless they have the same files."""
    files = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (old, new)]
    if files[0] != files[1] or not files[0]:
        raise ConfigError(f"{old} and {new}: give two full versions with the same weight files")
    for name in files[0]:
        with safe_open(old / name, "pt") as before, safe_open(new / name, "pt") as after:
            for tensor in before.keys():  # noqa: SIM118 (not a dict)
                yield before.get_tensor(tensor), after.get_tensor(tensor)


def measure(old: Path, new: Path, share: float) -> DeltaSize:
    """Return how much changes when each value takes `share` of its step; below 1 only for float32."""
    values = different = whole = written = 0
    for before, after in pairs(old, new):
        if share < 1 and {before.dtype, after.dtype} != {torch.float32}:
            raise ConfigError(
                f"{old} and {new}: --share needs float32 weights, since steps between rounded ones cannot be "
                "scaled; leave it out, or compare versions of a run with policy.dtype = 'float32'"
            )
        first, second = before.float(), after.float()
        rounded, stepped = first.bfloat16(), (first + (second - first) * share).bfloat16()
        changes = encode(rounded, stepped)
        values, whole = values + rounded.numel(), whole + rounded.nbytes
        different += len(changed(rounded, stepped))
        written += stepped.nbytes if changes is None else changes.nbytes
    return DeltaSize(values, different, whole, written)


@cli.command
def main() -> None:
    """Print one line."""
    example = "RUN/weights/v000046-i01 RUN/weights/v000047-i01 --share 0.04"
    what = "Count what changes between two full versions of the weights, and the bytes of their delta."
    parser = cli.parser("hpc_swe.benchmarks.delta", what, example)
    parser.add_argument("old", type=cli.path, help="folder of the version before")
    parser.add_argument("new", type=cli.path, help="folder of the next version")
    parser.add_argument(
        "--share", type=cli.number(float, 0, 1), default=1.0, help="take this share of each step (float32)"
    )
    _print(cli.parse(parser))


def _print(arguments: argparse.Namespace) -> None:
    with torch.no_grad():
        size = measure(arguments.old, arguments.new, arguments.share)
    share = size.delta_bytes / size.whole_bytes
    tables.say(
        f"{size.values:,} values, of which {100 * size.changed / size.values:.2f} % change; the delta takes "
        f"{size.delta_bytes:,} bytes, {100 * share:.2f} % of {size.whole_bytes:,}"
    )


if __name__ == "__main__":
    main()
