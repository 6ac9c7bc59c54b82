"""The run configuration: TOML files merged left to right into one frozen tree, unknown keys refused.

People write TOML; `dump` writes the merged tree, defaults filled in, as the run's run.json, and jobs
read only that.
"""

import copy
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import ValidationError
from msgspec.structs import replace

from hpc_swe import plugins
from hpc_swe.cli import like
from hpc_swe.errors import ConfigError
from hpc_swe.plugins.advantages.base import Advantage
from hpc_swe.plugins.agents.base import Agent
from hpc_swe.plugins.engines.base import Engine
from hpc_swe.plugins.executors.base import Executor
from hpc_swe.plugins.graders.base import Grader
from hpc_swe.plugins.policies.base import Policy
from hpc_swe.plugins.sandboxes.base import Sandboxes
from hpc_swe.plugins.tasksets.base import Taskset
from hpc_swe.settings import RunConfig

FAMILIES: dict[Any, str] = {
    Advantage: "advantages",
    Agent: "agents",
    Engine: "engines",
    Executor: "executors",
    Grader: "graders",
    Policy: "policies",
    Sandboxes: "sandboxes",
    Taskset: "tasksets",
}
MAY_CHANGE = (
    *(
        "steps",
        "counts",
        "by_hand",
        "max_restarts",
        "executor",
        "inference",
        "reward",
        "coordinator",
        "lease",
    ),
    *("retention", "eval.every", "batches.microbatch_tokens", "policy.recompute", "policy.logprob_chunk"),
    *("learner.checkpoint_every", "learner.batch_wait_s", "learner.poll_s"),
    *("rollout.slots", "rollout.poll_s", "rollout.engine_wait_s", "rollout.episode_timeout_s"),
    *("engine.extra", "engine.environ", "engine.program", "engine.threads", "engine.enforce_eager"),
    *("engine.max_num_seqs", "engine.kv_cache_bytes", "engine.gpu_memory_share", "engine.update_timeout_s"),
)
"""Keys, and tables of keys, by which a run is operated: they may change in a run that exists, for the jobs
that start from then on. All else would change what is trained."""

_URL = re.compile(r"https?://[^/@?#\s]+(/[^@?#\s]+)?")


def read(*paths: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Merge TOML files left to right, then one-line TOML overrides; the last wins.

    Raises:
        ConfigError: A file is missing or no TOML, a key is unknown, a value is out of bounds, or two
            values do not go together; the message names the file and the key.
    """
    parts = [*((str(path), _parse(path)) for path in paths), *map(_parse_override, overrides)]
    tree: dict[str, Any] = {}
    for _, part in parts:
        _merge(tree, part)
    _drop_version(tree)
    return build(tree, " + ".join(map(str, paths)), parts)


def of_words(words: Sequence[str]) -> RunConfig:
    """`read`, as command lines have it: overrides are the words with an equals sign, files the others."""
    files = [Path(word) for word in words if "=" not in word]
    return read(*files, overrides=[word for word in words if "=" in word])


def build(tree: dict[str, Any], source: str, parts: Sequence[tuple[str, dict[str, Any]]] = ()) -> RunConfig:
    """The configuration that a merged tree describes, checked.

    Args:
        tree: The merged tree.
        source: Where it comes from, for messages.
        parts: What was merged, with the name of each, so that a message names the file that says the key.

    Raises:
        ConfigError: As `read`; a line for each fault.
    """
    lines = [f"{_said_by(key, parts) or source}: {fault}" for key, fault in _faults(tree)]
    if lines:
        raise ConfigError("\n".join(lines))
    config = msgspec.convert(tree, RunConfig, dec_hook=_plugin)
    complaints = _complaints(config)
    if complaints:
        raise ConfigError("\n".join(f"{source}: {complaint}" for complaint in complaints))
    return _with_schedule(config)


def dump(config: RunConfig) -> dict[str, Any]:
    """The tree that `build` turns into this configuration, every default written out."""
    return {
        name: msgspec.to_builtins(plugins.dump(value) if isinstance(value, plugins.Plugin) else value)
        for name, value in msgspec.structs.asdict(config).items()
    }


def toml(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """A merged tree as the lines of a TOML file, tables last."""
    tables = {name: value for name, value in tree.items() if isinstance(value, dict) and value}
    lines = [f"{_word(name)} = {_value(value)}" for name, value in tree.items() if name not in tables]
    for name, table in tables.items():
        path = f"{prefix}{_word(name)}"
        inside = toml(table, f"{path}.")
        lines += ["", *([f"[{path}]"] if inside[:1] != [""] else []), *inside[inside[:1] == [""] :]]
    return lines


def _word(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _value(key)


def _value(value: Any) -> str:
    """As TOML writes it: JSON does the same but for tables; texts of it are TOML's too."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_word(name)} = {_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


def changes(old: RunConfig, new: RunConfig, folder: Path) -> dict[str, str]:
    """Key -> what changed, as ``key: old -> new``; another spelling of the same file's path is no change.

    Args:
        old: What the run was made with.
        new: What it shall go on with.
        folder: Where relative paths of `old` begin; those of `new` begin here.
    """
    left, right = dict(_leaves(dump(old))), dict(_leaves(dump(new)))
    return {
        key: f"{key}: {left.get(key)!r} -> {right.get(key)!r}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and not _is_same_file(left.get(key), right.get(key), folder)
    }


def differences(old: RunConfig, new: RunConfig, folder: Path = Path()) -> list[str]:
    """The changes that a run which exists may not see: they would change what is trained."""
    return [change for key, change in changes(old, new, folder).items() if not may_change(key)]


def may_change(key: str) -> bool:
    """Whether a run that exists may see it changed."""
    return any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)


