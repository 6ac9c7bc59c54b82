"""Rows in the columns of published sets, in words of our own, each with a right file and one by heart."""

import base64
import json
import pickle
import zlib
from typing import Any

SUM = "import sys\n\nprint(sum(map(int, sys.stdin.read().split())))\n"
DOUBLE = "def double(x: int) -> int:\n    return 2 * x\n"
METHOD = "class Solution:\n    def double(self, x: int) -> int:\n        return 2 * x\n"
ASSERTIONS = [f"assert double({n}) == {2 * n}" for n in (1, 2, 5, -3)]
SUMS = {"inputs": [f"{n} 2\n" for n in range(6)], "outputs": [f"{n + 2} \n\n" for n in range(6)]}
CALLS = {"fn_name": "double", "inputs": [[n] for n in range(4)], "outputs": [[2 * n] for n in range(4)]}


def packed(cases: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def cases(inputs: list[str], outputs: list[str]) -> list[dict[str, str]]:
    return [
        {"input": given, "output": right, "testtype": "x"}
        for given, right in zip(inputs, outputs, strict=True)
    ]


def kodcode() -> dict[str, Any]:
    tests = "from solution import double\n\n\n" + "\n\n".join(
        f"def test_{n}():\n    {one}\n" for n, one in enumerate(ASSERTIONS)
    )
    info = {"function_name": "double", "function_declaration": "def double(x):", "parameter_list": "(x)"}
    columns = {"version": "v1.0", "style": "instruct", "subset": "Prefill", "question_id": "Prefill_7_I"}
    return columns | {"question": "Double it.", "solution": DOUBLE, "test": tests, "test_info": [info]}


def mbpp() -> dict[str, Any]:
    columns = {"task_id": 7, "text": "Write a function to double a number.", "code": DOUBLE}
    return columns | {"test_list": ASSERTIONS, "test_setup_code": "", "challenge_test_list": []}


def mbpp_plus() -> dict[str, Any]:
    columns = {"task_id": 8, "prompt": "Write a function to double a number.", "code": DOUBLE}
    return columns | {"test_list": ASSERTIONS, "test_imports": ["import math"], "test": "inputs = []"}


def acecode() -> dict[str, Any]:
    inferences = [
        {"model_name": "m", "completion": "I cannot.", "pass_rate": 0.0},
        {"model_name": "m", "completion": f"So:\n```python\n{DOUBLE}```\nDone.", "pass_rate": 1.0},
    ]
    columns = {"id": "oss_7", "source": "oss", "question": "Double it.", "test_cases": ASSERTIONS}
    return columns | {"inferences": inferences, "context_messages": []}


def humaneval() -> dict[str, Any]:
    check = "def check(candidate):\n" + "".join(f"    {one}\n" for one in ASSERTIONS)
    prompt = 'def double(x: int) -> int:\n    """Double it."""\n'
    columns = {"task_id": "HumanEval/7", "prompt": prompt, "canonical_solution": "    return 2 * x\n"}
    return columns | {"test": check.replace("double", "candidate"), "entry_point": "double"}


def taco(tests: dict[str, Any] = SUMS, solution: str = SUM, starter: str = "") -> dict[str, Any]:
    columns = {"question": "Add the numbers.", "solutions": json.dumps(["print 'old'", solution])}
    return columns | {"input_output": json.dumps(tests), "starter_code": starter, "difficulty": "EASY"}


def apps() -> dict[str, Any]:
    return taco(CALLS, METHOD, "class Solution:\n    def double(self, x: int) -> int:\n        ") | {
        "problem_id": 7,
        "question": "Double it.",
    }


def live_code_bench() -> dict[str, Any]:
    all_cases = cases(**SUMS)
    columns = {"question_title": "sum", "question_content": "Add.", "question_id": "7_a", "starter_code": ""}
    shown = {"public_test_cases": json.dumps(all_cases[:1]), "metadata": "{}"}
    return columns | shown | {"private_test_cases": packed(all_cases[1:])}


def live_code_bench_calls() -> dict[str, Any]:
    tests = cases([f"{n}\n[{n}]" for n in range(4)], [f"[{n}, {n}]" for n in range(4)])
    starter = "class Solution:\n    def pair(self, x: int, others: List[int]) -> List[int]:\n        "
    shown = {"public_test_cases": json.dumps(tests[:1]), "metadata": json.dumps({"func_name": "pair"})}
    columns = {"question_content": "Join.", "question_id": "8", "starter_code": starter}
    return columns | shown | {"private_test_cases": packed(tests[1:])}


def code_contests() -> dict[str, Any]:
    halves = [{"input": SUMS["inputs"][n::2], "output": SUMS["outputs"][n::2]} for n in range(2)]
    columns = {"name": "7_A. Sum", "description": "Add.", "public_tests": halves[0]}
    solutions = {"language": [2, 3], "solution": ["int main() {}", SUM]}
    return columns | {"private_tests": halves[1], "solutions": solutions, "time_limit": {"seconds": 2}}


PAIR = "from typing import *\n\n\nclass Solution:\n    def pair(self, x: int, others: List[int]):\n"
PAIR += "        return (x, *others)\n"
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "KodCode-V1": (kodcode(), DOUBLE),
    "MBPP": (mbpp(), DOUBLE),
    "MBPP+": (mbpp_plus(), DOUBLE),
    "AceCode": (acecode(), DOUBLE),
    "HumanEval": (humaneval(), DOUBLE),
    "TACO": (taco(), SUM),
    "APPS": (apps(), METHOD),
    "LiveCodeBench": (live_code_bench(), SUM),
    "LiveCodeBench, functions": (live_code_bench_calls(), PAIR),
    "code_contests": (code_contests(), SUM),
}
"""Set -> a row, and a right solution.py."""
