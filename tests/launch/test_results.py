"""What people do with a run's results: export, serve, clean, compare, share."""

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from hpc_swe.base.records import WeightManifest, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders, sharing
from hpc_swe.base.store.parquet import evals
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.config import config as configuration
from hpc_swe.launch import control, existing
from tests.kit.checkout import ROOT, typed
from tests.kit.constants import NOBODY
from tests.kit.reported_run import RunMaker
from tests.kit.waiting import DEADLINE_S

pytestmark = pytest.mark.slow
V0, V10, V20, V30 = (WeightVersion(step=step, incarnation=1) for step in (0, 10, 20, 30))


command = partial(typed, "hpc_swe.launch")


def make_run(root, model, *words) -> RunDir:
    os.umask(0o077)
    overrides = [
        f"model={model}",
        'sandbox={type="process"}',
        "tasks.train=2",
        "tasks.eval=1",
        *NOBODY,
        *words,
    ]
    control.start(run := RunDir(root), configuration.read(ROOT / "configs/demo.toml", overrides=overrides))
    return run


def publish(run: RunDir, version: WeightVersion, model: Path, parent: WeightVersion | None = None) -> None:
    def fill(stage: Path) -> WeightManifest:
        names = [path.name for path in model.iterdir()]
        files = {name: folders.write(stage, name, (model / name).read_bytes()) for name in names}
        return WeightManifest(writer="l", files=files, version=version, tensors={}, parent=parent)

    folders.publish(run.weight(version), fill)


@pytest.fixture
def run(tmp_path, model):
    """A run with four versions, the last of them a delta; the evaluation of step 10 was the best."""
    run = make_run(tmp_path / "run", model)
    for version in (V0, V10, V20):
        publish(run, version, model)
    publish(run, V30, model, parent=V20)
    for step, outcomes in ((0, "u"), (10, "r"), (20, "u")):
        outcome = "resolved" if outcomes == "r" else "unresolved"
        rows = [Attempt(task_id="t", index=0, sampling="greedy", sample=0, outcome=outcome, reward=None)]
        evals.write(run.eval_table(f"step_{step:06d}"), rows)
    return run


def test_the_best_version_is_exported_as_a_folder_that_others_open(run, model, tmp_path):
    out = tmp_path / "given" / "model"
    done = command("export", run.root, "--out", out)
    assert (done.returncode, "v000010-i01 of" in done.stdout) == (0, True), done.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in model.iterdir()
    }
    again = command("export", run.root, "--out", out)
    assert (again.returncode, "exists; name a folder that is not there" in again.stderr) == (2, True)


def test_a_delta_or_damaged_weights_are_never_exported(run, tmp_path):
    out = tmp_path / "out" / "model"
    delta = command("export", run.root, "--version", "newest", "--out", out)
    assert delta.returncode == 2
    assert "only what changed since" in delta.stderr
    assert "v000000-i01, v000010-i01, v000020-i01" in delta.stderr
    with (run.weight(V20) / "config.json").open("a") as file:
        file.write(" ")
    damaged = command("export", run.root, "--version", "v000020-i01", "--out", out)
    assert (damaged.returncode, "config.json: not what the learner published" in damaged.stderr) == (3, True)
    assert list(out.parent.iterdir()) == [], "nothing is left that looks like a model"


def test_the_line_that_serves_a_version_has_the_models_own_form_of_calls(run):
    done = command("serve", run.root, "--version", "v000020-i01")
    words = shlex.split(done.stdout)
    assert words[:3] == ["vllm", "serve", str(run.weight(V20))], done.stderr
    assert words[words.index("--tool-call-parser") + 1] == "hermes"
    assert words[words.index("--served-model-name") + 1] == "run-v000020-i01"


def test_no_other_version_is_given_away_for_the_best_one_that_is_gone(run):
    folders.remove(run.weight(V10))
    done = command("serve", run.root)
    assert (done.returncode, "the weights of step 10 are gone" in done.stderr) == (2, True), done.stdout


def test_clean_lists_sizes_and_deletes_the_named_parts_alone(run):
    (run.tensorboard / "events").write_bytes(bytes(2_000_000))
    listed = command("clean", run.root)
    assert [line.split()[-2:] for line in listed.stdout.splitlines() if "pages" in line] == [["1", "2.0"]]
    assert (run.tensorboard / "events").exists(), "a list deletes nothing"
    unknown = command("clean", run.root, "logs")
    assert (unknown.returncode, "known: pages, traces, versions, state" in unknown.stderr) == (2, True)
    assert command("clean", run.root, "pages", "versions").returncode == 0
    assert not (run.tensorboard / "events").exists()
    assert atomic.names(run.weights) == [v.name for v in (V10, V20, V30)], (
        "the best, the newest, and what the newest builds on"
    )


def test_nothing_is_deleted_under_a_process_that_was_started_by_hand(run):
    run.node("learner-1").write_bytes(b"{}")
    refused = command("clean", run.root, "versions")
    assert (refused.returncode, "by hand may run: learner-1.json; end them" in refused.stderr) == (2, True)
    assert run.weight(V0).exists()


def test_a_run_without_its_state_is_exported_but_not_continued(run, tmp_path):
    assert command("clean", run.root, "state").returncode == 0
    assert command("export", run.root, "--out", tmp_path / "out").returncode == 0
    refused = command("start", "--run", run.root)
    assert refused.returncode == 3, refused.stderr
    assert "no batch is intact" in refused.stderr


