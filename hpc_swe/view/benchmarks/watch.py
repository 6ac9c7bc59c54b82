"""Watch engines and GPUs while runs go: python -m hpc_swe.benchmarks.watch FOLDER --out FILE.

It asks the engines of every run below the folder how many requests they have, ten times a second, and
nvidia-smi how busy each GPU is, until it is ended. `benchmarks.loop --watched FILE` then tells how long each
was idle. Engines that runs only attach to may not count their requests.
"""

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, TextIO
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from hpc_swe.base import cli, tables
from hpc_swe.base.errors import CorruptRecord, StorageError
from hpc_swe.base.records import EndpointTable
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.cluster.processes import printed
from hpc_swe.models.engines.base import LOAD

LOOK_S = 0.1
SILENT_S = 60.0
"""Longest wait for a line of nvidia-smi, whose first one takes seconds where no process uses a GPU."""
SMI = ("--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-lms", "200")


class EngineLook(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what one look at an engine saw."""

    time: float
    """In seconds since 1970."""
    run: str
    """Folder of the engine's run."""
    engine: str
    requests: int
    """Requests that the engine has taken and not answered."""


class GpuLook(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what one look at a GPU saw."""

    time: float
    """In seconds since 1970."""
    gpu: str
    busy: float
    """Share of the last moments in which a kernel ran on the GPU."""
    gib: float
    """Memory in use on the GPU."""


Look = EngineLook | GpuLook


def read(path: Path) -> list[Look]:
    """Return the looks of a file; a line that is torn is left out."""
    found: list[Look] = []
    for line in path.read_bytes().splitlines():
        try:
            values = msgspec.json.decode(line, type=dict)
            kind: type[Any] = GpuLook if values.get("gpu") else EngineLook
            found.append(msgspec.convert(values, kind))
        except msgspec.DecodeError:
            continue
    return found


def engines(run: RunDir) -> Iterator[EngineLook]:
    """Look at the engines that serve a run; one that does not answer is left out."""
    try:
        table, token = atomic.get(run.endpoints, EndpointTable), run.token.read_text(encoding="ascii").strip()
    except (OSError, CorruptRecord, StorageError):
        return
    for endpoint in table.endpoints:
        try:
            count = _requests(endpoint.url, token)
        except (OSError, HTTPException, msgspec.DecodeError):
            continue
        yield EngineLook(time=time.time(), run=str(run.root.resolve()), engine=endpoint.owner, requests=count)


def _requests(url: str, token: str) -> int:
    request = Request(f"{url}{LOAD}", headers={"Authorization": f"Bearer {token}"})
    with build_opener(ProxyHandler({})).open(request, timeout=2.0) as answer:
        return msgspec.json.decode(answer.read(), type=int)


def gpu(line: str) -> GpuLook:
    """Return what a line of nvidia-smi says; raise ValueError if it gives no numbers."""
    index, busy, mib = (part.strip() for part in line.split(","))
    return GpuLook(time=time.time(), gpu=index, busy=float(busy) / 100, gib=float(mib) / 1024)


class _File:
    """Append lines from several threads."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._lock = file, threading.Lock()

    def write(self, look: Look) -> None:
        with self._lock:
            self._file.write(msgspec.json.encode(look).decode() + "\n")
            self._file.flush()


def follow_gpus(program: str, write: Callable[[GpuLook], None], silent_s: float = SILENT_S) -> str:
    """Write a look for each line of nvidia-smi until it ends, or prints nothing for `silent_s`; say which."""
    why = "has ended"
    try:
        with printed([program, *SMI], silent_s) as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # of words, or of a GPU whose values are unknown
                    write(gpu(line.decode(errors="replace")))
    except subprocess.CalledProcessError as error:
        why = f"has ended with exit code {error.returncode}"
    except subprocess.TimeoutExpired:
        why = f"has printed nothing for {silent_s:g} s"
    return f"GPUs are watched no more: nvidia-smi {why}; see what it says in a shell, and begin again"


@cli.command
def main() -> None:
    """Watch until a signal ends this process."""
    what = "Watch engines and GPUs while runs work, until Ctrl-C."
    parser = cli.parser("hpc_swe.benchmarks.watch", what, "runs/demo-0 --out watched.jsonl")
    parser.add_argument("folder", type=cli.path, help="folder of the runs, which may begin later")
    parser.add_argument("--out", type=cli.path, required=True, help="file to append to")
    arguments = cli.parse(parser)
    with arguments.out.open("a", encoding="utf-8") as out:
        file = _File(out)
        if program := shutil.which("nvidia-smi"):
            threading.Thread(target=lambda: tables.say(follow_gpus(program, file.write)), daemon=True).start()
        while True:
            began = time.monotonic()
            for manifest in arguments.folder.glob("*/state/endpoints.json"):
                run = RunDir(manifest.parent.parent)
                for look in () if run.finished.exists() else engines(run):
                    file.write(look)
            time.sleep(max(0.0, LOOK_S - (time.monotonic() - began)))


if __name__ == "__main__":
    main()
