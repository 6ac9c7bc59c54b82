"""Rows in the columns in which sets are published become tasks, and what cannot is named with its column."""

import json

import msgspec
import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError
from hpc_swe.makers.images.sources import Pulled
from hpc_swe.makers.prepare import grouped, prepare
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.published_rows import SETS, read_row
from hpc_swe.tasks.sets.swebench import Source, Swebench
from hpc_swe.tasks.swebench_rows import END, START
from tests.kit.published_rows import REFUSED, ROWS, columns
from tests.kit.toy import write_rows


def load(folder, *rows, **more):
    return list(
        Swebench(train=Source(rows=str(write_rows(folder / "rows.jsonl", *rows))), **more).load("train")
    )


@pytest.mark.parametrize("title", ROWS)
def test_a_published_row_says_its_image_its_folder_and_how_its_tests_run(tmp_path, title):
    wanted = ROWS[title]
    (task,) = load(tmp_path, wanted.row)
    before, _, rest = task.tests.command.partition(f": '{START}'\n")
    assert rest.partition(f"\n: '{END}'")[0] == wanted.command
    assert ("conda activate testbed" in before, wanted.set_up in before) == (wanted.conda, True)
    assert f"\ncd {wanted.workdir}\n" in before
    assert (task.workdir, task.tests.extra["log_parser"]) == (wanted.workdir, wanted.parser)
    assert Pulled("docker://{reference}", Process()).origin(task) == f"docker://{wanted.reference}"
    assert (task.base_commit, "add subtracts" in task.prompt) == (wanted.base, True)
    assert ("of_another_commit" in task.tests.extra) == (title == "Scale-SWE")
    assert task.tests.extra["set_up"] == "calc/core.py", "the reference has no tests"


def test_every_set_has_a_row_that_shows_it():
    titles = {title.partition(" of ")[0] for title in [*ROWS, *REFUSED]}
    assert titles == {each.title for each in SETS}


def test_rows_that_differ_by_tag_alone_have_images_of_their_own(tmp_path):
    rows = [columns(instance_id=name, image=f"me/tool:{name}", eval_script="x") for name in ("a", "b")]
    marks = f": '{START}'\ntrue\n: '{END}'\n"
    one, other = load(
        tmp_path, *[row | {"eval_script": marks, "log_parser": "parse_log_pytest"} for row in rows]
    )
    assert (one.image, other.image) == ("tool+a", "tool+b")
    assert Pulled("docker://host/{reference}", Process()).origin(other) == "docker://host/me/tool:b"
    assert Pulled("docker-archive:/data/{image}.tar", Process()).origin(other).endswith("/tool+b.tar")
    with pytest.raises(
        ConfigError, match="the image of b has a tag, me/tool:b: write docker://HOST/{reference}"
    ):
        Pulled("docker://host/me/{image}:latest", Process()).origin(other)


@pytest.mark.parametrize("names", [("you/tool", "me/tool"), ("a.example/me/tool", "b.example/me/tool")])
def test_images_that_are_shared_by_mistake_are_named(tmp_path, names):
    marks = f": '{START}'\ntrue\n: '{END}'\n"
    own = {"eval_script": marks, "log_parser": "parse_log_pytest"}
    rows = [columns(instance_id=f"n{n}", image=name, **own) for n, name in enumerate(names)]
    with pytest.raises(
        ConfigError, match="n0 and n1 would share the image tool, but name '{}' and '{}'".format(*names)
    ):
        task_checks.require_one_source(load(tmp_path, *rows))


@pytest.mark.parametrize("no_tests", ["", "[]"])
def test_lists_in_json_are_read_as_json_and_no_version_is_none(no_tests):
    given = {"FAIL_TO_PASS": json.dumps(["t[\U0001f600 a]", "t[\U0001f600 b]"])}  # as pytest names them
    given |= {"PASS_TO_PASS": no_tests, "version": None}
    read = read_row("rows:1", json.dumps(ROWS["SWE-rebench"].row | given))
    assert (read.fail_to_pass, read.pass_to_pass, read.version) == (["t[\U0001f600"], [], "")
    by_go = read_row("rows:1", ROWS["SWE-rebench V2"].row | given)
    assert len(by_go.fail_to_pass) == 2, "only the parser of pytest cuts a name"


def test_a_cut_name_that_also_stands_for_a_failing_test_need_not_pass():
    ends = json.dumps({"t[a b]": "PASSED", "t[a c]": "FAILED", "t": "PASSED"})
    assert read_row("rows:1", ROWS["R2E-Gym"].row | {"expected_output_json": ends}).fail_to_pass == ["t"]


def test_a_recipe_of_the_configuration_comes_before_that_of_the_row(tmp_path):
    recipes = {"acme/tool": {"command": "make check", "log_parser": "parse_log_gotest", "labels": "none"}}
    config = {"train": {"rows": str(write_rows(tmp_path / "rows.jsonl", ROWS["SWE-rebench"].row))}}
    (task,) = msgspec.convert(config | {"recipes": recipes}, Swebench).load("train")
    assert "\nmake check\n" in task.tests.command


