"""Measure how new weights reach an engine: python -m hpc_swe.benchmarks.weights --shape 8B.

A learner on the first GPUs publishes versions into a run's folder, and an engine on the last ones serves
requests and loads them: deltas, a full version, and that one once more by vLLM's own `reload_weights`. Each
row has the seconds from the end of the optimizer step to the first token of the new weights, the longest gap
between two answers to requests of one token, four of which are always under way, and what long requests lost
by it. A second table says where the time went, and a third how far the learner's log-probabilities of the
engine's answers are from the engine's. Random weights need no files.
"""

import argparse
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from hpc_swe.base import cli, loader, tables
from hpc_swe.base.errors import ConfigError, EngineError
from hpc_swe.base.records import WeightManifest, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import folders
from hpc_swe.cluster import gpus
from hpc_swe.config import config
from hpc_swe.models import shapes
from hpc_swe.view.benchmarks import gap, limits, stages
from hpc_swe.view.benchmarks.engine_side import EngineSide
from hpc_swe.view.benchmarks.hop import FIRST, HopFigures, HopPlan, Published, await_version, kv_of, serving
from hpc_swe.view.benchmarks.hop_table import GB, HopRow, table
from hpc_swe.view.benchmarks.ranks import run_ranks
from hpc_swe.view.benchmarks.stages import Moment
from hpc_swe.view.benchmarks.traffic import PROBES, Load, Traffic

RELOADED = "reload_weights of vLLM"
ENGINE = {
    "type": "vllm",
    "max_num_seqs": 32,
    "max_model_len": 4096,
    "dtype": "auto",
}
GPU_LOAD = Load(clients=8, prompt=2000, answer=200)
CPU_LOAD = Load(clients=2, prompt=64, answer=32)


@dataclass(frozen=True)
class Window:
    """Say when one change of weights passed its stages, in seconds since the epoch."""

    began: float
    paused: float
    """When requests were paused."""
    loaded: float
    resumed: float
    """When requests went on."""
    next_began: float
    """When the next change began, or the measurement ended."""


@dataclass(frozen=True)
class MeasuredHops:
    """Hold all that the benchmark shows."""

    figures: HopFigures
    rows: dict[str, HopRow]
    moments: list[Moment]
    fallbacks: list[str]
    """Why the engine loads weights in a slower way; empty where it does not."""

    def windows(self) -> list[tuple[Published, str, float]]:
        """Return each version, its name, and the time at which the next one was trained."""
        versions = self.figures.versions
        ends = [each.trained for each in versions[1:]] + [float("inf")]
        return [(v, _name(v, v is versions[-1]), end) for v, end in zip(versions, ends, strict=True)]


def _name(published: Published, is_full: bool) -> str:
    kind = "full version" if is_full else f"delta {published.version.step}"
    return f"{kind}, {kv_of(published.version)}"


def _size(run: RunDir, version: WeightVersion) -> int:
    manifest = folders.manifest(run.weight(version), WeightManifest)
    return sum(info.size for info in manifest.files.values())


def _reload(traffic: Traffic, folder: Path) -> tuple[float, float, float]:
    """Let vLLM reload a folder by itself, as it would be used without this project.

    Return when that began, when its weights were loaded, and when it had ended.
    """
    moments = [time.time()]
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
            moments.append(time.time())
    return moments[0], moments[2], moments[-1]


