"""Published sets, from rows or folders to a step of training, by the commands of docs/public_sets.md."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from hpc_swe.base.rundir import RunDir  # noqa: E402
from hpc_swe.base.store import weights  # noqa: E402
from hpc_swe.tasks.published_rows import SETS  # noqa: E402
from tests.kit.checkout import typed  # noqa: E402
from tests.kit.published_image import publish, publish_base  # noqa: E402
from tests.kit.published_rows import BASE, ROWS, smith_row  # noqa: E402
from tests.kit.random_model import save_random  # noqa: E402
from tests.kit.small_evaluation import GIVES_UP, SOLVES, call  # noqa: E402
from tests.kit.toy import BROKEN, MORE_PYTESTS, PYTESTS, patch, write_rows  # noqa: E402
from tests.kit.toy_model import HERMES, make_model  # noqa: E402

SIZES = {"vocab_size": 352, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 322}
FAULT = patch("calc/core.py", BROKEN, BROKEN.replace("2 * a", "3 * a"))
IN_PYTHON = {"install_config": {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest"}}
CHANGES: dict[str, dict[str, Any]] = {
    "SWE-rebench V2": IN_PYTHON | {"language": "python"},
    "SWE-bench-Live/MultiLang": {
        "log_parser": "pytest",
        "rebuild_cmds": [],
        "test_cmds": ["pytest -rA > log"],
    },
    "SWE-smith": smith_row(patch=FAULT, PASS_TO_PASS=[]),
}
"""What the image lacks: programs in Go, and a sound commit that a row makes a fault in."""
TRAINED = ("SWE-Gym", "SWE-rebench", "SWE-smith", "R2E-Gym")
"""Sets whose tasks differ otherwise than by image, folder and command."""
FOUND = [title for title in ROWS if " of " not in title]


@dataclass(frozen=True)
class World:
    folder: Path
    """It has a model, and an image for rows whose image holds the tests."""

    def words(self, folder: Path, *tasks: str) -> list[str]:
        """Return the configuration of a small run in a folder, on tasks of these tables."""
        return [
            "configs/demo.toml",
            *tasks,
            f"model={self.folder / 'model'}",
            f'sandbox={{images="{folder}/images"}}',
            f'engine={{type="scripted", replies="{folder}/replies.json"}}',
            'policy={type="megatron", device="cpu", tensor_parallel=1, dtype="float32"}',
            'agent={type="tool_agent", tools=["replace", "submit"], max_turns=5}',
            *["steps=1", "tasks.train=1", "tasks.eval=0", "eval.every=0"],
            *["rollout.context=2048", "rollout.slots=1", "reward.slots=1"],
            *["groups.group_size=2", "groups.groups_per_step=1", "groups.resample=false"],
        ]

    def write_replies(self, path: Path, title: str) -> None:
        """Write replies of a group of two: one resolves the task, and one hands in nothing."""
        mends = [call("replace", path="calc/core.py", line=6, old="3", new="2"), call("submit")]
        encode = Tokenizer.from_file(str(self.folder / "model/tokenizer.json")).encode
        texts = [*(mends if title == "SWE-smith" else SOLVES), *GIVES_UP]
        said = [encode(text).ids + [322] for text in texts]
        path.write_text(json.dumps([{"token_ids": ids, "logprobs": [-5.8] * len(ids)} for ids in said]))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("sets")
    publish(folder)
    save_random(make_model(folder / "model", HERMES), "Qwen3", SIZES | {"max_position_embeddings": 4096})
    yield World(folder)
    shutil.rmtree(folder)


def said_by(module: str, *words: object) -> str:
    done = typed(module, *words, COLUMNS="200")
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(f"{done.stdout} {done.stderr}".split())


def test_these_are_all_sets_that_are_read():
    assert {*FOUND} == {each.title for each in SETS if not each.refused}


@pytest.mark.parametrize("title", FOUND)
def test_rows_of_a_set_are_prepared_checked_and_trained_on(small_run, world, tmp_path, title):
    known = ROWS[title]
    row = known.row | CHANGES.get(title, {})
    source = world.folder / "published.sif"
    if known.base == BASE:
        image = publish_base(tmp_path, known.workdir)
        row = {name: image.base if value == BASE else value for name, value in row.items()}
        source = image.tree
    write_rows(tmp_path / "rows.jsonl", row)
    rows = tmp_path / "rows.parquet"
    said = said_by("hpc_swe.prepare", tmp_path / "rows.jsonl", "--out", rows)
    assert f"its columns, as of {title}" in said
    words = world.words(
        tmp_path,
        f'taskset={{type="swebench", train={{rows="{rows}"}}, timeout_s=120.0}}',
        'grader={type="swebench", second_sittings=0}',
    )
    world.write_replies(tmp_path / "replies.json", title)
    words = checked(words, source, tmp_path)
    if title in TRAINED:
        check_step(small_run(title.lower(), *words[1:]))


def test_a_folder_of_harbor_is_checked_and_trained_on(small_run, world, tmp_path):
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
    image = publish_base(tmp_path, "/testbed")
    taskset = f'taskset={{type="harbor", train="{tmp_path}/tasks"}}'
    words = world.words(tmp_path, taskset, 'grader={type="reward_file"}')
    world.write_replies(tmp_path / "replies.json", "Harbor")
    check_step(small_run("harbor", *checked(words, image.tree, tmp_path)[1:]))


def checked(words: list[str], source: Path, folder: Path) -> list[str]:
    """Build the image and check the task; return the configuration, with which a start was planned."""
    said = said_by("hpc_swe.build_images", *words, "--from", source)
    assert "1 of 1 images are in" in said
    said = said_by("hpc_swe.check", *words, "--runs", "1", "--out", folder / "checked.jsonl")
    assert "1 tasks: 1 usable" in said
    words = [*words, f"taskset.checked={folder / 'checked.jsonl'}"]
    said_by("hpc_swe.launch", "start", *words, "--run", folder / "dry", "--dry-run")
    return words


def check_step(run: RunDir) -> None:
    assert run.finished.exists()
    assert max(version.step for version in weights.published(run)) == 1
    lines = "".join(path.read_text() for path in run.metrics.glob("*.jsonl")).splitlines()
    values = {name: value for line in lines for name, value in json.loads(line)["values"].items()}
    assert (values["solve/train"], values["outcome/no_submission"]) == (0.5, 0.5)
    assert values["policy/grad_norm"] > 0
