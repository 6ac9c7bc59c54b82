"""Start, continue and stop a run: python -m hpc_swe.launch start | tick | stop. See docs/operations.md."""

import argparse
import logging
import os
import sys
from pathlib import Path

from hpc_swe.base import cli
from hpc_swe.base.errors import ConfigError, DeadlineError
from hpc_swe.base.rundir import RunDir
from hpc_swe.config import config as configuration
from hpc_swe.launch import checks, create, existing, preview, submit
from hpc_swe.launch.control import carry_out, print_result, stop
from hpc_swe.launch.plan import plan_start
from hpc_swe.launch.watch import left, watch


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
    add("--wait", type=float, metavar="SECONDS", help="tick until the run has finished, at most so long")
    add("--dry-run", action="store_true", help="print costs and batch scripts; make nothing")
    add("--full", action="store_true", help="let --dry-run print the merged configuration, too")
    add(
        "--upgrade", action="store_true", help="continue with this code, not with the code of the run's start"
    )
    again = cli.verb(verbs, "tick", "submit the jobs that are missing; cron calls this", "runs/mine")
    again.add_argument("run", type=cli.folder, help="folder of the run")
    does = "list the keys of a configuration, with type, default and meaning"
    listed = cli.verb(verbs, "keys", does, "groups", "policy.lora")
    listed.add_argument("prefix", nargs="?", default="", help="start of the keys' names, for example groups")
    listed.add_argument("--markdown", action="store_true", help="in the form of docs/configuration.md")
    end = cli.verb(verbs, "stop", "let jobs finish their work and exit", "runs/mine", "runs/mine --now")
    end.add_argument("run", type=cli.folder, help="folder of the run")
    end.add_argument("--now", action="store_true", help="let jobs exit at once, then cancel what is left")
    return parser, dict(verbs.choices)


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
    config = configuration.from_words(arguments.config, base, str(run.config))
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

    found = keys.listed(arguments.prefix)
    if not found:
        names = [key.name for key in keys.listed()]
        raise ConfigError(f"no key starts with {arguments.prefix!r}{cli.suggestion(arguments.prefix, names)}")
    print("\n".join(keys.markdown(found) if arguments.markdown else keys.as_lines(found)))


@cli.command
def main() -> None:
    """Do what the verb says."""
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    parser, verbs = _parser()
    verb, arguments = cli.parse_verb(verbs, sys.argv[1:], parser)
    if verb == "start":
        _start(arguments)
        return
    if verb == "keys":
        _list_keys(arguments)
        return
    run = RunDir(arguments.run)
    config = existing.load(run)
    existing.require_original(run)
    if verb == "tick":
        create.note_place(run)
        print_result(run, submit.tick(run, config))
    else:
        print(f"{run.root}: {stop(run, config, now=arguments.now)}")


if __name__ == "__main__":
    main()
