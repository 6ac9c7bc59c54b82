"""Merge TOML files left to right into one frozen RunConfig, and refuse unknown keys and wrong values.

People write TOML. `dump` returns the merged tree with every default filled in; a run keeps it as run.json,
and its jobs read only that.
"""

import copy
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import ValidationError

from hpc_swe.base import loader, shipped
from hpc_swe.base.cli import nearest, suggestion
from hpc_swe.base.errors import ConfigError, remedy
from hpc_swe.config import conflicts
from hpc_swe.config.removed import REMOVED
from hpc_swe.config.settings import RunConfig

LONGEST = 2**17
"""Characters of a TOML file; a longer one was named by mistake."""
FOREIGN_BYTES = re.compile("[\ud800-\udfff]")
"""What Python reads for bytes of a name that are not UTF-8; no record can hold it."""
_TYPES = [field.type for field in msgspec.structs.fields(RunConfig)]
_INTERFACES = {f"{package}.base": family for family, package in loader.PACKAGES.items()}
FAMILIES: dict[Any, str] = {
    kind: _INTERFACES[kind.__module__] for kind in _TYPES if kind.__module__ in _INTERFACES
}
"""Type of a key of a run -> the family of plugins, in whose package the type is defined."""
MAY_CHANGE = (
    *("steps", "counts", "max_restarts", "poll_s", "executor", "inference", "reward"),
    *("share", "tracker", "lease", "supervision", "retention", "stop", "batches.microbatch_tokens"),
    *("eval.every", "eval.patience"),
    *("policy.recompute", "policy.delta_base", "policy.offload_optimizer"),
    *("policy.tensor_parallel", "policy.pipeline_parallel", "policy.context_parallel"),
    "policy.expert_parallel",
    *("learner.checkpoint_every", "learner.checkpoint_s", "learner.snapshot_every"),
    "learner.data_parallel",
    *("rollout.slots", "rollout.episode_timeout_s"),
    *("engine.extra", "engine.environ", "engine.program"),
    *("engine.max_num_seqs", "engine.kv_cache_bytes", "engine.gpu_memory_share", "engine.load_timeout_s"),
)
"""Keys and tables that may change in an existing run, for the jobs that start afterwards: they say how it is
operated. Every other key would change what is trained."""


def read(
    *paths: Path, overrides: Sequence[str] = (), base: RunConfig | None = None, base_source: str = ""
) -> RunConfig:
    """Merge TOML files left to right, over a `base` if there is one, then one-line TOML overrides.

    Messages name the base as `base_source`, the file that it came from.

    Raise ConfigError, with the file and the key, if a file is missing or is not TOML, a key is unknown, a
    value is out of bounds, or two values contradict each other.
    """
    parts = [*((str(path), _parse(path)) for path in paths), *map(parse_override, overrides)]
    tree = dump(base) if base else {}
    for _, part in parts:
        _merge(tree, part)
    table = tree.get("inference")
    if isinstance(table, dict) and isinstance(table.get("url"), str):
        # OpenAI clients need a trailing /v1, which other routes of an engine lack
        tree["inference"] = table | {"url": re.sub(r"(/v1)?/*$", "", table["url"])}
    sources = [*([base_source] if base else []), *map(str, paths)]
    return build(tree, " + ".join(sources), parts)


