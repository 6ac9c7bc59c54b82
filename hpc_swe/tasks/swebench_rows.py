"""Read rows of SWE-bench from files, and write the eval script for rows without one."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from hpc_swe.base.errors import ConfigError, remedy
from hpc_swe.base.records import Start, TestPlan
from hpc_swe.tasks.patch_text import HIDDEN, normalised, without_digests
from hpc_swe.tasks.recipes import RECIPES, Recipe
from hpc_swe.tasks.swebench_package import official

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
"""Marks that an eval script prints before and after the tests."""
Record = str | dict[str, Any]
"""A line of JSON, or a mapping of column to value."""
_CONDA = ["source /opt/miniconda3/bin/activate", "conda activate testbed"]
SET_UP = ["conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"]
SET_UP += ["setup.py", "pyproject.toml", "sitecustomize.py", "usercustomize.py", ".gitattributes"]
SET_UP += ["*.pth", "*.pyc", "*.so", "*.egg-link"]
# Python finds an installed package's metadata in whatever case the name of its folder is written.
SET_UP += ["*.[dD][iI][sS][tT]-[iI][nN][fF][oO]/*", "*.[eE][gG][gG]-[iI][nN][fF][oO]/*"]
SET_UP += ["tests/*", "test/*", "testing/*", "e2e/*"]
"""Files that set up tests or their runner. No reference of SWE-bench changes folders of these names."""
TESTS = (
    *("test/*", "tests/*", "testing/*", "*/test/*", "*/tests/*", "*/testing/*"),
    *("test.py", "tests.py", "test_*.py", "*_test.py", "*_tests.py", "conftest.py"),
    *("*/test.py", "*/tests.py", "*/test_*.py", "*/*_test.py", "*/*_tests.py", "*/conftest.py"),
)
"""Patterns of the files that are tests; a star also matches slashes."""
IMAGE_NAME = re.compile(r"\w[\w.+-]*")
"""Names of images, which are names of files: none is empty, a folder's, or leads to another folder."""
WORKDIR = re.compile(r"(/\w[\w.+-]*)+")
_HIDDEN = re.compile(r"/?\w[^/\0]*(/\w[^/\0]*)*")
_HOST = re.compile(r"^(localhost|[^/]*[.:][^/]*)/")
_FOREIGN = re.compile(r"`\$\.(recipe|workdir)\b")
_COLLECTED = re.compile(r"(.*/)?(test_[^/]*|[^/]*_test)\.py")
NO_TESTS = {".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row has the columns of both formats that are used here; it ignores others."""

    repo: str
    instance_id: str
    base_commit: str
    patch: str
    test_patch: str
    problem_statement: str
    version: str
    FAIL_TO_PASS: str | list[str]
    PASS_TO_PASS: str | list[str]
    start_patch: str = ""
    """`Start.patch`; the columns `patch` and `test_patch` then apply to what it leaves."""
    hidden_tests: list[str] = []
    """`Start.hidden`; these are the tests then, and `test_patch` is empty."""
    absent: list[str] = []
    """`Task.absent`."""
    statuses: dict[str, str] = {}
    """Status of every test with the reference, by its name without its file; empty compares none."""
    image: str = ""
    """Reference of an image, as registries have them; empty is the official one."""
    of_another_commit: bool = False
    """Whether the published image is at another commit, so that the base is checked out when it is built."""
    workdir: str = ""
    """Folder of the repository in the image; empty is that of the taskset."""
    recipe: Recipe | None = None
    """How the row's tests are run, for one without an eval script."""
    eval_script: str = ""
    log_parser: str = ""
    eval_type: str = "pass_and_fail"
    test_paths: list[str] = []
    """Patterns of the paths that are tests, where a star also matches slashes; empty is `TESTS`."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "image", self.image.removeprefix("docker://"))
        msgspec.structs.force_setattr(self, "workdir", self.workdir.rstrip("/") or self.workdir)
        if why := self._fault():
            raise ValueError(f"{self.instance_id}: {why}")

    def _fault(self) -> str:
        fail_to_pass, _ = self.fail_to_pass, self.pass_to_pass  # either raises ValueError if it is not a list
        if not fail_to_pass:
            return "FAIL_TO_PASS is empty: swebench calls every patch resolved"
        if "://" in self.image:
            return f"column image: {self.image!r}: of all schemes only docker:// is known; leave it out"
        if not IMAGE_NAME.fullmatch(self.image_name):
            column = "image" if self.image else "instance_id"
            return f"column {column}: {self.image or self.instance_id!r} gives no name of an image"
        if self.workdir and not WORKDIR.fullmatch(self.workdir):
            return f"column workdir: {self.workdir!r} is no folder of an image, such as '/testbed'"
        if self.eval_script and not self.log_parser:
            return "eval_script without log_parser"
        if self.eval_type != "pass_and_fail":
            return f"eval_type {self.eval_type!r} counts tests that never ran as passed: it gives no reward"
        return self._wrong_start() if self.start else ""

    def _wrong_start(self) -> str:
        wrong = [path for path in self.hidden_tests if not _HIDDEN.fullmatch(path)]
        if self.eval_script:
            column = "start_patch" if self.start_patch else "hidden_tests"
            return f"column {column}: an eval_script checks out the base commit, which is then hidden"
        if self.hidden_tests and self.test_patch.strip() not in ("", HIDDEN.strip()):
            return "columns hidden_tests and test_patch: one of them says which tests are run"
        return f"column hidden_tests: {wrong[0]!r} is no path, such as 'tests/test_a.py'" if wrong else ""

    @property
    def start(self) -> Start | None:
        """Return what is changed in the repository of the image first."""
        start = Start(patch=self.start_patch, hidden=tuple(self.hidden_tests))
        return None if start == Start() else start

    @property
    def fail_to_pass(self) -> list[str]:
        """Return the tests that a solution must make pass, named as swebench's parser names them."""
        return _names("FAIL_TO_PASS", self.FAIL_TO_PASS)

    @property
    def pass_to_pass(self) -> list[str]:
        """Return the tests that passed before and must still pass, named in the same way."""
        return _names("PASS_TO_PASS", self.PASS_TO_PASS)

    @property
    def reference(self) -> str:
        """Return the image's name as on its registry, without the host, and without the tag `latest`."""
        official = f"swebench/sweb.eval.x86_64.{self.instance_id}".replace("__", "_1776_").lower()
        return _HOST.sub("", self.image).removesuffix(":latest") or official

    @property
    def image_name(self) -> str:
        """Name of the image here, for example ``sweb.eval.x86_64.django_1776_django-17087``.

        Another tag than `latest` is part of it, as in ``name+tag``, so that no two tags share an image.
        """
        name, _, tag = self.reference.rpartition("/")[2].replace("@", ":").partition(":")
        return f"{name}+{tag.replace(':', '-')}" if tag else name


@dataclass(frozen=True)
class TestPatch:
    """A row's test patch changes and adds files; the reference changes others, perhaps a runner's set-up."""

    __test__ = False  # tells pytest that this is not a test class

    changed: list[str]
    added: list[str]
    set_up: list[str]
    """Files of the solution; an agent's patch may change them too, whatever they set up."""

    @classmethod
    def read(cls, where: str, row: Row) -> "TestPatch":
        """Read both patches of a row at `where`, a file and line; raise ConfigError if one is no patch."""
        hidden = [(name, True) for name in row.start.names] if row.start else []
        tests = hidden or _files(where, "test_patch", row.test_patch)
        reference = _files(where, "patch", row.patch)
        return cls(
            changed=[path for path, is_new in tests if not is_new],
            added=[path for path, is_new in tests if is_new],
            # A module of tests that somebody added to a solution is no part of it, and could stop a suite.
            set_up=[path for path, is_new in reference if not (is_new and _COLLECTED.fullmatch(path))],
        )

    @property
    def files(self) -> list[str]:
        """Return all files that are changed or added."""
        return [*self.changed, *self.added]

    def extra(self, row: Row) -> dict[str, str]:
        """Return the entries of `TestPlan.extra` that the grader needs, but for `log_parser`."""
        host = _HOST.match(row.image)
        return {
            "repo": row.repo,
            "version": row.version,
            "eval_type": row.eval_type,
            "test_patch": row.test_patch,
            "test_files": json.dumps(self.files),
            "set_up": "\n".join(self.set_up),
            **({"test_paths": "\n".join(row.test_paths)} if row.test_paths else {}),
            **({"statuses": json.dumps(row.statuses)} if row.statuses else {}),
            **({} if row.reference == f"swebench/{row.image_name}" else {"image": row.reference}),
            **({"image_host": host[0]} if host else {}),
            **({"of_another_commit": "yes"} if row.of_another_commit else {}),
        }


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield each row's place (file and number) and its record; raise ConfigError for an unreadable file."""
    if path.suffix in (".jsonl", ".json"):
        text = _text(path)
        if text.lstrip().startswith("["):
            try:
                rows = msgspec.json.decode(text, type=list[dict[str, Any]])
            except msgspec.MsgspecError as error:
                raise ConfigError(f"[taskset] rows: {path} is not one array of rows: {error}") from None
            yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))
            return
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"{path}:{number}", line
    elif path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows = pq.read_table(path).to_pylist()
        except (OSError, pa.ArrowException) as error:
            why = f"{type(error).__name__}: {error}; python -m hpc_swe.prepare makes such a file"
            raise ConfigError(f"[taskset] rows: {path}: {why}") from None
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))
    else:
        raise ConfigError(
            f"[taskset] rows: {path} is no .jsonl, .json or .parquet; python -m hpc_swe.prepare "
            "makes one of a dataset of a hub, or of a folder that datasets saved"
        )


