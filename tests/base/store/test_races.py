"""The spool under the races that a cluster makes."""

import os
import signal

import pytest

from hpc_swe.base.records import RolloutRequest
from hpc_swe.base.store.spool import Spool
from tests.kit.crash import FORK
from tests.kit.store_samples import request, shown, spool
from tests.kit.waiting import DEADLINE_S, until


def drain(root, owner, out, all_at_it) -> None:
    """As a worker does: one claim after the other until the spool is empty; after the first all are at it."""
    made = Spool(root, RolloutRequest)
    taken = []
    while made.addresses("ready"):
        if claim := next(made.claims(owner), None):
            taken.append(claim.message.seed)
            assert claim.finish()
            if len(taken) == 1:
                all_at_it.wait(DEADLINE_S)
    out.put((owner, taken))


def drain_all(root, owners):
    out, all_at_it = FORK.Queue(), FORK.Barrier(len(owners))
    workers = [FORK.Process(target=drain, args=(root, owner, out, all_at_it)) for owner in owners]
    for worker in workers:
        worker.start()
    taken = [out.get(timeout=DEADLINE_S) for _ in workers]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    return taken


@pytest.mark.parametrize(
    "owners", [[f"w{index}" for index in range(8)], ["twin"] * 2], ids=["eight workers", "one name twice"]
)
def test_workers_drain_a_spool_and_take_each_message_exactly_once(tmp_path, owners):
    spool(tmp_path, messages=400)
    taken = drain_all(tmp_path, owners)
    assert sorted(seed for _, seeds in taken for seed in seeds) == list(range(400))
    assert shown(tmp_path) == []


def test_two_recoverers_put_each_claim_back_once(tmp_path):
    made = spool(tmp_path, messages=100)
    assert len(list(made.claims("dead"))) == 100
    out = FORK.Queue()
    recoverers = [
        FORK.Process(target=lambda: out.put(len(made.recover(lambda address: True, 10)))) for _ in range(2)
    ]
    for recoverer in recoverers:
        recoverer.start()
    assert sum(out.get(timeout=DEADLINE_S) for _ in recoverers) == 100
    for recoverer in recoverers:
        recoverer.join()
    assert shown(tmp_path) == [f"ready/{request(index).name}~1" for index in range(100)]


def test_a_recoverer_with_an_old_opinion_takes_no_redelivered_message(tmp_path):
    made = spool(tmp_path, messages=1)
    next(made.claims("w"), None)
    made.recover(lambda address: True, 10)
    again = next(made.claims("w"), None)
    assert made.recover(lambda address: address.redeliveries == 0, 10) == []
    assert again.finish()


def work_when_told(root, pipe) -> None:
    claim = next(spool(root / "requests").claims("sleeper"), None)
    pipe.send("claimed")
    pipe.recv()
    spool(root / "episodes").put(claim.name, claim.message)
    pipe.send(claim.finish())


def test_a_worker_that_wakes_up_after_its_claim_was_recovered_does_no_harm(tmp_path):
    requests, episodes = spool(tmp_path / "requests", messages=1), spool(tmp_path / "episodes")
    mine, its = FORK.Pipe()
    sleeper = FORK.Process(target=work_when_told, args=(tmp_path, its))
    sleeper.start()
    assert mine.recv() == "claimed"
    os.kill(sleeper.pid, signal.SIGSTOP)
    try:
        requests.recover(lambda address: address.owner == "sleeper", 10)
        claim = next(requests.claims("w"), None)
        episodes.put(claim.name, claim.message)
        mine.send("go on")
    finally:
        os.kill(sleeper.pid, signal.SIGCONT)
    assert mine.recv() is False, "it was told that it holds what it lost"
    sleeper.join()
    assert shown(tmp_path / "episodes") == [f"ready/{claim.name}~0"], "one result, by the identity"
    assert claim.finish(), "the late finish dropped the claim of another"
    assert shown(tmp_path / "requests") == []


def test_giving_back_counts_against_nobody_and_keeps_the_message(tmp_path):
    made = spool(tmp_path, messages=1)
    for _ in range(20):
        assert next(made.claims("w"), None).give_back()
    (address,) = made.addresses("ready")
    assert address.redeliveries == 0


def test_what_was_lost_is_neither_finished_nor_given_back(tmp_path):
    made = spool(tmp_path, messages=1)
    claim = next(made.claims("w"), None)
    made.recover(lambda address: True, 10)
    assert not claim.give_back()
    assert not claim.finish()
    assert [address.redeliveries for address in made.addresses("ready")] == [1]


def test_a_message_lost_too_often_is_kept_for_a_person(tmp_path):
    made = spool(tmp_path, messages=1)
    for _ in range(3):
        next(made.claims("w"), None)
        made.recover(lambda address: True, max_losses=2)
    assert shown(tmp_path) == [f"dead/{request().name}~3"]


def test_of_two_results_of_one_request_the_first_stays_without_temporaries(tmp_path):
    made = spool(tmp_path)
    made.put("a", request(attempt=0))
    made.put("a", request(attempt=1))
    assert os.listdir(tmp_path / "ready") == ["a~0"]
    assert next(made.claims("w"), None).message.attempt == 0


def put_when_told(root, start, index) -> None:
    start.wait()
    spool(root).put("a", request(attempt=index))


def test_of_many_that_publish_one_result_at_once_one_wins_and_stays(tmp_path):
    spool(tmp_path)
    start = FORK.Event()
    crowd = [FORK.Process(target=put_when_told, args=(tmp_path, start, index)) for index in range(8)]
    for member in crowd:
        member.start()
    start.set()
    until(lambda: (tmp_path / "ready" / "a~0").exists(), "a result")
    first = (tmp_path / "ready" / "a~0").read_bytes()
    for member in crowd:
        member.join()
        assert member.exitcode == 0
    assert (tmp_path / "ready" / "a~0").read_bytes() == first
    assert os.listdir(tmp_path / "ready") == ["a~0"]


def test_the_oldest_message_is_taken_though_new_ones_keep_coming(tmp_path):
    made = spool(tmp_path, messages=40)
    for index in range(40, 1000):
        claim = next(made.claims("the only worker"), None)
        claim.finish()
        if claim.message.seed == 0:
            return
        made.put(request(index).name, request(index))
    pytest.fail("evaluation and the oldest groups starve behind newer ones")


def test_the_single_reader_reads_in_order_and_drops_what_it_dealt_with(tmp_path):
    made = spool(tmp_path, messages=3)
    addresses = made.addresses("ready")
    assert [made.read(address).seed for address in addresses] == [0, 1, 2]
    made.remove(addresses[0])
    made.remove(addresses[0])  # a predecessor may have been at it
    assert made.read(addresses[0]) is None
    assert len(made.addresses("ready")) == 2
