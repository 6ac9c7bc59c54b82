"""Read rows of published task sets, in their own columns, as rows of SWE-bench.

`SETS` has one record for each set. Its templates say where a row has its image, its work directory, its test
command and its parser: `{a.b}` is the entry `b` of column `a`, and `{a?}` may be empty. A list becomes lines,
and a mapping becomes exports.
"""

import ast
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import msgspec

from hpc_swe.base.errors import ConfigError
from hpc_swe.tasks.image_rows import of_r2e, of_scale, of_smith
from hpc_swe.tasks.recipes import Recipe
from hpc_swe.tasks.swebench_rows import NO_TESTS, Record, Row, columns, parse

_FIELD = re.compile(r"\{(\w+(?:\.\w+)*)(\??)\}")
_FILE = re.compile(r"^\+\+\+ b/([^\t\n]+)", re.MULTILINE)
_CASE = re.compile(r"\[case ([^\]]+)\]")
_PYTEST = "python -m pytest -rA {files?}"
_LISTED = "python -m pytest -rA {listed}"
_PARSER = "parse_log_"
_BY_RUNNER = {
    "cargo test": "cargo",
    "go test": "gotest",
    "jest": "jest",
    "mvn": "maven",
    "phpunit": "phpunit",
    "vitest": "vitest",
}
"""Words of a test command -> swebench's parser of what that runner prints."""
_OF_GYM = "bokeh/bokeh conan-io/conan dask/dask facebookresearch/hydra getmoto/moto iterative/dvc"
_OF_GYM += " modin-project/modin pandas-dev/pandas Project-MONAI/MONAI pydantic/pydantic python/mypy"
_SOURCE = {"id": "instance_id", "id_s": "instance_id", "name": "repo", "listed": "FAIL_TO_PASS"}
"""Name of what is derived -> column that it is derived from."""
_OWN = {"image", "eval_script"}
"""A row with one of these columns is in SWE-bench's own format."""


class PublishedSet(msgspec.Struct, frozen=True, kw_only=True):
    """A set has these columns; of several templates the first counts whose columns are there."""

    title: str
    known_by: frozenset[str]
    """Columns that its rows have; the first set of `SETS` that fits is taken."""
    lacks: frozenset[str] = frozenset()
    repositories: frozenset[str] = frozenset()
    """Values of `repo` by which it is known, too; empty is any."""
    refused: str = ""
    """Reason why its rows cannot be used."""
    language: str = ""
    """Column of the language, where only rows in Python can be used."""
    image: Sequence[str] = ()
    workdir: str = "/testbed"
    command: Sequence[str] = (_PYTEST,)
    parser: Sequence[str] = ("pytest",)
    set_up: str = ""
    conda: bool = False
    texts: dict[str, str] = {}
    """Column of SWE-bench -> template, where a row has no such column."""
    derived: Callable[[Mapping[str, Any], Callable[[str], list[str]]], dict[str, Any]] | None = None
    """Returns further columns of a row, given with what reads a column that lists tests."""

    def has(self, values: Mapping[str, Any]) -> bool:
        """Return whether a row of these columns belongs to the set."""
        fits = self.known_by <= values.keys() and not self.lacks & values.keys()
        return fits and (not self.repositories or str(values.get("repo")) in self.repositories)


