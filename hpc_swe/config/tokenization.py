"""Build the one TokenBuilder of a run, so that demonstrations and rollouts tokenize alike."""

from pathlib import Path

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.base.errors import ConfigError
from hpc_swe.config.settings import RunConfig
from hpc_swe.models.model_shape import read_config


def token_builder(config: RunConfig) -> TokenBuilder:
    """Build what turns messages into ids; raise ConfigError if tokenizer or chat template are unusable."""
    model, rollout, stops = Path(config.model), config.rollout, config.engine.stop_token_ids
    builder = TokenBuilder(model, rollout.tool_parser, rollout.template_arguments, stops)
    _require_rows(model, builder.largest_id)
    return builder


def _require_rows(model: Path, largest: int) -> None:
    """Raise ConfigError unless the model's embedding has a row for every id that conversations may have."""
    if not (model / "config.json").is_file():
        return
    rows = read_config(model).get("vocab_size")  # some families have it elsewhere
    if isinstance(rows, int) and rows <= largest:
        raise ConfigError(
            f"{model / 'tokenizer.json'} makes ids up to {largest}, but config.json says vocab_size = {rows}"
            "; take the tokenizer that came with these weights"
        )
