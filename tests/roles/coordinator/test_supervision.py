"""Which part is stuck: tables for the decision, and what a verdict does to the run folder."""

import msgspec
import pytest

from hpc_swe.base.errors import StuckRun
from hpc_swe.base.records import Node, WeightVersion
from hpc_swe.base.rundir import SPOOLS
from hpc_swe.base.store import atomic, supervision
from hpc_swe.base.store.lease import Lease
from hpc_swe.base.store.spool import STATES, Address
from hpc_swe.base.store.supervision import Clocks, RunPart
from hpc_swe.roles.coordinator.snapshot import Progress, RunSnapshot
from hpc_swe.roles.coordinator.supervision import KEPT_VERDICTS, LAST_STACKS_S, REFUSED_S, Supervision, parts

ROLES = ("coordinator", "learner", "inference", "rollout", "reward")
LIMITS = dict.fromkeys(ROLES, 100.0)
V1, V2 = WeightVersion(step=1), WeightVersion(step=2)


def node(role: str, **shown) -> Node:
    ready = {"state": "ready", "url": "http://e" if role == "inference" else ""}
    versions = {"versions": [V1]} if role == "inference" else {}
    known = {"owner": f"{role}-1-aa", "role": role, "beat": 1, "host": "h", "pid": 7}
    return Node(**{**known, **ready, **versions, **shown})


def snapshot(*nodes: Node, now: float = 0.0, newest=V1, has_room: bool = True, **ready: list[str]):
    """What is ready lies in the spools; the nodes are all roles, idle, unless a node of a role is given."""
    given = {each.role for each in nodes}
    idle = [node(role, step=1) for role in ROLES if role not in given]
    scan = {spool: {state: [] for state in STATES} for spool in SPOOLS}
    for spool, names in ready.items():
        scan[spool]["ready"] = [Address(name, 0, "") for name in names]
    return RunSnapshot(now, scan, newest, [*idle, *nodes], has_room)


def busy(seen, step: int = 1) -> list[str]:
    """Parts with work, but for the main loops, which all have some."""
    found = parts(seen, step, 10, ROLES, LIMITS)
    return [part.name for part in found if not part.name.startswith("loop of")]


TASK = "train-000000-00"
CLAIMS = node("rollout", claims=[TASK], steps=[0])
GRADES = node("reward", claims=[TASK], steps=[0])
PLAYED, GRADED = f"{TASK} of rollout-1-aa", f"{TASK} of reward-1-aa"


@pytest.mark.parametrize(
    ("seen", "step", "names"),
    [
        (snapshot(CLAIMS), 1, [PLAYED]),
        (snapshot(GRADES), 1, [GRADED]),
        (snapshot(CLAIMS, GRADES), 1, [PLAYED, GRADED]),
        (snapshot(CLAIMS, node("inference", state="starting", url="")), 1, []),
        (snapshot(CLAIMS, node("inference", state="sleeping"), newest=V2), 1, []),
        (snapshot(requests=["train-000000-00"]), 1, ["claims of rollout"]),
        (snapshot(node("rollout", state="draining"), requests=["train-000000-00"]), 1, []),
        (snapshot(node("inference", state="starting", url=""), requests=["train-000000-00"]), 1, []),
        (snapshot(episodes=["train-000000-00"]), 1, ["claims of reward"]),
        (snapshot(newest=V2), 1, ["version of inference-1-aa"]),
        (snapshot(newest=WeightVersion(incarnation=1)), 1, ["work of all"]),
        (snapshot(CLAIMS, newest=V2), 1, ["version of inference-1-aa", PLAYED]),
        (snapshot(), 2, ["step of learner-1-aa"]),
        (snapshot(node("learner", step=10)), 10, ["step of learner-1-aa"]),
        (snapshot(scored=["train-000000-00"]), 1, ["work of all"]),
        (snapshot(has_room=False), 1, []),
        (snapshot(node("inference", state="starting", url="")), 1, []),
    ],
    ids=[
        *("an episode", "a grading", "both in order", "no engine serves"),
        *("engines sleep", "nobody claims", "it drains"),
        *("requests wait for an engine", "nobody grades", "an old version", "a learner went back"),
        *("an engine before its users",),
        *("a batch", "the last checkpoint", "nobody else has work", "the disk is full", "an engine starts"),
    ],
)
def test_a_part_has_work_unless_it_waits_for_another(seen, step, names):
    assert busy(seen, step) == names


def test_nobody_is_blamed_while_a_role_waits_in_the_queue_of_the_scheduler():
    for role in ROLES[1:]:
        without = snapshot()
        nodes = [each for each in without.nodes if each.role != role]
        assert busy(RunSnapshot(0.0, without.scan, V1, nodes, True)) == []


def one(seen: str = "a", beat: int = 1, name: str = "p", role="rollout") -> RunPart:
    return RunPart(name, role, [node(role, beat=beat)], seen, "why", 100.0)


