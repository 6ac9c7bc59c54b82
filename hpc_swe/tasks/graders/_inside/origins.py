"""Find the file that a code is from, in a process that also runs hostile code.

A text of the guard, see `guard`. Code can be compiled under the name of any file, so a name is believed only
if that file has this very code. A file is believed only if it is older than the guard, since nothing in a
sandbox can set the time at which the kernel last changed an inode. Outside of the work tree it must also be
where the interpreter looked for modules at first: a folder that is moved takes old files along.
"""

import ast
import builtins
import warnings
from functools import partial, partialmethod
from os import O_CLOEXEC, O_PATH, close, fstat, readlink
from os import open as open_path
from stat import S_ISREG
from sys import modules
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

MOST_STEPS = 60
MOST_YOUNG = 100  # files that are reported for their age
PLAIN = (int, str, float, bytes)
names_of_function = vars(FunctionType)["__dict__"].__get__
names_of_class, get_title = vars(type)["__dict__"].__get__, vars(type)["__qualname__"].__get__
names_of_module, get_mro = vars(ModuleType)["__dict__"].__get__, vars(type)["__mro__"].__get__
compile_text, open_file = builtins.compile, builtins.open
identity = object.__hash__  # `id` would cause an audit event each time


def exact(value: Any) -> str:
    """Return the text of a string, whatever its class overrides; an empty one for anything else."""
    return str.__str__(value) if issubclass(type(value), str) else ""


def plain_names(names: Any) -> Any:
    """Copy what a dictionary has under strings: a key of another class would be called by each look-up."""
    items = dict.items(names) if issubclass(type(names), dict) else names.items()  # that of a class's names
    return {name: value for name, value in list(items) if type(name) is str}


