"""What one message costs the metadata server: the budget that lets hundreds of workers poll."""

from collections import Counter

from hpc_swe.base.records import Node
from hpc_swe.base.store import atomic
from hpc_swe.base.store.spool import Spool
from tests.kit.crash import calls
from tests.kit.store_samples import request, spool

CHANGES = ("create", "os.rename", "os.link", "os.remove")  # of the name space; each takes a lock on a folder
BUDGET = 13  # for an episode, over the three spools


def put(root) -> None:
    Spool(root, type(request())).put("a", request())


def ask(root) -> None:
    Spool(root, type(request())).overwrite("a", request())


def claim_and_finish(root) -> None:
    for claim in Spool(root, type(request())).claims("w"):
        claim.finish()


def read_and_remove(root) -> None:
    made = Spool(root, type(request()))
    for address in made.addresses("ready"):
        made.read(address)
        made.remove(address)


def cost(tmp_path, name, *actions) -> Counter:
    spool(tmp_path / name)
    return sum((calls(tmp_path / name, action) for action in actions), Counter())


def test_an_episode_s_whole_life_stays_within_the_budget(tmp_path):
    asked = cost(tmp_path, "requests", ask, claim_and_finish)
    worked = cost(tmp_path, "episodes", put, claim_and_finish)
    collected = cost(tmp_path, "scored", put, read_and_remove)
    once = {"create": 1, "fsync": 1, "os.listdir": 1, "open": 1}
    assert asked == once | {"os.rename": 2, "os.remove": 1}
    assert worked == once | {"os.link": 1, "os.rename": 1, "os.remove": 2}
    assert collected == once | {"os.link": 1, "os.remove": 2}
    changes = sum(life[call] for life in (asked, worked, collected) for call in CHANGES)
    opens = sum(life["open"] for life in (asked, worked, collected))
    print(f"an episode: {changes} changes of the name space of {BUDGET} allowed, {opens} opens to read")
    assert changes <= BUDGET
    assert opens <= 3


def test_a_beat_is_a_create_and_a_rename_and_does_not_wait_for_the_disk(tmp_path):
    node = Node(owner="w", role="rollout", beat=1, host="h", pid=1)
    tally = calls(tmp_path, lambda root: atomic.put(root / "w.json", node, durable=False))
    assert tally == {"create": 1, "os.rename": 1}
