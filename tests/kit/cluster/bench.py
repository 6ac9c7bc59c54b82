"""A run of reward workers alone, acted on from the login node as users do; Slurm's commands are counted."""

import os
import sys
from pathlib import Path

from tests.kit.checkout import ROOT
from tests.kit.cluster.cluster import Cluster

COUNTED = ("squeue", "sacct", "sbatch", "scancel", "scontrol", "sinfo")
ROLES = ("coordinator", "inference", "learner", "rollout", "reward")
KILL_TICK = 'read -r _ _ _ tick _ < /proc/$PPID/stat; kill -9 "$tick"'
"""In a shell that a tick calls in place of sbatch; `timeout` stands between."""
SLURM = [
    'executor={type="slurm", notice_s=20, roles={reward={cpus_per_task=1, mem_gb=0.2, timeout_min=10}}}',
    'sandbox={type="process"}',
    "tasks.train=3",
    "tasks.eval=2",
]


class Bench:
    """A run of reward workers alone, acted on as a user would from the login node."""

    def __init__(self, cluster: Cluster, folder: Path, reward: int, *words: str) -> None:
        self.cluster, self.run, self.calls = cluster, folder / "run", folder / "calls"
        nobody = [f"counts.{role}=0" for role in ROLES[:-1]]
        self.words = [*SLURM, *nobody, f"counts.reward={reward}", *words]
        self.model, self.bin = folder / "model", folder / "bin"
        for made in (folder, self.model, self.bin):
            made.mkdir(exist_ok=True)
            os.chown(made, 2001, 2001)
        (self.model / "config.json").write_text("{}")
        (self.model / "tokenizer.json").write_text("{}")
        for name in COUNTED:
            shim = self.bin / name
            shim.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.calls}\nexec /usr/bin/{name} "$@"\n')
            shim.chmod(0o755)

    def launch(self, *words: str, check: bool = True):
        path = {"PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin"}
        command = [sys.executable, "-m", "hpc_swe.launch", *words]
        return self.cluster.run(*command, cwd=ROOT, env=path, check=check)

    def start(self):
        return self.launch(
            "start", "configs/demo.toml", f"model={self.model}", *self.words, "--run", str(self.run)
        )

    def tick(self, check: bool = True):
        return self.launch("tick", str(self.run), check=check)

    def stop(self):
        return self.launch("stop", str(self.run), "--now")

    def asked(self) -> dict[str, int]:
        """Calls of each of Slurm's commands since the last question."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return {name: sum(line.split()[0] == name for line in lines) for name in COUNTED}

    def jobs(self) -> list[str]:
        return [job.id for job in self.cluster.jobs() if job.user == "alice"]