def place(guard: Any, path: Any, is_pure: bool = False) -> str:
    """Return a path relative to the work tree, or the absolute path of an installed file, else nothing.

    There is no place for a file that was made or changed since the guard began, unless no code under test has
    run since (`is_pure`): then the host did so, for example by a link of an image's files. Otherwise the file
    is reported, and the grader asks whether its image has it so.
    """
    try:
        handle = open_path(exact(path), O_PATH | O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    about, real = fstat(handle), readlink(f"/proc/self/fd/{handle}")  # noqa: PTH115
    close(handle)
    is_own = real.startswith(guard.root + "/")
    if not S_ISREG(about.st_mode) or not (is_own or real.startswith(guard.installed)):
        return ""
    if about.st_ctime_ns > guard.began_ns and not is_pure:
        tell_young(guard, real)
        return ""
    return real[len(guard.root) + 1 :] if is_own else real


def resolved(path: str) -> str:
    """Return where a path leads when links are followed; nothing if there is no such file."""
    try:
        handle = open_path(path, O_PATH | O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    real = readlink(f"/proc/self/fd/{handle}")  # noqa: PTH115
    close(handle)
    return real


def tell_young(guard: Any, path: str) -> None:
    """Report once that a file is younger than the guard; a reader of the report takes no other texts."""
    if path not in guard.young and len(guard.young) < MOST_YOUNG and path.isprintable():
        guard.young.add(path)
        guard.note(young=path)


def is_installed(guard: Any, code: Any) -> bool:
    """Return whether a code is from an installed file, or from none, since running code made it."""
    if type(code) is not CodeType:
        return False
    name = exact(code.co_filename)
    return name[:1] in ("", "<") or place(guard, name, not guard.must_compare)[:1] == "/"


def origin(guard: Any, code: Any) -> str:
    """Return the place of the file that a code is from; nothing if the file that it names has not got it."""
    if code is None:
        return ""
    found = place(guard, code.co_filename)
    return found if knows(guard, code) or is_written(guard, code) else ""


def knows(guard: Any, code: Any) -> bool:
    """Return whether a code is ours, or was part of pytest, unittest or a plugin when these were learned."""
    if identity(code) not in guard.known and guard.outer:  # those within functions are seldom asked for
        guard.known.update((identity(one), one) for one in nested(guard.outer))
        guard.outer = []
    return identity(code) in guard.known


def know(guard: Any, code: Any) -> None:
    """Take a code, and those within it, as part of a judge or a plugin."""
    guard.known[identity(code)] = code
    guard.outer.append(code)


def is_written(guard: Any, code: Any) -> bool:
    """Return whether a code is in the text of its file; pytest may have added to that of a test.

    The runner tells pytest to add nothing.
    """
    found = place(guard, code.co_filename)
    plain = read_codes(guard, found).get((exact(code.co_name), code.co_firstlineno)) if found else None
    if plain is None:
        return False
    is_exact = found[0] == "/" or guard.bottom is not None
    if is_exact:  # the comparison calls no hostile code if all that it compares are strings
        return all(type(one.co_name) is str for one in nested([code])) and code == plain
    return (
        set(plain.co_names) <= set(code.co_names)
        and set(plain.co_varnames) <= set(code.co_varnames)
        and set(map(repr, plain_constants(plain))) <= set(map(repr, plain_constants(code)))
        and len(code.co_code) >= len(plain.co_code)
    )


def read_codes(guard: Any, found: str) -> Any:
    """Compile a file when it is first asked for: name and line -> code; no file has no codes."""
    if found and found not in guard.files:
        path = found if found[0] == "/" else guard.root + "/" + found
        try:
            with open_file(path, "rb") as file:
                text = file.read()
                if fstat(file.fileno()).st_ctime_ns > guard.began_ns:
                    tell_young(guard, path)
                    raise ValueError("another file")
                codes = nested([_compiled(guard, text, path)])
        except (OSError, SyntaxError, ValueError):
            codes = []
        guard.files[found] = {(one.co_name, one.co_firstlineno): one for one in codes}
    return guard.files.get(found, {})


def read_names(path: str) -> Any:
    """Return `bound_names` of a test's file; none if it has no syntax. No code under test has run yet."""
    try:
        with open_file(path, "rb") as file:
            return bound_names(compile_text(file.read(), path, "exec", ast.PyCF_ONLY_AST, True))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()


def bound_names(tree: Any) -> Any:
    """Return the names that a module binds to other values than a judge's module or part of that name."""
    found: Any = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import):
            found.update(one.asname for one in node.names if one.asname not in (None, one.name))
        elif isinstance(node, ast.ImportFrom):
            is_judge = exact(node.module).partition(".")[0] in ("unittest", "pytest")
            plain = {one.name for one in node.names if is_judge and one.asname in (None, one.name)}
            found.update({one.asname or one.name for one in node.names} - plain)
    return found


def _compiled(guard: Any, text: bytes, path: str) -> Any:
    """Compile a text; once code under test may run, neither its codecs nor its `warnings` take part."""
    if guard.reporter is None:
        return compile_text(text, path, "exec", 0, True)
    names, found = vars(warnings), plain_names(modules)
    is_own = found.get("warnings") is warnings and type(warnings) is ModuleType
    if not is_own or len(found) != len(modules) or len(plain_names(names)) != len(names):
        raise ValueError("other code would be called")
    filters, names["filters"] = names["filters"], [("ignore", None, Warning, None, 0)]
    try:
        return compile_text(bytes.decode(text), path, "exec", 0, True)
    finally:
        names["filters"] = filters


def names_ctypes(guard: Any, found: str) -> bool:
    """Return whether a file mentions ctypes, so that it is more than a way to call something else."""
    return any("ctypes" in name for one in read_codes(guard, found).values() for name in one.co_names)


def called_as(guard: Any, code: Any) -> Any:
    """Return the name of an installed function; for `__enter__` and the like, that of its class."""
    name = exact(code.co_name)
    if name[:2] != "__":
        return (name,)
    found = read_codes(guard, place(guard, code.co_filename))
    plain = found.get((name, code.co_firstlineno))
    homes = [one for one in found.values() if any(plain is const for const in one.co_consts)]
    return tuple(one.co_name for one in homes if plain is not None)


def nested(codes: Any) -> Any:
    """Extend a list of codes by those within them."""
    for code in codes:  # the loop extends the list
        codes += [const for const in code.co_consts if type(const) is CodeType]
    return codes


def reachable(function: Any) -> Any:
    """Return the functions that a function consists of: what it wraps, binds or closes over."""
    found: Any = []
    queue = [function]
    while queue and len(found) < MOST_STEPS:
        one = queue.pop(0)
        kind = type(one)
        if kind is FunctionType and not any(one is other for other in found):
            found.append(one)
            queue += [
                value for name, value in plain_names(names_of_function(one)).items() if name == "__wrapped__"
            ]
            queue += [value for _, value in cells(one)]
        elif kind is MethodType or kind is classmethod or kind is staticmethod:
            queue.append(one.__func__)
        elif kind is partial:
            queue.append(one.func)
        elif kind is partialmethod and vars(kind).get("__getattribute__") is None:
            queue.append(plain_names(vars(one)).get("func"))
    return found


def files_of(guard: Any, function: Any) -> Any:
    """Return the files of the functions that a function consists of; an empty name for one of no file."""
    return sorted({origin(guard, one.__code__) for one in reachable(function)})


def cells(function: Any) -> Any:
    """Return the cells that a function closes over, with their values."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append((cell, cell.cell_contents))
        except ValueError:  # empty
            continue
    return found


def plain_constants(code: Any) -> Any:
    """Return the constants of a code whose texts are equal in every process."""
    return [const for const in code.co_consts if any(type(const) is kind for kind in PLAIN)]


def text_of(code: Any) -> bytes:
    """Return a text of a code's instructions, names and plain constants, equal in every process."""
    return bytes(code.co_code + repr((code.co_names, plain_constants(code))).encode())