SETS = (
    PublishedSet(
        title="SWE-Lego",
        known_by=frozenset({"image_name", "test_cmd"}),
        image=("{image_name}",),
        command=("{test_cmd}",),
        conda=True,
    ),
    PublishedSet(
        title="SWE-rebench V2",
        known_by=frozenset({"install_config", "image_name", "language"}),
        image=("{image_name}",),
        workdir="/{name}",
        command=("{install_config.test_cmd}",),
        parser=("{install_config.log_parser}",),
    ),
    PublishedSet(
        title="SWE-rebench",
        known_by=frozenset({"install_config"}),
        image=("{docker_image}", "{image_name}", "swerebench/sweb.eval.x86_64.{id}"),
        command=("{install_config.test_cmd} {files?}", _PYTEST),
        parser=("{install_config.log_parser}", "pytest"),
        set_up="{install_config.env_vars?}",
        conda=True,
    ),
    PublishedSet(
        title="SWE-bench-extra",
        known_by=frozenset({"meta", "environment_setup_commit"}),
        image=("{docker_image}", "swerebench/sweb.eval.x86_64.{id}"),
        conda=True,
    ),
    PublishedSet(
        title="SWE-bench-Live/MultiLang",
        known_by=frozenset({"test_cmds", "print_cmds"}),
        image=("{docker_image}", "starryzhang/sweb.eval.x86_64.{id}"),
        command=("{rebuild_cmds?}\n{test_cmds}\n{print_cmds?}",),
        parser=("{parser}", "{log_parser}"),
    ),
    PublishedSet(
        title="SWE-bench-Live",
        known_by=frozenset({"test_cmds"}),
        image=("{docker_image}", "starryzhang/sweb.eval.x86_64.{id}"),
        command=("{test_cmds}",),
        parser=("{parser}", "{log_parser}"),
    ),
    PublishedSet(
        title="SWE-bench Pro",
        known_by=frozenset({"repo_language"}),
        image=("{docker_image}", "jefzda/sweap-images:{dockerhub_tag}"),
        language="repo_language",
        workdir="/app",
        command=(_LISTED,),
        # As the scripts do that lie beside the rows; PYTHONPATH would let code of a patch run first.
        set_up="export QT_QPA_PLATFORM=offscreen OL_CONFIG=/app/conf/openlibrary.yml",
        texts={"problem_statement": "{problem_statement}\n\n{requirements?}\n\n{interface?}"},
    ),
    PublishedSet(
        title="Scale-SWE",
        known_by=frozenset({"image_url", "parent_commit"}),
        image=("{image_url}",),
        workdir="{workdir}",
        command=(_LISTED,),
        texts={"repo": "{user}/{repo}", "base_commit": "{parent_commit}"},
        derived=of_scale,
    ),
    PublishedSet(
        title="SWE-Gym",
        known_by=frozenset({"test_patch", "base_commit"}),
        lacks=frozenset({"image_name", "docker_image"}),
        repositories=frozenset(_OF_GYM.split()),
        image=("xingyaoww/sweb.eval.x86_64.{id_s}",),
        command=("python -m pytest -rA -k {cases}", _PYTEST),
        conda=True,
    ),
    PublishedSet(
        title="R2E-Gym",
        known_by=frozenset({"docker_image", "expected_output_json"}),
        image=("{docker_image}",),
        command=("{test_cmd}",),
        derived=of_r2e,
    ),
    PublishedSet(
        title="SWE-smith",
        known_by=frozenset({"image_name", "patch"}),
        lacks=frozenset({"test_patch"}),
        image=("{image_name}",),
        command=("python -m pytest --disable-warnings --color=no --tb=no --verbose {listed}",),
        conda=True,
        derived=of_smith,
    ),
    PublishedSet(
        title="Multi-SWE-bench",
        known_by=frozenset({"fix_patch", "number"}),
        refused="no column says how its tests are run: scripts in the image and a package of its own do",
    ),
)


def published_set(values: Mapping[str, Any]) -> PublishedSet | None:
    """Return the set that has these columns; None if they are SWE-bench's own, or unknown."""
    given = {name: value for name, value in values.items() if value is not None}
    return None if _OWN & given.keys() else next((each for each in SETS if each.has(given)), None)


def read_row(where: str, record: Record) -> Row:
    """Convert a record of SWE-bench, or of a published set, to a row; `where` names its file and line.

    Raise ConfigError, which names the column, if it is not a row, or if swebench would judge it wrongly.
    """
    try:
        values = columns(record)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: {error}") from None
    kind = published_set(values)
    if kind is None:
        return parse(where, record)
    where = f"{where}: as a row of {kind.title}"
    if kind.refused:
        raise ConfigError(f"{where}: {kind.refused}")
    try:
        made = _as_swebench(kind, _Columns(values))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return parse(where, made)


