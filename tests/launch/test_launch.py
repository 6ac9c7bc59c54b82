"""Starting, keeping and ending runs: what a person at the shell sees."""

import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest

from hpc_swe.base.errors import ConfigError, DeadlineError, StaleRun, StorageError
from hpc_swe.base.records import RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, stop_signs, submissions, supervision
from hpc_swe.base.store.parquet import tasks
from hpc_swe.cluster.executors.base import FOREGROUND
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import StopConfig
from hpc_swe.launch import control, create, existing, submit, watch
from tests.kit.checkout import ROOT, environment, typed
from tests.kit.constants import NOBODY, empty_model
from tests.kit.waiting import DEADLINE_S, until


@pytest.fixture
def model(tmp_path):
    return empty_model(tmp_path / "model")


@pytest.fixture
def read(model):
    def config(*overrides):
        words = [
            f"model={model}",
            'sandbox={type="process"}',
            "tasks.train=3",
            "tasks.eval=2",
            "learner.optimizer.decay_share=0",  # so that steps may change
            *NOBODY,
            *overrides,
        ]
        return configuration.read(ROOT / "configs/demo.toml", overrides=words)

    return config


command = partial(typed, "hpc_swe.launch")


def test_a_refused_continuation_names_the_file_of_the_run(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    with pytest.raises(ConfigError, match=rf"^{run.config}: batches.microbatch_tokens = \d+ cannot hold"):
        configuration.from_words(["rollout.context=90000"], existing.load(run), str(run.config))


def test_start_makes_a_whole_run_that_is_private(tmp_path, read):
    os.umask(0o077)
    run = RunDir(tmp_path / "runs" / "one")
    control.start(run, read())
    assert existing.load(run) == read()
    assert {split: len(found) for split, found in tasks.read(run.tasks).items()} == {"train": 3, "eval": 2}
    assert [oct(path.stat().st_mode & 0o77) for path in (run.root, run.token, run.config)] == ["0o0"] * 3


def test_start_again_goes_on_but_refuses_what_would_change_the_training(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    token = run.token.read_bytes()
    control.start(run, read("steps=99"))
    assert existing.load(run).steps == 99
    assert run.token.read_bytes() == token
    with pytest.raises(ConfigError, match=r"groups.group_size: 8 -> 4.*start --run.*with --run"):
        control.start(run, read("groups.group_size=4"))


def test_start_without_a_file_continues_a_run_with_what_it_has(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read("seed=5"))
    run.drain.touch()
    ticked = command("tick", run.root)
    assert "submitted nothing: control/DRAIN forbids it; `launch start` removes that" in ticked.stdout
    done = command("start", "--run", run.root, "steps=99")
    assert (done.returncode, run.drain.exists()) == (0, False), done.stderr
    assert existing.load(run) == read("seed=5", "steps=99")
    refused = command("start", "--run", run.root, "seed=6")
    assert (refused.returncode, "seed: 5 -> 6" in refused.stderr) == (2, True)
    assert f"{run.root} is a folder, not a TOML file" in command("start", run.root).stderr
    assert "no run here" in command("start", "--run", tmp_path / "other").stderr


def test_a_run_is_continued_from_any_folder_with_paths_as_it_was_started(tmp_path, model):
    started, called, run = tmp_path / "started", tmp_path / "called", RunDir(tmp_path / "run")
    started.mkdir()
    called.mkdir()
    model.rename(started / "model")
    small = ["tasks.train=3", "tasks.eval=2", "learner.optimizer.decay_share=0", *NOBODY]
    first = [ROOT / "configs/demo.toml", "model=model", 'sandbox={type="process"}', *small]
    done = command("start", *first, "--run", run.root, folder=started)
    assert done.returncode == 0, done.stderr
    done = command("start", "--run", run.root, "steps=99", folder=called)
    assert done.returncode == 0, done.stderr
    assert (existing.load(run).steps, existing.load(run).model) == (99, "model")
    started.rename(tmp_path / "moved")
    refused = command("start", "--run", run.root, folder=called)
    assert f"{started}: No such file or directory; the run was started in" in refused.stderr


def test_a_run_goes_on_on_another_cluster_by_the_line_of_the_page(tmp_path, model):
    here, there = tmp_path / "here", RunDir(tmp_path / "there")
    words = [f"model={model}", "policy.tensor_parallel=2", 'sandbox={type="process"}', *NOBODY]
    done = command("start", ROOT / "configs/demo.toml", "--run", here, *words)
    assert done.returncode == 0, done.stderr
    here.rename(there.root)  # as rsync leaves it, and the original is out of reach
    moved = model.rename(tmp_path / "moved")
    fit = [f"model={moved}", "policy.tensor_parallel=1", "learner.data_parallel=2"]
    done = command("start", "--run", there.root, "--upgrade", *fit, "executor.environ={A='1'}")
    assert done.returncode == 0, done.stderr
    found = existing.load(there)
    assert (found.model, found.policy.tensor_parallel, found.learner.data_parallel) == (str(moved), 1, 2)
    slurm = ["executor={type='slurm', cluster='hpc', partition='gpu'}", "counts.reward=1"]
    shown = command("start", "--run", there.root, "--upgrade", *slurm, "--dry-run")
    assert "#SBATCH --partition=gpu" in shown.stdout, shown.stderr


def test_a_run_keeps_the_keys_that_its_own_code_reads_until_it_is_upgraded(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    tree = json.loads(run.config.read_bytes())
    del tree["learner"]["checkpoint_s"], tree["executor"]["environ"]  # as a release without them wrote it
    run.config.write_text(json.dumps(tree))
    control.start(run, read("steps=99", "executor.share_gpus=true"))
    tree["steps"], tree["executor"]["share_gpus"] = 99, True
    assert json.loads(run.config.read_bytes()) == tree
    with pytest.raises(ConfigError, match="learner.checkpoint_s is a key that the run's .*--upgrade"):
        control.start(run, read("learner.checkpoint_s=7"))
    control.start(run, read("learner.checkpoint_s=7"), upgrade=True)
    assert json.loads(run.config.read_bytes())["learner"]["checkpoint_s"] == 7


def test_more_steps_than_a_decay_has_are_refused_with_the_reason(tmp_path, read):
    run, words = RunDir(tmp_path / "run"), ["learner.optimizer.decay_share=0.3"]
    control.start(run, read(*words, "steps=3"))
    with pytest.raises(ConfigError, match="steps: 3 -> 6 .*start another run from the last weights"):
        control.start(run, read(*words, "steps=6"))


def test_a_run_goes_on_with_a_model_that_was_moved_but_not_with_another(tmp_path, read, model):
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    moved = model.rename(tmp_path / "moved")
    control.start(run, read(f"model={moved}", "retention.keep_every=9"))
    assert (existing.load(run).model, existing.load(run).retention.keep_every) == (str(moved), 9)
    (moved / "config.json").write_text("{ }")
    (tmp_path / "link").symlink_to(moved)
    control.start(run, read(f"model={tmp_path / 'link'}"))  # the same folder is not read again
    assert existing.load(run).model == str(moved)
    other = empty_model(tmp_path / "other", "[]")
    with pytest.raises(ConfigError, match=r"model: .*moved' -> .*other'"):
        control.start(run, read(f"model={other}"))


def test_start_with_more_steps_takes_a_finished_run_up_again(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read("steps=5"))
    run.finished.touch()
    control.start(run, read("steps=5"))
    assert run.finished.exists()
    control.start(run, read("steps=6"))
    assert not run.finished.exists()


def test_start_with_other_signs_takes_a_run_up_again_that_one_has_ended(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read("stop.gap=0.01"))
    run.finished.touch()
    atomic.put(run.stop_signs, stop_signs.SignRecord(reason="gap/k3 was above 0.01"))
    control.start(run, read("stop.gap=0.01"))
    assert run.finished.exists()
    control.start(run, read("stop.gap=0.1"))
    assert not run.finished.exists()
    assert stop_signs.read(run).reason == ""


def test_a_sign_by_bounds_that_a_living_learner_kept_is_cleared(tmp_path, read):
    run, new = RunDir(tmp_path / "run"), read("stop.gap=0.1")
    control.start(run, read("stop.gap=0.01"))
    control.start(run, new)
    for gap, stands in ((0.01, False), (0.1, True)):  # the bound of the learner that has found the sign
        bounds = msgspec.to_builtins(StopConfig(gap=gap))
        atomic.put(run.stop_signs, stop_signs.SignRecord(reason="gap/k3 was above", bounds=bounds))
        run.finished.touch()
        control.start(run, new)
        assert (run.finished.exists(), bool(stop_signs.read(run).reason)) == (stands, stands)


def test_of_concurrent_starts_one_makes_the_run_and_others_are_refused(tmp_path, read):
    run = RunDir(tmp_path / "run")

    def start(size):
        try:
            control.start(run, read(f"groups.group_size={size}"))
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(start, [2, 4, 2, 4, 2, 4]))
    won = existing.load(run).groups.group_size
    assert [not text for text in said] == [size == won for size in (2, 4, 2, 4, 2, 4)]
    assert all(f"groups.group_size: {won} -> {6 - won}" in text for text in said if text)
    assert len(list(run.root.glob(".*code~*"))) == 0


def test_a_start_that_died_making_the_run_delays_the_next_one_only_a_while(tmp_path):
    run = RunDir(tmp_path / "run")
    (run.root / ".making" / "half").mkdir(parents=True)
    with create.making(run, timeout_s=0.3) as place:
        assert place
    assert list(run.root.iterdir()) == []


def test_what_another_start_took_away_replaces_nothing(tmp_path):
    (tmp_path / "code").mkdir()
    with pytest.raises(FileNotFoundError):
        create.replace(tmp_path / "gone", tmp_path / "code")
    assert (tmp_path / "code").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o750, 0o701, 0o722])
