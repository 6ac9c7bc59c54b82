"""Read rows of published sets of programs in their own columns, and make rows of files of them.

A set is one struct, whose fields are the columns that are used. The agent gets the statement, a `solution.py`
in which nothing is written yet, and some of the tests.
"""

import base64
import binascii
import hashlib
import io
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from hpc_swe.tasks.sets._exercises import Exercise, first_python, read

_PYTHON3 = 3
"""Number of the language in code_contests."""


def published(columns: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the name of the published set that has these columns, and a row of files; None for any other.

    Raise ValueError, which names the column, if the row cannot become a task.
    """
    for kind in _SETS:
        given = {kind.also.get(name, name): value for name, value in columns.items()}
        if kind.known_by <= given.keys():
            try:
                return kind.title, msgspec.convert(given, kind).row()
            except (ValueError, SyntaxError) as error:  # also msgspec's
                raise ValueError(f"as a row of {kind.title}: {error}") from None
    return None


class _Set(msgspec.Struct, frozen=True, kw_only=True):
    """A published set has these columns."""

    title: ClassVar[str]
    known_by: ClassVar[frozenset[str]]
    """Columns that no other set has together."""
    also: ClassVar[Mapping[str, str]] = {}
    """Another name of a column, as some versions of the set have it -> its name here."""

    def row(self) -> dict[str, Any]:
        raise NotImplementedError


class _KodCode(_Set, frozen=True, kw_only=True):
    title = "KodCode-V1"
    known_by = frozenset({"question_id", "question", "solution"})
    also: ClassVar = {"conversation_id": "question_id", "test_code": "test"}
    question_id: str
    question: str
    solution: str
    test: str

    def row(self) -> dict[str, Any]:
        read("solution", self.solution)
        return Exercise(self.question_id, self.question, self.solution).of_module("test", self.test)


class _Mbpp(_Set, frozen=True, kw_only=True):
    title = "MBPP"
    known_by = frozenset({"code", "test_list"})
    also: ClassVar = {"text": "prompt"}
    task_id: int | str
    prompt: str
    code: str
    test_list: list[str]
    test_setup_code: str = ""
    test_imports: list[str] = []

    def row(self) -> dict[str, Any]:
        read("code", self.code)
        set_up = [*self.test_imports, self.test_setup_code]
        exercise = Exercise(f"MBPP-{self.task_id}", self.prompt, self.code)
        return exercise.of_assertions("test_list", self.test_list, set_up)


class _Inference(msgspec.Struct, frozen=True):
    completion: str
    pass_rate: float = 0.0


class _AceCode(_Set, frozen=True, kw_only=True):
    title = "AceCode"
    known_by = frozenset({"id", "question", "test_cases"})
    also: ClassVar = {"tests": "test_cases"}
    id: int | str
    question: str
    test_cases: list[str]
    inferences: list[_Inference] = []

    def row(self) -> dict[str, Any]:
        right = [one.completion for one in self.inferences if one.pass_rate == 1]
        code = first_python(re.sub(r"(?s).*?```(?:python)?\n(.*?)```.*", r"\1", text) for text in right)
        return Exercise(str(self.id), self.question, code).of_assertions("test_cases", self.test_cases, [])


class _InputOutput(msgspec.Struct, frozen=True):
    inputs: list[Any]
    outputs: list[Any]
    fn_name: str | None = None


class _Apps(_Set, frozen=True, kw_only=True):
    """APPS, TACO, and others that took their column `input_output`; TACO's rows have no id."""

    title = "APPS or TACO"
    known_by = frozenset({"question", "input_output"})
    question: str
    input_output: str | _InputOutput
    problem_id: int | str = ""
    solutions: str | list[str] = []
    starter_code: str = ""

    def row(self) -> dict[str, Any]:
        name = f"APPS-{self.problem_id}"
        if self.problem_id == "":
            name = f"TACO-{hashlib.sha256(self.question.encode()).hexdigest()[:12]}"
        tests = _json("input_output", self.input_output, _InputOutput)
        code = first_python(_json("solutions", self.solutions or [], list[str]), tests.fn_name or "")
        exercise = Exercise(name, self.question, code, self.starter_code)
        pairs = _pairs("input_output", tests.inputs, tests.outputs)
        if not tests.fn_name:
            return exercise.of_programs(pairs)
        # A value may stand in a list of its own, or be such a list itself: published rows have both.
        either = [(given, [*one, one] if _is_single(one) else [one]) for given, one in pairs]
        return exercise.of_calls(tests.fn_name, either)


class _Case(msgspec.Struct, frozen=True):
    input: str
    output: str


class _LiveCodeBench(_Set, frozen=True, kw_only=True):
    title = "LiveCodeBench"
    known_by = frozenset({"question_content", "public_test_cases"})
    question_id: str
    question_content: str
    public_test_cases: str | list[_Case]
    private_test_cases: str | list[_Case] = []
    starter_code: str = ""
    metadata: str | dict[str, Any] = {}

    def row(self) -> dict[str, Any]:
        cases = _json("public_test_cases", self.public_test_cases, list[_Case])
        cases = cases + _json("private_test_cases", _unpacked(self.private_test_cases), list[_Case])
        exercise = Exercise(self.question_id, self.question_content, starter=self.starter_code)
        called = _json("metadata", self.metadata or {}, dict[str, Any]).get("func_name")
        if not called:
            return exercise.of_programs([(one.input, one.output) for one in cases])
        lines = [[line for line in one.input.splitlines() if line.strip()] for one in cases]
        given = [[_json("input of a case", line, Any) for line in each] for each in lines]
        right = [[_json("output of a case", one.output, Any)] for one in cases]
        return exercise.of_calls(called, list(zip(given, right, strict=True)))


class _Tests(msgspec.Struct, frozen=True):
    input: list[str] = []
    output: list[str] = []


class _Solutions(msgspec.Struct, frozen=True):
    language: list[int] = []
    solution: list[str] = []


class _CodeContests(_Set, frozen=True, kw_only=True):
    title = "code_contests"
    known_by = frozenset({"description", "public_tests"})
    name: str
    description: str
    public_tests: _Tests
    private_tests: _Tests = _Tests()
    generated_tests: _Tests = _Tests()
    solutions: _Solutions = _Solutions()

    def row(self) -> dict[str, Any]:
        of_language = zip(self.solutions.language, self.solutions.solution, strict=True)
        pairs = [
            pair
            for name in ("public_tests", "private_tests", "generated_tests")
            for pair in _pairs(name, getattr(self, name).input, getattr(self, name).output)
        ]
        code = first_python(text for language, text in of_language if language == _PYTHON3)
        return Exercise(self.name, self.description, code).of_programs(pairs)


_SETS: tuple[type[_Set], ...] = (_KodCode, _Mbpp, _AceCode, _Apps, _LiveCodeBench, _CodeContests)


def _is_single(value: object) -> bool:
    return isinstance(value, list) and len(value) == 1


def _pairs(column: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[tuple[Any, Any]]:
    if len(inputs) != len(outputs):
        raise ValueError(f"column {column}: {len(inputs)} inputs, but {len(outputs)} outputs")
    return list(zip(inputs, outputs, strict=True))


def _json(column: str, value: object, kind: Any) -> Any:
    """Return a value that is either there or a text of JSON; no text holds nothing."""
    try:
        if isinstance(value, str):
            return msgspec.json.decode(value, type=kind)
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"column {column}: {error}") from None


class _TextsOnly(pickle.Unpickler):
    """Load built-in values only; a pickle could otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def _unpacked(value: str | list[_Case]) -> str | list[_Case]:
    """Return the JSON of cases that are packed: a pickled text, compressed, in base 64."""
    if not isinstance(value, str) or value.lstrip().startswith("["):
        return value
    if not value:
        return []
    try:
        data = zlib.decompress(base64.b64decode(value, validate=True))
        return str(_TextsOnly(io.BytesIO(data)).load())
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError, IndexError) as error:
        raise ValueError(f"column private_test_cases is neither JSON nor a packed text: {error}") from None
