import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpc_swe.base import records
from hpc_swe.base.records import VersionSpan, WeightVersion
from hpc_swe.roles.coordinator.batching.samples import add_routing, find_flaw, make_samples, trained_turns
from tests.kit.made_episodes import array, episode, trained_ids, turn


def cut_all(turns, chains="all", step=0):
    return make_samples(episode(turns), 1.5, chains, step)


def test_a_conversation_is_one_sample_with_the_mask_on_what_was_sampled():
    made = cut_all([turn(None, [1, 2], [10, 11]), turn(0, [3], [12])])
    (sample,) = made.samples
    assert records.id_array(sample.token_ids).tolist() == [1, 2, 10, 11, 3, 12]
    assert sample.mask_array.tolist() == [0, 0, 1, 1, 0, 1]
    assert array(sample.logprobs).tolist() == [0, 0, -0.5, -0.625, 0, -0.5]
    assert array(sample.advantages).tolist() == [0, 0, 1.5, 1.5, 0, 1.5]
    assert records.id_array(sample.versions).tolist() == [-1, -1, 0, 0, -1, 0]
    assert (made.tokens, made.untrained_turns) == (3, 0)


def test_each_token_of_a_turn_has_the_version_that_sampled_it():
    weights = [WeightVersion(step=3), WeightVersion(step=6)]
    spans = [VersionSpan(start=i, end=i + 1, oldest=each, newest=each) for i, each in enumerate(weights)]
    swapped = msgspec.structs.replace(turn(None, [1], [10, 11]), spans=spans)
    (sample,) = cut_all([swapped], step=6).samples
    assert records.id_array(sample.versions).tolist() == [-1, 3, 6]


def test_a_turn_without_its_experts_leaves_its_sequence_to_the_learner():
    first, second = turn(None, [1, 2], [10]), turn(0, [3], [12])
    known = [msgspec.structs.replace(first, routing=b"ab"), msgspec.structs.replace(second, routing=b"cd")]
    bare = cut_all([first, second])
    assert bare.samples[0].routing == b""
    (routed,) = add_routing(bare, episode(known), "all").samples
    assert routed == msgspec.structs.replace(bare.samples[0], routing=b"abcd" + bytes([records.FREE]))
    assert add_routing(bare, episode([known[0], second]), "all").samples == bare.samples
    assert find_flaw(episode(known)) == find_flaw(episode([known[0], second])) == ""


def test_a_routing_of_other_tokens_or_models_is_a_flaw():
    first, second = turn(None, [1, 2], [10]), turn(0, [3], [12])
    wrong = [msgspec.structs.replace(first, routing=b"abc"), second]
    assert find_flaw(episode(wrong)) == "turn 0: a routing of 3 bytes for 2 tokens"
    mixed = [msgspec.structs.replace(first, routing=b"ab"), msgspec.structs.replace(second, routing=b"cdcd")]
    assert "different numbers of layers" in find_flaw(episode(mixed))
    known = episode([msgspec.structs.replace(first, routing=b"ab")])
    assert find_flaw(known, 1) == find_flaw(episode([first]), 3) == ""
    assert find_flaw(known, 3).endswith("1 experts of a token in all layers, not 3")


def test_a_fork_makes_two_samples_and_trains_the_stem_once():
    turns = [
        turn(None, [1], [10]),
        turn(0, [2], [11]),
        turn(0, [3], [12]),
        turn(1, [4], [13]),
        turn(2, [5], [14]),
        turn(3, [6], [15]),
    ]
    first, second = cut_all([*turns, turn(4, [7], [16])]).samples
    assert trained_ids(first) == [10, 11, 13]  # 15 was never followed up, and is not the end
    assert trained_ids(second) == [12, 14, 16]
    assert records.id_array(second.token_ids).tolist() == [1, 10, 3, 12, 5, 14, 7, 16]


def test_an_undelivered_reply_is_not_trained_but_stays_in_the_context():
    turns = [turn(None, [1], [10]), turn(0, [2], [11], delivered=False), turn(1, [3], [12])]
    (sample,) = cut_all(turns).samples
    assert trained_ids(sample) == [10, 12]
    assert records.id_array(sample.token_ids).tolist() == [1, 10, 2, 11, 3, 12]


def test_an_episode_cut_short_while_sampling_trains_what_was_delivered():
    (sample,) = cut_all([turn(None, [1], [10]), turn(0, [2], [11], delivered=False)]).samples
    assert records.id_array(sample.token_ids).tolist() == [1, 10]


