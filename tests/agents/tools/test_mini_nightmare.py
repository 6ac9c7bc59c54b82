"""A scripted agent finds a value at run time with the debugger, repairs the program, and is graded afresh.

The programs are those of debug-gym's folder mini_nightmare, which HPC_SWE_MINI_NIGHTMARE names. One of them
needs a network and is left out.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_swe.agents.loops.base import Reply
from hpc_swe.agents.loops.tool_agent import ToolAgent
from hpc_swe.base.loader import load
from hpc_swe.base.records import Message, Task, TestPlan, ToolCall
from hpc_swe.tasks import patch
from hpc_swe.tasks.visible_tests import ids_of_tests
from tests.kit.debugging import made, require

FOLDER = os.environ.get("HPC_SWE_MINI_NIGHTMARE", "")
COMMAND = "python -m pytest --tb=short -sq test.py"
# The test that is debugged, the line to stop at, its condition, what is printed and what it must be.
LOOKS = {
    "config": (
        "TestConfigManager::test_config_updates",
        "return self._cache[name]",
        "",
        "self._cache[name]._config['host'], self._config[name]['host']",
        "('initial-host', 'new-host')",
    ),
    "counter": (
        "TestThreadSafeCounter::test_multi_threaded",
        "return self._count",
        "",
        "0 < self._count < 500",
        "True",
    ),
    "grader": (
        "TestGradeProcessor::test_top_performers",
        "return [",
        "",
        "student_grades['student4']",
        "[91.0]",
    ),
    "patcher": ("TestPatcherTool::test_use_3", "output = self._rewrite_file(", "", "head, tail", "(-1, -1)"),
    "purr": ("test_cat_status", "result = self.meow()", "self.hunger > 20", "self.hunger", "21"),
    "scientific_calculator": (
        "TestPlusTool::test_use",
        "number_1, number_2 = numbers.split()",
        "",
        "self.action, numbers",
        "(None, '1')",
    ),
    "shopping_cart": (
        "test_shopping_cart",
        "return round(self.total, 2)",
        "self.discounts",
        "self.total",
        "10.975",
    ),
    "sum_tree": (
        "test_shopping_cart",
        "left_sum = build_sum_tree(root.left)",
        "root.value == 5",
        "root.left.value",
        "2",
    ),
    "tomorrow_date": (
        "test_tomorrow_date",
        "if day == 28:",
        "day == 29",
        "today",
        "datetime.date(2024, 2, 29)",
    ),
}
REPAIRS = {
    "config": [
        ("    _cache = {}\n", ""),
        (
            "        self._config = config_dict or {}\n",
            "        self._config = config_dict or {}\n        self._cache = {}\n",
        ),
        (
            "        self._config[name] = value",
            "        self._config[name] = value\n        self._cache.pop(name, None)",
        ),
    ],
    "counter": [
        (
            "            if self._count == local_value:\n",
            "            local_value, new_value = self._count, self._count + 1\n            if True:\n",
        )
    ],
    "grader": [
        (
            "if all(grade >= threshold for grade in grades)",
            "if len(grades) == len(self.class_data) and all(grade >= threshold for grade in grades)",
        )
    ],
    "patcher": [
        (
            '        if "" != message:\n',
            "        if not message and head is not None and not 0 <= head <= tail:\n"
            '            message = "SyntaxError: invalid syntax."\n        if "" != message:\n',
        )
    ],
    "purr": [
        (
            "if self.hunger > 10:\n            result = self.meow()",
            "if 10 < self.hunger <= 20:\n            result = self.meow()",
        )
    ],
    "scientific_calculator": [
        ('action_str = "```plus"', 'action = "```plus"'),
        ("        number_1, number_2 = numbers.split()\n", ""),
        (
            '.split("```")[0].strip()\n',
            '.split("```")[0].strip()\n            number_1, number_2 = numbers.split()\n',
        ),
    ],
    "shopping_cart": [
        (
            "self.total += price * quantity",
            "self.total += price * quantity * (1 - self.discounts.get(item, 0) / 100)",
        ),
        ("return round(self.total, 2)", "return round(self.total + 1e-9, 2)"),
    ],
    "sum_tree": [
        (
            "def build_sum_tree(root):\n    if not root:",
            "def build_sum_tree(root, seen=()):\n    if not root or root in seen:",
        ),
        ("build_sum_tree(root.left)", "build_sum_tree(root.left, (*seen, root))"),
        ("build_sum_tree(root.right)", "build_sum_tree(root.right, (*seen, root))"),
        ("def print_tree(node, level=0):", "def print_tree(node, level=0, seen=()):"),
        ("    if node:", "    if node and node not in seen:"),
        ("print_tree(node.left, level + 1)", "print_tree(node.left, level + 1, (*seen, node))"),
        ("print_tree(node.right, level + 1)", "print_tree(node.right, level + 1, (*seen, node))"),
    ],
    "tomorrow_date": [
        (
            "            if day == 28:\n",
            "            if day == 29:\n                return datetime(year, 3, 1).date()\n"
            "            if day == 28:\n",
        )
    ],
}


def load_task(name: str) -> Task:
    files = {path.name: path.read_text() for path in sorted(Path(FOLDER, name).iterdir()) if path.is_file()}
    tests = TestPlan(
        command=COMMAND,
        files={"test.py": files["test.py"]},
        fail_to_pass=ids_of_tests(files["test.py"]),
        timeout_s=60.0,
    )
    return Task(
        task_id=name,
        taskset="mini_nightmare",
        prompt="Repair it.",
        image="python-pytest",
        workdir="/work",
        files=files,
        tests=tests,
    )


class Script:
    """The policy: it repairs only after the value that it looked for was shown."""

    def __init__(self, name: str, task: Task) -> None:
        test, text, condition, expression, value = LOOKS[name]
        self.value, self.shown = value, [""]
        file = f"{name}_code.py"
        line = next(n for n, each in enumerate(task.files[file].split("\n"), 1) if text in each)
        self.looks = [
            call("evaluate"),
            call("pdb", command="start", runner="pytest", file=f"test.py::{test}"),
            call(
                "pdb",
                command=f"b {file}:{line}{f', {condition}' if condition else ''}",
                runner=None,
                file=None,
            ),
            call("pdb", command="c"),
            call("pdb", command=f"p {expression}"),
        ]
        self.repairs = [call("edit", path=file, old=old, new=new) for old, new in REPAIRS[name]]
        self.repairs += [call("evaluate"), call("submit")]

    def __call__(self, messages: Sequence[Message], tools: str = "") -> Reply:
        self.shown = [message.content for message in messages if message.role == "tool"]
        if self.looks:
            return self.looks.pop(0)
        assert self.value in self.shown, self.shown
        return self.repairs.pop(0)


def call(name: str, **arguments: object) -> Reply:
    return Reply("", [ToolCall(name=name, arguments=json.dumps(arguments))])


@pytest.mark.parametrize("kind", ["process", pytest.param("apptainer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOOKS)
def test_a_program_is_debugged_to_a_value_and_a_repair_that_passes(name: str, kind: str):
    if not Path(FOLDER, name, "test.py").is_file():
        pytest.skip(f"HPC_SWE_MINI_NIGHTMARE = {FOLDER!r} names no folder with {name}/test.py")
    task, sandboxes = load_task(name), made(require(kind))
    script = Script(name, task)
    agent = ToolAgent(tools=("pdb", "edit", "evaluate", "submit"), max_turns=20)
    with sandboxes.open(task) as sandbox:
        result = agent.solve(task, sandbox, script)
        submitted = patch.take(task, sandbox, sandboxes)
    assert result.exit_status == "submitted", result.messages[-1]
    assert "failed" in script.shown[0]
    assert "failed" not in script.shown[-1], script.shown[-1]
    grader = load("graders", {"type": "pytest"})
    assert grader.grade(task, submitted, sandboxes).outcome == "resolved"
