"""Who is alive: judged by looks, without a clock that two nodes share."""

import os
import time

import msgspec
import pytest

from hpc_swe.base.records import Node
from hpc_swe.base.store import atomic
from hpc_swe.base.store.lease import MAX_STALLS, Lease, Watcher
from tests.kit.crash import FORK
from tests.kit.waiting import DEADLINE_S, until

BEAT, TTL = 30.0, 120.0
LIMIT = 4  # looks without growth
CREW = [f"w{index}" for index in range(10)]


class Watch:
    """A watcher whose time the test passes."""

    def __init__(self, run) -> None:
        self.run, self.now = run, 0.0
        self.watcher = Watcher(run, BEAT, TTL, clock=lambda: self.now)

    def look(self, alive=(), claims=(), after=BEAT, owners=()) -> None:
        """Let `alive` beat, then look."""
        self.now += after
        for owner in alive:
            beat(self.run, owner, int(self.now), list(claims))
        self.watcher.look(owners)

    def dead(self, owners=CREW) -> set[str]:
        return {owner for owner in owners if self.watcher.is_dead(owner)}


def beat(run, owner, count, claims=()) -> None:
    node = Node(owner=owner, role="rollout", beat=count, host="h", pid=1, claims=list(claims))
    atomic.put(run.node(owner), node, durable=False)


@pytest.fixture
def watch(run):
    return Watch(run)


def test_an_owner_that_stops_beating_is_dead_after_the_grace_not_before(watch):
    watch.look(["a", "b"])
    for _ in range(LIMIT - 1):
        watch.look(["b"])
        assert watch.dead(["a", "b"]) == set()
    watch.look(["b"])
    assert watch.dead(["a", "b"]) == {"a"}
    assert [node.owner for node in watch.watcher.live("rollout")] == ["b"]
    assert watch.watcher.live("learner") == []


def test_a_dead_owner_that_beats_again_is_alive(watch):
    watch.look(["a"])
    for _ in range(LIMIT):
        watch.look()
    assert watch.dead(["a"]) == {"a"}
    watch.look(["a"])
    assert watch.dead(["a"]) == set()


def test_a_watcher_that_slept_for_a_day_wakes_up_to_a_living_world(watch):
    watch.look(CREW)
    watch.look(after=86_400.0)
    assert watch.dead() == set()


@pytest.mark.parametrize("life_s", [7.0, BEAT - 1.0, BEAT, 2.5 * BEAT])
def test_a_watcher_that_often_starts_anew_goes_on_counting(watch, life_s):
    """Neither sooner nor never: the living beat on, and what the dead leave is seen after their grace."""
    watch.look(["a", "b"], owners=["ghost"])
    lived, beats = 0.0, 0
    while watch.dead(["a", "b", "ghost"]) != {"a", "ghost"}:
        assert watch.dead(["a", "b", "ghost"]) <= {"a", "ghost"}
        watch.watcher = Watcher(watch.run, BEAT, TTL, lambda: watch.now, watch.watcher.memory())
        for step in range(int(life_s)):
            lived += 1.0
            if lived // BEAT > beats:
                beats += 1
                beat(watch.run, "b", 1000 + beats)
            watch.look(after=1.0, owners=["ghost"] if step % 2 else ["ghost", "b"])
        assert lived <= TTL + 2 * BEAT + life_s, "never"
    assert lived >= TTL - 2 * BEAT, "sooner"


def test_a_foreign_cell_is_never_removed_and_a_copied_one_is_nobody(watch):
    watch.look(["a"])
    (watch.run.nodes / "a copy.json").write_bytes(watch.run.node("a").read_bytes())
    (watch.run.nodes / "mine.json").write_text("my notes")
    for _ in range(LIMIT + 1):
        watch.look(["a"])
        assert [node.owner for node in watch.watcher.live()] == ["a"]
    watch.watcher.forget(keep=[])
    assert atomic.names(watch.run.nodes) == ["a copy.json", "a.json", "mine.json"]


