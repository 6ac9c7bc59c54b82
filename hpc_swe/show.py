"""python -m hpc_swe.show FILE: any record of a run as JSON."""

import argparse
import sys
from pathlib import Path

import msgspec

from hpc_swe.errors import HpcSweError
from hpc_swe.records import Batch, Episode, Record, RolloutRequest, ScoredEpisode, float_array, id_array
from hpc_swe.store import atomic

KINDS: dict[str, type[Record]] = {
    "requests": RolloutRequest,
    "episodes": Episode,
    "scored": ScoredEpisode,
    "batches": Batch,
}
FLOATS = ("logprobs", "advantages", "weights")


def readable(value: object, key: str = "") -> object:
    """Builtins of a record with packed arrays as lists."""
    if isinstance(value, msgspec.Struct):
        return {name: readable(getattr(value, name), name) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        if key == "mask":
            return list(value)
        return (float_array(value) if key in FLOATS else id_array(value)).tolist()
    if isinstance(value, list | tuple):
        return [readable(item, key) for item in value]
    if isinstance(value, dict):
        return {name: readable(item) for name, item in value.items()}
    return value


def show(path: Path) -> bytes:
    """A record as JSON text; its type follows from the folder it lies in."""
    if path.suffix == ".json":
        return path.read_bytes()
    kind = next((KINDS[part] for part in reversed(path.absolute().parts) if part in KINDS), None)
    if kind is None:
        raise HpcSweError(f"{path}: lies in none of {', '.join(KINDS)}, so its type is unknown")
    return msgspec.json.format(msgspec.json.encode(readable(atomic.get(path, kind))), indent=2)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hpc_swe.show", description="Print a record of a run as JSON."
    )
    parser.add_argument("file", type=Path)
    try:
        sys.stdout.write(show(parser.parse_args().file).decode() + "\n")
    except (HpcSweError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))


if __name__ == "__main__":
    main()