@pytest.mark.parametrize(
    ("looks", "is_stuck"),
    [
        ([(t, one(beat=t)) for t in range(0, 121, 20)], True),
        ([(t, one(beat=t)) for t in range(0, 81, 20)], False),
        ([(t, one(seen=str(t > 60), beat=t)) for t in range(0, 141, 20)], False),
        ([(t, one(beat=1)) for t in range(0, 1000, 20)], False),
        ([(t, one(beat=t)) for t in (0, 20, 40, 5000)], False),
        ([(t, one(beat=t) if t != 60 else None) for t in range(0, 121, 20)], False),
    ],
    ids=[
        *("for its limit", "for less", "it did something", "its heart stands still"),
        *("the watcher slept", "it had no work in between"),
    ],
)
def test_a_part_is_stuck_when_it_lives_and_does_nothing_for_its_limit(looks, is_stuck):
    clocks, found = Clocks(longest_look_s=30.0), []
    for now, part in looks:
        found = [part] if part else []
        clocks.look(found, float(now))
    assert bool(supervision.find_stuck(found, clocks.still)) == is_stuck


class Story:
    """A run whose one reward worker works on one episode for ever, beside others that end."""

    def __init__(self, run, tries: int) -> None:
        self.run, self.now, self.tries = run, 0.0, tries
        self.lease = Lease(run, "coordinator", "1", 1.0)
        self.is_obeyed = True
        self.others: list[Node] = []
        self.restart()

    def restart(self) -> None:
        self.watcher = Supervision(self.lease, self.run, LIMITS, self.tries, ROLES, 10, 10.0)

    def live(self, seconds: float, scored: tuple[str, ...] = ()) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 10.0
            beat = int(self.now)
            shown = {"beat": beat, "loops": beat}
            others = [node(role, **shown) for role in ("rollout", "inference")]
            starts = self.verdict.number if self.is_obeyed else 0
            claims = {"claims": [TASK, f"train-{beat:06d}-00"], "steps": [1, beat]}
            hangs = node("reward", owner=f"reward-1-{starts}", **claims, **shown)
            others += [msgspec.structs.replace(each, beat=beat) for each in self.others]
            seen = snapshot(*others, hangs, now=self.now, scored=list(scored))
            self.watcher.look(seen, Progress("results", 1, {}, []))

    @property
    def verdict(self) -> supervision.Verdict:
        return supervision.read(self.run)


def test_a_part_that_stays_stuck_ends_the_run_after_its_tries(run):
    story = Story(run, tries=2)
    story.live(100)
    assert (story.verdict.number, story.verdict.tries, story.verdict.role) == (0, 0, "coordinator")
    story.live(10)
    assert (story.verdict.number, story.verdict.tries, story.verdict.role) == (1, 1, "reward")
    assert [each.owner for each in story.verdict.processes] == ["reward-1-0"]
    assert "reward-1-0 works on train-000000-00" in story.verdict.message(2)
    story.restart()
    with pytest.raises(StuckRun, match="stuck reward, given up after 2 restarts, see stacks/000003-reward"):
        story.live(1000)
    assert (story.now, story.verdict.gave_up, run.stop.exists()) == (340.0, True, True)


def test_a_run_that_was_given_up_ends_unless_a_person_starts_it_again(run):
    """Also if the coordinator dies before it has ordered the end."""
    story = Story(run, tries=0)
    story.live(110)
    story.restart()
    with pytest.raises(StuckRun):
        story.live(10)
    assert run.stop.exists()
    run.stop.unlink()
    supervision.forget(run)  # as `launch start` does
    story.restart()
    story.live(20)
    assert (story.verdict.number, story.verdict.message(0)) == (1, "")


def test_the_run_stops_once_what_is_stuck_was_ended_or_too_late(run):
    """Workers whose main loops turn would obey the order before their stacks are written."""
    story = Story(run, tries=0)
    story.is_obeyed = False
    story.live(110 + LAST_STACKS_S - 10)
    assert (story.verdict.gave_up, run.stop.exists()) == (True, False)
    with pytest.raises(StuckRun, match="given up after 0 restarts"):
        story.live(10)
    assert run.stop.exists()


@pytest.mark.parametrize(("tries", "named"), [(1, ["reward-1-0"]), (0, ["reward-1-0", "learner-1-aa"])])
def test_the_earliest_stuck_role_is_blamed_and_each_when_the_run_ends(run, tries, named):
    """Nobody else would end a learner that hangs, too, before its job's time is over."""
    story = Story(run, tries)
    story.others = [node("learner", step=0)]
    story.live(110)
    assert [each.owner for each in story.verdict.processes] == named


def test_a_verdict_that_no_watchdog_obeys_is_no_restart(run):
    story = Story(run, tries=1)
    story.live(110)
    story.is_obeyed = False
    owner = story.verdict.processes[0].owner
    story.live(110)
    assert (owner, story.verdict.tries, story.verdict.ignored) == ("reward-1-0", 1, 1)
    assert "its watchdog, jobs.run on h, was asked 1 times and did not end it" in story.verdict.message(1)
    with pytest.raises(StuckRun, match="was asked 2 times"):
        story.live(1000)


def refusing(*counts: int, now: float = 0.0):
    engines = [
        node("inference", owner=f"inference-{n}-aa", refusals=count, trouble="refused v000002-i00: no head")
        for n, count in enumerate(counts)
    ]
    return snapshot(*engines, now=now, newest=V2)


