"""Our exceptions.

* HpcSweError
  x ConfigError       the person who wrote the TOML can mend it            exit 2
  x ProtocolError     the run folder breaks docs/protocol.md               exit 3
    + CorruptRecord     a published file does not decode, or its checksum differs
    + StaleRun          another protocol version wrote this run
    + LostRace          another process of the same role published first
  x StorageError      the shared file system refused: full, over quota, I/O error; back off, nothing is lost
  x SchedulerError    the scheduler does not answer; nothing was submitted    exit 6
  x NodeError         this node cannot do a role's work                       exit 7
  x DeadlineError     a wait ran out; the message says for what, and from whom
  x EpisodeError      one episode failed; recorded on it, never past the worker's loop
    + SandboxError      the container, not the model, is to blame  -> infra_error, retried
    + EngineError       no engine answered, or answered wrongly    -> infra_error, retried
      - NoAnswer          the engine is dead, or hangs: this says nothing of what it was asked
      - Overdue           the engine works, but one completion did not come in a very long time
    + AgentError        the agent program broke                    -> exit status error, unresolved

Anything else that escapes is a bug and ends the process; the protocol makes that cheap. But what escapes from
a grader, or from an episode whose policy has spoken, was chosen by the policy: it costs that episode alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class HpcSweError(Exception):
    """Base of every error we raise on purpose."""

    exit_code = 1


class ConfigError(HpcSweError):
    """The configuration cannot be used; the message says which key and what would be right."""

    exit_code = 2


class ProtocolError(HpcSweError):
    """The run folder is not as docs/protocol.md says."""

    exit_code = 3


class CorruptRecord(ProtocolError):
    """A published file does not decode as the record its folder holds."""


class StaleRun(ProtocolError):
    """The run was written under another protocol version."""


class LostRace(ProtocolError):
    """Another process published the same thing first; this one has nothing left to do."""


class StorageError(HpcSweError):
    """The file system cannot take or give data now."""

    exit_code = 4


class SchedulerError(HpcSweError):
    """The scheduler does not answer, so that nothing can be decided; the next tick tries again."""

    exit_code = 6


class NodeError(HpcSweError):
    """This node cannot do the work; another one may."""

    exit_code = 7


class DeadlineError(HpcSweError):
    """A wait ended without what it waited for."""

    exit_code = 5


class EpisodeError(HpcSweError):
    """One episode failed."""


class SandboxError(EpisodeError):
    """The container broke for a reason outside the policy's reach."""


class EngineError(EpisodeError):
    """The inference engine did not answer, or its answer cannot be trusted."""


class NoAnswer(EngineError):
    """The engine gave no answer: it is dead, unreachable, or hangs."""


class Overdue(EngineError):
    """The engine works, but did not answer one request in the time that its tokens may take."""


class AgentError(EpisodeError):
    """The agent program broke."""


@contextmanager
def boundary(kind: type[HpcSweError], doing: str) -> Iterator[None]:
    """Attribute plain OS and value errors of the block to `kind`; our own errors pass unchanged."""
    try:
        yield
    except HpcSweError:
        raise
    except (OSError, ValueError, LookupError) as error:
        raise kind(f"{doing}: {type(error).__name__}: {error}") from error
