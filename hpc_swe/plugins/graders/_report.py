"""A report that is written inside a process which runs hostile code, and is believed outside.

`book` and `hidden` go into a sandbox as text, between `_guard` and who reports; `unsealed` reads the report
outside. Each line is sealed by a key of its own, which is made from the one before and which only that
process's memory holds: who finds it cannot change what stands before. Written for Python 3.6.
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
UNSAID = frozenset({"rest", "event"})  # deeds of a guard that nobody may ask for


def book(path: str, key: str) -> Callable[..., None]:
    """Start the report, one sealed JSON object a line, and return what writes one."""
    keys, waiting, lock, process = [key.encode()], [], _thread.allocate_lock(), os.getpid()
    pid, write, digest, quote = os.getpid, os.write, hashlib.blake2b, json.encoder.encode_basestring_ascii
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
    file = os.open(path, flags, 0o600)

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


def hidden(guard: Any, deeds: Any) -> Callable[..., Any]:
    """What calls a deed by its name, one of the guard's or of `deeds`, which no module and no frame holds.

    They are called by an event of the interpreter's, of which the guard hears all others.
    """
    told = {name: getattr(guard, name) for name in dir(guard) if name[0] != "_" and name not in UNSAID}
    told.update(deeds)
    if not hasattr(sys, "addaudithook"):
        return lambda deed, *words, **entry: told[deed](*words, **entry)
    secret, audit, see = str(random.SystemRandom().getrandbits(128)), sys.audit, guard.event

    def hook(event: str, arguments: Any) -> None:
        if event == secret:
            deed, words, entry = arguments
            told[deed](*words, **entry)
        else:
            see(event, arguments)

    sys.addaudithook(hook)
    return lambda deed, *words, **entry: audit(secret, deed, words, entry)


def unsealed(report: bytes, key: str) -> Any:
    """The lines of a report; None when one is not the reporter's, or not in its place."""
    lines, now = [], key.encode()
    for line in report.splitlines():
        seal = hashlib.blake2b(line[SEAL:], key=now, digest_size=SEAL // 2).hexdigest().encode()
        now = hashlib.blake2b(b"next", key=now, digest_size=32).digest()
        if not hmac.compare_digest(seal, line[:SEAL]):
            return None
        lines.append(line[SEAL:])
    return lines
