"""An agent that wrecks its container: its tools answer or fail, and the next episode sees nothing of it."""

import json

import msgspec
import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.tools.base import ToolError, invoke
from hpc_swe.base.loader import load
from tests.kit.checkout import IMAGES
from tests.kit.images import require_apptainer
from tests.kit.scripted import SMALL

TASK = msgspec.structs.replace(SMALL, files={"mod.py": "def f():\n    return 1\n"})
WRECKS = {
    "searches replaced": "for p in grep rg find; do printf '#!/bin/sh\\nyes forged' > /usr/bin/$p; done",
    "shells gone": "rm -f /usr/bin/bash /bin/bash /usr/bin/sh /bin/sh",
    "interpreter gone": "rm -rf /usr/local/bin/python* /usr/local/lib/python*",
    "everything gone": "rm -rf --no-preserve-root / 2>/dev/null",
    "disk full": "cat /dev/zero > /tmp/a; cat /dev/zero > /tmp/b; cat /dev/zero > b; cat /dev/zero > c",
    "everybody killed": "kill -9 -1",
    "pipes in the way": "rm mod.py; mkfifo mod.py pipe; ln -s /dev/zero zero; ln -s / loop",
}


def use(sandbox: Sandbox, name: str, /, **arguments: object) -> str:
    """What the policy would be told; any other exception would end a worker."""
    try:
        return invoke(load("tools", {"type": name}), json.dumps(arguments), sandbox, TASK)
    except ToolError as error:
        return f"error: {error}"


@pytest.mark.parametrize("wreck", WRECKS)
@pytest.mark.slow
def test_what_an_agent_does_to_its_container_is_its_own_loss(wreck):
    require_apptainer()
    sandboxes = Apptainer(images=str(IMAGES))
    with sandboxes.open(TASK) as sandbox:
        assert use(sandbox, "bash", command="cat mod.py").endswith("return 1\n[exit code 0]")
        use(sandbox, "bash", command=WRECKS[wreck], timeout_s=60)
        answers = [
            use(sandbox, "bash", command="echo alive"),
            use(sandbox, "grep", pattern="def", path="."),
            use(sandbox, "listdir"),
            use(sandbox, "view", path="mod.py"),
            use(sandbox, "edit", path="mod.py", old="return 1", new="return 2"),
        ]
        assert all(len(answer) < 10_000 for answer in answers)
        assert not any("forged" in answer for answer in answers)
    with sandboxes.open(TASK) as fresh:
        assert use(fresh, "bash", command="cat mod.py").endswith("return 1\n[exit code 0]")
        assert use(fresh, "grep", pattern="def") == "mod.py\n1:def f():"
