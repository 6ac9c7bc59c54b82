"""The coordinator among the other roles: what it asks for, publishes, archives and cleans up."""

import datasets
import msgspec
import numpy as np
import pytest

from hpc_swe.base.errors import LostRace
from hpc_swe.base.metrics import meaning
from hpc_swe.base.records import (
    FREE,
    Batch,
    BatchManifest,
    Episode,
    RolloutRequest,
    ScoredEpisode,
    WeightVersion,
)
from hpc_swe.base.store import atomic, folders, weights
from hpc_swe.base.store.spool import Spool
from hpc_swe.config.settings import RetentionConfig
from hpc_swe.roles.coordinator import archive
from hpc_swe.roles.coordinator.batching import batches
from hpc_swe.roles.coordinator.batching.samples import drop_routing
from tests.kit.constants import varied
from tests.kit.coordinator_kit import (
    LIMITS,
    STEPS,
    STRAGGLER_S,
    Clock,
    export,
    finish,
    learn,
    make_maintenance,
    published,
    requests_of,
    result,
    reward,
    rundir,
    save,
    show,
    training,
    work,
)


def names(run, spool="requests", state="ready"):
    return [a.identity for a in Spool(run.spool(spool), RolloutRequest).addresses(state)]


def test_batches_hold_the_groups_with_signal_in_order(run):
    finish(run)
    trained, closed = [], []
    for step in range(STEPS):
        manifest = folders.manifest(run.batch(step), BatchManifest)
        trained += manifest.groups
        closed += manifest.closed
        assert set(manifest.files) == {run.rank_file(0), run.rank_file(1), run.history(step).name}
        for rank in (0, 1):
            batch = atomic.get(run.batch(step) / run.rank_file(rank), Batch)
            assert (batch.step, batch.rank) == (step, rank)
    differs = {g: reward(f"train-{g:06d}-00") != reward(f"train-{g:06d}-01") for g in range(trained[-1] + 1)}
    assert trained == [g for g in differs if differs[g]]
    assert sorted(closed) == [g for g in differs if not differs[g]]


def test_sampling_waits_for_weights_and_no_more_than_one_batch_lies_ahead(run):
    maintenance, mode = make_maintenance(run), training(run)
    for _ in range(20):
        mode.iterate(maintenance.snapshot())
        work(run)
    assert batches.published_steps(run) == [0, 1]  # the learner is at 0
    assert not mode._ledger.groups, "batch 2 would be two steps ahead of the weights"
    learn(run)
    for _ in range(20):
        mode.iterate(maintenance.snapshot())
        work(run)
    assert batches.published_steps(run) == [0, 1, 2]


def test_with_much_leave_to_sample_ahead_one_batch_waits_for_the_learner(run):
    maintenance, mode = (
        make_maintenance(run),
        training(run, limits=msgspec.structs.replace(LIMITS, max_staleness=5)),
    )
    for _ in range(20):
        mode.iterate(maintenance.snapshot())
        work(run)
    assert batches.published_steps(run) == [0, 1]
    assert mode.iterate(maintenance.snapshot()).waits_for == "the learner: step 0 of 3"


def test_a_learner_that_lost_steps_gets_its_batches_again_before_new_ones(tmp_path):
    """It died at step 3 and resumed from checkpoint 1, as incarnation 1; batches up to 4 are there."""
    limits = msgspec.structs.replace(LIMITS, max_staleness=2)
    undisturbed, run = rundir(tmp_path / "a"), rundir(tmp_path / "b")
    finish(undisturbed, steps=6, limits=limits)
    maintenance, mode = make_maintenance(run), training(run, limits, steps=6)
    for number in range(60):
        mode.iterate(maintenance.snapshot())
        work(run)
        if number % 10 == 9 and (weights.newest(run) or WeightVersion()).step < 3:
            learn(run, 6)
    save(run, 1)
    export(run, WeightVersion(incarnation=1, step=1))
    mode = training(run, limits, steps=6)  # and the coordinator is a new one
    for expected in (1, 2, 3):
        for _ in range(5):
            snapshot = maintenance.snapshot()
            waits_for = mode.iterate(snapshot).waits_for
            maintenance.clean_up(snapshot)
            assert work(run) == []
        assert waits_for == f"the learner: step {expected} of 6"
        assert batches.published_steps(run) == [0, 1, 2, 3, 4]
        learn(run, 6)
    finish(run, steps=6, limits=limits)
    assert published(run) == published(undisturbed)
    assert weights.newest(run) == WeightVersion(incarnation=1, step=6)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_groups_that_fill_no_batch_in_time_are_dropped_and_counted(run, staleness):
    """None of the first groups has a signal, so many are dispatched; then all have one."""
    limits = msgspec.structs.replace(LIMITS, max_staleness=staleness)
    maintenance, mode = make_maintenance(run), training(run, limits, steps=6)
    for _ in range(60):
        if not mode.iterate(maintenance.snapshot()).waits_for:
            break
        newest = weights.newest(run) or WeightVersion()
        work(run, judge=lambda name: float(name > "train-000012" and name.endswith("1")), version=newest.step)
        learn(run, 6)
    manifests = [folders.manifest(run.batch(step), BatchManifest) for step in range(6)]
    assert max(m.stats["staleness/max"] for m in manifests) <= staleness
    assert sum(m.stats["groups/dropped_old"] for m in manifests) > 0
    assert {m.stats["groups/signal_rate"] for m in manifests[1:]} == {1.0}


