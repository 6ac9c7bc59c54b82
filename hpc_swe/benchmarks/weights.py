"""Measure how new weights reach an engine: python -m hpc_swe.benchmarks.weights --shape 8B.

A learner on one GPU publishes versions into a run's folder, and an engine on another GPU serves requests and
loads them: deltas, a full version, and that one once more by vLLM's own `reload_weights`. Each row has the
seconds from the end of the optimizer step to the first token of the new weights, and the longest gap between
two answers to requests of one token, four of which are always under way. Random weights need no files.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from hpc_swe import cli, config, gpus, plugins, tables
from hpc_swe.benchmarks import limits, shapes
from hpc_swe.benchmarks.hop import FIRST, HopFigures, HopPlan, await_version, serving
from hpc_swe.benchmarks.ranks import last_line, run_ranks
from hpc_swe.errors import ConfigError, EngineError
from hpc_swe.plugins.engines.base import Engine
from hpc_swe.processes import die_with_parent
from hpc_swe.records import Sampling, WeightManifest, WeightVersion
from hpc_swe.rundir import RunDir
from hpc_swe.store import folders

GB = 1e9
COLUMNS = ("first token s", "published s", "pause s", "GB written", "% of all bytes")
CLIENTS = 4
RELOADS = 2
ENGINE = {"type": "vllm", "max_model_len": 1024, "max_num_seqs": 16, "dtype": "auto"}


@dataclass
class Traffic:
    """Ask an engine for one token again and again, and note when answers come."""

    engine: Engine
    url: str
    token: str
    is_over: threading.Event = field(default_factory=threading.Event)
    answers: list[tuple[float, WeightVersion | None]] = field(default_factory=list)
    """Seconds since the epoch, and the version where the release of vLLM stamps tokens."""

    def ask(self, seed: int) -> None:
        """Ask until it is over; raise EngineError when an answer cannot be trusted."""
        rng = np.random.default_rng(seed)
        while not self.is_over.is_set():
            prompt = rng.integers(10, 300, 16).astype(np.int32)
            found = self.engine.generate(self.url, self.token, prompt, Sampling(max_tokens=1), 60.0)
            self.answers.append((time.time(), found.spans[-1][2] if found.spans else None))

    def swap(self, began: float, version: WeightVersion | None) -> tuple[float, float]:
        """Return the seconds from `began` to the first answer of the new weights, and the longest gap.

        Where tokens carry no stamp, the first answer after the longest gap is the new weights' first.
        """
        times = sorted(self.answers)
        after = [(b - a, b) for (a, _), (b, _) in zip(times, times[1:], strict=False) if b > began]
        if not after:
            raise EngineError(f"no answer came from {self.url} after new weights were made")
        gap, end = max(after)
        stamped = [moment for moment, stamp in times if stamp == version and moment > began]
        return (stamped[0] if stamped and version else end) - began, gap


@dataclass(frozen=True)
class HopRow:
    """Hold the figures of one way to new weights."""

    first_s: float
    published_s: float
    pause_s: float
    written: int


def _size(run: RunDir, version: WeightVersion) -> int:
    manifest = folders.manifest(run.weight(version), WeightManifest)
    return sum(info.size for info in manifest.files.values())


def _reload(traffic: Traffic, folder: Path) -> tuple[float, float]:
    """Let vLLM reload a folder by itself, as it would be used without this project."""
    began = time.time()
    calls: list[tuple[str, dict[str, object]]] = [
        ("/pause?mode=keep&clear_cache=true", {}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}),
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/resume", {}),
    ]
    for path, body in calls:
        headers = {"Authorization": f"Bearer {traffic.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(traffic.url + path, msgspec.json.encode(body), headers)
        with urllib.request.urlopen(request, timeout=300.0):
            pass
    time.sleep(0.5)
    return traffic.swap(began, None)


def measure(plan: HopPlan, folder: Path) -> tuple[HopFigures, dict[str, HopRow]]:
    """Run both sides, and return what was found; raise EngineError when a side failed."""
    run, out, path = RunDir(Path(plan.run)), folder / "found.json", folder / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    on_gpu = plan.policy["device"] == "gpu"
    words = ("learner", str(path), str(out))
    with (
        _Engine(plan, path, folder / "engine.log") as engine,
        ThreadPoolExecutor(CLIENTS + 1) as pool,
        _stopped_by_errors(run),
    ):
        learner = pool.submit(run_ranks, 1, "hpc_swe.benchmarks.hop", words, plan.timeout_s, gpu=on_gpu)
        _await(lambda: run.weight(FIRST).exists(), learner, engine)
        engine.start()
        _await(lambda: serving(run) is not None, learner, engine)
        url = await_version(run, FIRST, plan.timeout_s).url
        traffic = Traffic(plugins.load("engines", plan.engine), url, run.token.read_text())
        clients = [pool.submit(traffic.ask, seed) for seed in range(CLIENTS)]
        try:
            _await(out.exists, learner, engine, clients)
            found = msgspec.json.decode(out.read_bytes(), type=HopFigures)
            rows = _rows(run, traffic, found)
        finally:
            traffic.is_over.set()
        for client in clients:
            client.result()
    return found, rows


@contextmanager
def _stopped_by_errors(run: RunDir) -> Iterator[None]:
    """Stop both sides after an error; else the pool would wait until the learner's time is over."""
    try:
        yield
    except BaseException:
        run.stop.touch()
        raise