def test_a_run_that_others_can_enter_is_refused_by_every_command(tmp_path, read, mode):
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    run.root.chmod(mode)
    for verb in ("tick", "stop"):
        done = command(verb, run.root)
        assert done.returncode == ConfigError.exit_code
        assert done.stderr == f"error: {run.root}: mode {mode:o} lets others in; run chmod 700 {run.root}\n"
    with pytest.raises(ConfigError, match="lets others in"):
        control.start(run, read())
    run.root.chmod(0o700)
    assert command("tick", run.root).returncode == 0


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a folder to another user")
@pytest.mark.parametrize("path", [".", "run.json"])
def test_a_run_of_another_user_is_refused(tmp_path, read, path):
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    os.chown(run.root / path, 12345, -1)
    done = command("tick", run.root)
    assert done.returncode == ConfigError.exit_code
    assert "belongs to user 12345; a run is acted on by its owner only" in done.stderr


def test_a_delta_as_the_model_is_refused_with_what_to_give_instead(tmp_path, read):
    for name, file in (("v000004-i01", "config.json"), ("v000005-i01", "delta-00001-of-00001.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    with pytest.raises(ConfigError, match=r"holds only what changed .* one of: v000004-i01"):
        control.start(RunDir(tmp_path / "run"), read(f"model={tmp_path}/v000005-i01"))


@pytest.mark.parametrize(("mode", "option"), [("grpo", "--run"), ("eval", "--out")])
def test_folder_that_cannot_be_made_names_itself_and_the_option(read, mode, option):
    with pytest.raises(StorageError, match=f"/proc/run.*{option}"):  # where not even root makes one
        control.start(RunDir(Path("/proc/run")), read(f"mode={mode}"))


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_file_where_a_run_is_looked_for_is_no_run(tmp_path, name):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=f"{name}: no run here"):
        existing.load(RunDir(tmp_path / name))


def test_run_of_another_protocol_names_the_commit_that_reads_it(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    manifest = json.loads(run.manifest.read_text())
    run.manifest.write_text(json.dumps({**manifest, "protocol": 99, "commit": "abc123"}))
    with pytest.raises(StaleRun, match=r"protocol 99.*abc123"):
        existing.load(run)


def test_commands_that_messages_show_can_be_typed(tmp_path, read):
    run = RunDir(tmp_path / "my run's")
    control.start(run, read())
    run.root.chmod(0o755)
    with pytest.raises(ConfigError) as raised:
        existing.load(run)
    said = [watch.left(run, read()).split("`")[3], str(raised.value).partition("; run ")[2]]
    assert [shlex.split(command)[-1] for command in said] == [str(run.root)] * 2


def test_a_run_of_an_older_release_is_sent_to_its_own_code_in_one_line(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    for path in (run.config, run.made):
        tree = json.loads(path.read_text())
        path.write_text(json.dumps({**tree, "coordinator": {"poll_s": 1.0, "wait_s": 2.0}}))
    for opened in ({"reads": True}, {"trains": True}):
        with pytest.raises(
            StaleRun, match=r"made by an older release; .*commit \w+.*: cd .*status"
        ) as raised:
            existing.load(run, **opened)
        assert "\n" not in str(raised.value)


def test_a_run_can_be_started_on_a_machine_without_git(tmp_path, read, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    assert atomic.get(run.manifest, RunManifest).commit == "unknown"


@pytest.mark.slow
def test_stop_and_start_at_once_lose_no_role_and_change_settings(tmp_path, read, model):
    """Typed as a person types it: the jobs of the second start are new, and all there."""
    run, roles = RunDir(tmp_path / "run"), ["coordinator", "reward"]
    try:
        control.start(run, read("tasks.train=8", *(f"counts.{role}=1" for role in roles)))
        for slots in (2, 3):
            until(lambda: {path.name.partition("-")[0] for path in run.nodes.iterdir()} == {*roles})
            old = control.alive(run, existing.load(run))
            assert command("stop", run.root).returncode == 0
            done = command("start", "--run", run.root, f"reward.slots={slots}")
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip().endswith("submitted 1 coordinator, 1 reward")
            config = existing.load(run)
            assert {job.role for job in config.executor.queue(run)} == {*roles}
            assert set(old).isdisjoint(control.alive(run, config))
            assert submit.tick(run, config).submit == {}
    finally:
        control.stop(run, read(), now=True)


def test_a_start_says_which_jobs_do_not_end_and_leaves_the_order(tmp_path, read):
    run, config = RunDir(tmp_path / "run"), read("counts.reward=1", 'executor.setup=["sleep 600"]')
    try:
        control.start(run, config)
        [job] = control.alive(run, config)
        command("stop", run.root)
        with pytest.raises(DeadlineError, match=f"1 jobs .* control/DRAIN .*{job}.*nothing was started"):
            control.start(run, config, finish_s=0.5)
        assert atomic.names(run.control) == ["DRAIN"]
        assert control.alive(run, config) == [job]
    finally:
        control.stop(run, config, now=True)


@pytest.mark.parametrize("words", [[], ["--now"]])
def test_a_stop_on_a_full_disk_is_one_error_that_says_what_goes_on(tmp_path, tmpfs, read, words):
    small = tmpfs(tmp_path / "small", "size=30m")
    run = RunDir(small / "run")
    control.start(run, read())
    found = os.statvfs(small)
    (small / "ballast").write_bytes(bytes(found.f_bavail * found.f_frsize))
    tmpfs(small, f"nr_inodes={found.f_files - found.f_ffree + 1}")
    done = command("stop", run.root, *words)
    assert (done.returncode, done.stdout) == (StorageError.exit_code, "")
    said = "no space is left; .* No order was written, so the run goes on: make room and call this again"
    assert re.fullmatch(f"error: {run.control}: {said}.*\n", done.stderr), done.stderr
    assert atomic.names(run.control) == []
    (small / "ballast").unlink()
    assert "0 " in command("stop", run.root).stdout
    assert atomic.names(run.control) == ["DRAIN"]


@pytest.mark.slow
def test_foreground_jobs_end_with_the_launcher_whatever_kills_it(tmp_path, model):
    words = [f"model={model}", 'sandbox={type="process"}', "tasks.train=3", "tasks.eval=2", *NOBODY]
    line = ["start", "configs/demo.toml", *words, "counts.reward=1"]
    run = RunDir(tmp_path / "run")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "hpc_swe.launch", *line, "--run", str(run.root), "--wait", "600"],
        cwd=ROOT,
        env=environment() | {FOREGROUND: "1"},
    )
    until(lambda: run.config.exists() and any(run.nodes.iterdir()))
    config = existing.load(run)
    assert control.alive(run, config)
    launcher.kill()
    launcher.wait()
    until(lambda: not control.alive(run, config))


def test_job_of_a_voided_submission_ends_at_once(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    submissions.take(run, "reward", 1)
    submissions.mark(run, "reward", 1, submissions.VOID)
    done = typed("jobs.run", "reward", run.root, "--submission=1")
    assert done.returncode == 0, done.stderr
    assert "void" in done.stderr
    assert not any(run.nodes.iterdir())


def test_jobs_run_the_code_that_the_run_was_started_with(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    changed = run.code / "jobs" / "reward.py"
    changed.write_text("print('the code of the run')")
    submissions.take(run, "reward", 1)
    submission = submit.submission(run, read(), "reward", 1, 1)
    done = subprocess.run(
        ["bash", "-c", read().executor.script(run, submission)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert "the code of the run" in done.stdout, done.stderr


@pytest.mark.slow
def test_run_keeps_its_code_until_it_is_upgraded_which_no_job_may_see(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read())
    old = run.code / "jobs" / "old.py"
    old.touch()
    control.start(run, read())
    assert old.exists()
    try:
        control.start(run, read("counts.reward=1"))
        with pytest.raises(ConfigError, match="1 jobs still run the old code"):
            control.start(run, read("counts.reward=1"), upgrade=True)
    finally:
        control.stop(run, read(), now=True)
    atomic.put(run.supervision, supervision.Verdict(number=3, gave_up=True))
    for _ in range(2):
        control.start(run, read(), upgrade=True)
    assert not old.exists()
    assert supervision.read(run) == supervision.Verdict(number=3), "a person has started it again"