def test_what_a_batch_holds_does_not_depend_on_who_is_quick(tmp_path):
    def with_late(run, late_groups):
        maintenance, mode = make_maintenance(run), training(run)
        for number in range(200):
            if not mode.iterate(maintenance.snapshot()).waits_for:
                return published(run)
            held = () if number % 5 == 4 else late_groups
            work(run, keep=lambda name, held=held: int(name[6:12]) % 3 not in held)
            learn(run)
        raise AssertionError(batches.published_steps(run))

    quick = with_late(rundir(tmp_path / "none"), ())
    assert with_late(rundir(tmp_path / "some"), (0,)) == quick
    assert with_late(rundir(tmp_path / "most"), (1, 2)) == quick


def show_worker(run, beat, **worked_s) -> None:
    """A rollout worker's lease, by member: _1_01 = 5.0 is group 1, index 1."""
    claims = [f"train-{int(group):06d}-{index}" for _, group, index in (k.split("_") for k in worked_s)]
    show(run, "rollout-1-0000beef", beat, claims=claims, worked_s=list(worked_s.values()))


def claim_for(run, owner, name) -> None:
    (run.requests / "ready" / f"{name}~0").rename(run.requests / "claimed" / f"{name}~0~{owner}")


def test_a_group_waits_days_for_workers_and_grades_but_not_for_stragglers(run):
    """And a coordinator that starts anew at every look knows as much: the clocks are the workers'."""
    late, clock = "train-000001-01", Clock()
    maintenance, mode = make_maintenance(run, clock), training(run)
    mode.iterate(maintenance.snapshot())
    work(run, keep=lambda name: name != late)
    for _ in range(5):
        clock.now += 100 * STRAGGLER_S
        assert late in mode.iterate(maintenance.snapshot()).waits_for, "nobody has taken it"
    claim_for(run, "rollout-1-0000beef", late)
    for beat, worked_s in enumerate([0.0, 99.0, 100.0, 99.0]):
        show_worker(run, beat, _1_01=worked_s)
        assert late in training(run).iterate(make_maintenance(run, clock).snapshot()).waits_for
    Spool(run.episodes, Episode).put(late, result(requests_of(1)[1]).episode)
    show_worker(run, 9, _1_01=1e6)
    assert late in training(run).iterate(make_maintenance(run, clock).snapshot()).waits_for, (
        "it is being graded"
    )
    (run.episodes / "ready" / f"{late}~0").unlink()
    for _ in range(9):
        training(run).iterate(make_maintenance(run, clock).snapshot())
        work(run, keep=lambda name: name != late)
    assert 1 in folders.manifest(run.batch(0), BatchManifest).closed


def test_the_late_result_of_a_straggler_is_a_duplicate(run):
    maintenance, mode = make_maintenance(run), training(run)
    late = requests_of(1)[1]
    mode.iterate(maintenance.snapshot())
    claim_for(run, "rollout-1-0000beef", late.name)
    show_worker(run, 1, _1_01=STRAGGLER_S + 1)
    while not batches.published_steps(run):
        maintenance = make_maintenance(run)
        mode.iterate(maintenance.snapshot())
        work(run)
    assert 1 in folders.manifest(run.batch(0), BatchManifest).closed
    show_worker(run, 2)
    (run.requests / "claimed" / f"{late.name}~0~rollout-1-0000beef").unlink()
    Spool(run.scored, ScoredEpisode).put(late.name, result(late, 1.0))
    mode.iterate(maintenance.snapshot())
    assert late.name not in names(run, "scored") + names(run, "requests")


