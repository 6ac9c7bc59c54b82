"""Several tasksets in one run."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import Plugin, dump, load
from hpc_swe.base.records import Split, Task
from hpc_swe.config import config as configuration
from hpc_swe.launch.plan import _require_checked
from hpc_swe.makers.check import wanted
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.sets.base import Taskset
from tests.kit.checkout import ROOT
from tests.kit.stage import TASK

BUGS = {"type": "bugs"}


class Words(Plugin, Taskset, frozen=True, kw_only=True):
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


def test_a_mixture_cannot_be_a_part_of_a_mixture():
    with pytest.raises(ConfigError, match=r"parts\.outer is a mixture too: list its parts here"):
        mixture(outer={"type": "mixture", "parts": {"inner": BUGS}})


def programs(folder: Path, name: str) -> dict[str, str]:
    for kind in ("usable", "bad"):
        (folder / name / f"{name}-{kind}").mkdir(parents=True)
        (folder / name / f"{name}-{kind}/test.py").write_text("def test_a():\n    assert False\n")
    return {"type": "programs", "train": str(folder / name), "checked": str(folder / "checked.jsonl")}


def test_parts_keep_their_checks_and_the_images_of_these(tmp_path, caplog):
    """One file holds the checks of all parts; a part without a file is said by name."""
    made = mixture(one=programs(tmp_path, "one"), two=programs(tmp_path, "two"), words=WORDS)
    everything = list(made.unchecked().load("train"))
    assert len(everything) == 4 + 3
    assert made.unchecked().weights == made.weights
    (tmp_path / "images").mkdir()
    (tmp_path / "images/python-pytest.json").write_text("now")
    task_checks.create(tmp_path / "checked.jsonl")
    for task in everything:
        kind = "usable" if task.task_id.endswith("usable") else "broken"
        check = {"task_id": task.task_id, "image": task.image, "image_digest": "then", "settings": ""}
        task_checks.append(tmp_path / "checked.jsonl", task_checks.TaskCheck(verdict=kind, **check))
    tasks = list(made.load("train"))
    assert sorted(task.task_id for task in tasks if task.taskset != "words") == ["one-usable", "two-usable"]
    sandbox = f"sandbox={{type='apptainer', images='{tmp_path}/images'}}"
    config = configuration.read(ROOT / "configs/demo.toml", overrides=[sandbox, "tasks.eval=0"])
    with pytest.raises(ConfigError, match="is another image than taskset.checked"):
        _require_checked(replace(config, taskset=made), tasks)
    _require_checked(replace(config, taskset=made.unchecked()), tasks)
    assert "[taskset.parts.one] checked is not set" in caplog.text
    assert wanted(replace(config, taskset=made))[0][:7] == everything
