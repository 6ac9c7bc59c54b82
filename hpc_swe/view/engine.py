"""Print the command of an engine that a run can attach to and update: python -m hpc_swe.engine CONFIG...

The arguments are those of `launch start`. The line is one command, so `srun` may stand before it. Its shell
takes the key from VLLM_API_KEY, so that no process has it among its arguments, which all users can read.
"""

import os
import shlex
from pathlib import Path
from urllib.parse import urlsplit

from hpc_swe.base import cli
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch.create import ENGINE_KEY as KEY

PORT, ANYWHERE = 8000, "0.0.0.0"  # noqa: S104  (guarded by the key)


def line(config: RunConfig) -> str:
    """Return a line for a shell on the engine's node, which must see the run's folder as the jobs do."""
    model, port = Path(config.model).absolute(), urlsplit(config.inference.url).port or PORT
    words = config.engine.command(model, ANYWHERE, port, model.name, config.rollout.context)
    variables = sorted(config.engine.environment(KEY).items())
    keys = " ".join(f'{name}="${{{KEY}:?}}"' for name, value in variables if value == KEY)
    settings = [
        f"{name}={value}"
        for name, value in variables
        if value not in (KEY, os.environ.get(name))  # that shell inherits the others too
    ]
    return shlex.join(["sh", "-c", f'export {keys}; exec env "$@"', "sh", *settings, *words])


@cli.command
def main() -> None:
    """Print the line for the configuration that the arguments name."""
    what = "Print the command of an engine that a run can attach to."
    parser = cli.parser("hpc_swe.engine", what, "configs/demo.toml model=MODEL")
    parser.add_argument("config", nargs="+", help=cli.CONFIG)
    print(line(configuration.from_words(cli.parse(parser).config)))


if __name__ == "__main__":
    main()