def from_words(words: Sequence[str], base: RunConfig | None = None, base_source: str = "") -> RunConfig:
    """Read the configuration that a command line names: words with `=` override, others are files."""
    if not all(word.strip() for word in words):
        raise ConfigError("a name of a TOML file is empty; is a shell variable unset?")
    files = [Path(word) for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    return read(*files, overrides=overrides, base=base, base_source=base_source)


def build(tree: dict[str, Any], source: str, parts: Sequence[tuple[str, dict[str, Any]]] = ()) -> RunConfig:
    """Build the configuration that a merged tree describes; raise ConfigError with one line for each fault.

    Messages name the file that sets a key, from the name and content of all `parts`, or else the `source`.
    """
    lines = [f"{_source_of(key, parts) or source}: {fault}" for key, fault in _faults(tree)]
    if lines:
        raise ConfigError("\n".join(lines))
    config = msgspec.convert(tree, RunConfig, dec_hook=_plugin)
    found = [f"{source}: {message}" for message in conflicts.of_keys(config)]
    if found:
        raise ConfigError("\n".join(found))
    return config


def dump(config: RunConfig) -> dict[str, Any]:
    """Return the tree that `build` turns into this configuration, with every default written out."""
    return {
        name: msgspec.to_builtins(loader.dump(value) if isinstance(value, loader.Plugin) else value)
        for name, value in msgspec.structs.asdict(config).items()
    }


def toml(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the lines of a TOML file that holds a merged tree, tables last."""
    tables = {name: value for name, value in tree.items() if isinstance(value, dict) and value}
    lines = [f"{_key(name)} = {_value(value)}" for name, value in tree.items() if name not in tables]
    for name, table in tables.items():
        path = f"{prefix}{_key(name)}"
        inside = toml(table, f"{path}.")
        lines += ["", *([f"[{path}]"] if inside[:1] != [""] else []), *inside[inside[:1] == [""] :]]
    return lines


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _value(key)


def _value(value: Any) -> str:
    """Format a value as TOML, which writes everything but tables as JSON does."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


def changes(old: RunConfig, new: RunConfig, folder: Path) -> dict[str, str]:
    """Return key -> ``key: old -> new`` for every changed key; two paths of the same file count as equal.

    Relative paths of `old` start in `folder`, those of `new` in the current folder.
    """
    before, after = dict(_leaves(dump(old))), dict(_leaves(dump(new)))
    both = [(key, before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())]
    changed = [each for each in both if each[1] != each[2] and not _is_same_file(*each[1:], folder)]
    return {key: f"{key}: {was!r} -> {now!r}" for key, was, now in changed}


def forbidden_changes(old: RunConfig, new: RunConfig, folder: Path = Path()) -> list[str]:
    """Return the changes that an existing run must refuse, because they would change what is trained."""
    found = changes(old, new, folder).items()
    decays = old.mode != "eval" and old.learner.optimizer.decay_share > 0
    return [change for key, change in found if not may_change(key) or (decays and key == "steps")]


def changed_by_hand(made: Mapping[str, Any], tree: Mapping[str, Any]) -> list[str]:
    """Return the changes of a run's tree since it was made that no start would have accepted.

    The model may have been moved to another folder.
    """
    before, after = dict(_leaves(made)), dict(_leaves(tree))
    fixed = [key for key in sorted(before) if not may_change(key) and key != "model"]
    fixed += ["steps"] if before.get("mode") != "eval" and before.get("learner.optimizer.decay_share") else []
    return [f"{key}: {before[key]!r} -> {after.get(key)!r}" for key in fixed if after.get(key) != before[key]]


def removed_keys(tree: Mapping[str, Any]) -> list[str]:
    """Return the keys of a merged tree that 0.2 has removed; a class of one's own may have them."""
    found = [key for key in REMOVED if at(tree, key.split(".")) is not None]
    return [key for key in found if ":" not in str(at(tree, (key.partition(".")[0], "type")))]


def may_change(key: str) -> bool:
    """Return whether a key may change in an existing run."""
    return any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)


def keep_paths(old: RunConfig, new: RunConfig, folder: Path) -> RunConfig:
    """Return `new`, with each path spelt as in `old` where both name the same file: jobs can resolve that."""
    tree, before = dump(new), dict(_leaves(dump(old)))
    for key, value in _leaves(dump(new)):
        if before.get(key) != value and _is_same_file(before.get(key), value, folder):
            *tables, name = key.split(".")
            at(tree, tables)[name] = before[key]
    return build(tree, "")


def without_later_keys(new: Any, written: Any, known: Any, place: str = "") -> Any:
    """Return the tree `new` without the keys that are later than the release which has `written` a run's.

    A release writes all of its keys; `known` is what it wrote, with the defaults of later ones. Raise
    ConfigError when such a key has another value.
    """
    tables = (new, written, known)
    if (
        not all(isinstance(table, dict) for table in tables)
        or len({table.get("type") for table in tables}) > 1
    ):
        return new
    kept = {}
    for key, value in new.items():
        if key in written or key not in known:
            kept[key] = without_later_keys(value, written.get(key), known.get(key), f"{place}{key}.")
        elif value != known[key]:
            raise ConfigError(
                f"{place}{key} is a key that the run's own code does not have; add --upgrade to continue "
                "with this code, or leave the key out"
            )
    return kept


def _is_same_file(old: Any, new: Any, folder: Path) -> bool:
    if not (isinstance(old, str) and isinstance(new, str) and old and new):
        return False
    with suppress(OSError, ValueError):
        return (folder / old).exists() and (folder / old).samefile(new)
    return False


def _parse(path: Path) -> dict[str, Any]:
    try:
        with shipped.config(path).open(encoding="utf-8-sig") as file:  # editors may write a byte order mark
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise ConfigError(f"{path}: longer than {LONGEST:,} characters; name a configuration")
        return tomllib.loads(text)
    except FileNotFoundError:
        where = "" if path.is_absolute() else f" in {Path.cwd()}; call the command in the folder that has it"
        known = shipped.configs()
        near = nearest(path.stem.lower(), known)
        hint = f"; did you mean {known[near]}?" if near else where
        raise ConfigError(f"{path}: there is no such file{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder, not a TOML file; name a run's folder by --run") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}; save it as UTF-8") from None
    except (OSError, ValueError, RecursionError) as error:  # tomllib raises the last two for endless values
        raise ConfigError(f"{path}: {error}{remedy(error)}") from None


