"""Start, continue and stop a run, and give away what it has learned. See docs/operations.md."""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpc_swe.base import cli, tables
from hpc_swe.base.errors import ConfigError, DeadlineError
from hpc_swe.base.records import RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, sharing
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import checks, create, existing, preview, results, submit
from hpc_swe.launch.control import carry_out, print_result, stop
from hpc_swe.launch.plan import plan_start
from hpc_swe.launch.watch import left, watch
from hpc_swe.roles.coordinator.modes.replay import archived_steps


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = cli.parser("hpc_swe.launch", "Start, continue and stop a run.")
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="VERB", help="each has a --help of its own"
    )
    words = "configs/demo.toml model=MODEL"
    examples = (
        f"{words} steps=100 --run runs/mine",
        f"{words} --dry-run",
        "--run runs/mine rollout.slots=16",
    )
    does = "make the run folder and submit its jobs; on a folder that exists, continue the run in it"
    add = cli.verb(verbs, "start", does, *examples).add_argument
    without = (
        "without files, the run of --run continues with its own configuration and these overrides; relative "
        "paths then start in the folder from which it was started"
    )
    add("config", nargs="*", help=f"{cli.CONFIG}; {without}")
    add(
        "--run", type=cli.folder, help="run folder (default: $HPC_SWE_RUNS or runs/, named by the first file)"
    )
    _add_waiting(add)
    add(
        "--upgrade", action="store_true", help="continue with this code, not with the code of the run's start"
    )
    again = cli.verb(verbs, "tick", "submit the jobs that are missing; cron calls this", "runs/mine")
    again.add_argument("run", type=cli.folder, help="folder of the run")
    does = "list the keys of a configuration, with type, default and meaning"
    listed = cli.verb(verbs, "keys", does, "groups", "policy.lora", "staleness")
    word = "start of the keys' names, such as groups, or else a part of their meaning, such as staleness"
    listed.add_argument("word", nargs="?", default="", help=word)
    listed.add_argument("--markdown", action="store_true", help="in the form of docs/configuration.md")
    end = cli.verb(verbs, "stop", "let jobs finish their work and exit", "runs/mine", "runs/mine --now")
    end.add_argument("run", type=cli.folder, help="folder of the run")
    end.add_argument("--now", action="store_true", help="let jobs exit at once, then cancel what is left")
    does = "train on the episodes of a run once more, by a learner alone, with other values of keys"
    again = cli.verb(verbs, "replay", does, "runs/mine --out runs/again", "runs/mine --out runs/b steps=9")
    again.add_argument("run", type=cli.folder, help="folder of a run of mode grpo")
    again.add_argument(
        "key", nargs="*", metavar="KEY=VALUE", help="overrides such as learner.loss.objective=cispo"
    )
    again.add_argument("--out", type=cli.folder, required=True, help="folder of the new run")
    _add_waiting(again.add_argument)
    again.set_defaults(upgrade=False)
    _add_results(verbs)
    return parser, dict(verbs.choices)


def _add_waiting(add: Callable[..., object]) -> None:
    add("--wait", type=float, metavar="SECONDS", help="tick until the run has finished, at most so long")
    add("--dry-run", action="store_true", help="print costs and batch scripts; make nothing")
    add("--full", action="store_true", help="let --dry-run print the merged configuration, too")


def _add_results(verbs: cli.Verbs) -> None:
    """Add the verbs for what a run leaves behind."""
    which = "best, newest or the name of a folder in weights/ (default: the best where one was evaluated)"
    does = "copy a version of the weights, as a Hugging Face folder with its tokenizer"
    out = cli.verb(verbs, "export", does, "runs/mine --out MODEL", "runs/mine --version newest --out MODEL")
    served = cli.verb(
        verbs, "serve", "print the command that serves a version to other programs", "runs/mine"
    )
    for each in (out, served):
        each.add_argument("run", type=cli.folder, help="folder of the run")
        each.add_argument("--version", default="", help=which)
    out.add_argument("--out", type=cli.folder, required=True, help="folder to make")
    does = "list what of a run may be deleted, with its size; delete the parts that are named"
    clean = cli.verb(verbs, "clean", does, "runs/mine", "runs/mine pages state")
    clean.add_argument("run", type=cli.folder, help="folder of the run")
    clean.add_argument("parts", nargs="*", metavar="PART", help="part to delete, a name of that list")
    does = "list the keys of the configuration in which two runs differ"
    differ = cli.verb(verbs, "compare", does, "runs/mine runs/other")
    differ.add_argument("run", type=cli.folder, help="folder of the first run")
    differ.add_argument("other", type=cli.folder, help="folder of the second run")


