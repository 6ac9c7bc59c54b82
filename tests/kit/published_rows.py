"""Rows of repositories in the columns of published sets, in words of our own, and what becomes of them."""

import json
from dataclasses import dataclass
from typing import Any

from hpc_swe.tasks.image_rows import SCRIPT
from tests.kit.toy import BROKEN, MENDED, gold, patch
from tests.kit.toy import row as toy_row

BASE = "0123456789abcdef0123456789abcdef01234567"
PYTEST = "python -m pytest -rA tests/test_plain.py"
IMAGE = "sweb.eval.x86_64.acme_{}_tool-12"
MYPY = """diff --git a/test-data/unit/check.test b/test-data/unit/check.test
--- a/test-data/unit/check.test
+++ b/test-data/unit/check.test
@@ -1 +1,4 @@
 # cases
+[case testFirst]
+[case testNext]
+[out]
"""


@dataclass(frozen=True)
class Published:
    """A row, and what a reader must find in it."""

    row: dict[str, Any]
    reference: str
    command: str = PYTEST
    workdir: str = "/testbed"
    parser: str = "parse_log_pytest"
    set_up: str = ""
    conda: bool = True
    base: str = BASE


def columns(*without: str, **more: object) -> dict[str, Any]:
    names = {
        "FAIL_TO_PASS": ["tests/test_plain.py::test_add[1]"],
        "PASS_TO_PASS": ["tests/test_plain.py::test_double"],
    }
    made = toy_row("pytest", BASE, instance_id="Acme__tool-12", repo="acme/tool", **names) | more
    return {name: value for name, value in made.items() if name not in without}


def _install(**more: object) -> dict[str, object]:
    command = "pytest --no-header -rA"
    given = {"install": "pip install -e .", "python": "3.9", "test_cmd": command, "env_vars": None}
    return given | {"log_parser": "parse_log_pytest"} | more


def _rebench() -> Published:
    row = columns(
        install_config=_install(env_vars={"LANG": "C UTF"}), requirements="", environment="", meta={"a": 1}
    )
    row |= {"docker_image": "swerebench/" + IMAGE.format("1776"), "FAIL_TO_FAIL": [], "license_name": "MIT"}
    command = "pytest --no-header -rA tests/test_plain.py"
    return Published(row, row["docker_image"], command, set_up="export LANG='C UTF'")


def _rebench_v2() -> Published:
    install = _install(test_cmd=["cd build", "go test -v ./..."], log_parser="parse_log_gotest")
    row = columns("version", "environment_setup_commit", install_config=install, interface="", language="go")
    row |= {"image_name": "docker.example/swerebenchv2/acme-tool:12-aaaaaaa", "pr_description": ""}
    command = "cd build\ngo test -v ./..."
    return Published(
        row, "swerebenchv2/acme-tool:12-aaaaaaa", command, "/tool", "parse_log_gotest", conda=False
    )


def _live(**more: object) -> dict[str, Any]:
    given = {
        "pull_number": "12",
        "issue_numbers": ["11"],
        "test_cmds": ["pytest -rA"],
        "log_parser": "pytest",
    }
    return columns("version", "environment_setup_commit", **given | more)


def _multilang() -> Published:
    program = "def parse(log: str) -> dict:\n    return {}\n"
    commands = {"rebuild_cmds": ["go build ./..."], "test_cmds": ["go test -v ./... > log"]}
    row = _live(log_parser=program, print_cmds=["cat log"], **commands)
    command = "go build ./...\ngo test -v ./... > log\ncat log"
    return Published(
        row, "starryzhang/" + IMAGE.format("1776"), command, parser="parse_log_gotest", conda=False
    )


def _pro(reference: str, **more: object) -> Published:
    names = {
        "fail_to_pass": "['tests/test_plain.py::test_add[1]']",
        "pass_to_pass": "['tests/test_plain.py::test_double']",
    }
    given = {"requirements": "Add two numbers.", "interface": "none", "before_repo_set_cmd": ""}
    row = columns("FAIL_TO_PASS", "PASS_TO_PASS", **names | given, repo_language="python")
    row |= {"selected_test_files_to_run": '["tests/test_plain.py"]', "issue_categories": "[]"} | more
    return Published(row, reference, workdir="/app", set_up="offscreen OL_CONFIG=/app/conf/", conda=False)


