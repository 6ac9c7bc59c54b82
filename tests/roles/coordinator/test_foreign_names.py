"""Whatever people, editors and dying disks put into any folder of a run: it goes on, and does the same."""

import os
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_swe.base.records import BatchManifest, ScoredEpisode, WeightVersion
from hpc_swe.base.rundir import SPOOLS, RunDir
from hpc_swe.base.store import atomic, checkpoints, folders, orders, submissions, weights
from hpc_swe.base.store.spool import STATES, Spool
from hpc_swe.roles.coordinator.batching import batches
from tests.kit.coordinator_kit import (
    KEPT,
    Clock,
    export,
    finish,
    make_maintenance,
    published,
    requests_of,
    result,
    rundir,
    save,
    training,
)

DEEP = 2
PUBLISHED = ("batches", "weights", "checkpoints")
PLACES = (
    *PUBLISHED,
    *(f"{spool}/{state}" for spool in SPOOLS for state in STATES),
    *SPOOLS,
    *("", "control", "nodes", "state", "state/incarnations", "evals", "archive", "archive/episodes"),
    *("metrics", "tensorboard", "logs", "launch", "launch/rollout"),
)
ABSURD = ("999999", "99999999", "999999999", "9" * 30, "000000", "-00001", "00012", "0000012", "1e6")
ABSURD += ("\u0661" * 6, "\u00b2")
FORMS = {
    "batches": ("step_{}", "step_{}.bak", "step_{}~"),
    "weights": ("v{}-i00", "v{}-i99", "v{}"),
    "checkpoints": ("step_{}-i00", "step_{}-i99", "step_{}"),
    "launch/rollout": ("{}", "{}.void", "{}.doubted"),
    "state/incarnations": ("{}",),
    "tensorboard": ("events.out.tfevents.{}.hpc_swe", "events.out.tfevents.{}"),
    "evals": ("step_{}.parquet",),
    "metrics": ("coordinator-{}.jsonl",),
}
SPOOLED = ("train-{}-00~0", "train-{}-00~0~w", "eval-{}-00~0", "train-{}-00", "train-{}-99~{}")
SPOOLED += ("{}~0", "x~{}", "x~{}~w")
JUNK = (
    st.binary(min_size=1, max_size=200)
    .map(os.fsdecode)
    .filter(lambda name: not {"/", "\0"} & {*name} and name not in (".", ".."))
)
CONTENTS = st.one_of(st.just(b""), st.just(b"{}"), st.just(b'{"writer": "l", "fil'), st.binary(max_size=50))


@st.composite
def strays(draw):
    """(folder, name, content or None for a folder): never the name of a message that is under way."""
    place = draw(st.sampled_from(PLACES))
    forms = FORMS.get(place, SPOOLED if place.rpartition("/")[0] in SPOOLS else ("{}.json",))
    number = draw(st.sampled_from(ABSURD))
    if place in PUBLISHED and draw(st.booleans()):
        number = draw(st.sampled_from(("000001", "000002", "000003")))  # it will be in the way
    named = draw(st.sampled_from(forms)).format(number, number)
    is_message = "00000" in number and place not in PUBLISHED
    name = draw(JUNK) if is_message or draw(st.booleans()) else named
    return place, name, draw(st.one_of(st.none(), CONTENTS))


def put(run: RunDir, place: str, name: str, content: bytes | None) -> None:
    path = run.root / place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    if content is None:
        path.mkdir()
        (path / folders.NAME).write_bytes(b'{"writer": "l", "fil')
    else:
        path.write_bytes(content)


@lru_cache(maxsize=1)
def undisturbed() -> dict[str, object]:
    root = Path(mkdtemp())
    finish(rundir(root), steps=DEEP)
    seen = published(at(root))
    shutil.rmtree(root)
    return seen


def at(root: Path) -> RunDir:
    return RunDir(root / "run")


