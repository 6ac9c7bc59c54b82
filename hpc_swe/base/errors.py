"""Define the exceptions that hpc_swe raises on purpose, and the exit code of a command that ends by each.

Any other exception is a bug and ends the process; the protocol makes that cheap. But an exception from a
grader, or from an episode whose policy has already replied, may be the policy's choice: it costs only that
episode.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

FULL = "free space there, or name another folder"
OTHER = "name another path"
FOREIGN = "name a folder of your own; `ls -ld` shows whose it is"
REMEDIES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EFBIG: "raise `ulimit -f`, or name another folder",
    errno.EROFS: "name a folder that can be written",
    errno.EACCES: FOREIGN,
    errno.EPERM: FOREIGN,
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP), OTHER),
}
"""Errors of the file system that the person who calls can mend."""


def remedy(error: Exception) -> str:
    """Return what mends an error of the file system, with a semicolon before it; "" for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    known = REMEDIES.get(number, OTHER if number == errno.ENOENT else "") if number else ""
    return f"; {known}" if known else ""


class HpcSweError(Exception):
    """Every error that hpc_swe raises on purpose is one of these; a command prints it as one line."""

    exit_code = 1


class ConfigError(HpcSweError):
    """The author of the TOML file can correct this; the message names the key and a right value."""

    exit_code = 2


class ProtocolError(HpcSweError):
    """The run folder does not follow docs/protocol.md."""

    exit_code = 3


class CorruptRecord(ProtocolError):
    """A published file does not decode as the record its folder holds, or its checksum differs."""


class StaleRun(ProtocolError):
    """The run was written under another protocol version, or with keys that are gone."""


class LostRace(ProtocolError):
    """Another process of the same role published first; this process has nothing left to do."""


class StuckRun(HpcSweError):
    """A part of the run made no progress after all its restarts; a further restart does not help."""

    exit_code = 3


class StorageError(HpcSweError):
    """The file system fails, is full or over quota; retry later, nothing is lost."""

    exit_code = 4


class SchedulerError(HpcSweError):
    """The scheduler does not answer, so nothing was submitted; the next tick tries again."""

    exit_code = 6


class NodeError(HpcSweError):
    """This node cannot do the role's work; another one may."""

    exit_code = 7


class DeadlineError(HpcSweError):
    """A wait timed out; the message says what was awaited, and from whom."""

    exit_code = 5


class EpisodeError(HpcSweError):
    """An episode has failed; the worker records that and continues."""


class SandboxError(EpisodeError):
    """The container failed for a reason that the policy cannot cause: infra_error, retried."""


class EngineError(EpisodeError):
    """The inference engine did not answer, or its answer is invalid: infra_error, retried."""


class NoAnswer(EngineError):
    """The engine is dead, is unreachable, or hangs, whatever it was asked."""


class Overdue(EngineError):
    """The engine works, but did not answer one request in the time that its queue and its tokens may take."""


class AgentError(EpisodeError):
    """The agent program has failed, which is the policy's own work: exit status agent_error, unresolved."""


@contextmanager
def boundary(kind: type[HpcSweError], doing: str) -> Iterator[None]:
    """Raise plain OS, value and lookup errors of the block as `kind`; our own errors pass unchanged.

    What ends a command, and no episode, says the remedy.
    """
    try:
        yield
    except (OSError, ValueError, LookupError) as error:
        after = "" if issubclass(kind, EpisodeError) else remedy(error)
        raise kind(f"{doing}: {type(error).__name__}: {error}{after}") from error
