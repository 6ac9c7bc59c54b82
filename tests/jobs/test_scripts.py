"""The scripts: each only gives words to `launch`, so what counts is the run that comes of them."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import urllib.request
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_swe.base.drawing import Drawing
from hpc_swe.base.metrics import Log
from hpc_swe.base.rundir import RunDir
from hpc_swe.config import config as configuration
from hpc_swe.roles.inference.supervisor import free_port
from tests.kit.checkout import ROOT
from tests.kit.constants import NOBODY, empty_model

SCRIPTS = sorted(path for path in (ROOT / "sbatch").iterdir() if path.suffix in (".sh", ".sbatch"))
SWEPDB = {
    "4b": ["swepdb", "slurm", "swepdb_4b"],
    "8b": ["swepdb", "slurm", "recipes/4xh100", "models/qwen3_8b"],
    "14b": ["swepdb", "slurm", "swepdb_14b"],
    "14b_rewrite": ["swepdb", "slurm", "swepdb_14b", "swepdb_14b_rewrite"],
}
HERE = [*NOBODY, 'executor={type="local"}', 'sandbox={type="process"}', "tasks.train=2", "tasks.eval=1"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return empty_model(tmp_path / "a model")


@pytest.fixture
def rows(tmp_path: Path) -> str:
    for split in ("train", "eval"):
        files = [{"path": "test.py", "content": f"def test_{split}(): assert 1 == 1"}]
        files += [{"path": "a.py", "content": ""}]
        made = [
            {"task_id": f"{split}-{n}", "problem_statement": "", "extra_info": {"files": files}}
            for n in range(3)
        ]
        pq.write_table(pa.Table.from_pylist(made), tmp_path / f"{split}.parquet")
    return f'taskset={{type="kodcode", train="{tmp_path}/train.parquet", eval="{tmp_path}/eval.parquet"}}'


def script(
    name: str, *words: object, check: bool = True, **env: object
) -> "subprocess.CompletedProcess[str]":
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "VLLM"))}
    done = subprocess.run(
        ["bash", f"sbatch/{name}", *map(str, words)],
        cwd=ROOT,
        env=variables | {name: str(value) for name, value in env.items()},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_short_and_parses(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 28
    subprocess.run(["bash", "-n", path], check=True)


def test_variables_become_the_values_of_the_swebench_run(tmp_path: Path, model: Path) -> None:
    """The rows are not shipped, so the tasks are others."""
    out = tmp_path / "out put"
    ours = ['taskset={type="bugs"}', 'grader={type="pytest"}']
    settings = {"NUM_ROLLOUTS": 7, "ROLLOUT_BATCH_SIZE": 3, "N_SAMPLES": 5, "MODEL": model, "OUTPUT_DIR": out}
    script("train_swebench.sbatch", *HERE, *ours, **settings)
    made = json.loads(RunDir(out).config.read_text())
    groups = made["groups"]
    assert (made["steps"], groups["groups_per_step"], groups["group_size"]) == (7, 3, 5)
    assert (made["model"], made["inference"]["url"]) == (str(model), "")


def test_what_is_not_set_is_as_the_configuration_says(tmp_path: Path, model: Path) -> None:
    words = [*HERE, f"model={model}", 'taskset={type="bugs"}', 'grader={type="pytest"}']
    script("train_swebench.sbatch", *words, "--run", tmp_path / "run")
    made = configuration.build(json.loads(RunDir(tmp_path / "run").config.read_text()), "run.json")
    names = ("swebench.toml", "slurm.toml", "recipes/8xh100.toml", "models/qwen3_coder_30b_a3b.toml")
    files = [ROOT / "configs" / name for name in names]
    assert made == configuration.read(*files, overrides=words)


def test_an_engine_of_somebody_else_s_is_asked_for_by_its_address(tmp_path: Path, model: Path) -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    words = [*HERE, 'taskset={type="bugs"}', 'grader={type="pytest"}']
    settings = {"VLLM_URL": url, "MODEL": model, "OUTPUT_DIR": tmp_path / "run"}
    done = script("train_swebench.sbatch", *words, check=False, **settings)
    assert done.returncode == 2
    assert f"inference.url = '{url}'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_tick_by_another_interpreter_says_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text("{}")
    done = script("tick.sh", tmp_path, check=False, HPC_SWE_PYTHON="/nowhere/python")
    assert done.returncode
    assert "/nowhere/python" in done.stderr


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_tick_of_a_wrong_folder_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    done = script("tick.sh", tmp_path / name, check=False)
    assert done.returncode == 2
    assert f"{tmp_path / name}: " in done.stderr


def test_runs_that_ended_are_ticked_for_a_day_and_then_passed_over(tmp_path: Path) -> None:
    """A tick cancels what still waits, but Slurm is not asked for ever about runs of the past."""
    (tmp_path / "python").write_text(f"#!/bin/sh\nfor run; do :; done; basename $run >> {tmp_path}/ticked\n")
    (tmp_path / "python").chmod(0o755)
    orders = {"live": "", "new": "FINISHED", "old": "FINISHED", "stopped": "STOP", "drained": "DRAIN"}
    for name, order in orders.items():
        run = RunDir(tmp_path / "runs" / name)
        run.control.mkdir(parents=True)
        run.config.write_text("{}")
        (run.control / (order or "notes")).touch()
        if name != "new":
            os.utime(run.control / (order or "notes"), times=(time.time() - 90_000,) * 2)
    script("tick.sh", tmp_path / "runs", HPC_SWE_PYTHON=tmp_path / "python")
    assert (tmp_path / "ticked").read_text().split() == ["live", "new"]


def test_ticks_take_no_environment_that_is_not_filled_or_not_the_run_s(tmp_path: Path) -> None:
    """A run of older code names no Python: its jobs get that of its ticks, which was that of .venv."""
    checkout = tmp_path / "checkout"
    (checkout / "sbatch").mkdir(parents=True)
    for name in ("python", "tick.sh"):
        shutil.copy(ROOT / "sbatch" / name, checkout / "sbatch")
    for name in (".venv", ".venv-gpu"):
        python = checkout / name / "bin/python"
        python.parent.mkdir(parents=True)
        note = f"echo $(basename $run) {name} >> {tmp_path}/ticked"
        python.write_text(f"#!/bin/sh\nfor run; do :; done; {note}\n")
        python.chmod(0o755)
    for name, environment in (("new", {"HPC_SWE_PYTHON": "/gpu/bin/python"}), ("old", {})):
        run = RunDir(tmp_path / "runs" / name)
        run.control.mkdir(parents=True)
        run.config.write_text("{}")
        run.manifest.write_text(json.dumps({"environment": environment}))
    for is_filled in (False, True):
        if is_filled:
            (checkout / ".venv-gpu/setup.stamp").touch()
        tick = [checkout / "sbatch/tick.sh", tmp_path / "runs"]
        subprocess.run(tick, env={"PATH": os.environ["PATH"]}, check=True, timeout=600)
    ticked = (tmp_path / "ticked").read_text().splitlines()
    assert ticked == ["new .venv", "old .venv", "new .venv-gpu", "old .venv"]


@pytest.mark.parametrize("size", SWEPDB)
def test_variables_become_the_values_of_the_debugging_run(
    tmp_path: Path, model: Path, rows: str, size: str
) -> None:
    base = tmp_path / "runs of mine"
    settings = {
        "SWE_PDB_MODEL_PATH": model,
        "SWE_PDB_CHECKPOINT_BASE": base,
        "N_PARALLEL": 4,
        "MAX_STEPS": 60,
    }
    script(f"train_swepdb_{size}.sbatch", *HERE, rows, **settings)
    made = configuration.build(json.loads(RunDir(base / f"swepdb_{size}").config.read_text()), "run.json")
    overrides = [*HERE, rows, f"model={model}", "groups.group_size=4", "agent.max_turns=60"]
    files = [ROOT / "configs" / f"{name}.toml" for name in SWEPDB[size]]
    assert made == configuration.read(*files, overrides=overrides)


def test_the_ablation_leaves_out_the_debugger_and_nothing_else() -> None:
    trees = []
    for size in ("14b", "14b_rewrite"):
        files = [ROOT / "configs" / f"{name}.toml" for name in SWEPDB[size]]
        trees.append(configuration.dump(configuration.read(*files)))
    full, ablated = trees
    tools, fewer = full["agent"].pop("tools"), ablated["agent"].pop("tools")
    prompt, shorter = full["agent"].pop("system_prompt"), ablated["agent"].pop("system_prompt")
    assert full == ablated
    assert [tool for tool in tools if tool not in fewer] == [{"type": "pdb", "timeout_s": 30.0}]
    assert [tool for tool in tools if tool in fewer] == list(fewer)
    advice = (
        ": start pdb on a failing test, stop at suspicious lines, and look at values instead of guessing them"
    )
    assert prompt == shorter.replace("change anything.", f"change anything{advice}.")


def test_files_with_several_steps_a_batch_hold_weights_near_the_sampler() -> None:
    for path in (ROOT / "configs").glob("**/*.toml"):
        table = tomllib.loads(path.read_text()).get("learner", {})
        optimizer = table.get("optimizer", {})
        if optimizer.get("epochs", 1) * optimizer.get("minibatches", 1) > 1:
            assert table.get("loss", {}).get("sampler_coefficient", 0.01) >= 0.01
            assert optimizer["lr"] <= 2.5e-5, path.name


@pytest.fixture
def runs(tmp_path: Path, model: Path) -> Path:
    folder = tmp_path / "runs"
    for name in ("a", "b"):
        command = [sys.executable, "-m", "hpc_swe.launch", "start", "configs/demo.toml", *HERE]
        words = [*command, f"model={model}", "--run", folder / name]
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_a_role_by_hand_runs_where_the_checkout_alone_has_jobs(tmp_path: Path, runs: Path) -> None:
    """Its processes import them although no environment installs a package of that name."""
    run = RunDir(runs / "a")
    run.finished.touch()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))  # .pth files there do not count
    python = tmp_path / "venv/bin/python"
    script("role.sbatch", "reward", run.root, HPC_SWE_PYTHON=python, PYTHONPATH="")
    assert not any(run.nodes.iterdir())


@pytest.mark.slow
def test_ticks_are_silent_unless_something_is_to_be_done(runs: Path) -> None:
    bare = {"HOME": str(runs), "PATH": "/usr/bin:/bin"}  # as cron has it

    def tick(folder: Path) -> "subprocess.CompletedProcess[str]":
        command = [ROOT / "sbatch/tick.sh", folder]
        return subprocess.run(command, env=bare, cwd="/", capture_output=True, text=True, timeout=600)

    RunDir(runs / "b").drain.touch()
    for folder in (runs, runs / "a"):
        done = tick(folder)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(runs.glob("*/logs/tick.log"))

    broken = RunDir(runs / "a")
    whole = broken.config.read_text()
    broken.config.write_text("{}")
    done = tick(runs)  # one run's fault is not another's
    assert done.returncode == 2
    assert f"{broken.root}: exit code 2" in done.stderr
    assert "exit code 2" in (broken.root / "logs/tick.log").read_text()
    assert not (runs / "b/logs/tick.log").exists()
    again = tick(runs)
    assert (again.returncode, again.stderr) == (2, ""), "the same failure is said once"
    broken.config.write_text("[]")
    assert f"{broken.root}: exit code 3" in tick(runs).stderr, "another failure is said"

    broken.config.write_text(whole.replace('"reward": 0', '"reward": 1'))
    RunDir(runs / "b").finished.touch()
    try:
        done = tick(runs)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
        assert "submitted 1 reward" in (broken.root / "logs/tick.log").read_text()
        assert not (broken.root / "logs/tick.failed").exists()
    finally:
        stop = [sys.executable, "-m", "hpc_swe.launch", "stop", broken.root, "--now"]
        subprocess.run(stop, cwd=ROOT, check=True, capture_output=True, timeout=600)


@pytest.mark.slow
def test_tensorboard_shows_all_runs_of_a_folder_to_this_machine_alone(runs: Path) -> None:
    for name in ("a", "b"):
        run = RunDir(runs / name)
        Log(run.metric_log("test")).write(1, {"loss": 1.0})
        Drawing(run).update()
    port = free_port("127.0.0.1")
    process = subprocess.Popen(
        [ROOT / "sbatch/tensorboard.sh", runs, str(port)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        assert f"ssh -N -L {port}:localhost:{port} ".encode() in process.stdout.readline()
        deadline = time.monotonic() + 180
        found: set[str] = set()
        while found != {"a", "b"}:
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=60) as answer:
                    found = {name.partition("/")[0] for name in json.load(answer)}
            except OSError:
                continue
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        assert command[command.index(b"--host") + 1] == b"127.0.0.1"
    finally:
        process.kill()
        process.communicate()


def test_a_folder_without_runs_is_one_error(tmp_path: Path) -> None:
    done = script("tensorboard.sh", tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path}: no run here" in done.stderr
