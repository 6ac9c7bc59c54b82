"""Tasks are made from code that works; their originals cannot be found, and only a repair is paid."""

import inspect
import shutil
import subprocess
import zipfile
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.agents.tools.evaluate import Evaluate
from hpc_swe.base.records import Task
from hpc_swe.tasks import task_checks
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.patch import difference
from hpc_swe.tasks.sets.kodcode import Kodcode
from hpc_swe.tasks.sets.programs import Programs
from tests.kit.checkout import IMAGES, ROOT, typed

OPTIONS = ("--jobs=2", "--per-function=3")
SHAPES = '''"""Areas of shapes."""


def square(side):
    """Return the area of a square.

    >>> square(3)
    9
    >>> square(4)
    16
    """
    if side < 0:
        raise ValueError("a side is at least 0")
    return side * side


def triangle(base, height):
    """Return the area of a triangle."""
    return square(base) * height / base / 2 if base else 0.0


def largest(*areas):
    """Return the largest area.

    >>> largest(1, 3, 2)
    3
    """
    return max(areas)


def perimeter(side):
    """Return the length of a square's border."""
    return 4 * side
'''
TESTS = """import unittest

import pytest

from shapes import largest, perimeter, square, triangle


@pytest.mark.parametrize("side", [1, 2, 7])
def test_square(side):
    assert square(side) == side**2


def test_negative():
    with pytest.raises(ValueError):
        square(-1)


class Base:
    def test_triangle(self):
        self.assertEqual(triangle(4, 3), 6.0)

    def test_flat(self):
        self.assertEqual(triangle(0, 3), 0.0)


class TestShapes(Base, unittest.TestCase):
    def test_zero(self):
        self.assertEqual(square(0), 0)

    def test_largest(self):
        self.assertEqual(largest(2, 5, 3), 5)

    def test_only(self):
        self.assertEqual(largest(-1), -1)


class TestMixin:
    def test_perimeter(self):
        self.assertEqual(perimeter(3), 12)

    def test_no_border(self):
        self.assertEqual(perimeter(0), 0)


class PerimeterTest(TestMixin, unittest.TestCase):
    pass


def test_that_fails():
    assert False
"""


def command(out: Path, source: str, *words: str) -> "subprocess.CompletedProcess[str]":
    config = ["--config", "configs/swepdb.toml"]
    config += [] if any("sandbox" in word for word in words) else ["sandbox={type='process'}"]
    return typed("hpc_swe.make_bugs", source, "--out", out, *config, *words)


def make(out: Path, *words: str) -> str:
    done = command(out, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refusal(out: Path, *words: str) -> str:
    done = command(out, *words)
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1), done.stderr
    return done.stderr


def made(out: Path) -> list[Task]:
    files = [out / f"{split}.parquet" for split in ("train", "validation", "test")]
    return [task for file in files if file.exists() for task in Programs(train=str(file)).load("train")]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "shapes.py").write_text(SHAPES)
    (folder / "test_shapes.py").write_text(TESTS)
    return folder


@pytest.fixture(scope="module")
def out(shapes, tmp_path_factory) -> tuple[Path, str]:
    """Of the folder, its tasks and what was printed."""
    folder = tmp_path_factory.mktemp("bugs")
    return folder, make(folder, str(shapes), *OPTIONS)


@pytest.mark.slow
def test_a_made_task_pays_for_its_repair_and_for_nothing_else(out):
    """Not for what the agent's own run of the tests says, which is an observation."""
    tasks = made(out[0])
    assert len(tasks) >= 4, out[1]
    references = {}
    for split in ("train", "validation", "test"):
        if (out[0] / f"{split}.parquet").exists():
            own = Programs(train=str(out[0] / f"{split}.parquet"))
            references |= own.references(own.load("train"))
    task = tasks[0]
    grader, text = Pytest(), task.files["test_shapes.py"]
    assert grader.grade(task, references[task.task_id], Process()).reward == 1.0
    assert grader.examine(task, "", Process()).reward == 0.0
    with Process().open(task) as sandbox:
        assert "failed" in Evaluate()(sandbox, task)
        passing = "def test_all_is_well():\n    pass\n"
        sandbox.write("test_shapes.py", passing.encode())
        assert "1 passed" in Evaluate()(sandbox, task)
    assert grader.grade(task, difference("test_shapes.py", text, passing), Process()).reward == 0.0
    both = references[task.task_id] + difference("test_shapes.py", text, "import nothing\n")
    assert grader.grade(task, both, Process()).reward == 1.0


