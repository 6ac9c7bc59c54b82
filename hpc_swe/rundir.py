"""RunDir: every path of docs/protocol.md, by name. Nothing else builds paths."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from hpc_swe.records import Role, WeightVersion

PROTOCOL = 1
SPOOLS = ("requests", "episodes", "scored")


@dataclass(frozen=True)
class RunDir:
    """One run on the shared file system."""

    root: Path

    @property
    def manifest(self) -> Path:
        """Cell: RunManifest, written once."""
        return self.root / "MANIFEST.json"

    @property
    def config(self) -> Path:
        """Cell: the merged configuration, written once."""
        return self.root / "run.json"

    @property
    def tasks(self) -> Path:
        """Cell: the tasks of the run as parquet, written once."""
        return self.root / "tasks.parquet"

    @property
    def token(self) -> Path:
        """Cell, mode 0600: the bearer token of every engine route."""
        return self.root / "token"

    @property
    def control(self) -> Path:
        """Orders of a person: empty files."""
        return self.root / "control"

    @property
    def drain(self) -> Path:
        """Order: take no new claim, finish, exit 0."""
        return self.control / "DRAIN"

    @property
    def stop(self) -> Path:
        """Order: exit now."""
        return self.control / "STOP"

    @property
    def finished(self) -> Path:
        """No order, but looked for with them: the run has done all its steps; exit."""
        return self.control / "FINISHED"

    @property
    def nodes(self) -> Path:
        """Cells: one Node per live process."""
        return self.root / "nodes"

    def node(self, owner: str) -> Path:
        """Cell: the lease of one process."""
        return self.nodes / f"{owner}.json"

    @property
    def requests(self) -> Path:
        """Spool of RolloutRequest, coordinator to rollout."""
        return self.root / "requests"

    @property
    def episodes(self) -> Path:
        """Spool of Episode, rollout to reward."""
        return self.root / "episodes"

    @property
    def scored(self) -> Path:
        """Spool of ScoredEpisode, reward to coordinator; one reader, so no claims."""
        return self.root / "scored"

    @property
    def batches(self) -> Path:
        """Folders of Batch files, coordinator to learner."""
        return self.root / "batches"

    def batch(self, step: int) -> Path:
        """Folder: what optimizer step `step` consumes."""
        return self.batches / f"step_{step:06d}"

    @staticmethod
    def rank_file(rank: int) -> str:
        """File of one data-parallel rank inside a batch folder."""
        return f"rank_{rank:04d}.msgpack"

    @property
    def weights(self) -> Path:
        """Folders of Hugging Face safetensors, learner to inference."""
        return self.root / "weights"

    def weight(self, version: WeightVersion) -> Path:
        """Folder: one weight version."""
        return self.weights / version.name

    @property
    def checkpoints(self) -> Path:
        """Folders of Megatron distributed checkpoints, learner to learner."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int, incarnation: int) -> Path:
        """Folder: the learner's state after `step` steps."""
        return self.checkpoints / f"step_{step:06d}-i{incarnation:02d}"

    @property
    def incarnations(self) -> Path:
        """One folder per start of the learner, taken by mkdir."""
        return self.root / "state" / "incarnations"

    @property
    def endpoints(self) -> Path:
        """Cell: EndpointTable, coordinator to rollout."""
        return self.root / "state" / "endpoints.json"

    @property
    def status(self) -> Path:
        """Cell: StatusReport, coordinator to people."""
        return self.root / "state" / "status.json"

    def eval_table(self, label: str) -> Path:
        """Cell: one finished evaluation as parquet."""
        return self.root / "evals" / f"{label}.parquet"

    @property
    def evals(self) -> Path:
        """Cells: evaluations."""
        return self.root / "evals"

    def archive(self, step: int) -> Path:
        """Cell: the scored episodes that a batch consumed, as parquet."""
        return self.root / "archive" / "episodes" / f"step_{step:06d}.parquet"

    @property
    def archives(self) -> Path:
        """Cells: one parquet file a step."""
        return self.root / "archive" / "episodes"

    @property
    def metrics(self) -> Path:
        """Logs: one JSONL file per writer."""
        return self.root / "metrics"

    def metric_log(self, owner: str) -> Path:
        """Log: one process's metrics."""
        return self.metrics / f"{owner}.jsonl"

    @property
    def tensorboard(self) -> Path:
        """View drawn from metrics/; may be deleted."""
        return self.root / "tensorboard"

    def logs(self, role: Role) -> Path:
        """Folder of one role's standard output and error."""
        return self.root / "logs" / role

    @property
    def launches(self) -> Path:
        """Cells: one per submitted job, by role."""
        return self.root / "launch"

    def job(self, role: Role, job: str) -> Path:
        """Cell: one submitted job."""
        return self.launches / role / f"{job}.json"

    def spool(self, name: str) -> Path:
        """Folder of one of SPOOLS."""
        return self.root / name

    def make(self) -> None:
        """Make the folders of an empty run, private to the user.

        Raises:
            OSError: The shared file system refuses.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (
            self.control,
            self.nodes,
            self.batches,
            self.weights,
            self.checkpoints,
            self.metrics,
            self.incarnations,
            self.evals,
            self.archives,
            self.tensorboard,
            *(self.launches / role for role in get_args(Role)),
        ):
            folder.mkdir(parents=True, exist_ok=True)
        for spool in SPOOLS:
            for state in ("ready", "claimed", "dead"):
                (self.root / spool / state).mkdir(parents=True, exist_ok=True)