def parse(where: str, record: Record) -> Row:
    """Convert a record to a row; `where` names its file and line.

    Raise ConfigError if it is not a row, or if swebench would judge it wrongly.
    """
    try:
        row = msgspec.convert(columns(record), Row)
        patches = {"patch": row.patch, "start_patch": row.start_patch}
        patches["test_patch"] = HIDDEN if row.hidden_tests else row.test_patch
        return msgspec.structs.replace(row, **{name: normalised(text) for name, text in patches.items()})
    except (msgspec.MsgspecError, ValueError) as error:
        foreign = _FOREIGN.search(str(error))
        remedy = f"; if its {foreign[1]} is of another kind, rename the column" if foreign else ""
        raise ConfigError(f"{where}: {error}{remedy}") from None


def columns(record: Record) -> dict[str, Any]:
    """Return a record's values by column, without nulls; raise msgspec.MsgspecError if it is no object."""
    if isinstance(record, str):
        return msgspec.json.decode(record, type=dict[str, Any])
    return {name: value for name, value in record.items() if value is not None}


def test_plan(
    where: str, row: Row, recipes: Mapping[str, Recipe], workdir: str, timeout_s: float
) -> TestPlan:
    """Return how the tests of a row are run and judged; `where` names its file and line.

    A recipe of `recipes` comes before the row's own, and that before a known one. Raise now what the grader
    would raise for each episode, after its tests have run: ConfigError if a column is not a patch, if nothing
    says how to run the tests, or if the row has an unknown parser, or an eval script that the grader cannot
    use.
    """
    patch = TestPatch.read(where, row)
    recipe = recipes.get(row.repo) or row.recipe or RECIPES.get(row.repo)
    texts = {"test_patch": row.test_patch, "eval_script": row.eval_script}
    row = msgspec.structs.replace(row, **{name: without_digests(text) for name, text in texts.items()})
    if not row.eval_script and recipe is None:
        raise ConfigError(
            f"{where}: {row.instance_id} has no eval_script, and [taskset.recipes] none for {row.repo!r}"
        )
    command, parser = row.eval_script, row.log_parser
    if recipe is not None and not command:
        command, parser = script(row, patch, recipe, workdir), recipe.log_parser
    if parser not in official("harness.log_parsers").PARSER_REGISTRY:
        raise ConfigError(
            f"{where}: {row.instance_id}: swebench.harness.log_parsers has no log_parser {parser!r}; "
            "correct the row, or the recipe in [taskset.recipes]"
        )
    try:
        find_marks(row.instance_id, command.split("\n"))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return TestPlan(
        command=command,
        fail_to_pass=row.fail_to_pass,
        pass_to_pass=row.pass_to_pass,
        timeout_s=timeout_s,
        extra=patch.extra(row) | {"log_parser": parser},
    )


