"""Runs of which a part is alive and makes no progress: its stacks are shown, and it starts again."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hpc_swe.base.store import atomic, supervision
from hpc_swe.base.store.parquet import evals
from hpc_swe.launch import existing
from hpc_swe.launch.view import RunReader
from tests.kit import hanging
from tests.kit.run_processes import processes_of
from tests.kit.small_evaluation import Small, make
from tests.kit.waiting import until

pytestmark = pytest.mark.slow


def words(small: Small, tries: int) -> list[str]:
    taskset = next(word for word in small.words if word.startswith("taskset"))
    fifos = f'fifos="{small.folder}"'
    engine = f'replies="{small.folder}/replies.json", {fifos}'
    return [
        taskset.replace("timeout_s=120.0", "timeout_s=14.0"),
        f'sandbox={{type="tests.kit.hanging:HangingCheckout", repository="{small.folder}/calc", {fifos}}}',
        f'engine={{type="tests.kit.hanging:HangingEngine", {engine}}}',
        "supervision.stuck_s=8",
        f"max_restarts={tries}",
        "lease.ttl_s=6.0",
        "engine.load_timeout_s=14.0",
        "rollout.episode_timeout_s=14.0",
        "agent.tool_budget_s=13.0",
    ]


@contextmanager
def watched(small: Small) -> Iterator[list[str]]:
    """What `status` says of stuck parts, each text once."""
    said: list[str] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.3):
            if small.out.status.exists():
                view = RunReader(small.out, existing.load(small.out)).read()
                text = view if isinstance(view, str) else view.stuck
                said.extend([text] if text and text not in said else [])

    thread = threading.Thread(target=look)
    thread.start()
    yield said
    is_over.set()
    thread.join()


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """An evaluation in which four parts hang once each; what `status` said meanwhile."""
    small = make(tmp_path_factory.mktemp("hung"))
    hanging.make(small.folder, "inference", "rollout", "reward")
    drawn = small.out.metrics / "coordinator-0.jsonl"

    def stop_the_coordinator() -> None:
        """It draws the curves of all metrics' files, and waits for what nobody writes."""
        until(lambda: supervision.read(small.out).role == "reward", "the verdict about rewards", 300)
        os.mkfifo(drawn)
        until(lambda: supervision.read(small.out).role == "coordinator", "the coordinator's verdict", 300)
        drawn.unlink()

    thread = threading.Thread(target=stop_the_coordinator)
    thread.start()
    began = time.monotonic()
    with watched(small) as said:
        done = small.evaluate(*words(small, tries=9))
    thread.join()
    print(f"{time.monotonic() - began:.0f} s", *said, sep="\n")
    assert done.returncode == 0, done.stderr
    return small, said


@pytest.mark.parametrize(
    ("role", "why", "line"),
    [
        ("inference", "the main loop of inference-", "in is_healthy"),
        ("rollout", "works on eval-", "in play"),
        ("reward", "works on eval-", "in judge"),
        ("coordinator", "the main loop of the coordinator stands still", "drawing.py"),
    ],
)
def test_a_part_that_hangs_is_named_with_its_stack_and_restarted(hung, role, why, line):
    small, said = hung
    names = [name for name in atomic.names(small.out.stacks) if f"-{role}-" in name]
    shown = [name for name in names if line in (small.out.stacks / name).read_text()]
    assert shown, f"none of {names} shows {line}"  # a busy machine may have further ones
    text = next(each for each in said if f"stacks/{shown[0]}" in each)
    assert text.startswith(f"stuck {role}, restart")
    assert why in text
    assert role == "coordinator" or "in wait_for_ever" in (small.out.stacks / shown[0]).read_text()


def test_nothing_is_lost_or_doubled_by_restarts(hung):
    small, _ = hung
    done = [(each.task_id, each.index) for each in evals.read(small.out.eval_table("eval"))]
    assert sorted(done) == sorted({*done})
    assert len(done) == 8
    assert RunReader(small.out, existing.load(small.out)).look().stuck == ""
    assert processes_of(small.out.root) == []


def test_a_part_that_hangs_every_time_ends_the_run(tmp_path):
    small = make(tmp_path)
    hanging.make(small.folder, "rollout.always")
    done = small.evaluate(*words(small, tries=1))
    assert done.returncode == 3, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "stuck rollout, given up after 1 restarts, see stacks/000002-rollout-" in error
    assert "works on eval-" in error
    stacks = [(small.out.stacks / name).read_text() for name in atomic.names(small.out.stacks)]
    assert sum("in wait_for_ever" in stack for stack in stacks) == 2
    until(lambda: processes_of(small.out.root) == [], "the end of all processes")
