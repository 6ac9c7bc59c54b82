"""The page docs/your_repository.md: its commands are typed in their order, with fewer releases."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hpc_swe.base.rundir import RunDir
from hpc_swe.tasks import task_checks
from tests.kit.checkout import IMAGES, ROOT, environment

PAGE = ROOT / "docs/your_repository.md"
LIMIT_S = 1500
SHORTER = {
    r"for version in (?:.|\n)* (\S+ \S+); do": r"for version in \1; do",
    r"(hpc_swe\.check .*)": r"\1 --runs 1",
}
"""Parts of the page's commands, and what a test types instead of them to be quick."""


def blocks(page: Path) -> list[str]:
    """Return the commands of the page's way from an empty folder to a step, a block each."""
    text = page.read_text(encoding="utf-8")
    way = text[text.index("## From an empty folder") :].partition("\n## ")[0]
    found = re.findall(r"^```(\w*)\n(.*?)^```$", way, re.MULTILINE | re.DOTALL)
    return [block for kind, block in found if not kind]


def lay_out(folder: Path) -> None:
    """Make what a checkout has after `make image`."""
    (folder / ".cache/images").mkdir(parents=True)
    (folder / "configs").symlink_to(ROOT / "configs")
    for name in ("python-pytest", "python-pytest.sif"):
        (folder / ".cache/images" / name).symlink_to((IMAGES / name).resolve())


def type_in(folder: Path, block: str) -> str:
    """Type a block; return what it prints, and fail if a command of it does."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    me = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["sh", "-e", "-c", block],
        cwd=folder,
        env=environment(PATH=path, **me),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-5000:]}"
    return done.stdout


@pytest.mark.slow
def test_a_newcomer_comes_from_an_empty_folder_to_a_step_of_grpo(tmp_path):
    if shutil.which("apptainer") is None or not (IMAGES / "python-pytest").exists():
        pytest.skip("Apptainer or its unpacked task image is missing: containers/build_image.sh")
    asked = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", tmp_path / "asked", "parse"]
    if subprocess.run(asked, capture_output=True).returncode:
        pytest.skip("pip reaches no package registry")
    lay_out(tmp_path)
    said = []
    for block in blocks(PAGE):
        for long, short in SHORTER.items():
            block = re.sub(long, short, block)
        said.append(type_in(tmp_path, block))
    assert "2 of 2 commits were looked at: 1 tasks for training and 0 held out" in said[1]
    assert {one.verdict for one in task_checks.read(tmp_path / "own/tasks/checked.jsonl").values()} == {
        "usable"
    }
    run = RunDir(tmp_path / "own/run")
    assert run.finished.exists()
    names = (tmp_path / "own/tasks/train.txt").read_text().split()
    assert all(name in said[-1] for name in names)
    assert msgspec.json.decode((run.root / "run.json").read_bytes())["steps"] == 1