def test_two_runs_are_compared_key_by_key(run, tmp_path, model):
    other = make_run(tmp_path / "other", model, "seed=5", "learner.optimizer.lr=0.25")
    done = command("compare", run.root, other.root)
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["learner.optimizer.lr", "seed"], done.stderr
    assert "seed: 0 -> 5" in lines
    assert command("compare", run.root, run.root).stdout == "no key differs\n"
    made = json.loads(other.manifest.read_text())
    other.manifest.write_text(json.dumps(made | {"folder": str(tmp_path / "gone")}))
    assert command("compare", run.root, other.root).stdout == done.stdout
    assert json.loads(other.config.read_text())["seed"] == 5


def readable(run: RunDir) -> set[str]:
    """What the group can read, a closed folder with all that is in it left out."""
    found = set()
    for folder, names, files in os.walk(run.root):
        names[:] = [name for name in names if Path(folder, name).stat().st_mode & 0o010]
        paths = [Path(folder, name) for name in (*names, *files)]
        found |= {str(p.relative_to(run.root)) for p in paths if p.stat().st_mode & 0o040}
    return found


@pytest.fixture
def alone():
    """Later tests of this process share nothing."""
    yield
    os.umask(0o077)


SECRETS = {"token", "tasks.parquet", "references.json", "changed_tests.json"}
CLOSED = {
    "batches",
    "tracked",
    "checkpoints",
    "code",
    "episodes",
    "nodes",
    "requests",
    "scored",
    "weights",
    "stacks",
}


def test_a_shared_run_opens_what_people_look_at_and_no_more(tmp_path, model, alone):
    run = make_run(tmp_path / "run", model)
    evals.write(run.eval_table("step_000010"), [])
    assert readable(run) == set()
    done = command("start", "--run", run.root, "share=group")
    assert done.returncode == 0, done.stderr
    assert {"run.json", "MANIFEST.json", "evals/step_000010.parquet", "state"} <= readable(run)
    sharing.take_umask(run)  # as each job does
    control.start(run, existing.load(run, trains=True))  # writes the token again
    atomic.write(run.status, b"{}")
    run.logs("learner").mkdir(parents=True)
    run.stacks.joinpath("later").write_bytes(b"")
    opened = readable(run)
    assert {"state/status.json", "logs/learner"} <= opened
    assert [path for path in opened if path in SECRETS or path.partition("/")[0] in CLOSED] == []
    assert [path for path in opened if (run.root / path).stat().st_mode & 0o027] == [], "nobody else may"
    assert [p.name for p in run.root.iterdir() if p.name in CLOSED and p.stat().st_mode & 0o077] == []
    assert stat.S_IMODE(run.root.stat().st_mode) == 0o2750, "later files have the group of the run"
    run.status.chmod(0o600)  # by a process that began before
    assert command("clean", run.root, "traces").returncode == 0
    assert "state/status.json" in readable(run)
    assert run.stacks.stat().st_mode & 0o077 == run.tracked.stat().st_mode & 0o077 == 0
    assert command("start", "--run", run.root, 'share=""').returncode == 0
    assert readable(run) == set()
    assert stat.S_IMODE(run.root.stat().st_mode) == 0o700


def test_sharing_leaves_what_links_lead_to_as_it_is(tmp_path, alone):
    run, outside = RunDir(tmp_path / "run"), tmp_path / "of_the_lab"
    run.make()
    outside.mkdir(mode=0o755)
    file = outside / "weights"
    file.write_bytes(b"")
    modes = [path.stat().st_mode for path in (outside, file)]
    for link in (run.root / "model", run.report):
        link.symlink_to(outside)
    for with_group in (True, False):
        sharing.share(run, with_group)
        assert [path.stat().st_mode for path in (outside, file)] == modes


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_a_colleague_looks_at_a_shared_run_and_changes_nothing(alone):
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    as_other = ["setpriv", "--reuid=54322", "--regid=54321", "--clear-groups", "env", f"HOME={place}"]

    def other(module, *words):
        line = [*as_other, sys.executable, "-B", "-m", f"hpc_swe.{module}", *map(str, words)]
        return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S)

    if other("launch", "--help").returncode:
        shutil.rmtree(place)
        pytest.skip("other users cannot enter this checkout")
    try:
        maker = RunMaker(place / "run")
        maker.step(0)
        os.chown(maker.run.root, -1, 54321)
        closed = other("status", maker.run.root)
        assert "closed to you; its owner may let a group read it" in closed.stderr
        sharing.share(maker.run, with_group=True)
        for path in maker.run.root.rglob("*"):
            os.chown(path, -1, 54321)  # as setgid of the folder does with later files
        assert "role" in other("status", maker.run.root).stdout
        assert "archived steps" in other("show", maker.run.root).stdout
        assert "I look at the file" in other("show", maker.run.root, "--task", "bugs-train-7").stdout
        (place / "out").mkdir()
        (place / "out").chmod(0o777)
        report = other("report", maker.run.root, "--out", place / "out/report")
        assert (report.returncode, (place / "out/report/index.html").exists()) == (0, True), report.stderr
        assert (
            "belongs to user 0; a run is acted on by its owner only"
            in other("launch", "stop", maker.run.root).stderr
        )
        assert other("show", maker.run.root / "tasks.parquet").returncode
    finally:
        shutil.rmtree(place)
