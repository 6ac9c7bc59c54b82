"""Curves for trackers of others. The packages are stood in for by modules that write down their calls."""

import json
import sys

import pytest

from hpc_swe.base.metrics import Log
from hpc_swe.base.records import RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.base.tracking import FOLDERS, Tracking
from hpc_swe.roles.coordinator.loop import drawings
from tests.kit.checkout import started

EMPTY = dict.fromkeys(("commit", "model_sha256", "config_sha256", "folder"), "")
STAND_IN = """
import json, os
def _note(name):
    def call(*words, **named):
        with open(os.environ["CALLS"], "a") as file:
            file.write(json.dumps([name, words, named, os.environ.get("WANDB_MODE")]) + chr(10))
    return call
init, log, define_metric = _note("init"), _note("log"), _note("define_metric")
"""


@pytest.mark.parametrize("package", FOLDERS)
def test_each_line_is_sent_once_and_a_restart_sends_all_again(tmp_path, monkeypatch, package):
    (tmp_path / f"{package}.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for variable in (*FOLDERS.values(), "WANDB_MODE", "WANDB_CONSOLE"):  # set again, as they were, at the end
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    run = RunDir(tmp_path / "run")
    run.make()
    learner, coordinator = (Log(run.metric_log(name)) for name in ("learner-1", "coordinator-1"))
    coordinator.write(0, {"reward/mean": 0.25})
    run.config.write_text(json.dumps({"steps": 3, "tracker": package}))
    atomic.put(run.manifest, RunManifest(protocol=1, run_id="run-abc", environment={}, **EMPTY))
    tracking = drawings(run)[-1]
    tracking.update()
    coordinator.write(1, {"reward/mean": 0.5})
    learner.write(0, {"policy/loss": 2.0})
    tracking.update()
    tracking.update()
    drawings(run)[-1].update()
    monkeypatch.delitem(sys.modules, package)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    logged = [(words[0], named) for name, words, named, _ in calls if name == "log"]
    sent = [({**v, **named}["step"], next(iter(v.items()))) for v, named in logged]
    first = [(0, ("reward/mean", 0.25)), (0, ("policy/loss", 2.0)), (1, ("reward/mean", 0.5))]
    assert sent == [*first, *first]
    opened = [named for name, _, named, _ in calls if name == "init"]
    assert [each["group"] for each in opened] == ["run-abc"] * 2
    assert opened[0]["config"] == {"steps": 3, "tracker": package}
    assert {mode for *_, mode in calls} == {"offline"}, "a compute node has no network"
    assert (run.root / "tracked" / package).is_dir()


@pytest.mark.parametrize("call", ["init", "log"])
def test_a_tracker_that_fails_costs_one_warning_and_no_training(tmp_path, monkeypatch, caplog, call):
    fails = f"{call} = lambda *words, **named: 1 / 0\n"
    (tmp_path / "trackio.py").write_text(f"init = log = lambda *words, **named: None\n{fails}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    for variable in (*FOLDERS.values(), "WANDB_MODE", "WANDB_CONSOLE"):
        monkeypatch.setenv(variable, "")
    run = RunDir(tmp_path / "run")
    run.make()
    tracking = Tracking(run, "trackio", "run-abc", {})
    for step in range(3):
        Log(run.metric_log("learner-1")).write(step, {"policy/loss": 2.0})
        tracking.update()
    monkeypatch.delitem(sys.modules, "trackio")
    assert caplog.messages == ["tracking ended by trackio: ZeroDivisionError: division by zero"]


def test_a_tracker_that_is_not_installed_is_refused_by_the_start(tmp_path):
    (tmp_path / "wandb").mkdir()  # what W&B keeps is no package
    words = (f"model={tmp_path}", "tracker=wandb", "--run", tmp_path / "run", "--dry-run")
    done = started("hpc_swe.launch", "start", "configs/demo.toml", *words, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "has no such package; pip install wandb, or leave the key out" in done.stderr
