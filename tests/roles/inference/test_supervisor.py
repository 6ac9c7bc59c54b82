"""The supervisor, with an engine that needs no model."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from hpc_swe.base.errors import EngineError, StuckRun
from hpc_swe.base.records import ProbeScore, Role, Sampling, WeightManifest, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders, weights
from hpc_swe.base.store.lease import Lease
from hpc_swe.cluster.gpu_turns import LearnerTurn
from hpc_swe.models.engines.scripted import FAULTS, SCORE, Scripted, ScriptedReply
from hpc_swe.roles.coordinator.supervision import Supervision
from hpc_swe.roles.inference.supervisor import MAX_REFUSALS
from tests.kit.coordinator_kit import STEPS, make_maintenance, training
from tests.kit.engine_kit import (
    TOKEN,
    await_node,
    is_serving,
    json_replies,
    make_run,
    make_weights,
    node,
    processes,
    publish,
    supervise,
    supervisors,
)
from tests.kit.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow

PROBE = ProbeScore(token_ids=[5, 6, 7], logprobs=[SCORE, SCORE], tolerance=0.01)
WRONG = ProbeScore(token_ids=[5, 6, 7], logprobs=[SCORE, SCORE - 1], tolerance=0.01)
Start = Callable[..., "subprocess.Popen[str]"]


def version(step: int, incarnation: int = 0) -> WeightVersion:
    return WeightVersion(step=step, incarnation=incarnation)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "a run")


@pytest.fixture
def engine(tmp_path: Path) -> Scripted:
    return Scripted(
        replies=json_replies(tmp_path / "replies.json", [ScriptedReply(token_ids=[3], logprobs=[-0.5])]),
        environ={"TEST_MARK": str(tmp_path)},
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_weights(tmp_path / "model")


@pytest.fixture
def start(run: RunDir, engine: Scripted, model: Path, tmp_path: Path) -> Iterator[Start]:
    with supervisors(run, model) as begin:
        yield lambda changed=engine, **inference: begin(changed, **inference)
    until(lambda: not processes(str(tmp_path)), "the end of all processes")


def end(engines: list[int]) -> None:
    """The guard and its engine; the death of one may be that of the other."""
    for pid in engines:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_it_frees_its_gpus_for_the_learner_and_keeps_requests(start, run, model, engine, tmp_path):
    learner = LearnerTurn(tmp_path, 0, DEADLINE_S)
    start(turns=str(tmp_path))
    url = await_node(run, is_serving(version(0))).url
    learner.take()
    assert await_node(run, lambda node: node.state == "sleeping").versions == [version(0)]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(engine.generate, url, TOKEN, np.asarray([1, 2]), Sampling(), 60.0)
        publish(run, model, version(1), probe=PROBE)
        time.sleep(0.5)
        assert not asked.done()
        learner.give()
        assert asked.result(DEADLINE_S).token_ids == [3]
    assert await_node(run, is_serving(version(1))).url == url


@pytest.fixture
def full_nodes(run: RunDir, tmpfs) -> Callable[[], None]:
    """Fills the file system of the run's cells; the next call makes room again."""
    ballast = tmpfs(run.nodes, "size=64k") / ".ballast"

    def change() -> None:
        if ballast.exists():
            ballast.unlink()
            return
        with pytest.raises(OSError, match="No space left"):
            ballast.write_bytes(b"x" * 1_000_000)

    return change


def test_a_full_disk_ends_no_engine_that_goes_to_sleep_or_wakes(full_nodes, start, run, tmp_path):
    """Its cell says so as soon as there is room."""
    learner = LearnerTurn(tmp_path, 0, DEADLINE_S)
    process = start(turns=str(tmp_path))
    url = await_node(run, is_serving(version(0))).url
    full_nodes()
    learner.take()
    full_nodes()
    assert await_node(run, lambda node: node.state == "sleeping").url == url
    full_nodes()
    learner.give()
    time.sleep(1.0)
    full_nodes()
    assert await_node(run, is_serving(version(0))).url == url
    run.stop.touch()
    _, log = process.communicate(timeout=600)
    assert "not shown yet" in log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_stops_asleep_is_replaced(start, run, tmp_path, number):
    learner = LearnerTurn(tmp_path, 0, DEADLINE_S)
    start(turns=str(tmp_path))
    before = await_node(run, is_serving(version(0))).url
    learner.take()
    os.kill(serving_process(str(tmp_path)), number)
    await_node(run, lambda node: node.state == "starting")
    learner.give()
    assert await_node(run, is_serving(version(0))).url != before