@pytest.mark.parametrize(
    ("looks", "ends"),
    [
        ([(0.0, (1,)), (20.0, (2,)), (40.0, (3,)), (100.0, (4,))], True),
        ([(0.0, (1,)), (20.0, (2,)), (REFUSED_S + 1, (2,))], True),
        ([(0.0, (1,)), (REFUSED_S + 1, (1,))], False),
        ([(0.0, (2,)), (100.0, (0,)), (200.0, (2,)), (REFUSED_S + 1, (2,))], False),
        ([(0.0, (9, 0)), (REFUSED_S + 1, (9, 0))], False),
        ([(0.0, (9, 1)), (20.0, (9, 4))], True),
    ],
    ids=["often", "for long", "once", "loaded in between", "another engine loads", "both"],
)
@pytest.mark.parametrize("is_limited", [False, True])
def test_a_run_whose_every_engine_refuses_all_weights_ends(run, looks, ends, is_limited):
    limits = dict.fromkeys(ROLES, 1e9) if is_limited else {}
    watcher = Supervision(Lease(run, "coordinator", "1", 1.0), run, limits, 3, ROLES, 10, 10.0)
    for now, counts in looks[:-1]:
        watcher.look(refusing(*counts, now=now), Progress("results", 1, {}, []))
    assert not run.stop.exists()
    now, counts = looks[-1]
    last = refusing(*counts, now=now)
    if ends:
        with pytest.raises(
            StuckRun, match="given up: every engine refuses new weights, . times in a row: .*head"
        ):
            watcher.look(last, Progress("results", 1, {}, []))
    else:
        watcher.look(last, Progress("results", 1, {}, []))
    assert (run.stop.exists(), supervision.read(run).gave_up) == (ends, ends)


def test_refusals_do_not_end_a_run_whose_learner_still_has_a_batch(run):
    lease = Lease(run, "coordinator", "1", 1.0)
    watcher = Supervision(lease, run, dict.fromkeys(ROLES, 1e9), 3, ROLES, 10, 10.0)
    for now in (0.0, REFUSED_S + 1):
        watcher.look(refusing(9, now=now), Progress("results", 1, {}, [], awaits_learner=True))
    watcher.look(refusing(10, now=REFUSED_S + 2), Progress("results", 1, {}, []))
    assert not run.stop.exists()


def test_progress_of_the_run_forgets_earlier_tries(run):
    story = Story(run, tries=1)
    story.live(120)
    story.live(60, scored=("train-000001-00",))
    assert (story.verdict.tries, story.verdict.message(1)) == (0, "")
    story.live(50)
    assert (story.verdict.number, story.verdict.tries) == (2, 1)


def test_a_learner_that_hangs_at_the_same_step_each_time_is_given_up(run):
    """Each restart repeats the steps before, under another incarnation, which is no progress.

    A coordinator that starts again remembers that. Each try may last as long again, since a step that is
    honest and slow is as slow when it is repeated.
    """
    lease = Lease(run, "coordinator", "1", 1.0)

    def live(watcher: Supervision, incarnation: int, number: int) -> None:
        beat, step = 50 * incarnation + number, min(number, 2)
        shown = {"beat": beat, "loops": beat}
        newest = WeightVersion(incarnation=incarnation, step=step)
        nodes = [node("rollout", **shown), node("reward", **shown)]
        nodes += [node("inference", versions=[newest], **shown)]
        nodes += [node("learner", owner=f"learner-{incarnation}", beat=beat, step=step)]
        watcher.look(snapshot(*nodes, now=10.0 * beat, newest=newest), Progress("the learner", 3, {}, []))

    def repeat() -> None:
        for incarnation in range(1, 5):
            if incarnation < 4:
                watcher = Supervision(lease, run, LIMITS, 2, ROLES, 10, 10.0)
            for number in range(3 + 10 * incarnation):
                assert supervision.read(run).number == incarnation - 1
                live(watcher, incarnation, number)

    with pytest.raises(StuckRun, match="learner-3 does not finish step 2"):
        repeat()
    assert supervision.read(run).tries == 2


def test_a_coordinator_that_restarts_often_finds_a_stuck_part_too(run):
    story = Story(run, tries=1)
    while not story.verdict.number:
        story.restart()
        story.live(20)
        assert story.now < 400


def test_only_the_stacks_of_old_verdicts_are_deleted(run):
    run.stacks.mkdir()
    for number in (1, 2, 3):
        run.stack(number, "reward-1-aa").touch()
    atomic.put(run.supervision, supervision.Verdict(number=KEPT_VERDICTS + 1))
    Story(run, tries=1).live(120)
    assert atomic.names(run.stacks) == ["000002-reward-1-aa.txt", "000003-reward-1-aa.txt"]


def test_who_sets_no_limit_is_never_judged(run):
    story = Story(run, tries=1)
    story.watcher = Supervision(story.lease, run, {}, 1, ROLES, 10, 10.0)
    story.live(1000)
    assert not run.supervision.exists()