def test_a_clock_that_differs_between_nodes_does_not_matter(watch):
    """No mtime is read: cells from the future and from 1970 live and die alike."""
    for count in range(LIMIT + 2):
        watch.look(["a", "b"])
        os.utime(watch.run.node("a"), (0, 0))
        os.utime(watch.run.node("b"), (4e9, 4e9))
        assert watch.dead(["a", "b"]) == set(), count


@pytest.mark.parametrize("late", range(11))
def test_a_stall_of_everybody_robs_nobody(watch, late):
    """The stall falls between two looks: the first `late` owners got one more beat out than the others."""
    watch.look(CREW)
    watch.look(CREW[:late])
    for _ in range(LIMIT + 1):
        watch.look()
        assert watch.dead() == set()
    watch.look(CREW)
    for _ in range(LIMIT - 1):
        watch.look(CREW)
    assert watch.dead() == set()


def test_a_stall_that_does_not_end_is_death_after_the_patience(watch):
    watch.look(CREW)
    for _ in range(LIMIT - 1 + MAX_STALLS):
        watch.look()
        assert watch.dead() == set()
    watch.look()
    assert watch.dead() == set(CREW)


def test_a_cell_that_the_file_system_cannot_read_is_not_looked_at(watch):
    """/proc/self/mem at 0 answers with a true EIO."""
    watch.look(["a", "b"])
    watch.run.node("a").unlink()
    watch.run.node("a").symlink_to("/proc/self/mem")
    for _ in range(3 * LIMIT):
        watch.look(["b"])
    assert watch.dead(["a", "b"]) == set()
    watch.run.node("a").unlink()
    for _ in range(LIMIT):
        watch.look(["b"])
    assert watch.dead(["a", "b"]) == {"a"}


@pytest.mark.parametrize("data", [b"", b'{"owner": "a', b"\xff\xfe"], ids=["empty", "cut off", "binary"])
def test_a_corrupt_cell_of_a_dead_node_does_not_keep_its_claims(watch, data):
    watch.look(["a", "b"])
    watch.run.node("a").write_bytes(data)
    for _ in range(LIMIT):
        watch.look(["b"])
    assert watch.dead(["a", "b"]) == {"a"}


def test_an_owner_that_holds_a_claim_and_never_showed_a_cell_dies_too(watch):
    for _ in range(LIMIT + 1):
        assert watch.dead(["ghost"]) == set()
        watch.look(owners=["ghost"])
    assert watch.dead(["ghost"]) == {"ghost"}


def test_a_claim_its_live_owner_does_not_name_is_abandoned_after_two_looks(watch):
    verdicts = []
    for _ in range(3):
        watch.look(["a"], claims=["mine"])
        verdicts.append((watch.watcher.is_abandoned("a", "mine"), watch.watcher.is_abandoned("a", "orphan")))
    assert verdicts == [(False, False), (False, False), (False, True)]


def test_a_busy_owner_may_take_its_time_to_name_a_claim(watch):
    """It beats at every change, a hundred times between two looks; beats are no measure of time."""
    watch.look(["a"])
    assert not watch.watcher.is_abandoned("a", "new")
    beat(watch.run, "a", 10_000)
    watch.look()
    assert not watch.watcher.is_abandoned("a", "new")
    watch.look(["a"], claims=["new"])
    assert not watch.watcher.is_abandoned("a", "new")


def test_a_claim_taken_again_under_its_old_name_is_a_new_claim(watch):
    watch.look(["a"])
    assert not watch.watcher.is_abandoned("a", "again")
    for _ in range(5):  # finished meanwhile, so nobody asks
        watch.look(["a"])
    assert not watch.watcher.is_abandoned("a", "again")


def test_claims_of_the_silent_wait_for_the_lease_to_run_out(watch):
    watch.look(["a"])
    for _ in range(LIMIT - 1):
        watch.look()
        assert not watch.watcher.is_abandoned("a", "claim")


