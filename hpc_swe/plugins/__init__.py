"""Load the plugins that a configuration names. A plugin is one frozen struct in one file.

Its fields are its TOML table, its methods do its work, and its file name is its ``type``:

    [advantage]
    type = "grpo"            # plugins/advantages/grpo.py, class Grpo
    scale_by_std = false     # field of that class

A plugin of your own may be in any importable module: ``type = "my_lab.advantages:Rloo"``. Importing a plugin
file is cheap; heavy libraries are imported in the method that needs them.
"""

import importlib
import pkgutil
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict

from hpc_swe.cli import suggestion
from hpc_swe.errors import ConfigError

TABLES = {"policies": "policy", "sandboxes": "sandbox", "tools": "agent.tools"}
"""Family -> its table in TOML, where that is not the family without its last letter."""


class Plugin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve as the base of every plugin."""


def load(family: str, table: dict[str, Any]) -> Any:
    """Build the plugin that a TOML table names.

    Raise ConfigError if the type is unknown, or a field is missing, misspelt or of the wrong type.
    """
    if not isinstance(table, dict) or not isinstance(table.get("type"), str):
        raise ConfigError(
            f"[{_table(family)}] must be a table with a type; known: {', '.join(known(family))}"
        )
    fields = dict(table)
    kind = fields.pop("type")
    module, _, name = kind.partition(":") if ":" in kind else (f"hpc_swe.plugins.{family}.{kind}", "", "")
    try:
        plugin = getattr(importlib.import_module(module), name or kind.title().replace("_", ""))
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name and module.startswith(error.name)):
            raise  # the plugin exists, but something that it imports does not
        raise ConfigError(
            f"[{_table(family)}] has no type {kind!r}{suggestion(kind, known(family))}; "
            f"known: {', '.join(known(family))}; for your own write type = 'package.module:Class'"
        ) from None
    try:
        return convert(fields, plugin)
    except ValidationError as error:
        names = plugin.__struct_fields__
        unknown = re.search(r"unknown field `(\w+)`", str(error))
        rest = f"{suggestion(unknown[1], names)}; its fields: {', '.join(names) or 'none'}" if unknown else ""
        wrong = re.search(r" - at `\$\.(\w+)`", str(error))
        rest += choices(plugin, [wrong[1]]) if wrong else ""
        raise ConfigError(f"[{_table(family)}] type = {kind!r}: {error}{rest}") from None


def choices(kind: Any, path: Sequence[str]) -> str:
    """Return how a message lists the values of a key below a struct, if it has but some."""
    for name in path:
        fields = msgspec.structs.fields(kind) if hasattr(kind, "__struct_fields__") else ()
        kind = next((field.type for field in fields if field.name == name), None)
    return f"; known: {', '.join(map(str, get_args(kind)))}" if get_origin(kind) is Literal else ""


def dump(plugin: Plugin) -> dict[str, Any]:
    """Return the TOML table of a plugin, from which `load` builds the same one."""
    cls = type(plugin)
    shipped = cls.__module__.startswith("hpc_swe.plugins.")
    kind = cls.__module__.rpartition(".")[2] if shipped else f"{cls.__module__}:{cls.__name__}"
    return {"type": kind} | asdict(plugin)


def known(family: str) -> list[str]:
    """List the types of a family that ship with hpc_swe."""
    package = importlib.import_module(f"hpc_swe.plugins.{family}")
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if name != "base" and not name.startswith("_"))


def _table(family: str) -> str:
    return TABLES.get(family, family.removesuffix("s"))
