"""An engine that somebody else runs: what a run may do with it, and what it never does."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hpc_swe.base.errors import ConfigError, EngineError
from hpc_swe.base.records import ProbeScore, Sampling, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.config import config as configuration
from hpc_swe.config import job_counts
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import control
from hpc_swe.models.engines._vllm.environment import TOKEN as VARIABLE
from hpc_swe.models.engines.scripted import FAULTS, SCORE, Scripted, ScriptedReply
from hpc_swe.roles.inference.supervisor import free_port
from hpc_swe.view import engine
from jobs import run as jobs_run
from tests.kit.checkout import ROOT, environment
from tests.kit.constants import NOBODY, empty_model
from tests.kit.engine_kit import (
    TOKEN,
    await_node,
    is_serving,
    json_replies,
    make_run,
    make_weights,
    node,
    publish,
    supervise,
    supervisors,
)
from tests.kit.run_processes import command, processes_of
from tests.kit.waiting import DEADLINE_S, until

PROBE = ProbeScore(token_ids=[5, 6, 7], logprobs=[SCORE, SCORE], tolerance=0.01)
V0, V1, V2 = (WeightVersion(step=step) for step in range(3))
PROMPT = np.asarray([1, 2])


@dataclass
class Somebody:
    """Whoever runs an engine at one address, and may end it and start it again."""

    engine: Scripted
    model: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, context: int = 4096, **changes: object) -> "Somebody":
        self.engine = msgspec.structs.replace(self.engine, **changes)
        command = self.engine.command(self.model, "127.0.0.1", self.port, "theirs", context)
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | self.engine.environ | {VARIABLE: TOKEN}
        )
        until(lambda: self.engine.is_healthy(self.url), "health")
        return self

    def end(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def stamps(self) -> list[WeightVersion]:
        spans = self.engine.generate(self.url, TOKEN, PROMPT, Sampling(), 60.0).spans
        return [version for _, _, version in spans or []]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return empty_model(make_weights(tmp_path / "model"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


@pytest.fixture
def somebody(tmp_path: Path, model: Path) -> Iterator[Somebody]:
    replies = json_replies(tmp_path / "replies.json", [ScriptedReply(token_ids=[3], logprobs=[-0.5])])
    found = Somebody(Scripted(replies=replies), model, free_port("127.0.0.1"))
    yield found
    found.end()


@pytest.fixture
def attach(run: RunDir, somebody: Somebody, model: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    with supervisors(run, model) as begin:
        yield lambda **more: begin(somebody.engine, url=somebody.url, **more)


@pytest.mark.slow
def test_it_is_given_every_newer_version_and_goes_on_when_the_run_ends(attach, run, somebody, model):
    somebody.start()
    process = attach()
    cell = await_node(run, is_serving(V0))
    assert (cell.url, somebody.stamps()) == (somebody.url, [V0])
    for version in (V1, V2):
        publish(run, model, version, probe=PROBE)
        await_node(run, is_serving(version))
        assert somebody.stamps() == [version]
    run.stop.touch()
    assert process.wait(180) == 0
    assert node(run) is None
    assert somebody.stamps() == [V2]
    assert not any(run.logs("inference").glob("*.engine.log"))


def test_what_another_run_left_in_it_is_not_taken_for_ours(attach, run, somebody, model, tmp_path):
    """Version names are the same in all runs, so an engine's stamp proves nothing to a run that attaches."""
    somebody.start()
    other = make_run(tmp_path / "other")
    publish(other, model, V2)
    supervisor = supervise(other, somebody.engine, model, url=somebody.url)
    await_node(other, is_serving(V2))
    supervisor.kill()
    supervisor.communicate()
    assert somebody.stamps() == [V2]
    attach()
    await_node(run, is_serving(V0))
    assert somebody.stamps() == [V0]


def test_a_plain_one_serves_the_model_it_came_up_with(attach, run, somebody):
    somebody.start(environ={FAULTS: "plain"})
    attach()
    assert await_node(run, is_serving(V0)).url == somebody.url
    assert somebody.stamps() == [], "its route has none, so the cell in nodes/ names its version"


@pytest.mark.slow
def test_one_that_dies_is_waited_for_and_given_its_weights_again(attach, run, somebody, model):
    somebody.start()
    process = attach()
    publish(run, model, V1, probe=PROBE)
    await_node(run, is_serving(V1))
    somebody.end()
    cell = await_node(run, lambda node: not node.url)
    assert (cell.state, cell.versions) == ("starting", [])
    somebody.start()
    await_node(run, is_serving(V1))
    assert somebody.stamps() == [V1]
    run.stop.touch()
    _, log = process.communicate(timeout=600)
    assert re.search(rf"restart 1 of \d: .*{somebody.url}", log)


def test_one_that_comes_back_without_update_routes_serves_no_old_weights(attach, run, somebody, model):
    somebody.start()
    process = attach(max_restarts=0, poll_s=4.0)
    publish(run, model, V1)
    await_node(run, is_serving(V1))
    process.send_signal(signal.SIGSTOP)  # between two looks: one that is going on would find no health
    somebody.end()
    somebody.start(environ={FAULTS: "plain"})
    process.send_signal(signal.SIGCONT)
    _, log = process.communicate(timeout=600)
    assert process.returncode == EngineError.exit_code
    assert f"{somebody.url} stamps None, and was given {V1.name}" in log


