"""What the demo reads for each of its stages."""

import json
import subprocess
import sys

import pytest

from hpc_swe.base.errors import HpcSweError
from hpc_swe.config import config as configuration
from hpc_swe.demo.__main__ import Demo
from hpc_swe.demo.model import SIZES
from hpc_swe.demo.stages import of_stage
from tests.kit.checkout import ROOT, typed
from tests.kit.run_processes import processes_of
from tests.kit.waiting import until

GIVEN = str(ROOT / "configs/demo_model.toml")


def test_a_file_of_overrides_has_another_beside_it_for_one_stage():
    assert list(of_stage([GIVEN, "seed=3"], ["demo_sft"])) == [
        GIVEN,
        str(ROOT / "configs/demo_model_sft.toml"),
        "seed=3",
    ]


def test_a_model_for_shorter_conversations_is_not_taken(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(SIZES | {"max_position_embeddings": 256}))
    assert Demo(tmp_path, 0, ["rollout.context=256"]).make_model() == tmp_path / "model"
    with pytest.raises(HpcSweError, match="256 tokens, but rollout.context = 512; .* by --out"):
        Demo(tmp_path, 0, []).make_model()


def test_a_longer_run_is_asked_for_by_its_steps_and_keeps_its_warm_start(tmp_path):
    demo = Demo(tmp_path, 0, [GIVEN], steps=7)
    steps = [configuration.from_words(demo.words(tmp_path, *more)).steps for more in ([], ["demo_sft"])]
    assert steps == [7, 60]


def test_a_machine_without_sandboxes_is_told_before_anything_is_trained(tmp_path):
    out = tmp_path / "out"
    done = typed("hpc_swe.demo", "--out", out, f"sandbox.images={tmp_path}", PATH="/nowhere")
    assert (done.returncode, done.stderr.count("\n"), out.exists()) == (2, 1, False), done.stderr
    assert "no apptainer on PATH: install Apptainer, or set type" in done.stderr


@pytest.mark.slow
def test_a_stage_beyond_its_minutes_leaves_no_process(tmp_path):
    words = ["hpc_swe.demo", "--out", str(tmp_path / "out"), "--stage-minutes", "0.001"]
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    run = tmp_path / "out/sft"
    assert (done.returncode, f"{run}: not finished after 0.06 s" in done.stderr) == (5, True), done.stderr
    until(lambda: processes_of(run) == [], "the end of its processes")
