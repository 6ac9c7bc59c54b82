"""Weight versions: their names, which one is newest, and which ones retention lets go."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_swe.base.errors import LostRace
from hpc_swe.base.records import WeightManifest, WeightVersion
from hpc_swe.base.store import folders, weights

VERSIONS = st.builds(WeightVersion, incarnation=st.integers(0, 120), step=st.integers(0, 2_000_000))


def publish(run, version, parent=None) -> None:
    def fill(stage):
        info = folders.write(stage, "model.safetensors", version.name.encode())
        files = {"model.safetensors": info}
        return WeightManifest(writer="l", files=files, version=version, tensors={}, parent=parent)

    with suppress(LostRace):
        folders.publish(run.weight(version), fill)


@given(VERSIONS)
def test_a_version_survives_its_name(version):
    assert WeightVersion.parse(version.name) == version


@pytest.mark.parametrize(
    "name",
    ["", "v", "v12-i1", "v000012", "v000012-i", "000012-i01", "v-00012-i01", "v000012-i01~", "v00001_-i01"]
    + ["v00001\u0662-i01", "v 00012-i01", "step_000012", "v000012-i01-i02"],
)
def test_a_name_that_is_no_version_s_is_refused(name):
    with pytest.raises(ValueError, match="such as v000012-i01"):
        WeightVersion.parse(name)


@given(st.lists(VERSIONS, max_size=30, unique=True), st.data())
def test_retention_keeps_the_newest_the_named_the_last_and_the_milestones(versions, data):
    named = data.draw(st.sets(st.sampled_from(versions), max_size=3)) if versions else set()
    keep_last, keep_every = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 10))
    gone = weights.superseded(versions, {version.name for version in named}, keep_last, keep_every)
    kept = set(versions) - set(gone)
    assert set(gone) <= set(versions)
    assert not named & set(gone)
    assert set(sorted(versions)[len(versions) - keep_last :]) <= kept
    assert not versions or max(versions) in kept
    assert not versions or max(version.step for version in versions) in {version.step for version in kept}
    assert not keep_every or all(version.step % keep_every for version in gone)
    again = weights.superseded(kept, {version.name for version in named}, keep_last, keep_every)
    assert again == [], "what one round keeps, the next keeps"


@pytest.mark.parametrize(
    ("lag", "recent"),
    [
        (0, ["v000011-i02", "v000011-i01", "v000014-i01"]),
        (1, ["v000011-i02", "v000011-i01", "v000014-i01", "v000010-i01"]),
    ],
)
def test_a_version_of_an_earlier_start_is_recent_if_it_has_the_steps(lag, recent):
    names = ["v000011-i02", "v000011-i01", "v000014-i01", "v000010-i01", "v000009-i02"]
    newest, *_ = versions = [WeightVersion.parse(name) for name in names]
    assert [version.name for version in weights.recent(versions, newest, lag)] == recent


def test_the_newest_is_the_live_incarnation_s_though_its_step_be_lower(run):
    assert weights.newest(run) is None
    for incarnation, step in ((1, 10), (1, 12), (2, 11)):
        publish(run, WeightVersion(incarnation=incarnation, step=step))
    assert weights.newest(run).name == "v000011-i02"
    assert folders.manifest(run.weight(weights.newest(run)), WeightManifest).version.step == 11


@pytest.mark.parametrize(
    ("parents", "refused", "removed", "is_wanted"),
    [
        ([None, None], [], [], False),
        ([None, None], [1], [], False),  # one engine with a bad GPU must not make the learner publish twice
        ([None, 0], [1], [], True),
        ([None, 0, 1], [1, 2], [], True),
        ([None, 0, None], [1], [], False),
        ([None, 0, None], [1, 2], [], False),
        ([None, 0, None, 2], [1, 3], [], True),
        ([None, 0, 1], [1], [1], True),
        ([None, 0], [7], [], False),  # retention removed it before the report, and it may have been full
    ],
)
def test_a_full_version_is_wanted_after_a_delta_was_refused(run, parents, refused, removed, is_wanted):
    for step, parent in enumerate(parents):
        publish(run, WeightVersion(step=step), None if parent is None else WeightVersion(step=parent))
    for step in refused:
        weights.report_refused(run, WeightVersion(step=step))
    for step in removed:
        folders.remove(run.weight(WeightVersion(step=step)))
    assert weights.is_full_wanted(run) is is_wanted
