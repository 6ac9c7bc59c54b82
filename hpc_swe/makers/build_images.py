"""Build the sandbox images of a run's SWE-bench tasks: python -m hpc_swe.build_images CONFIG...

An image is made from an official one, of a registry or an archive, or by a local recipe that needs neither.
In each the repository holds the task's base commit and nothing younger, and no other file shows the solution.
Existing images are kept, so the same command continues after an interruption.
"""

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import chain
from pathlib import Path

from hpc_swe.agents.sandboxes.base import ImageSandboxes
from hpc_swe.base import cli
from hpc_swe.base.errors import ConfigError, HpcSweError, StorageError
from hpc_swe.base.tables import bars, say
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.makers.images.sources import Built, ImageSource, Pulled
from hpc_swe.makers.images.store import BASE, ImageStore, Problem
from hpc_swe.tasks import task_checks


def wanted(config: RunConfig, count: int | None = None) -> tuple[ImageSandboxes, list[list[Problem]]]:
    """Return the run's sandboxes, and the problems of each image; with `count` of a sample of the tasks.

    Raise what `task_checks.require_one_source` does.
    """
    taskset, sandbox = config.taskset, config.sandbox
    if isinstance(sandbox, ImageSandboxes):
        taken = chain.from_iterable(config.tasks.take(taskset).values())
        tasks = task_checks.sample({task.task_id: task for task in taken if task.base_commit}.values(), count)
        task_checks.require_one_source(tasks)
        references = taskset.references(tasks)
        images: dict[str, list[Problem]] = {}
        for task in tasks:
            images.setdefault(task.image, []).append(Problem(task, references.get(task.task_id, "")))
        if images:
            return sandbox, list(images.values())
    raise ConfigError(
        "images are built for tasks of taskset.type = 'swebench' or 'harbor' with sandbox.type = 'apptainer'"
    )


def run(store: ImageStore, source: ImageSource, images: Sequence[Sequence[Problem]], jobs: int) -> int:
    """Build missing images, given by the problems of each; return the number of failures.

    Raise StorageError, and start no further image, if the disk is full.
    """
    failed = 0
    with bars() as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task("images", total=len(images))
        try:
            futures = {pool.submit(store.build, source, *sharing): sharing for sharing in images}
            for done, future in enumerate(as_completed(futures)):
                tasks = [problem.task.task_id for problem in futures[future]]
                image = futures[future][0].task.image
                try:
                    future.result()
                except StorageError as error:
                    raise StorageError(
                        f"{store.images}: the disk is full ({str(error)[-300:]}). {done - failed} of "
                        f"{len(images)} images exist; free some space and run the same command again"
                    ) from None
                except HpcSweError as error:
                    failed += 1
                    say(f"{tasks[0] if len(tasks) == 1 else f'{len(tasks)} tasks of {image}'}: {error}")
                progress.update(bar, description=image, advance=1)
        finally:
            if isinstance(source, Pulled):
                source.limit.ended.set()
            pool.shutdown(cancel_futures=True)
    return failed


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the options of a recipe for images that needs no registry."""
    recipe = parser.add_argument_group("images from a local recipe")
    recipe.add_argument(
        "--requirements", type=cli.path, help="file of the packages that the tests need, for pip"
    )
    recipe.add_argument("--wheels", type=cli.path, help="folder of wheels (default: pip's configured index)")
    recipe.add_argument("--base", type=cli.path, help=f"unpacked base image (default: {BASE} beside them)")
    recipe.add_argument(
        "--set-up",
        action="append",
        default=[],
        metavar="LINE",
        help="shell line that runs in each image's repository, without network; files that it adds stay",
    )


def recipe(arguments: argparse.Namespace, repository: Path, sandbox: ImageSandboxes) -> Built:
    """Return the source of images that the options of a recipe describe."""
    images = Path(sandbox.images)
    base = arguments.base or images / BASE
    set_up = tuple(arguments.set_up)
    return Built(images, base, repository, arguments.requirements, arguments.wheels, set_up, sandbox)


def _source(arguments: argparse.Namespace, sandbox: ImageSandboxes) -> ImageSource:
    if arguments.source:
        return Pulled(arguments.source, sandbox)
    if not arguments.repository or not arguments.requirements:
        raise ConfigError("name a source of images: --from, or --repository with --requirements")
    return recipe(arguments, arguments.repository, sandbox)


@cli.command
def main() -> int:
    """Build the images that the command line names."""
    os.umask(0o022)
    examples = (
        "configs/swebench.toml --jobs 4 --from 'docker://HOST/swebench/{image}:latest'",
        "configs/swebench.toml --repository clones/django --requirements requirements.txt",
    )
    what = "Build the sandbox images of the tasks that a configuration names, and search them for solutions."
    parser = cli.parser("hpc_swe.build_images", what, *examples)
    parser.add_argument("config", nargs="+", help=cli.CONFIG)
    jobs, count = min(4, os.cpu_count() or 1), cli.number(int, 1)
    parser.add_argument("--jobs", type=count, default=jobs, help="build so many images at a time")
    parser.add_argument("--sample", type=count, metavar="N", help=cli.SAMPLE)
    parser.add_argument("--keep-leaks", action="store_true", help="build images that show the solution, too")
    pulled = parser.add_argument_group("images from existing ones")
    pulled.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="docker://HOST/NAME/{image}:TAG, docker-archive:FILE, oci-archive:FILE, oci:FOLDER or a .sif; "
        "{image} is filled in; docker://{reference} for folders of Harbor",
    )
    parser.add_argument(
        "--repository", type=cli.path, help="git repository with the base commits, for a recipe"
    )
    add_recipe(parser)
    arguments = cli.parse(parser)
    sandbox, images = wanted(configuration.from_words(arguments.config), arguments.sample)
    store = ImageStore(Path(sandbox.images), arguments.keep_leaks)
    source = _source(arguments, sandbox)
    with store.locked():
        failed = run(store, source, images, arguments.jobs)
    say(f"{len(images) - failed} of {len(images)} images are in {store.images}")
    return 1 if failed else 0


if __name__ == "__main__":
    main()
