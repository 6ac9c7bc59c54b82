"""Measure how many tasks a model solves: python -m hpc_swe.evaluate CONFIG... --out FOLDER.

An evaluation is a run of mode eval, with the folder, jobs, claims and restarts of any run. This command is
for people: it makes the configuration, shows a progress bar and prints the results. See docs/evaluate.md.
"""

import argparse
import logging
import os

from rich.console import Console

from hpc_swe.base import cli, tables
from hpc_swe.base.rundir import RunDir
from hpc_swe.launch import checks, preview
from hpc_swe.launch.plan import plan_start
from hpc_swe.view.evaluation import results
from hpc_swe.view.evaluation.start import configured, evaluate

FLAGS = {
    "model": "model",
    "url": "inference.url",
    "parquet_path": "taskset.eval",
    "n_parallel": "rollout.slots",
    "max_steps": "agent.max_turns",
    "samples": "eval.samples",
    "tasks": "tasks.eval",
    "history": "rollout.history",
}
"""Option -> the key that it sets."""
KODCODE = ["configs/swepdb.toml", "configs/swepdb_evaluate.toml"]
BENCHMARKS = {"kodcode": KODCODE, "swebench": [*KODCODE, "configs/swepdb_evaluate_swebench.toml"]}
"""Word on the command line -> the files that evaluate the debugging agent there."""


def _parser() -> argparse.ArgumentParser:
    examples = (
        "configs/demo.toml --model MODEL --samples 4 --out evals/mine",
        "configs/demo.toml --model OTHER --samples 4 --out evals/other --compare evals/mine",
        "--out evals/mine",
    )
    what = "Measure how many held-out tasks a model solves; with --out alone, continue."
    parser = cli.parser("hpc_swe.evaluate", what, *examples)
    add = parser.add_argument
    add("config", nargs="*", help=f"{cli.CONFIG}; or {' or '.join(BENCHMARKS)}")
    add("--out", type=cli.folder, required=True, help="folder of the evaluation")
    model = "Hugging Face folder, or a run's weights/v...; also with --url, for its tokenizer"
    add("--model", "--model-name", "--model_name", type=cli.folder, help=model)
    url = "engine that already serves the model, http://host:port; its key in VLLM_API_KEY"
    add("--url", "--base-url", "--base_url", help=url)
    add(
        "--parquet-path", "--parquet_path", type=cli.folder, metavar="FILE", help="file of the held-out tasks"
    )
    add("--n-parallel", "--n_parallel", type=int, help="episodes that one rollout worker runs at once")
    add("--max-steps", "--max_steps", type=int, help="turns of an episode")
    add("--samples", type=int, help="episodes per task and decoding")
    add("--tasks", type=int, help="number of held-out tasks")
    add("--history", choices=("keep", "template"), help="how earlier messages are rendered into a prompt")
    add("--detach", action="store_true", help="submit and return")
    add("--dry-run", action="store_true", help="print costs and batch scripts; make nothing")
    add("--full", action="store_true", help="let --dry-run print the merged configuration, too")
    add("--compare", type=cli.folder, help="folder of an earlier evaluation of the same tasks")
    add("--common", action="store_true", help="compare only on the tasks that both evaluations have")
    return parser


def _words(arguments: argparse.Namespace) -> list[str]:
    if arguments.model:
        arguments.model = arguments.model.resolve()  # a symbolic link may change later
    given = {key: vars(arguments)[flag] for flag, key in FLAGS.items()}
    files = [file for word in arguments.config for file in BENCHMARKS.get(word, [word])]
    return [*files, *(f"{key}={value}" for key, value in given.items() if value is not None)]


def _run(run: RunDir, arguments: argparse.Namespace, console: Console) -> None:
    other = RunDir(arguments.compare) if arguments.compare else None
    before = results.read(other) if other else None  # read now, to fail now rather than after hours
    config = configured(run, _words(arguments))
    if arguments.dry_run:
        plan = plan_start(run, config)
        preview.show(plan, full=arguments.full)
        checks.require(plan)
        return
    if not evaluate(run, config, detach=arguments.detach, console=console):
        console.print("the same command shows the progress, and writes the results once it has finished")
        return
    tables.show(console, *results.summary_parts(results.write(run, config)))
    tables.show(console, f"results: {run.summary}, {run.results}, {run.predictions('*')}")
    if before:
        found = results.compare(before, results.read(run), common=arguments.common)
        tables.show(console, *results.comparison_parts(str(arguments.compare), found))


@cli.command
def main() -> None:
    """Evaluate, or continue an evaluation; the umask keeps its files private."""
    os.umask(0o077)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    arguments = cli.parse(_parser())
    _run(RunDir(arguments.out), arguments, tables.screen())


if __name__ == "__main__":
    main()
