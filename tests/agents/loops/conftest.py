"""A tiny policy whose context holds what real agents say, a toy instance with its image, the agents' kits."""

from pathlib import Path

import pytest

from tests.kit import toy
from tests.kit.checkout import typed
from tests.kit.images import UNPACKED, require_apptainer
from tests.kit.sessions_kit import KITS, World, make_long_model, overlay


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_long_model(tmp_path_factory.mktemp("long") / "model")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> World:
    """The toy repository's instance, its image built as any other's."""
    require_apptainer(UNPACKED)
    folder = tmp_path_factory.mktemp("world")
    base = toy.make_repository(folder / "calc")
    rows = toy.write_rows(folder / "rows.jsonl", toy.row("unittest", base))
    (folder / "requirements").write_text("")
    made = World(folder, rows, folder / "images", long_model)
    settings = overlay(made, [], folder / "build.toml")
    words = (
        f"--base={UNPACKED}",
        f"--repository={folder / 'calc'}",
        f"--requirements={folder / 'requirements'}",
    )
    done = typed("hpc_swe.build_images", "configs/swebench.toml", settings, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.fixture(params=["mini_swe_agent", "qwen_code"])
def agent(request: pytest.FixtureRequest) -> str:
    """Name of an agent's configuration whose kit is there."""
    name: str = request.param
    if not (KITS / name.replace("_", "-") / "stamp").exists():
        pytest.skip(f"{name} is not installed: containers/build_agents.sh says why not")
    return name
