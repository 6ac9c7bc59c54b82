"""What an evaluation needs, in a folder: model, rows, repository, replies; and its command line."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from hpc_swe.base.rundir import RunDir
from hpc_swe.cluster.processes import free_port
from hpc_swe.models.engines._vllm.environment import TOKEN
from hpc_swe.models.engines.scripted import FAULTS
from tests.kit import checkout
from tests.kit.checkout import ROOT
from tests.kit.toy import RECIPES, make_repository, row, write_rows
from tests.kit.toy_model import HERMES, make_model, tokenizer_json


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def edit(new: str) -> str:
    return call("replace", path="calc/core.py", line=2, old="-", new=new)


SOLVES = [edit("+"), call("submit")]
FAILS = [edit("*"), call("submit")]
GIVES_UP = [call("submit")]


@dataclass(frozen=True)
class Small:
    folder: Path

    @property
    def out(self) -> RunDir:
        return RunDir(self.folder / "out")

    @property
    def words(self) -> list[str]:
        recipes = ", ".join(f'"{name}" = {_inline(recipe)}' for name, recipe in RECIPES.items())
        return [
            "configs/demo.toml",
            f"model={self.folder / 'model'}",
            f'taskset={{type="swebench", eval={{rows="{self.folder}/rows.jsonl"}}, recipes={{{recipes}}}, '
            "timeout_s=120.0}",
            f'sandbox={{type="tests.kit.toy:Checkout", repository="{self.folder}/calc"}}',
            f'engine={{type="scripted", replies="{self.folder}/replies.json"}}',
            'grader={type="swebench"}',
            'agent.tools=["replace", "submit"]',
            "agent.show_tools=true",
            "rollout.context=4096",
            "rollout.slots=1",
            "reward.slots=2",
            "eval.samples=2",
            # the one decoding of demo.toml, with two attempts at each task
            "eval.decodings.greedy={temperature=0.5, max_tokens=300}",
            "poll_s=0.2",
            "lease.ttl_s=8.0",
        ]

    def rows(self, count: int) -> None:
        """So many tasks, which are all solved by the same edit."""
        base = self._base()
        kinds = ("unittest", "pytest")
        made = [row(kinds[n % 2], base, instance_id=f"toy__{kinds[n % 2]}-{n}") for n in range(count)]
        write_rows(self.folder / "rows.jsonl", *made)

    def replies(self, *conversations: list[str], delay_s: float = 0.0) -> None:
        """What the engine says, conversation by conversation, round and round."""
        tokenizer = Tokenizer.from_str(tokenizer_json())
        end = tokenizer.token_to_id("<|im_end|>")
        said = [tokenizer.encode(text).ids + [end] for texts in conversations for text in texts]
        replies = [{"token_ids": ids, "logprobs": [-0.5] * len(ids), "delay_s": delay_s} for ids in said]
        (self.folder / "replies.json").write_text(json.dumps(replies))

    def command(self, *words: object, out: Path | None = None) -> list[str]:
        line = [sys.executable, "-m", "hpc_swe.evaluate", *self.words, *words, "--out", out or self.out.root]
        return list(map(str, line))

    def evaluate(self, *words: object, out: Path | None = None) -> "subprocess.CompletedProcess[str]":
        line = [*self.words, *words, "--out", out or self.out.root]
        return checkout.typed("hpc_swe.evaluate", *line, COLUMNS="200")

    @contextmanager
    def served(self, key: str) -> Iterator[str]:
        """The engine as somebody else's, without routes for updates; its address."""
        port = free_port("127.0.0.1")
        words = ["127.0.0.1", port, self.folder / "replies.json", self.folder / "model", 8192]
        line = [sys.executable, "-m", "hpc_swe.models.engines.scripted", *map(str, words)]
        child = subprocess.Popen(line, cwd=ROOT, env={**os.environ, TOKEN: key, FAULTS: "plain"})
        try:
            deadline = time.monotonic() + 180
            while not _listens(port):
                assert time.monotonic() < deadline, "the engine does not listen"
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            child.kill()
            child.wait()

    def _base(self) -> str:
        git = ["git", "-C", self.folder / "calc", "rev-parse", "v2~1"]
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()


def environment() -> dict[str, str]:
    return checkout.environment(COLUMNS="200")


def make(folder: Path) -> Small:
    small = Small(folder)
    make_repository(folder / "calc")
    make_model(folder / "model", HERMES)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": 322}')
    small.rows(4)
    small.replies(SOLVES, FAILS, GIVES_UP)
    return small


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _inline(table: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + "}"


OFFICIAL = """
import json, sys, types
for name in ("docker", "dotenv", "swebench.image_builder", "swebench.image_builder.docker_utils"):
    sys.modules[name] = types.ModuleType(name)  # not installed, and not asked
sys.modules["docker"].DockerClient = sys.modules["swebench.image_builder.docker_utils"].list_images = None
sys.modules["dotenv"].load_dotenv = lambda: None
sys.modules["swebench.harness"] = package = types.ModuleType("swebench.harness")
import swebench
package.__path__ = [swebench.__path__[0] + "/harness"]
from swebench.harness.reporting import make_run_report
from swebench.harness.utils import get_predictions_from_file, load_swebench_dataset
label, rows = sys.argv[1:]
found = get_predictions_from_file(f"predictions.{label}.jsonl", rows, "test")
made = make_run_report({one["instance_id"]: one for one in found}, load_swebench_dataset(rows), label)
print("MADE", made)
"""


def official_report(folder: Path, label: str, rows: Path) -> dict[str, object]:
    """What swebench itself makes, in the folder, of the predictions and logs there."""
    line = [sys.executable, "-c", OFFICIAL, label, str(rows)]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    made = folder / done.stdout.rpartition("MADE ")[2].strip()
    return json.loads(made.read_text())
