"""Run the engine's side of the benchmark of weight versions as a process, and read what it logs."""

import os
import subprocess
import sys
from pathlib import Path

from hpc_swe.base.errors import EngineError
from hpc_swe.base.rundir import RunDir
from hpc_swe.cluster import gpus
from hpc_swe.cluster.processes import die_with_parent, kill_and_wait
from hpc_swe.models.engines.base import FALLBACK
from hpc_swe.view.benchmarks import stages
from hpc_swe.view.benchmarks.hop import HopPlan
from hpc_swe.view.benchmarks.ranks import last_line
from hpc_swe.view.benchmarks.stages import Moment


class EngineSide:
    """Run the engine's side inside the `with` block."""

    def __init__(self, plan: HopPlan, path: Path, log: Path) -> None:
        self._plan, self._path, self._log = plan, path, log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "EngineSide":
        return self

    def start(self) -> None:
        """Start it on the last GPUs that this process sees; the learner's side has the first ones."""
        last = gpus.usable(os.environ)[-self._plan.engine.get("tensor_parallel", 1) :]
        shown = {gpus.VISIBLE: ",".join(last)} if self._plan.policy["device"] == "gpu" and last else {}
        command = [sys.executable, "-m", "hpc_swe.view.benchmarks.hop", "engine", str(self._path)]
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                command, env={**os.environ, **shown}, stdout=out, stderr=out, preexec_fn=die_with_parent
            )

    def require_alive(self) -> None:
        """Raise EngineError with its last line if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise EngineError(f"the engine's side ended: {self.last_lines()}")

    def moments(self) -> list[Moment]:
        """Return what both sides have logged."""
        return stages.read(*(self._log.with_name(f"{side}.moments") for side in ("learner", "engine")))

    def last_lines(self) -> str:
        """Return the last lines of the supervisor and of vLLM."""
        logs = [self._log, *RunDir(Path(self._plan.run)).logs("inference").glob("*.log")]
        return " / ".join(last_line([log.read_text(errors="replace")]) for log in logs if log.exists())

    def fallbacks(self) -> list[str]:
        """Return the lines in which vLLM's workers say that they load weights in a slower way."""
        logs = RunDir(Path(self._plan.run)).logs("inference").glob("*.log")
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return sorted({FALLBACK + line.partition(FALLBACK)[2] for line in lines if FALLBACK in line})

    def __exit__(self, *_: object) -> None:
        RunDir(Path(self._plan.run)).stop.touch()
        if self._process is not None:
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                kill_and_wait(self._process)
