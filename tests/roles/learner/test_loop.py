"""The learner on a run folder: what it publishes, and what deaths and orders leave behind."""

import os
import shutil
import signal

import pytest

from hpc_swe.base.store import skipped

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from hpc_swe.base import records  # noqa: E402
from hpc_swe.base.errors import ConfigError, LostRace, NodeError, StorageError  # noqa: E402
from hpc_swe.base.records import MicroBatch, WeightManifest, WeightVersion  # noqa: E402
from hpc_swe.base.rundir import RunDir  # noqa: E402
from hpc_swe.base.store import atomic, folders, stop_signs  # noqa: E402
from hpc_swe.models.engines._vllm.files import Link, Wanted, build  # noqa: E402
from hpc_swe.roles.learner.publish import take_incarnation  # noqa: E402
from tests.kit.ranks import launcher, tiny  # noqa: E402
from tests.kit.ranks.training import STEPS, assert_same, end, make_run, publish, reported, start, weights  # noqa: E402
from tests.kit.waiting import until  # noqa: E402


def test_every_version_is_published_whole(whole, model):
    assert atomic.names(whole.weights) == [f"v{step:06d}-i01" for step in range(STEPS + 1)]
    for step in range(STEPS + 1):
        folder = whole.weight(WeightVersion(step=step, incarnation=1))
        manifest = folders.manifest(folder, WeightManifest)
        assert set(manifest.files) == {path.name for path in folder.iterdir()} - {folders.NAME}
        assert all(folders.describe(folder / name) == info for name, info in manifest.files.items())
        assert manifest.tensors.keys() == weights(whole, step, 1).keys()
        assert (manifest.version.step, manifest.parent) == (step, None)
    assert_same(weights(whole, 0, 1), load_file(model / "model.safetensors"))


def test_the_probe_is_what_the_published_weights_say(whole):
    for step in (0, STEPS):
        folder = whole.weight(WeightVersion(step=step, incarnation=1))
        probe = folders.manifest(folder, WeightManifest).probe
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            scores = tiny.score(model, torch.tensor(probe.token_ids))[1:]
        assert (torch.tensor(probe.logprobs) - scores).abs().max() < probe.tolerance / 100


def test_batches_that_were_cut_for_two_ranks_are_trained_whole_by_one(whole, model, sequences, tmp_path):
    """As after a change of learner.data_parallel, which a run may make between two starts."""
    run = make_run(tmp_path / "run", sequences, STEPS, ranks=2)
    launcher.launch(2, "learn", str(run.root), str(model), str(STEPS), "1")
    assert_same(weights(run, STEPS, 1), weights(whole, STEPS, 1))


def test_death_after_a_checkpoint_keeps_the_metrics_of_its_step(
    whole, model, sequences, tmp_path, monkeypatch
):
    run = make_run(tmp_path / "run", sequences, STEPS)
    monkeypatch.setenv("DIES_AFTER", str(run.checkpoint(2, 1)))
    children = start(run, model)
    until(lambda: any(child.poll() == -signal.SIGKILL for child in children), "a death")
    end(children, signal.SIGKILL)
    monkeypatch.delenv("DIES_AFTER")
    launcher.launch(2, "learn", str(run.root), str(model), str(STEPS), "1")
    assert [line["of"] for line in reported(run) if "policy/loss" in line] == list(range(STEPS))
    assert_same(weights(run, STEPS, 2), weights(whole, STEPS, 1))


def test_death_while_saving_leaves_the_last_checkpoint_and_no_half_one(
    whole, model, sequences, tmp_path, monkeypatch
):
    run = make_run(tmp_path / "run", sequences, STEPS)
    monkeypatch.setenv("SNAPSHOTS", "3")
    monkeypatch.setenv("DIES_AT", str(run.checkpoints / ".tmp-*/__*"))
    children = start(run, model)
    monkeypatch.delenv("DIES_AT")
    assert [child.communicate(timeout=600) and child.returncode for child in children] == [
        -signal.SIGKILL
    ] * 2
    assert [name[:5] for name in os.listdir(run.checkpoints)] == [".tmp-"]
    launcher.launch(2, "learn", str(run.root), str(model), str(STEPS), "1")
    assert [line["step"] for line in reported(run)][-5:] == [0, 1, 2, 3, 4]
    assert_same(weights(run, STEPS, 2), weights(whole, STEPS, 1))
    # A start keeps no values of the one before: its first version is full, and so are the third and the last.
    deltas = [(1, 1), (2, 1), (1, 2), (2, 2)]
    for step, incarnation in [(0, 1), (0, 2), (3, 2), (4, 2), *deltas]:
        manifest = manifest_of(run, step, incarnation)
        parent = WeightVersion(step=step - 1, incarnation=incarnation)
        assert manifest.parent == (parent if (step, incarnation) in deltas else None)
    for step, incarnation in deltas:
        stated = manifest_of(run, step, incarnation).tensors
        wanted = Wanted(
            {name: info.shape for name, info in stated.items()},
            is_tied=False,
            digests={name: info.digest for name, info in stated.items()},
        )
        chain = [run.weight(WeightVersion(step=s, incarnation=incarnation)) for s in range(step + 1)]
        assert_same(dict(build([Link(folder, None) for folder in chain], wanted)), weights(whole, step, 1))


