"""A whole run on trajectories: Megatron on the CPU, both roles killed once, and the learner hangs once."""

import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from hpc_swe import config as configuration  # noqa: E402
from hpc_swe.rundir import RunDir  # noqa: E402
from hpc_swe.runs import control, existing  # noqa: E402
from hpc_swe.store import atomic  # noqa: E402
from tests.kit import hanging  # noqa: E402
from tests.kit.checkout import ROOT  # noqa: E402
from tests.kit.conversations import VIEW, calls, said, write  # noqa: E402
from tests.kit.random_model import save_random  # noqa: E402
from tests.kit.run_processes import role_pids  # noqa: E402
from tests.kit.toy_model import HERMES, make_model  # noqa: E402
from tests.kit.waiting import until  # noqa: E402

ROWS, HELD_OUT, EPOCHS, SIZE, EVERY = 36, 8, 4, 3, 16
STEPS = EPOCHS * ROWS // SIZE
SIZES = {
    "vocab_size": 352,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": 322,
}


def row(number: int) -> dict[str, object]:
    name = f"{'abcdefgh'[number % 8]}{'xyz'[number % 3]}.py"
    messages = [
        said("system", "Repair it."),
        said("user", f"{name} fails."),
        said("assistant", f"I look at {name}.", tool_calls=calls(("view", {"path": name}))),
        said("tool", f"x = {number}", tool_call_id="call_0"),
        said("assistant", "It is repaired.", tool_calls=calls(("submit", {}))),
    ]
    return {"messages": messages, "tools": [VIEW], "task_id": f"task {number}"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The finished run."""
    folder = tmp_path_factory.mktemp("sft")
    os.chdir(ROOT)
    save_random(make_model(folder / "model", HERMES), "Qwen3", SIZES)
    train = write(folder / "train.jsonl", [row(n) for n in range(ROWS)])
    held_out = write(folder / "held_out.jsonl", [row(n) for n in range(ROWS, ROWS + HELD_OUT)])
    words = [
        f"model={folder / 'model'}",
        f'sft={{source="trajectories", trajectories=["{train}"], validation=["{held_out}"]}}',
        f"sft.epochs={EPOCHS}",
        f"sft.samples_per_step={SIZE}",
        f"sft.validate_every={EVERY}",
        f'policy={{type="tests.kit.hanging:HangingMegatron", fifos="{folder}", device="cpu"}}',
        'policy={tensor_parallel=1, dtype="float32"}',
        "supervision={stuck_s=20, tries=9}",
        "learner.checkpoint_every=1000",  # so that a killed learner repeats every step
        "learner.export_every=1000",
        "learner.optimizer={lr=3e-3}",
        "lease={beat_s=0.5, ttl_s=20.0}",
        "coordinator={poll_s=0.2, status_s=0.3}",
    ]
    files = [ROOT / "configs/demo.toml", ROOT / "configs/demo_sft.toml"]
    run, config = RunDir(folder / "run"), configuration.read(*files, overrides=words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # jobs find the policy there
        control.start(run, config)
    try:
        until(lambda: len(points(run, "policy/nll")) >= 3, "some steps", 600)
        for role in ("coordinator", "learner"):
            os.kill(role_pids(run, role)[-1], signal.SIGKILL)
        again = len(points(run, "policy/nll")) + 2
        until(lambda: len(points(run, "policy/nll")) >= again, "steps of the next learner", 600)
        hanging.make(folder, "learner")
        until(run.finished.exists, "the end of the run", 600)
    finally:
        control.stop(run, existing.load(run), now=True)
    return run


def test_a_learner_that_hangs_in_a_step_is_restarted_and_its_stack_is_kept(trained):
    stacks = [(trained.stacks / name).read_text() for name in atomic.names(trained.stacks)]
    (stack,) = [text for text in stacks if "in wait_for_ever" in text]
    assert "does not finish step" in stack
    assert "roles/learner/loop.py" in stack


def points(run: RunDir, curve: str) -> list[tuple[int, float]]:
    """(step, value) in order of time, of all incarnations."""
    lines = []
    for path in run.metrics.glob("*.jsonl"):
        lines += [
            json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
    return [
        (x["step"], x["values"][curve])
        for x in sorted(lines, key=lambda x: x["time"])
        if curve in x["values"]
    ]


def test_the_loss_and_the_validation_loss_fall(trained):
    losses, validation = dict(points(trained, "policy/nll")), dict(points(trained, "validation/loss"))
    assert sorted(losses) == list(range(STEPS))
    assert losses[STEPS - 1] < 0.4 * losses[0]
    assert sorted(validation) == [0, 16, 32, STEPS - 1, STEPS]
    assert validation[STEPS] < validation[16] < validation[0]
    assert validation[STEPS] < 0.5 * validation[0]
    tokens = {value for _, value in points(trained, "validation/tokens")}
    assert len(tokens) == 1
    events = b"".join(Path(path).read_bytes() for path in trained.tensorboard.iterdir())
    assert b"validation/loss" in events


def test_a_killed_learner_repeats_losses_and_validations_exactly(trained):
    for curve in ("policy/nll", "validation/loss"):
        seen: dict[int, set[float]] = {}
        found = points(trained, curve)
        for step, value in found:
            seen.setdefault(step, set()).add(value)
        assert len(found) > len(seen), "nothing was repeated"
        assert {step: values for step, values in seen.items() if len(values) > 1} == {}