def respelled(old: RunConfig, new: RunConfig, folder: Path) -> RunConfig:
    """The new one, but with the old one's spelling of each path of the same file, which jobs resolve."""
    tree, left = dump(new), dict(_leaves(dump(old)))
    for key, value in _leaves(dump(new)):
        if left.get(key) != value and _is_same_file(left.get(key), value, folder):
            table: Any = tree
            *tables, name = key.split(".")
            for part in tables:
                table = table[part]
            table[name] = left[key]
    return build(tree, "")


def _is_same_file(old: Any, new: Any, folder: Path) -> bool:
    if not (isinstance(old, str) and isinstance(new, str) and old and new):
        return False
    with suppress(OSError, ValueError):
        return (folder / old).exists() and (folder / old).samefile(new)
    return False


def _with_schedule(config: RunConfig) -> RunConfig:
    """A decay without a length of its own ends with the run's steps. It is written out, so that a run that
    exists refuses other steps: they would bend the curve that its first half followed."""
    optimizer = config.learner.optimizer
    if config.mode == "eval" or optimizer.decay == "constant" or optimizer.decay_steps:
        return config
    optimizer = replace(optimizer, decay_steps=config.steps)
    return replace(config, learner=replace(config.learner, optimizer=optimizer))


def _complaints(config: RunConfig) -> list[str]:
    groups, learner, lease = config.groups, config.learner, config.lease
    optimizer = learner.optimizer
    rules = [
        (
            config.mode == "grpo" and not config.sampling.is_plain,
            "[sampling] training samples the plain distribution: temperature = 1, top_p = 1, top_k = 0, "
            "min_p = 0; put other settings under [eval.decodings]",
        ),
        (
            config.mode == "grpo" and groups.max_staleness < learner.export_every - 1,
            f"groups.max_staleness = {groups.max_staleness} never lets a batch be sampled while "
            f"learner.export_every = {learner.export_every}; it must be at least export_every - 1",
        ),
        (
            (config.mode, config.rollout.history, config.batches.train_chains)
            == ("grpo", "template", "main"),
            'rollout.history = "template" makes each turn its own chain; set batches.train_chains = "all"',
        ),
        (config.mode == "grpo" and groups.group_size < 2, "groups.group_size = 1 has no baseline; 2 has one"),
        (
            config.mode == "eval" and not config.eval.decodings,
            "[eval.decodings] is empty; add for example greedy = {temperature = 0.0}",
        ),
        (
            (config.mode == "sft") != (learner.loss.objective == "sft"),
            f"learner.loss.objective = {learner.loss.objective!r} does not go with mode = {config.mode!r}; "
            "the objective sft belongs to the mode sft, and only there",
        ),
        (
            config.mode != "eval"
            and optimizer.decay != "constant"
            and 0 < optimizer.decay_steps < config.steps,
            f"learner.optimizer.decay_steps = {optimizer.decay_steps} is under steps = {config.steps}: the "
            "learning rate would be 0 from there on; 0 is as many as the run has steps. A run that exists "
            "keeps its schedule: begin another one at its last weights",
        ),
        (
            config.rollout.context > config.batches.microbatch_tokens,
            f"batches.microbatch_tokens = {config.batches.microbatch_tokens} cannot hold an episode of "
            f"rollout.context = {config.rollout.context} tokens",
        ),
        (
            config.rollout.context > config.engine.max_model_len,
            f"rollout.context = {config.rollout.context} is over engine.max_model_len = "
            f"{config.engine.max_model_len}: a full context would count as the engine's failure",
        ),
        (
            bool(config.inference.url) and not _URL.fullmatch(config.inference.url),
            f"inference.url = {config.inference.url!r} must be http(s)://host:port, perhaps with a gateway's "
            "path; an engine's key goes into the environment variable VLLM_API_KEY",
        ),
        (
            config.agent.budget_s >= config.rollout.episode_timeout_s,
            f"rollout.episode_timeout_s = {config.rollout.episode_timeout_s} is not over the agent's budget, "
            f"{config.agent.budget_s} s: a policy that idles would count as a failure of the host",
        ),
        (lease.ttl_s < 2 * lease.beat_s, f"lease.ttl_s = {lease.ttl_s} is not twice lease.beat_s"),
    ]
    return [complaint for wrong, complaint in rules if wrong]


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _parse_override(line: str) -> tuple[str, dict[str, Any]]:
    key, _, value = line.partition("=")
    for text in (line, f'{key}="{value}"'):  # `model=runs/x` needs no quotes
        with suppress(tomllib.TOMLDecodeError):
            return f"override {line}", tomllib.loads(text)
    raise ConfigError(f"override {line!r}: write key=value, for example groups.group_size=8")