def corrupt(stage: Path) -> None:
    file = stage / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def test_deltas_are_loaded_with_what_they_build_on(start, run, model):
    publish(run, model, version(1), probe=PROBE)
    for step in (2, 3):  # an engine that starts has neither, and two may come at once
        publish(run, model, version(step), probe=PROBE, parent=version(step - 1))
    process = start()
    url = await_node(run, is_serving(version(3))).url
    publish(run, model, version(4), damage=corrupt, parent=version(3))
    for step, parent in ((5, 4), (6, 5), (7, 6), (9, 8)):  # more than engines are blamed for
        loops = await_node(run, is_serving(version(3))).loops
        await_node(run, lambda cell, loops=loops: cell.loops > loops + 3)
        publish(run, model, version(step), parent=version(parent))
    loops = await_node(run, is_serving(version(3))).loops
    await_node(run, lambda cell: cell.loops > loops + 3)
    assert await_node(run, is_serving(version(3))).url == url
    assert weights.is_full_wanted(run), "the learner publishes a full version next"
    publish(run, model, version(10), probe=PROBE)
    assert not weights.is_full_wanted(run)
    assert await_node(run, is_serving(version(10))).url == url
    publish(run, model, version(11), probe=PROBE, parent=version(0))  # adapters change the model itself
    assert await_node(run, is_serving(version(11))).url == url
    run.stop.touch()
    _, log = process.communicate(timeout=600)
    assert "refused v000004-i00" in log
    assert "passed over v000009-i00, serving v000003-i00 until a full snapshot" in log


def test_the_token_is_in_no_argument_cell_or_log(start, run, model, tmp_path):
    process = start()
    await_node(run, is_serving(version(0)))
    publish(run, model, version(1), probe=PROBE)
    cell = await_node(run, is_serving(version(1)))
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes(str(tmp_path))]
    run.stop.touch()
    _, log = process.communicate(timeout=600)
    output = "".join(path.read_text() for path in run.logs("inference").iterdir())
    assert len(commands) >= 2
    assert not any(TOKEN.encode() in command for command in commands)
    assert TOKEN not in f"{cell} {log} {output}"


def test_an_engine_keeps_its_weights_while_a_learner_repeats_steps(start, run, model, tmp_path):
    """The requests under way were made for them: older weights would answer later than max_staleness."""
    publish(run, model, version(7))
    process = start()
    await_node(run, is_serving(version(7)))
    engines = [pid for pid in processes(str(tmp_path)) if pid != process.pid]
    publish(run, model, version(3, incarnation=1))
    time.sleep(2.0)
    await_node(run, is_serving(version(7)))
    end(engines)
    await_node(run, lambda node: node.state == "starting")
    await_node(run, is_serving(version(7)))
    publish(run, model, version(7, incarnation=1))
    await_node(run, is_serving(version(7, incarnation=1)))


@pytest.mark.parametrize(("damage", "served"), [(lambda _: None, version(9)), (corrupt, version(8, 1))])
def test_an_engine_that_starts_meanwhile_takes_the_deltas_that_others_keep(start, run, model, damage, served):
    publish(run, model, version(7))
    publish(run, model, version(8), parent=version(7))
    publish(run, model, version(9), parent=version(8), damage=damage)
    publish(run, model, version(8, incarnation=1))
    start()
    loops = await_node(run, is_serving(served)).loops
    await_node(run, lambda cell: cell.loops > loops + 3)
    await_node(run, is_serving(served))
    publish(run, model, version(9, incarnation=1), parent=version(8, incarnation=1))
    await_node(run, is_serving(version(9, incarnation=1)))


