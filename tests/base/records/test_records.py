"""Records cross processes unchanged, and say what is wrong with those that are not ours."""

import inspect

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_swe.base import records
from hpc_swe.base.records import (
    ExitStatus,
    RolloutRequest,
    Sampling,
    Score,
    WeightVersion,
    float_array,
    floats,
    id_array,
    ids,
)

RECORDS = [
    kind
    for _, kind in inspect.getmembers(records, inspect.isclass)
    if issubclass(kind, records.Record) and kind is not records.Record
]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_record_is_frozen_and_named_and_refuses_unknown_fields(kind):
    config = kind.__struct_config__
    assert config.frozen
    assert config.forbid_unknown_fields
    with pytest.raises(TypeError, match="positional"):
        kind(1)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_s_type_can_be_decoded_from_both_formats(kind):
    """A type that only fails at the first message would fail on the cluster."""
    msgspec.json.Decoder(kind)
    msgspec.msgpack.Decoder(kind)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.lists(st.floats(width=32, allow_nan=False)))
def test_token_arrays_survive_packing(tokens, numbers):
    assert id_array(ids(tokens)).tolist() == tokens
    assert float_array(floats(numbers)).tolist() == numbers
    assert ids(np.array(tokens, dtype=np.int64)) == ids(tokens)


def test_a_token_id_that_does_not_fit_is_refused_and_not_wrapped():
    with pytest.raises((OverflowError, ValueError)):
        ids([2**31])


@pytest.mark.parametrize(
    ("outcome", "reward"), [("infra_error", 0.0), ("resolved", None), ("unresolved", None), ("cheated", None)]
)
def test_infrastructure_has_no_reward_and_all_else_has_one(outcome, reward):
    with pytest.raises(ValueError, match="only infra_error has none"):
        Score(outcome=outcome, reward=reward)
    with pytest.raises(msgspec.ValidationError, match="only infra_error has none"):
        msgspec.json.decode(msgspec.json.encode({"outcome": outcome, "reward": reward}), type=Score)


def request(**changes) -> RolloutRequest:
    return RolloutRequest(
        **{"group_id": 12, "index": 3, "task_id": "t", "seed": 7, "sampling": Sampling()} | changes
    )


def test_a_request_is_named_by_what_it_is_not_by_how_often_it_was_tried():
    assert request().name == request(attempt=5, seed=1, task_id="u").name == "train-000012-03"


@given(st.lists(st.tuples(st.sampled_from(["train", "eval"]), st.integers(0, 999_999), st.integers(0, 99))))
def test_names_sort_evaluation_first_and_then_by_age(keys):
    by_name = sorted(keys, key=lambda key: request(split=key[0], group_id=key[1], index=key[2]).name)
    assert by_name == sorted(keys)


@pytest.mark.parametrize(
    ("changes", "is_plain"),
    [({}, True), ({"temperature": 0.7}, False), ({"temperature": 0.0}, False), ({"top_p": 0.9}, False)]
    + [({"top_k": 20}, False), ({"min_p": 0.05}, False), ({"max_tokens": 8}, True)],
)
def test_only_untruncated_sampling_is_trained_on(changes, is_plain):
    assert Sampling(**changes).is_plain is is_plain


@pytest.mark.parametrize("changes", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"max_tokens": 0}])
def test_sampling_that_no_engine_accepts_is_refused_when_read(changes):
    with pytest.raises(msgspec.ValidationError, match=rf"\$\.{next(iter(changes))}"):
        msgspec.convert(changes, Sampling)


def test_a_restarted_learner_s_versions_are_newer_than_its_predecessor_s():
    assert WeightVersion(incarnation=2, step=1) > WeightVersion(incarnation=1, step=99)


def test_only_budgets_truncate():
    truncated = {status for status in ExitStatus if status.is_truncated}
    assert truncated == {ExitStatus.MAX_TURNS, ExitStatus.CONTEXT, ExitStatus.TOOL_TIME}
    assert truncated - {status for status in ExitStatus if status.is_overlong} == {ExitStatus.TOOL_TIME}
