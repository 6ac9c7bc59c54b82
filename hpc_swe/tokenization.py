"""Build the one TokenBuilder of a run, so that demonstrations and rollouts tokenize alike."""

from pathlib import Path

from hpc_swe.conversation import TokenBuilder
from hpc_swe.plugins.engines.base import Stopping
from hpc_swe.settings import RunConfig


def token_builder(config: RunConfig) -> TokenBuilder:
    """Build what turns messages into ids; raise ConfigError if tokenizer or chat template are unusable."""
    engine, rollout = config.engine, config.rollout
    stops = engine.stop_token_ids if isinstance(engine, Stopping) else ()
    return TokenBuilder(Path(config.model), rollout.tool_parser, rollout.template_arguments, stops)
