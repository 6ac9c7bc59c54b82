"""Roles, jobs and GPUs that follow from a configuration."""

from pathlib import Path

import msgspec
import pytest

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.rundir import RunDir
from hpc_swe.config import config as configuration
from hpc_swe.config import job_counts
from hpc_swe.models.engines.base import Engine
from hpc_swe.models.engines.vllm import Vllm
from jobs import run as jobs_run
from tests.kit.checkout import ROOT

HYBRID = [ROOT / "configs/demo.toml", ROOT / "configs/demo_hybrid.toml"]


def read(*words: str):
    return configuration.read(*HYBRID, overrides=words)


def test_engines_of_a_hybrid_run_are_in_the_learner_s_job_alone(tmp_path):
    config = read("counts.inference=2", "policy.tensor_parallel=1", "engine.device=cpu", "policy.device=cpu")
    assert job_counts.desired(config)["inference"] == 0
    found = jobs_run.commands(RunDir(tmp_path), "learner", config)
    assert [Path(words[0]).name for words in found] == [Path(found[0][0]).name, "env", "env"]
    assert [words[-2] for words in found] == ["jobs.learner", "jobs.inference", "jobs.inference"]
    assert [
        len(jobs_run.commands(RunDir(tmp_path), role, config)) for role in ("coordinator", "rollout")
    ] == [1, 1]


def test_a_hybrid_job_has_gpus_for_its_engines_and_for_its_ranks():
    assert job_counts.gpus("learner", read("engine.tensor_parallel=2", "counts.inference=2")) == 4
    assert job_counts.gpus("learner", read("policy.tensor_parallel=8")) == 8


class Unsized(Vllm, frozen=True, kw_only=True):
    """An engine of one's own that does not say how many GPUs it needs."""

    gpus = Engine.gpus


def test_an_engine_of_unknown_size_sees_all_gpus_of_its_job(tmp_path):
    config = msgspec.structs.replace(read("policy.device=cpu"), engine=Unsized())
    assert job_counts.gpus("learner", config) is None
    engine = jobs_run.commands(RunDir(tmp_path), "learner", config)[-1]
    assert engine[-2] == "jobs.inference"
    assert "env" not in engine


def test_a_hybrid_run_needs_engines_of_its_own_that_can_sleep():
    with pytest.raises(ConfigError, match="hybrid = true .* leave inference.url empty"):
        read("inference.url=http://host:8000")
