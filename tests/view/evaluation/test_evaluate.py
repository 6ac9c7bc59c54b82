"""The command: what it refuses, what it waits for, and how an evaluation fares that is interrupted."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import ClassVar

import msgspec
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from hpc_swe.base.errors import DeadlineError, HpcSweError
from hpc_swe.base.records import Endpoint, Node, StatusReport, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, submissions
from hpc_swe.base.store.parquet import evals, tasks
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.base.store.submissions import Started, Submitted
from hpc_swe.cluster.executors.base import Job
from hpc_swe.cluster.executors.local import Local
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import control, existing
from hpc_swe.launch.view import Queue, RunView
from hpc_swe.view import evaluate
from hpc_swe.view.evaluation import results, start
from hpc_swe.view.evaluation.progress import EvaluationProgress, StallDetector, progress_of
from hpc_swe.view.evaluation.results import Summary
from tests.kit import toy_model
from tests.kit.checkout import ROOT, typed
from tests.kit.constants import NOBODY, status_report
from tests.kit.small_evaluation import FAILS, GIVES_UP, SOLVES, Small, environment, make, official_report
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
SHAPE = toy_model.SHAPE | {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 8192}


# what it waits for


def view(**changes: object) -> RunView:
    version = WeightVersion()
    recent = {"evaluation/done": [3.0], "evaluation/resolved": [2.0]}
    report = status_report(waits_for="2 of 4 tasks", recent=recent)
    engine = Endpoint(owner="e", url="http://e", versions=[version], updating=False)
    known = {"report": report, "engines": [engine], "queue": Queue(), "desired": {"inference": 1}}
    return RunView(name="r", steps=0, orders=[], **(known | changes))


@pytest.mark.parametrize(
    ("changes", "waits_for"),
    [
        ({}, "2 of 4 tasks"),
        ({"engines": []}, "an available engine"),
        ({"report": None}, "the coordinator"),
        (
            {"queue": Queue([Job("rollout", "7", 1, "waiting", "Priority")])},
            r"1 jobs in the queue \(rollout: Priority",
        ),
        ({"queue": Queue(silence="timed out")}, "the scheduler, which does not answer"),
        ({"queue": Queue(failures=["rollout: exit code 7 on c1"])}, "rollout: exit code 7 on c1"),
    ],
)
def test_it_says_what_it_waits_for(changes, waits_for):
    assert re.match(waits_for, progress_of(view(**changes)).waits_for)


def test_patience_ends_when_nothing_moves_but_not_while_jobs_are_queued():
    now = [0.0]
    detector = StallDetector(10.0, lambda: now[0])
    stands = EvaluationProgress(done=1, solved=0, waits_for="an engine", is_queued=False, state=1)
    for passes_s, fares in [
        (9, stands),
        (9, dataclasses.replace(stands, state=2)),
        (9, dataclasses.replace(stands, state=2)),
    ]:
        detector.check(fares)
        now[0] += passes_s
    with pytest.raises(DeadlineError, match="no progress for 18 s .*waits for an engine"):
        detector.check(dataclasses.replace(stands, state=2))
    for _ in range(3):
        now[0] += 50
        detector.check(dataclasses.replace(stands, state=2, is_queued=True))


def configured(small: Small, *words: str) -> RunConfig:
    return configuration.read(
        ROOT / "configs/demo.toml",
        overrides=[*start.OWN, *(word for word in small.words if "=" in word), *words],
    )


class Held(Local, frozen=True, kw_only=True):
    """A person holds a job of the run, and others wait for nodes."""

    is_here: ClassVar[bool] = False
    waiting: ClassVar[list[Job]] = []

    def queue(self, run):
        return list(self.waiting)

    def cancel(self, jobs):
        self.waiting[:] = [job for job in self.waiting if job.job not in jobs]


def test_a_finished_evaluation_waits_for_no_job_in_the_queue(small):
    """Its results would come days later, and then GPUs would start for nothing."""
    config = configured(small, *NOBODY, f"executor={{type='{__name__}:Held'}}")
    control.start(small.out, config)
    small.out.finished.touch()
    Held.waiting += [Job("rollout", "7", 1, "held", "JobHeldUser"), Job("reward", "8", 1, "waiting")]
    assert start.evaluate(small.out, config, detach=False, console=Console())
    assert Held.waiting == []


def test_a_role_stuck_at_the_start_leaves_no_job_of_another_role(small, monkeypatch):
    """A submission of a role has failed; the next start submits the others beside it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # jobs would find the engine there
    words = ["counts.coordinator=0", "counts.reward=0", "executor={type='local'}"]
    config = configured(small, *words)
    control.start(small.out, configured(small, *words, *NOBODY))
    submissions.take(small.out, "inference", 1)
    atomic.put(small.out.submitted("inference", 1), Submitted(job="0", count=1, host="h", at=time.time()))
    started = Started(job="0", host="h", pid=1, start_time="1", at=time.time(), seconds=1.0, code=1)
    atomic.put(small.out.started("inference", 1, 0), started)
    try:
        with pytest.raises(HpcSweError, match="inference: its last submission failed"):
            start.evaluate(small.out, config, detach=False, console=Console())
        assert any(small.out.launches.glob("rollout/*"))
        assert control.alive(small.out, config) == []
    finally:
        control.stop(small.out, config, now=True)