@pytest.mark.slow
def test_one_that_restarts_between_two_looks_is_given_its_weights_again(attach, run, somebody, model):
    somebody.start()
    process = attach()
    publish(run, model, V1, probe=PROBE)
    await_node(run, is_serving(V1))
    process.send_signal(signal.SIGSTOP)
    somebody.end()
    somebody.start()
    process.send_signal(signal.SIGCONT)
    until(lambda: somebody.stamps() == [V1], "the stamp of what it was given")


@pytest.mark.slow
def test_one_that_stays_away_is_one_clear_error_after_the_deadline(attach, somebody):
    somebody.engine = msgspec.structs.replace(somebody.engine, load_timeout_s=1.0)
    process = attach(max_restarts=1)
    _, log = process.communicate(timeout=600)
    assert process.returncode == EngineError.exit_code
    assert f"EngineError: no health at {somebody.url} in 1 s; somebody else runs it" in log


def configured(somebody: Somebody, *words: str) -> RunConfig:
    """The demo with somebody's engine; no jobs are started."""
    engine = f'engine={{type="scripted", replies="{somebody.engine.replies}"}}'
    small = ["tasks.train=2", "tasks.eval=2", 'sandbox={type="process"}', f"model={somebody.model}"]
    words = (*small, *NOBODY, engine, f"inference.url={somebody.url}", *words)
    return configuration.read(ROOT / "configs/demo.toml", ROOT / "configs/demo_eval.toml", overrides=words)


@pytest.fixture
def key(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)


def test_its_key_becomes_the_token_of_the_run_and_is_in_no_configuration(tmp_path, somebody, key):
    somebody.start(environ={FAULTS: "plain"})
    run = RunDir(tmp_path / "started")
    control.start(run, configured(somebody))
    assert run.token.read_text() == TOKEN
    assert TOKEN not in run.config.read_text()
    os.environ["VLLM_API_KEY"] = ""  # restored by the fixture
    control.start(run, configured(somebody))
    assert run.token.read_text() == TOKEN


def test_it_needs_a_supervisor_with_the_coordinator_and_no_inference_job(tmp_path, somebody):
    config = configured(somebody, "counts.inference=4", "counts.coordinator=1")
    assert job_counts.desired(config)["inference"] == 0
    commands = jobs_run.commands(RunDir(tmp_path), "coordinator", config)
    assert [command[-2:] for command in commands] == [
        ["jobs.coordinator", str(tmp_path)],
        ["jobs.inference", str(tmp_path)],
    ]


REFUSALS = {
    "no answer": ({}, [], r"no answer"),
    "no updates": (
        {"environ": {FAULTS: "plain"}},
        ['mode="grpo"'],
        r"no routes that update.*mode = \"eval\", or start it with .*hpc_swe.engine",
    ),
    "short": ({"context": 100}, [], r"takes 100 tokens.* set rollout.context to at most 100"),
    "another machine": ({}, ['executor={type="slurm"}'], r"another machine for each job; write this host's"),
}


@pytest.mark.parametrize(("changes", "words", "why"), REFUSALS.values(), ids=REFUSALS)
def test_a_run_that_cannot_use_it_is_refused_once(tmp_path, somebody, key, changes, words, why, request):
    if "no answer" not in request.node.name:
        somebody.start(**changes)
    run = RunDir(tmp_path / "refused")
    with pytest.raises(ConfigError, match=rf"inference.url = '{somebody.url}'.*{why}"):
        control.start(run, configured(somebody, *words))
    assert not run.root.exists()


def test_a_wrong_key_and_another_model_are_told_apart(tmp_path, somebody, monkeypatch):
    somebody.start()
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with pytest.raises(ConfigError, match=r"refuses the key \(HTTP 401\).*give its key in VLLM_API_KEY"):
        control.start(RunDir(tmp_path / "a"), configured(somebody))
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    other = empty_model(tmp_path / "another")
    with pytest.raises(ConfigError, match=rf"another model, {somebody.model}, than model = '{other}'"):
        control.start(RunDir(tmp_path / "b"), configured(somebody, f"model={other}"))


def test_an_address_carries_no_key(somebody):
    for url in ("http://key@host:8000", "https://host:8000/?key=1", "host:8000"):
        with pytest.raises(ConfigError, match=r"must be http\(s\)://host:port.*VLLM_API_KEY"):
            configured(somebody, f"inference.url={url}")


def type_into_shell(line: str, folder: Path) -> "subprocess.Popen[str]":
    """Start a line in a session of its own, where `env` and `srun` keep their arguments until it ends."""
    folder.mkdir()
    for name, rest in (("env", f'{shutil.which("env")} "$@"'), ("srun", '"$@"')):
        (folder / name).write_text(f'#!/bin/sh\n{rest}\nexit "$?"\n')
        (folder / name).chmod(0o755)
    paths = os.pathsep.join([str(folder), os.environ["PATH"]])
    return subprocess.Popen(
        ["bash", "-c", line],
        env=environment(PATH=paths),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("before", ["", "srun "])
def test_the_printed_line_shows_its_key_to_no_other_user(tmp_path, somebody, monkeypatch, before):
    key = "what-nobody-else-may-read"
    config = configured(somebody)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    process = type_into_shell(before + engine.line(config), tmp_path / "no_key")
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode
    assert "VLLM_API_KEY" in said
    monkeypatch.setenv("VLLM_API_KEY", key)
    process = type_into_shell(before + engine.line(config), tmp_path / "with_key")
    try:
        until(lambda: config.engine.is_healthy(somebody.url), "health")
        shown = [command(pid) for pid in processes_of(tmp_path)]
        assert any("hpc_swe.models.engines.scripted" in words for words in shown)
        assert not any(key in words for words in shown)
        assert config.engine.inspect(somebody.url, key).can_update
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