def _start(arguments: argparse.Namespace) -> None:
    files = [Path(word) for word in arguments.config if "=" not in word]
    if not (files or arguments.run):
        raise ConfigError(
            "no CONFIG.toml is given; name the configuration of a new run, such as configs/demo.toml, or by "
            "--run the folder of a run that exists"
        )
    runs = Path(os.environ.get("HPC_SWE_RUNS") or "runs").absolute()
    run = RunDir(arguments.run or runs / files[0].stem)
    base = None if files else existing.load(run, trains=True)
    if base:
        existing.enter(run)
    _carry_out(run, configuration.from_words(arguments.config, base, str(run.config)), arguments)


def _replay(run: RunDir, config: RunConfig, arguments: argparse.Namespace) -> None:
    """Start a run that trains on the archive of this one, with its configuration and other values."""
    existing.enter(run)  # relative paths of the new run start there, too
    steps = min(config.steps, archived_steps(run))
    own = ["mode=replay", f"batches.source={run.root}", f"steps={steps}"]
    config = configuration.from_words([*own, *arguments.key], config, str(run.config))
    _carry_out(RunDir(arguments.out), config, arguments)


def _carry_out(run: RunDir, config: RunConfig, arguments: argparse.Namespace) -> None:
    plan = plan_start(run, config)
    if arguments.dry_run:
        preview.show(plan, full=arguments.full)
        checks.require(plan)
        return
    print_result(run, carry_out(plan, upgrade=arguments.upgrade))
    if arguments.wait is None:
        return
    try:
        watch(run, existing.load(run), arguments.wait)  # as it was made: epochs are steps there
    except (DeadlineError, KeyboardInterrupt):
        print(left(run, config), file=sys.stderr)
        raise


def _list_keys(arguments: argparse.Namespace) -> None:
    from hpc_swe.config import keys  # imported here, since it imports every plugin

    found = keys.listed(arguments.word)
    if not found:
        names = [key.name for key in keys.listed()]
        raise ConfigError(f"no key has {arguments.word!r}{cli.suggestion(arguments.word, names)}")
    print("\n".join(keys.markdown(found) if arguments.markdown else keys.as_lines(found)))


def _tick(run: RunDir, config: RunConfig, arguments: argparse.Namespace) -> None:
    existing.require_original(run)
    sharing.take_umask(run)
    create.note_place(run)
    print_result(run, submit.tick(run, config))


def _stop(run: RunDir, config: RunConfig, arguments: argparse.Namespace) -> None:
    existing.require_original(run)
    print(f"{run.root}: {stop(run, config, now=arguments.now)}")


def _export(run: RunDir, config: RunConfig, arguments: argparse.Namespace) -> None:
    version = results.choose(run, config, arguments.version)
    results.export(run, version, arguments.out)
    print(f"{arguments.out}: {version.name} of {run.root}")


def _serve(run: RunDir, config: RunConfig, arguments: argparse.Namespace) -> None:
    version = results.choose(run, config, arguments.version)
    print(results.serving(config, run.weight(version), f"{run.root.name}-{version.name}"))


def _clean(run: RunDir, config: RunConfig, arguments: argparse.Namespace) -> None:
    known = {part.name: part for part in results.leftovers(run, config)}
    if unknown := [name for name in arguments.parts if name not in known]:
        raise ConfigError(f"{unknown[0]!r} is no part of a run; known: {', '.join(known)}")
    if arguments.parts:
        existing.require_original(run)
        results.delete(run, config, [known[name] for name in arguments.parts])
    tables.show(tables.console, results.overview(results.leftovers(run, config)))


def _compare(run: RunDir, config: RunConfig, arguments: argparse.Namespace) -> None:
    """Print each key that differs; relative paths start where each run was started."""
    other = RunDir(arguments.other)
    theirs = existing.load(other)
    before, after = (atomic.get(each.manifest, RunManifest) for each in (run, other))
    with suppress(ConfigError):  # the folder may be gone, and what relative paths name with it
        existing.enter(other)
    found = configuration.changes(config, theirs, Path(before.folder))
    if before.model_sha256 == after.model_sha256:
        found.pop("model", None)
    if before.commit != after.commit:
        found["commit"] = f"commit of the code: {before.commit} -> {after.commit}"
    print("\n".join(found.values()) or "no key differs")


ACTS = {
    "tick": _tick,
    "stop": _stop,
    "replay": _replay,
    "export": _export,
    "serve": _serve,
    "clean": _clean,
    "compare": _compare,
}
"""Verb for a run that exists -> what it does."""


@cli.command
def main() -> None:
    """Do what the verb says."""
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    parser, verbs = _parser()
    verb, arguments = cli.parse_verb(verbs, sys.argv[1:], parser)
    if verb == "start":
        _start(arguments)
    elif verb == "keys":
        _list_keys(arguments)
    else:
        run = RunDir(arguments.run)
        ACTS[verb](run, existing.load(run), arguments)


if __name__ == "__main__":
    main()
