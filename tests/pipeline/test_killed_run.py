"""One run in which every role is killed once: what is trained must be what was sampled, once."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from hpc_swe.base.records import WeightManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import folders, weights
from hpc_swe.cluster.processes import descendants, free_port
from hpc_swe.launch import existing
from hpc_swe.models.engines.vllm import Vllm
from tests.kit.books import Books, torn
from tests.kit.checkout import ROOT, environment, typed
from tests.kit.run_processes import command, processes_of, role_pids
from tests.kit.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow
STEPS = 6
VICTIMS = ["rollout", "reward", "coordinator", "engine", "learner", "inference"]


class Killer:
    """Copies batches before retention takes them, and kills one victim after another between steps."""

    books: Books | None = None

    def __init__(self, keep: Path, victims: list[str]) -> None:
        self.keep, self.killed, self.victims = keep, [], list(victims)

    def __call__(self, run) -> None:
        self.books = self.books or Books(run, self.keep)
        self.books.keep()
        version = weights.newest(run)
        step = version.step if version else 0
        if step >= 1 + len(self.killed) // 2 and self.victims and step < STEPS:
            self._kill(run, self.victims[0])

    def _kill(self, run, victim: str) -> None:
        pids = role_pids(run, "inference" if victim == "engine" else victim)
        if victim == "engine":
            pids = [pid for parent in pids for pid in descendants(parent) if "Engine" in command(pid)]
        if pids:
            os.kill(pids[-1], signal.SIGKILL)
            self.killed.append(self.victims.pop(0))


@pytest.fixture(scope="module")
def killed(small_run, warm_model, tmp_path_factory):
    keep = tmp_path_factory.mktemp("batches")
    killer = Killer(keep, VICTIMS)
    words = [
        f"model={warm_model}",
        f"steps={STEPS}",
        "learner.checkpoint_every=2",
        "learner.optimizer.lr=1e-4",
    ]
    run = small_run("killed", *words, each=killer)
    killer(run)
    assert killer.killed == VICTIMS
    return run, killer.books


@pytest.fixture(scope="module")
def books(killed):
    return killed[1]


@pytest.fixture(scope="module")
def batches(books):
    """(manifest, batch) of every step."""
    assert len(books.batches) == STEPS
    return [(manifest, share) for manifest, (share,) in books.batches]


@pytest.fixture(scope="module")
def episodes(books):
    """Identity -> scored episode of all archives."""
    return books.episodes


@pytest.mark.parametrize(
    "promise",
    [
        lambda books, config: books.unfinished(STEPS),
        lambda books, config: books.misclosed(),
        lambda books, config: books.misarchived(4),
        lambda books, config: books.unsampled(config),
        lambda books, config: books.disordered(),
        lambda books, config: torn(books.run),
    ],
    ids=["finished", "closed once", "archived once", "trained as sampled", "in order", "metrics whole"],
)
def test_the_books_of_the_run_are_right(books, promise):
    assert list(promise(books, existing.load(books.run))) == []


def test_fresh_tokens_have_the_learners_own_log_probabilities(killed):
    values = curves(killed[0], "learner")
    fresh = [line["gap/max"] for line in values if line["step"] == 0]
    assert fresh
    assert max(fresh) < 1e-4


def test_learner_alone_on_the_archive_gives_bitwise_equal_weights(killed, tmp_path):
    run, replay = killed[0], RunDir(tmp_path / "replay")
    words = ["replay", run.root, "--out", replay.root, "--wait", "900", "learner.checkpoint_every=100"]
    line = [sys.executable, "-m", "hpc_swe.launch", *map(str, words)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    last = weights.newest(run)
    assert last is not None
    assert last.incarnation > 1, "the learner was never started again"
    mine, theirs = (
        folders.manifest(r.weight(v), WeightManifest)
        for r, v in ((run, last), (replay, weights.newest(replay)))
    )
    assert {n: t.sha256 for n, t in mine.tensors.items()} == {n: t.sha256 for n, t in theirs.tensors.items()}


def test_the_printed_line_serves_the_last_weights_to_anybody(killed):
    printed = typed("hpc_swe.launch", "serve", killed[0].root, "--version=newest")
    vllm, *words = shlex.split(printed.stdout)
    url = f"http://127.0.0.1:{(port := free_port('127.0.0.1'))}"
    line = [Path(sys.executable).with_name(vllm), *words, f"--port={port}"]
    with subprocess.Popen(line, env=environment(VLLM_CPU_OMP_THREADS_BIND="nobind")) as server:
        try:
            until(lambda: server.poll() is not None or Vllm().is_healthy(url), "a server that answers")
            name = words[words.index("--served-model-name") + 1]
            asked = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            body = json.dumps(asked).encode()
            asking = Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
            with urlopen(asking, timeout=DEADLINE_S) as reply:
                assert json.load(reply)["usage"]["completion_tokens"] in range(1, 5)
        finally:
            server.terminate()


def test_curves_are_all_there_and_all_documented(killed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(killed[0].tensorboard))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    assert [tag for tag in tags if not accumulator.SummaryMetadata(tag).summary_description] == []
    assert tags >= REQUIRED
    steps = [event.step for event in accumulator.Scalars("reward/mean")]
    assert steps == list(range(STEPS)), "one curve across restarts"


def test_nothing_is_left_running(killed):
    until(lambda: processes_of(killed[0].root) == [], "the end of all processes")
    assert str(killed[0].root) not in Path("/proc/self/mounts").read_text()


REQUIRED = {
    "reward/mean",
    "reward/std",
    "solve/train",
    "groups/signal_rate",
    "staleness/mean",
    "gap/mean",
    "policy/entropy",
    "policy/surprise_balance",
    "policy/grad_norm",
    "episodes/samples",
    "episodes/infra",
    "rate/sampled_tokens",
    "rate/trained_tokens",
    "solve/eval/greedy",
    "ratio/effective_share",
    "ratio/clipped_low",
    "ratio/clipped_high",
    "gap/k3",
    "policy/loss",
    "seconds/sandbox",
    "seconds/engine",
    "seconds/tools",
    "seconds/grading",
    "step_seconds/wait",
    "spool/requests_ready",
}


def curves(run, role: str) -> list[dict[str, float]]:
    lines = []
    for path in run.metrics.glob(f"{role}-*.jsonl"):
        parsed = [json.loads(text) for text in path.read_bytes().splitlines()]
        lines += [{"step": line["step"], **line["values"]} for line in parsed]
    return lines