def _scale() -> Published:
    """Most rows have tests of a script beside those of a patch; the reference is a whole pull request."""
    row = columns("base_commit", "test_patch", "version", repo="tool", user="acme", parent_commit=BASE)
    row["FAIL_TO_PASS"] = [f"{SCRIPT}::test_four", *row["FAIL_TO_PASS"]]
    row |= {name: json.dumps(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    row |= {
        "patch": patch("tests/test_core.py", "old\n", "new\n") + gold(),
        "f2p_patch": columns()["test_patch"],
        "f2p_script": "from calc.core import add\n\n\ndef test_four():\n    assert add(2, 2) == 4\n",
        "workdir": "/workspace/tool",
        "language": "python",
        "image_url": "aweaiteam/scaleswe:acme_tool_pr12",
        "pre_commands": f"git checkout {BASE} -f && git reset --hard HEAD && git clean -fd\\n",
    }
    command = f"python -m pytest -rA {SCRIPT} tests/test_plain.py"
    return Published(row, row["image_url"], command, row["workdir"], conda=False)


def _gym(**more: object) -> dict[str, Any]:
    return columns("environment_setup_commit", **more)


FAULT = patch("calc/core.py", MENDED, MENDED.replace("2 * a", "3 * a"))


def smith_row(**more: object) -> dict[str, Any]:
    """A row of SWE-smith whose patch makes a fault in the toy repository's last commit."""
    return {
        "instance_id": "acme__tool.1fd52536.lm_1",
        "repo": "swesmith/acme__tool.1fd52536",
        "patch": FAULT,
        "FAIL_TO_PASS": ["tests/test_plain.py::test_double"],
        "PASS_TO_PASS": ["tests/test_plain.py::test_add[1]", "tests/test_core.py::TestCore::test_double"],
        "image_name": "jyangballin/swesmith.x86_64.acme_1776_tool.1fd52536",
        "problem_statement": "add subtracts, or something is tripled",
    } | more


def r2e_row(**more: object) -> dict[str, Any]:
    """A row of R2E-Gym for the toy repository's first commits; one of its tests fails all the same."""
    lines = {" ": "context", "-": "deleted", "+": "added"}
    *head, hunk = gold().split("@@ -")
    numbers, *body = hunk.rstrip("\n").split("\n")
    old, new = ([*map(int, part.split(","))] for part in numbers.removesuffix(" @@").split(" +"))
    diff = {
        "old_file_content": BROKEN,
        "new_file_content": MENDED,
        "header": {"file": {"path": "calc/core.py"}, "misc_line": None},
        "index_line": {"old_commit_hash": "1" * 7, "new_commit_hash": "2" * 7, "mode": "100644"},
        "minus_file": {"path": "a/calc/core.py"},
        "plus_file": {"path": "b/calc/core.py"},
        "hunks": [
            {
                "descriptor": {
                    "old_range": {"start": old[0], "length": old[1]},
                    "new_range": {"start": new[0], "length": new[1]},
                    "section": "",
                },
                "line_group": {"all_lines": [{"content": line[1:], "type": lines[line[0]]} for line in body]},
            }
        ],
    }
    tests = diff | {"header": {"file": {"path": "tests/test_plain.py"}, "misc_line": None}}
    commit = {"file_diffs": [diff, tests], "old_commit_hash": f"{BASE}^", "new_commit_hash": BASE}
    passed = dict.fromkeys(("test_sum", "\x1b[1mtest_twice\x1b[0m"), "PASSED")
    return {
        "repo_name": "tool",
        "docker_image": f"namanjain12/tool_final:{BASE}",
        "commit_hash": BASE,
        "parsed_commit_content": json.dumps(commit | {"commit_message": "", "commit_date": ""}),
        "execution_result_content": "{}",
        "modified_files": ["calc/core.py"],
        "num_non_test_files": 1,
        "prompt": "",
        "problem_statement": "[ISSUE]\nadd subtracts\n[/ISSUE]",
        "expected_output_json": json.dumps(passed | {"TestNever.test_zero": "FAILED"}),
    } | more


ROWS = {
    "SWE-Gym": Published(_gym(repo="getmoto/moto"), "xingyaoww/" + IMAGE.format("s")),
    "SWE-Gym of mypy": Published(
        _gym(repo="python/mypy", test_patch=MYPY),
        "xingyaoww/" + IMAGE.format("s"),
        "python -m pytest -rA -k 'testFirst or testNext'",
    ),
    "SWE-rebench": _rebench(),
    "SWE-rebench V2": _rebench_v2(),
    "SWE-bench-extra": Published(columns(meta={"is_lite": True}), "swerebench/" + IMAGE.format("1776")),
    "SWE-bench-extra of an image": Published(columns(meta={"a": 1}, docker_image="me/tool"), "me/tool"),
    "SWE-Lego": Published(
        columns(
            image_name="jierun/" + IMAGE.format("1776"),
            install_config=_install(),
            test_cmd="LANG=C.UTF-8 pytest -rA tests/test_plain.py",
        ),
        "jierun/" + IMAGE.format("1776"),
        "LANG=C.UTF-8 pytest -rA tests/test_plain.py",
    ),
    "SWE-bench-Live": Published(
        _live(parser="pytest", log_parser=None),
        "starryzhang/" + IMAGE.format("1776"),
        "pytest -rA",
        conda=False,
    ),
    "SWE-bench-Live/MultiLang": _multilang(),
    "SWE-bench Pro": _pro(
        "jefzda/sweap-images:acme.tool-Acme__tool-12", dockerhub_tag="acme.tool-Acme__tool-12"
    ),
    "SWE-bench Pro of V2": _pro(
        "scaleapi/swe-bench_pro-v2:instance_Acme__tool-12",
        docker_image="docker.example/scaleapi/swe-bench_pro-v2:instance_Acme__tool-12",
        fail_to_pass=columns()["FAIL_TO_PASS"],
        pass_to_pass="[]",
        version="2.0.0",
        hard=False,
    ),
    "SWE-smith": Published(
        smith_row(),
        "jyangballin/swesmith.x86_64.acme_1776_tool.1fd52536",
        "python -m pytest --disable-warnings --color=no --tb=no --verbose tests/test_plain.py",
        set_up="rm -rf tests/test_plain.py",
        base="HEAD",
    ),
    "R2E-Gym": Published(
        r2e_row(),
        f"namanjain12/tool_final:{BASE}",
        "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' .venv/bin/python -W ignore -m pytest -rA "
        "r2e_tests",
        set_up="rm -rf r2e_tests",
        base="HEAD",
        conda=False,
    ),
    "Scale-SWE": _scale(),
}

REFUSED = {
    "Multi-SWE-bench": {
        "org": "acme",
        "repo": "tool",
        "number": 12,
        "fix_patch": gold(),
        "base": {"sha": BASE},
    },
}
