"""Whole runs on trajectories: Megatron on the CPU, both roles killed once, and the learner hangs once.

Another run's learner saves by time and is ended in four ways: it must end at the same bits.
"""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from hpc_swe.base.records import WeightManifest  # noqa: E402
from hpc_swe.base.rundir import RunDir  # noqa: E402
from hpc_swe.base.store import atomic, folders, weights  # noqa: E402
from hpc_swe.config import config as configuration  # noqa: E402
from hpc_swe.config.settings import RunConfig  # noqa: E402
from hpc_swe.launch import control, existing, watch  # noqa: E402
from tests.kit import hanging  # noqa: E402
from tests.kit.checkout import ROOT  # noqa: E402
from tests.kit.conversations import VIEW, calls, said, write  # noqa: E402
from tests.kit.random_model import save_random  # noqa: E402
from tests.kit.run_processes import role_pids  # noqa: E402
from tests.kit.toy_model import HERMES, make_model  # noqa: E402
from tests.kit.waiting import until  # noqa: E402

FILES = {"trajectories": "train", "validation": "held_out"}
ROWS, HELD_OUT, EPOCHS, SIZE, EVERY = 36, 8, 8, 3, 16
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
def folder(tmp_path_factory):
    """The model and the conversations of both runs."""
    os.chdir(ROOT)
    folder = tmp_path_factory.mktemp("sft")
    save_random(make_model(folder / "model", HERMES), "Qwen3", SIZES)
    write(folder / "train.jsonl", [row(n) for n in range(ROWS)])
    write(folder / "held_out.jsonl", [row(n) for n in range(ROWS, ROWS + HELD_OUT)])
    return folder


def configured(folder: Path, *more: str) -> RunConfig:
    files = [f'{key}=["{folder / name}.jsonl"]' for key, name in FILES.items()]
    words = [
        f"model={folder / 'model'}",
        f"sft={{{', '.join(files)}}}",
        f"sft.epochs={EPOCHS}",
        f"sft.samples_per_step={SIZE}",
        f"eval.every={EVERY}",
        'policy={device="cpu", tensor_parallel=1, dtype="float32"}',
        "learner={checkpoint_every=1000, export_every=1000}",
        "learner.optimizer={lr=3e-3}",
        "lease.ttl_s=8.0",
        "poll_s=0.2",
    ]
    demo = [ROOT / "configs/demo.toml", ROOT / "configs/demo_sft.toml"]
    return configuration.read(*demo, overrides=[*more, *words])


@pytest.fixture(scope="module")
def trained(folder):
    """The finished run, whose last learner has trained every step."""
    config = configured(
        folder,
        f'policy={{type="tests.kit.hanging:HangingMegatron", fifos="{folder}"}}',
        "supervision.stuck_s=20",
        "max_restarts=9",
        "learner.checkpoint_s=0",
    )
    run = RunDir(folder / "run")
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


def learners(run: RunDir) -> list[list[int]]:
    """The steps that each learner has trained, in order of their starts."""
    found = []
    for path in run.metrics.glob("learner-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]
        found.append([(x["time"], x["step"]) for x in lines if "policy/nll" in x["values"]])
    return [[step for _, step in each] for each in sorted(filter(None, found))]


def trained_by(run: RunDir, number: int, steps: int) -> bool:
    return len(found := learners(run)) > number and len(found[number]) >= steps


def interrupt(run: RunDir, number: int, steps: int, _: object) -> None:
    """Do what Ctrl-C does to a command that watches the run, after some steps of a learner."""
    if trained_by(run, number, steps):
        raise KeyboardInterrupt


def last_tensors(run: RunDir) -> dict[str, str]:
    tensors = folders.manifest(run.weight(weights.newest(run)), WeightManifest).tensors
    return {name: tensor.digest for name, tensor in tensors.items()}


def test_a_learner_that_saves_by_time_loses_little_and_ends_alike(folder, trained):
    config, run = configured(folder, "learner.checkpoint_s=0.001"), RunDir(folder / "ended")
    ends = (signal.SIGKILL, signal.SIGUSR2, signal.SIGTERM)  # a fault, the walltime, a person
    try:
        for number, end in enumerate(ends):
            control.start(run, config)
            until(partial(trained_by, run, number, 6), "six steps of a learner", 600)
            (pid,) = role_pids(run, "learner")
            os.kill(pid, end)
            if end != signal.SIGKILL:  # after which the job starts another itself
                until(lambda: len(control.alive(run, config)) == 1, "the end of its job", 600)
        control.start(run, config)
        with pytest.raises(KeyboardInterrupt):
            watch.watch(run, config, 600, partial(interrupt, run, len(ends), 6), stop_on="error")
        assert control.alive(run, config) == []
        control.start(run, config)
        until(run.finished.exists, "the end of the run", 600)
    finally:
        control.stop(run, config, now=True)
    killed, warned, asked, interrupted, last = learners(run)
    assert 0 < warned[0] <= killed[-1], "a kill costs all, or nothing was repeated"
    assert (asked[0], interrupted[0]) == (warned[-1] + 1, asked[-1] + 1), "a signal costs steps"
    assert last[0] == interrupted[-1] + 1, "Ctrl-C in a command that watches the run costs steps"
    assert last[-1] == STEPS - 1
    assert last_tensors(run) == last_tensors(trained)


def test_the_loss_and_the_validation_loss_fall(trained):
    losses, validation = dict(points(trained, "policy/nll")), dict(points(trained, "validation/loss"))
    assert sorted(losses) == list(range(STEPS))
    assert losses[STEPS - 1] < 0.4 * losses[0]
    assert sorted(validation) == [*range(0, STEPS, EVERY), STEPS - 1, STEPS]
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
