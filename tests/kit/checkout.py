"""Where this checkout lies, and how other processes import it and its tests."""

import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / ".cache" / "images"
STAND_INS = ROOT / "tests" / "kit" / "stand_ins"
"""Packages that are imported and not used; for the Python path of who has them not."""
FORK = multiprocessing.get_context("fork")
LIMIT_S = 1500
SHOW_WARNING = warnings.showwarning


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, with the checkout before installed packages."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def typed(
    module: str, *words: object, folder: Path = ROOT, **more: str
) -> "subprocess.CompletedProcess[str]":
    """Return what a command of this checkout did and said, typed in a folder.

    A fork of this process is the command, since it has most of what that would import. So it does not show
    which imports are missing, what reads PYTHON*, or how an interpreter ends; `started` does.
    """
    line = [module, *map(str, words)]
    with (
        tempfile.TemporaryFile("w+", errors="surrogateescape") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        child = FORK.Process(target=_be, args=(line, folder, environment(**more), output, errors))
        child.start()
        child.join(LIMIT_S)
        if child.exitcode is None:
            child.kill()
            raise TimeoutError(f"{line} runs for longer than {LIMIT_S} s")
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(line, child.exitcode, output.read(), errors.read())


def _be(line: list[str], folder: Path, environ: dict[str, str], output: IO[str], errors: IO[str]) -> None:
    """Be a command that an interpreter has just begun to run."""
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    warnings.resetwarnings()  # pytest collects them
    warnings.showwarning = SHOW_WARNING
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = line
    runpy.run_module(line[0], run_name="__main__", alter_sys=True)


def started(
    module: str, *words: object, folder: Path = ROOT, **more: str
) -> "subprocess.CompletedProcess[str]":
    """Return the same of an interpreter of its own, which has imported nothing and reads PYTHON*."""
    line = [sys.executable, "-m", module, *map(str, words)]
    return subprocess.run(
        line, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=LIMIT_S
    )
