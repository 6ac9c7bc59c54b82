"""Recorders on every form of template."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from hpc_swe.conversation import TokenBuilder
from hpc_swe.plugins.engines.base import Completion
from hpc_swe.records import Endpoint, EndpointTable, RolloutRequest, Sampling, WeightVersion
from hpc_swe.roles.rollout.endpoints import Endpoints
from hpc_swe.roles.rollout.openai_server import ServedRecorder
from hpc_swe.roles.rollout.recorder import Recorder
from hpc_swe.roles.rollout.sampler import Sampler
from hpc_swe.rundir import RunDir
from hpc_swe.settings import RolloutConfig
from hpc_swe.store import atomic
from tests.kit.forms import FORMS, Part, form
from tests.kit.toy_engine import Call, ToyEngine

V1 = WeightVersion(step=1)


@dataclass
class Fixed(ToyEngine):
    """Says the very ids it is given, one answer a call."""

    answers: list[list[int]] = field(default_factory=list)

    def _answer(self, call: Call) -> Completion:
        ids = self.answers[len(self.calls) - 1]
        finish = "stop" if ids and ids[-1] == self.builder.end_id else "length"
        logprobs = [-(1 + index % 7) / 8 for index in range(len(ids))]
        return Completion(ids, logprobs, finish, [(0, len(ids), V1)] if ids else [])


@dataclass
class Stage:
    """A recorder before an engine that says what it is given."""

    builder: TokenBuilder
    engine: Fixed
    recorder: Recorder

    def control(self, ids: Sequence[int]) -> list[int]:
        """The control tokens among some."""
        known = set(self.builder.tokens.control.values())
        return [token for token in ids if token in known]


@pytest.fixture(scope="session")
def builders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenBuilder]:
    root = tmp_path_factory.mktemp("forms")
    return {kind: form(kind, root) for kind in FORMS}


@pytest.fixture(scope="session")
def stage(builders: dict[str, TokenBuilder], tmp_path_factory: pytest.TempPathFactory):
    """Makes a recorder for replies: ids as they are, or parts, which get the end of their turn."""
    run = RunDir(tmp_path_factory.mktemp("run") / "run")
    run.make()
    endpoint = Endpoint(owner="a", url="http://a", versions=[V1], updating=False)
    atomic.put(run.endpoints, EndpointTable(beat=1, endpoints=[endpoint], newest=V1))
    endpoints = Endpoints(run, max_lag=0)

    def make(kind: str, replies: Sequence[list[int] | list[Part]]) -> Stage:
        builder = builders[kind]
        answers = [
            [*builder.tokens.encode_parts(reply), builder.end_id]
            if reply and isinstance(reply[0], tuple)
            else list(reply)
            for reply in replies
        ]
        engine = Fixed(builder, [], answers=answers)
        request = RolloutRequest(
            group_id=0, index=0, task_id="t", seed=0, sampling=Sampling(max_tokens=100_000)
        )
        sampler = Sampler(engine, endpoints, "secret", 5.0, part=100_000)  # one answer a call
        return Stage(builder, engine, ServedRecorder(builder, sampler, request, RolloutConfig(context=10**6)))

    return make
