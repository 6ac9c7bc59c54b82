"""A file system that refuses single calls, as one does that fails over or that caches what others replace."""

import errno
from contextlib import suppress
from itertools import count

import pytest

from hpc_swe.base.errors import StorageError
from hpc_swe.base.records import Node, RolloutRequest, ScoredEpisode
from hpc_swe.base.store import atomic
from hpc_swe.base.store.spool import ALONE_S, PATIENCE_S, Spool
from hpc_swe.roles.coordinator import archive
from tests.kit.coordinator_kit import Clock, make_maintenance, rundir, training, work
from tests.kit.crash import in_child, refuse
from tests.kit.store_samples import request, shown, spool


def read_while_it_is_replaced(cell, times) -> None:
    looks = count()
    refuse(cell.parent, lambda call, path: errno.ESTALE if call == "open" and next(looks) < times else 0)
    assert atomic.get(cell, RolloutRequest) == request(7)


def test_a_cell_that_another_node_replaces_while_it_is_read_is_read_again(tmp_path):
    atomic.put(tmp_path / "cell.json", request(7))
    assert in_child(read_while_it_is_replaced, tmp_path / "cell.json", 3) == 0
    assert in_child(read_while_it_is_replaced, tmp_path / "cell.json", 100) == 1, "for ever"


def claim_what_cannot_be_read(root) -> None:
    refuse(root, lambda call, path: errno.EIO if call == "open" and "/claimed/" in path else 0)
    with pytest.raises(StorageError, match="an I/O error"):
        next(Spool(root, RolloutRequest).claims("w"))


def test_a_claim_whose_message_cannot_be_read_goes_back_without_a_loss(tmp_path):
    """Else a server that is away for some minutes would move all that waits to dead/, as lost too often."""
    spool(tmp_path, messages=1)
    for _ in range(3):
        assert in_child(claim_what_cannot_be_read, tmp_path) == 0
    assert shown(tmp_path) == [f"ready/{request().name}~0"]


def meet_one_that_is_damaged(root, are_others_there, patient) -> None:
    run, clock = rundir(root), Clock()
    maintenance, mode = make_maintenance(run, clock), training(run)
    mode.iterate(maintenance.snapshot())
    bad = "train-000000-00"
    refuse(root, lambda call, path: errno.EIO if call == "open" and bad in path else 0)
    worker, owner = Spool(run.requests, RolloutRequest), "rollout-1-00000000"
    if not are_others_there:
        for address in worker.addresses("ready"):
            worker.remove(address) if address.identity != bad else None
    for beat in range(100):
        clock.now += 1.0
        atomic.put(run.node(owner), Node(owner=owner, role="rollout", beat=beat, host="h", pid=1))
        with suppress(StorageError):
            for claim in worker.claims(owner):
                claim.give_back()
        if not patient:  # as if the message had been refused first so long ago
            worker._refused = {name: (since - PATIENCE_S, n) for name, (since, n) in worker._refused.items()}
        maintenance.snapshot()
    is_dead = are_others_there and not patient
    assert [name.split("~")[0] for name in atomic.names(run.requests / "dead")] == [bad] * is_dead


@pytest.mark.parametrize(("are_others_there", "patient"), [(True, False), (True, True), (False, False)])
def test_a_message_that_alone_can_never_be_read_is_lost_and_buried(tmp_path, are_others_there, patient):
    """Else its group would wait for ever, and with it all batches. A server that is away buries nothing."""
    assert in_child(meet_one_that_is_damaged, tmp_path, are_others_there, patient) == 0


def collect_what_cannot_be_read(root, bad) -> None:
    run, clock = rundir(root), Clock()
    maintenance, mode = make_maintenance(run, clock), training(run)
    mode.iterate(maintenance.snapshot())
    work(run)
    refuse(root, lambda call, path: errno.EIO if call == "open" and f"/scored/ready/{bad}" in path else 0)
    for now in (1.0, PATIENCE_S):
        clock.now = now
        progress = mode.iterate(maintenance.snapshot())
        assert "train-000000" in progress.waits_for, "for a result that may be readable again"
        assert any("an I/O error" in error for error in progress.errors)
        assert atomic.names(run.scored / "dead") == []
    clock.now = 2 * PATIENCE_S
    mode.iterate(maintenance.snapshot())
    progress = mode.iterate(maintenance.snapshot())
    is_alone = bad == "train-000000-00"
    assert atomic.names(run.scored / "dead") == [f"{bad}~0"] * is_alone
    assert ("train-000000" in progress.waits_for) is not is_alone


@pytest.mark.parametrize("bad", ["train-000000-00", "train-"])
def test_a_result_that_can_never_be_read_is_buried_if_others_can(tmp_path, bad):
    """Else all batches would wait for it. A server that is away, so that none can be read, buries nothing."""
    assert in_child(collect_what_cannot_be_read, tmp_path, bad) == 0


