"""What a policy may do to the file of the reward: nothing of it is paid, and none of it takes long.

Code of a patch that the script of the tests runs, and that writes this file last, is paid, as the page on
public sets says; this page of tests has what is not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.base.records import Score, Task
from hpc_swe.tasks.graders.reward_file import _STEP_S, RewardFile
from hpc_swe.tasks.patch import take
from hpc_swe.tasks.sets.harbor import Harbor
from tests.kit.cheats.cheat_task import RIGHT, WRONG
from tests.kit.checkout import IMAGES
from tests.kit.images import require_apptainer

pytestmark = pytest.mark.slow
FILE = "/logs/verifier/reward.txt"
CASES = "from mod import add\n\n\ndef test_that_sums_are_right():\n    assert add(20, 30) == 50\n"
RUN = "cp /tests/cases.py hidden.py; python3 -m pytest -q hidden.py > /dev/null"
ALWAYS = f"if {RUN}; then echo 1 > {FILE}; else echo 0 > {FILE}; fi\n"
"""A script that writes the reward whatever happened."""
ONCE = f"{RUN} && echo 1 > {FILE}\n"
"""A script that writes nothing when the tests fail."""
MOVED = f"if {RUN}; then echo 1 > /tmp/r; else echo 0 > /tmp/r; fi; mv -f /tmp/r {FILE}\n"
"""A script that moves its result to its place."""

DEEDS = {
    "writes it": f"mkdir -p /logs/verifier logs/verifier; echo 1 | tee {FILE} > logs/verifier/reward.txt",
    "writes the script": f"mkdir -p /tests tests; echo 'echo 1 > {FILE}' | tee /tests/test.sh tests/test.sh",
    "leaves a process": f"mkdir -p /logs/verifier; while sleep 0.01; do echo 1 > {FILE}; done > /dev/null &",
    "puts its tests first": "echo 'def test_a(): pass' | tee hidden.py > test_hidden.py",
    "makes a program of the shell": "echo '#!/bin/true' | tee bash > python3; chmod +x bash python3",
}
"""What an agent does in its own sandbox."""
ONE = "import os\nopen('{}', 'w').write('1')\n"
APPEND = f"open('{{}}', 'a').write('\\necho 1 > {FILE}\\n')\n"
PIPE = f"""
import os, time
os.mkfifo({FILE!r})
if not os.fork():
    os.setsid()
    reader = os.open({FILE!r}, os.O_RDONLY | os.O_NONBLOCK)
    time.sleep(60)
"""
CODE = {
    "writes it first": (ALWAYS, ONE.format(FILE)),
    "and protects it": (ALWAYS, ONE.format(FILE) + f"os.chmod({FILE!r}, 0o444)"),
    "is a link to a 1": (ALWAYS, ONE.format("/tmp/one") + f"os.symlink('/tmp/one', {FILE!r})"),
    "and protects that": (
        ALWAYS,
        ONE.format("/tmp/one") + f"os.chmod('/tmp/one', 0o444)\nos.symlink('/tmp/one', {FILE!r})",
    ),
    "and protects the folder": (MOVED, ONE.format(FILE) + "os.chmod('/logs/verifier', 0o555)"),
    "and kills the script": (ALWAYS, ONE.format(FILE) + "os.kill(os.getppid(), 9)"),
    "and kills what runs it": (ALWAYS, ONE.format(FILE) + "os.kill(os.getpgrp(), 9)"),
    "is added to the script": (ALWAYS, APPEND.format("/tests/test.sh")),
    "is added to what runs it": (ALWAYS, APPEND.format(".git/script.sh")),
    "is a pipe": (ALWAYS, PIPE),
    "is a pipe that nobody reads": (ONCE, f"import os\nos.mkfifo({FILE!r})"),
    "is a folder": (ALWAYS, f"import os\nos.mkdir({FILE!r})"),
    "is a terabyte": (ONCE, f"open({FILE!r}, 'w').truncate(10**12)"),
    "has too many digits": (ONCE, f"open({FILE!r}, 'w').write('9' * 10**7)"),
    "is no text": (ONCE, f"open({FILE!r}, 'wb').write(bytes(range(256)))"),
}
"""What code of a patch does when the tests import it."""
VALUES = ("2.0", "nan", "inf", "-inf", "-1", "1e999", "1 1", "1\n0", "0x1", "True")


def task(folder: Path, script: str) -> Task:
    texts = {
        "task.toml": "[verifier]\ntimeout_sec = 30.0\n",
        "instruction.md": "add subtracts",
        "environment/Dockerfile": "FROM a\nWORKDIR /work\n",
        "tests/test.sh": script,
        "tests/cases.py": CASES,
    }
    for path, text in texts.items():
        (folder / "mend" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mend" / path).write_text(text)
    (found,) = Harbor(train=str(folder)).load("train")
    return replace(found, image="python-pytest", base_commit="", files={"mod.py": WRONG})


@pytest.fixture
def sandboxes() -> Apptainer:
    require_apptainer()
    return Apptainer(images=str(IMAGES))


@contextmanager
def worked(task: Task, sandboxes: Apptainer, deed: str) -> Iterator[tuple[Sandbox, str]]:
    """An agent's sandbox, still open, and what it hands in."""
    with sandboxes.open(task) as sandbox:
        done = sandbox.run(deed, 60)
        assert done.exit_code == 0, done.output
        yield sandbox, take(task, sandbox, sandboxes)


def wrote(task: Task, sandboxes: Apptainer, text: str) -> Score:
    with worked(task, sandboxes, f"cat > mod.py <<'END'\n{text}\nEND") as (_, patch):
        return RewardFile().examine(task, patch, sandboxes)


def test_the_repair_is_paid(sandboxes, tmp_path):
    for script in (ALWAYS, ONCE, MOVED):
        score = wrote(task(tmp_path, script), sandboxes, RIGHT)
        assert (score.outcome, score.reward) == ("resolved", 1.0), score


@pytest.mark.parametrize("deed", DEEDS)
def test_nothing_that_an_agent_does_in_its_sandbox_is_paid(sandboxes, tmp_path, deed):
    for script in (ALWAYS, ONCE):
        one = task(tmp_path, script)
        with worked(one, sandboxes, DEEDS[deed]) as (_, patch):
            score = RewardFile().examine(one, patch, sandboxes)
        assert (score.outcome, score.reward) == ("unresolved", 0.0), score


@pytest.mark.parametrize("name", CODE)
def test_no_other_file_than_the_scripts_own_is_paid(sandboxes, tmp_path, name):
    script, code = CODE[name]
    score = wrote(task(tmp_path, script), sandboxes, WRONG + code)
    assert (score.outcome, score.reward) == ("unresolved", 0.0), score
    assert score.seconds < _STEP_S, "nothing waits for a pipe"


def test_nothing_but_a_number_from_0_to_1_is_paid(sandboxes, tmp_path):
    one = task(tmp_path, ONCE)
    for value in VALUES:
        score = wrote(one, sandboxes, f"{WRONG}open({FILE!r}, 'w').write({value!r})")
        assert (score.outcome, score.reward) == ("unresolved", 0.0), (value, score)
