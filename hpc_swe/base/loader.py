"""Load the plugins that a configuration names. A plugin is one frozen struct in one file.

Its fields are its TOML table, its methods do its work, and its file name is its ``type``:

    [advantage]
    type = "grpo"            # models/advantages/grpo.py, class Grpo
    scale_by_std = false     # field of that class

A plugin inherits the class of its family, whose methods say what it must do and what it may do:
``class Rloo(Plugin, Advantage, frozen=True, kw_only=True)``. One of your own may be in any importable module:
``type = "my_lab.advantages:Rloo"``. Importing a plugin file is cheap; heavy libraries are imported in the
method that needs them.
"""

import importlib
import pkgutil
import re
from abc import ABCMeta
from typing import Any, get_args, get_origin

import msgspec
from msgspec import Struct, StructMeta, ValidationError, convert
from msgspec.structs import asdict

from hpc_swe.base.cli import suggestion
from hpc_swe.base.errors import ConfigError

PACKAGES = {
    "advantages": "hpc_swe.models.advantages",
    "agents": "hpc_swe.agents.loops",
    "engines": "hpc_swe.models.engines",
    "executors": "hpc_swe.cluster.executors",
    "graders": "hpc_swe.tasks.graders",
    "policies": "hpc_swe.models.policies",
    "sandboxes": "hpc_swe.agents.sandboxes",
    "tasksets": "hpc_swe.tasks.sets",
    "tools": "hpc_swe.agents.tools",
}
"""Family -> its package: `base` has the class of the family, and each other public module a type."""
CLASSES = {
    "advantages": "Advantage",
    "agents": "Agent",
    "engines": "Engine",
    "executors": "Executor",
    "graders": "Grader",
    "policies": "Policy",
    "sandboxes": "Sandboxes",
    "tasksets": "Taskset",
    "tools": "Tool",
}
"""Family -> the class that its plugins inherit."""
TABLES = {"policies": "policy", "sandboxes": "sandbox", "tools": "agent.tools"}
"""Family -> its table in TOML, where that is not the family without its last letter."""


class _PluginMeta(StructMeta, ABCMeta):
    """Make classes that are structs and have abstract methods."""


class Plugin(Struct, metaclass=_PluginMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve as the base of every plugin, beside the class of its family."""


def load(family: str, table: dict[str, Any]) -> Any:
    """Build the plugin that a TOML table names.

    Raise ConfigError if the type is unknown or does not inherit the class of its family, or if a field is
    missing, misspelt or of the wrong type.
    """
    if not isinstance(table, dict) or not isinstance(table.get("type"), str):
        raise ConfigError(
            f"[{_table(family)}] must be a table with a type; known: {', '.join(known(family))}"
        )
    fields = dict(table)
    kind = fields.pop("type")
    module, _, name = kind.partition(":") if ":" in kind else (f"{PACKAGES[family]}.{kind}", "", "")
    try:
        plugin = getattr(importlib.import_module(module), name or kind.title().replace("_", ""))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"[{_table(family)}] {_why_not_loaded(family, kind, module, error)}") from None
    if problem := _not_of_family(family, plugin):
        raise ConfigError(f"[{_table(family)}] type = {kind!r}: {problem}")
    try:
        return convert(fields, plugin)
    except ValidationError as error:
        raise ConfigError(f"[{_table(family)}] type = {kind!r}: {error}{hint(plugin, error)}") from None


def _why_not_loaded(family: str, kind: str, module: str, error: ImportError | AttributeError) -> str:
    """Say why a type cannot be imported: there is none of this name, or it imports what is not there."""
    is_absent = isinstance(error, ModuleNotFoundError) and error.name and module.startswith(error.name)
    if is_absent or isinstance(error, AttributeError):
        return (
            f"has no type {kind!r}{suggestion(kind, known(family))}; known: {', '.join(known(family))}; "
            "for your own write type = 'package.module:Class'"
        )
    return f"type = {kind!r} cannot be imported: {error}; install what it needs, or mend its imports"


def _not_of_family(family: str, plugin: Any) -> str:
    """Say why a class cannot be a plugin of a family, and the remedy; an empty text if it can."""
    module, name = f"{PACKAGES[family]}.base", CLASSES[family]
    wanted = getattr(importlib.import_module(module), name)
    if not (isinstance(plugin, type) and issubclass(plugin, Plugin) and issubclass(plugin, wanted)):
        own = getattr(plugin, "__name__", "X")
        return (
            f"it must inherit Plugin of hpc_swe.base.loader and {name} of {module}: "
            f"class {own}(Plugin, {name}, frozen=True, kw_only=True)"
        )
    missing = ", ".join(sorted(plugin.__abstractmethods__))
    return f"it lacks what {name} of {module} demands: {missing}" if missing else ""


def hint(kind: Any, error: ValidationError) -> str:
    """Return the end of a message: what a wrong key or value of a type may be, where there are but some."""
    wrong = re.search(r"unknown field `(.+?)`|Invalid enum value '(.+?)'", str(error))
    place = re.search(r"`\$(.*)`", str(error))
    if not wrong:
        return ""
    for name in re.findall(r"\.(\w+)|\[.+?\]", place[1] if place else ""):
        fields = msgspec.structs.fields(kind) if name else ()
        items = get_args(kind)[:1] if get_origin(kind) is tuple else get_args(kind)[-1:]
        [kind] = [field.type for field in fields if field.name == name] or items
    if "at `key` in" in str(error):
        kind = get_args(kind)[0]
    known = kind.__struct_fields__ if wrong[1] else [str(value) for value in get_args(kind)]
    return f"{suggestion(wrong[1] or wrong[2], known)}; known: {', '.join(known) or 'none'}"


def dump(plugin: Plugin) -> dict[str, Any]:
    """Return the TOML table of a plugin, from which `load` builds the same one."""
    cls = type(plugin)
    package, _, name = cls.__module__.rpartition(".")
    kind = name if package in PACKAGES.values() else f"{cls.__module__}:{cls.__name__}"
    return {"type": kind} | asdict(plugin)


def known(family: str) -> list[str]:
    """List the types of a family that ship with hpc_swe."""
    package = importlib.import_module(PACKAGES[family])
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if name != "base" and not name.startswith("_"))


def _table(family: str) -> str:
    return TABLES.get(family, family.removesuffix("s"))
