"""One attempt of the agent at a task, from the request to the record."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_swe.conversation import TokenBuilder
from hpc_swe.errors import AgentError, EngineError, HpcSweError, SandboxError
from hpc_swe.plugins import patch
from hpc_swe.plugins.agents.base import Agent, ContextFull, Result
from hpc_swe.plugins.sandboxes.base import Sandbox, Sandboxes
from hpc_swe.records import Episode, ExitStatus, RolloutRequest, Task, Timing
from hpc_swe.roles.rollout.recorder import Recorder
from hpc_swe.roles.rollout.sampler import Sampler
from hpc_swe.settings import RolloutConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutResources:
    """What all episodes of a process are made with."""

    tasks: Mapping[str, Task]
    sandboxes: Sandboxes
    agent: Agent
    builder: TokenBuilder
    sampler: Sampler
    config: RolloutConfig

    def recorder(self, request: RolloutRequest) -> Recorder:
        """A fresh recorder; its clock starts."""
        return Recorder(self.builder, self.sampler, request, self.config)


@dataclass
class Played:
    """How far an attempt came; the worker reads it from outside when the attempt hangs."""

    result: Result | None = None
    submission: str = ""
    sandbox_s: float = 0.0


def play(resources: RolloutResources, request: RolloutRequest, recorder: Recorder) -> Played:
    """Open a sandbox, let the agent work in it, take what it hands in.

    After the agent's first action the policy answers for its sandbox; only errors that name the host
    or the engine are infrastructure failures, and those of closing the sandbox come too late to matter.
    """
    outcome = Played()
    task = resources.tasks.get(request.task_id)
    if task is None:
        outcome.result = failed(f"task {request.task_id!r} is not in the run's tasks.parquet")
        return outcome
    started = time.monotonic()
    try:
        with resources.sandboxes.open(task) as sandbox:
            outcome.sandbox_s = time.monotonic() - started
            result = _solve(resources.agent, task, sandbox, recorder)
            outcome.submission = patch.take(task, sandbox, resources.sandboxes)
            outcome.result = result
            started = time.monotonic()
        outcome.sandbox_s += time.monotonic() - started
    except (SandboxError, EngineError) as error:
        log.warning("failed %s: %s", request.name, error)
        outcome.result = outcome.result or failed(str(error))
    except (HpcSweError, OSError, MemoryError):  # the run's configuration or the host
        raise
    except Exception as error:
        if not recorder.has_sampled:
            raise
        # What breaks our code was chosen by the policy then, and costs its episode alone.
        log.exception("broke on %s", request.name)
        told = f"the worker broke on it: {type(error).__name__}: {error}"[:1000]
        told = told.encode("utf-8", "replace").decode()
        outcome.result = outcome.result or Result(ExitStatus.AGENT_ERROR, recorder.messages, error=told)
    if recorder.failure is not None:
        # A program reports its model's errors as it likes, or not at all.
        outcome.result = failed(str(recorder.failure))
    return outcome


def failed(error: str) -> Result:
    """An infrastructure failure."""
    return Result(ExitStatus.INFRA_ERROR, [], error=error)


def record(request: RolloutRequest, recorder: Recorder, outcome: Played, worker: str) -> Episode:
    """The episode. From now on the recorder refuses whatever a leftover of the agent asks."""
    turns = recorder.close("the episode is over")
    result = outcome.result or failed("the episode did not end")
    is_infra = result.exit_status == ExitStatus.INFRA_ERROR
    return Episode(
        request=request,
        turns=turns,
        messages=result.messages or recorder.messages,
        exit_status=result.exit_status,
        submission="" if is_infra else outcome.submission,
        timing=Timing(
            sandbox_s=outcome.sandbox_s,
            engine_s=recorder.engine_s,
            tools_s=result.tools_s,
            total_s=recorder.total_s,
        ),
        worker=worker,
        error=result.error,
        counts=dict(recorder.counts),
        main=recorder.main,
    )


def _solve(agent: Agent, task: Task, sandbox: Sandbox, recorder: Recorder) -> Result:
    try:
        return agent.solve(task, sandbox, recorder)
    except ContextFull as error:
        return Result(ExitStatus.CONTEXT, recorder.messages, error=str(error))
    except AgentError as error:
        return Result(ExitStatus.AGENT_ERROR, recorder.messages, error=str(error))
