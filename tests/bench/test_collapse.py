"""The simulation of a loop that falls: what its episodes are."""

import pytest

pytest.importorskip("torch")

from tests.bench import collapse  # noqa: E402
from tests.bench.collapse import CLOSE, END, FINE, OPEN, OPERATOR, REPAIR, SUBMIT, TEST, WORD, WRONG  # noqa: E402


def after(*answers: list[int]) -> tuple[collapse.Episode, list[int | None]]:
    """Give answers to the task of word 3; return the episode and the result of each answer."""
    episode = collapse.Episode(3)
    return episode, [[episode.take(token, -1.0) for token in answer][-1] for answer in answers]


def repair(operator: int, word: int = 3) -> list[int]:
    return [WORD, OPEN, REPAIR, WORD + word, OPERATOR + operator, CLOSE, END]


def test_only_the_right_operator_for_the_own_word_solves_a_task():
    submit, right = [OPEN, SUBMIT, CLOSE, END], collapse.right(3)
    for answers, results, is_solved in (
        ([repair(right), submit], [FINE, FINE], True),
        ([repair(right + 1), submit], [FINE, FINE], False),
        ([repair(right, word=4), submit], [WRONG, FINE], False),
        ([repair(right)[:-2] + [END], submit], [WRONG, FINE], False),
        ([repair(right + 1), [OPEN, TEST, CLOSE, END], repair(right), submit], [FINE] * 4, True),
    ):
        episode, found = after(*answers)
        assert (found, episode.is_over, episode.is_solved) == (results, True, is_solved)


def test_an_episode_without_a_call_ends_by_its_turns():
    episode, found = after(*[[WORD] * collapse.TURN_TOKENS] * collapse.TURNS)
    assert (found, episode.is_over, episode.is_solved) == ([WRONG] * collapse.TURNS, True, False)


def test_penalties_of_groups_with_equal_rewards_train_nothing():
    solved, failed = (after(repair(collapse.right(3) + n), [OPEN, SUBMIT, CLOSE, END])[0] for n in (0, 1))
    assert collapse.with_advantages([solved] * 8) == collapse.with_advantages([failed] * 8) == []
    advantages = [value for _, value in collapse.with_advantages([solved] * 4 + [failed] * 4)]
    assert advantages == pytest.approx([1 - 0.02] * 4 + [-1 + 0.02] * 4, abs=1e-5)