# what it refuses


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """An evaluation without jobs."""
    small = make(tmp_path_factory.mktemp("begun"))
    done = small.evaluate(*NOBODY, "--detach", "--samples", 3, "--history", "template")
    assert done.returncode == 0, done.stderr
    return small


def test_options_are_short_words_for_keys(begun):
    config = existing.load(begun.out)
    assert (config.mode, config.eval.samples, config.rollout.history, config.tasks.train) == (
        "eval",
        3,
        "template",
        0,
    )


def test_other_words_for_the_same_folder_are_refused_naming_the_keys(begun):
    done = begun.evaluate(*NOBODY, "--detach", "--samples", 2, "--history", "keep")
    assert done.returncode == 2
    changed = "eval.samples: 3 -> 2; rollout.history: 'template' -> 'keep'."
    assert f"is another evaluation: {changed}" in done.stderr
    assert "Name another folder with --out" in done.stderr


def test_the_script_gives_its_variables_to_the_command(small, tmp_path):
    words = [*(word for word in small.words if "=" in word), *NOBODY, 'executor={type="local"}']
    variables = {
        "N_SAMPLES": "3",
        "MODEL": str(small.folder / "model"),
        "OUTPUT_DIR": str(tmp_path / "of script"),
    }
    words += ['taskset.train={rows="", ids=""}', 'taskset.eval.ids=""']
    line = ["bash", "sbatch/evaluate.sbatch", *words]
    known = {name: value for name, value in environment().items() if not name.startswith(("SLURM", "VLLM"))}
    subprocess.run(line, cwd=ROOT, env=known | variables, check=True, timeout=600)
    config = existing.load(RunDir(tmp_path / "of script"))
    assert (config.mode, config.eval.samples, config.model) == ("eval", 3, variables["MODEL"])


def listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def test_a_dry_run_shows_configuration_scripts_and_costs_and_makes_nothing(small):
    (small.folder / "model/config.json").write_text(json.dumps(SHAPE))
    before = listing(small.folder / "model"), sorted(os.listdir(small.folder))
    no_gpu = "executor.roles.inference.gpus_per_node=0"
    words = ("--samples", 3, "configs/slurm.toml", no_gpu, "counts.rollout=12")
    done = small.evaluate("--dry-run", "--full", *words)
    assert done.returncode == 0, done.stderr
    shown = tomllib.loads(done.stdout[done.stdout.index("### the merged configuration") :])
    assert (shown["mode"], shown["eval"]["samples"], shown["tasks"]["train"]) == ("eval", 3, 0)
    heads = re.findall(r"^### (\w+): submission .*", done.stdout, re.MULTILINE)
    assert heads == ["coordinator", "inference", "rollout", "reward"], "an evaluation has no learner"
    assert "#SBATCH --array=0-11" in done.stdout
    assert re.search(r"^ *rollout +12 ", done.stdout, re.MULTILINE), done.stdout
    assert "the run folder at its fullest" in done.stdout
    assert (listing(small.folder / "model"), sorted(os.listdir(small.folder))) == before


def test_a_dry_run_ends_with_all_that_an_evaluation_would_be_refused_for(small):
    (small.folder / "model/config.json").write_text(json.dumps(SHAPE))
    words = ("counts.coordinator=2", "engine.tensor_parallel=7")
    plan = small.evaluate("--dry-run", *words)
    real = small.evaluate(*words)
    assert (plan.returncode, real.returncode) == (2, 2)
    refused = [[line for line in one.stderr.splitlines() if line[:6] == "error:"] for one in (plan, real)]
    assert len(refused[0]) == 2, plan.stderr
    assert refused[0] == refused[1]
    assert not small.out.root.exists()


