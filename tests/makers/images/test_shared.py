"""An image that several tasks share is searched for the solutions of all of them, and has one base commit."""

import signal
import threading

import msgspec
import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError, HpcSweError
from hpc_swe.config import config as configuration
from hpc_swe.makers.build_images import run, wanted
from hpc_swe.makers.images.sources import Built, Pulled
from hpc_swe.makers.images.store import ImageManifest, ImageStore, Problem
from tests.kit.checkout import ROOT
from tests.kit.toy import BROKEN, patch, row, taskset, write_rows
from tests.kit.waiting import until

IMAGE = {"image": "somewhere/me/calc:1"}
LONG = "".join(f"\n\ndef f_{n}(number):\n    return number * {n}00_000\n" for n in range(3))
SOLUTIONS = {"one": BROKEN + LONG, "other": BROKEN + LONG.replace("f_", "g_").replace("00_000", "11_111")}


def rows(base: str, **more: object) -> list[dict[str, object]]:
    return [
        row("unittest", base, instance_id=name, patch=patch("calc/core.py", BROKEN, after), **IMAGE) | more
        for name, after in SOLUTIONS.items()
    ]


def images_of(folder, *made):
    config = configuration.read(ROOT / "configs/swebench.toml")
    tasks = taskset(write_rows(folder / "rows.jsonl", *made))
    return wanted(msgspec.structs.replace(config, taskset=tasks))[1]


def test_a_command_that_is_interrupted_ends_the_waits_of_its_pulls(repository, tmp_path):
    begun, ended = threading.Event(), []

    class Waiting(ImageStore):
        def build(self, source, *problems):
            begun.set()
            ended.append(source.limit.ended.wait(60))
            return True

    def interrupt():
        until(begun.is_set, "a pull waits")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    source = Pulled("docker://host/{reference}", Process())
    with pytest.raises(KeyboardInterrupt):
        run(Waiting(tmp_path), source, images_of(tmp_path, *rows(repository[1])), 1)
    until(lambda: ended == [True], "the wait of the pull ends")


@pytest.mark.slow
@pytest.mark.parametrize("shown", SOLUTIONS)
def test_an_image_that_shows_the_solution_of_any_of_its_tasks_is_refused(repository, tmp_path, shown, capsys):
    source, base = repository
    (tmp_path / "base/usr/bin").mkdir(parents=True)
    (tmp_path / "requirements").touch()
    recipe = Built(tmp_path / "images", tmp_path / "base", source, tmp_path / "requirements")
    (problems,) = images = images_of(tmp_path, *rows(base))
    assert [problem.task.task_id for problem in problems] == ["one", "other"]
    leak = recipe.images / f".environment-{recipe.digest(problems[0].task)}/opt/calc/core.py"
    leak.parent.mkdir(parents=True)
    leak.write_text(SOLUTIONS[shown])
    with pytest.raises(HpcSweError, match=rf"opt/calc/core\.py: leave the instance out \({shown}\)"):
        ImageStore(recipe.images).build(recipe, *problems)
    assert run(ImageStore(recipe.images), recipe, images, 1) == 1
    assert "2 tasks of calc+1: the image shows the solution" in " ".join(capsys.readouterr().out.split())


def test_an_image_counts_only_for_tasks_whose_solutions_were_searched(repository, tmp_path):
    ((one, other),) = images_of(tmp_path, *rows(repository[1]))

    def store(*searched: Problem) -> ImageStore:
        made = ImageManifest(
            image=one.task.image,
            base_commit=one.task.base_commit,
            environment="digest",
            sif_sha256="",
            searched=[problem.digest for problem in searched],
        )
        (tmp_path / f"{made.image}.json").write_bytes(msgspec.json.encode(made))
        (tmp_path / f"{made.image}.sif").touch()
        return ImageStore(tmp_path)

    assert store(one, other).has("digest", one, other)
    assert store(one, other).has("digest", other)
    assert not store(one).has("digest", one, other)
    assert not store(one).has("digest", other)
    assert store().has("digest", one), "the manifest of an image of one task may not say it"
    assert not store().has("digest", one, other)


def test_tasks_of_one_image_and_different_base_commits_are_one_clear_error(repository, tmp_path):
    one, other = rows(repository[1])
    with pytest.raises(
        ConfigError, match="one and other share the image calc.1, which holds one base commit"
    ):
        images_of(tmp_path, one, other | {"base_commit": "0" * 40})
