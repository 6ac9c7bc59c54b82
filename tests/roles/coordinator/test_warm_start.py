"""A warm start shows the policy what its episodes will show: the prompt, and the tools."""

import itertools
from collections import Counter

import pytest

from hpc_swe.agents.loops.base import Reply
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.records import Sample, id_array
from hpc_swe.config import config as configuration
from hpc_swe.config.tokenization import token_builder
from hpc_swe.launch.trajectories import demonstrations
from tests.kit.checkout import ROOT
from tests.kit.toy_model import HERMES, make_model


@pytest.fixture
def read(tmp_path):
    model = make_model(tmp_path / "model", HERMES)
    files = [ROOT / "configs/demo.toml", ROOT / "configs/demo_sft.toml"]
    fixed = [f"model={model}", 'sandbox={type="process"}', "rollout.context=2000"]
    fixed += ["batches.microbatch_tokens=2000"]
    return lambda *words: configuration.read(*files, overrides=[*fixed, *words])


def warm_start(config: configuration.RunConfig) -> Sample:
    """The first sample."""
    (sample,) = itertools.islice(demonstrations(config, Counter()), 1)
    return sample


@pytest.mark.parametrize("shown", ["true", "false"])
@pytest.mark.parametrize("prompt", ["Fix the bug.", "Mend it with your tools.", ""])
def test_a_demonstration_begins_with_the_prompt_of_an_episode(read, tmp_path, shown, prompt):
    config = read(f"agent.show_tools={shown}", f'agent.system_prompt="{prompt}"', "agent.max_turns=1")
    builder, asked = token_builder(config), []

    def chat(messages, tools=""):
        asked.extend(builder.start(messages, tools))
        return Reply("")

    (task,) = itertools.islice(config.taskset.load("train"), 1)
    with Process().open(task) as sandbox:
        config.agent.solve(task, sandbox, chat)
    assert id_array(warm_start(config).token_ids)[: len(asked)].tolist() == asked
    assert ("rewrite" in builder.tokens.decode(asked)) is (shown == "true")
