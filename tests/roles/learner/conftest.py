"""A tiny model, sequences to train on, and a run that nothing disturbed."""

from pathlib import Path

import pytest

from hpc_swe.base.records import MicroBatch
from hpc_swe.base.rundir import RunDir


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    from tests.kit.ranks import tiny

    return tiny.make_models(tmp_path_factory.mktemp("models"))["tied"]


@pytest.fixture(scope="session")
def sequences(model) -> list[MicroBatch]:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.kit.ranks import tiny

    return tiny.make_sequences(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))


@pytest.fixture(scope="session")
def whole(model, sequences, tmp_path_factory) -> RunDir:
    """A run that nothing disturbed."""
    from tests.kit.ranks import launcher, training

    run = training.make_run(tmp_path_factory.mktemp("whole"), sequences, training.STEPS)
    launcher.launch(2, "learn", str(run.root), str(model), str(training.STEPS), "1")
    return run