def test_side_conversations_are_trained_only_when_asked():
    turns = [turn(None, [9], [90]), turn(None, [1], [10]), turn(1, [2], [11])]
    assert [trained_ids(s) for s in cut_all(turns, "main").samples] == [[10, 11]]
    assert [trained_ids(s) for s in cut_all(turns, "all").samples] == [[90], [10, 11]]


def test_the_graded_conversation_is_trained_however_long_another_is():
    turns = [turn(None, [9], [90]), turn(None, [1], [10]), turn(None, [5], [50]), turn(2, [6], [51])]
    turns += [turn(3, [7], [52]), turn(1, [2], [11])]
    known = msgspec.structs.replace(episode(turns), main=1)
    assert [trained_ids(s) for s in make_samples(known, 1.0, "main", 0).samples] == [[10, 11]]
    assert [trained_ids(s) for s in make_samples(episode(turns), 1.0, "main", 0).samples] == [[10, 11]]


def test_tokens_of_two_incarnations_are_as_old_as_the_one_with_fewer_steps():
    """A learner that died at step 7 and resumed at 4 serves newer weights of fewer steps."""
    before, after = WeightVersion(incarnation=1, step=7), WeightVersion(incarnation=2, step=4)
    span = VersionSpan(start=0, end=2, oldest=before, newest=after)
    made = cut_all([msgspec.structs.replace(turn(None, [1], [10, 11]), spans=[span])], step=8)
    (sample,) = made.samples
    assert records.id_array(sample.versions).tolist() == [-1, 4, 4]
    assert made.staleness.tolist() == [4, 4]


def test_tokens_sampled_during_an_update_are_as_old_as_the_old_weights():
    span = VersionSpan(start=0, end=2, oldest=WeightVersion(step=3), newest=WeightVersion(step=6))
    turns = [msgspec.structs.replace(turn(None, [1], [10, 11]), spans=[span]), turn(0, [2], [12], step=6)]
    made = cut_all(turns, step=8)
    (sample,) = made.samples
    assert made.staleness.tolist() == [5, 5, 2]
    assert records.id_array(sample.versions).tolist() == [-1, 3, 3, -1, 6]


@st.composite
def trees(draw):
    turns, name = [], 100
    for index in range(draw(st.integers(0, 9))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        length = draw(st.integers(0, 3))
        appended = list(range(draw(st.integers(0, 2))))
        turns.append(turn(parent, appended, list(range(name, name + length)), delivered=draw(st.booleans())))
        name += length
    return turns


@given(trees(), st.sampled_from(["main", "tools", "all"]))
def test_every_sampled_token_of_a_trained_turn_is_trained_exactly_once(turns, chains):
    trained = trained_turns(turns, chains)
    made = make_samples(episode(turns), 1.0, chains, 0)
    got = sorted(token for sample in made.samples for token in trained_ids(sample))
    assert got == sorted(token for index in trained for token in turns[index].completion.tolist())
    assert made.tokens == len(got) == sum(len(turns[index].completion) for index in trained)
    assert all(turns[index].delivered for index in trained)
    for sample in made.samples:
        off = sample.mask_array == 0
        assert not np.any(array(sample.logprobs)[off])
        assert not np.any(array(sample.advantages)[off])


def test_chains_of_a_rewritten_history_show_the_tools_of_the_main_one():
    shown = ["", "aa", "aa", "aa", "bb", "aa"]
    parents = [None, None, 1, None, None, 3]
    turns = [
        msgspec.structs.replace(turn(parent, [1], [10 + index]), tools=tools)
        for index, (parent, tools) in enumerate(zip(parents, shown, strict=True))
    ]
    assert trained_turns(turns, "main", 1) == [1, 2]
    assert trained_turns(turns, "tools", 1) == [1, 2, 3, 5]
    assert trained_turns(turns, "tools", 0) == [0], "an agent without tools has no other chains of its own"
    assert trained_turns([], "tools") == []


def test_an_engine_that_answers_wrongly_is_found_out():
    good = turn(None, [1], [10, 11])
    replace = msgspec.structs.replace
    assert find_flaw(episode([good])) == ""
    assert "log-probabilities" in find_flaw(episode([replace(good, logprobs=records.floats([-1.0]))]))
    assert "finite" in find_flaw(episode([replace(good, logprobs=records.floats([-1.0, float("nan")]))]))
    assert "spans" in find_flaw(episode([replace(good, spans=[])]))
    assert "parent" in find_flaw(episode([replace(good, parent=0)]))
