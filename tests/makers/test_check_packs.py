"""Rows in the columns of HumanEvalPack are checked by the command alone, in the sandbox that runs use."""

import json
from pathlib import Path

import pytest

from hpc_swe.tasks import task_checks
from hpc_swe.tasks.sets.programs import Programs
from hpc_swe.tasks.visible_tests import ids_of_tests
from tests.kit.checkout import IMAGES, typed

PROGRAMS = (
    (
        "from typing import List\n\n\ndef spread(values: List[int]) -> int:",
        "Return the largest value minus the smallest one.\n    >>> spread([3, 9, 5])\n    6",
        "    return max(values) - min(values)\n",
        "    return max(values) - values[0]\n",
        "    assert spread([3, 9, 5]) == 6\n    assert spread([4, 1]) == 3\n    assert spread([7]) == 0\n",
    ),
    (
        "def vowels(text):",
        "Count the vowels; in the word gr\u00f6\u00dfe there are two.",
        "    return sum(sign in 'aeiou\u00e4\u00f6\u00fc' for sign in text.lower())\n",
        "    return sum(sign in 'aeiou' for sign in text.lower())\n",
        "    assert vowels('gr\u00f6\u00dfe') == 2\n"
        "    assert vowels('sky') == 0\n    assert vowels('AI') == 2\n",
    ),
    (
        "def digits(number):",
        "Add the digits of a number.",
        "    total = 0\n    while number:\n        total += number % 10\n        number //= 10\n"
        "    return total\n",
        "    total = 0\n    while number:\n        total += number % 10\n    return total\n",
        "    for number, total in ((0, 0), (7, 7), (123, 6)):\n        assert digits(number) == total\n",
    ),
    (
        "def shifted(text: str):\n    return text[1:] + text[:1]\n\n\ndef unshifted(text: str):",
        "Undo what shifted does.",
        "    return text[-1:] + text[:-1]\n",
        "    return text[1:] + text[:1]\n",
        "    assert True, 'begin'\n    for text in ('abc', '', 'xy z'):\n"
        "        assert unshifted(shifted(text)) == text\n",
    ),
)
"""Head, description, right and wrong body, and the body of the function `check`."""


def write(path: Path) -> list[str]:
    """Write one row for each program; return the ids that their tasks get."""
    rows = []
    for number, (head, says, right, wrong, check) in enumerate(PROGRAMS):
        name = head.rpartition("def ")[2].partition("(")[0]
        rows.append(
            {
                "task_id": f"Python/{number}",
                "prompt": f'{head}\n    """ {says}\n    """\n',
                "declaration": f"{head}\n",
                "canonical_solution": right,
                "buggy_solution": wrong,
                "bug_type": "value misuse",
                "failure_symptoms": "incorrect output",
                "import": "",
                "test_setup": "",
                "test": f"\n\n\n\n\ndef check({name}):\n{check}\ncheck({name})",
                "example_test": "",
                "entry_point": name,
                "signature": head.rpartition("def ")[2].rstrip(":"),
                "docstring": says,
                "instruction": f"Repair the function {name}.",
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [f"Python-{number}" for number in range(len(rows))]


@pytest.mark.slow
def test_faults_fail_and_repairs_pass_in_rows_of_humanevalpack(tmp_path):
    """One of the faults is an endless loop."""
    if not (IMAGES / "python-pytest.sif").exists():
        pytest.skip("the task image is not built: containers/build_image.sh")
    names = write(tmp_path / "pack.jsonl")
    words = [f"taskset.eval={tmp_path}/pack.jsonl", "tasks.train=0", "tasks.eval=164", "taskset.timeout_s=5"]
    words += ["--out", str(tmp_path / "checked.jsonl"), "--runs", "1", "--jobs", "2"]
    done = typed("hpc_swe.check", "configs/swepdb.toml", *words)
    assert done.returncode == 0, done.stderr
    checks = task_checks.read(tmp_path / "checked.jsonl")
    assert sorted(checks) == sorted(names)
    assert {(*one.gold, *one.empty) for one in checks.values()} == {("resolved", "unresolved")}
    assert {name: one.verdict for name, one in checks.items() if one.verdict != "usable"} == {
        "Python-3": "unsealed"  # it compares two computed values, and nothing else
    }


def test_half_of_the_assertions_of_a_row_of_humanevalpack_are_hidden(tmp_path):
    write(tmp_path / "pack.jsonl")
    tasks = [*Programs(eval=str(tmp_path / "pack.jsonl")).load("eval")]
    seen = [len(ids_of_tests(task.files["test.py"])) for task in tasks]
    graded = [len(ids_of_tests(task.tests.files["test.py"])) for task in tasks]
    assert seen == [(count + 1) // 2 for count in graded]
    assert sum(seen) < sum(graded)
    assert all("canonical" not in str(task) for task in tasks)
