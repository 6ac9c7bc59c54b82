"""Starts the ranks of one job as real processes over gloo, as those of one node or of several."""

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpc_swe.processes import MEETING

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def launch(size: int, script: str, *arguments: str, timeout_s: float = 900.0) -> list[str]:
    """Run a script on `size` ranks; returns what each wrote. Fails when one fails."""
    children = start(size, script, *arguments)
    try:
        outputs = [child.communicate(timeout=timeout_s)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    ends = "".join(f"\n--- rank {rank}:\n{output[-5000:]}" for rank, output in enumerate(outputs))
    assert all(child.returncode == 0 for child in children), ends
    return outputs


def start(
    size: int, script: str | Path, *arguments: object, one_node: bool = True
) -> list[subprocess.Popen[str]]:
    """The ranks' processes, running."""
    meeting = _of_one_node(size) if one_node else _of_several_nodes()
    children = []
    for rank in range(size):
        env = (
            {"TORCHDYNAMO_DISABLE": "1"}
            | os.environ
            | meeting
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
        )
        command = [sys.executable, *map(str, (HERE / script, *arguments))]
        children.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return children


def _of_one_node(size: int) -> dict[str, str]:
    place = tempfile.mkdtemp(prefix="meeting-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return {MEETING: place, "LOCAL_WORLD_SIZE": str(size)}


def _of_several_nodes() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def run_cases(size: int, cases: Sequence[dict], folder: Path) -> dict[str, list[dict]]:
    """Run cases one after another in one job; answers of all ranks by case name."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / f"spec{size}.json"
    spec.write_text(json.dumps([case | {"out": str(folder / case["name"])} for case in cases]))
    launch(size, "worker.py", str(spec))
    return {
        case["name"]: [
            json.loads((folder / case["name"] / f"rank{rank}.json").read_text()) for rank in range(size)
        ]
        for case in cases
    }
