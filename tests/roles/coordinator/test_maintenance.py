"""Recovery, retention, sweeping and the cells that others read."""

import errno
from dataclasses import replace

import pytest

from hpc_swe.base.records import CoordinatorState, EndpointTable, RolloutRequest, StatusReport, WeightVersion
from hpc_swe.base.store import atomic, folders
from hpc_swe.base.store.spool import Spool
from hpc_swe.config.settings import RetentionConfig
from hpc_swe.roles.coordinator.batching import batches
from hpc_swe.roles.coordinator.loop import Coordinator
from hpc_swe.roles.coordinator.maintenance import ORPHAN_S
from hpc_swe.roles.coordinator.retention import first_kept_batch, kept_checkpoints, superseded
from hpc_swe.roles.coordinator.snapshot import Progress
from tests.kit.constants import varied
from tests.kit.coordinator_kit import KEPT, Clock, export, make_maintenance, requests_of, save, show, training
from tests.kit.crash import in_child, refuse

PROGRESS = Progress("the learner", 3, {"reward/mean": [0.5]}, ["train-000001-00 a0: engine"])


@pytest.fixture
def clock():
    return Clock()


def closed(mode):
    """Groups that the coordinator waits for no more."""
    consumed = {("train", number) for number in range(mode.state.next_group)}
    return consumed | {key for key, group in mode._ledger.groups.items() if not group.is_open}


def old_batch(run, step):
    batches.commit(run, batches.BatchPlan(step, [], [], {}, CoordinatorState()), [], {})


# recovery


@pytest.mark.parametrize("life_s", [0.8, 1.2, 1.6])
def test_a_coordinator_that_restarts_often_recovers_claims_of_the_dead(run, clock, life_s):
    """Looks are a second apart, and three without growth are death: these lives see one or two."""
    training(run).iterate(make_maintenance(run).snapshot())
    show(run, "rollout-1-deadbeef", claims=["train-000000-00"])
    for name in ("train-000000-00~0", "train-000000-01~0"):
        owner = "rollout-1-deadbeef" if name.endswith("00~0") else "rollout-1-0000cafe"
        (run.requests / "ready" / name).rename(run.requests / "claimed" / f"{name}~{owner}")
    while "train-000000-00~1" not in atomic.names(run.requests / "ready"):
        maintenance, until = make_maintenance(run, clock), clock.now + life_s
        while clock.now < until:
            clock.now += 0.4
            show(run, "rollout-1-0000cafe", beat=int(clock.now) + 1, claims=["train-000000-01"])
            maintenance.publish(maintenance.snapshot(), PROGRESS, {}, 0.0)
        assert clock.now < 20.0, "never"
    assert clock.now > 2.0, "too soon"
    assert atomic.names(run.requests / "claimed") == ["train-000000-01~0~rollout-1-0000cafe"]


def test_a_claim_that_its_living_owner_does_not_name_comes_back(run, clock):
    training(run).iterate(make_maintenance(run).snapshot())
    maintenance, owner = make_maintenance(run, clock), "rollout-1-0badf00d"
    requests = Spool(run.requests, RolloutRequest)
    kept, forgotten = [claim for claim, _ in zip(requests.claims(owner), range(2), strict=False)]
    for beat in range(1, 7):
        show(run, owner, beat, claims=[kept.name])
        maintenance.snapshot()
        clock.now += 1.0
    assert [a.identity for a in requests.addresses("claimed")] == [kept.name]
    assert forgotten.name in [a.identity for a in requests.addresses("ready")]


def test_a_message_lost_too_often_is_buried_and_its_member_closed(run, clock):
    maintenance, mode = make_maintenance(run, clock, max_losses=1), training(run)
    mode.iterate(maintenance.snapshot())
    for _ in range(12):
        list(Spool(run.requests, RolloutRequest).claims("rollout-1-deadbeef"))
        clock.now += 1.0
        mode.iterate(maintenance.snapshot())
    dead = [a.identity for a in Spool(run.requests, RolloutRequest).addresses("dead")]
    assert dead[:8] == [request.name for group in range(4) for request in requests_of(group)]
    assert ("train", 0) in closed(mode)


# retention


@pytest.mark.parametrize(
    ("published", "first"),
    [
        ([], 0),
        ([(5, 1)], 0),  # no fallback but the beginning
        ([(5, 1), (10, 1)], 5),
        ([(5, 1), (10, 1), (15, 1)], 10),
        (
            [(10, 1), (15, 1), (12, 2)],
            12,
        ),  # after a restart at 10; whoever resumes from 12 or 15 finds its batch
        ([(15, 1), (20, 1), (2, 2), (4, 2)], 2),  # a restart from the beginning
    ],
)
def test_batches_are_kept_from_the_fallback_checkpoint_on(published, first):
    assert first_kept_batch(published) == first