def test_a_process_that_ended_is_not_offered_but_its_claims_have_grace(watch):
    watch.look(["a"])
    watch.run.node("a").unlink()
    watch.look()
    assert watch.watcher.live() == []
    assert watch.dead(["a"]) == set()


def test_the_dead_are_forgotten_when_they_hold_nothing(watch):
    watch.look(["a", "b"])
    for _ in range(LIMIT):
        watch.look()
    assert watch.watcher.forget(keep=iter(["b"])) == ["a"]
    assert atomic.names(watch.run.nodes) == ["b.json"]
    assert watch.watcher.forget(keep=[]) == ["b"]
    assert atomic.names(watch.run.nodes) == []


def test_a_name_is_never_used_twice_even_by_a_requeued_job(run):
    def owner() -> str:
        return Lease(run, "rollout", "123_4", beat_s=600.0).owner

    names = FORK.Queue()
    for _ in range(2):
        child = FORK.Process(target=lambda: names.put(owner()))
        child.start()
        child.join()
    made = {names.get(timeout=DEADLINE_S) for _ in range(2)}
    assert len(made | {owner()}) == 3


def test_a_process_beats_while_it_works_and_takes_its_cell_with_it(run):
    with Lease(run, "rollout", "1", beat_s=0.01) as lease:
        first = atomic.get(run.node(lease.owner), Node).beat
        until(lambda: atomic.get(run.node(lease.owner), Node).beat > first + 2, "a third beat")
        lease.publish(claims=["x"], slots=8)
        node = atomic.get(run.node(lease.owner), Node)
        assert (node.claims, node.slots) == (["x"], 8)
        assert node == msgspec.structs.replace(lease.node, beat=node.beat), "it beats on meanwhile"
    assert atomic.names(run.nodes) == []


def test_a_holder_whose_beat_cannot_be_written_goes_on_and_beats_later(run, caplog):
    with Lease(run, "rollout", "1", beat_s=0.01) as lease:
        run.nodes.rename(run.root / "away")
        until(lambda: "beat failed" in caplog.text)
        (run.root / "away").rename(run.nodes)
        before = atomic.get(run.node(lease.owner), Node).beat
        until(lambda: atomic.get(run.node(lease.owner), Node).beat > before, "a beat")


def hold_and_die(run, ready) -> None:
    with Lease(run, "rollout", "1", beat_s=0.05):
        ready.wait(DEADLINE_S)
        os._exit(1)


def test_a_killed_process_is_dead_by_the_clock_on_the_wall(run):
    ready = FORK.Event()
    holder = FORK.Process(target=hold_and_die, args=(run, ready))
    holder.start()
    watcher = Watcher(run, beat_s=0.1, ttl_s=0.5)
    until(lambda: watcher.look() or watcher.live(), "a lease")
    (node,) = watcher.live()
    for _ in range(10):
        before = atomic.get(run.node(node.owner), Node).beat
        until(lambda before=before: atomic.get(run.node(node.owner), Node).beat > before, "a beat")
        watcher.look()
        assert not watcher.is_dead(node.owner)
    ready.set()
    holder.join()
    died = time.monotonic()
    until(lambda: watcher.look() or watcher.is_dead(node.owner), "its death")
    assert time.monotonic() - died > 0.3, "it had its grace"


def test_nobody_dies_while_the_watcher_itself_cannot_beat(run):
    """On a full file system no beat succeeds, but renames do: all claims would be lost, again and again."""
    watch = Watch(run)
    watch.watcher = Watcher(run, BEAT, TTL, clock=lambda: watch.now, own="me")
    watch.look(["me", *CREW])
    for _ in range(100):
        watch.look()
    assert watch.dead() == set()
    for _ in range(LIMIT + MAX_STALLS):
        watch.look(["me", CREW[0]])
    assert watch.dead() == {*CREW[1:]}, "those that do not come back are dead as ever"