def _await(
    is_done: Callable[[], bool],
    learner: "Future[str]",
    engine: "_Engine",
    clients: Sequence["Future[None]"] = (),
) -> None:
    """Wait; raise EngineError when one of the sides, or a client, has ended with an error."""
    while not is_done():
        for client in clients:
            if client.done():
                client.result()
        if learner.done() and (failure := learner.result()):
            raise EngineError(
                f"the learner's side failed: {failure}; the engine's side: {engine.last_lines()}"
            )
        engine.require_alive()
        time.sleep(0.02)


def _rows(run: RunDir, traffic: Traffic, found: HopFigures) -> dict[str, HopRow]:
    time.sleep(0.5)  # answers of the last version
    rows = {}
    ends = [each.trained for each in found.versions[1:]] + [time.time()]
    everything = traffic.answers
    for each, end in zip(found.versions, ends, strict=True):
        traffic.answers = [answer for answer in everything if answer[0] < end]
        first, gap = traffic.swap(each.trained, each.version)
        is_full = each is found.versions[-1]
        name = "full version" if is_full else f"delta {each.version.step}"
        rows[name] = HopRow(first, each.published - each.trained, gap, _size(run, each.version))
    traffic.answers = everything
    last = found.versions[-1]
    for _ in range(RELOADS):  # the first one also warms up what the engine has not used yet
        traffic.answers.clear()
        time.sleep(0.5)
        first, gap = _reload(traffic, run.weight(last.version))
    written = last.published - last.trained
    rows["reload_weights of vLLM"] = HopRow(written + first, written, gap, _size(run, last.version))
    return rows


