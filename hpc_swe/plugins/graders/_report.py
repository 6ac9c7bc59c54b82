"""Write a report inside a process that runs hostile code, and verify it outside.

`open_report` and `make_dispatcher` go into a sandbox as text, between the texts of `_guard` and of the code
that reports; `verified_lines` reads the report outside. Each line is sealed with a key of its own, which is
made from the key before it. Only the memory of that process holds the key, so code that finds it cannot
change earlier lines. The text runs under Python 3.6 and later.
"""

import _thread
import hashlib
import hmac
import json
import os
import random
import sys
from typing import Any, Callable  # noqa: UP035

SEAL = 16  # characters before each line
PRIVATE = frozenset({"stop_watching", "event"})  # methods of a guard that cannot be called by name


def open_report(path: str, key: str) -> Callable[..., None]:
    """Create the report, one sealed JSON object a line, and return the function that writes a line."""
    keys, waiting, lock, process = [key.encode()], [], _thread.allocate_lock(), os.getpid()
    pid, write, digest, quote = os.getpid, os.write, hashlib.blake2b, json.encoder.encode_basestring_ascii
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    def note(**entry: Any) -> None:
        if pid() != process:  # the tests forked
            return
        waiting.append("{" + ",".join([quote(name) + ":" + quote(str(entry[name])) for name in entry]) + "}")
        while waiting and lock.acquire(False):
            try:
                line = waiting.pop(0).encode()
                seal = digest(line, key=keys[0], digest_size=8).hexdigest()
                keys[0] = digest(b"next", key=keys[0], digest_size=32).digest()
                write(file, seal.encode() + line + b"\n")
            finally:
                lock.release()

    note(begin=True)
    return note


def make_dispatcher(guard: Any, more: Any) -> Callable[..., Any]:
    """Return a function that calls an action by its name: a method of the guard, or an entry of `more`.

    An audit hook of the interpreter holds the actions, so that no module and no frame does. They are called
    by an audit event with a secret name; all other events go to the guard.
    """
    actions = {name: getattr(guard, name) for name in dir(guard) if name[0] != "_" and name not in PRIVATE}
    actions.update(more)
    if not hasattr(sys, "addaudithook"):
        return lambda action, *values, **entry: actions[action](*values, **entry)
    secret, audit, see = str(random.SystemRandom().getrandbits(128)), sys.audit, guard.event
    frequent = "object.__getattr__"  # the guard causes it for each function that it compares

    def hook(event: str, arguments: Any) -> None:
        if event == frequent:
            return
        if event == secret:
            action, values, entry = arguments
            actions[action](*values, **entry)
        else:
            see(event, arguments)

    sys.addaudithook(hook)
    return lambda action, *values, **entry: audit(secret, action, values, entry)


def verified_lines(report: bytes, key: str) -> Any:
    """Return the report's lines as bytes without their seals; ValueError: one is wrong or out of order."""
    lines, now = [], key.encode()
    for line in report.splitlines():
        seal = hashlib.blake2b(line[SEAL:], key=now, digest_size=SEAL // 2).hexdigest().encode()
        now = hashlib.blake2b(b"next", key=now, digest_size=32).digest()
        if not hmac.compare_digest(seal, line[:SEAL]):
            raise ValueError("this line is not the reporter's")
        lines.append(line[SEAL:])
    return lines
