"""Run the ablation in miniature, with and without the debugger: python -m tests.bench.ablation.

The tasks are those of tests/bench/locks.py. Both arms start from the weights of one warm start and train with
GRPO in the real loop; their configurations differ in the tools and their names in the prompt alone. What is
done already is not done again, so the same command continues where it was stopped. See docs/measurements.md.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from hpc_swe.base import cli, intervals, tables
from hpc_swe.base.errors import HpcSweError
from hpc_swe.base.records import Message
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import evals
from hpc_swe.base.store.evals import Attempt
from hpc_swe.config import config as configuration
from hpc_swe.config.tokenization import token_builder
from hpc_swe.demo import model
from hpc_swe.demo.__main__ import DECODINGS, newest
from tests.bench import locks

ARMS = ("pdb", "rewrite")
HERE = "tests/bench"
WORDS = model.WORDS.replace(" ?[A-Za-z]+", "[A-Z]| ?[a-z]+")
"""Each capital letter is a token, so that a name is the same token wherever it stands."""
DEMONSTRATIONS = 3600
"""Conversations of the half that debugs; the other half has as many trained tokens."""
SAMPLES = 750
"""Conversations of each half that the tokenizer is made for."""
DEADLINE_S = 3600
Row = dict[str, object]
Rounds = dict[str, list[Attempt]]
"""Arm -> the episodes of one evaluation."""


def files(arm: str, *more: str) -> list[str]:
    """Return the configuration files of an arm, the last one read over all others."""
    return ["configs/demo.toml", *(f"{HERE}/ablation{word}.toml" for word in ("", f"_{arm}", *more))]


def conversations(kind: str, prompts: Sequence[str], seed: int) -> Iterator[list[Message]]:
    """Yield endless demonstrations of one kind, which begin with each of the system prompts in turn."""
    act = locks.with_debugger if kind == "pdb" else locks.rewriting_only
    for number, system in enumerate(itertools.cycle(prompts)):
        rng = random.Random(f"{kind} {seed} {number}")
        head = [Message(role="system", content=system), Message(role="user", content=locks.PROMPT)]
        yield [*head, *act(locks.make(seed, "train", number), rng)]


def halves(seed: int) -> dict[str, Iterator[list[Message]]]:
    """Return both kinds of demonstrations; pdb is called only where the prompt names it.

    Three in four of those that only rewrite have the prompt with pdb, too: most of its examples do not debug.
    """
    shown = {"pdb": [prompt("pdb")], "rewrite": [prompt("pdb")] * 3 + [prompt("rewrite")]}
    return {kind: conversations(kind, prompts, seed) for kind, prompts in shown.items()}


def demonstrations(folder: Path, seed: int, count: int) -> tuple[list[list[Message]], dict[str, int]]:
    """Return both halves, and how many trained tokens each has; `count` conversations debug.

    The tokenizer is that of the model's folder.
    """
    builder = token_builder(configuration.from_words([*files("pdb"), f'model="{folder}"']))
    chosen: list[list[Message]] = []
    tokens = dict.fromkeys(ARMS, 0)
    for kind, found in halves(seed).items():
        for number, messages in enumerate(found):
            if number >= count if kind == "pdb" else tokens[kind] >= tokens["pdb"]:
                break
            chosen.append(messages)
            tokens[kind] += sum(builder.demonstration(messages)[1])
    return chosen, tokens


def prompt(arm: str) -> str:
    """Return the system prompt of an arm."""
    return configuration.from_words(files(arm)).agent.preface.system


def as_row(messages: Sequence[Message]) -> Row:
    """Return a conversation in chat form."""
    rows = msgspec.to_builtins(list(messages))
    for row in rows:
        row["tool_calls"] = [{"function": call} for call in row["tool_calls"]]
    return {"messages": rows}


def warm_start(root: Path, seed: int, overrides: Sequence[str]) -> Path:
    """Make the model and train it on both halves; return the folder of its weights."""
    folder, rows = (root / "model").absolute(), (root / "demonstrations.jsonl").absolute()
    if not folder.exists():
        both = itertools.chain(*(itertools.islice(found, SAMPLES) for found in halves(seed).values()))
        print(folder, model.make(folder, both, seed, WORDS))
    if not rows.exists():
        chosen, tokens = demonstrations(folder, seed, DEMONSTRATIONS)
        print("demonstrations:", len(chosen), "trained tokens:", tokens)
        made = rows.with_suffix(".tmp")
        made.write_text("".join(json.dumps(as_row(messages)) + "\n" for messages in chosen))
        made.rename(rows)
    source = [f'model="{folder}"', f'sft.trajectories=["{rows}"]', f"seed={seed}"]
    return newest(launch(root / "sft", *files("pdb", "_sft"), *source, *overrides))


def launch(folder: Path, *words: str) -> RunDir:
    """Run `hpc_swe.launch` in a folder until the run has finished, unless it has.

    Raises:
        HpcSweError: It ended before; its output, in a file beside the folder, says why.
    """
    run = RunDir(folder.absolute())
    if not run.finished.exists():
        line = [sys.executable, "-m", "hpc_swe.launch", "start", *words]
        line += ["executor.foreground=true", f"--run={run.root}", f"--wait={DEADLINE_S}"]
        print(" ".join(line), flush=True)
        output = run.root.with_name(f"{run.root.name}.log")
        with output.open("a") as log:
            code = subprocess.run(line, stdout=log, stderr=log).returncode
        if code:
            raise HpcSweError(f"{run.root}: launch ended with {code}; see {output}; the same command goes on")
    return run


def evaluated(root: Path, arm: str, name: str, weights: Path, overrides: Sequence[str]) -> list[Attempt]:
    """Return the episodes of one arm's evaluation of weights on its held-out tasks."""
    words = [*files(arm, "_eval"), f'model="{weights.absolute()}"', *overrides]
    return evals.read(launch(root / f"{name}-{arm}", *words).eval_table("eval"))


