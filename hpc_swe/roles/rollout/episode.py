"""Run one attempt of the agent at a task, from the request to the record."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Thread

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.agents.loops.base import Agent, ContextFull, Result
from hpc_swe.agents.sandboxes.base import Sandbox, Sandboxes
from hpc_swe.base.errors import AgentError, EngineError, HpcSweError, SandboxError
from hpc_swe.base.records import Episode, ExitStatus, RolloutRequest, Task, Timing
from hpc_swe.config.settings import RolloutConfig
from hpc_swe.roles.rollout.openai_server import ServedRecorder
from hpc_swe.roles.rollout.sampler import Sampler
from hpc_swe.tasks import patch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutResources:
    """Hold what all episodes of a process share."""

    tasks: Mapping[str, Task]
    sandboxes: Sandboxes
    agent: Agent
    builder: TokenBuilder
    sampler: Sampler
    config: RolloutConfig
    opened_by: Callable[[Thread], int] = lambda _: 0
    """Counts the sandboxes that an episode, in a thread of its own, has opened or closed."""

    def recorder(self, request: RolloutRequest) -> ServedRecorder:
        """Make an episode's recorder, which starts the episode's clock."""
        return ServedRecorder(self.builder, self.sampler, request, self.config)


@dataclass
class Played:
    """Collect the results of an attempt."""

    result: Result | None = None
    patch: str = ""
    """The diff that the agent left in its sandbox."""
    sandbox_s: float = 0.0
    """Seconds in which the sandbox was opened and closed."""


def play(resources: RolloutResources, request: RolloutRequest, recorder: ServedRecorder) -> Played:
    """Open a sandbox, let the agent work in it and take its patch.

    After the agent's first action the policy is responsible for its sandbox: only errors that name the host
    or the engine are infrastructure failures, and errors of closing the sandbox come too late to matter.
    """
    played = Played()
    task = resources.tasks.get(request.task_id)
    if task is None:
        played.result = failed(f"task {request.task_id!r} is not in the run's tasks.parquet")
        return played
    started = time.monotonic()
    try:
        with resources.sandboxes.open(task) as sandbox:
            played.sandbox_s = time.monotonic() - started
            result = _solve(resources.agent, task, sandbox, recorder)
            played.patch = patch.take(task, sandbox, resources.sandboxes)
            played.result = result
            started = time.monotonic()
        played.sandbox_s += time.monotonic() - started
    except (SandboxError, EngineError) as error:
        log.warning("failed %s: %s", request.name, error)
        played.result = played.result or failed(str(error))
    except (HpcSweError, OSError, MemoryError):  # the run's configuration or the host is at fault
        raise
    except Exception as error:
        if not recorder.has_sampled:
            raise
        # The policy chose the input that broke our code, so it costs this episode alone.
        log.exception("broke on %s", request.name)
        message = f"the worker broke on it: {type(error).__name__}: {error}"[:1000]
        message = message.encode("utf-8", "replace").decode()
        played.result = played.result or Result(ExitStatus.AGENT_ERROR, recorder.messages, error=message)
    if recorder.failure is not None:
        # Agent programs report errors of their model in their own ways, or not at all.
        played.result = failed(str(recorder.failure))
    return played


def failed(error: str) -> Result:
    """Make the result of an infrastructure failure."""
    return Result(ExitStatus.INFRA_ERROR, [], error=error)


def record(request: RolloutRequest, recorder: ServedRecorder, played: Played, worker: str) -> Episode:
    """Make the episode's record and close the recorder, which then refuses requests of a leftover agent."""
    turns = recorder.close("the episode is over")
    result = played.result or failed("the episode did not end")
    is_infra = result.exit_status == ExitStatus.INFRA_ERROR
    return Episode(
        request=request,
        turns=turns,
        messages=result.messages or recorder.messages,
        exit_status=result.exit_status,
        submission="" if is_infra else played.patch,
        timing=Timing(
            sandbox_s=played.sandbox_s,
            engine_s=recorder.engine_s,
            tools_s=result.tools_s,
            total_s=recorder.total_s,
            stages=recorder.stages,
        ),
        worker=worker,
        error=result.error,
        counts=dict(recorder.counts),
        main=recorder.main,
    )


def _solve(agent: Agent, task: Task, sandbox: Sandbox, recorder: ServedRecorder) -> Result:
    try:
        return agent.solve(task, sandbox, recorder)
    except ContextFull as error:
        return Result(ExitStatus.CONTEXT, recorder.messages, error=str(error))
    except AgentError as error:
        return Result(ExitStatus.AGENT_ERROR, recorder.messages, error=str(error))