@pytest.mark.parametrize("refused", [{"damage": corrupt}, {"probe": WRONG}], ids=["corrupt", "probe"])
def test_a_refused_version_is_passed_over(start, run, model, refused):
    process = start()
    await_node(run, is_serving(version(0)))
    publish(run, model, version(1), **refused)  # type: ignore[arg-type]
    publish_at = time.monotonic()
    while time.monotonic() < publish_at + 1.0:
        cell = node(run)
        assert cell is None or version(0) in cell.versions
        time.sleep(0.02)
    said = "refused v000001-i00, serving v000000-i00"
    await_node(run, lambda node: node.trouble.startswith(said) and is_serving(version(0))(node))
    publish(run, model, version(2), probe=PROBE)
    assert await_node(run, is_serving(version(2))).trouble == ""
    run.stop.touch()
    _, log = process.communicate(timeout=600)
    assert "refused v000001-i00" in log


def test_an_engine_that_cannot_return_from_a_refused_version_is_replaced(start, run, model, engine):
    """It must not answer with the refused weights while its cell names those before."""
    start(msgspec.structs.replace(engine, environ=engine.environ | {FAULTS: "one_way"}))
    first = await_node(run, is_serving(version(0))).url
    publish(run, model, version(1), probe=WRONG)
    await_node(run, lambda node: node.url not in ("", first))
    assert await_node(run, is_serving(version(0))).url != first


def test_a_bad_newest_version_does_not_keep_an_engine_from_starting(start, run, model):
    publish(run, model, version(1), probe=PROBE)
    publish(run, model, version(2), probe=WRONG)
    start()
    await_node(run, is_serving(version(1)))


def test_a_delta_that_two_engines_died_of_is_refused_and_reported(start, run, model, engine, tmp_path):
    """vLLM ends when the digests of what it loaded differ; each new engine would meet the same delta."""
    publish(run, model, version(1), probe=PROBE)
    process = start(changed=msgspec.structs.replace(engine, environ=engine.environ | {FAULTS: "3.0"}))
    await_node(run, is_serving(version(1)))
    publish(run, model, version(2), probe=PROBE, parent=version(1))
    for step in (2, 3):  # the second one is lost in a version that builds on the first one's
        await_node(run, lambda node: node.state == "updating")
        assert not weights.is_full_wanted(run)
        if step == 2:
            publish(run, model, version(3), probe=PROBE, parent=version(2))
        time.sleep(0.2)
        end([pid for pid in processes(str(tmp_path)) if pid != process.pid])
        await_node(run, lambda node: node.state == "starting")
    until(lambda: weights.is_full_wanted(run), "the report")
    await_node(run, is_serving(version(1)))
    publish(run, model, version(4), probe=PROBE)
    await_node(run, is_serving(version(4)))
    run.stop.touch()
    _, log = process.communicate(timeout=600)
    assert "refused v000003-i00: two engines in a row were lost" in log


def serving_process(mark: str) -> int:
    [pid] = [
        pid
        for pid in processes(mark)
        if b"engines.scripted" in (line := Path(f"/proc/{pid}/cmdline").read_bytes()) and b"guard" not in line
    ]
    return pid


@pytest.mark.parametrize("part", ["engine", "guard and engine"])
def test_a_stopped_engine_is_replaced(start, run, tmp_path, part):
    process = start(hang_s=3.0)
    await_node(run, is_serving(version(0)))
    stopped = serving_process(str(tmp_path))
    everything = [pid for pid in processes(str(tmp_path)) if pid != process.pid]
    for pid in [stopped] if part == "engine" else everything:
        os.kill(pid, signal.SIGSTOP)
    await_node(run, lambda node: node.state == "starting")
    await_node(run, is_serving(version(0)))
    assert not set(everything) & set(processes(str(tmp_path)))


@pytest.mark.parametrize("timeout_s", [4.0, 900.0])  # the second one is never waited for
def test_an_engine_that_stops_in_an_update_is_replaced_and_updated(
    start, run, model, engine, tmp_path, timeout_s
):
    process = start(
        changed=msgspec.structs.replace(
            engine, environ=engine.environ | {FAULTS: "2.0"}, load_timeout_s=timeout_s
        )
    )
    await_node(run, is_serving(version(0)))
    publish(run, model, version(1), probe=PROBE)
    await_node(run, lambda node: node.state == "updating")
    os.kill(serving_process(str(tmp_path)), signal.SIGSTOP)
    await_node(run, is_serving(version(1)))
    run.stop.touch()
    _, log = process.communicate(timeout=600)
    assert "refused" not in log


