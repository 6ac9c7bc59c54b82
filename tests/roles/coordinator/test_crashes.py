"""The coordinator killed before every file system call: what comes of it is as if it had not been."""

import errno
import re
import shutil
from itertools import count
from pathlib import Path

import pytest

from hpc_swe.base.errors import CorruptRecord, StorageError
from hpc_swe.base.metrics import decode
from hpc_swe.base.records import RolloutRequest, ScoredEpisode, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders
from hpc_swe.base.store.spool import Spool
from hpc_swe.roles.coordinator import archive
from hpc_swe.roles.coordinator.batching import batches
from hpc_swe.roles.coordinator.batching.groups import parse_name
from hpc_swe.roles.coordinator.loop import Coordinator
from tests.kit.coordinator_kit import (
    KEPT,
    Clock,
    export,
    finish,
    make_maintenance,
    published,
    result,
    reward,
    rundir,
    save,
    training,
    work,
)
from tests.kit.crash import FORK, at_every_call, in_child, refuse

DEEP = 2  # batches that a killed coordinator's successor still publishes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = rundir(tmp_path_factory.mktemp("undisturbed"))
    finish(run, steps=DEEP)
    return published(run)


def at(root):
    return RunDir(root / "run")


def archived(run):
    return [
        {s.episode.request.name for s in archive.read(run.archive(step))}
        for step in batches.published_steps(run)
    ]


def copies_of(folder, setup):
    """A `setup` that copies what the real one made once."""
    setup(folder)
    return lambda root: shutil.copytree(folder, root, dirs_exist_ok=True)


@pytest.fixture
def template(tmp_path_factory):
    return tmp_path_factory.mktemp("template")


def leftovers(run, consumed):
    """Results in scored/ whose group a batch has consumed."""
    groups = {("train", group) for batch in consumed for group in batch}
    names = [address.identity for address in Spool(run.scored, RolloutRequest).addresses("ready")]
    return [name for name in names if parse_name(name)[0] in groups]


def curve(run, name):
    """The steps at which a metric was logged."""
    lines = [line for path in run.metrics.iterdir() for line in decode(path.read_bytes())[0]]
    return {line.step for line in lines if name in line.values}


def ready_to_publish(root):
    """All results of batch 0 lie in scored/, and no coordinator has seen them together yet."""
    run = rundir(root)
    maintenance, mode = make_maintenance(run), training(run)
    while True:
        snapshot = maintenance.snapshot()
        mode._collector.collect(snapshot)
        if batches.plan_batch(mode._decision, mode.state, 0, 2):
            return
        mode._dispatch(snapshot)
        work(run)


def one_round(root):
    run = at(root)
    training(run).iterate(make_maintenance(run).snapshot())


@pytest.mark.slow
def test_a_death_anywhere_in_publishing_changes_no_batch_and_no_archive(tmp_path, template, undisturbed):
    seen = set()
    for root in at_every_call(tmp_path, copies_of(template, ready_to_publish), one_round):
        run = at(root)
        seen.add((run.batch(0).exists(), run.archive(0).exists()))
        finish(run, steps=DEEP)
        assert published(run) == undisturbed
        trained = [groups + closed for groups, closed, *_ in undisturbed.values()]
        assert archived(run) == [{f"train-{g:06d}-{i:02d}" for g in gs for i in (0, 1)} for gs in trained]
        assert leftovers(run, trained) == []
        assert curve(run, "reward/mean") == {0, 1}
        shutil.rmtree(root)
    assert seen == {(False, False), (True, False), (True, True)}  # died before, between and after


def start_beside_another(root):
    """Find no archive; before the first result is read, another coordinator starts and goes on."""
    run, reads = at(root), count()

    def go_on(call, path):
        if call == "open" and "/scored/ready/" in path and not next(reads):
            training(run, owner="other").iterate(make_maintenance(run).snapshot())
        return 0

    refuse(root, go_on)
    training(run).iterate(make_maintenance(run).snapshot())


def test_of_two_coordinators_that_start_the_slow_one_spoils_no_archive(tmp_path):
    """The first of them to write the archive removes the messages that the other one is about to read."""
    ready_to_publish(tmp_path)
    run = at(tmp_path)
    messages = {path: path.read_bytes() for path in (run.scored / "ready").iterdir()}
    training(run).iterate(make_maintenance(run).snapshot())
    (whole,) = archived(run)
    run.archive(0).unlink()  # as if it had died before it wrote this one and removed those
    for path, data in messages.items():
        path.write_bytes(data)
    assert in_child(start_beside_another, tmp_path) == 0
    assert archived(run) == [whole]


def iterate_on_a_disk_full_at(root, number, sender):
    """Refuse this write of one iteration and the next four; then there is room again, and the run goes on."""
    run, writes, seen = at(root), count(), []

    def code(call, path):
        is_write = call in ("create", "fsync", "os.mkdir", "os.link", "os.rename")
        if is_write and number <= next(writes) < number + 5:
            seen.append(path)
            return errno.EDQUOT
        return 0

    refuse(root, code)
    made = Coordinator(run, make_maintenance(run), lambda: training(run, steps=DEEP), 1.0, {})
    error = ""
    try:
        with atomic.storage(run.root):
            made.iterate()
    except StorageError as refusal:
        error = str(refusal)
    refused = len(seen)
    while next(writes) < number + 5:
        pass
    finish(run, steps=DEEP)
    sender.send((refused, error))