def _merge(tree: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        old = tree.get(key)
        # Another plugin keeps none of the first one's fields.
        if isinstance(value, dict) and isinstance(old, dict) and (old | value).get("type") == old.get("type"):
            _merge(old, value)
        else:
            tree[key] = value


def _drop_version(tree: dict[str, Any]) -> None:
    """Clients of OpenAI's are told http://host:port/v1; the routes of a whole engine start before that."""
    table = tree.get("inference")
    if isinstance(table, dict) and isinstance(table.get("url"), str):
        tree["inference"] = table | {"url": re.sub(r"(/v1)?/*$", "", table["url"])}


def _plugin(kind: type, table: Any) -> Any:
    return plugins.load(FAMILIES[kind], table)


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _faults(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys and what is wrong with them, table by table."""
    known = {field.name: field for field in msgspec.structs.fields(RunConfig)}
    for name in tree.keys() - known.keys():
        yield name, f"{name} is no key{like(name, known)}; known: {', '.join(known)}"
    for name, field in known.items():
        if name in tree:
            yield from _faults_of(name, copy.deepcopy(tree[name]), field.type)
        elif field.required:
            yield name, f"{name if field.type is str else f'[{name}]'} is missing, and has no default"


def _faults_of(name: str, value: Any, kind: Any) -> Iterator[tuple[str, str]]:
    """One fault after another: what is wrong is taken out, and the rest is looked at again."""
    while True:
        try:
            msgspec.convert(value, kind, dec_hook=_plugin)
        except ConfigError as error:
            field = re.search(r"unknown field `(\w+)`| - at `\$\.(\w+)", str(error))
            yield f"{name}.{field[1] or field[2] if field else 'type'}", str(error)
            return
        except ValidationError as error:
            text, _, place = str(error).partition(" - at `$")
            path = [name, *filter(None, place.rstrip("`").split("."))]
            unknown = re.fullmatch(r"Object contains unknown field `(.+)`", text)
            if unknown:
                fields = _fields(kind, path[1:])
                key = ".".join([*path, unknown[1]])
                yield key, f"{key} is no key{like(unknown[1], fields)}; known: {', '.join(fields)}"
                path.append(unknown[1])
            else:
                yield ".".join(path), f"{'.'.join(path)}: {text}"
            if not _taken_out(value, path[1:]):
                return
        else:
            return


def _taken_out(table: Any, path: Sequence[str]) -> bool:
    for name in path[:-1]:
        table = table.get(name) if isinstance(table, dict) else None
    return bool(path) and isinstance(table, dict) and table.pop(path[-1], None) is not None


def _fields(kind: Any, path: Sequence[str]) -> list[str]:
    """The keys of a table, which may be one within another."""
    for name in path:
        kind = kind.__annotations__.get(name, kind)
    return list(getattr(kind, "__struct_fields__", ()))


def _said_by(key: str, parts: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The last part that says a key, or the table that it is in."""
    path = key.split(".")
    for length in range(len(path), 0, -1):
        for source, tree in reversed(parts):
            table: Any = tree
            for name in path[:length]:
                table = table.get(name) if isinstance(table, dict) else None
            if table is not None:
                return str(source)
    return ""