def _as_swebench(kind: PublishedSet, given: "_Columns") -> dict[str, Any]:
    if kind.derived:
        given = _Columns({**given.values, **kind.derived(given.values, given.names)})
    language = given.values.get(kind.language, "python")
    if language != "python":
        raise ValueError(f"column {kind.language}: {language}: no column says how its tests are run and read")
    command = given.first(kind.command).strip()
    parser = _parser(given.first(kind.parser), command)
    names = [given.names(column) for column in ("FAIL_TO_PASS", "PASS_TO_PASS")]
    if parser.startswith(f"{_PARSER}pytest"):  # it cuts a name at a blank
        names = [[*dict.fromkeys(name.partition(" ")[0] for name in column)] for column in names]
    return {
        **{name: value for name, value in given.values.items() if value is not None},
        **{name: given.filled(template).strip() for name, template in kind.texts.items()},
        "FAIL_TO_PASS": names[0],
        "PASS_TO_PASS": names[1],
        "version": given.filled("{version?}"),
        "image": given.first(kind.image),
        "workdir": given.filled(kind.workdir),
        "log_parser": "",
        "recipe": Recipe(
            command=command,
            log_parser=parser,
            labels="none",
            set_up=[line for line in given.filled(kind.set_up).split("\n") if line],
            conda=kind.conda,
        ),
    }


def _parser(given: str, command: str) -> str:
    """Return the name of swebench's parser for a name as rows have it, or for a row's own program."""
    if re.fullmatch(r"\w+", given):
        return given if given.startswith(_PARSER) else _PARSER + given
    for words, parser in _BY_RUNNER.items():
        if words in command:
            return _PARSER + parser
    raise ValueError("column log_parser holds a program, which is not run, and its tests' runner is unknown")


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text or "[]")  # Python reads some signs of JSON as others
    except msgspec.DecodeError:
        return ast.literal_eval(text)


@dataclass(frozen=True)
class _Columns:
    """The columns of a row, and names for what is derived from them."""

    values: Mapping[str, Any]

    @cached_property
    def derived(self) -> dict[str, str]:
        """Return parts of the names of images, and words of commands, which are quoted for a shell."""
        row_id, patch = (str(self.values.get(name, "")) for name in ("instance_id", "test_patch"))
        tests = [*self.names("FAIL_TO_PASS"), *self.names("PASS_TO_PASS")]
        files = [path for path in _FILE.findall(patch) if PurePosixPath(path).suffix not in NO_TESTS]
        cases = _CASE.findall(patch)
        return {
            "id": row_id.replace("__", "_1776_").lower(),
            "id_s": row_id.replace("__", "_s_").lower(),
            "name": str(self.values.get("repo", "")).rpartition("/")[2],
            "files": shlex.join(files),
            "listed": shlex.join(dict.fromkeys(name.partition("::")[0] for name in tests)),
            "cases": shlex.quote(" or ".join(cases)) if cases else "",
        }

    def filled(self, template: str) -> str:
        """Fill in a template; raise ValueError if a column is missing or empty."""
        return _FIELD.sub(lambda found: self._text(found[1], bool(found[2])), template)

    def first(self, templates: Sequence[str]) -> str:
        """Fill in the first template that can be."""
        for template in templates[:-1]:
            try:
                return self.filled(template)
            except ValueError:
                continue
        return self.filled(templates[-1])

    def names(self, column: str) -> list[str]:
        """Return a list of names, which may be written in JSON or as Python prints it; "" has none."""
        value = self.values.get(column, self.values.get(column.lower()))
        try:
            return msgspec.convert(_decoded(value) if isinstance(value, str) else value, list[str])
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(f"column {column} is not a list of names: {error}") from None

    def _text(self, path: str, may_be_empty: bool) -> str:
        value: Any = {**self.values, **self.derived}
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            value = [f"export {name}={shlex.quote(str(each))}" for name, each in value.items()]
        if isinstance(value, list):
            value = "\n".join(map(str, value))
        text = "" if value is None else str(value)
        if not text.strip() and not may_be_empty:
            raise ValueError(f"column {_SOURCE.get(path, path)} is missing or empty")
        return text
