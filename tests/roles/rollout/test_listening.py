"""The recorder inside a real sandbox: its agent reaches it, nobody else does, and nothing else is reached."""

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import pytest

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.agents.loops.base import ChatAddress
from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.base.errors import ConfigError, SandboxError
from hpc_swe.base.rundir import RunDir
from hpc_swe.roles.rollout import openai_server
from tests.kit.recording import stage
from tests.kit.scripted import SMALL

pytestmark = pytest.mark.slow
TASK = msgspec.structs.replace(SMALL, workdir="/testbed/here")
ASK = """
import json, sys, urllib.error, urllib.request
request = urllib.request.Request(
    URL + "/chat/completions", json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode(),
    {"Authorization": "Bearer " + KEY})
try:
    print(json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]["message"]["content"])
except OSError as error:
    print(error)
"""
TRY = """
import socket
HOST, PORT = {host}, 8765
s = socket.socket()
def share():
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        s.setsockopt(socket.SOL_SOCKET, option, 1)
{way}
s.listen()
print("through")
"""
FLOOD = """
import socket
held = []
for number in range(200):
    held.append(socket.socket())
    held[-1].settimeout(2)
    try:
        held[-1].connect(("127.0.0.1", 8765))
        held[-1].sendall(b"POST / HTTP/1.1\\r\\nX: y")
    except OSError:
        pass
print(len(held))
"""
NAMED = f"hpc_swe_test-{os.getpid()}"
ESCAPES = {
    "a host server": "socket.create_connection(('127.0.0.1', HOST), 3)",
    "a host server by name": "socket.create_connection((socket.gethostname(), HOST), 3)",
    "another address": "socket.create_connection(('10.0.0.1', 80), 3)",
    "six": "socket.create_connection(('::1', HOST), 3)",
    "a name": "socket.create_connection(('example.invalid', 80), 3)",
    "the same port": "socket.create_server(('127.0.0.1', PORT))",
    "the same port, shared": "share(); s.bind(('127.0.0.1', PORT))",
    "all addresses": "share(); s.bind(('0.0.0.0', PORT))",
    "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "another's abstract socket": f"socket.socket(socket.AF_UNIX).connect('\\0{NAMED}')",
}


def sandboxes(**fields: object) -> Apptainer:
    made = Apptainer(**fields)
    try:
        made.check()
    except ConfigError as error:
        if "mounts" in str(error):
            raise
        pytest.skip(str(error))
    return made


@pytest.fixture(scope="module")
def apptainer() -> Apptainer:
    return sandboxes()


@contextmanager
def served(sandbox: Sandbox, run: RunDir, builder: TokenBuilder, said: str) -> Iterator[ChatAddress]:
    on = stage(run, builder, replies=[said])
    with on.recorder.serve(sandbox.listen(8765), most_turns=5) as address:
        yield address


def asked(sandbox: Sandbox, address: ChatAddress) -> str:
    program = f"URL, KEY = {address.url!r}, {address.key!r}\n{ASK}"
    return sandbox.python(program, 180).output.strip()


def test_each_sandbox_finds_its_own_recorder_at_the_same_port(apptainer, run, builder):
    with apptainer.open(TASK) as one, apptainer.open(TASK) as two:
        with served(one, run, builder, "one") as first, served(two, run, builder, "two") as second:
            assert first.url == second.url
            assert (asked(one, first), asked(two, second)) == ("one", "two")
            assert "401" in asked(one, second), "another episode's key opens nothing"
            assert "401" in asked(one, ChatAddress(first.url, ""))
        assert "refused" in asked(one, first), "after the episode nobody listens"


@pytest.mark.parametrize("way", ESCAPES)
def test_nothing_else_is_reached_and_the_port_is_not_taken(apptainer, way):
    with (
        socket.create_server(("127.0.0.1", 0)) as host,
        socket.socket(socket.AF_UNIX) as named,
        apptainer.open(TASK) as sandbox,
        closing(sandbox.listen(8765)),
    ):
        named.bind(f"\0{NAMED}")
        named.listen()
        program = TRY.format(host=host.getsockname()[1], way=ESCAPES[way])
        result = sandbox.python(program, 30)
        assert result.exit_code == 1
        assert "Traceback" in result.output
        assert "through" not in result.output.splitlines()


def test_a_port_that_is_taken_is_an_error_of_the_sandbox(apptainer):
    with apptainer.open(TASK) as sandbox, closing(sandbox.listen(8765)):
        with pytest.raises(SandboxError, match="port 8765"):
            sandbox.listen(8765)
        assert sandbox.run("echo goes on", 10).output == "goes on\n"


def test_floods_from_the_inside_leave_the_worker_alone(apptainer, run, builder):
    before = threading.active_count()
    with apptainer.open(TASK) as sandbox, served(sandbox, run, builder, "said") as address:
        assert sandbox.python(FLOOD, 500).output == "200\n"
        assert threading.active_count() <= before + 2 + openai_server.MAX_CONNECTIONS
        assert asked(sandbox, address) == "said", (
            "the flood's sockets are closed with the command that opened them"
        )


@pytest.mark.parametrize("form", ["folder", "squashfs"])
def test_folders_are_shown_read_only_and_missing_ones_are_named(tmp_path, form):
    (tmp_path / "kit").mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    (tmp_path / "kit" / "program").write_text("echo from the kit")
    source = tmp_path / "kit"
    if form == "squashfs":
        if shutil.which("mksquashfs") is None:
            pytest.skip("no mksquashfs here")
        source = tmp_path / "kit.sqfs"
        subprocess.run(
            ["mksquashfs", tmp_path / "kit", source, "-quiet"], check=True, stdout=subprocess.DEVNULL
        )
    made = sandboxes(mounts=(f"{source}:/opt/agent",))
    with made.open(TASK) as sandbox:
        assert sandbox.run("sh /opt/agent/program", 10).output == "from the kit\n"
        for harm in (
            "echo x > /opt/agent/program",
            "rm /opt/agent/program",
            "mount -o remount,rw /opt/agent",
        ):
            assert sandbox.run(harm, 10).exit_code != 0
    for wrong in (f"{tmp_path}/none:/opt/agent", "kit", f"{tmp_path}/kit:opt"):
        with pytest.raises(ConfigError, match=r"mounts.*build_agents"), Apptainer(mounts=(wrong,)).open(TASK):
            pass