@pytest.mark.parametrize(
    ("title", "change", "complaint"),
    [
        (
            "SWE-rebench V2",
            {"image_name": ""},
            "as a row of SWE-rebench V2: column image_name is missing or empty",
        ),
        ("SWE-rebench V2", {"install_config": {}}, "column install_config.test_cmd is missing or empty"),
        (
            "SWE-rebench V2",
            {"install_config": {"test_cmd": "npm test", "log_parser": "parse_log_js_4"}},
            "swebench.harness.log_parsers has no log_parser 'parse_log_js_4'",
        ),
        ("SWE-bench-Live/MultiLang", {"test_cmds": ["ninja"]}, "column log_parser holds a program"),
        (
            "SWE-bench Pro",
            {"repo_language": "js"},
            "column repo_language: js: no column says how its tests are",
        ),
        ("SWE-bench Pro", {"fail_to_pass": "[a"}, "column FAIL_TO_PASS is not a list of names"),
        ("SWE-bench Pro", {"fail_to_pass": [], "pass_to_pass": []}, "column FAIL_TO_PASS is missing or"),
        (
            "Scale-SWE",
            {"f2p_patch": "", "f2p_script": None},
            "as a row of Scale-SWE: columns f2p_script and f2p_patch are missing or empty",
        ),
        ("SWE-Gym", {"FAIL_TO_PASS": []}, "FAIL_TO_PASS is empty"),
        ("SWE-Gym", {"repo": []}, "Expected `str`, got `array` - at `$.repo`"),
        ("SWE-Gym", {"instance_id": ""}, "as a row of SWE-Gym: column instance_id is missing or empty"),
        ("SWE-Gym", {"repo": "me/tool"}, "has no eval_script, and [taskset.recipes] none for 'me/tool'"),
        (
            "SWE-rebench",
            {"install_config": {"test_cmd": "a", "log_parser": "b"}},
            "no log_parser 'parse_log_b'",
        ),
        ("SWE-bench-extra", {"PASS_TO_PASS": "{}"}, "column PASS_TO_PASS is not a list of names"),
        ("SWE-bench-Live", {"test_cmds": []}, "column test_cmds is missing or empty"),
        ("SWE-Lego", {"test_cmd": ""}, "as a row of SWE-Lego: column test_cmd is missing or empty"),
        ("SWE-smith", {"FAIL_TO_PASS": ["Test"]}, "column FAIL_TO_PASS: 'Test' is no test of pytest"),
        ("SWE-smith", {"FAIL_TO_PASS": []}, "column FAIL_TO_PASS is missing or empty"),
        ("SWE-smith", {"image_name": ""}, "column image_name is missing or empty"),
        ("SWE-smith", {"patch": "rename from a\nrename to b\n"}, "column patch: rename: such a patch cannot"),
        ("SWE-smith", {"patch": "no patch"}, "patch is empty"),
        ("SWE-smith", {"FAIL_TO_PASS": ["../a.py::test"]}, "column hidden_tests: '../a.py' is no path"),
        ("R2E-Gym", {"expected_output_json": "{"}, "column expected_output_json: Input data was truncated"),
        ("R2E-Gym", {"expected_output_json": '{"test_a": "FAILED"}'}, "FAIL_TO_PASS is empty"),
        ("R2E-Gym", {"parsed_commit_content": "{}"}, "column parsed_commit_content: Object missing required"),
        (
            "R2E-Gym",
            {"parsed_commit_content": '{"file_diffs": []}'},
            "column parsed_commit_content: it must change files",
        ),
        ("R2E-Gym", {"docker_image": ""}, "column docker_image is missing or empty"),
        (
            "R2E-Gym",
            {"parsed_commit_content": None, "image_name": "a", "patch": "a"},
            "column parsed_commit_content is missing",
        ),
        ("R2E-Gym", {"commit_hash": ""}, "column commit_hash is missing or empty"),
        ("R2E-Gym", {"problem_statement": ""}, "column problem_statement is missing or empty"),
    ],
)
def test_a_wrong_row_is_refused_with_its_column(tmp_path, title, change, complaint):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, ROWS[title].row | change)
    assert complaint in str(caught.value)
    assert f"{tmp_path}/rows.jsonl:1: " in str(caught.value)


def test_a_thousand_equal_complaints_are_one_line_and_few_are_each_named():
    bad, other = REFUSED["Multi-SWE-bench"], ROWS["SWE-bench Pro"].row | {"repo_language": "js"}
    rows, complaints = prepare([(f"rows: row {n}", bad | {"instance_id": str(n)}) for n in range(1000)], None)
    complaints += prepare([(f"rows: row {n}", other | {"instance_id": str(n)}) for n in (1000, 1001)], None)[
        1
    ]
    assert (rows, len(complaints)) == ([], 1002)
    first, *few = grouped(complaints)
    assert first.startswith("rows: row 0: as a row of Multi-SWE-bench: ")
    assert first.endswith(" (and 999 more rows)")
    assert [line.partition(": as")[0] for line in few] == ["rows: row 1000", "rows: row 1001"]


@pytest.mark.parametrize("title", REFUSED)
def test_a_set_that_cannot_be_used_is_named_with_the_reason(title):
    with pytest.raises(ConfigError, match=f"^rows:7: as a row of {title}: .*(tests|fault)"):
        read_row("rows:7", json.dumps(REFUSED[title]))
