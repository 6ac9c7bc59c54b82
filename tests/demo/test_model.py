"""The demo's model folder: what the engine, the recorder and the learner need of it."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.tasks.sets.bugs import Bugs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("made") / "model"
    subprocess.run([sys.executable, "-m", "hpc_swe.demo.model", "--out", out, "--seed", "3"], check=True)
    return out


def test_generation_stops_at_the_end_of_a_turn(folder: Path) -> None:
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert TokenBuilder(folder).end_id in stops


@pytest.mark.parametrize("kilobytes", [16, 64], ids=["the tokenizer", "the weights"])
def test_a_file_that_may_not_grow_ends_the_command_with_one_line(tmp_path: Path, kilobytes: int) -> None:
    pytest.importorskip("transformers")
    limited = f'ulimit -f {kilobytes}; exec "$@"'
    make = [sys.executable, "-m", "hpc_swe.demo.model", "--out", str(tmp_path / "model")]
    done = subprocess.run(["bash", "-c", limited, "bash", *make], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (
        4,
        [f"error: {tmp_path}/model.tmp: File too large; raise `ulimit -f`, or name another folder"],
    )
    assert "Traceback" not in done.stderr


def test_demonstrations_are_short_and_survive_encoding(folder: Path) -> None:
    builder = TokenBuilder(folder)
    for messages in itertools.islice(Bugs().demonstrations(seed=5), 100):
        ids, mask = builder.demonstration(messages)
        assert len(ids) == len(mask) < 256
        text = builder.tokens.decode(ids)
        assert all(call.arguments in text for message in messages for call in message.tool_calls)
        assert all(message.content in text for message in messages)
