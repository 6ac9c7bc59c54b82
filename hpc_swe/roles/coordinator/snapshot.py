"""Describe the run at one moment, as the coordinator's modes see it, and what a mode reports back."""

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

from hpc_swe.base.records import Node, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import checkpoints
from hpc_swe.base.store.spool import Address

Scan = dict[str, dict[str, list[Address]]]
"""Maps spool and state to the messages listed there."""


@dataclass(frozen=True)
class RunSnapshot:
    """Hold the state of the run at one moment."""

    now: float
    """Time on this process's monotonic clock, in seconds."""
    scan: Scan
    newest: WeightVersion
    """Newest exported weights; version 0 before the first export."""
    nodes: list[Node]
    """Leases of the processes that are alive."""
    has_room: bool
    """True when the file system has more free space than the configured floor."""
    absent_s: float = 90.0
    """Seconds after which a message that no listing shows is lost."""

    @cached_property
    def identities(self) -> set[str]:
        """Return the names of all messages in any spool, apart from those in dead/."""
        states = ("ready", "claimed")
        return {a.identity for spool in self.scan.values() for state in states for a in spool[state]}

    @property
    def engines(self) -> list[Node]:
        """Return the leases of the engines that serve."""
        return [node for node in self.endpoints if node.state != "sleeping"]

    @property
    def endpoints(self) -> list[Node]:
        """Return the leases of the engines that serve, or that will when the learner's turn is over."""
        states = ("ready", "updating", "sleeping")
        return [node for node in self.nodes if node.role == "inference" and node.state in states and node.url]

    @property
    def refusals(self) -> int:
        """Return how often in a row each engine, at least, has refused new weights."""
        return min((node.refusals for node in self.nodes if node.role == "inference"), default=0)

    @property
    def why_refused(self) -> str:
        """Say that every engine refuses new weights, and why; empty when one does not."""
        why = "; ".join(dict.fromkeys(n.trouble for n in self.nodes if n.role == "inference" and n.trouble))
        return f"every engine refuses new weights, {self.refusals} times in a row: {why}" * bool(
            self.refusals
        )

    @cached_property
    def worked_s(self) -> dict[str, float]:
        """Map the requests that a rollout worker has, and that have no result yet, to seconds of work.

        The workers' leases report them: their clocks pause while no engine serves, and end with the claim.
        """
        rollout = [node for node in self.nodes if node.role == "rollout"]
        clocks = {(n.owner, c): s for n in rollout for c, s in zip(n.claims, n.worked_s, strict=False)}
        states = (("episodes", "ready"), ("episodes", "claimed"), ("scored", "ready"))
        finished = {a.identity for spool, state in states for a in self.scan[spool][state]}
        held = {(a.owner, a.identity) for a in self.scan["requests"]["claimed"]} & clocks.keys()
        return {claim: clocks[owner, claim] for owner, claim in held if claim not in finished}

    @property
    def learner_step(self) -> int:
        """Return the steps that the learner has taken, as far as is known."""
        return max([self.newest.step, *(node.step for node in self.nodes if node.role == "learner")])

    @property
    def slots(self) -> int:
        """Return how many episodes all rollout workers together can run at once."""
        return sum(node.slots for node in self.nodes if node.role == "rollout")

    @property
    def depths(self) -> dict[str, dict[str, int]]:
        """Count messages by spool and state."""
        return {
            name: {state: len(messages) for state, messages in spool.items()}
            for name, spool in self.scan.items()
        }


@dataclass(frozen=True)
class Progress:
    """Report the state of the mode's work after an iteration."""

    waits_for: str
    """What the work waits for; empty when all is done."""
    step: int
    """The next batch."""
    recent: dict[str, list[float]]
    """The latest values of metrics, by name."""
    errors: list[str]
    """Messages for people."""
    kept_steps: Set[int] = frozenset()
    """Steps whose weights and checkpoints are not deleted."""
    awaits_learner: bool = False
    """Whether the learner has work: a batch that is published, or the last checkpoint."""


def awaited_learner(
    run: RunDir, snapshot: RunSnapshot, step: int, steps: int, recent: dict[str, list[float]]
) -> Progress:
    """Return the progress of work that only waits for the learner; it is done after the last checkpoint."""
    done = checkpoints.is_trained(run, snapshot.newest, steps)
    waits_for = "" if done else f"the learner: step {snapshot.learner_step} of {steps}"
    return Progress(waits_for, step, recent, [], awaits_learner=not done)
