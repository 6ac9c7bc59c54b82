"""Write a model in plain bfloat16: python -m hpc_swe.unpack_model MODEL --out NEW.

Some models are published in FP8 alone, or beside a model of images. A learner needs plain weights, and an
engine must serve what it trains.
"""

import argparse

from hpc_swe.base import cli
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.tables import say
from hpc_swe.models.unpacked import unpack


def _parser() -> argparse.ArgumentParser:
    what = "Write a model without FP8 numbers, or out of a wrapper of Mistral's, as a run can train from it."
    example = "models/Devstral-Small-2-24B-Instruct-2512 --out models/devstral-small-2"
    parser = cli.parser("hpc_swe.unpack_model", what, example)
    parser.add_argument("model", type=cli.folder, metavar="MODEL", help="Hugging Face folder")
    parser.add_argument("--out", type=cli.path, required=True, help="new folder, of two bytes a parameter")
    return parser


@cli.command
def main() -> None:
    """Write the folder that the command line asks for."""
    arguments = cli.parse(_parser())
    if arguments.out.exists():
        raise ConfigError(f"--out {arguments.out} exists; remove it, or name another folder")
    count = unpack(arguments.model, arguments.out)
    say(f"{arguments.out}: a model in bfloat16; {count:,} tensors were in FP8")


if __name__ == "__main__":
    main()