@pytest.mark.slow
def test_a_disk_full_anywhere_in_an_iteration_loses_nothing(tmp_path, template, undisturbed):
    ready_to_publish(template)
    for number in count():
        root = tmp_path / f"{number}"
        shutil.copytree(template, root)
        receiver, sender = FORK.Pipe(duplex=False)
        assert in_child(iterate_on_a_disk_full_at, root, number, sender) == 0
        refused, error = receiver.recv()
        if not refused:
            break
        run = at(root)
        assert not error or re.match(rf"{run.root}/.*: the quota is used up; see", error)
        assert published(run) == undisturbed
        trained = [groups + closed for groups, closed, *_ in undisturbed.values()]
        assert archived(run) == [{f"train-{g:06d}-{i:02d}" for g in gs for i in (0, 1)} for gs in trained]
        assert leftovers(run, trained) == []
        assert not [path for path in run.root.rglob(".*") if path.is_dir()]
        shutil.rmtree(root)
    assert number > 20


def test_a_death_anywhere_in_asking_again_loses_no_attempt(tmp_path, template):
    """An infrastructure failure: put the next attempt, drop the failure. It ends in one attempt more."""

    def setup(root):
        run = rundir(root)
        training(run).iterate(make_maintenance(run).snapshot())
        work(run, judge=lambda name: None if name == "train-000000-00" else reward(name))

    for root in at_every_call(tmp_path, copies_of(template, setup), one_round):
        run = at(root)
        maintenance, mode = make_maintenance(run), training(run)
        for _ in range(3):
            mode.iterate(maintenance.snapshot())
        claims = {c.name: c.message.attempt for c in Spool(run.requests, RolloutRequest).claims("w")}
        assert claims["train-000000-00"] == 1
        shutil.rmtree(root)


@pytest.mark.slow
def test_a_death_anywhere_in_recovery_loses_no_claim(tmp_path, template):
    def setup(root):
        run = rundir(root)
        training(run).iterate(make_maintenance(run).snapshot())
        spool = Spool(run.requests, RolloutRequest)
        for _ in range(2):
            next(spool.claims("rollout-1-deadbeef"), None)

    def recover(root):
        clock = Clock()
        maintenance = make_maintenance(at(root), clock)
        for _ in range(6):
            clock.now += 1.0
            maintenance.snapshot()

    for root in at_every_call(tmp_path, copies_of(template, setup), recover):
        recover(root)
        spool = Spool(at(root).requests, RolloutRequest)
        assert len(spool.addresses("ready")) == 8
        assert sum(address.redeliveries for address in spool.addresses("ready")) == 2
        shutil.rmtree(root)


def old_folders(root):
    run = rundir(root)
    for step in range(5):
        export(run, WeightVersion(step=step))
        batches.commit(run, batches.BatchPlan(step, [], [], {}, batches.CoordinatorState()), [], {})
    for step in (1, 2, 4):
        save(run, step)


def tidy(root):
    maintenance = make_maintenance(at(root), retention=KEPT)
    maintenance.clean_up(maintenance.snapshot())


@pytest.mark.slow
def test_a_death_anywhere_in_deleting_leaves_whole_folders_only(tmp_path, template):
    for root in at_every_call(tmp_path, copies_of(template, old_folders), tidy):
        run = at(root)
        for parent in (run.batches, run.weights, run.checkpoints):
            for path in parent.iterdir():
                assert path.name.startswith(".") or (path / folders.NAME).exists()
        tidy(root)
        assert batches.published_steps(run) == [2, 3, 4]
        assert [p.name for p in sorted(run.weights.glob("v*"))] == ["v000003-i00", "v000004-i00"]
        assert [p.name for p in sorted(run.checkpoints.glob("s*"))] == ["step_000002-i00", "step_000004-i00"]
        shutil.rmtree(root)


def test_late_results_of_abandoned_processes_are_in_no_batch_or_archive(tmp_path, undisturbed):
    """They come when the coordinator has counted the first ones, and it dies before it has written them."""
    ready_to_publish(tmp_path)
    run = at(tmp_path)
    lying = Spool(run.scored, ScoredEpisode)
    for scored in [lying.read(address) for address in lying.addresses("ready")]:
        request = scored.episode.request
        lying.put(request.name, result(request, 1.0 - reward(request.name)))
    finish(run, steps=DEEP)
    assert published(run) == undisturbed
    for step in batches.published_steps(run):
        assert all(s.score.reward == reward(s.episode.request.name) for s in archive.read(run.archive(step)))


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"{"), Path.unlink])
def test_a_trained_run_without_its_batches_does_not_begin_again(tmp_path, spoil):
    made = rundir(tmp_path / "made")
    finish(made, steps=2)
    shutil.copytree(made.root, tmp_path / "run")  # a process reads each manifest once
    run = at(tmp_path)
    for step in batches.published_steps(made):
        spoil(run.batch(step) / folders.NAME)
    with pytest.raises(CorruptRecord, match="no batch is intact, but .* has step 2; put a batch back"):
        training(run, steps=3)
