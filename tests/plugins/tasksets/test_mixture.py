"""Several tasksets in one run."""

from collections.abc import Iterator
from itertools import islice

import pytest
from msgspec.structs import replace

from hpc_swe.errors import ConfigError
from hpc_swe.plugins import Plugin, dump, load
from hpc_swe.records import Split, Task
from tests.kit.stage import TASK

BUGS = {"type": "bugs"}


class Words(Plugin, frozen=True, kw_only=True):
    """Three tasks without references."""

    def load(self, split: Split) -> Iterator[Task]:
        for name in ("one", "two", "three"):
            yield replace(TASK, task_id=f"{split}-{name}")


WORDS = {"type": f"{__name__}:Words"}


def mixture(**parts):
    return load("tasksets", {"type": "mixture", "parts": parts})


def test_tasks_of_the_parts_take_turns_and_carry_the_name_of_their_part():
    made = mixture(first=BUGS | {"weight": 2}, second=WORDS)
    tasks = list(islice(made.load("train"), 9))
    assert [task.taskset for task in tasks] == ["first", "second"] * 3 + ["first"] * 3
    assert made.weights == {"first": 2, "second": 1.0}
    assert load("tasksets", dump(made)) == made
    assert made.references(tasks) == load("tasksets", BUGS).references(tasks[::2] + tasks[7::2])


def test_a_task_that_two_parts_have_is_refused():
    with pytest.raises(ConfigError, match=r"first and second both have a task"):
        list(islice(mixture(first=BUGS, second=BUGS).load("train"), 2))


@pytest.mark.parametrize("weight", [0, -1, "much", True, float("inf"), float("nan")])
def test_a_weight_that_is_no_positive_number_is_refused(weight):
    with pytest.raises(ConfigError, match=r"parts\.first\.weight"):
        mixture(first=BUGS | {"weight": weight})


def test_a_part_that_is_no_taskset_is_refused():
    with pytest.raises(ConfigError, match="has no type 'bugz'"):
        mixture(first={"type": "bugz"})
    with pytest.raises(ConfigError, match="parts is empty"):
        mixture()
