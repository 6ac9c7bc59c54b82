"""Encode the demonstrations of a run's task set for a warm start.

The start encodes one, so that a run whose demonstrations cannot be shown to its policy is refused.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Sample
from hpc_swe.config.settings import RunConfig
from hpc_swe.config.tokenization import token_builder
from hpc_swe.roles.coordinator import sft


def samples(config: RunConfig, fates: Counter[str]) -> Iterator[Sample | None]:
    """Yield each demonstration as episodes will record it; None for one that is left out.

    Raise ConfigError when the task set has none, or when agent or chat template cannot show them.
    """
    preface, conversations = config.agent.preface, config.taskset.demonstrations(config.seed)
    if conversations is None:
        raise ConfigError(
            f"[taskset] {type(config.taskset).__name__} shows no demonstrations; set sft.trajectories"
        )
    if preface is None:
        raise ConfigError(
            f"[agent] {type(config.agent).__name__} does not say what its policy is shown; warm-start with "
            "files of sft.trajectories"
        )
    encode = partial(token_builder(config).demonstration, tools=preface.tools)
    shown = sft.with_system_prompt(conversations, preface)
    return sft.from_conversations(shown, encode, config.rollout.context, fates)


def check(config: RunConfig) -> None:
    """Raise ConfigError unless the first demonstration can be encoded."""
    next(samples(config, Counter()), None)