def test_a_comparison_with_what_has_not_finished_is_refused_at_once(begun, tmp_path):
    done = begun.evaluate("--compare", begun.out.root, out=tmp_path / "new")
    assert done.returncode == 3
    missing = f"{begun.out.eval_table('eval')}: no such table"
    assert f"{missing}; an evaluation writes it when it has finished" in done.stderr
    assert not (tmp_path / "new").exists()


def test_weights_that_a_run_may_yet_remove_are_refused(begun, tmp_path):
    version = begun.out.root / "weights/v000003-i01"
    version.mkdir(exist_ok=True)
    done = begun.evaluate("--model", version, out=tmp_path / "new")
    assert done.returncode == 2
    assert f"{begun.out.root} is still training and deletes old weights. Copy them first" in done.stderr
    assert not (tmp_path / "new").exists()


def test_the_advised_copy_may_be_evaluated_and_is_known_to_be_trained(small, tmp_path):
    run = RunDir(tmp_path / "run")
    words = [*(word for word in small.words if "=" in word), *NOBODY, "counts.learner=0"]
    control.start(run, configuration.read(ROOT / "configs/demo.toml", overrides=[*words, "tasks.train=0"]))
    shutil.copytree(small.folder / "model", run.weights / "v000003-i01")
    seen = tasks.read(run.tasks)["eval"]
    tasks.write(run.tasks, {"train": seen})
    done = small.evaluate("--model", run.weights / "v000003-i01")
    advice = re.search(r"seen: (mkdir .*); then --model (.*)", done.stderr)
    assert advice, done.stderr
    subprocess.run(advice[1], shell=True, check=True, cwd=tmp_path)
    again = small.evaluate(*NOBODY, "--detach", "--model", advice[2])
    assert again.returncode == 0, again.stderr
    assert results.trained_on(Path(advice[2]), seen) == [task.task_id for task in seen]


def test_tasks_beyond_the_last_are_refused_and_too_few_are_reported(begun, tmp_path):
    done = begun.evaluate(*NOBODY, "--detach", "tasks.eval_from=4", out=tmp_path / "new")
    assert done.returncode == 2
    assert "tasks.eval_from = 4: [taskset] has no held-out task there" in done.stderr
    assert not (tmp_path / "new").exists()
    some = begun.evaluate(*NOBODY, "--detach", "tasks.eval_from=1", "--tasks", 5, out=tmp_path / "new")
    assert some.returncode == 0, some.stderr
    assert "tasks.eval = 5: [taskset] has 3 of them only" in some.stderr


# whole evaluations


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> "tuple[Small, subprocess.CompletedProcess[str]]":
    small = make(tmp_path_factory.mktemp("finished"))
    return small, small.evaluate()


def summary(run: RunDir) -> Summary:
    return msgspec.json.decode(run.summary.read_bytes(), type=Summary)


def test_an_evaluation_leaves_what_was_handed_in_and_what_came_of_it(finished):
    small, done = finished
    assert done.returncode == 0, done.stdout + done.stderr
    assert "started, 0 of 8 episodes are done" in done.stdout
    assert "8/8" in done.stdout
    found = summary(small.out).decodings["greedy"]
    assert found.outcomes == {"resolved": 3, "unresolved": 3, "no_submission": 2}
    assert found.pass_at[1].mean == 3 / 8
    rows = pq.read_table(small.out.results).to_pylist()
    assert Counter((row["sample"], row["exit_status"]) for row in rows) == {
        (0, "submitted"): 4,
        (1, "submitted"): 4,
    }
    assert all(
        row["episode_s"] > 0 and row["sampled_tokens"] and row["versions"] == ["v000000-i00"] for row in rows
    )
    assert {row["turns"] for row in rows} == {1, 2}