def archive_what_cannot_be_read(root, bad) -> None:
    run, clock = rundir(root), Clock()
    maintenance, mode = make_maintenance(run, clock), training(run)
    mode.iterate(maintenance.snapshot())
    work(run)
    messages = {path: path.read_bytes() for path in (run.scored / "ready").iterdir()}
    mode.iterate(maintenance.snapshot())
    whole = [each.episode.request.name for each in archive.read(run.archive(0))]
    run.archive(0).unlink()  # as if it had died before it wrote this one, and removed the messages
    for path, data in messages.items():
        path.write_bytes(data)
    refuse(root, lambda call, path: errno.EIO if call == "open" and f"/scored/ready/{bad}" in path else 0)
    mode, batch = training(run), run.batch(0).stat()
    for now in (1.0, PATIENCE_S):
        clock.now = now
        progress = mode.iterate(maintenance.snapshot())
        assert progress.waits_for == "results of step 0 that cannot be read, for its archive"
        assert sum(bad in error for error in progress.errors) == 1
        assert not run.archive(0).exists()
    clock.now = 2 * PATIENCE_S
    for _ in range(2):
        mode.iterate(maintenance.snapshot())
    assert atomic.names(run.scored / "dead") == [f"{bad}~0"]
    assert [each.episode.request.name for each in archive.read(run.archive(0))] == [
        name for name in whole if name != bad
    ]
    assert {*whole} & {name.split("~")[0] for name in atomic.names(run.scored / "ready")} == set()
    assert run.batch(0).stat() == batch


def test_an_archive_is_written_without_a_result_that_can_never_be_read(tmp_path):
    """Else a coordinator that starts after a crash would wait for it for ever."""
    assert in_child(archive_what_cannot_be_read, tmp_path, "train-000000-00") == 0


def collect_the_last_that_cannot_be_read(root) -> None:
    run, clock = rundir(root), Clock()
    maintenance, mode = make_maintenance(run, clock), training(run)
    mode.iterate(maintenance.snapshot())
    work(run)
    bad = {address.identity for address in Spool(run.scored, ScoredEpisode).addresses("ready")[:2]}
    held = [run.scored / "ready" / f"{name}~0" for name in bad]
    for path in held:
        path.rename(run.root / path.name)
    mode.iterate(maintenance.snapshot())  # reads all others
    for path in held:
        (run.root / path.name).rename(path)
    refuse(root, lambda call, path: errno.EIO if call == "open" and path in map(str, held) else 0)
    dead = []
    for part in range(1, 40):
        clock.now = part * ALONE_S / 10 + 1.0
        mode.iterate(maintenance.snapshot())
        dead.append(len(atomic.names(run.scored / "dead")))
    assert (dead[8], dead[15], dead[-1]) == (0, 1, 2), "a server that is away costs one now and then"


def test_the_last_results_are_given_up_one_by_one_if_none_can_be_read(tmp_path):
    """Nobody has work then, and supervision would end the run."""
    assert in_child(collect_the_last_that_cannot_be_read, tmp_path) == 0


def wait_for_one_that_nobody_can_read(root, name) -> None:
    run, clock = rundir(root), Clock()
    maintenance = make_maintenance(run, clock)
    Spool(run.spool(name), RolloutRequest).put(request().name, request())
    refuse(root, lambda call, path: errno.EIO if call == "open" and request().name in path else 0)
    dead = []
    for clock.now in (0.0, ALONE_S - 1.0, 2 * ALONE_S, 3 * ALONE_S):
        maintenance.clean_up(maintenance.snapshot())
        dead.append(atomic.names(run.spool(name) / "dead"))
    assert dead == [[], [], [], [f"{request().name}~0"]], "one refusal may be an outage"


@pytest.mark.parametrize("name", ["requests", "episodes"])
def test_the_last_message_of_workers_is_buried_if_nobody_can_read_it(tmp_path, name):
    """Workers return it, as there are no others that they could read, and supervision would end the run."""
    assert in_child(wait_for_one_that_nobody_can_read, tmp_path, name) == 0


def move_beside_others(root, readable, dead) -> None:
    run, clock = rundir(root), Clock()
    maintenance = make_maintenance(run, clock)
    spool(run.requests, messages=4)
    names = atomic.names(run.requests / "ready")
    bad = names[readable:]
    refuse(root, lambda call, path: errno.EIO if call == "open" and path.endswith(tuple(bad)) else 0)
    for clock.now in (0.0, 2 * ALONE_S, 3 * ALONE_S):
        maintenance.clean_up(maintenance.snapshot())
    assert atomic.names(run.requests / "dead") == bad[:dead]


@pytest.mark.parametrize(("readable", "dead"), [(1, 3), (0, 1)])
def test_each_message_is_judged_alone_unless_none_can_be_read(tmp_path, readable, dead):
    """An older one that can be read delays no other, and a server that is away costs one message."""
    assert in_child(move_beside_others, tmp_path, readable, dead) == 0


def test_a_message_that_waits_long_for_a_worker_stays(tmp_path):
    run, clock = rundir(tmp_path), Clock()
    maintenance = make_maintenance(run, clock)
    spool(run.requests, messages=2)
    for clock.now in (0.0, 2 * ALONE_S, 4 * ALONE_S):
        maintenance.clean_up(maintenance.snapshot())
    assert len(atomic.names(run.requests / "ready")) == 2
