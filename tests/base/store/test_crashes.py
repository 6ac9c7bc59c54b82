"""Death before every file system call: after a recovery the folders are as if nobody had died."""

import contextlib

import pytest

from hpc_swe.base.errors import LostRace
from hpc_swe.base.records import Episode, ExitStatus, Manifest, Timing
from hpc_swe.base.store import folders
from hpc_swe.base.store.spool import STATES, Spool
from tests.kit.crash import FORK, at_every_call
from tests.kit.store_samples import FILES, publish, request, shown, spool

NAME = request().name


def rollout(root) -> None:
    """One round of a rollout worker."""
    for claim in spool(root / "requests").claims("w"):
        episode = Episode(
            request=claim.message,
            turns=[],
            messages=[],
            exit_status=ExitStatus.SUBMITTED,
            submission="diff",
            timing=Timing(),
            worker="w",
        )
        Spool(root / "episodes", Episode).put(claim.name, episode)
        claim.finish()


def recover(root, max_losses=10):
    return spool(root).recover(lambda address: True, max_losses)


def setup(root) -> None:
    spool(root / "requests", messages=1)
    spool(root / "episodes")


def test_a_worker_killed_anywhere_leaves_the_run_as_one_that_was_not(tmp_path):
    deaths = -1
    for root in at_every_call(tmp_path, setup, rollout):
        deaths += 1
        recover(root / "requests")
        rollout(root)
        assert shown(root) == [f"episodes/ready/{NAME}~0"]
        assert next(Spool(root / "episodes", Episode).claims("c"), None).message.submission == "diff"
    assert deaths >= 7  # list, claim, read; create, fsync, rename; unlink


def test_a_claim_killed_anywhere_is_lost_once_at_most(tmp_path):
    for root in at_every_call(
        tmp_path, lambda root: spool(root, 1), lambda root: next(spool(root).claims("w"), None)
    ):
        moved = recover(root)
        (left,) = shown(root)
        assert left == f"ready/{NAME}~{len(moved)}"


def test_a_finish_killed_anywhere_drops_the_message_or_brings_it_back(tmp_path):
    def finish(root) -> None:
        next(spool(root).claims("w"), None).finish()

    for root in at_every_call(tmp_path, lambda root: spool(root, 1), finish):
        recover(root)
        assert shown(root) in ([], [f"ready/{NAME}~0"], [f"ready/{NAME}~1"])
    assert shown(root) == []


def test_a_give_back_killed_anywhere_loses_nothing(tmp_path):
    def give_back(root) -> None:
        next(spool(root).claims("w"), None).give_back()

    for root in at_every_call(tmp_path, lambda root: spool(root, 1), give_back):
        recover(root)
        assert shown(root) in ([f"ready/{NAME}~0"], [f"ready/{NAME}~1"])
        assert next(spool(root).claims("v"), None).message == request()


def test_a_put_killed_anywhere_publishes_all_or_nothing(tmp_path):
    seen = set()
    for root in at_every_call(tmp_path, spool, lambda root: spool(root, 1)):
        seen.add(tuple(shown(root)))
        spool(root, 1)
        assert shown(root) == [f"ready/{NAME}~0"]
        assert next(spool(root).claims("v"), None).message == request()
    assert seen == {(), (f"ready/{NAME}~0",)}


@pytest.mark.parametrize(("max_losses", "state"), [(10, "ready"), (0, "dead")])
def test_a_recovery_killed_anywhere_is_completed_by_the_next(tmp_path, max_losses, state):
    def claim_all(root) -> None:
        for _ in spool(root, 3).claims("w"):
            pass

    for root in at_every_call(tmp_path, claim_all, lambda root: recover(root, max_losses)):
        recover(root, max_losses)
        assert shown(root) == [f"{state}/{request(index).name}~1" for index in range(3)]


def test_a_publish_killed_anywhere_is_whole_or_absent_and_repeatable(tmp_path):
    states = set()
    for root in at_every_call(tmp_path, lambda root: None, lambda root: publish(root / "step_000001")):
        states.add(len(shown(root)))
        with contextlib.suppress(LostRace):
            publish(root / "step_000001", "second")
        listed = folders.manifest(root / "step_000001", Manifest)
        assert {name: folders.read(root / "step_000001", name, listed) for name in FILES} == FILES
        assert shown(root) == sorted(f"step_000001/{name}" for name in [*FILES, folders.NAME])
    assert states == {0, 3}


def test_of_two_writers_one_dying_anywhere_the_folder_is_whole_and_one_s(tmp_path):
    rivals = []

    def start_rival(root) -> None:
        rivals.append(FORK.Process(target=publish_or_lose, args=(root / "v1", "rival")))
        rivals[-1].start()

    for root in at_every_call(tmp_path, start_rival, lambda root: publish_or_lose(root / "v1", "dying")):
        publish_or_lose(root / "v1", "later")
        rivals[-1].join()
        listed = folders.manifest(root / "v1", Manifest)
        assert listed.writer in ("rival", "dying", "later")
        assert [folders.read(root / "v1", name, listed) for name in FILES] == list(FILES.values())
        assert shown(root) == sorted(f"v1/{name}" for name in [*FILES, folders.NAME])


def publish_or_lose(final, writer) -> None:
    with contextlib.suppress(LostRace):
        publish(final, writer)


def test_a_removal_killed_anywhere_leaves_the_folder_whole_or_out_of_sight(tmp_path):
    seen = set()
    for root in at_every_call(
        tmp_path, lambda root: publish(root / "v1"), lambda root: folders.remove(root / "v1")
    ):
        seen.add(len(shown(root)))
        folders.remove(root / "v1")
        assert shown(root) == []
        publish(root / "v1")  # the leftover is in nobody's way
        folders.remove(root / "v1")
    assert seen == {0, 3}


def test_leftovers_of_the_dead_are_no_messages(tmp_path):
    made = spool(tmp_path)
    for state in STATES:
        (tmp_path / state / f".{NAME}~0~a1b2c3-0123abcd").write_bytes(b"half")
        assert made.addresses(state) == []
    assert next(made.claims("w"), None) is None
