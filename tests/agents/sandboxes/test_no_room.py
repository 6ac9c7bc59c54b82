"""Where a job may start no more processes, one command is refused, and no other one suffers."""

import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from hpc_swe.agents.sandboxes import _interpreter
from hpc_swe.agents.sandboxes._inside.descriptors import send_files

NOBODY = 65534
PYTHON = os.path.realpath(sys.executable)  # the link in .venv may lie below a home that nobody else enters
USER = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


@pytest.fixture
def interpreter():
    """A warm interpreter of a user whose processes can be limited, and its socket."""
    channel, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [PYTHON, "-I", "-c", _interpreter._PROGRAM]
    with inner:
        process = subprocess.Popen(command, cwd="/", stdin=inner, env={"LANG": "C.UTF-8"}, **USER)
    channel.settimeout(120)
    if channel.recv(16) != b"up":
        process.wait(10)
        pytest.skip("another user cannot run this interpreter")
    yield process, channel
    channel.close()
    process.wait(10)


def limit(process, most):
    """Set how many processes the user of a process may have; only that user may do this everywhere."""
    program = (
        "import resource, sys; number, most = map(int, sys.argv[1:]); kind = resource.RLIMIT_NPROC\n"
        "last = resource.prlimit(number, kind)[1]\n"
        "resource.prlimit(number, kind, (last if most < 0 else most, last))"
    )
    words = [PYTHON, "-I", "-c", program, str(process.pid), str(most)]
    subprocess.run(words, cwd="/", check=True, **USER)


def start(channel, tmp_path):
    """Ask for a command; return what the interpreter answers, and the files in that message."""
    host, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host.settimeout(60)
    (tmp_path / "program").write_text("pass")
    request = f'{{"kind": "python", "folder": "{tmp_path}", "environment": {{}}}}'
    with inner, (tmp_path / "program").open("rb") as program, (tmp_path / "output").open("wb") as output:
        send_files(channel, request.encode(), [inner.fileno(), program.fileno(), output.fileno()])
    answer, files, _, _ = socket.recv_fds(host, 256, 1)
    for file in files:
        os.close(file)
    with suppress(OSError):
        host.send(b"stop")
    host.close()
    return answer, files


def test_a_job_without_room_for_a_process_refuses_one_command_alone(interpreter, tmp_path):
    process, channel = interpreter
    limit(process, 0)
    answer, files = start(channel, tmp_path)
    assert (answer[:7], files) == (b"failed:", []), answer
    assert process.poll() is None, "the commands of others would have ended with it"
    limit(process, -1)
    answer, files = start(channel, tmp_path)
    assert (answer, len(files)) == (b"started", 1)
