"""Folders of Harbor become tasks, their images are built from Dockerfiles, and their scripts judge."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.errors import ConfigError
from hpc_swe.makers.check import Checker
from hpc_swe.makers.images.sources import Pulled
from hpc_swe.makers.images.store import ImageStore, Problem
from hpc_swe.tasks.graders.reward_file import RewardFile
from hpc_swe.tasks.patch import take
from hpc_swe.tasks.sets.harbor import Harbor
from tests.kit.images import UNPACKED, require_apptainer
from tests.kit.toy import new

DOCKER = "environment/Dockerfile"
DOCKERFILE = """# syntax=docker/dockerfile:1
FROM python:3.11-slim AS base
LABEL owner="a lab"
ENV GREETING="good day" \\
    OTHER='a b'
ENV LOUD=$GREETING!
WORKDIR /srv
WORKDIR app
COPY . .
COPY "data/a b.txt" /opt/data/
COPY data/*.txt one/
COPY calc.py /opt/renamed.py
# The steps of one RUN are one line.
RUN mkdir made && \\
    echo "$LOUD {{ kept }}" > made/greeting.txt \\
    && rm -r data one/c.txt Dockerfile
CMD ["bash"]
"""
TEST = """#!/bin/bash
cp /tests/cases/test_calc.py /srv/app/ && cd /srv/app
if python3 -m pytest -q > /dev/null; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
CASES = "from calc import add\n\n\ndef test_that_sums_are_right():\n    assert add(1, 2) == 3\n"
WRITTEN = {"1.0": 1.0, "0.25": 0.25, "0": 0.0, "7": 0.0, "-1": 0.0, "nan": 0.0, "": 0.0, "yes": 0.0}
FILES = {
    "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 60.0\n',
    "instruction.md": "Mend add in calc.py.\n",
    "environment/Dockerfile": DOCKERFILE,
    "environment/calc.py": "def add(a, b):\n    return a - b\n",
    "environment/data/a b.txt": "a\n",
    "environment/data/c.txt": "c\n",
    "tests/test.sh": TEST,
    "tests/cases/test_calc.py": CASES,
    "solution/solve.sh": "cd /srv/app && sed -i 's/a - b/a + b/' calc.py\n",
}


def make(folder: Path, changes: Mapping[str, str] = MappingProxyType({})) -> Path:
    """Make a folder of Harbor below a folder; an empty text leaves a file out."""
    for path, text in (FILES | dict(changes)).items():
        file = folder / "mend-add" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if text:
            file.write_text(text)
    return folder


def test_a_folder_says_its_image_its_work_directory_and_its_tests(tmp_path):
    (task,) = Harbor(train=str(make(tmp_path))).load("train")
    assert (task.task_id, task.workdir, task.base_commit) == ("mend-add", "/srv/app", "HEAD")
    assert "Mend add in calc.py." in task.prompt
    assert "work directory is /srv/app" in task.prompt
    assert task.tests.timeout_s == 60.0
    assert Pulled("docker://HOST/{reference}", Apptainer()).origin(task) == "docker://HOST/python:3.11-slim"
    (tmp_path / "mend-add/environment/calc.py").write_text("def add(a, b):\n    return a * b\n")
    (other,) = Harbor(train=str(tmp_path)).load("train")
    assert other.image != task.image, "it is made of other files"


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        (DOCKER, "FROM a\nRUN true\nUSER me\n", "Dockerfile: line 3: USER: only one FROM, RUN"),
        (DOCKER, "FROM a\n\nARG b\n", "Dockerfile: line 3: ARG: only one FROM, RUN"),
        (DOCKER, "FROM a\nFROM b\n", "line 2: FROM: only one FROM, RUN"),
        (DOCKER, "FROM a\nRUN --mount=type=cache true\n", "line 2: RUN: options, lists"),
        (DOCKER, "FROM a\nRUN <<EOF\ntrue\nEOF\n", "line 2: RUN: options, lists and texts of several"),
        (DOCKER, "FROM a\nCOPY --from=b c d\n", "line 2: COPY: options"),
        (DOCKER, "FROM a\nCOPY ../x d\n", "line 2: COPY: ../x is not in the folder of the Dockerfile"),
        (DOCKER, "FROM a\nCOPY x d\n", "line 2: COPY: x is not in the folder of the Dockerfile"),
        (DOCKER, "FROM a\nWORKDIR $x\n", "line 2: WORKDIR: a path with a variable is not read"),
        (DOCKER, "FROM a\nRUN a \\\n  b\nENV A $(date)\n", "line 4: ENV: it must be NAME=VALUE"),
        (DOCKER, "RUN true\n", "line 1: RUN: the file must begin with FROM"),
        ("environment/docker-compose.yaml", "a", "environment/docker-compose.yaml is not read"),
        ("tests/test.sh", "", "tests/test.sh is missing"),
        ("instruction.md", "", "instruction.md"),
        ("task.toml", "[verifier]\ntimeout_sec = 'a'\n", "`$.verifier.timeout_sec`"),
        ("task.toml", "[verifier.env]\nKEY = 'a'\n", "verifier.env is not read: KEY"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_with_file_and_line(tmp_path, path, text, complaint):
    with pytest.raises(ConfigError) as caught:
        list(Harbor(train=str(make(tmp_path, {path: text}))).load("train"))
    assert complaint in str(caught.value)
    assert f"{tmp_path}/mend-add: " in str(caught.value)


def test_a_link_out_of_a_folder_brings_no_file_of_this_machine(tmp_path):
    make(tmp_path)
    (tmp_path / "mend-add/environment/link").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="environment/link leads out of"):
        list(Harbor(train=str(tmp_path)).load("train"))


@pytest.mark.slow
def test_an_image_is_built_of_a_dockerfile_and_a_script_judges(tmp_path):
    require_apptainer(UNPACKED)
    images = tmp_path / "images"
    sandboxes, grader = Apptainer(images=str(images)), RewardFile()
    (task,) = Harbor(train=str(make(tmp_path / "tasks"))).load("train")
    store = ImageStore(images)
    with store.locked():
        assert store.build(Pulled(str(UNPACKED), sandboxes), Problem(task, ""))
    with sandboxes.open(task) as sandbox:
        seen = sandbox.run(
            "find . -name .git -prune -o -type f -print | sort; cat made/greeting.txt", 60
        ).output
        assert seen.split("\n")[:-2] == ["./calc.py", "./made/greeting.txt", "./one/a b.txt"]
        assert "good day! {{ kept }}" in seen
        assert sandbox.run('ls /opt/data /opt/renamed.py; echo "$OTHER:$LOUD"', 60).output == (
            "/opt/renamed.py\n\n/opt/data:\na b.txt\na b:good day!\n"
        )
        there = sandbox.run("for each in /tests /solution /.build; do [ ! -e $each ] || echo $each; done", 60)
        assert there.output == ""
        assert "test_calc" not in sandbox.run("git log --stat; find / -xdev -name 'test_calc*'", 60).output
        sandbox.write("calc.py", b"def add(a, b):\n    return a + b\n")
        sandbox.run("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > reward.txt", 60)
        mended = take(task, sandbox, sandboxes)
    cheat = new("conftest.py", "import calc\n\ncalc.add = lambda a, b: 3\n")
    wanted = {mended: "resolved", mended.replace("a + b", "a * b"): "unresolved", cheat: "unresolved"}
    assert [grader.examine(task, patch, sandboxes).outcome for patch in wanted] == [*wanted.values()]
    checked = Checker(grader, sandboxes, 1, images).check(task, None)
    assert (checked.verdict, checked.reason, checked.gold) == ("usable", "", ["resolved"])
    for written, reward in WRITTEN.items():
        script = f"echo {written} > /logs/verifier/reward.txt\n"
        (task,) = Harbor(train=str(make(tmp_path / "tasks", {"tests/test.sh": script}))).load("train")
        assert grader.examine(task, mended, sandboxes).reward == reward, written
