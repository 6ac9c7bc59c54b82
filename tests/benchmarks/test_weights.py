"""The command for the benchmark of weight versions, on the CPU with a tiny shape."""

import re
import subprocess
import sys

import pytest

from tests.kit.checkout import ROOT, environment

COMMAND = (sys.executable, "-m", "hpc_swe.benchmarks.weights")


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
    ],
)
def test_wrong_arguments_are_refused_in_one_line(words, message):
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr


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
