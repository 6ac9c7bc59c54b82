"""The command for the benchmark of weight versions, on the CPU with a tiny shape."""

import re
import subprocess
import sys

import pytest

from hpc_swe.base.records import WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.cluster.processes import free_port
from hpc_swe.models.engines.vllm import Vllm
from hpc_swe.view.benchmarks import weights
from hpc_swe.view.benchmarks.hop import HopFigures, HopPlan, Published
from hpc_swe.view.benchmarks.limits import Rates
from tests.kit.checkout import ROOT, environment
from tests.kit.coordinator_kit import export

COMMAND = (sys.executable, "-m", "hpc_swe.benchmarks.weights")
TOO_SHORT = "engine.max_model_len = {}: this benchmark's requests have up to 96 tokens; set that at least"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    changed = environment(OMP_NUM_THREADS="1")
    return subprocess.run(
        [*COMMAND, *words], cwd=ROOT, env=changed, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "5B"], "--shape '5B' is none of"),
        (["learner.lr=1"], "keys of [policy] and [engine] only"),
        (["--answers", "2", "policy.device=cpu", "engine.max_model_len=64"], TOO_SHORT.format(64)),
        (["policy.device=cpu", "engine.max_model_len=95"], TOO_SHORT.format(95)),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(words, message):
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr


def test_what_was_measured_outlives_a_reload_that_fails(tmp_path, capsys):
    """A large model may keep vLLM busy for longer than clients wait, and its engine may end."""
    run_dir, version = RunDir(tmp_path), WeightVersion(incarnation=1)
    run_dir.make()
    export(run_dir, version)
    rates = Rates(device="", versions="", product_flops=1.0, copy_bytes=1.0, upload_bytes=1.0)
    last = Published(version=version, trained=1.0, published=2.0)
    figures = HopFigures(rates=rates, disk_bytes=1.0, versions=[last])
    numbers = {"deltas": 0, "lr": 0.0, "settle_s": 0.0, "timeout_s": 1.0, "reloads": 1}
    plan = HopPlan(run=str(tmp_path), model="", policy={}, engine={}, **numbers)
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    traffic = weights.Traffic(Vllm(), url, "", weights.CPU_LOAD)
    assert weights._reloaded(plan, traffic, weights.MeasuredHops(figures, {}, [], []), []) == {}
    assert "reload_weights of vLLM: <urlopen error" in capsys.readouterr().out


@pytest.mark.slow
def test_an_engine_takes_deltas_and_full_versions_while_it_answers(tmp_path):
    pytest.importorskip("megatron.core")
    folder = tmp_path / "hop"
    words = ("--deltas", "2", "--settle-s", "0.5", "--timeout-s", "500", "--answers", "3")
    done = run(*words, "--folder", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {
        match[1]: [float(word) for word in match[2].split()]
        for line in done.stdout.splitlines()
        if (match := re.match(r"(delta \d|full version|reload_weights of vLLM)[a-z ,]* +([-\d. ]+)$", line))
    }
    assert rows.keys() == {"delta 1", "delta 2", "full version", "reload_weights of vLLM"}
    assert rows["delta 2"][6] < 20 < 99 < rows["full version"][6]
    assert all(first > 0 < pause for first, _, pause, *_ in rows.values())
    assert rows["delta 2"][4] == 0, "keep computes nothing again"
    spent = re.findall(r"^(?:learner|engine|clients): .*?  +(\d+) +(\d+) +(\d+)$", done.stdout, re.MULTILINE)
    assert len(spent) == 14, "every stage of every version has its time"
    _, tokens, mean, _, far = re.search(
        r"^(the learner's own) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE
    ).groups()
    assert int(tokens) == 3 * 64
    assert 0 < float(mean) < 0.01
    assert float(far) == 0
    assert "weights are reloaded by vLLM: its weights are processed after loading" in done.stdout
    log = (folder / "engine.log").read_text()
    assert "updated to v000003-i01" in log
    assert "refused" not in log