def test_the_archive_opens_with_datasets_and_gives_the_very_records_back(run):
    finish(run)
    rebuilt = [s for step in range(STEPS) for s in archive.read(run.archive(step))]
    asked = {s.episode.request.name for s in rebuilt}
    manifests = [folders.manifest(run.batch(step), BatchManifest) for step in range(STEPS)]
    groups = [g for m in manifests for g in (*m.groups, *m.closed)]
    assert asked == {f"train-{g:06d}-{i:02d}" for g in groups for i in range(2)}
    sent = [result(s.episode.request, reward(s.episode.request.name)) for s in rebuilt]
    assert rebuilt == [msgspec.structs.replace(s, episode=drop_routing(s.episode)) for s in sent]
    table = datasets.load_dataset(
        "parquet", data_files=str(run.archives / "*.parquet"), cache_dir=str(run.root / "cache")
    )["train"]
    assert len(table) == len(rebuilt)
    trained = {row["group_id"] for row in table if row["trained"]}
    assert trained == {g for m in manifests for g in m.groups}
    assert table[0]["messages"][1]["content"] == "d\u00f6ne"
    assert table[0]["messages"][1]["tool_calls"] == [{"name": "view", "arguments": '{"path": "m.py"}'}]
    assert table[0]["sampled_ids"] == rebuilt[0].episode.turns[0].completion.tolist()


def test_the_routing_of_each_trained_episode_reaches_its_batch(run):
    """Although the coordinator keeps none while it waits; the second episode of each group has one."""
    finish(run)
    found = set()
    for rank in (run.batch(step) / run.rank_file(index) for step in range(STEPS) for index in range(2)):
        for micro in msgspec.msgpack.decode(rank.read_bytes(), type=Batch).microbatches:
            ends = np.cumsum(micro.sequence_lengths)
            for start, end in zip([0, *ends[:-1]], ends, strict=True):
                known, count = micro.routing[start:end], end - start
                if any(micro.mask[start:end]) and known:
                    assert known in (bytes([FREE]) * count, bytes([*range(1, count), FREE]))
                    found.add(known[0])
    assert found == {1, FREE}


def test_every_curve_that_is_written_is_documented(run):
    finish(run, every=1, eval_tasks=("x",))
    lines = run.metric_log("coordinator").read_bytes().splitlines()
    names_seen = {name for line in lines for name in msgspec.json.decode(line)["values"]}
    assert "solve/eval/plain" in names_seen
    assert [name for name in sorted(names_seen) if not meaning(name)] == []


def test_two_coordinators_that_hold_the_same_results_publish_one_batch(run):
    first, second = training(run, owner="a"), training(run, owner="b")
    maintenance = make_maintenance(run)
    while True:
        snapshot = maintenance.snapshot()
        second._collector.collect(snapshot)  # it reads all that the first reads, and is a moment later
        first.iterate(snapshot)
        if batches.published_steps(run):
            break
        work(run)
    composition = batches.plan_batch(second._decision, second.state, 0, LIMITS.groups_per_step)
    before = published(run)
    with pytest.raises(LostRace):
        second._publish(composition, snapshot)
    assert published(run) == before
    assert composition.after == first.state
    assert not [path for path in run.batches.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("deleted", [0, STEPS - 1])
def test_a_coordinator_that_fell_behind_leaves(run, deleted):
    """Also when the batch that it would publish next has been deleted: else it publishes it again."""
    behind = training(run, owner="a")
    finish(run)
    for step in range(deleted):
        folders.remove(run.batch(step))
    with pytest.raises(LostRace):
        behind.iterate(make_maintenance(run).snapshot())


def test_requests_of_consumed_groups_are_withdrawn(run):
    finish(run)
    for name in ("train-000000-00", "foreign"):
        Spool(run.requests, RolloutRequest).put(name, requests_of(0)[0])
    training(run).iterate(make_maintenance(run).snapshot())
    assert names(run) == ["foreign"]


def test_without_space_nothing_is_dispatched(run):
    maintenance = make_maintenance(run, retention=varied(RetentionConfig, free_space_floor_gb=1e9)())
    training(run).iterate(maintenance.snapshot())
    assert names(run) == []
