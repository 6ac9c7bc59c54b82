"""Read repairs out of a reply: fenced blocks that hold a file, or some of its functions.

A reply is text of the policy. Whatever it holds takes time in proportion to its length, and ends at worst in
a `BadAnswer`, whose words the policy reads.
"""

import ast
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from hpc_swe.base.syntax import parse, split_lines

Form = Literal["file", "function"]
Definition = ast.FunctionDef | ast.AsyncFunctionDef
_MOST_NAMES = 100
"""Characters of the names that a message repeats."""


class BadAnswer(ValueError):
    """The reply holds no repair that fits the files; the text says why, for the policy to read."""


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of a reply, and the file that it or the line above it names; empty if none."""

    path: str
    text: str


def changes(reply: str, files: Mapping[str, str], form: Form) -> dict[str, str]:
    r"""Return path -> new text of the files that a reply changes.

    Raise BadAnswer if it has no closed block, names none of the files, or its repair fits none of them.

    Example:
        >>> changes("So:\n```python\nx = 2\n```\n", {"m.py": "x = 1\n"}, "file")
        {'m.py': 'x = 2\n'}
    """
    found = [*blocks(reply, files)]
    if not found:
        raise BadAnswer("The reply has no block that begins and ends with a line of ```.")
    named = [block for block in found if block.path]
    changed = dict(files)
    # A block before the last one often shows the fault, or a step of the way.
    for block in named or found[-1:]:
        if form == "function":
            _put_functions(changed, block)
        else:
            changed[block.path or _only(files)] = block.text
    return {path: text for path, text in changed.items() if text != files[path]}


def blocks(reply: str, files: Mapping[str, str]) -> Iterator[CodeBlock]:
    """Yield the closed fenced blocks of a reply in their order."""
    fence = path = above = ""
    body: list[str] = []
    for line in reply.replace("\r\n", "\n").split("\n"):
        words = line.strip()
        if fence and words.startswith(fence) and not words.strip("`"):
            yield CodeBlock(path, "".join(body))
            fence = above = ""
        elif fence:
            body.append(f"{line}\n")
        elif words.startswith("```"):
            after = words.lstrip("`")
            fence, body = words[: len(words) - len(after)], []
            path = next((name for name in (*after.split(), above) if name in files), "")
        elif words:
            above = words.strip("#*:` ")


def _only(files: Mapping[str, str]) -> str:
    if len(files) > 1:
        raise BadAnswer(f"Name the file on the line above the block; the files are {', '.join(files)}.")
    return next(iter(files))


def _put_functions(files: dict[str, str], block: CodeBlock) -> None:
    """Put the functions of a block in the place of those of the same names, in the one file that has them."""
    new, source = _parsed(block.text)
    names = {name for name, _ in _definitions(new.body)}
    if not names:
        raise BadAnswer("The block holds no function.")
    texts = {
        path: _with_functions(text, new, source)
        for path, text in files.items()
        if path == block.path or not block.path
    }
    fitting = {path: text for path, text in texts.items() if text is not None}
    if len(fitting) != 1:
        shown = ", ".join(sorted(names))[:_MOST_NAMES]
        raise BadAnswer(
            f"{len(fitting)} of the files have {shown}. Give functions that one file has, and write the "
            "file's name above the block."
        )
    files.update(fitting)


def _parsed(text: str) -> tuple[ast.Module, str]:
    """Return the syntax tree of a block and the text that it counts lines of."""
    try:
        return parse(text), text
    except (SyntaxError, ValueError) as error:
        why = str(error)
    text = textwrap.dedent(text)  # a method may come as it stands in its class
    try:
        return parse(text), text
    except (SyntaxError, ValueError):
        raise BadAnswer(f"The block is no Python: {why}") from None


def _with_functions(text: str, new: ast.Module, source: str) -> str | None:
    """Return a file with the new functions in place of the old ones; None if it lacks one of them.

    Imports and assignments above the block's first function come before the first one that is replaced.
    """
    try:
        module = parse(text)
    except (SyntaxError, ValueError):
        return None
    places: dict[int, tuple[Definition, Definition]] = {}
    old = [*_definitions(module.body)]
    for name, definition in _definitions(new.body):
        place = _place(name, definition, old)
        if place is None:
            return None
        places[_first(place)] = place, definition
    found, new_lines = split_lines(text), split_lines(source)
    for first, (place, definition) in sorted(places.items(), reverse=True):
        found[first - 1 : place.end_lineno] = _moved(definition, new_lines, place.col_offset)
    top = max(line for line in map(_first, module.body) if line <= min(places))
    found[top - 1 : top - 1] = _opening(new, new_lines)
    return "\n".join(found)


def _opening(new: ast.Module, lines: list[str]) -> list[str]:
    """Return the lines of a block's imports and assignments above its first function or class.

    What stands below those often shows how to call the function.
    """
    above = itertools.takewhile(lambda node: not isinstance(node, Definition | ast.ClassDef), new.body)
    return [
        line
        for node in above
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)
        and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        for line in lines[node.lineno - 1 : node.end_lineno]
    ]


def _definitions(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, Definition):
            yield owner + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{owner}{node.name}.")


def _place(name: str, new: Definition, old: list[tuple[str, Definition]]) -> Definition | None:
    """Return the old function that a new one replaces, if just one is meant.

    A method may come without its class. Of several functions of one name, as those of a property, the one
    with the same decorators is meant.
    """
    found = [node for other, node in old if other == name]
    found = found or [node for other, node in old if other.endswith(f".{name}")]
    if len(found) > 1:
        marks = [*map(ast.dump, new.decorator_list)]
        found = [node for node in found if [*map(ast.dump, node.decorator_list)] == marks]
    return found[0] if len(found) == 1 else None


def _first(node: ast.stmt) -> int:
    """Return the number of a statement's first line, that of its decorators included."""
    decorators = node.decorator_list if isinstance(node, Definition | ast.ClassDef) else []
    return min([node.lineno, *(each.lineno for each in decorators)])


def _moved(node: Definition, lines: list[str], column: int) -> list[str]:
    """Return the lines of a function, moved to a column; lines that begin in a text stay as they are."""
    first, step = _first(node), column - node.col_offset
    texts = (each for each in ast.walk(node) if isinstance(each, ast.Constant | ast.JoinedStr))
    kept = {line for each in texts for line in range(each.lineno + 1, (each.end_lineno or 0) + 1)}
    return [
        line if number in kept or not line.strip() else " " * step + line if step >= 0 else line[-step:]
        for number, line in enumerate(lines[first - 1 : node.end_lineno], first)
    ]
