"""Check, before anything is submitted, that a run can use the engine that its configuration names."""

import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

from hpc_swe.errors import ConfigError, EngineError
from hpc_swe.plugins.engines.base import EngineInfo
from hpc_swe.settings import RunConfig

KEY = "VLLM_API_KEY"
"""The environment variable of `launch start` that holds the engine's key."""


def require_usable(config: RunConfig, key: str) -> None:
    """Raise ConfigError, with the remedies, unless the engine of `inference.url` can serve this run."""
    url = config.inference.url
    if _is_loopback(url) and not config.executor.is_here:
        raise ConfigError(
            f"inference.url = {url!r} is another machine for each job; write this host's name in place of it"
        )
    try:
        problem = _problem(config, config.engine.inspect(url, key))
    except EngineError as error:
        problem = str(error)
    if problem:
        ways = [f"give its key in {KEY}", "start it with the command that `python -m hpc_swe.engine` prints"]
        ways += ['set mode = "eval"'] if config.mode == "grpo" else []
        ways += ["leave inference.url (VLLM_URL) out for engines of our own"]
        raise ConfigError(f"inference.url = {url!r}: {problem}. Either {', or '.join(ways)}")


def _problem(config: RunConfig, info: EngineInfo) -> str:
    if not _is_same(info.model, Path(config.model)):
        return f"it serves another model, {info.model}, than model = {config.model!r}"
    if info.max_model_len < config.rollout.context:
        return f"it takes {info.max_model_len} tokens, less than rollout.context = {config.rollout.context}"
    if config.mode == "grpo" and not info.can_update:
        return "it has no routes that update its weights, so it could not sample the trained policy"
    return ""


def _is_same(served: str, model: Path) -> bool:
    """Compare folders where the served one is visible, else names: an engine may run in a container."""
    if Path(served).is_dir():
        return Path(served).samefile(model)
    return Path(served).name == model.resolve().name


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
