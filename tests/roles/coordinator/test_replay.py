"""A learner alone on what another run has archived."""

import msgspec
import pytest

from hpc_swe.base.errors import ConfigError, CorruptRecord
from hpc_swe.base.metrics import Log
from hpc_swe.base.records import Batch, BatchManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import folders
from hpc_swe.config.settings import BatchesConfig
from hpc_swe.models.advantages.grpo import Grpo
from hpc_swe.roles.coordinator.batching.batches import BatchSettings
from hpc_swe.roles.coordinator.modes.replay import ArchiveReplay, archived_steps
from tests.kit.coordinator_kit import LIMITS, STEPS, finish, learn, make_maintenance, rundir

SETTINGS = BatchSettings(LIMITS, BatchesConfig(microbatch_tokens=64), Grpo(), 2)


@pytest.fixture
def source(tmp_path):
    run = rundir(tmp_path)
    finish(run)
    return run


@pytest.fixture
def again(tmp_path):
    run = RunDir(tmp_path / "again")
    run.make()
    return run


def trained(run: RunDir, step: int) -> dict[str, Batch]:
    """What each rank trains, without the routing of experts, which no archive has."""
    manifest = folders.manifest(run.batch(step), BatchManifest)
    found = {}
    for name in (run.rank_file(0), run.rank_file(1)):
        batch = msgspec.msgpack.decode(folders.read(run.batch(step), name, manifest), type=Batch)
        plain = [msgspec.structs.replace(micro, routing=b"") for micro in batch.microbatches]
        found[name] = msgspec.structs.replace(batch, microbatches=plain)
    return found


def replay(run, source, settings=SETTINGS, steps=STEPS) -> list[dict[str, Batch]]:
    """Publish and train all batches; the coordinator is another one at each step, as after a kill."""
    maintenance, found = make_maintenance(run), []
    for _ in range(3 * steps):
        mode = ArchiveReplay(run, source, settings, steps, Log(run.metric_log("c")))
        if not mode.iterate(maintenance.snapshot()).waits_for:
            return found
        found += [trained(run, step) for step in range(len(found), mode.step)]
        learn(run, steps)
    raise AssertionError(f"not done, at {len(found)} batches")


def test_the_archive_gives_the_batches_of_the_run_bit_for_bit(source, again):
    assert archived_steps(source) == STEPS
    assert replay(again, source) == [trained(source, step) for step in range(STEPS)]


def test_an_episode_that_is_missing_is_no_smaller_batch(source, again):
    whole = source.archive(1).read_bytes()
    source.archive(1).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptRecord, match="step_000001"):
        replay(again, source)
    source.archive(1).unlink()
    with pytest.raises(CorruptRecord, match=r"step_000001.*put it back"):
        replay(again, source)


def test_settings_that_train_no_group_of_a_step_are_refused(source, again):
    never = msgspec.structs.replace(LIMITS, max_staleness=-(10**9))
    with pytest.raises(ConfigError, match=r"step_000000.*\(too_old\); start another with"):
        replay(again, source, BatchSettings(never, SETTINGS.batches, Grpo(), 2))


def test_settings_of_ones_own_make_other_batches_of_the_same_episodes(source, again):
    wide = msgspec.structs.replace(SETTINGS.batches, microbatch_tokens=4096)
    found = replay(again, source, BatchSettings(LIMITS, wide, Grpo(), 2))

    def tokens(steps: list[dict[str, Batch]]) -> list[int]:
        micros = [[m for batch in each.values() for m in batch.microbatches] for each in steps]
        return [sum(sum(micro.mask) for micro in each) for each in micros]

    assert tokens(found) == tokens([trained(source, step) for step in range(STEPS)])
    assert [len(each["rank_0000.msgpack"].microbatches) for each in found] == [1] * STEPS
