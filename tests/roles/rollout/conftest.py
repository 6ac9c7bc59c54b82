"""Recorders on every form of template."""

from collections.abc import Sequence

import pytest

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.base.records import Sampling
from hpc_swe.base.rundir import RunDir
from tests.kit import recording
from tests.kit.forms import FORMS, Part, form
from tests.kit.recording import V1, Stage, serve
from tests.kit.toy_model import HERMES, make_model


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> TokenBuilder:
    return TokenBuilder(make_model(tmp_path_factory.mktemp("model"), HERMES))


@pytest.fixture
def run(run: RunDir) -> RunDir:
    serve(run, a=[V1], b=[V1])
    return run


@pytest.fixture(scope="session")
def builders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenBuilder]:
    root = tmp_path_factory.mktemp("forms")
    return {kind: form(kind, root) for kind in FORMS}


@pytest.fixture(scope="session")
def stage(builders: dict[str, TokenBuilder], tmp_path_factory: pytest.TempPathFactory):
    """Makes a recorder for replies: ids as they are, or parts, which get the end of their turn."""
    run = RunDir(tmp_path_factory.mktemp("run") / "run")
    run.make()
    serve(run, a=[V1])

    def make(kind: str, replies: Sequence[list[int] | list[Part]]) -> Stage:
        builder = builders[kind]
        answers = [
            [*builder.tokens.encode_parts(reply), builder.end_id]
            if reply and isinstance(reply[0], tuple)
            else list(reply)
            for reply in replies
        ]
        most = Sampling(max_tokens=100_000)
        whole = {"part": most.max_tokens, "context": 10**6}  # one answer a call
        return recording.stage(run, builder, answers=answers, sampling=most, wait_s=5.0, **whole)

    return make
