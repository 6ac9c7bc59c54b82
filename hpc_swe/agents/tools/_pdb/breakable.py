"""Find the lines of a Python file that can hold a breakpoint.

The text is sent to the sandbox above that of `debugger`, so that no text of the policy is compiled on the
host: standard library only, for Python 3.7 and later.
"""

import ast
import dis
import types
import warnings


def refusal(text: str, line: int) -> str:
    """Return why a line cannot hold a breakpoint, and which next line can; return nothing when it can."""
    lines = text.split("\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)  # this text runs in a sandbox, which has no hpc_swe
            able = _lines_with_code(compile(text, "<file>", "exec", dont_inherit=True)) - _headers(module)
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"the file is no valid Python: {error}"
    if line in able:
        return ""
    reason = _reason(lines, module, line)
    after = [each for each in sorted(able) if each > line]
    return f"{reason}; {f'line {after[0]} is the next that can' if after else 'no line after it can'}"


def first_line(code: types.CodeType) -> int:
    """Return the first line of a function's body that can hold a breakpoint."""
    return min((each for each in _starts(code) if each > code.co_firstlineno), default=code.co_firstlineno)


def _reason(lines: list[str], module: ast.Module, line: int) -> str:
    written = lines[line - 1].strip() if 0 < line <= len(lines) else None
    begins = _string_around(module, line)
    if written is None or (line == len(lines) and not written):
        return f"the file has {len(lines) - (not lines[-1])} lines"
    if begins:
        return f"line {line} is inside a string that begins at line {begins}"
    if not written or written.startswith("#"):
        return f"line {line} is {'a comment' if written else 'blank'}"
    if line in _headers(module):
        return f"line {line} only defines a function or a class: {written[:80]!r}"
    return f"line {line} holds no code of its own: {written[:80]!r}"


def _headers(module: ast.Module) -> set[int]:
    """Return the lines of definitions before their bodies, decorators aside."""
    found: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found |= set(range(node.lineno, _first(node.body[0])))
    return found


def _first(node: ast.stmt) -> int:
    """Return the line where a statement begins, with its decorators."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return node.lineno


def _string_around(module: ast.Module, line: int) -> int:
    """Return where a string of several lines begins that goes on in this line; 0 when there is none."""
    for node in ast.walk(module):
        if isinstance(node, (ast.JoinedStr, ast.Constant)):
            is_text = isinstance(node, ast.JoinedStr) or isinstance(node.value, (str, bytes))
            if is_text and node.lineno < line <= (node.end_lineno or 0):
                return node.lineno
    return 0


def _lines_with_code(code: types.CodeType) -> set[int]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(_starts(code)).union(*map(_lines_with_code, inner))


def _starts(code: types.CodeType) -> list[int]:
    return [line for _, line in dis.findlinestarts(code) if line]