def test_what_an_evaluation_has_sampled_becomes_rows_to_train_on(finished):
    small, _ = finished
    out = small.folder / "sampled.parquet"
    done = typed("hpc_swe.export_episodes", small.out.root, f"--out={out}", "--min-reward=-1", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "8 episodes read, 8 with a reward of -1 or more" in done.stdout
    sampled = Counter(row["sampled_tokens"] for row in pq.read_table(small.out.results).to_pylist())
    assert Counter(sum(row["loss_mask"]) for row in pq.read_table(out).to_pylist()) == sampled


def test_swebench_s_own_loader_and_report_take_what_it_leaves(finished):
    small, _ = finished
    resolved = 0
    for sample in range(2):
        made = atomic_json(small.out.root / f"report.greedy-{sample}.json")
        resolved += made["resolved_instances"]
        assert made["submitted_instances"] == made["total_instances"] == 4
        assert official_report(small.out.root, f"greedy-{sample}", small.folder / "rows.jsonl") == made
    assert resolved == 3


def atomic_json(path: Path) -> dict[str, int]:
    return msgspec.json.decode(path.read_bytes())


def test_the_same_command_again_shows_the_results_and_submits_nothing(finished):
    small, first = finished
    before = sorted(path.name for path in small.out.launches.glob("*/*"))
    again = small.evaluate()
    assert again.returncode == 0, again.stderr
    assert again.stdout.partition("greedy")[2] == first.stdout.partition("greedy")[2]
    assert sorted(path.name for path in small.out.launches.glob("*/*")) == before


def test_both_ways_of_history_are_compared_also_with_a_foreign_engine(finished, monkeypatch):
    small, _ = finished
    small.replies(SOLVES)
    other = RunDir(small.folder / "template")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with small.served("secret") as url:
        words = ["--url", url, "--history", "template", "--tasks", 3, "--compare", small.out.root]
        done = small.evaluate(*words, "--common", out=other.root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (summary(other).history, summary(other).url) == ("template", url)
    assert summary(other).decodings["greedy"].outcomes == {"resolved": 6}
    assert f"since {small.out.root}" in done.stdout
    refused = small.evaluate(*words, out=other.root)
    assert (refused.returncode, refused.stderr.count("4 there, 3 here, 3 in both; --common")) == (2, 1)


def test_a_killed_command_and_a_killed_coordinator_lose_nothing(small):
    small.replies(SOLVES, GIVES_UP, FAILS, delay_s=0.4)
    assert "the same command" in small.evaluate("--detach").stdout
    first = subprocess.Popen(small.command(), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    try:
        await_done(small.out, 2)
        first.send_signal(signal.SIGKILL)
        first.wait()
        nodes = [atomic.get(path, Node) for path in small.out.nodes.glob("coordinator-*.json")]
        os.kill(nodes[-1].pid, signal.SIGKILL)
        last = small.evaluate()
    finally:
        first.kill()
        control.stop(small.out, existing.load(small.out), now=True)
    assert last.returncode == 0, last.stdout + last.stderr
    assert "continued, " in last.stdout
    table = evals.read(small.out.eval_table("eval"))
    assert sorted((a.task_id, a.sample) for a in table) == [
        (t, n) for t in sorted(names(table)) for n in range(2)
    ]
    assert "infra_error" not in {a.outcome for a in table}


def names(table: list[Attempt]) -> set[str]:
    return {attempt.task_id for attempt in table}


def await_done(run: RunDir, count: int) -> None:
    def are_done() -> bool:
        report = atomic.get(run.status, StatusReport) if run.status.exists() else None
        return report is not None and report.recent.get("evaluation/done", [0.0])[-1] >= count

    until(are_done, f"the end of {count} episodes")


def test_jobs_that_cannot_live_end_the_command_with_the_reason(small):
    (small.folder / "replies.json").write_text("no JSON")
    done = small.evaluate("max_restarts=0", "engine.load_timeout_s=5.0")
    assert done.returncode == DeadlineError.exit_code, done.stdout + done.stderr
    assert "inference: its last submission failed (exit code 1" in done.stderr
    assert "ERROR" in done.stderr.splitlines()[-1], "it has the cause from the job's log"
    assert control.alive(small.out, existing.load(small.out)) == []


@pytest.mark.parametrize("benchmark", ["kodcode", "swebench"])
def test_a_benchmark_by_name_takes_the_published_options(benchmark, tmp_path):
    line = (
        f"{benchmark} --parquet_path rows --model_name m --base-url http://h:1 --n-parallel 3 --max-steps 7"
    )
    words = evaluate._words(evaluate._parser().parse_args([*line.split(), "--out", str(tmp_path / "out")]))
    if benchmark == "swebench":
        words = [word for word in words if not word.startswith("taskset.eval")]
    config = configuration.from_words([*words, *start.OWN])
    assert (config.mode, config.model, config.inference.url) == ("eval", str(ROOT / "m"), "http://h:1")
    assert (config.rollout.slots, configuration.dump(config)["agent"]["max_turns"]) == (3, 7)
    tools = [schema["function"]["name"] for schema in json.loads(config.agent.preface.tools)]
    assert ("pdb" in tools, "bash" in tools) == (True, benchmark == "swebench")