def test_milestones_and_the_newest_two_checkpoints_are_kept():
    published = [(step, 1) for step in range(2, 13, 2)]
    assert kept_checkpoints(published, 0) == {(10, 1), (12, 1)}
    assert kept_checkpoints(published, 4) == {(4, 1), (8, 1), (10, 1), (12, 1)}


def test_what_a_living_process_names_is_kept(run):
    for step in range(6):
        export(run, WeightVersion(step=step))
        save(run, step)
    nodes = [
        show(run, "inference-1-00000001", role="inference", versions=[WeightVersion(step=1)]),
        show(run, "evaluate-1-00000002", role="inference", reading="v000002-i00"),
        show(run, "learner-1-00000003", role="learner", reading="step_000000-i00"),
    ]
    gone = [path.name for path in superseded(run, KEPT, nodes)]
    assert gone == ["step_000001-i00", "step_000002-i00", "step_000003-i00", "v000000-i00", "v000003-i00"]


def test_the_parents_of_a_kept_delta_are_kept(run):
    versions = [WeightVersion(step=step) for step in range(6)]
    for version, parent in zip(versions, [None, None, *versions[1:5]], strict=True):
        export(run, version, parent)
    assert [path.name for path in superseded(run, KEPT, [])] == ["v000000-i00"]


def test_the_newest_batch_holds_the_state_and_is_always_kept(run):
    for step in range(4):
        old_batch(run, step)
    for step in (2, 4, 6):
        save(run, step)
    gone = superseded(run, KEPT, [])
    assert [path.name for path in gone if path.parent == run.batches] == [
        "step_000000",
        "step_000001",
        "step_000002",
    ]


class Frozen:
    """A mode that is frozen in its first iteration, while `meanwhile` happens to the run."""

    def __init__(self, meanwhile):
        self._meanwhile = [meanwhile]

    def iterate(self, snapshot):
        for happen in self._meanwhile[:1]:
            happen()
            self._meanwhile.clear()
            return Progress("", 3, {}, [])  # as far as it knows all is done
        return PROGRESS


def test_a_coordinator_that_was_frozen_deletes_and_ends_nothing(run, clock):
    """Another one has gone on meanwhile: engines read versions, and evaluations chose some, since then."""

    def go_on():
        clock.now += 3600.0
        for step in range(6):
            export(run, WeightVersion(step=step))
        show(run, "inference-1-00000001", role="inference", reading="v000002-i00")

    mode = Frozen(go_on)
    coordinator = Coordinator(run, make_maintenance(run, clock, retention=KEPT), lambda: mode, 1.0, {})
    assert not coordinator.iterate()
    assert len(atomic.names(run.weights)) == 6
    assert not run.finished.exists()
    clock.now += 1.0
    assert not coordinator.iterate()
    assert atomic.names(run.weights) == ["v000002-i00", "v000004-i00", "v000005-i00"]


@pytest.mark.parametrize(("asleep_s", "built"), [(2.0, 1), (3600.0, 2)])
def test_a_coordinator_that_was_frozen_reads_the_run_again(run, clock, asleep_s, built):
    """A round of an evaluation may have ended meanwhile, and its messages may be gone."""
    modes = []

    def build():
        modes.append(Frozen(lambda: None))
        modes[-1].iterate(None)
        return modes[-1]

    coordinator = Coordinator(run, make_maintenance(run, clock), build, 1.0, {})
    for _ in range(2):
        assert not coordinator.iterate()
        clock.now += asleep_s
    assert len(modes) == built


def test_a_coordinator_whose_iterations_are_slow_reports_and_finishes(run, clock):
    """A large run on a slow file system looks frozen at each iteration, and is not."""

    class Slow:
        rounds = 0

        def iterate(self, snapshot):
            Slow.rounds += 1
            clock.now += 121.0
            return replace(PROGRESS, waits_for="" if Slow.rounds > 3 else "results")

    coordinator = Coordinator(run, make_maintenance(run, clock), Slow, 1.0, {})
    for step in range(6):
        export(run, WeightVersion(step=step))
    assert not coordinator.iterate()
    assert run.status.exists()
    assert len(atomic.names(run.weights)) == 6
    assert [coordinator.iterate() for _ in range(3)] == [False, False, True]
    assert run.finished.exists()
    assert len(atomic.names(run.weights)) < 6


# sweeping


def test_what_a_dead_process_left_half_written_is_swept_after_an_hour(run, clock):
    show(run, "learner-1-00000001", role="learner")
    dead, alive, mine = "deadbeef", "00000001", atomic.identity()
    for identity in (dead, alive, mine):
        (run.weights / f".tmp-v000001-i00~abc123-{identity}").mkdir()
        (run.requests / "ready" / f".train-000000-00~0~abc123-{identity}").touch()
    (run.weights / ".hidden").mkdir()
    maintenance = make_maintenance(run, clock)

    def left():
        found = [*run.weights.iterdir(), *(run.requests / "ready").iterdir()]
        return {path.name[-8:] for path in found if path.name != ".hidden"}

    for beat in range(1, 8):
        show(run, "learner-1-00000001", beat, role="learner")
        maintenance.clean_up(maintenance.snapshot())
        assert left() == {dead, alive, mine} or clock.now > ORPHAN_S
        clock.now += ORPHAN_S / 6 + 1
    assert left() == {alive, mine}
    assert (run.weights / ".hidden").exists()