@settings(
    max_examples=int(os.environ.get("FOREIGN_EXAMPLES", "12")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(found=st.lists(strays(), min_size=1, max_size=12))
def test_a_run_among_foreign_names_does_what_it_does_without_them(tmp_path, found):
    root = Path(mkdtemp(dir=tmp_path))
    run = rundir(root)
    for stray in found:
        put(run, *stray)
    finish(run, steps=DEEP)
    assert published(run) == undisturbed()
    clock = Clock()
    maintenance = make_maintenance(run, clock, retention=KEPT)
    for clock.now in (0.0, 10.0, 4000.0, 8000.0):
        maintenance.clean_up(maintenance.snapshot())
        maintenance.publish(
            maintenance.snapshot(), training(run, steps=DEEP).iterate(maintenance.snapshot()), {}, 0.0
        )
    assert weights.newest(run) == WeightVersion(step=DEEP)
    assert checkpoints.is_trained(run, weights.newest(run), DEEP)
    assert orders.active(run) == []
    assert submissions.newest(run, "rollout").number < 1_000_000
    assert submissions.history(run, "rollout", 3) == []
    submissions.jobs(run, "rollout")
    shutil.rmtree(root)


@pytest.mark.parametrize("cell", ["status.json", "endpoints.json", "watch.json"])
@pytest.mark.parametrize("content", [b"", b'{"beat": 1, "ro', b"\xff"])
def test_cells_of_the_coordinator_that_were_cut_off_are_written_anew(run, cell, content):
    put(run, "state", cell, content)
    finish(run, steps=DEEP)
    maintenance = make_maintenance(run)
    maintenance.publish(
        maintenance.snapshot(), training(run, steps=DEEP).iterate(maintenance.snapshot()), {}, 0.0
    )
    assert published(run) == undisturbed()


@pytest.mark.parametrize("cell", ["status.json", "endpoints.json", "watch.json"])
def test_a_folder_in_the_place_of_a_cell_is_kept_aside(run, cell):
    put(run, "state", cell, None)
    maintenance = make_maintenance(run)
    for _ in range(2):
        maintenance.clean_up(maintenance.snapshot())
        maintenance.publish(maintenance.snapshot(), training(run).iterate(maintenance.snapshot()), {}, 0.0)
    (aside,) = [path for path in (run.root / "state").iterdir() if path.name.startswith(f"{cell}.broken-")]
    assert (aside / folders.NAME).exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "zero"])
def test_what_can_be_read_for_ever_holds_nobody_up(run, make):
    mode, maintenance = training(run), make_maintenance(run)
    mode.iterate(maintenance.snapshot())
    first = requests_of(0)[0].name
    for path in (run.scored / "ready" / f"{first}~0", run.nodes / "w.json"):
        make(path)
    for _ in range(2):
        mode.iterate(maintenance.snapshot())
        maintenance.clean_up(maintenance.snapshot())
    assert atomic.names(run.scored / "dead") == [f"{first}~0"]
    mode.iterate(maintenance.snapshot())
    assert mode._ledger.groups["train", 0].members[0].state == "failed"


@pytest.mark.parametrize(
    "damage", [lambda path: path.write_bytes(b"{"), Path.unlink], ids=["cut off", "missing"]
)
@pytest.mark.parametrize("step", [1, 2, 3])
def test_weights_without_a_readable_manifest_are_nobody_s_and_stop_nobody(run, damage, step):
    for each in range(4):
        export(run, WeightVersion(step=each), WeightVersion(step=each - 1) if each else None)
    damage(run.weight(WeightVersion(step=step)) / folders.NAME)
    maintenance = make_maintenance(run, retention=KEPT)
    snapshot = maintenance.snapshot()
    maintenance.clean_up(snapshot)
    assert snapshot.newest.step == (2 if step == 3 else 3)
    assert run.weight(WeightVersion(step=step)).exists(), "it is for people to look at"


def test_a_message_far_beyond_the_horizon_opens_no_group(run):
    mode, maintenance = training(run), make_maintenance(run)
    far = requests_of(90_000)[0]
    for spool in SPOOLS:
        Spool(run.spool(spool), ScoredEpisode).put(far.name, result(far))
    for _ in range(3):
        mode.iterate(maintenance.snapshot())
    assert max(number for _, number in mode._ledger.groups) < 100
    assert all("090000" not in name for name in atomic.names(run.requests / "ready"))


def test_a_result_under_another_member_s_name_is_dropped_and_redone(run):
    mode, maintenance = training(run), make_maintenance(run)
    mode.iterate(maintenance.snapshot())
    one, other = requests_of(0)
    (run.requests / "ready" / f"{one.name}~0").unlink()
    Spool(run.scored, ScoredEpisode).put(one.name, result(other))
    for _ in range(4):
        mode.iterate(replace(maintenance.snapshot(), absent_s=0.0))
    assert atomic.names(run.scored / "ready") == []
    assert f"{one.name}~0" in atomic.names(run.requests / "ready")


def test_what_is_in_the_way_of_a_batch_is_kept_aside(run):
    put(run, "batches", "step_000000", b"mine")
    finish(run, steps=1)
    assert batches.published_steps(run) == [0]
    (aside,) = [path for path in run.batches.iterdir() if ".broken-" in path.name]
    assert aside.read_bytes() == b"mine"
    assert folders.manifest(run.batch(0), BatchManifest).step == 0


def test_a_copy_under_another_name_makes_no_version(run):
    """Engines would load it as the newest, and a learner would go on behind it."""
    export(run, WeightVersion(step=1))
    save(run, 1)
    shutil.copytree(run.weight(WeightVersion(step=1)), run.weight(WeightVersion(step=900, incarnation=7)))
    shutil.copytree(run.checkpoint(1, 0), run.checkpoint(900, 7))
    assert weights.newest(run) == WeightVersion(step=1)
    assert checkpoints.published(run) == [(1, 0)]
