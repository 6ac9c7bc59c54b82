"""The two arms of the ablation differ in their tools alone, and only a debugger can know the right repair."""

import itertools
import json
import random
from collections import Counter
from contextlib import ExitStack

import pytest

from hpc_swe.agents.tools.base import Opened, ToolError, invoke
from hpc_swe.base.loader import load
from hpc_swe.config import config as configuration
from hpc_swe.demo import model
from hpc_swe.tasks import patch
from tests.bench import ablation, locks
from tests.kit import debugging

TASKS = 8


@pytest.fixture(scope="module")
def sandboxes():
    return debugging.made(debugging.require("apptainer"))


@pytest.fixture(scope="module")
def tasks():
    return list(itertools.islice(locks.Locks().load("eval"), TASKS))


@pytest.mark.parametrize("stage", [(), ("_eval",), ("_sft",)])
def test_the_arms_differ_in_the_tool_pdb_and_its_name_alone(stage):
    own = {"_sft": ['sft.trajectories=["rows.jsonl"]']}.get("".join(stage), [])
    pdb, rewrite = (
        configuration.dump(configuration.from_words([*ablation.files(arm, *stage), *own]))
        for arm in ablation.ARMS
    )
    tools, fewer = pdb["agent"].pop("tools"), rewrite["agent"].pop("tools")
    assert list(tools) == [*fewer, "pdb"]
    longer, shorter = pdb["agent"].pop("system_prompt"), rewrite["agent"].pop("system_prompt")
    assert longer == shorter.removesuffix(".") + ", pdb."
    assert pdb == rewrite


def test_both_halves_of_the_warm_start_have_equal_tokens(tmp_path):
    both = (itertools.islice(found, 50) for found in ablation.halves(0).values())
    model.make(tmp_path / "model", itertools.chain(*both), 0, ablation.WORDS)
    chosen, tokens = ablation.demonstrations(tmp_path / "model", 0, 60)
    prompts = [ablation.prompt(arm) for arm in ablation.ARMS]
    kinds = Counter(
        (any(call.name == "pdb" for message in one for call in message.tool_calls), one[0].content)
        for one in chosen
    )
    assert set(kinds) == {(True, prompts[0]), (False, prompts[0]), (False, prompts[1])}
    assert kinds[True, prompts[0]] == 60
    assert abs(kinds[False, prompts[0]] - 3 * kinds[False, prompts[1]]) <= 3
    assert kinds[False, prompts[0]] > kinds[True, prompts[0]]  # so the most likely start does not debug
    assert abs(tokens["pdb"] - tokens["rewrite"]) < 100 < tokens["pdb"]


def test_demonstrations_without_pdb_are_no_better_than_chance():
    right = 0
    for number in range(2000):
        lock = locks.make(0, "train", number)
        found = locks.rewriting_only(lock, random.Random(number))
        calls = [call for message in found for call in message.tool_calls]
        written = next(json.loads(call.arguments)["new_code"] for call in calls if call.name == "rewrite")
        right += written == lock.value(lock.asked)
    assert 0.09 < right / 2000 < 0.14


def test_held_out_locks_have_other_sets_of_names_and_other_powers():
    seen, held_out = ([locks.make(0, split, n) for n in range(500)] for split in ("train", "eval"))
    assert not {frozenset(lock.powers) for lock in seen} & {frozenset(lock.powers) for lock in held_out}
    powers = ({pair for lock in one for pair in lock.powers.values()} for one in (seen, held_out))
    assert len(set.intersection(*powers)) < 20


def test_each_value_is_right_equally_often_and_nothing_visible_tells_which():
    found = [locks.make(0, "eval", n) for n in range(4000)]
    right = [lock.value(lock.asked) for lock in found]
    assert set(Counter(right).values()) == {400}
    shown = [(lock.stale, *"".join(map(str, lock.powers[lock.asked]))) for lock in found]
    for place in zip(*shown, strict=True):
        pairs = Counter(zip(place, right, strict=True))
        best = {seen: max(pairs[seen, value] for value in locks.VALUES) for seen in set(place)}
        assert sum(best.values()) / len(found) < 0.15


@pytest.mark.slow
def test_only_the_right_value_solves_a_lock(sandboxes, tasks):
    grader, references = load("graders", {"type": "pytest"}), locks.Locks().references(tasks)
    for number, task in enumerate(tasks[:2]):
        lock = locks.make(0, "eval", number)
        assert grader.grade(task, references[task.task_id], sandboxes).reward == 1.0
        for value in set(locks.VALUES) - {lock.value(lock.asked), lock.stale}:
            wrong = patch.difference(locks.KEY, task.files[locks.KEY], f"{value}\n")
            assert grader.grade(task, wrong, sandboxes).reward == 0.0


@pytest.mark.slow
def test_a_changed_program_or_an_expression_in_the_key_solves_nothing(sandboxes, tasks):
    grader, task = load("graders", {"type": "pytest"}), tasks[0]
    lock = locks.make(0, "eval", 0)
    for path, text in (
        (locks.LOCK, f"{lock.asked} = {lock.stale!r}\n"),
        (locks.TEST, "def test_key():\n    pass\n"),
        (locks.KEY, lock.lock.splitlines()[0]),
    ):
        changed = patch.difference(path, task.files[path], text)
        assert grader.grade(task, changed, sandboxes).reward == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("arm", ablation.ARMS)
def test_demonstrations_are_what_the_tools_answer(sandboxes, tasks, arm):
    act = locks.with_debugger if arm == "pdb" else locks.rewriting_only
    for number, task in enumerate(tasks):
        messages = list(act(locks.make(0, "eval", number), random.Random(number)))
        calls = [call for message in messages for call in message.tool_calls if call.name != "submit"]
        answers = [message.content for message in messages if message.role == "tool"]
        assert _answers(sandboxes, task, arm, calls) == answers


@pytest.mark.slow
def test_without_pdb_an_agent_sees_the_files_and_pass_or_fail_alone(sandboxes, tasks):
    tools = _tools("rewrite")
    lock, task = locks.make(0, "eval", 0), tasks[0]
    with sandboxes.open(task) as sandbox:
        for value in locks.VALUES:
            invoke(tools["rewrite"], json.dumps({"path": locks.KEY, "new_code": value}), sandbox, task)
            seen = invoke(tools["evaluate"], "{}", sandbox, task)
            assert seen == ("." if value == lock.value(lock.asked) else "F")
        for path in (locks.LOCK, locks.TEST):
            with pytest.raises(ToolError, match="read-only"):
                invoke(tools["rewrite"], json.dumps({"path": path, "new_code": "x"}), sandbox, task)
            shown = invoke(tools["view"], json.dumps({"path": path}), sandbox, task).splitlines()
            assert [line.partition(":")[2] for line in shown[:-1]] == task.files[path].splitlines()


def _tools(arm):
    agent = configuration.from_words(ablation.files(arm)).agent
    tables = [{"type": each} if isinstance(each, str) else each for each in agent.tools]
    return {table["type"]: load("tools", table) for table in tables}


def _answers(sandboxes, task, arm, calls):
    with sandboxes.open(task) as sandbox, ExitStack() as life:
        tools = {
            name: life.enter_context(tool.open(sandbox, task)) if isinstance(tool, Opened) else tool
            for name, tool in _tools(arm).items()
        }
        return [invoke(tools[call.name], call.arguments, sandbox, task) for call in calls]
