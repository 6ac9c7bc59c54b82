"""An image that the host changed accuses nobody, and no text of a report makes it look changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes.base import CommandResult, ImageSandboxes, Sandbox, Sandboxes, WatchedSandboxes
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import SandboxError
from hpc_swe.base.records import Task
from hpc_swe.tasks.graders._images import file_time_ns, require_unchanged
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.patch import difference
from tests.kit.cheats.cheat_task import RIGHT, TASK, WRONG
from tests.kit.toy import BROKEN, GONE, LATE, Checkout, Failing, make_repository, patch, task


class Images(Process, ImageSandboxes, frozen=True, kw_only=True):
    """Sandboxes that show files of this machine as those of their image."""

    images: str = ""

    def for_trial(self, images: Path) -> Sandboxes:
        """The same: nothing here is built."""
        return self


class CheckoutImages(Checkout, ImageSandboxes, frozen=True, kw_only=True):
    """The same with a repository."""

    images: str = ""

    def for_trial(self, images: Path) -> Sandboxes:
        """The same: nothing here is built."""
        return self


class FailingImages(Images, frozen=True, kw_only=True):
    """Whose files nobody can look at."""

    result: CommandResult

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        """A sandbox in which the look will fail."""
        with super().open(task) as sandbox:
            yield Failing(sandbox, "lstat", self.result)


class BareImages(Process, frozen=True, kw_only=True):
    """In which no program that needs pytest runs."""

    result: CommandResult = CommandResult(exit_code=1, output="No module named 'pytest'")

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        """A sandbox in which every such program ends alike."""
        with super().open(task) as sandbox:
            yield Failing(sandbox, "pytest", self.result)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "SINCE library.py"
    path.write_text("")
    return path


@pytest.mark.parametrize("sandboxes", [Images(), WatchedSandboxes(Images())])
def test_a_file_is_changed_if_the_image_has_it_so(library, sandboxes):
    at_ns = library.stat().st_ctime_ns
    require_unchanged(TASK, sandboxes, [str(library)], at_ns)
    with pytest.raises(
        SandboxError, match="image of t was changed while its tests ran: '.*library.py'; make"
    ):
        require_unchanged(TASK, sandboxes, ["/missing", str(library)], at_ns - 1)


def test_where_a_patch_can_change_all_files_none_is_the_host_s(library):
    require_unchanged(TASK, Process(), [str(library)], 0)


@pytest.mark.parametrize(
    "name", ["", "\0", "\udc80", "/x" * 5000, "/proc/self/status", "/dev/null", "library.py", "']; exit(1) #"]
)
def test_no_name_in_a_report_makes_an_image_look_changed(name):
    require_unchanged(TASK, Images(), [name], 0)


def test_nor_does_a_way_to_a_file_that_the_image_does_not_have(library, tmp_path):
    (tmp_path / "way").symlink_to(tmp_path)
    (tmp_path / "link.py").symlink_to(library)
    ways = [tmp_path / "way" / library.name, tmp_path / "link.py", library / "below.py"]
    require_unchanged(TASK, Images(), [*map(str, ways), f"{tmp_path}//{library.name}"], 0)


@pytest.mark.parametrize("result", [LATE, GONE, CommandResult(exit_code=1, output="OSError: [Errno 5]")])
def test_a_look_that_fails_is_no_change_and_no_accusation(library, result):
    with pytest.raises(SandboxError, match="nobody can tell whether the image of t was changed"):
        require_unchanged(TASK, FailingImages(result=result), [str(library)], 0)


@pytest.mark.parametrize("sandboxes", [BareImages(), BareImages(result=LATE), BareImages(result=GONE)])
def test_an_image_without_pytest_earns_no_reward(sandboxes):
    right = difference("mod.py", WRONG, RIGHT)
    bare = msgspec.structs.replace(TASK, image="bare")
    with pytest.raises(SandboxError, match="no test of t can run, as pytest does not start: "):
        Pytest().grade(bare, right, sandboxes)


def test_a_patch_that_lets_no_test_run_pays_for_it_itself():
    ending = difference("mod.py", WRONG, f"import os\nos._exit(0)\n{RIGHT}")
    score = Pytest().grade(TASK, ending, Process())
    assert (score.outcome, score.reward, score.is_final) == ("unresolved", 0.0, False)


def test_a_file_that_is_made_next_is_not_older_than_the_time_of_files(tmp_path):
    for number in range(200):
        at_ns = file_time_ns()
        path = tmp_path / str(number)
        path.write_text("")
        assert path.stat().st_ctime_ns >= at_ns


def test_a_run_of_the_base_commit_excuses_nothing_if_its_image_was_changed(tmp_path):
    """It would show the same sign as the patch, but for another reason, and would be remembered."""
    before = "import os\nos.utime(__file__)\nimport ctypes\n"
    core = f"import calc.apart\n{BROKEN}"
    files = {"calc/core.py": core, "calc/apart.py": before}
    one = task(tmp_path, "unittest", make_repository(tmp_path / "calc", files))
    cheat = patch("calc/core.py", core, core.replace("a - b", "a + b"))
    cheat += patch("calc/apart.py", before, "import ctypes\n")
    with pytest.raises(SandboxError, match="was changed while its tests ran: '.*/calc/apart.py'"):
        Swebench().grade(one, cheat, CheckoutImages(repository=str(tmp_path / "calc")))
