"""What is in a sandbox cannot see, reach or outlive anything outside it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_swe.agents.sandboxes.apptainer import Apart, Apptainer
from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.base.records import Task

pytestmark = pytest.mark.slow


@pytest.fixture
def sandbox(apptainer: Apptainer, task: Task) -> Iterator[Sandbox]:
    with apptainer.open(task) as opened:
        yield opened


@pytest.fixture
def sibling(apptainer: Apptainer, task: Task) -> Iterator[Sandbox]:
    with apptainer.open(task) as opened:
        yield opened


def out(sandbox: Sandbox, command: str) -> str:
    return sandbox.run(command, 20).output.strip()


def test_all_namespaces_are_its_own(sandbox, sibling):
    kinds = ("user", "pid", "mnt", "net", "ipc", "uts")
    command = "readlink " + " ".join(f"/proc/self/ns/{kind}" for kind in kinds)
    host = {str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in kinds}
    mine, theirs = set(out(sandbox, command).split()), set(out(sibling, command).split())
    assert len(mine) == len(theirs) == len(kinds)
    assert not mine & theirs
    assert not (mine | theirs) & host


def test_it_has_no_capability_and_gets_none(sandbox):
    status = out(sandbox, "grep -E 'Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs' /proc/self/status")
    assert [int(line.split()[1], 16) for line in status.splitlines()] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "command",
    [
        "unshare --user --map-root-user true",
        "python3 -c 'import ctypes, os; os._exit(ctypes.CDLL(None).unshare(0x10000000) != 0)'",
        "python3 -c 'import ctypes, os; libc = ctypes.CDLL(None); "
        'os._exit(libc.mount(b"x", b"/tmp", b"tmpfs", 0, None) != 0)\'',
        "python3 -c 'import ctypes, os; libc = ctypes.CDLL(None); "
        'os._exit(libc.mount(None, b"/proc", None, 32 | 0x1000 | 14, None) != 0)\'',
        "python3 -c 'import os; os.mknod(\"disk\", 0o60600, os.makedev(8, 0))'",
        "python3 -c 'import os; os.chroot(\"/tmp\")'",
        "python3 -c 'import socket; socket.sethostname(\"x\")'",
        "echo 1000 > /proc/sys/kernel/pid_max",
        "echo core > /proc/sys/kernel/core_pattern",
        "echo h > /proc/sysrq-trigger",
        "echo 10 > /proc/sys/user/max_user_namespaces",
        "echo 1 > /sys/kernel/mm/ksm/run",
        "python3 -c 'import ctypes, os; os._exit(ctypes.CDLL(None).syscall(250, 0, -4, 0) < 0)'",  # keyctl
        "chmod 600 /dev/null",
        "chown 0:0 /dev/urandom",
        "touch /dev/zero",
        "echo 0 > /proc/self/oom_score_adj",
        "cat /proc/1/environ",
        "ls /proc/1/fd/0",
        "ls /proc/1/root/",
        "cat /proc/1/mem",
    ],
)
def test_what_needs_rights_is_refused(sandbox, command):
    assert sandbox.run(command, 20).exit_code != 0


def test_no_host_file_or_variable_is_visible(apptainer, task, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("host")
    for name in (
        "HPC_SWE_TEST",
        "APPTAINERENV_THAT",
        "SINGULARITYENV_THIS",
        "http_proxy",
        "NO_PROXY",
        "TMPDIR",
    ):
        monkeypatch.setenv(name, f"{tmp_path}/host")
    monkeypatch.chdir(tmp_path)
    looks = "import os; print(dict(os.environ), open('/proc/self/environ').read())"
    other = Apptainer(images=apptainer.images, local_gb=49.0)  # a container of its own, started here
    with other.open(task) as sandbox:
        assert sandbox.run(f"ls {tmp_path}/secret", 20).exit_code != 0
        seen = (
            out(sandbox, "env; cat /proc/self/environ /proc/self/cgroup") + sandbox.python(looks, 20).output
        )
    assert "PATH" in seen
    for word in ("HPC_SWE", "APPTAINER", "Apptainer", "host", str(tmp_path), "proxy", "PROXY"):
        assert word not in seen


def test_siblings_share_no_file_memory_or_process(sandbox, sibling):
    places = "/tmp/x /dev/shm/x /var/tmp/x /testbed/here/x /etc/x /opt/x /srv/x"
    made = sandbox.run(f"for p in {places}; do echo mine > $p || exit 1; done; rm -r /usr/share", 20)
    assert made.exit_code == 0
    assert out(sibling, f"ls {places} 2>/dev/null") == ""
    assert sibling.run("ls /usr/share", 20).exit_code == 0
    busy = threading.Thread(target=sandbox.run, args=("exec -a finger sleep 2", 20))
    busy.start()
    assert "finger" not in out(sibling, "sleep 1; ps axww")
    busy.join()


def test_a_second_sandbox_starts_from_the_untouched_image(apptainer, task):
    with apptainer.open(task) as first:
        first.run("rm -rf /usr/bin /etc; echo gone", 20)
        assert first.run("ls", 20).exit_code != 0
    with apptainer.open(task) as second:
        assert second.run("ls /usr/bin/python3 /etc/passwd", 20).exit_code == 0


def test_nothing_of_a_command_is_left_when_it_is_answered(sandbox):
    nasty = "trap '' TERM INT HUP; (setsid sleep 1000 &); setsid nohup sleep 1000 & disown; echo started"
    assert out(sandbox, nasty) == "started"
    assert "sleep" not in out(sandbox, "ps ax")


def test_a_command_sees_no_descriptor_of_ours(sandbox):
    program = """
import os
print(*(os.readlink(f'/proc/self/fd/{number}') for number in (0, 1, 2)), len(os.listdir('/proc/self/fd')))
"""
    memory = "/memfd:sandbox (deleted)"
    assert sandbox.python(program, 20).output == f"/dev/null {memory} {memory} 4\n"


@pytest.mark.parametrize("kind", [Apptainer, Apart])
def test_every_kind_of_image_and_container_behaves_the_same(images, task, kind):
    with kind(images=images).open(task) as sandbox:
        assert out(sandbox, "cat mod.py") == "x = 1"
        assert out(sandbox, "rm -r /usr/share; mv /etc /moved; ls /usr/share /etc 2>&1 | wc -l") == "2"
        assert sandbox.python("import pytest; print('ok')", 20).output == "ok\n"
