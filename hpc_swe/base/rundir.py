"""Name every path of docs/protocol.md; no other module builds paths of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from hpc_swe.base.records import Role, WeightVersion

PROTOCOL = 3
SPOOLS = ("requests", "episodes", "scored")


class _At:
    """Give the path below a run's folder; on the class itself, the path relative to that folder."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, run: "RunDir | None", _: type) -> Path:
        return Path(self._path) if run is None else run.root / self._path


@dataclass(frozen=True)
class RunDir:
    """Name all paths of one run's folder on the shared file system."""

    root: Path

    manifest = _At("MANIFEST.json")
    """Cell: RunManifest, written once."""
    config = _At("run.json")
    """Cell: the merged configuration, written once."""
    made = _At("made.json")
    """Cell: `config` as the run was made or upgraded: starts change only some of its keys."""
    tasks = _At("tasks.parquet")
    """Cell: the tasks of the run as parquet, written once."""
    trajectories = _At("trajectories.parquet")
    """Cell: the conversations of an SFT run as token ids, written once."""
    references = _At("references.json")
    """Cell, mode 0600: solutions of the tasks, which only reward workers read."""
    changed_tests = _At("changed_tests.json")
    """Cell, mode 0600: other versions of hidden tests, which only reward workers read."""
    token = _At("token")
    """Cell, mode 0600: the bearer token of every engine route."""
    control = _At("control")
    """Orders: empty files."""
    drain = _At("control/DRAIN")
    """Order: make no new claim, finish the claims at work, exit 0."""
    stop = _At("control/STOP")
    """Order: exit now."""
    finished = _At("control/FINISHED")
    """Order that the coordinator gives: the run is done, so exit."""
    refused = _At("state/refused_version.json")
    """Cell: WeightVersion, the newest that an engine could not load; a full one comes after it."""
    nodes = _At("nodes")
    """Cells: one Node per live process."""
    requests = _At("requests")
    """Spool of RolloutRequest, coordinator to rollout."""
    episodes = _At("episodes")
    """Spool of Episode, rollout to reward."""
    scored = _At("scored")
    """Spool of ScoredEpisode, reward to coordinator; it has one reader and needs no claims."""
    batches = _At("batches")
    """Folders of Batch files, coordinator to learner."""
    weights = _At("weights")
    """Folders of Hugging Face safetensors, learner to inference."""
    checkpoints = _At("checkpoints")
    """Folders of Megatron distributed checkpoints, learner to learner."""
    incarnations = _At("state/incarnations")
    """One folder per start of the learner, taken by mkdir."""
    meetings = _At("state/meetings")
    """One folder per start of a job on several nodes, in which its ranks show that they are alive."""
    endpoints = _At("state/endpoints.json")
    """Cell: EndpointTable, coordinator to rollout."""
    status = _At("state/status.json")
    """Cell: StatusReport, coordinator to people."""
    skipped_steps = _At("state/skipped.json")
    """Cell: SkippedBatches, learner to learner and ticks."""
    stop_signs = _At("state/stop_signs.json")
    """Cell: SignRecord, learner to coordinator and people."""
    watch = _At("state/watch.json")
    """Cell: Memory, coordinator to coordinator."""
    supervision = _At("state/supervision.json")
    """Cell: Verdict, coordinator to watchdogs and people."""
    clocks = _At("state/clocks.json")
    """Cell: ClockMemory, coordinator to coordinator."""
    stacks = _At("stacks")
    """Files for people: what processes did that made no progress."""
    evals = _At("evals")
    """Cells: evaluations."""
    results = _At("results.parquet")
    """Cell: one row per episode of a finished evaluation, without the long columns."""
    summary = _At("summary.json")
    """Cell: the numbers of a finished evaluation."""
    archives = _At("archive/episodes")
    """Cells: one parquet file per step."""
    metrics = _At("metrics")
    """Logs: one JSONL file per writer."""
    tensorboard = _At("tensorboard")
    """View drawn from metrics/; may be deleted."""
    tracked = _At("tracked")
    """What W&B or trackio keep of the curves; may be deleted."""
    report = _At("report")
    """Pages of the run for a browser; may be deleted."""
    launches = _At("launch")
    """Folders: one per submission, by role."""
    code = _At("code")
    """The packages that every job of the run imports."""
    code_archive = _At("code/code.tar")
    """The same as one file, which jobs with `executor.runtime` unpack on their nodes."""

    def node(self, owner: str) -> Path:
        """Return the cell with the lease of one process."""
        return self.nodes / f"{owner}.json"

    def batch(self, step: int) -> Path:
        """Return the folder of the batch that step `step` trains."""
        return self.batches / f"step_{step:06d}"

    @staticmethod
    def rank_file(rank: int) -> str:
        """Return the name of a data-parallel rank's file in a batch folder."""
        return f"rank_{rank:04d}.msgpack"

    @staticmethod
    def validation_file(rank: int) -> str:
        """Return the name of the file of held-out samples beside a data-parallel rank's file."""
        return f"validation_{rank:04d}.msgpack"

    def history(self, step: int) -> Path:
        """Return the file in a batch folder that says what the run knows about each task."""
        return self.batch(step) / "history.msgpack"

    def skipped(self, step: int) -> Path:
        """Return the folder that keeps a batch whose gradient was not finite."""
        return self.root / "skipped" / f"step_{step:06d}"

    def weight(self, version: WeightVersion) -> Path:
        """Return the folder of one weight version."""
        return self.weights / version.name

    def checkpoint(self, step: int, incarnation: int) -> Path:
        """Return the folder of the learner's state after `step` steps."""
        return self.checkpoints / f"step_{step:06d}-i{incarnation:02d}"

    def eval_table(self, label: str) -> Path:
        """Return the cell with one finished evaluation, as parquet."""
        return self.evals / f"{label}.parquet"

    def predictions(self, label: str) -> Path:
        """Return the cell with one sample's patch for every task of an evaluation, as swebench reads it."""
        return self.root / f"predictions.{label}.jsonl"

    def archive(self, step: int) -> Path:
        """Return the cell with the scored episodes that a batch consumed, as parquet."""
        return self.archives / f"step_{step:06d}.parquet"

    def metric_log(self, owner: str) -> Path:
        """Return the log of one process's metrics."""
        return self.metrics / f"{owner}.jsonl"

    def stack(self, number: int, owner: str) -> Path:
        """Return the file with the stacks of a process that the verdict of this number names."""
        return self.stacks / f"{number:06d}-{owner}.txt"

    def logs(self, role: Role) -> Path:
        """Return the folder of one role's standard output and error."""
        return self.root / "logs" / role

    def submission(self, role: Role, number: int) -> Path:
        """Return the folder of one submission, which is taken by mkdir."""
        return self.launches / role / f"{number:06d}"

    def marked(self, role: Role, number: int, mark: str) -> Path:
        """Return the folder that marks an unfinished submission as doubtful or void."""
        return self.launches / role / f"{number:06d}.{mark}"

    def submitted(self, role: Role, number: int) -> Path:
        """Return the cell that says that the scheduler has accepted the submission."""
        return self.submission(role, number) / "submitted.json"

    def rest(self, role: Role) -> Path:
        """Return the cell that says since when a role is known to fail, by the clock of each host."""
        return self.launches / role / "rest.json"

    def started(self, role: Role, number: int, index: int) -> Path:
        """Return the cell in which one job of the submission describes itself."""
        return self.submission(role, number) / f"job_{index:04d}.json"

    def spool(self, name: str) -> Path:
        """Return the folder of one of SPOOLS."""
        return self.root / name

    def folders(self) -> list[Path]:
        """Return the folders of an empty run."""
        folders = [self.control, self.nodes, self.batches, self.weights, self.checkpoints, self.metrics]
        folders += [self.incarnations, self.evals, self.archives, self.tensorboard]
        folders += [self.launches / role for role in get_args(Role)]
        return folders + [self.spool(s) / state for s in SPOOLS for state in ("ready", "claimed", "dead")]

    def make(self) -> None:
        """Make the folders of an empty run, private to the user."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root.chmod(0o700)  # an empty folder may have existed with other permissions
        self.make_folders()

    def make_folders(self) -> None:
        """Make the folders that a run lacks, in which nothing is left."""
        for folder in self.folders():
            folder.mkdir(parents=True, exist_ok=True)