def read_ids(path: Path) -> dict[str, str]:
    """Read a file of instance ids: id -> file and line."""
    found = {}
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            found[line.strip()] = f"{path}:{number}"
    return found


def added(patch: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each file that a patch changes or adds, and the lines that it adds there."""
    from unidiff import PatchSet

    for file in PatchSet(patch):
        if not file.is_removed_file:
            yield file.path, [line.value for hunk in file for line in hunk if line.is_added]


def script(row: Row, patch: TestPatch, recipe: Recipe, workdir: str) -> str:
    """Write an eval script of the same form as the official ones."""
    end = "EOF_" + row.base_commit[:12]
    while end in row.test_patch:
        end += "_"
    base = "HEAD" if row.start else row.base_commit
    restore = [f"git checkout {base} -- {shlex.join(patch.changed)}"] if patch.changed else []
    flags = "-rf" if row.hidden_tests else "-f"
    remove = [f"rm {flags} {shlex.join(patch.added)}"] if patch.added else []
    files = [] if recipe.labels == "none" else patch.files
    labels = [path for path in files if PurePosixPath(path).suffix not in NO_TESTS]
    if recipe.labels == "modules":
        parts = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in labels]
        labels = list(dict.fromkeys(parts))
    return "\n".join(
        [
            "#!/bin/bash",
            "set -uxo pipefail",
            *(_CONDA if recipe.conda else []),
            f"cd {workdir}",
            *recipe.set_up,
            *restore,
            *remove,
            f"git apply --verbose - <<'{end}'\n{row.test_patch.rstrip(chr(10))}\n{end}",
            f": '{START}'",
            f"{recipe.command} {shlex.join(labels)}".rstrip(),
            f": '{END}'",
            *restore,
            "",
        ]
    )


def find_marks(task_id: str, script: list[str]) -> tuple[int, int]:
    """Return the positions of the two lines of an eval script that print the marks around the tests' output.

    Raise ConfigError if a mark is missing or occurs twice, or if they are in the wrong order.
    """
    starts, ends = ([number for number, line in enumerate(script) if mark in line] for mark in (START, END))
    if len(starts) != 1 or len(ends) != 1 or starts[0] > ends[0]:
        raise ConfigError(f"task {task_id}: its eval script must hold {START!r} and {END!r}, each once")
    return starts[0], ends[0]


def _names(name: str, column: str | list[str]) -> list[str]:
    try:
        return msgspec.json.decode(column or "[]", type=list[str]) if isinstance(column, str) else column
    except msgspec.DecodeError as error:
        raise ValueError(f"{name} is not a list of names in JSON: {error}") from None


def _files(where: str, name: str, text: str) -> list[tuple[str, bool]]:
    """Return the path of each file of a patch, and whether the file is new."""
    from unidiff import PatchSet
    from unidiff.errors import UnidiffParseError

    try:
        files = [(file.path, file.is_added_file) for file in PatchSet(text)]
    except UnidiffParseError as error:
        raise ConfigError(f"{where}: {name} is not a patch: {error}") from None
    if not files:
        raise ConfigError(f"{where}: {name} is empty")
    return files


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[taskset] {path}: {error}{remedy(error)}") from None
