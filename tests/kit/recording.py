"""A recorder before a toy engine that two endpoints of a run serve."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.base.records import (
    Endpoint,
    EndpointTable,
    Node,
    RolloutRequest,
    Sampling,
    Turn,
    WeightVersion,
    id_array,
)
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.config.settings import RolloutConfig
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.roles.rollout.openai_server import ServedRecorder
from hpc_swe.roles.rollout.sampler import PART, Sampler
from tests.kit.toy_engine import ToyEngine

V1 = WeightVersion(step=1)
REPLIES = [
    'Look.\n<tool_call>\n{"name": "view", "arguments": {"path": "m.py"}}\n</tool_call>',
    'Mend.\n<tool_call>\n{"name": "replace", "arguments": {"line": 3}}\n</tool_call>',
    "Done.",
    "Really done.",
]


@dataclass
class Stage:
    """A recorder, and the engine that it asks."""

    engine: ToyEngine
    recorder: ServedRecorder

    @property
    def builder(self) -> TokenBuilder:
        return self.engine.builder

    def control(self, ids: Sequence[int]) -> list[int]:
        """Return the control tokens among some."""
        known = set(self.builder.tokens.control.values())
        return [token for token in ids if token in known]


def serve(
    run: RunDir, updating: bool = False, newest: WeightVersion = V1, **engines: list[WeightVersion]
) -> None:
    found = [
        Endpoint(owner=name, url=f"http://{name}", versions=versions, updating=updating)
        for name, versions in engines.items()
    ]
    for name, versions in engines.items():
        node = Node(owner=name, role="inference", beat=1, host="h", pid=1, versions=versions)
        atomic.put(run.node(name), node)
    atomic.put(run.endpoints, EndpointTable(beat=1, endpoints=found, newest=newest))


def stage(
    run: RunDir,
    builder: TokenBuilder,
    *,
    replies: list[str] = REPLIES,
    answers: Sequence[list[int]] = (),
    sampling: Sampling | None = None,
    wait_s: float = 60.0,
    part: int = PART,
    split: str = "train",
    **config: object,
) -> Stage:
    """Let the engine give `replies`, or else `answers`, which are ids."""
    engine = ToyEngine(builder, replies, version=V1, answers=list(answers))
    request = RolloutRequest(
        split=split, group_id=0, index=0, task_id="t", seed=0, sampling=sampling or Sampling(max_tokens=200)
    )
    sampler = Sampler(engine, Endpoints(run, max_lag=1, fresh_s=0.0), "secret", wait_s, part=part)
    return Stage(engine, ServedRecorder(builder, sampler, request, RolloutConfig(**config)))


def exact(turns: list[Turn], engine: ToyEngine) -> list[Turn]:
    """Return turns that hold what the engine saw and sampled, to the token; undelivered ones too."""

    def prompt(turn: Turn) -> list[int]:
        before = None if turn.parent is None else turns[turn.parent]
        known = [*prompt(before), *before.completion.tolist()] if before else []
        return [*known, *id_array(turn.appended_ids).tolist()]

    recorded = [(prompt(turn), turn.completion.tolist()) for turn in turns]
    seen = [(call.prompt, call.answer.token_ids) for call in engine.calls if call.answer]
    assert sorted(recorded) == sorted(seen)
    return turns