def measure(plan: HopPlan, folder: Path, load: Load) -> MeasuredHops:
    """Run both sides, and return what was found; raise EngineError when a side failed."""
    run, out, path = RunDir(Path(plan.run)), folder / "found.json", folder / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    on_gpu = plan.policy["device"] == "gpu"
    words = ("learner", str(path), str(out))
    with (
        EngineSide(plan, path, folder / "engine.log") as engine,
        ThreadPoolExecutor(PROBES + load.clients + 1) as pool,
        _stopped_by_errors(run),
    ):
        learner = pool.submit(
            run_ranks,
            plan.ranks,
            "hpc_swe.view.benchmarks.hop",
            words,
            plan.timeout_s,
            gpu=on_gpu,
            keep=folder / "learner.log",
        )
        _await(lambda: run.weight(FIRST).exists(), learner, engine)
        engine.start()
        _await(lambda: serving(run) is not None, learner, engine)
        url = await_version(run, FIRST, plan.timeout_s).url
        traffic = Traffic(loader.load("engines", plan.engine), url, run.token.read_text(), load)
        clients = [pool.submit(traffic.probe, seed) for seed in range(PROBES)]
        clients += [pool.submit(traffic.work, PROBES + seed) for seed in range(load.clients)]
        try:
            _await(out.exists, learner, engine, clients)
            figures = msgspec.json.decode(out.read_bytes(), type=HopFigures)
            time.sleep(2 * plan.settle_s)  # answers of the last version
            found = MeasuredHops(figures, {}, engine.moments(), engine.fallbacks())
            found.rows.update(_rows(run, traffic, found))
            found.rows.update(_reloaded(plan, traffic, found, clients))
        finally:
            traffic.is_over.set()
        if plan.reloads and RELOADED not in found.rows:  # an engine that failed to reload answers no more
            run.stop.touch()
            return found
        for client in clients:
            client.result()
    return found


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
    engine: EngineSide,
    clients: Sequence["Future[None]"] = (),
) -> None:
    """Wait; raise EngineError when a side or a client has failed, or the engine refused a version."""
    while not is_done():
        if refusal := stages.failure(engine.moments()):
            raise EngineError(refusal)
        for client in clients:
            if client.done():
                client.result()
        if learner.done() and (failure := learner.result()):
            raise EngineError(
                f"the learner's side failed: {failure}; the engine's side: {engine.last_lines()}"
            )
        engine.require_alive()
        time.sleep(0.05)


def _rows(run: RunDir, traffic: Traffic, found: MeasuredHops) -> dict[str, HopRow]:
    """Return the rows of all versions."""
    rows = {}
    for published, name, until in found.windows():
        ends = stages.of_version(found.moments, published.trained, until)
        rows[name] = _row(
            traffic,
            Window(
                published.trained, ends["paused"], ends["swapped"], ends["resumed"], min(until, time.time())
            ),
            published.published - published.trained,
            _size(run, published.version),
            before_s=0.0,
            clears=kv_of(published.version) == "recompute",
        )
    return rows


def _reloaded(
    plan: HopPlan, traffic: Traffic, found: MeasuredHops, clients: Sequence["Future[None]"]
) -> dict[str, HopRow]:
    """Return the row of the last version loaded once more by vLLM itself; none if that failed.

    A large model may take longer than clients wait for an answer. What was measured before is kept.
    """
    run, last, rows = RunDir(Path(plan.run)), found.figures.versions[-1], dict[str, HopRow]()
    written_s, size = last.published - last.trained, _size(run, last.version)
    try:
        for _ in range(plan.reloads):
            time.sleep(plan.settle_s)
            began, loaded, resumed = _reload(traffic, run.weight(last.version))
            time.sleep(2 * plan.settle_s)
            for client in (each for each in clients if each.done()):
                client.result()
            window = Window(began, began, loaded, resumed, time.time())
            rows[RELOADED] = _row(traffic, window, written_s, size, before_s=written_s, clears=True)
    except (OSError, EngineError) as error:
        tables.say(f"{RELOADED}: {error}; not compared")
        return {}
    return rows


def _row(
    traffic: Traffic,
    window: Window,
    published_s: float,
    written: int,
    *,
    before_s: float,
    clears: bool,
) -> HopRow:
    """Return the figures of one change of weights; `before_s` seconds passed before it began."""
    lost, tokens = traffic.cost(window.paused, window.resumed)
    return HopRow(
        before_s + traffic.first_after(window.loaded) - window.began,
        published_s,
        traffic.longest_gap(window.began, window.next_began),
        lost,
        tokens if clears else 0.0,
        written,
    )


def _stages(found: MeasuredHops) -> Table:
    ends, workers, starts = {}, {}, {}
    for published, name, until in found.windows():
        short, starts_at = name.replace("version, ", ""), published.trained
        ends[short] = stages.of_version(found.moments, starts_at, until)
        ends[short]["first token"] = starts_at + found.rows[name].first_s
        workers[short] = stages.of_workers(found.moments, starts_at, until)
        starts[short] = starts_at
    return stages.table(ends, workers, starts)


