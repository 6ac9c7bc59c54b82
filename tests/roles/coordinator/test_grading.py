"""What people learn of the grading: a grader that errs, tasks that break hosts, and how far episodes came."""

import msgspec

from hpc_swe.base.records import RolloutRequest, ScoredEpisode
from hpc_swe.base.store.spool import Spool
from tests.kit.coordinator_kit import make_maintenance, result, training


def answer(run, value_of, self_checks=(), details=()) -> list[str]:
    """Every request gets a result; the first few carry what self-checks came to, or have these details.

    Returns the tasks that failed.
    """
    messages, failed, details = list(self_checks), [], list(details)
    for claim in sorted(Spool(run.requests, RolloutRequest).claims("w-1-00000000"), key=lambda c: c.name):
        value = value_of(claim.message)
        failed += [claim.message.task_id] if value is None else []
        scored = msgspec.structs.replace(result(claim.message, value), self_checks=messages[:2])
        del messages[:2]
        if details:
            score = msgspec.structs.replace(scored.score, detail=details.pop())
            scored = msgspec.structs.replace(scored, score=score)
        Spool(run.scored, ScoredEpisode).put(claim.name, scored)
        claim.finish()
    return failed


def test_a_misjudged_self_check_is_a_curve_and_stays_on_the_screen(run):
    maintenance = make_maintenance(run)
    mode = training(run)
    mode.iterate(maintenance.snapshot())
    answer(
        run,
        lambda request: float(request.index % 2),
        ["", "self-check: the reference of t is unresolved", ""],
    )
    progress = mode.iterate(maintenance.snapshot())
    assert progress.recent["grader/self_checks"] == [3.0]
    assert progress.recent["grader/self_check_errors"] == [1 / 3]
    assert progress.recent["outcome/cheated"] == [0.0]
    assert progress.errors == ["self-check: the reference of t is unresolved"]


def test_infrastructure_failures_are_told_by_task_and_by_turn(run):
    maintenance = make_maintenance(run)
    mode = training(run)
    mode.iterate(maintenance.snapshot())
    failed = answer(run, lambda request: None if request.index == 0 else 1.0)
    progress = mode.iterate(maintenance.snapshot())
    assert progress.errors[-1].startswith("infrastructure failures: ")
    for task in set(failed):
        assert f"{task} {failed.count(task)} of " in progress.errors[-1]
    answer(run, lambda request: float(request.index % 2))
    progress = mode.iterate(maintenance.snapshot())
    assert 0 < progress.recent["infra/turns_1"][0] < 1
    assert "infra/turns_4" not in progress.recent, "nobody came that far"
    assert "grader/self_check_errors" not in progress.recent, "of no self-check, no share"
