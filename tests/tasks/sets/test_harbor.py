"""Folders of Harbor become tasks, their images are built from Dockerfiles, and their scripts judge."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import Clock, CommandResult, Sandbox, SandboxWrapper
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError, HpcSweError, SandboxError
from hpc_swe.base.records import Task
from hpc_swe.makers.check import Checker
from hpc_swe.makers.images.repository import begin
from hpc_swe.makers.images.sources import Pulled
from hpc_swe.makers.images.store import ImageStore, Problem
from hpc_swe.tasks.graders.reward_file import RewardFile
from hpc_swe.tasks.patch import take
from hpc_swe.tasks.sets.harbor import Harbor
from tests.kit import archives
from tests.kit.images import UNPACKED, require_apptainer
from tests.kit.toy import new

DOCKER = "environment/Dockerfile"
DOCKERFILE = """# syntax=docker/dockerfile:1
FROM python:3.11-slim AS base
LABEL owner="a lab"
ENV GREETING="good day" \\
    OTHER='a b'
ENV LOUD=$GREETING! AT=~/"~"
RUN echo "$MADE_BY" > first.txt
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
ANSWER = "cd /tests && cmp /srv/app/answer.txt expected.txt && echo 1 > /logs/verifier/reward.txt\n"
LATE = "echo 1 > /logs/verifier/reward.txt; sleep 60\n"
TARGETS = ("/tests/expected.txt", "../../tests/expected.txt", "/proc/self/cwd/expected.txt", ".git/script.sh")
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


def link(path: str, target: str) -> str:
    """A link that was not there, as git writes it."""
    return new(path, f"{target}\n").replace("100644", "120000") + "\\ No newline at end of file\n"


def test_a_folder_says_its_image_its_work_directory_and_its_tests(tmp_path):
    (task,) = Harbor(train=str(make(tmp_path))).load("train")
    assert (task.task_id, task.workdir, task.base_commit) == ("mend-add", "/srv/app", "HEAD")
    assert "Mend add in calc.py." in task.prompt
    assert "work directory is /srv/app" in task.prompt
    assert task.tests.timeout_s == 60.0
    assert Pulled("docker://{reference}", Apptainer()).origin(task) == "docker://python:3.11-slim"
    with pytest.raises(ConfigError, match="write docker://{reference}"):
        Pulled("docker://HOST/{image}", Apptainer()).origin(task)
    (tmp_path / "mend-add/environment/calc.py").write_text("def add(a, b):\n    return a * b\n")
    (other,) = Harbor(train=str(tmp_path)).load("train")
    assert other.image != task.image, "it is made of other files"
    (tmp_path / "mend-add/environment/calc.py").chmod(0o755)
    (program,) = Harbor(train=str(tmp_path)).load("train")
    assert program.image != other.image, "one of them can be executed"


def test_steps_are_read_as_docker_reads_them(tmp_path):
    steps = "FROM a AS my-base.1\nRUN\tpy\\\n# a remark\nthon3 -c 'if 1:\n"
    steps = steps.replace("1:\n", "1: \\  \n  print(1)'\nENV A=\"b;c\" B=d\\&e C=~/f:'~'\n")
    (task,) = Harbor(train=str(make(tmp_path, {DOCKER: steps}))).load("train")
    run, export = task.tests.extra["steps"].splitlines()[2:4]
    assert run.replace("'\"'\"'", "'") == "/bin/sh -c 'python3 -c 'if 1:   print(1)''"
    assert export == "export A=\"b;c\" B=d\\&e C=\\~/f:'~'", "Docker knows no home"


