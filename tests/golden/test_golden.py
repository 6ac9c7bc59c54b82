"""What a move, a rename or a merge must not change; collect.py says what, and writes it."""

from pathlib import Path

import pytest

from tests.kit.checkout import typed

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    done = typed("tests.golden.collect", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_each_promise_has_its_file(collected):
    assert {path.name for path in collected.iterdir()} == {path.name for path in (HERE / "kept").iterdir()}


@pytest.mark.parametrize("name", sorted(path.name for path in (HERE / "kept").iterdir()))
def test_promises_are_kept(collected, name):
    """For a change on purpose: python -m tests.golden.collect tests/golden/kept; say why in the commit."""
    assert (collected / name).read_text().splitlines() == (HERE / "kept" / name).read_text().splitlines()
