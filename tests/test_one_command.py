"""The one name for all commands, and what an installation brings along."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hpc_swe import __version__
from hpc_swe.__main__ import COMMANDS
from hpc_swe.base.cli import BROKEN_PIPE
from tests.kit.checkout import ROOT, started, typed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def said(*words: str) -> "subprocess.CompletedProcess[str]":
    return typed("hpc_swe", *words, COLUMNS="200")


def test_the_version_is_told() -> None:
    assert said("--version").stdout == f"hpc_swe {__version__}\n"


@pytest.mark.parametrize("name", ["lanch", "tasks.launch"])
def test_a_command_that_is_none_is_refused_with_those_that_are(name: str) -> None:
    done = said(name)
    assert done.returncode == 2
    assert f"{name}: unknown command" in done.stderr
    assert all(f"  {name} " in done.stderr for name in COMMANDS)


def test_commands_do_what_their_modules_do(tmp_path: Path) -> None:
    done = said("launch", "tick", str(tmp_path))
    alone = typed("hpc_swe.launch", "tick", tmp_path)
    assert (done.returncode, done.stderr) == (alone.returncode, alone.stderr)
    assert done.returncode == 2


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("words", "code"), [("launch keys", 0), (r"launch start $'\xff.toml'", 2)])
def test_a_closed_output_changes_no_exit_code(closed: str, words: str, code: int) -> None:
    """Jobs of cron and scripts close what they do not read."""
    line = f"{sys.executable} -m hpc_swe {words} {closed}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (code, False)


def test_a_file_does_not_get_the_number_of_a_closed_output(tmp_path: Path) -> None:
    """Or it would hold what a C library prints, which writes to number 1 or 2."""
    program = "import os, sys\nfrom hpc_swe.base import cli\n@cli.command\ndef main():\n"
    program += " file = open(sys.argv[1], 'wb')\n os.write(1, b'words')\n os.write(2, b'words')\nmain()"
    line = '"$0" -c "$1" "$2" <&- >&- 2>&-'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, program, tmp_path / "record"], cwd=ROOT, timeout=600
    )
    assert (done.returncode, (tmp_path / "record").read_bytes()) == (0, b"")


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["show", "--help"],
        ["launch", "keys"],
        ["launch", "start", "configs/demo.toml", "model=none", "--dry-run"],
    ],
)
def test_a_reader_that_has_left_ends_any_command_with_no_traceback(words: list[str]) -> None:
    line = [sys.executable, "-m", "hpc_swe", *words]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        line, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        said = command.stderr.read()
    assert (command.returncode, said) == (BROKEN_PIPE, "")


def test_the_list_has_every_module_that_is_a_command() -> None:
    sources = [path for path in (ROOT / "hpc_swe").rglob("*.py") if "\n@cli.command\n" in path.read_text()]
    paths = [path.relative_to(ROOT / "hpc_swe").with_suffix("") for path in sources]
    names = [".".join(path.parts).removesuffix(".__main__") for path in paths]
    assert {re.sub(r"^(?:view|launch|makers)\.", "", name) for name in names} == {"__main__", *COMMANDS}


def test_commands_of_makers_keep_the_names_that_they_had() -> None:
    alone = typed("hpc_swe.tasks.check", "--help", COLUMNS="200")
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout == said("tasks.check", "--help").stdout == said("check", "--help").stdout


VERBS = [("launch", verb) for verb in ("start", "tick", "keys", "stop")]


@pytest.mark.slow  # it starts each command
@pytest.mark.parametrize("words", [*((name,) for name in COMMANDS), *VERBS], ids=" ".join)
def test_the_help_of_a_command_explains_every_argument(words: tuple[str, ...]) -> None:
    done = started("hpc_swe", *words, "--help", COLUMNS="200")
    text = re.sub(r"\n {15,}", "  ", done.stdout.partition("examples:")[0])  # wrapped lines
    assert done.returncode == 0, done.stderr
    assert f"usage: python -m hpc_swe.{words[0]}" in text
    assert max(map(len, done.stdout.partition("examples:")[0].splitlines())) <= 100
    entries = [line for line in text.splitlines() if re.match(r"  (?:-|[A-Za-z])", line)]
    assert [line for line in entries if not re.search(r"\S  +\S", line)] == []
    assert re.findall(r"\(default: [(\[]|\(default: {'", text) == [], "as Python writes it"


@pytest.mark.parametrize(
    "line",
    [
        "check CONFIG --runs=0",
        "build_images CONFIG --jobs=0",
        "mine_history REPOSITORY --out=OUT --timeout-s=0",
        "mine_history REPOSITORY --out=OUT --limit=-1",
        "export_episodes RUN --out=rows.parquet --per-task=-1",
        "doctor --nodes=0",
    ],
)
def test_a_number_that_makes_no_sense_is_refused(line: str) -> None:
    done = said(*line.split())
    option = line.split()[-1].partition("=")[0]
    assert done.returncode == 2
    assert re.search(rf"error: argument {option}: \S+ is not at least", done.stderr), done.stderr


def test_the_console_script_is_the_command() -> None:
    assert PROJECT["scripts"] == {"hpc-swe": "hpc_swe.__main__:main"}
    (found,) = (importlib.metadata.EntryPoint("hpc-swe", PROJECT["scripts"]["hpc-swe"], "console_scripts"),)
    assert callable(found.load())


def test_run_time_dependencies_are_imported_at_run_time() -> None:
    sources = [path.read_text() for folder in ("hpc_swe", "jobs") for path in (ROOT / folder).rglob("*.py")]
    for requirement in PROJECT["dependencies"]:
        name = re.split(r"[<>=]", requirement)[0]
        assert any(re.search(rf"^\s*(import|from) {name}\b", text, re.MULTILINE) for text in sources), name


def test_the_licence_is_there() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_lock_for_gpus_pins_what_the_extra_asks_for() -> None:
    lines = (ROOT / "containers/requirements-gpu.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for text in (
        *PROJECT["dependencies"],
        *chain(*(PROJECT["optional-dependencies"][name] for name in ("gpu", "flash-attention", "swebench"))),
    ):
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[wanted.name.lower()]), text


def test_uv_s_lock_is_of_this_project_and_has_the_versions_for_gpus(tmp_path: Path) -> None:
    """As `uv lock --check`, where the index is said to be the place that the lock names; nothing is there."""
    line = ["uv", "export", "--locked", "--offline", "--quiet", "--no-emit-project", "--no-hashes"]
    line += ["--extra=gpu", "--extra=flash-attention", "--no-header", "--no-annotate"]
    own = {"DEFAULT_INDEX": "https://example.invalid/simple", "PYTHON": sys.executable, "CACHE_DIR": tmp_path}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    environ |= {f"UV_{name}": str(value) for name, value in own.items()}
    done = subprocess.run(
        [sys.executable, "-m", *line], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stderr}: type `make lock`"
    locked = {line.partition(" ")[0] for line in done.stdout.splitlines()}
    assert len(locked) > 200
    assert locked - {*(ROOT / "containers/requirements-gpu.txt").read_text().splitlines()} == set()