def remove_what_is_busy(run):
    """As on NFS, which keeps files that a process has open: the first removals fail."""
    clock, busy = Clock(), [True]
    refuse(run.root, lambda call, path: errno.EBUSY if call == "os.remove" and "x" in path and busy else 0)
    maintenance = make_maintenance(run, clock)
    lost = run.weights / ".tmp-v000002-i00~abc123-deadbeef"
    for folder in (lost, run.weights / "v000001-i00"):
        folder.mkdir()
        (folder / "x").touch()
    folders.remove(run.weights / "v000001-i00")
    (run.requests / "ready" / ".x~abc123-deadbeef").touch()  # nor does a file that stays end the coordinator
    left = []
    for look in range(20):
        clock.now += ORPHAN_S / 6 + 1
        if look == 10:
            busy.clear()
        maintenance.clean_up(maintenance.snapshot())
        left.append(len([*run.weights.iterdir(), *(run.requests / "ready").iterdir()]))
    assert (left[10 - 1], left[-1]) == (3, 0)


def test_what_cannot_be_removed_at_first_is_removed_later(run):
    assert in_child(remove_what_is_busy, run) == 0


# cells


def test_workers_learn_of_living_engines_at_once(run, clock):
    maintenance = make_maintenance(run, clock)

    def table():
        maintenance.publish(maintenance.snapshot(), PROGRESS, {}, 1000.0)
        return atomic.get(run.endpoints, EndpointTable)

    assert table().endpoints == []
    one = [WeightVersion(step=1)]
    show(run, "inference-1-00000001", role="inference", url="http://a", state="ready", versions=one)
    show(run, "inference-2-00000002", role="inference", url="", state="starting")
    clock.now += 1.0
    assert [(e.url, e.versions, e.updating) for e in table().endpoints] == [("http://a", one, False)]
    show(run, "inference-1-00000001", 2, role="inference", url="http://a", state="updating", versions=one)
    clock.now += 1.0
    assert [e.updating for e in table().endpoints] == [True]
    run.node("inference-1-00000001").unlink()
    clock.now += 1.0
    assert table().endpoints == []


def test_status_says_who_lives_what_lies_where_and_what_is_waited_for(run):
    show(run, "rollout-1-00000001", trouble="no engine answers")
    training(run).iterate(make_maintenance(run).snapshot())
    maintenance = make_maintenance(run)
    maintenance.publish(maintenance.snapshot(), PROGRESS, {"rollout": 2, "learner": 1}, 5.0)
    report = atomic.get(run.status, StatusReport)
    assert {(r.role, r.desired, r.alive) for r in report.roles} == {("rollout", 2, 1), ("learner", 1, 0)}
    assert report.spools["requests"]["ready"] == 8
    assert report.waits_for == "the learner"
    assert report.errors == ["train-000001-00 a0: engine"]
    assert report.troubles == {"rollout-1-00000001": "no engine answers"}


def test_status_tells_the_silent_from_the_living_and_the_oldest_message(run, clock):
    training(run).iterate(make_maintenance(run).snapshot())
    maintenance = make_maintenance(run, clock)
    for beat in range(3):
        show(run, "rollout-1-00000001", 1)
        show(run, "rollout-2-00000002", beat)
        snapshot = maintenance.snapshot()
        clock.now += 1.0
    maintenance.publish(snapshot, PROGRESS, {"rollout": 2}, 5.0)
    report = atomic.get(run.status, StatusReport)
    assert [(r.alive, r.silent) for r in report.roles] == [(2, 1)]
    assert report.oldest_s == {"requests": 2.0}


def test_too_little_space_is_said(run):
    maintenance = make_maintenance(run, retention=varied(RetentionConfig, free_space_floor_gb=1e9)())
    maintenance.publish(maintenance.snapshot(), PROGRESS, {}, 5.0)
    assert "too little free space" in atomic.get(run.status, StatusReport).troubles[str(run.root)]


def test_newer_weights_are_listed_before_anything_is_requested_of_them(run):
    maintenance, found = make_maintenance(run), []

    class Looking:
        def iterate(self, snapshot):
            found.append((snapshot.newest, atomic.get(run.endpoints, EndpointTable).newest))
            return PROGRESS

    coordinator = Coordinator(run, maintenance, Looking, 1.0, {})
    coordinator.iterate()
    export(run, WeightVersion(incarnation=1, step=1))
    coordinator.iterate()
    assert found == [(WeightVersion(), WeightVersion()), (WeightVersion(incarnation=1, step=1),) * 2]
