"""Write a report inside a process that runs hostile code, and verify it outside.

`open_report` and `odd` are a text of the guard, see `guard`; `verified_lines` reads the report outside. Each
line is signed with a key of its own, which is made from the key before it. Only the memory of that process
holds the key, so code that finds it cannot change earlier lines. The text runs under Python 3.6 and later.
"""

import _thread
import hashlib
import hmac
import json
import os
from typing import Any, Callable  # noqa: UP035

SIGNATURE = 16  # characters before each line
KEY = ".key"  # what the name of the file with the key has after that of the report


def open_report(path: str) -> Callable[..., None]:
    """Create the report, one signed JSON object a line, and return the function that writes a line.

    Its key is in a file beside it, which is removed: no text or code that stays in the process has it.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    with open(path + KEY, "rb") as held:  # noqa: PTH123
        keys = [held.read()]
    os.unlink(path + KEY)  # noqa: PTH108
    waiting, lock, process = [], _thread.allocate_lock(), os.getpid()
    pid, write, digest, quote = os.getpid, os.write, hashlib.blake2b, json.encoder.encode_basestring_ascii

    def note(**entry: Any) -> None:
        if pid() != process:  # the tests forked
            return
        waiting.append("{" + ",".join([quote(name) + ":" + quote(str(entry[name])) for name in entry]) + "}")
        while waiting and lock.acquire(False):
            try:
                line = waiting.pop(0).encode()
                signature = digest(line, key=keys[0], digest_size=8).hexdigest()
                keys[0] = digest(b"next", key=keys[0], digest_size=32).digest()
                write(file, signature.encode() + line + b"\n")
            finally:
                lock.release()

    note(begin=True)
    return note


def odd(guard: Any, what: str, *places: str) -> None:
    """Report a finding once, with the files that it comes from; without any it counts for every patch."""
    key = (what, *places)
    if key not in guard.found:
        guard.found.add(key)
        guard.note(odd=what, places="\n".join(places))


def verified_lines(report: bytes, key: str) -> Any:
    """Return the report's lines without signatures, as bytes; ValueError: one is wrong or out of order."""
    lines, now = [], key.encode()
    for line in report.splitlines():
        wanted = hashlib.blake2b(line[SIGNATURE:], key=now, digest_size=SIGNATURE // 2).hexdigest().encode()
        now = hashlib.blake2b(b"next", key=now, digest_size=32).digest()
        if not hmac.compare_digest(wanted, line[:SIGNATURE]):
            raise ValueError("this line is not the reporter's")
        lines.append(line[SIGNATURE:])
    return lines