def test_a_published_image_has_the_workdir_of_the_dockerfile_beside_it(tmp_path):
    about = '[environment]\ndocker_image = "b"\n'
    changes = {"task.toml": about, DOCKER: "FROM a\nUSER c\nWORKDIR /d\n"}
    (task,) = Harbor(train=str(make(tmp_path, changes))).load("train")
    assert (task.workdir, task.tests.extra["image"], task.tests.extra["steps"]) == ("/d", "b", "")


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        (DOCKER, "FROM a\nRUN true\nUSER me\n", "Dockerfile: line 3: USER: only one FROM, RUN"),
        (DOCKER, "FROM a\n\nARG b\n", "Dockerfile: line 3: ARG: only one FROM, RUN"),
        (DOCKER, "FROM a\nFROM b\n", "line 2: FROM: only one FROM, RUN"),
        (DOCKER, "FROM a\nRUN --mount=type=cache true\n", "line 2: RUN: options, lists"),
        (DOCKER, "FROM a\nRUN <<EOF\ntrue\nEOF\n", "line 2: RUN: options, lists and texts of several"),
        (DOCKER, "FROM a\nCOPY --from=b c d\n", "line 2: COPY: options"),
        (DOCKER, "FROM a\nCOPY ../x /d\n", "line 2: COPY: ../x is not in the folder of the Dockerfile"),
        (DOCKER, "FROM a\nCOPY x /d\n", "line 2: COPY: x is not in the folder of the Dockerfile"),
        (DOCKER, "FROM a\nWORKDIR $x\n", "line 2: WORKDIR: a path with a variable is not read"),
        (DOCKER, "FROM a\nRUN a \\\n  b\nENV A $(date)\n", "line 4: ENV: it must be NAME=VALUE"),
        (DOCKER, "FROM a\nENV A=b;c\n", "line 2: ENV: it must be NAME=VALUE, with quotes"),
        (DOCKER, "FROM a\nENV A=b B=c&d\n", "line 2: ENV: it must be NAME=VALUE, with quotes"),
        (DOCKER, "FROM a\nENV A=b #c\n", "line 2: ENV: it must be NAME=VALUE"),
        (DOCKER, "FROM a\nWORKDIR app\n", "line 2: WORKDIR: app depends on the image's own directory"),
        (DOCKER, "FROM a\nCOPY calc.py .\n", "line 2: COPY: . depends on the image's own directory"),
        (DOCKER, "FROM a\nCOPY /calc.py\n", "line 2: COPY: it must be a file and its destination"),
        (DOCKER, "FROM a\nWORKDIR /\n", "the work directory '/' is no folder of an image"),
        (DOCKER, "FROM a\nWORKDIR /a/..\n", "the work directory '/a/..' is no folder of an image"),
        (DOCKER, "FROM a\nWORKDIR '/a b'\n", "the work directory '/a b' is no folder of an image"),
        ("environment/.dockerignore", "data\n", ".dockerignore is not read"),
        ("environment/sums.py", CASES, "environment/sums.py is one of the tests"),
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


def test_a_folder_whose_name_no_image_can_have_is_refused(tmp_path):
    (make(tmp_path) / "mend-add").rename(tmp_path / "mend add")
    with pytest.raises(ConfigError, match="mend add: .*rename the folder"):
        list(Harbor(train=str(tmp_path)).load("train"))


def test_a_repository_in_the_work_directory_is_refused_by_its_name(tmp_path):
    (tmp_path / "app/inner/.git").mkdir(parents=True)
    with pytest.raises(HpcSweError, match="inner in the work directory is a repository of its own"):
        begin(tmp_path / "app")


class Late(SandboxWrapper):
    """The host is too slow for git."""

    def run(self, command: str, timeout_s: float, clock: Clock | None = None) -> CommandResult:
        return CommandResult(124, "", timed_out=True)


class Overloaded(Process, frozen=True):
    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        with super().open(task) as sandbox:
            yield Late(sandbox)


