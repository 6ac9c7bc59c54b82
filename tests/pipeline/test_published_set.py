"""A published set, from its rows to a step of training, by the commands that docs/public_sets.md names."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from hpc_swe.base.rundir import RunDir  # noqa: E402
from hpc_swe.base.store import weights  # noqa: E402
from tests.kit.checkout import typed  # noqa: E402
from tests.kit.published_image import publish  # noqa: E402
from tests.kit.published_rows import smith_row  # noqa: E402
from tests.kit.random_model import save_random  # noqa: E402
from tests.kit.small_evaluation import GIVES_UP, call  # noqa: E402
from tests.kit.toy import BROKEN, patch, write_rows  # noqa: E402
from tests.kit.toy_model import HERMES, make_model  # noqa: E402

SIZES = {"vocab_size": 352, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 322}
FAULT = patch("calc/core.py", BROKEN, BROKEN.replace("2 * a", "3 * a"))
MENDS = [call("replace", path="calc/core.py", line=6, old="3", new="2"), call("submit")]


def made(folder: Path) -> list[str]:
    """The configuration of a small run on two rows of SWE-smith."""
    rows = [smith_row(instance_id=f"acme__tool.1fd52536.lm_{n}", patch=FAULT, PASS_TO_PASS=[]) for n in "12"]
    write_rows(folder / "rows.jsonl", *rows)
    save_random(make_model(folder / "model", HERMES), "Qwen3", SIZES | {"max_position_embeddings": 4096})
    encode = Tokenizer.from_file(str(folder / "model/tokenizer.json")).encode
    said = [encode(text).ids + [322] for text in (*MENDS, *GIVES_UP)]
    replies = [{"token_ids": ids, "logprobs": [-5.8] * len(ids)} for ids in said]
    (folder / "replies.json").write_text(json.dumps(replies))
    return [
        "configs/demo.toml",
        f"model={folder / 'model'}",
        f'taskset={{type="swebench", train={{rows="{folder}/smith.parquet"}}, timeout_s=120.0}}',
        f'sandbox={{images="{folder}/images"}}',
        f'engine={{type="scripted", replies="{folder}/replies.json"}}',
        'grader={type="swebench", second_sittings=0}',
        'policy={type="megatron", device="cpu", tensor_parallel=1, dtype="float32"}',
        'agent={type="tool_agent", tools=["replace", "submit"], max_turns=5}',
        *[
            "steps=1",
            "tasks.train=2",
            "tasks.eval=0",
            "eval.every=0",
            "rollout.context=2048",
            "rollout.slots=1",
        ],
        *["groups.group_size=2", "groups.groups_per_step=1", "groups.resample=false", "reward.slots=1"],
    ]


def said_by(module: str, *words: object) -> str:
    done = typed(module, *words, COLUMNS="200")
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(f"{done.stdout} {done.stderr}".split())


def test_rows_of_swe_smith_are_prepared_checked_and_trained_on(small_run, tmp_path):
    words = made(tmp_path)
    source = publish(tmp_path)
    said = said_by("hpc_swe.prepare", tmp_path / "rows.jsonl", "--out", tmp_path / "smith.parquet")
    assert "its columns, as of SWE-smith" in said
    said = said_by("hpc_swe.build_images", *words, "--from", source)
    assert "1 of 1 images are in" in said
    checked = tmp_path / "checked.jsonl"
    said = said_by("hpc_swe.check", *words, "--runs", "1", "--out", checked)
    assert "2 tasks: 2 usable" in said
    words.append(f"taskset.checked={checked}")
    said_by("hpc_swe.launch", "start", *words, "--run", tmp_path / "dry", "--dry-run")
    run: RunDir = small_run("published", *words[1:])
    assert run.finished.exists()
    assert max(version.step for version in weights.published(run)) == 1
    lines = "".join(path.read_text() for path in run.metrics.glob("*.jsonl")).splitlines()
    values = {name: value for line in lines for name, value in json.loads(line)["values"].items()}
    assert (values["solve/train"], values["outcome/no_submission"]) == (0.5, 0.5)
    assert values["policy/grad_norm"] > 0