def _tables(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables [policy] and [engine]; raise ConfigError for words of other tables."""
    device = "gpu" if gpus.usable(os.environ) else "cpu"
    found: dict[str, dict[str, Any]] = {
        "policy": {"type": "megatron", "dtype": "bfloat16", "device": device, "delta_base": "gpu"},
        "engine": ENGINE | {"device": device},
    }
    if device == "cpu":
        found["policy"] |= {"delta_base": "host"}
        found["engine"] |= {"enforce_eager": True, "kv_cache_bytes": 1 << 27, "max_model_len": 256}
    for word in words:
        _, tree = config.parse_override(word)
        if tree.keys() - found.keys():
            raise ConfigError(f"{word!r}: this benchmark takes keys of [policy] and [engine] only")
        for name, keys in tree.items():
            found[name] |= keys
    loader.load("policies", found["policy"])
    loader.load("engines", found["engine"])
    return found["policy"], found["engine"]


def _require_room(max_model_len: int, load: Load) -> None:
    """Raise ConfigError for an engine too short for a request; long answers that it cuts would not count."""
    longest = load.prompt + load.answer
    if max_model_len < longest:
        raise ConfigError(
            f"engine.max_model_len = {max_model_len}: this benchmark's requests have up to {longest} tokens; "
            "set that at least"
        )


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
    examples = ("--shape tiny --deltas 2", "--shape 8B engine.gpu_memory_share=0.8")
    what = "Measure how soon an engine serves new weights."
    parser = cli.parser("hpc_swe.benchmarks.weights", what, *examples)
    parser.add_argument("overrides", nargs="*", metavar="TABLE.KEY=VALUE", help="key of [policy] or [engine]")
    parser.add_argument(
        "--shape",
        default="tiny",
        help=f"sizes of the model: {', '.join(shapes.SHAPES)}; or a model's folder",
    )
    parser.add_argument(
        "--ranks", type=cli.number(int, 1), default=1, help="processes of the learner, one for each GPU"
    )
    parser.add_argument(
        "--deltas", type=cli.number(int, 0), default=4, help="publish so many versions as deltas"
    )
    parser.add_argument(
        "--lr", type=cli.number(float, 0), default=1e-6, help="move every value by this learning rate"
    )
    parser.add_argument(
        "--settle-s",
        type=cli.number(float, 0),
        default=2.0,
        help="wait so long between a swap and the next step",
    )
    parser.add_argument(
        "--answers",
        type=cli.number(int, 0),
        default=0,
        help="compare log-probabilities of so many answers of the last version with the learner's",
    )
    parser.add_argument(
        "--reloads",
        type=cli.number(int, 0),
        default=2,
        help="let vLLM load the last version so often itself; the first time warms up",
    )
    parser.add_argument(
        "--timeout-s", type=cli.number(float, 1), default=280.0, help="end the benchmark after so long"
    )
    parser.add_argument(
        "--folder", default="", help="a new folder for the run (default: in memory, and removed)"
    )
    arguments = cli.parse(parser)
    _print(arguments)


def _print(arguments: argparse.Namespace) -> None:
    policy, engine = _tables(arguments.overrides)
    load = GPU_LOAD if policy["device"] == "gpu" else CPU_LOAD
    _require_room(engine["max_model_len"], load)
    if policy["device"] == "gpu":
        gpus.require("benchmark", arguments.ranks, os.environ)
    with _folder(arguments.folder) as folder:
        model = shapes.find_or_write(arguments.shape, folder / "model")
        run = RunDir(folder / "run")
        run.make()
        run.token.write_text("benchmark")
        plan = HopPlan(
            run=str(run.root),
            model=str(model),
            policy=policy,
            engine=engine,
            ranks=arguments.ranks,
            deltas=arguments.deltas,
            lr=arguments.lr,
            settle_s=arguments.settle_s,
            timeout_s=arguments.timeout_s,
            answers=arguments.answers,
            reloads=arguments.reloads,
        )
        found = measure(plan, folder, load)
        whole = _size(run, FIRST)
    tables.say(limits.describe(found.figures.rates))
    tables.say(f"one thread writes {found.figures.disk_bytes / GB:.1f} GB/s into {folder.parent}")
    tables.show(tables.console, table(found.rows, whole), _stages(found))
    for text in (moment.text for moment in found.moments if moment.word == "compared"):
        tables.say(text)
    for text in found.fallbacks:
        tables.say(text)
    if found.figures.gaps:
        tables.show(tables.console, gap.table(found.figures.gaps))


if __name__ == "__main__":
    main()
