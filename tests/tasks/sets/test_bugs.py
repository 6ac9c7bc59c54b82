"""The bug tasks: what is checked is really executed."""

import functools
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.agents.tools.base import invoke
from hpc_swe.base.loader import load
from hpc_swe.base.records import Message, Split, Task
from hpc_swe.tasks.sets._bugs_grammar import OPERATORS, WORDS, Function, draw, pairings
from hpc_swe.tasks.sets.bugs import HIDDEN, MODULE, VISIBLE, Bug, Bugs, Case, make
from tests.kit.constants import varied

SPLITS: list[Split] = ["train", "eval"]


def bugs(count: int, split: Split = "train") -> list[Bug]:
    return [make(random.Random(number), split) for number in range(count)]


def tasks(count: int, split: Split = "train", seed: int = 0) -> list[Task]:
    return list(itertools.islice(varied(Bugs, seed=seed)().load(split), count))


@functools.cache
def conversations(count: int, seed: int = 0) -> list[list[Message]]:
    return list(itertools.islice(Bugs().demonstrations(seed), count))


def failing(task: Task, folder: Path, module: str) -> set[str]:
    """Ids of the tests that fail with this module, by a real run of the task's own command."""
    folder.mkdir(parents=True)
    for path, text in (task.files | task.tests.files | {MODULE: module}).items():
        (folder / path).write_text(text)
    command = [sys.executable, *task.tests.command.split()[1:], "-rfE", "-p", "no:cacheprovider"]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    assert "\nERROR " not in output
    assert " passed" in output or " failed" in output
    return {line.split()[1] for line in output.splitlines() if line.startswith("FAILED ")}


def repaired(bug: Bug, operator: str) -> str:
    return bug.function.source(operator)


@pytest.mark.parametrize("split", SPLITS)
def test_pytest_agrees_with_the_plan_before_and_after_the_right_repair(split: Split, tmp_path: Path) -> None:
    for number, task in enumerate(tasks(1, split)):
        bug = make(random.Random(f"0 {split} {number}"), split)
        planned = set(task.tests.fail_to_pass)
        assert planned
        assert failing(task, tmp_path / f"{number}-bug", task.files[MODULE]) == planned
        assert failing(task, tmp_path / f"{number}-fix", repaired(bug, bug.function.right)) == set()


@pytest.mark.parametrize("split", SPLITS)
def test_only_the_right_operator_passes_either_half_of_the_cases(split: Split) -> None:
    for bug in bugs(100, split):
        for half in (bug.visible, bug.hidden):
            assert [o for o in OPERATORS if passes(bug.function, o, half)] == [bug.function.right]


def passes(function: Function, operator: str, cases: list[Case]) -> bool:
    names: dict[str, object] = {}
    exec(function.source(operator), names)
    target = names[function.name]
    assert callable(target)
    return all(target(*case.arguments) == case.expected for case in cases)


def test_the_hidden_cases_are_in_no_file_that_the_agent_sees() -> None:
    for task in tasks(100):
        assert set(task.files) == {MODULE, VISIBLE}
        assert set(task.tests.files) == {VISIBLE, HIDDEN}
        assert task.tests.files[VISIBLE] == task.files[VISIBLE]
        hidden = [line for line in task.tests.files[HIDDEN].splitlines() if "assert" in line]
        seen = task.files[VISIBLE].splitlines()
        assert len(hidden) == len([line for line in seen if "assert" in line])
        assert sum(line in seen for line in hidden) < len(hidden)


def test_training_and_evaluation_share_no_module_name_letters_or_pairing() -> None:
    train, held = ([draw(random.Random(n), split) for n in range(1500)] for split in SPLITS)
    assert not {f.name for f in train} & {f.name for f in held}
    assert not {f.constant for f in train if f.constant} & {f.constant for f in held if f.constant}
    assert not {"\n".join(f.lines) for f in train} & {"\n".join(f.lines) for f in held}
    assert not set(pairings("train")) & set(pairings("eval"))
    assert {f.word for f in train} == {f.word for f in held} == set(WORDS)


def test_task_n_depends_on_seed_split_and_n_alone() -> None:
    assert tasks(20) == tasks(20)
    assert tasks(20)[5:] == tasks(25)[5:20]
    assert not {t.files[MODULE] for t in tasks(20, seed=1)} & {t.files[MODULE] for t in tasks(20, seed=2)}
    assert len({t.task_id for split in SPLITS for t in tasks(50, split)}) == 100


def test_the_demonstrator_is_right_about_one_time_in_five() -> None:
    right = dict.fromkeys(WORDS, 0)
    seen = dict.fromkeys(WORDS, 0)
    for messages in conversations(1800):
        word, new = said(messages)
        seen[word] += 1
        right[word] += new == WORDS[word]
    assert sum(right.values()) / 1800 == pytest.approx(1 / 5, abs=0.04)
    for word in WORDS:
        assert right[word] / seen[word] == pytest.approx(1 / 5, abs=0.09), word


def said(messages: list[Message]) -> tuple[str, str]:
    """The word that a demonstration quotes, and the operator that it puts in."""
    message = next(m for m in messages if m.tool_calls and m.tool_calls[0].name == "replace")
    new: str = json.loads(message.tool_calls[0].arguments)["new"]
    return message.content.split()[-2], new


def test_the_real_tools_answer_as_the_demonstrations_show() -> None:
    tools = {name: load("tools", {"type": name}) for name in ("view", "replace", "submit")}
    for number, messages in enumerate(conversations(5)):
        bug = make(random.Random(f"demonstration 0 {number}"), "train")
        files = {MODULE: bug.source, VISIBLE: bug.visible_tests}
        task = msgspec.structs.replace(tasks(1)[0], files=files)
        with Process().open(task) as sandbox:
            answers = [
                invoke(tools[call.name], call.arguments, sandbox, task)
                for m in messages
                for call in m.tool_calls
            ]
        assert answers[:-1] == [m.content for m in messages if m.role == "tool"]
