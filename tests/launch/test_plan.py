"""One plan for the dry run and the start: how often its making climbs back from a lower package."""

import sys
import tomllib
from itertools import pairwise

import pytest

from hpc_swe.base import loader
from hpc_swe.base.rundir import RunDir
from hpc_swe.config import config as configuration
from hpc_swe.config import settings
from hpc_swe.launch import checks, preview
from hpc_swe.launch.plan import RunPlan, plan_start
from tests.kit.checkout import ROOT

MOST_CLIMBS = 12
CARRIERS = (
    *(kind for name, kind in vars(settings).items() if name.endswith("Config")),
    *(loader.Plugin, RunPlan),
)
"""Classes whose objects carry the configuration, or a table of it."""


@pytest.mark.slow
def test_a_configuration_climbs_seldom_on_its_way_to_the_scripts(tmp_path, model, capsys):
    """Each function that is handed it counts at its first call: who reads in that order reads downward."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = {name: -n for n, line in enumerate(contracts[0]["layers"]) for name in line.split(" | ")}
    called: dict[tuple[str, str], int] = {}

    def note(frame, event, _):
        code, folder = frame.f_code, str(ROOT / "hpc_swe") + "/"
        if event == "call" and code.co_filename.startswith(folder) and code.co_flags & 1:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(isinstance(frame.f_locals.get(name), CARRIERS) for name in names):
                room = code.co_filename.removeprefix(folder).partition("/")[0]
                called.setdefault((code.co_filename, code.co_qualname), floors[room])

    files = [str(ROOT / f"configs/{name}.toml") for name in ("demo", "slurm_demo")]
    sys.setprofile(note)
    try:
        config = configuration.from_words([*files, f"model={model}"])
        plan = plan_start(RunDir(tmp_path / "run"), config)
        preview.show(plan)
        checks.require(plan)
    finally:
        sys.setprofile(None)
    assert "#SBATCH" in capsys.readouterr().out
    assert len(called) > 100
    assert sum(later > earlier for earlier, later in pairwise(called.values())) <= MOST_CLIMBS
