"""Programs in the columns of HumanEvalPack, each with a fault, its repair, and tests that find the fault."""

import json
from pathlib import Path

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