def manifest_of(run: RunDir, step: int, incarnation: int) -> WeightManifest:
    return folders.manifest(run.weight(WeightVersion(step=step, incarnation=incarnation)), WeightManifest)


def test_a_learner_that_was_frozen_gives_way_to_its_successor(model, sequences, tmp_path):
    """Its checkpoints would let the batches be deleted that the other one, which is behind, must repeat."""
    run = make_run(tmp_path / "run", sequences, 1)
    children = start(run, model)
    until(lambda: reported(run) and reported(run)[-1]["step"] == 1, "step 1")
    for child in children:
        child.send_signal(signal.SIGSTOP)
    assert take_incarnation(run) == 2  # its node counts as dead, and another job has started
    publish(run, 1, sequences)
    for code, output in end(children, signal.SIGCONT):
        assert code == LostRace.exit_code, output
        assert "a learner has started as 02, and this one is 01" in output
    assert atomic.names(run.weights) == ["v000000-i01", "v000001-i01"]
    assert not [path for path in run.weights.iterdir() if path.name.startswith(".")]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(whole, model, sequences, tmp_path):
    run = make_run(tmp_path / "run", sequences, STEPS)
    (run.incarnations / "01").mkdir()
    for step in (2, 4):
        shutil.copytree(whole.checkpoint(step, 1), run.checkpoint(step, 1))
    victim = sorted(run.checkpoint(4, 1).glob("__1_*"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    outputs = launcher.launch(2, "learn", str(run.root), str(model), str(STEPS), "1")
    assert victim.name in outputs[0]
    assert [line["step"] for line in reported(run)] == [2, 3, 4]
    assert_same(weights(run, STEPS, 2), weights(whole, STEPS, 1))


def spoiled(sequences: list[MicroBatch]) -> list[MicroBatch]:
    bad = records.floats(np.full(sequences[0].sequence_lengths[0], np.nan, np.float32))
    return [msgspec.structs.replace(sequences[0], advantages=bad), *sequences[1:]]


def test_a_batch_that_is_not_finite_is_skipped_and_kept(model, sequences, tmp_path):
    run = make_run(tmp_path, sequences, 1)
    publish(run, 1, spoiled(sequences))
    publish(run, 2, sequences)
    launcher.launch(2, "learn", str(run.root), str(model), "3", "1")
    assert [line.get("policy/skipped") for line in reported(run)] == [None, 0.0, 1.0, 0.0]
    assert_same(weights(run, 2, 1), weights(run, 1, 1))
    kept = {path.name: path.read_bytes() for path in run.skipped(1).iterdir()}
    assert kept == {path.name: path.read_bytes() for path in run.batch(1).iterdir()}
    assert not run.skipped(0).exists()
    assert not run.skipped(2).exists()


def test_a_sign_that_three_steps_show_is_left_for_the_coordinator(model, sequences, tmp_path, monkeypatch):
    run = make_run(tmp_path, sequences, 3)
    monkeypatch.setenv("SIGNS", '{"gap": 1e-9}')
    launcher.launch(2, "learn", str(run.root), str(model), "3", "1")
    gaps = [line["gap/k3"] for line in reported(run)[1:]]
    assert [each.values["gap/k3"] for each in stop_signs.read(run).steps] == gaps
    assert stop_signs.read(run).reason.startswith("gap/k3 was above 1e-09 in steps 0 to 2: ")


def test_batches_in_a_row_that_are_not_finite_end_the_learner(model, sequences, tmp_path):
    run = make_run(tmp_path, sequences, 1)
    for step in (1, 2, 3):
        publish(run, step, spoiled(sequences))
    for _ in range(2):  # the second start does not train the batches again
        for child in start(run, model):
            output, _ = child.communicate(timeout=600)
            assert child.returncode == ConfigError.exit_code
            assert "in a row, 2, the last of them batch 2, had a gradient that is not finite" in output
    assert [line["step"] for line in reported(run)] == [0, 1, 2]


def test_weights_that_are_not_finite_are_computed_again_once(model, sequences, tmp_path, monkeypatch):
    """A faulty node makes such weights, too, and the next job may get another one."""
    monkeypatch.setenv("BETA1", "0")  # or the first step's size is ten times the rate, no float any more
    run = make_run(tmp_path, sequences, 2)
    huge = '{"lr": 3.4e38, "weight_decay": 1}'
    for error in (NodeError, ConfigError):
        children = launcher.start(2, "learn", str(run.root), str(model), "2", "1", huge)
        outputs = [(child.communicate(timeout=600)[0], child.returncode) for child in children]
        assert [code for _, code in outputs] == [error.exit_code] * 2, outputs
    assert "start another run from earlier weights with a lower learner.optimizer.lr" in outputs[0][0]
    assert [path.name for path in run.weights.iterdir() if path.name.startswith("v000001")] == []


def test_a_restart_goes_on_to_count_batches_that_are_not_finite(model, sequences, tmp_path):
    run = make_run(tmp_path, sequences, 1)
    publish(run, 1, spoiled(sequences))
    children = start(run, model)
    until(lambda: reported(run) and reported(run)[-1]["step"] == 2, "step 2, which has a checkpoint")
    end(children, signal.SIGKILL)
    publish(run, 2, spoiled(sequences))
    for child in start(run, model):
        output, _ = child.communicate(timeout=600)
        assert child.returncode == ConfigError.exit_code, output
    assert skipped.read(run).steps == [1, 2]


def test_a_signal_saves_at_the_next_boundary_and_exits_0(model, sequences, tmp_path):
    run = make_run(tmp_path / "run", sequences, 1)
    children = start(run, model)
    until(lambda: reported(run) and reported(run)[-1]["step"] == 1, "step 1")
    assert [code for code, _ in end(children, signal.SIGTERM)] == [0, 0]
    assert atomic.names(run.checkpoints) == ["step_000001-i01"]


def test_a_batch_file_that_one_rank_cannot_read_stops_all_ranks(model, sequences, tmp_path):
    run = make_run(tmp_path / "run", sequences, 1, ranks=2)
    path = run.batch(0) / run.rank_file(1)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    children = launcher.start(2, "learn", str(run.root), str(model), "1", "2")
    for child in children:
        output = child.communicate(timeout=600)[0]
        assert child.returncode != 0
        assert f"CorruptRecord: {path}" in output


@pytest.mark.parametrize(("kind", "room"), [("weights", 2.5), ("checkpoints", 1.7), ("checkpoints", 0.0)])
def test_a_full_disk_is_one_error_and_leaves_what_was_published(
    whole, model, sequences, tmp_path, tmpfs, monkeypatch, kind, room
):
    """Room for two versions, or one checkpoint, and half of the next; or for nothing at all."""
    monkeypatch.setenv("HOSTED", "1")  # test_checkpoint.py fills a disk from a device
    run = make_run(tmp_path / "run", sequences, STEPS)
    folder, undisturbed = run.root / kind, whole.root / kind
    size = max(sum(file.stat().st_size for file in each.iterdir()) for each in undisturbed.iterdir())
    tmpfs(folder, f"size={int(room * size) or 1 << 14}")
    ends = [(child.communicate(timeout=900)[0], child.returncode) for child in start(run, model)]
    for output, code in ends:
        assert f"StorageError: {folder}/.tmp-" in output, output[-3000:]
        assert "no space is left; free some" in output
        assert code == StorageError.exit_code
    assert atomic.names(folder) == atomic.names(undisturbed)[: int(room)]
    assert not list(folder.glob(".*")), "half a version is in the way of the next"
    if not room:  # a start finds nothing, as after a death while the first checkpoint is saved
        return
    tmpfs(folder, "size=0")
    launcher.launch(2, "learn", str(run.root), str(model), str(STEPS), "1")
    assert_same(weights(run, STEPS, 2), weights(whole, STEPS, 1))