def trained(root: Path, arm: str, seed: int, start: Path, overrides: Sequence[str]) -> RunDir:
    """Train one arm with one seed."""
    words = [*files(arm), f'model="{start.absolute()}"', f"seed={seed}", *overrides]
    return launch(root / f"grpo-{seed}-{arm}", *words)


def table(before: Rounds, after: Sequence[Rounds], decoding: str) -> Table:
    """Return the held-out solve rates of both arms and their difference: before, by seed, over all seeds."""
    title = f"held-out solve rate, {decoding}: mean over tasks [95 % interval over tasks]"
    made = tables.table(["weights"], [*ARMS, "pdb - rewrite"], title=title)
    every = {arm: [attempt for each in after for attempt in each[arm]] for arm in ARMS}
    rows = {"warm start": before} | {f"GRPO, seed {seed}": each for seed, each in enumerate(after)}
    for name, rounds in (rows | {"GRPO, all seeds": every}).items():
        pdb, rewrite = (intervals.outcomes(rounds[arm], decoding) for arm in ARMS)
        cells = [intervals.solve_rate(pdb), intervals.solve_rate(rewrite), intervals.gain(rewrite, pdb)]
        made.add_row(name, *map(str, cells))
    return made


@cli.command
def main() -> None:
    """Run what is missing, arm by arm within each seed, and show the table."""
    os.umask(0o077)
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ablation", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="folder of all runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument("overrides", nargs="*", help="of every run's configuration, such as steps=10")
    arguments = cli.parse(parser)
    root, overrides = arguments.out, arguments.overrides
    root.mkdir(parents=True, exist_ok=True)
    start = warm_start(root, 0, overrides)
    before = {arm: evaluated(root, arm, "before", start, overrides) for arm in ARMS}
    after: list[Rounds] = []
    for seed in range(arguments.seeds):
        ends = {arm: newest(trained(root, arm, seed, start, overrides)) for arm in ARMS}
        after.append({arm: evaluated(root, arm, f"after-{seed}", ends[arm], overrides) for arm in ARMS})
        for decoding in DECODINGS:
            tables.show(tables.console, table(before, after, decoding))


if __name__ == "__main__":
    main()
