"""One run in which every role is killed once: what is trained must be what was sampled, once."""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from run_processes import children_of, processes_of, role_pids
from waiting import until

from hpc_swe.metrics import meaning
from hpc_swe.records import Batch, BatchManifest, float_array, id_array
from hpc_swe.roles.coordinator import archive
from hpc_swe.roles.coordinator.samples import cut
from hpc_swe.store import atomic, folders, weights

pytestmark = pytest.mark.slow
STEPS = 6


class Killer:
    """Copies batches before retention takes them, and kills one victim after another between steps."""

    def __init__(self, keep: Path) -> None:
        self.keep, self.killed, self.base = keep, [], 0
        self.victims = ["rollout", "reward", "coordinator", "engine", "learner", "inference"]

    def __call__(self, run) -> None:
        for name in atomic.names(run.batches):
            if not (self.keep / name).exists():
                shutil.copytree(run.batch(int(name[5:])), self.keep / name)
        version = weights.newest(run)
        step = version.step if version else 0
        if step >= 1 + len(self.killed) // 2 and self.victims and step < STEPS:
            self._kill(run, self.victims[0])

    def _kill(self, run, victim: str) -> None:
        pids = role_pids(run, "inference" if victim == "engine" else victim)
        if victim == "engine":
            pids = [pid for parent in pids for pid in children_of(parent) if "Engine" in _command(pid)]
        if pids:
            os.kill(pids[-1], signal.SIGKILL)
            self.killed.append(self.victims.pop(0))


@pytest.fixture(scope="module")
def killed(small_run, warm_model, tmp_path_factory):
    keep = tmp_path_factory.mktemp("batches")
    killer = Killer(keep)
    words = [
        f"model={warm_model}",
        f"steps={STEPS}",
        "learner.checkpoint_every=2",
        "learner.optimizer.lr=1e-4",
    ]
    run = small_run("killed", *words, each=killer)
    killer(run)
    assert killer.killed == ["rollout", "reward", "coordinator", "engine", "learner", "inference"]
    return run, keep


@pytest.fixture(scope="module")
def batches(killed):
    """(manifest, batch) of every step."""
    run, keep = killed
    found = []
    for step in range(STEPS):
        manifest = folders.manifest(keep / f"step_{step:06d}", BatchManifest)
        data = folders.read(keep / f"step_{step:06d}", run.rank_file(0), manifest)
        found.append((manifest, atomic.decode(keep / run.rank_file(0), data, Batch)))
    return found


@pytest.fixture(scope="module")
def episodes(killed):
    """Identity -> scored episode of all archives."""
    run, _ = killed
    scored = [s for name in atomic.names(run.archives) for s in archive.read(run.archives / name)]
    names = Counter(s.episode.request.name for s in scored)
    assert max(names.values()) == 1, "an episode was archived twice"
    return {s.episode.request.name: s for s in scored}


def test_every_group_is_closed_exactly_once(batches):
    closed = [group for manifest, _ in batches for group in (*manifest.groups, *manifest.closed)]
    assert sorted(closed) == list(range(len(closed)))
    assert batches[-1][0].after.next_group == len(closed)


def test_no_finished_episode_of_a_trained_group_is_lost(batches, episodes):
    for manifest, _ in batches:
        for group in manifest.groups:
            members = [name for name in episodes if name.startswith(f"train-{group:06d}-")]
            assert len(members) == 4, f"group {group} was trained with {members}"


def test_every_trained_token_is_one_that_the_engine_sampled(batches, episodes):
    for manifest, batch in batches:
        expected = Counter()
        for group in manifest.groups:
            for index in range(4):
                scored = episodes[f"train-{group:06d}-{index:02d}"]
                for sample in cut(scored.episode, 1.0, "main", 0, 0).samples:
                    expected[sample.token_ids, sample.mask, sample.logprobs] += 1
        trained = Counter()
        for micro in batch.microbatches:
            at = 0
            for length in micro.sequence_lengths:
                words = slice(4 * at, 4 * (at + length))
                mask = micro.mask[at : at + length]
                if any(mask):
                    trained[micro.token_ids[words], mask, micro.logprobs[words]] += 1
                at += length
        assert trained == expected


def test_masked_tokens_are_exactly_the_completions_in_order(episodes):
    for scored in episodes.values():
        turns = scored.episode.turns
        for sample in cut(scored.episode, 1.0, "main", 0, 0).samples:
            picked = id_array(sample.token_ids)[sample.mask_array == 1]
            assert picked.tolist() == [token for turn in turns for token in turn.completion.tolist()]
            versions = id_array(sample.versions)[sample.mask_array == 1].tolist()
            stamps = [s.oldest.step for turn in turns for s in turn.spans for _ in range(s.start, s.end)]
            assert versions == stamps


def test_advantages_are_rewards_less_their_groups_mean(batches, episodes):
    for manifest, batch in batches:
        rewards = {
            g: [episodes[f"train-{g:06d}-{i:02d}"].score.reward for i in range(4)] for g in manifest.groups
        }
        wanted = {round(r - float(np.mean(group)), 5) for group in rewards.values() for r in group}
        found = {
            round(float(a), 5)
            for micro in batch.microbatches
            for a in float_array(micro.advantages)[micro.mask_array == 1]
        }
        assert found <= wanted
        assert max(found) > 0


def test_fresh_tokens_have_the_learners_own_log_probabilities(killed):
    values = _curves(killed[0], "learner")
    fresh = [line["gap/max"] for line in values if line["step"] == 0]
    assert fresh
    assert max(fresh) < 1e-4


def test_learner_alone_on_the_same_batches_gives_the_same_weights_to_the_bit(killed, small_run, warm_model):
    run, keep = killed
    alone = {role: 0 for role in ("coordinator", "inference", "rollout", "reward")}
    words = [f"counts.{role}={count}" for role, count in alone.items()]

    def feed(replay) -> None:
        for name in atomic.names(keep):
            if not replay.batch(int(name[5:])).exists():
                shutil.copytree(keep / name, replay.batches / f".tmp-{name}")
                os.rename(replay.batches / f".tmp-{name}", replay.batch(int(name[5:])))
        newest = weights.newest(replay)
        if newest and newest.step == STEPS:
            replay.finished.touch()

    words += [
        f"model={warm_model}",
        f"steps={STEPS}",
        "learner.optimizer.lr=1e-4",
        "learner.checkpoint_every=100",
    ]
    replay = small_run("replay", *words, each=feed)
    last = weights.newest(run)
    assert last is not None
    assert last.incarnation > 1, "the learner was never started again"
    mine, theirs = (weights.manifest(r, v) for r, v in ((run, last), (replay, weights.newest(replay))))
    assert {n: t.sha256 for n, t in mine.tensors.items()} == {n: t.sha256 for n, t in theirs.tensors.items()}


def test_curves_are_all_there_and_all_documented(killed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(killed[0].tensorboard))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    assert not {tag for tag in tags if not meaning(tag)}
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


def _curves(run, role: str) -> list[dict[str, float]]:
    lines = []
    for path in run.metrics.glob(f"{role}-*.jsonl"):
        parsed = [json.loads(text) for text in path.read_bytes().splitlines()]
        lines += [{"step": line["step"], **line["values"]} for line in parsed]
    return lines


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