@pytest.mark.slow
def test_half_of_the_failing_tests_are_hidden_and_the_others_are_seen(out):
    """Those that are seen pass for the original, so that a repair can be told from a further fault."""
    for task in made(out[0]):
        seen, full = task.files["test_shapes.py"], task.tests.files["test_shapes.py"]
        assert "test_that_fails" not in full, "only tests that pass for the original belong to a task"
        assert set(seen.split("\n")) - {"    pass"} < set(full.split("\n"))
        assert task.tests.fail_to_pass
        with Process().open(task) as sandbox:
            assert "failed" in Evaluate()(sandbox, task)
            sandbox.write("shapes.py", SHAPES.encode())
            assert "failed" not in Evaluate()(sandbox, task)
    assert "the agent sees tests fail that may fail for the original, too" in out[1]
    rows = [row for file in out[0].glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert {"task_id", "problem_statement", "prompt", "extra_info"} < set(rows[0])
    assert all(SHAPES in (fixed["content"] for fixed in row["fixed"]) for row in rows)
    assert len(list(Kodcode(train=str(next(out[0].glob("*.parquet")))).load("train"))) > 0


@pytest.mark.slow
def test_a_function_is_in_one_split_and_reasons_are_counted(out):
    functions: dict[str, set[str]] = {}
    for file in out[0].glob("*.parquet"):
        for row in pq.read_table(file).to_pylist():
            _, name, _ = row["extra_info"]["task_name"].split(": ")
            functions.setdefault(name, set()).add(file.stem)
    assert functions
    assert all(len(splits) == 1 for splits in functions.values())
    assert "valid" in out[1]
    assert "mutants beyond --per-function" in out[1]


@pytest.mark.slow
def test_what_was_tried_is_not_tried_again_and_other_options_are_refused(shapes, out, tmp_path):
    """The journal of a command that was killed has fewer lines, and the last one may be unfinished."""
    shutil.copytree(out[0], tmp_path / "bugs")
    tried = tmp_path / "bugs/tried.jsonl"
    lines = tried.read_bytes().splitlines(keepends=True)
    tried.write_bytes(b"".join(lines[:-2]) + lines[-1][:30])
    make(tmp_path / "bugs", str(shapes), *OPTIONS)
    after = tried.read_bytes().splitlines(keepends=True)
    assert after[:-2] == lines[:-2]
    assert sorted(after) == sorted(lines), "and what was tried again ended in the same way"
    refused = refusal(tmp_path / "bugs", str(shapes), "--seed=2")
    assert "was begun with other sources or options" in refused


@pytest.mark.slow
def test_two_commands_do_not_work_in_one_folder(shapes, tmp_path):
    with task_checks.alone(tmp_path):
        assert f"{tmp_path}: another command works there" in refusal(tmp_path, str(shapes))


@pytest.mark.parametrize("option", ["--hidden=1", "--hidden=-0.1", "--per-function=0", "--limit=-1"])
def test_a_number_that_makes_no_sense_is_refused_and_nothing_is_written(shapes, tmp_path, option):
    assert option.partition("=")[0] in refusal(tmp_path / "bugs", str(shapes), option)
    assert not (tmp_path / "bugs").exists()


def with_more_copies(images: Path, module: Path) -> Path:
    """Make a folder of images with one that has other interpreters, and carries a module and an archive."""
    images.mkdir()
    subprocess.run(["cp", "-a", (IMAGES / "python-pytest").resolve(), images / "many-pythons"], check=True)
    (images / "python-pytest.sif").symlink_to((IMAGES / "python-pytest.sif").resolve())
    for place in (
        "usr/lib64/python3.9/colorsys.py",
        "opt/conda/envs/mine/lib/python3.12/colorsys.py",
        "srv/tools/site-packages/carried/_colours.py",
    ):
        (images / "many-pythons" / place).parent.mkdir(parents=True)
        (images / "many-pythons" / place).write_bytes(b"# Copied.\r\n" + module.read_bytes())
    with zipfile.ZipFile(images / "many-pythons/srv/tools/library.zip", "w") as archive:
        archive.write(module, "colorsys.py")
    return images


@pytest.mark.slow
def test_the_original_of_a_library_function_is_not_in_the_sandbox(tmp_path):
    """Neither by an import nor by a search of all files; the test modules of the library are gone as well.

    The image has more than one interpreter, and a package that carries a copy under another name. A function
    that stands alone in another file is not changed, and the file stays.
    """
    if not (IMAGES / "python-pytest").exists():
        pytest.skip("the task image is not built: containers/build_image.sh")
    import colorsys

    images = with_more_copies(tmp_path / "images", Path(colorsys.__file__))
    alone = images / "many-pythons/srv/tools/site-packages/carried/_back.py"
    alone.write_text(inspect.getsource(colorsys.hsv_to_rgb))
    library = tmp_path / "library"
    (library / "test").mkdir(parents=True)
    original = Path(colorsys.__file__).read_text()
    (library / "colorsys.py").write_text(original)
    (library / "test/test_colorsys.py").write_text(
        "import colorsys\n\n\n"
        "def test_there():\n    assert colorsys.rgb_to_hsv(1, 0, 0) == (0.0, 1.0, 1)\n\n\n"
        "def test_back():\n    assert colorsys.hsv_to_rgb(0.0, 1.0, 1) == (1, 0.0, 0.0)\n\n\n"
        "def test_both():\n    assert colorsys.hsv_to_rgb(*colorsys.rgb_to_hsv(0, 0, 1)) == (0.0, 0.0, 1)\n"
    )
    words = (f"--library={library}", "--limit=2", "--per-function=8", "--image=many-pythons")
    config = (
        "--config",
        str(ROOT / "configs/swepdb.toml"),
        f"sandbox={{type='apptainer', images='{images}'}}",
    )
    printed = make(tmp_path / "bugs", "colorsys", *words, *config)
    assert "functions that the image has in another file" in printed
    assert all(str(alone).partition("many-pythons")[2] not in task.absent for task in made(tmp_path / "bugs"))
    task = msgspec.structs.replace(made(tmp_path / "bugs")[0], image="many-pythons")
    line = next(line for line in original.splitlines() if "maxc-minc" in line).strip()
    search = f"""
import os, sys
found = []
for folder, folders, names in os.walk('/'):
    if folder in ('/proc', '/sys'):
        folders[:] = names[:] = []
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and ('colorsys' in name or {line.encode()!r} in open(path, 'rb').read()):
            found.append(path)
print('found', *sorted(found))
try:
    import colorsys
    print('imported', colorsys.__file__)
except ModuleNotFoundError:
    print('no module')
"""
    with Apptainer(images=str(images)).open(task) as sandbox:
        assert sandbox.run("test ! -e /srv/tools/library.zip", 10.0).exit_code == 0
        result = sandbox.python(search, 60.0)
        own = f"found {task.workdir}/colorsys.py {task.workdir}/test_colorsys.py\n"
        assert own in result.output, result.output
        assert "no module" in result.output
        assert "no module" in sandbox.run(f"cd / && python3 - <<'END'\n{search}\nEND", 60.0).output
        assert "failed" in Evaluate()(sandbox, task)