class _Engine:
    """Run the engine's side inside the `with` block."""

    def __init__(self, plan: HopPlan, path: Path, log: Path) -> None:
        self._plan, self._path, self._log = plan, path, log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "_Engine":
        return self

    def start(self) -> None:
        """Start it on the last GPU that this process sees; the learner's side has the first one."""
        visible = gpus.usable(os.environ)
        shown = {gpus.VISIBLE: visible[-1]} if self._plan.policy["device"] == "gpu" and visible else {}
        command = [sys.executable, "-m", "hpc_swe.benchmarks.hop", "engine", str(self._path)]
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                command, env={**os.environ, **shown}, stdout=out, stderr=out, preexec_fn=die_with_parent
            )

    def require_alive(self) -> None:
        """Raise EngineError with its last line if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise EngineError(f"the engine's side ended: {self.last_lines()}")

    def last_lines(self) -> str:
        """Return the last lines of the supervisor and of vLLM."""
        logs = [self._log, *RunDir(Path(self._plan.run)).logs("inference").glob("*.log")]
        return " / ".join(last_line([log.read_text(errors="replace")]) for log in logs if log.exists())

    def __exit__(self, *_: object) -> None:
        RunDir(Path(self._plan.run)).stop.touch()
        if self._process is not None:
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()


def table(rows: dict[str, HopRow], whole: int) -> Table:
    """Return the table; the mean of the deltas, which leaves out the first, stands in a row of its own."""
    shown = dict(rows)
    deltas = [row for name, row in rows.items() if name.startswith("delta")][1:]
    if deltas:
        shown["mean of deltas after the first"] = HopRow(
            fmean(row.first_s for row in deltas),
            fmean(row.published_s for row in deltas),
            fmean(row.pause_s for row in deltas),
            round(fmean(row.written for row in deltas)),
        )
    found = tables.table(("new weights by",), COLUMNS)
    for name, row in shown.items():
        seconds = (f"{value:.3f}" for value in (row.first_s, row.published_s, row.pause_s))
        found.add_row(name, *seconds, f"{row.written / GB:.3f}", f"{100 * row.written / whole:.2f}")
    return found


def _tables(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables [policy] and [engine]; raise ConfigError for words of other tables."""
    device = "gpu" if gpus.usable(os.environ) else "cpu"
    found: dict[str, dict[str, Any]] = {
        "policy": {"type": "megatron", "dtype": "bfloat16", "device": device, "delta_base": "gpu"},
        "engine": ENGINE | {"device": device},
    }
    if device == "cpu":
        found["policy"] |= {"delta_base": "host"}
        found["engine"] |= {"enforce_eager": True, "kv_cache_bytes": 1 << 27}
    for word in words:
        _, tree = config.parse_override(word)
        if tree.keys() - found.keys():
            raise ConfigError(f"{word!r}: this benchmark takes keys of [policy] and [engine] only")
        for name, keys in tree.items():
            found[name] |= keys
    plugins.load("policies", found["policy"])
    plugins.load("engines", found["engine"])
    return found["policy"], found["engine"]


@contextmanager
def _folder(given: str) -> Iterator[Path]:
    """Yield a new folder; one in memory is removed afterwards, one that was given is left for people."""
    if given:
        Path(given).mkdir(parents=True)
        yield Path(given)
        return
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="hpc_swe-benchmark-", dir=place) as name:
        yield Path(name)


@cli.command
def main() -> None:
    """Print the table."""
    parser = cli.parser("benchmarks.weights", "Measure how new weights reach an engine.")
    parser.add_argument("overrides", nargs="*", metavar="TABLE.KEY=VALUE", help="keys of [policy], [engine]")
    parser.add_argument("--shape", default="tiny", help=f"{', '.join(shapes.SHAPES)} (default: tiny)")
    parser.add_argument("--deltas", type=int, default=4, help="versions that are deltas")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate")
    parser.add_argument(
        "--settle-s", type=float, default=1.0, help="seconds between a swap and the next step"
    )
    parser.add_argument("--timeout-s", type=float, default=280.0, help="limit of the whole benchmark")
    parser.add_argument(
        "--folder", default="", help="a new folder for the run (default: in memory, and removed)"
    )
    arguments = cli.parse(parser)
    _print(arguments)


def _print(arguments: argparse.Namespace) -> None:
    policy, engine = _tables(arguments.overrides)
    if policy["device"] == "gpu":
        gpus.require("benchmark", 1, os.environ)
    with _folder(arguments.folder) as folder:
        model = shapes.write_config(arguments.shape, folder / "model")
        run = RunDir(folder / "run")
        run.make()
        run.token.write_text("benchmark")
        plan = HopPlan(
            run=str(run.root),
            model=str(model),
            policy=policy,
            engine=engine,
            deltas=arguments.deltas,
            lr=arguments.lr,
            settle_s=arguments.settle_s,
            timeout_s=arguments.timeout_s,
        )
        found, rows = measure(plan, folder)
        whole = _size(run, FIRST)
    tables.say(limits.describe(found.rates))
    tables.say(f"one thread writes {found.disk_bytes / GB:.1f} GB/s into {folder.parent}")
    tables.show(tables.console, table(rows, whole))


if __name__ == "__main__":
    main()