def test_a_host_that_cannot_apply_a_patch_is_no_failure_of_the_policy(tmp_path):
    (task,) = Harbor(train=str(make(tmp_path))).load("train")
    with pytest.raises(SandboxError, match="git apply: timed out"):
        RewardFile().grade(task, new("a.py", "1\n"), Overloaded())


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder with the image of `DOCKERFILE`, whose base comes from a registry."""
    require_apptainer(UNPACKED)
    folder = tmp_path_factory.mktemp("harbor")
    (task,) = Harbor(train=str(make(folder / "tasks"))).load("train")
    (folder / "more").mkdir()
    archives.oci_folder(archives.layer(UNPACKED, folder / "more", folder / "layer.tar"), folder / "base")
    store = ImageStore(folder / "images")
    with archives.registry(folder / "base") as host, store.locked(), pytest.MonkeyPatch.context() as patched:
        patched.setenv("APPTAINER_NOHTTPS", "true")
        patched.setenv("APPTAINER_CACHEDIR", str(folder / "cache"))
        source = Pulled(f"docker://{host}/{{reference}}", Apptainer(images=str(store.images)))
        assert store.build(source, Problem(task, ""))
    return store.images


@pytest.mark.slow
def test_an_image_is_built_of_a_dockerfile_and_a_script_judges(images, tmp_path):
    sandboxes, grader = Apptainer(images=str(images)), RewardFile()
    (task,) = Harbor(train=str(make(tmp_path / "tasks"))).load("train")
    with sandboxes.open(task) as sandbox:
        seen = sandbox.run(
            "find . -name .git -prune -o -type f -print | sort; cat made/greeting.txt", 60
        ).output
        assert seen.split("\n")[:-2] == ["./calc.py", "./made/greeting.txt", "./one/a b.txt"]
        assert "good day! {{ kept }}" in seen
        assert sandbox.run('ls /opt/data /opt/renamed.py; echo "$OTHER:$LOUD:$AT"', 60).output == (
            "/opt/renamed.py\n\n/opt/data:\na b.txt\na b:good day!:~/~\n"
        )
        assert sandbox.run('cat /first.txt; echo "$MADE_BY"', 60).output == "somebody\n" * 2, (
            "as the base says"
        )
        there = sandbox.run("for each in /tests /solution /.build; do [ ! -e $each ] || echo $each; done", 60)
        assert there.output == ""
        assert "test_calc" not in sandbox.run("git log --stat; find / -xdev -name 'test_calc*'", 60).output
        sandbox.write("calc.py", b"def add(a, b):\n    return a + b\n")
        sandbox.run("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > reward.txt", 60)
        mended = take(task, sandbox, sandboxes)
    cheat = new("conftest.py", "import calc\n\ncalc.add = lambda a, b: 3\n")
    wanted = {mended: "resolved", mended.replace("a + b", "a * b"): "unresolved", cheat: "unresolved"}
    wanted |= {new(path, "1\n"): "unresolved" for path in ("pytest.py", "pytest/__main__.py")}
    assert [grader.examine(task, patch, sandboxes).outcome for patch in wanted] == [*wanted.values()]
    checked = Checker(grader, sandboxes, 1, images).check(task, None)
    assert (checked.verdict, checked.reason, checked.gold) == ("usable", "", ["resolved"])
    for written, reward in WRITTEN.items():
        script = f"echo {written} > /logs/verifier/reward.txt\n"
        (task,) = Harbor(train=str(make(tmp_path / "tasks", {"tests/test.sh": script}))).load("train")
        assert grader.examine(task, mended, sandboxes).reward == reward, written


@pytest.mark.slow
def test_neither_a_late_script_nor_a_link_to_the_tests_is_paid(images, tmp_path):
    sandboxes, grader, honest = Apptainer(images=str(images)), RewardFile(), new("answer.txt", "42\n")
    late = {"tests/test.sh": LATE, "task.toml": "[verifier]\ntimeout_sec = 2\n"}
    (task,) = Harbor(train=str(make(tmp_path, late))).load("train")
    assert grader.examine(task, honest, sandboxes).reward == 0
    answer = {"tests/test.sh": ANSWER, "tests/expected.txt": "42\n", "task.toml": FILES["task.toml"]}
    (task,) = Harbor(train=str(make(tmp_path, answer))).load("train")
    given = {target: grader.examine(task, link("answer.txt", target), sandboxes) for target in TARGETS}
    paid = {target: (score.outcome, score.reward) for target, score in given.items()}
    assert paid == dict.fromkeys(TARGETS, ("cheated", -2.0))
    assert grader.examine(task, honest + link("again.py", "calc.py"), sandboxes).outcome == "resolved"


@pytest.mark.slow
def test_a_missing_work_directory_is_not_made(images, tmp_path):
    sandboxes, store = Apptainer(images=str(images)), ImageStore(images)
    (task,) = Harbor(train=str(make(tmp_path, {DOCKER: "FROM a\n"}))).load("train")
    with store.locked(), pytest.raises(HpcSweError, match="no work directory /app: set taskset.default_w"):
        store.build(Pulled(str(UNPACKED), sandboxes), Problem(task, ""))