def test_many_refusals_in_a_row_start_the_engine_anew_and_are_said(start, run, model, engine):
    process = start(changed=msgspec.structs.replace(engine, environ=engine.environ | {FAULTS: "0.3"}))
    await_node(run, is_serving(version(0)))
    for step in range(1, MAX_REFUSALS + 1):
        publish(run, model, version(step), probe=WRONG)
        await_node(run, lambda node, step=step: node.refusals >= step)  # type: ignore[misc]
    again = await_node(run, lambda node: node.trouble.startswith("restart 2 of "))
    assert again.refusals > MAX_REFUSALS  # the engine that starts refuses weights before it serves any
    run.stop.touch()
    _, log = process.communicate(timeout=600)
    assert f"weights were refused {MAX_REFUSALS} times in a row" in log


def test_a_run_whose_engine_refuses_all_weights_ends_and_says_why(start, run, model):
    start()
    await_node(run, is_serving(version(0)))
    mode, maintenance = training(run), make_maintenance(run, time.monotonic, beats=1000)
    lease, limits = Lease(run, "coordinator", "1", 30.0), dict.fromkeys(get_args(Role), 1e9)
    watcher = Supervision(lease, run, limits, 3, [*limits], STEPS, 30.0)
    publish(run, model, version(1), probe=WRONG)
    said: set[str] = set()

    def look() -> bool:
        snapshot = maintenance.snapshot()
        progress = mode.iterate(snapshot)
        said.add(progress.waits_for)
        watcher.look(snapshot, progress)
        return False

    with pytest.raises(StuckRun, match=r"given up: every engine refuses new weights, \d times in a row: "):
        until(look, "the end of the run")
    assert any("every engine refuses new weights, 2 times in a row: refused v000001" in each for each in said)
    assert run.stop.exists()


def test_verifying_a_version_is_cut_short_by_an_order_to_end(start, run, model, tmp_path):
    process = start()
    await_node(run, is_serving(version(0)))
    folder = publish(make_run(tmp_path / "elsewhere"), make_weights(tmp_path / "small"), version(1))
    manifest = folders.manifest(RunDir(tmp_path / "elsewhere").weight(version(1)), WeightManifest)
    os.truncate(folder / "model.safetensors", 64 << 30)
    info = msgspec.structs.replace(manifest.files["model.safetensors"], size=64 << 30)
    atomic.put(folder / "MANIFEST.json", msgspec.structs.replace(manifest, files={"model.safetensors": info}))
    folder.rename(run.weight(version(1)))
    await_node(run, lambda node: node.reading == version(1).name)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, None], ids=["TERM", "USR2", "STOP"])
def test_ends_cleanly_when_told(start, run, tmp_path, number):
    process = start()
    await_node(run, is_serving(version(0)))
    process.send_signal(number) if number is not None else run.stop.touch()
    assert process.wait(180) == 0
    assert not processes(str(tmp_path))
    assert node(run) is None


def test_drain_waits_for_the_rollout_workers(start, run):
    process = start()
    await_node(run, is_serving(version(0)))
    with Lease(run, "rollout", "test", 0.1):
        run.drain.touch()
        time.sleep(1.5)
        assert process.poll() is None
        await_node(run, is_serving(version(0)))
    assert process.wait(180) == 0


def test_an_engine_that_never_starts_ends_the_supervisor_and_names_the_log(run, model, tmp_path):
    replies = tmp_path / "replies.json"
    replies.write_text("no JSON")
    process = supervise(run, Scripted(replies=str(replies)), model, max_restarts=1)
    _, log = process.communicate(timeout=600)
    assert process.returncode == EngineError.exit_code
    [name] = [path.name for path in run.logs("inference").iterdir()]
    assert f"EngineError: the engine ended; see {run.logs('inference') / name}" in log
    assert "JSON is malformed" in (run.logs("inference") / name).read_text()
