"""List every key of a configuration with its type, its default and its meaning, read from the source code."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import get_args, get_origin

import msgspec

from hpc_swe.base import loader
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig

SHORT = {"Positive": "int > 0", "Natural": "int >= 0", "Duration": "float > 0"}
ANNOTATED = re.compile(r"Annotated\[(\w+), Meta\(([^)]*)\)\]")
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True)
class Key:
    """Describe a key of the configuration for people."""

    table: str
    """Its table in TOML, for example [policy] type = "megatron"; empty is the top of the file."""
    name: str
    """Its name with all tables, for example policy.device."""
    kind: str
    default: str
    meaning: str
    may_change: bool
    """Whether it may change in an existing run."""


def listed(word: str = "") -> list[Key]:
    """Return the keys whose names start with a word, or if none does, those that have it in their meaning."""
    found = list(_of_table(RunConfig, "", ""))
    wanted = word.lower()
    return [key for key in found if key.name.startswith(word)] or [
        key for key in found if wanted in f"{key.name} {key.meaning}".lower()
    ]


def as_lines(found: Iterable[Key]) -> Iterator[str]:
    """Yield lines for a terminal."""
    for key in found:
        yield f"{key.name}: {key.kind}, {key.default}{', may change in a run' if key.may_change else ''}"
        where = f" ({key.table})" if "type =" in key.table else ""
        yield from textwrap.wrap(f"{key.meaning}{where}", 96, initial_indent="    ", subsequent_indent="    ")


def markdown(found: Iterable[Key]) -> Iterator[str]:
    """Yield the lines of docs/configuration.md."""
    yield from HEAD.splitlines()
    table = None
    for key in found:
        if key.table != table:
            table = key.table
            yield from ("", f"## {f'`{table}`' if table else 'Keys outside tables'}", "")
            yield from ("| key | type | default | may change | meaning |", "|---|---|---|---|---|")
        cells = (key.name, _cell(key.kind), _cell(key.default), "yes" if key.may_change else "no")
        yield f"| `{cells[0]}` | {' | '.join(cells[1:])} | {key.meaning.replace('|', chr(92) + '|')} |"


HEAD = """# Every key of a configuration

Do this to list the keys of one table, or leave the last word out to list all keys:

    python -m hpc_swe.launch keys groups

You will see the same tables as below. A configuration is one or more TOML files and words such as
`groups.group_size=4`, merged from left to right. A run that exists may continue with other values of the
keys that say yes under *may change*, and with no others, because they would change what is trained.

`python -m hpc_swe.launch keys --markdown > docs/configuration.md` writes this page. A test compares both."""


def _cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _of_table(kind: type, table: str, prefix: str) -> Iterator[Key]:
    sources, inner, tables = _sources(kind), [], list[tuple[str, type]]()
    for field in msgspec.structs.fields(kind):
        family = configuration.FAMILIES.get(field.type)
        if family or (isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)):
            inner.append((field, family))
            continue
        name, (annotation, default, meaning) = f"{prefix}{field.name}", sources[field.name]
        yield Key(table, name, annotation, default, meaning, configuration.may_change(name))
        values = get_args(field.type)[1:] if get_origin(field.type) is dict else ()
        tables += [(f"{name}.NAME", each) for each in values if hasattr(each, "__struct_fields__")]
    for path, each in tables:
        yield from _of_table(each, f"[{path}] of {table}" if "type =" in table else f"[{path}]", f"{path}.")
    for field, family in inner:
        path = f"{prefix}{field.name}"
        for type_name in loader.known(family) if family else []:
            module = importlib.import_module(f"{loader.PACKAGES[str(family)]}.{type_name}")
            plugin = getattr(module, type_name.title().replace("_", ""))
            title, name = f'[{path}] type = "{type_name}"', f"{path}.type"
            does = str(module.__doc__).splitlines()[0]
            yield Key(title, name, f"'{type_name}'", "required", does, configuration.may_change(name))
            yield from _of_table(plugin, title, f"{path}.")
        if not family:
            yield from _of_table(field.type, f"[{path}]", f"{path}.")


@cache
def _sources(kind: type) -> dict[str, tuple[str, str, str]]:
    """Return field -> type, default and the docstring below it, from the source of a class and its bases."""
    found: dict[str, tuple[str, str, str]] = {}
    for base in reversed(kind.__mro__):
        if base in (object, msgspec.Struct) or not issubclass(base, msgspec.Struct):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                default = f"default {_default(base, node.value)}" if node.value else "required"
                inherited = found.get(node.target.id, ("", "", ""))[2]
                found[node.target.id] = (_kind(node.annotation), default, _docstring(after) or inherited)
    return found


def _default(kind: type, value: ast.expr) -> str:
    for word in value.keywords if isinstance(value, ast.Call) else ():
        if isinstance(word.value, ast.Lambda):
            return ast.unparse(word.value.body)
    if isinstance(value, ast.Name) and isinstance(getattr(inspect.getmodule(kind), value.id), str):
        return "a text, which start --dry-run shows"
    return ast.unparse(value)


def _docstring(node: ast.stmt | None) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else ""
    return " ".join(text.split()) if isinstance(text, str) else ""


def _kind(annotation: ast.expr) -> str:
    text = ANNOTATED.sub(lambda found: _bounded(*found.groups()), ast.unparse(annotation))
    for short, long in SHORT.items():
        text = re.sub(rf"\b{short}\b", long, text)
    return text


def _bounded(kind: str, bounds: str) -> str:
    parts = [bound.partition("=") for bound in bounds.split(", ")]
    return " ".join([kind, *(f"{BOUNDS[name]} {value}" for name, _, value in parts if name in BOUNDS)])
