"""A scheduler that is played in memory, and the part of a configuration that a tick reads."""

import threading
from dataclasses import dataclass, field

from hpc_swe.base.errors import ConfigError, SchedulerError
from hpc_swe.cluster.executors.base import Job
from hpc_swe.config.settings import InferenceConfig, LearnerConfig, LeaseConfig
from hpc_swe.models.policies.megatron import Megatron


@dataclass
class Played:
    """A scheduler in memory: what is submitted runs until it is taken off the list."""

    running: list[Job] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    array_size: int = 1000
    is_here: bool = False
    dies: str = ""
    """Where submitting is cut off: before the scheduler hears of it, or after."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """As a real scheduler, it serves one request after another: none loses what another one wrote."""

    def pause(self, waited_s):
        return 0.0

    def submit(self, run, submission):
        self.asked.append("submit")
        if self.dies == "before":
            raise KeyboardInterrupt
        if self.dies == "refused":
            raise ConfigError("sbatch refuses: no such partition")
        with self.turn:
            self.running += [
                Job(submission.role, f"{submission.number}_{n}", submission.number, "running")
                for n in range(submission.count)
            ]
        if self.dies == "after":
            raise KeyboardInterrupt
        return str(submission.number)

    def queue(self, run):
        self.asked.append("queue")
        if self.dies == "silent":
            raise SchedulerError("squeue: Unable to contact slurm controller")
        with self.turn:
            return list(self.running)

    def endings(self, jobs):
        self.asked.append("endings")

    def cancel(self, jobs):
        with self.turn:
            self.running = [job for job in self.running if job.job not in jobs]


@dataclass
class Config:
    """The part of a RunConfig that a tick reads."""

    executor: Played
    counts: dict
    mode: str = "eval"
    hybrid: bool = False
    steps: int = 5
    policy: Megatron | None = None
    learner: LearnerConfig | None = None
    inference: InferenceConfig = InferenceConfig()
    lease: LeaseConfig = LeaseConfig()
    max_restarts: int = 5
