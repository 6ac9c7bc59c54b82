"""Define what crosses single cells and logs: MANIFEST.json of a run, nodes/, state/ and metrics/."""

from typing import Literal

from hpc_swe.base.records.base import Record, Role, WeightVersion


class RunManifest(Record, frozen=True, kw_only=True):
    """A run is identified by this. Relative paths start in `folder`; jobs get the `environment`."""

    protocol: int
    run_id: str
    commit: str
    model_sha256: str
    config_sha256: str
    folder: str
    environment: dict[str, str]
    root: str = ""
    """Path of the run at its last start or tick; empty in a run of an older protocol."""
    inode: int = 0
    """Inode of that folder. A folder with another path and another inode is a copy."""


class Node(Record, frozen=True, kw_only=True):
    """A node is one live process: its lease, and the state that it publishes."""

    owner: str
    role: Role
    beat: int
    host: str
    pid: int
    state: Literal["starting", "ready", "updating", "sleeping", "draining"] = "starting"
    url: str = ""
    """Address of an engine."""
    versions: list[WeightVersion] = []
    """Weights in use; two while an engine changes from the first to the second."""
    reading: str = ""
    """Folder being loaded, which is not deleted while it is named here."""
    step: int = 0
    """Steps that a learner has taken: batches that it has trained."""
    claims: list[str] = []
    worked_s: list[float] = []
    """Seconds of work on each claim, counted only while an engine was available."""
    slots: int = 0
    """Episodes that a worker can run at once."""
    loops: int = 0
    """Iterations of the main loop."""
    steps: list[int] = []
    """Answers of engines and opened sandboxes so far, of each claim; one that is worked on grows."""
    refusals: int = 0
    """Refusals of new weights since this engine loaded the newest, over its restarts."""
    trouble: str = ""
    """Why this process does less than it should, or what alarms it, for people; empty while all is well."""


class Endpoint(Record, frozen=True, kw_only=True):
    """Rollout workers may send requests to this engine."""

    owner: str
    url: str
    versions: list[WeightVersion]
    updating: bool
    sleeping: bool = False
    """Whether the learner has its GPUs: it keeps its requests and answers none."""


class EndpointTable(Record, frozen=True, kw_only=True):
    """All live engines are listed in this one cell, which spares workers a listing of nodes/."""

    beat: int
    endpoints: list[Endpoint]
    newest: WeightVersion


class RoleStatus(Record, frozen=True, kw_only=True):
    """Count a role's live processes; `silent` ones had no new heartbeat in two checks."""

    role: Role
    desired: int
    alive: int
    silent: int = 0


class StatusReport(Record, frozen=True, kw_only=True):
    """The coordinator publishes this every few seconds for `status`."""

    beat: int
    roles: list[RoleStatus]
    spools: dict[str, dict[str, int]]
    oldest_s: dict[str, float] = {}
    """Spool -> seconds that the coordinator has seen its oldest message there."""
    waits_for: str
    step: int
    step_s: float = 0.0
    """Recent seconds per step of the learner; 0 before its second step."""
    newest: WeightVersion
    recent: dict[str, list[float]]
    """Metric -> its last values, oldest first."""
    errors: list[str]
    troubles: dict[str, str] = {}
    """Owner -> why this live process does less than it should; or the run folder -> what it lacks."""


class MetricLine(Record, frozen=True, kw_only=True):
    """A metrics log is a sequence of such lines."""

    step: int
    time: float  # seconds since the epoch, for the x axis of plots
    values: dict[str, float]