def parse_override(line: str) -> tuple[str, dict[str, Any]]:
    """Return the source that messages name and the tree that `key=value` sets; raise ConfigError for less."""
    key, _, value = line.partition("=")
    if not value.strip():
        why = "the value is empty (is a shell variable unset?); an empty text is written"
        raise ConfigError(f"override {line!r}: {why} {key.strip()}='\"\"'")
    for text in (line, f'{key}="{value}"'):  # `model=runs/x` needs no quotes
        with suppress(ValueError, RecursionError):
            return f"override {line}", tomllib.loads(text)
    raise ConfigError(f"override {line!r}: write key=value, for example groups.group_size=8")


def _merge(tree: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        old = tree.get(key)
        # Another type of plugin keeps no fields of the first one.
        if isinstance(value, dict) and isinstance(old, dict) and (old | value).get("type") == old.get("type"):
            _merge(old, value)
        else:
            tree[key] = value


def _plugin(kind: type, table: Any) -> Any:
    return loader.load(FAMILIES[kind], table)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _faults(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each wrong key with what is wrong, table by table."""
    tree = copy.deepcopy(tree)
    for key in removed_keys(tree):
        yield key, f"{key} was removed in 0.2: {REMOVED[key]}; leave the key out"
        path = key.split(".")
        _remove(tree, path)
        if not tree.get(path[0], path):  # as [coordinator], which has lost all of its keys
            del tree[path[0]]
    misfits = [(key, _misfit(value)) for key, value in _leaves(tree)]
    yield from ((key, f"{key}: {fault}") for key, fault in misfits if fault)
    known = {field.name: field for field in msgspec.structs.fields(RunConfig)}
    for name in tree.keys() - known.keys():
        hint = _elsewhere(name) or suggestion(name, known)
        yield name, f"unknown key {name}{hint}; known: {', '.join(known)}"
    for name, field in known.items():
        if name in tree:
            yield from _faults_of(name, tree[name], field.type)
        elif field.required:
            yield name, f"{name if field.type is str else f'[{name}]'} is missing and has no default"


def _misfit(value: Any) -> str:
    """Say which part of a value run.json could not hold; empty when it can hold all."""
    if isinstance(value, list | dict):
        parts = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(_misfit, parts)), "")
    if isinstance(value, str) and FOREIGN_BYTES.search(value):
        return f"{value!a}: the name is not UTF-8, as records are; rename it"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "the number does not fit in 64 bits"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number"
    return ""


def _faults_of(name: str, value: Any, kind: Any) -> Iterator[tuple[str, str]]:
    """Yield every fault of one table: remove the first wrong key, then check the rest again."""
    while True:
        try:
            msgspec.convert(value, kind, dec_hook=_plugin)
        except ConfigError as error:
            marks = (r"`\$\.(\w+)", r"unknown field `(\w+)`", rf"^\[{name}\.(\w+)\]")
            field = next(filter(None, (re.search(mark, str(error)) for mark in marks)), None)
            yield f"{name}.{field[1] if field else 'type'}", str(error)
            return
        except ValidationError as error:
            text, _, place = str(error).partition(" - at `$")
            key, path = f"{name}{place.rstrip('`')}", re.findall(r"\.(\w+)", place.partition("[")[0])
            unknown = re.fullmatch(r"Object contains unknown field `(.+)`", text)
            fault = f"unknown key {key}.{unknown[1]}" if unknown else f"{key}: {text}"
            path += [unknown[1]] if unknown and "[" not in place else []
            hint = loader.hint(kind, error)
            other = _elsewhere(unknown[1]) if unknown and "did you mean" not in hint else ""
            yield ".".join([name, *path]), f"{fault}{other}{hint}"
            if "[" in place or not _remove(value, path):
                return
        else:
            return


def _elsewhere(name: str) -> str:
    """Suggest the keys of this name that lie in other tables; empty when there are none."""
    found = [path for path in _paths(RunConfig) if path.endswith(f".{name.replace('-', '_')}")]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _paths(kind: Any, prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        yield f"{prefix}{field.name}"
        if hasattr(field.type, "__struct_fields__"):
            yield from _paths(field.type, f"{prefix}{field.name}.")


def at(tree: Any, path: Sequence[str]) -> Any:
    """Return what nested tables hold at a path; None where they hold nothing."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _remove(table: Any, path: Sequence[str]) -> bool:
    """Remove a key from nested tables; tell whether it was there."""
    table = at(table, path[:-1])
    return bool(path) and isinstance(table, dict) and table.pop(path[-1], None) is not None


def _source_of(key: str, parts: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return the name of the last part that sets a key, or else its table; empty when none does."""
    path = key.split(".")
    for length in range(len(path), 0, -1):
        for source, tree in reversed(parts):
            if at(tree, path[:length]) is not None:
                return str(source)
    return ""
