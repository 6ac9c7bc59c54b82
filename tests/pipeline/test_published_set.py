"""Published sets, from rows or folders to a step of training, by the commands of docs/public_sets.md."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from hpc_swe.base.rundir import RunDir  # noqa: E402
from hpc_swe.base.store import weights  # noqa: E402
from hpc_swe.tasks import task_checks  # noqa: E402
from hpc_swe.tasks.published_rows import SETS  # noqa: E402
from hpc_swe.tasks.sets.swebench import Source, Swebench  # noqa: E402
from tests.kit.checkout import ROOT, typed  # noqa: E402
from tests.kit.published_image import PublishedImage, publish, publish_base  # noqa: E402
from tests.kit.published_rows import BASE, ROWS, smith_row  # noqa: E402
from tests.kit.random_model import save_random  # noqa: E402
from tests.kit.small_evaluation import GIVES_UP, call, edit  # noqa: E402
from tests.kit.toy import BROKEN, MORE_PYTESTS, PYTESTS, patch, write_rows  # noqa: E402
from tests.kit.toy_model import HERMES, make_model  # noqa: E402

SIZES = {"vocab_size": 352, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 322}
FAULT = patch("calc/core.py", BROKEN, BROKEN.replace("2 * a", "3 * a"))
SOLVES = [edit("+"), call("replace", path="calc/core.py", line=6, old="3", new="2"), call("submit")]
"""The second call mends the fault of SWE-smith, and is refused where there is none."""
IN_PYTHON = {"install_config": {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest"}}
CHANGES: dict[str, dict[str, Any]] = {
    "SWE-rebench V2": IN_PYTHON | {"language": "python", "repo": "acme/testbed"},
    "SWE-bench-Live/MultiLang": {
        "log_parser": "pytest",
        "rebuild_cmds": [],
        "test_cmds": ["pytest -rA > log"],
    },
    "Scale-SWE": {"workdir": "/testbed"},
    "SWE-smith": smith_row(patch=FAULT, PASS_TO_PASS=[]),
}
"""What images here lack: programs in Go, folders of their own, a sound commit that a row makes a fault in."""
FOUND = [title for title in ROWS if " of " not in title]


@dataclass(frozen=True)
class World:
    folder: Path
    """It has a model, and an image for rows whose image holds the tests."""
    images: Mapping[str, PublishedImage]
    """Work directory -> image for rows with a test patch."""
    start: Callable[..., RunDir]

    def train(
        self, taskset: str, grader: str, source: Path, folder: Path, count: int
    ) -> dict[str, list[str]]:
        """Build the images of all tasks, check them, plan a run, and take a step for each task.

        Return what became of each task: its verdict, and the outcomes of the attempts that were trained on.
        """
        words = self._words(folder, taskset.replace("CHECKED", ""), grader, count)
        said = said_by("hpc_swe.build_images", *words, "--from", source)
        assert f"{count} of {count} images are in" in said
        said = said_by("hpc_swe.check", *words, "--runs", "1", "--out", folder / "checked.jsonl")
        assert f"{count} tasks: {count} usable" in said
        found = {name: [one.verdict] for name, one in task_checks.read(folder / "checked.jsonl").items()}
        words = self._words(folder, taskset.replace("CHECKED", f"{folder}/checked.jsonl"), grader, count)
        said_by("hpc_swe.launch", "start", *words, "--run", folder / "dry", "--dry-run")
        run = self.start(f"of-{count}", *words[1:])
        assert run.finished.exists()
        assert max(version.step for version in weights.published(run)) == count
        lines = "".join(path.read_text() for path in run.metrics.glob("*.jsonl")).splitlines()
        assert len([1 for line in lines if json.loads(line)["values"].get("policy/grad_norm")]) == count
        for path in sorted(run.archives.glob("*.parquet")):
            table = pq.read_table(path, columns=["task_id", "outcome"], filters=[("trained", "=", True)])
            for one in sorted(table.to_pylist(), key=lambda one: one["outcome"]):
                found[one["task_id"]].append(one["outcome"])
        return found

    def _words(self, folder: Path, taskset: str, grader: str, count: int) -> list[str]:
        encode = Tokenizer.from_file(str(self.folder / "model/tokenizer.json")).encode
        said = [encode(text).ids + [322] for text in (*SOLVES, *GIVES_UP)]  # of a group of two
        replies = json.dumps([{"token_ids": ids, "logprobs": [-5.8] * len(ids)} for ids in said])
        (folder / "replies.json").write_text(replies)
        return [
            "configs/demo.toml",
            f"taskset={{{taskset}}}",
            f"grader={{{grader}}}",
            f"model={self.folder / 'model'}",
            f'sandbox={{images="{folder}/images"}}',
            f'engine={{type="tests.kit.random_model:AnyWeights", replies="{folder}/replies.json"}}',
            'policy={type="megatron", device="cpu", tensor_parallel=1, dtype="float32"}',
            'agent={type="tool_agent", tools=["replace", "submit"], max_turns=5}',
            *[f"steps={count}", f"tasks.train={count}", "tasks.eval=0", "eval.every=0"],
            *["rollout.context=2048", "rollout.slots=1", "reward.slots=1", "groups.max_staleness=0"],
            *["groups.group_size=2", "groups.groups_per_step=1", "groups.resample=false"],
        ]


@pytest.fixture(scope="module")
def world(small_run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("sets")
    publish(folder)
    bases = {path: publish_base(folder / f"{path[1:]}.sif", path) for path in ("/testbed", "/app")}
    save_random(make_model(folder / "model", HERMES), "Qwen3", SIZES | {"max_position_embeddings": 4096})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # jobs find the engine there
        yield World(folder, bases, small_run)
    shutil.rmtree(folder)


def said_by(module: str, *words: object) -> str:
    done = typed(module, *words, COLUMNS="200")
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(f"{done.stdout} {done.stderr}".split())


def test_these_are_all_sets_that_are_read():
    assert {*FOUND} == {each.title for each in SETS if not each.refused}


def test_a_row_of_each_set_is_prepared_checked_and_trained_on(world, tmp_path):
    """One run has them all; `pytest -rP` prints the table of what became of each."""
    (tmp_path / "published").mkdir()
    tasks, parts = {}, []
    for number, title in enumerate(FOUND):
        known, rows, source = ROWS[title], tmp_path / f"{number}.parquet", world.folder / "published.sif"
        row = json.loads(json.dumps(known.row | CHANGES.get(title, {})).replace("tool-12", f"tool-{number}"))
        if known.base == BASE:
            image = world.images.get(known.workdir, world.images["/testbed"])
            row = {name: image.base if value == BASE else value for name, value in row.items()}
            source = image.sif
        given = write_rows(tmp_path / f"{number}.jsonl", row)
        assert f"its columns, as of {title}" in said_by("hpc_swe.prepare", given, "--out", rows)
        (tasks[title],) = Swebench(train=Source(rows=str(rows))).load("train")
        assert [tasks[title]] == [*Swebench(train=Source(rows=str(given))).load("train")]
        (tmp_path / "published" / f"{tasks[title].image}.sif").symlink_to(source)
        parts.append(f'{number}={{type="swebench", train={{rows="{rows}"}}, checked="CHECKED"}}')
    taskset = f'type="mixture", parts={{{", ".join(parts)}}}'
    grader, images = 'type="swebench", second_sittings=0', tmp_path / "published/{image}.sif"
    found = world.train(taskset, grader, images, tmp_path, len(FOUND))
    for title, task in tasks.items():
        print(f"{title:25} prepared, image {task.image}, dry run;", *found[task.task_id])
    assert found == {task.task_id: ["usable", "no_submission", "resolved"] for task in tasks.values()}


def test_a_folder_of_harbor_is_checked_and_trained_on(world, tmp_path):
    """Its image has a repository, of which only today's files are kept."""
    files = {
        "task.toml": "",
        "instruction.md": "add subtracts",
        "environment/Dockerfile": "FROM acme/tool\nWORKDIR /testbed\n",
        "tests/test.sh": "python -m pytest -q /tests/sums.py && echo 1 > /logs/verifier/reward.txt\n",
        "tests/sums.py": PYTESTS + MORE_PYTESTS,
        "solution/solve.sh": "sed -i 's/a - b/a + b/' calc/core.py\n",
    }
    for path, text in files.items():
        (tmp_path / "tasks/mend" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tasks/mend" / path).write_text(text)
    taskset = f'type="harbor", train="{tmp_path}/tasks", checked="CHECKED"'
    found = world.train(taskset, 'type="reward_file"', world.images["/testbed"].sif, tmp_path, 1)
    print(f"{'Harbor':25} prepared, an image, dry run;", *found["mend"])
    assert found == {"mend": ["usable", "no_submission", "resolved"]}
