"""python -m hpc_swe.evaluate CONFIG... --out FOLDER: what a model solves. See docs/evaluate.md.

An evaluation is a run of mode eval: its folder, jobs, claims and restarts are any run's. This is the person's
side of it: the words that make one, the bar while it lasts, and the results when it has finished.
"""

import argparse
import logging
import os

from rich.console import Console

from hpc_swe import cli, tables
from hpc_swe.evaluation import results
from hpc_swe.evaluation.start import configured, evaluate
from hpc_swe.rundir import RunDir
from hpc_swe.runs import preview
from hpc_swe.settings import RunConfig

FLAGS = {
    "model": "model",
    "url": "inference.url",
    "samples": "eval.samples",
    "tasks": "tasks.eval",
    "history": "rollout.history",
}
"""Option -> the key that it is a short word for."""


def finish(run: RunDir, config: RunConfig, console: Console) -> None:
    """Write the results and show them."""
    tables.show(console, *results.shown(results.write(run, config)))
    tables.show(console, f"results: {run.summary}, {run.results}, {run.predictions('*')}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpc_swe.evaluate", description="What a model solves.")
    add = parser.add_argument
    add("config", nargs="*", help="TOML files, merged left to right, and overrides; none to go on")
    add("--out", type=cli.folder, required=True, help="the evaluation's folder, a run folder")
    add("--model", type=cli.folder, help="Hugging Face folder, or a run's weights/v...")
    add("--url", help="an engine that serves it already, http://host:port; its key in VLLM_API_KEY")
    add("--samples", type=int, help="episodes a task and decoding")
    add("--tasks", type=int, help="held-out tasks, the first so many")
    add("--history", choices=("keep", "template"), help="how a conversation's past is rendered")
    add("--detach", action="store_true", help="submit and return")
    add("--dry-run", action="store_true", help="print configuration, batch scripts and costs; make nothing")
    add("--compare", type=cli.folder, help="folder of an earlier evaluation of the same tasks")
    add("--common", action="store_true", help="compare on the tasks that are in both")
    return parser


def _words(arguments: argparse.Namespace) -> list[str]:
    if arguments.model:
        arguments.model = arguments.model.resolve()  # a link may point elsewhere tomorrow
    given = {key: getattr(arguments, flag) for flag, key in FLAGS.items()}
    return [*arguments.config, *(f"{key}={value}" for key, value in given.items() if value is not None)]


def _run(run: RunDir, arguments: argparse.Namespace, console: Console) -> None:
    other = RunDir(arguments.compare) if arguments.compare else None
    before = results.read(other) if other else None  # now, not after hours
    config = configured(run, _words(arguments))
    if arguments.dry_run:
        preview.preview(run, config)
        return
    if not evaluate(run, config, detach=arguments.detach, console=console):
        console.print("the same command shows how it goes, and writes the results when it has finished")
        return
    finish(run, config, console)
    if before:
        found = results.compare(before, results.read(run), common=arguments.common)
        tables.show(console, *results.shown_beside(str(arguments.compare), found))


@cli.command
def main() -> None:
    """The command line."""
    os.umask(0o077)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    arguments = cli.parse(_parser())
    _run(RunDir(arguments.out), arguments, tables.screen())


if __name__ == "__main__":
    main()
