"""What a start refuses before anything is made or submitted, and what it leaves alone."""

import codecs
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_swe.base.errors import ConfigError, CorruptRecord, StorageError
from hpc_swe.base.records import Role, RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, submissions
from hpc_swe.base.store.submissions import Submitted
from hpc_swe.cluster.executors.base import Job, Submission
from hpc_swe.cluster.executors.local import Local
from hpc_swe.cluster.processes import start_time
from hpc_swe.config import config as configuration
from hpc_swe.config import conflicts
from hpc_swe.launch import checks, control, create, existing, plan
from hpc_swe.models.policies.megatron import Megatron
from hpc_swe.models.weight_files import read_header
from tests.kit.checkout import ROOT, environment, typed
from tests.kit.constants import NOBODY
from tests.kit.crash import in_child, refuse
from tests.kit.toy import row, write_rows
from tests.kit.toy_model import SHAPE, write_weights
from tests.kit.waiting import DEADLINE_S, until

NO_CHARGE = "grader.cheated_reward=0"
SLURM = 'executor={type="slurm", roles={learner={nodes=2}}}'
GRES = 'executor.roles.inference.options={gres="gpu:2"}'
TORCH = "policy.device = 'gpu', but torch .* is a build for CPUs"
VLLM = "engine.device = 'gpu', but vLLM .* is a build for CPUs"
SFT = ['mode="sft"', 'learner.loss={objective="sft"}']


@pytest.fixture
def read(model):
    def config(*overrides):
        words = [f"model={model}", 'sandbox={type="process"}', "tasks.train=3", "tasks.eval=2", *overrides]
        return configuration.read(ROOT / "configs/demo.toml", overrides=words)

    return config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["eval.every=5", "learner.export_every=2", "groups.max_staleness=2"],
            "learner.export_every = 2: .* set it to 6",
        ),
        (
            ["advantage={type='shuffled', of={type='max_rl'}}", NO_CHARGE, "grader.unresolved_reward=-0.5"],
            "unresolved_reward = -0.5.* or use the advantage grpo",
        ),
        (["groups.max_staleness=9"], "groups.max_staleness = 9 exceeds 8: such old samples"),
        (
            ["policy.lora_rank=8", "learner.snapshot_every=4"],  # the demo's policy has float32 parameters
            'every = 4 and policy.lora_rank = 8 with policy.dtype = "float32": .* = "bfloat16", or snapshot_',
        ),
        (["grader={type='reward_file', cheated_reward=0.0}"], "does not go with grader.type = 'reward_file'"),
        (["learner.loss={objective='cispo', sequence_clip_low=0.1}"], "0.0003, or use gspo"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_in_new_runs(read, tmp_path, words, message):
    run, config = RunDir(tmp_path / "run"), read(*words)
    (found,) = complaints(run, config)
    assert re.search(message, found)
    create.create(run, config, plan.take(config))
    assert complaints(run, config) == [], "a run that was created before the rule goes on"
    changed = read(*words, "eval.every=7", "learner.export_every=2", "groups.max_staleness=2")
    assert any("set it to 8" in each for each in complaints(run, changed))


def test_a_learner_may_not_fill_memory_that_an_engine_takes_later(read):
    words = ["policy.device=gpu", "executor.share_gpus=true"]
    (found,) = conflicts.of_new_runs(read(*words))
    assert re.search("an engine takes a part later .* name that value of those whose peaks .*dry-run", found)
    assert not [*conflicts.of_new_runs(read(*words, "policy.recompute=products"))]


@pytest.mark.parametrize("taskset", ["type='harbor'", "type='mixture', parts={a={type='harbor'}}"])
def test_folders_of_harbor_are_judged_by_their_own_grader_alone(read, taskset):
    (found,) = conflicts.of_new_runs(read(f"taskset={{{taskset}}}"))
    assert "taskset.type = 'harbor' does not go with grader.type = 'pytest'" in found
    assert not [*conflicts.of_new_runs(read(f"taskset={{{taskset}}}", "grader.type='reward_file'"))]


TESTS = "from m import f\n" + "".join(
    f"\ndef test_{n}():\n    assert f() + {n} == {n + 1}\n" for n in range(8)
)


def rows(path: Path, *names: str) -> str:
    """A file of programs that differ in their names alone."""
    files = [{"path": "m.py", "content": "def f():\n    return 2\n"}]
    files += [{"path": "test.py", "content": TESTS}]
    extra = {"entrypoint": "python -m pytest test.py", "files": files}
    made = [{"task_id": n, "problem_statement": "Mend it.", "prompt": "", "extra_info": extra} for n in names]
    pq.write_table(pa.Table.from_pylist(made), path)
    return str(path)


def test_held_out_tasks_that_are_trained_end_no_training(read, tmp_path, caplog):
    train, evaluated = rows(tmp_path / "train.parquet", "a", "b"), rows(tmp_path / "eval.parquet", "b", "c")
    words = ["taskset.type='kodcode'", f"taskset.train='{train}'", f"taskset.eval='{evaluated}'"]
    message = r"2 held-out tasks are training tasks, too: b, c; .* set eval.patience = 0"
    with pytest.raises(ConfigError, match=message):
        plan.take(read(*words, "eval.patience=3"))
    plan.take(read(*words))
    assert "2 held-out tasks are training tasks, too: b, c" in caplog.text


def test_a_tool_for_tests_that_no_task_shows_is_refused_with_its_key(read, tmp_path, caplog):
    """Each call of it would cost the policy a turn; the agent has it by default."""
    hidden = write_rows(tmp_path / "hidden.jsonl", row("pytest", "0" * 40))
    recipe = "{command='python -m pytest -rA', log_parser='parse_log_pytest'}"
    swebench = f"{{type='swebench', train={{rows='{hidden}'}}, recipes={{'toy/pytest'={recipe}}}}}"
    default, renamed = "agent={type='tool_agent'}", "agent.tools=['bash', {type='evaluate', name='eval'}]"
    sees_none = [f"taskset={swebench}", "eval.every=0", "tasks.eval=0", "grader.type='swebench'"]
    for words in ([default], [renamed]):
        (found,) = complaints(RunDir(tmp_path / "run"), read(*sees_none, *words))
        assert re.match(r"agent.tools has 'evaluate', .* no visible tests. .* agent.tools = \[", found)
    plan.take(read(*sees_none, "agent.tools=['bash', 'submit']"))
    assert "evaluate" not in caplog.text
    shown = f"{{type='kodcode', train='{rows(tmp_path / 'train.parquet', 'a')}'}}"
    plan.take(read(f"taskset={{type='mixture', parts={{seen={shown}, unseen={swebench}}}}}", *sees_none[1:]))
    assert "no task of unseen can use it: There are no visible tests." in caplog.text


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def complaints(run: RunDir, config) -> list[str]:
    try:
        checks.require(plan.plan_start(run, config))
    except ConfigError as error:
        return str(error).splitlines()
    return []


class OldPolicy(Megatron, frozen=True, kw_only=True):
    """Written before the learner said what it keeps."""

    def build(self, model, optimizer, reference, tokens):
        return super().build(model, optimizer, reference, tokens)


def test_a_policy_that_cannot_be_built_is_refused_with_what_it_lacks(read, tmp_path):
    type_name = f"{__name__}:OldPolicy"
    (found,) = complaints(RunDir(tmp_path / "run"), read(f"policy={{type='{type_name}', device='cpu'}}"))
    lacks = r"lacks the parameter kept; the learner passes model, .* in docs/architecture\.md"
    assert re.match(rf"\[policy\] type = '{type_name}': .*{lacks}", found)


def test_a_folder_with_files_of_somebody_else_is_refused_and_untouched(tmp_path, read):
    folder = tmp_path / "project"
    (folder / "code").mkdir(parents=True)
    for name in ("code/mine.py", "tasks.parquet", "token", "weights"):
        (folder / name).write_text(f"precious {name}")
    before = listing(folder)
    with pytest.raises(ConfigError, match=r"project: no run, but it holds code, .* and 1 more; .*--run"):
        control.start(RunDir(folder), read())
    assert listing(folder) == before


def test_a_folder_of_somebody_else_is_refused_and_stays_empty(tmp_path, read):
    """Members of its group may write there; what they leave would keep its owner from starting a run."""
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    try:
        os.chown(run.root, 4001, -1)
    except PermissionError:
        pytest.skip("needs the right to give a folder to somebody else")
    with pytest.raises(ConfigError, match="belongs to user 4001; name another folder with --run"):
        control.start(run, read(*NOBODY))
    assert os.listdir(run.root) == []


@pytest.mark.parametrize("content", [b"", b'{"steps": 1', b"\xff", b"[1]", None])
@pytest.mark.parametrize("name", ["run.json", "MANIFEST.json"])
def test_a_damaged_file_of_a_run_is_one_error_that_names_it(tmp_path, read, name, content):
    run = RunDir(tmp_path / "run")
    control.start(run, read(*NOBODY))
    file = run.root / name
    file.unlink()
    file.mkdir() if content is None else file.write_bytes(content)
    expected = rf"run/{name}: not (what `launch start` wrote: .*restore|a regular file)"
    with pytest.raises(CorruptRecord, match=expected):
        existing.load(run)


ACTS = {
    "start": ("hpc_swe.launch", "start", "--run"),
    "job": ("jobs.run", "reward"),
    "tick": ("hpc_swe.launch", "tick"),
    "stop": ("hpc_swe.launch", "stop"),
    "status": ("hpc_swe.status",),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_run_changed_by_hand_trains_nothing_and_can_be_stopped(tmp_path, read, act):
    run = RunDir(tmp_path / "run")
    control.start(run, read(*NOBODY, "tasks.train=3"))
    tree = json.loads(run.config.read_text())
    tree["lease"]["ttl_s"] += 1
    run.config.write_text(json.dumps(tree))
    existing.load(run)  # another form, and a key that may change
    size = tree["groups"]["group_size"]
    tree["groups"]["group_size"] += 2
    run.config.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="changed by hand"):  # nor where the files of a start say the same
        control.start(run, read(*NOBODY, "tasks.train=3", f"groups.group_size={size + 2}"))
    done = typed(*ACTS[act], run.root)
    assert done.returncode == (2 if act in ("start", "job") else 0)
    assert f"run/run.json: groups.group_size: {size} -> {size + 2}: changed by hand" in done.stderr
    assert "put the old value back" in done.stderr


def test_tasks_without_an_image_are_named_before_any_job_finds_out(tmp_path, read):
    images = tmp_path / "images"
    images.mkdir()
    words = ['executor={type="slurm"}', f'sandbox={{type="apptainer", images="{images}"}}']
    (found,) = complaints(RunDir(tmp_path / "run"), read(*words))
    assert found.startswith(f"[sandbox] images = '{images}': 1 of the tasks' 1 images are not there, pyt")
    assert found.index("build_images") < found.index("build_image.sh")
    (images / "python-pytest.sif").touch()
    assert complaints(RunDir(tmp_path / "run"), read(*words)) == []


def test_a_start_on_a_full_disk_is_one_error_and_can_be_repeated(tmp_path, tmpfs, read):
    small = tmpfs(tmp_path / "small", "size=300k")
    with pytest.raises(StorageError, match="small/run/.*no space is left; free some"):
        control.start(RunDir(small / "run"), read(*NOBODY))
    tmpfs(small, "size=30m")
    control.start(RunDir(small / "run"), read(*NOBODY))


def start_frozen_at(run, number, config, taken) -> None:
    """Before this start's rename of that number another one takes it for dead, and makes the run."""
    renames = count()

    def freeze(call, path):
        if call == "os.rename" and next(renames) == number:
            with create.making(run, timeout_s=0.0) as place:
                if place:  # the run is not complete yet
                    create.publish(run, place, config, taken, "the other start")
                    (run.root / "of_another.json").write_bytes(run.manifest.read_bytes())
        return 0

    refuse(run.root, freeze)
    try:
        with create.making(run) as place:
            create.publish(run, place, config, taken, "this start")
    except StorageError as error:
        assert "another start took this one for dead" in str(error)  # noqa: PT017


@pytest.mark.slow
def test_a_start_that_was_frozen_changes_no_run_of_another(tmp_path, read):
    config = read(*NOBODY)
    taken = plan.take(config)
    for number in count():
        run = RunDir(tmp_path / f"{number}")
        run.root.mkdir(mode=0o700)
        assert in_child(start_frozen_at, run, number, config, taken) == 0
        existing.load(run)
        if not (run.root / "of_another.json").exists():
            assert number > 8
            return
        assert run.manifest.read_bytes() == (run.root / "of_another.json").read_bytes()
        assert not (run.root / create.MAKING).exists()


def test_a_run_that_was_copied_without_its_empty_folders_is_opened(tmp_path, read):
    run = RunDir(tmp_path / "demo" / "grpo")
    control.start(run, read(*NOBODY))
    with pytest.raises(ConfigError, match="no run here .* it holds the runs grpo"):
        existing.load(RunDir(run.root.parent))
    for folders in ([run.nodes, run.control], [run.control], [run.launches / "reward"]):  # cells may be left
        for folder in folders:
            shutil.rmtree(folder)
        control.stop(run, existing.load(run), now=False)
        assert run.drain.exists()


def test_a_copy_of_a_run_never_ends_the_jobs_of_the_original(tmp_path, read):
    """Both have the same records of submissions, and a scheduler knows the jobs by the run's id."""
    run, copy, config = RunDir(tmp_path / "run"), RunDir(tmp_path / "copy"), read(*NOBODY)
    control.start(run, config)
    job = subprocess.Popen(["sleep", "600"])
    name = f"{job.pid}:{start_time(job.pid)}"
    submissions.take(run, "rollout", 1)
    atomic.put(run.submitted("rollout", 1), Submitted(job=name, count=1, host="h", at=0.0))
    shutil.copytree(run.root, copy.root)
    for verb in ("tick", "stop"):
        done = typed("hpc_swe.launch", verb, copy.root)
        assert done.returncode == 2
        assert f"launch start --run {copy.root}` makes it a run of its own" in done.stderr
    assert not copy.drain.exists()
    control.start(copy, config)
    assert control.alive(copy, config) == []
    control.stop(copy, config, now=True)
    assert control.alive(run, config) == [name]
    job.kill()
    job.wait()
    ids = {atomic.get(each.manifest, RunManifest).run_id for each in (run, copy)}
    assert len(ids) == 2
    control.start(copy, config)
    moved = RunDir(run.root.rename(tmp_path / "moved"))
    control.start(moved, config)
    assert {atomic.get(each.manifest, RunManifest).run_id for each in (moved, copy)} == ids


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
ORDINARY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []
"""Modes hold for root, too."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mounted read-only", "mode 0500"])
def test_an_archive_without_its_empty_folders_is_shown_and_stays_as_it_is(tmp_path, read, kind):
    run = RunDir(tmp_path / "run")
    control.start(run, read(*NOBODY))
    subprocess.run(["find", run.root, "-type", "d", "-empty", "-delete"], check=True)
    assert not run.control.exists()
    within = ["unshare", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, run.root]
    if kind == "mode 0500":
        run.root.chmod(0o500)
        within = ORDINARY
    elif subprocess.run([*within, "true"]).returncode:
        pytest.skip("needs the right to mount a folder read-only")
    for words in (["status", run.root], ["report", run.root, "--out", tmp_path / "pages"]):
        line = [*within, sys.executable, "-m", f"hpc_swe.{words[0]}", *words[1:]]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert not run.control.exists()
    assert (tmp_path / "pages/index.html").exists()


@pytest.mark.parametrize("verb", ["start", "tick"])
def test_of_a_moved_run_and_a_copy_in_its_place_one_is_the_original(tmp_path, read, verb):
    """Otherwise `launch stop` of the one would end the jobs of the other."""
    run, config = RunDir(tmp_path / "run"), read(*NOBODY)
    control.start(run, config)
    moved = RunDir(run.root.rename(tmp_path / "moved"))
    assert not existing.is_copy(moved)
    run.root.symlink_to(moved.root)
    assert [existing.is_copy(each) for each in (run, moved)] == [False, False], "one folder, by two paths"
    run.root.unlink()
    shutil.copytree(moved.root, run.root)
    assert [existing.is_copy(each) for each in (run, moved)] == [False, True]
    shutil.rmtree(run.root)
    create.create(run, config, plan.take(config))
    assert not existing.is_copy(moved), "what is in its place is another run"
    shutil.rmtree(run.root)
    words = ["start", "--run", moved.root] if verb == "start" else ["tick", moved.root]
    assert typed("hpc_swe.launch", *words).returncode == 0
    shutil.copytree(moved.root, run.root)
    assert [existing.is_copy(each) for each in (run, moved)] == [True, False]


def test_an_empty_folder_or_a_start_that_died_anywhere_is_no_obstacle(tmp_path, read):
    run = RunDir(tmp_path / "run")
    for leave in ([], [".making/1"], ["MANIFEST.json"], ["MANIFEST.json", "control", "code", "token"]):
        folder = RunDir(tmp_path / "-".join(["died", *leave]).replace("/", "+"))
        folder.root.mkdir()
        control.start(run, read(*NOBODY))
        for name in leave:
            target = folder.root / name
            target.parent.mkdir(exist_ok=True)
            if (run.root / name).is_file():
                target.write_bytes((run.root / name).read_bytes())
            else:
                target.mkdir()
        create.require_free(folder, read())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: tmp.joinpath("file").write_text("x") and tmp / "file", "a file, not a folder"),
        (lambda tmp: tmp.joinpath("link").symlink_to("nowhere") or tmp / "link", "a link to .*nowhere"),
        (lambda tmp: tmp.joinpath("link").symlink_to("link") or tmp / "link", "a link to .*link"),
        (lambda tmp: tmp.joinpath("link").symlink_to("link") or tmp / "link/run", "below .*link, which is"),
        (lambda _: "/dev/null/run", "below /dev/null, which is no folder"),
        (lambda _: Path("~").expanduser(), "your home is it"),
        (lambda _: ROOT, "this checkout (is|lies in) it"),
        (lambda _: ROOT / "hpc_swe" / "launch", "among the packages that a run copies"),
    ],
)
def test_no_run_is_made_where_other_things_live(tmp_path, make, message):
    done = typed("hpc_swe.launch", "start", "configs/demo.toml", "--dry-run", "--run", make(tmp_path))
    assert done.returncode == 2
    assert re.search(rf"^error: .*: {message}.*; name another folder with --run$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "start", "configs/demo.toml", "--run="],
        *(["launch", "tick", ""], ["launch", "stop", ""], ["show", ""]),
        *(["prepare", "rows.jsonl", "--out="], ["launch", "start", ""]),
    ],
)
def test_an_empty_name_is_no_folder_and_no_file(tmp_path, words):
    done = typed(f"hpc_swe.{words[0]}", *words[1:])
    assert done.returncode == 2
    assert re.search("empty.* .?is a shell variable unset", done.stderr), done.stderr


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize("what", ["--run", "working folder", "model"])
def test_a_name_that_records_cannot_hold_is_one_line(tmp_path, model, what, more):
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    odd.mkdir()
    run = odd / "run" if what == "--run" else tmp_path / "run"
    if what == "model":
        model = shutil.copytree(model, odd / "model")
    words = [ROOT / "configs/demo.toml", f"model={model}", 'sandbox={type="process"}', "tasks.train=3"]
    words = ["start", *words, "--run", run, *NOBODY, *more]
    done = typed("hpc_swe.launch", *words, folder=odd if what == "working folder" else ROOT)
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1), done.stderr
    assert re.search(r"caf\\udce9.*: the name is not UTF-8", done.stderr)
    assert not run.exists()


def test_a_run_whose_folder_got_such_a_name_can_be_looked_at(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read(*NOBODY))
    odd = run.root.rename(os.fsdecode(b"%s/caf\xe9" % bytes(tmp_path)))
    for command in ("show", "status", "report"):
        done = typed(f"hpc_swe.{command}", odd)
        assert (done.returncode, done.stderr) == (0, ""), command


@pytest.mark.parametrize(
    ("line", "words", "message"),
    [
        ("rmdir ../gone", ["status", "run"], "the current folder is gone; go to one that exists"),
        ("ulimit -f 0", ["doctor"], "No usable temporary directory found in .*"),
    ],
)
def test_no_working_folder_and_no_temporary_one_are_told_apart(tmp_path, line, words, message):
    (tmp_path / "gone").mkdir()
    words = ["bash", "-c", f'cd gone && {line} && exec "$@"', "", sys.executable, "-m", "hpc_swe", *words]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 4
    assert re.fullmatch(f"error: {message}\n", done.stderr)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["steps=0"], ["steps = 0"]),
        (
            ["engine.device='gpu'", "executor.gpus={inference=1}"],
            [VLLM, "gpus.inference = 1 for 1 jobs, but this machine has 0", "gpus asks for 1 GPUs"],
        ),
        (
            [
                *(SLURM, "executor.roles.learner.gpus_per_node=1", "policy.device='gpu'"),
                *("policy.tensor_parallel=2", "learner.data_parallel=2"),
            ],
            [
                r"roles.learner.gpus_per_node = 1, on 2 nodes, gives a job of learner 2 GPUs, but it needs 4",
                TORCH,
            ],
        ),
        (
            [SLURM, GRES, "engine.device='gpu'"],
            ["gives a job of inference 2 GPUs, but it computes on 1; ask for 1, or raise engine.tens", VLLM],
        ),
        (
            [SLURM, GRES, "executor.roles.learner.gpus_per_node=2"],
            [
                "learner 4 GPUs, but it computes on 0; ask for 0 on each node, or set policy.device = 'gpu'",
                "inference 2 GPUs, but it computes on 0; ask for 0, or set engine.device = 'gpu'",
            ],
        ),
        (
            [
                *(SLURM, "policy.device='gpu'", "learner.data_parallel=2"),
                "executor.roles.learner={gpus_per_node=2, gpu_gib=0.001}",
            ],
            [r"learner does not fit: it needs at least 0.\d GiB of a GPU that has 0.0 GiB; divide it", TORCH],
        ),
        ([SLURM, "hybrid=true"], [r"hybrid = true needs one node, but \[executor\] roles.learner.nodes = 2"]),
        (
            ["hybrid=true", "counts.inference=3", "engine.device='gpu'", "executor.gpus={learner=2}"],
            [
                r"needs 3 \(hybrid: counts.inference \* engine.tensor",
                VLLM,
                "machine has 0",
                "asks for 2 GPUs",
            ],
        ),
        (["counts.learner=2"], ["counts.learner = 2: a run has one; learner.data_parallel = 2 makes two"]),
        (["policy.lora_rank=33"], [r"lora_rank = 33 is above 32, the least width of a layer"]),
        (
            ["policy.offload_optimizer=1", 'executor={type="slurm", roles={learner={mem_gb=0.0001}}}'],
            ["learner.mem_gb = 0.0001 is less than the 0.0 GiB .*optimizer 0.0"],
        ),
        (["engine.tensor_parallel=4"], ["engine.tensor_parallel = 4 does not divide the model's 6"]),
        (["rollout.context=2048"], ["rollout.context = 2048 is over the model's"]),
        (["tasks.train=0"], [r"tasks.train = 0: \[taskset\] has no task to train on"]),
        (
            ['taskset={type="kodcode", train="/no/train.parquet", eval="/no/eval.parquet", image="x"}'],
            ["/no/train.parquet"],
        ),
        ([*SFT, 'agent.tools=["view", "submit"]'], [r"\[agent\] tools lack replace"]),
        ([*SFT, 'agent={type="cli_agent", command="true"}'], ["not say what its policy is shown; warm"]),
        ([*SFT, 'rollout.tool_parser="qwen3_coder"'], ["its chat template cannot be used append-only"]),
    ],
)
def test_each_thing_that_cannot_work_is_a_line_before_there_is_a_folder(
    tmp_path, monkeypatch, read, words, expected
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # whatever GPUs the machine has
    run = RunDir(tmp_path / "run")
    found = complaints(run, read(*words))
    assert len(found) == len(expected), found
    assert [line for line, wanted in zip(found, expected, strict=True) if not re.search(wanted, line)] == []
    assert not run.root.exists()


def mark(path: Path) -> None:
    """Save a file as some editors do."""
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())


def store_twice(model: Path) -> None:
    """Store a norm in a file of its own, which is a copy of all others, too."""
    shutil.copy(model / "model.safetensors", model / "model-2.safetensors")
    where = dict.fromkeys(read_header(model / "model.safetensors"), "model.safetensors")
    index = {"weight_map": where | {"model.norm.weight": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def resize(model: Path, **keys: int) -> None:
    """Give the model other sizes, with weights of these."""
    (model / "config.json").write_text(json.dumps(SHAPE | keys))
    write_weights(model)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda model: (model / "model.safetensors").unlink(),
            "files of another format (*.bin, *.gguf) must",
        ),
        (lambda model: (model / "tokenizer.json").write_text("{}"), "no tokenizer that can be read; copy it"),
        (
            lambda model: (model / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
            ),
            "1 weight files are missing, model-2.safetensors first",
        ),
        (
            lambda model: store_twice(model),
            "model-2.safetensors stores model.embed_tokens.weight, which model.safetensors.index.json gives",
        ),
        (lambda model: mark(model / "config.json"), "config.json begins with a byte order mark (BOM)"),
        (
            lambda model: os.truncate(model / "model.safetensors", 200_000),
            "model.safetensors has 200,000 of its 2",
        ),
        (
            lambda model: write_weights(model, but="model.norm.weight"),
            "model.safetensors has no tensor model.norm.weight; copy it again",
        ),
        (
            lambda model: (model / "config.json").write_text(json.dumps(SHAPE | {"intermediate_size": 256})),
            "has model.layers.0.mlp.gate_proj.weight of [128, 64], but config.json of the model says",
        ),
        (
            lambda model: (model / "config.json").write_text("{"),
            "config.json cannot be read: Expecting property name",
        ),
        (lambda model: (model / "config.json").write_text('{"model_type": "gemma3"}'), "model_type 'gemma3'"),
        (
            lambda model: (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors"),
            "has model-00001-of-00001.safetensors, but no model.safetensors.index.json",
        ),
        (
            lambda model: (model / "model.safetensors").write_text(
                "version https://git-lfs.github.com/spec/v1"
            ),
            "model.safetensors is the pointer of Git LFS, not the file; call `git lfs pull`",
        ),
        (
            lambda model: (model / "config.json").rename(model / "adapter_config.json"),
            "it holds adapters alone; merge them into their model",
        ),
        (lambda model: shutil.rmtree(model), "no such folder, and a run downloads nothing; give the folder"),
        (
            lambda model: (model / "config.json").write_text(json.dumps(SHAPE | {"rope_theta": None})),
            "config.json has no rope_theta for its rope_type 'default'; add what",
        ),
        (
            lambda model: resize(model, vocab_size=320),
            "tokenizer.json makes ids up to 326, but config.json says vocab_size = 320; take the tokenizer",
        ),
        (
            lambda model: (model / "generation_config.json").write_text('{"eos_token_id": 320}'),
            "model/generation_config.json: the engine stops at ['<|endoftext|>'], but the chat template ends",
        ),
    ],
)
def test_a_model_that_some_job_could_not_load_is_refused(tmp_path, read, model, spoil, message):
    spoil(model)
    found = complaints(RunDir(tmp_path / "run"), read())
    assert len(found) == 1, found
    assert message in found[0]


def test_a_reference_of_another_shape_is_refused(tmp_path, read, model):
    shutil.copytree(model, reference := tmp_path / "reference")
    words = [f"reference={reference}", "learner.loss.kl_coefficient=0.01"]
    assert complaints(RunDir(tmp_path / "run"), read(*words)) == []
    resize(reference, hidden_size=48)
    (found,) = complaints(RunDir(tmp_path / "run"), read(*words))
    assert found.startswith(f"reference: {reference}/model.safetensors has model.embed_tokens.weight of [")
    (reference / "model.safetensors").write_bytes(b"partial")
    (found,) = complaints(RunDir(tmp_path / "run"), read(*words))
    assert "copy it again" in found


def test_a_partial_file_that_the_index_does_not_name_refuses_no_model(tmp_path, read, model):
    tensors = dict.fromkeys(read_header(model / "model.safetensors"), "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": tensors}))
    (model / "model-00001-of-00002.safetensors").write_bytes(b"partial")
    assert complaints(RunDir(tmp_path / "run"), read()) == []


@pytest.mark.slow
def test_a_dry_run_in_the_folder_of_a_run_refuses_what_a_start_refuses(tmp_path, model):
    words = ["configs/demo.toml", *NOBODY, f"model={model}", 'sandbox={type="process"}', "tasks.train=1"]
    words += ["tasks.eval=1", "--run", tmp_path / "run"]
    assert typed("hpc_swe.launch", "start", *words).returncode == 0
    before = listing(tmp_path / "run")
    plan, real = (typed("hpc_swe.launch", "start", *words, "seed=7", *dry) for dry in (["--dry-run"], []))
    refused = [one.stderr.splitlines()[-1] for one in (plan, real)]
    assert (plan.returncode, real.returncode) == (2, 2)
    assert "seed: 0 -> 7" in refused[0]
    assert refused[0] == refused[1]
    assert typed("hpc_swe.launch", "start", *words, "poll_s=3", "--dry-run").returncode == 0
    assert listing(tmp_path / "run") == before


class Picky(Local, frozen=True, kw_only=True):
    """An executor that takes no jobs of some roles, as a scheduler without their partition does."""

    refused: tuple[Role, ...] = ("reward",)

    def submit(self, run: RunDir, submission: Submission) -> str:
        """Refuse some roles."""
        if submission.role in self.refused:
            raise ConfigError("sbatch: error: invalid partition specified: cpu")
        return super().submit(run, submission)


class Busy(Local, frozen=True, kw_only=True):
    """An executor on which a learner's job runs."""

    def queue(self, _: RunDir) -> list[Job]:
        return [Job("learner", "7", 1, "running")]


def test_a_run_goes_on_with_a_model_that_is_divided_otherwise(tmp_path, read):
    run = RunDir(tmp_path / "run")
    control.start(run, read(*NOBODY, "policy.tensor_parallel=1"))
    control.start(run, read(*NOBODY, "policy.tensor_parallel=2"))
    assert existing.load(run).policy.tensor_parallel == 2
    busy = [*NOBODY, f"executor={{type='{__name__}:Busy'}}"]
    checks.require_alike(run, read(*busy, "policy.tensor_parallel=2"))
    with pytest.raises(ConfigError, match="data_parallel = 1, but the learner.s job has 2 processes"):
        checks.require_alike(run, read(*busy, "policy.tensor_parallel=1"))


def test_one_refused_role_leaves_no_other_job_behind(tmp_path, read):
    run, words = RunDir(tmp_path / "run"), ["counts.inference=0", "counts.rollout=0", "counts.learner=0"]
    words += [f"executor={{type='{__name__}:Picky'}}"]
    config = read(*words)
    with pytest.raises(ConfigError, match="reward: .*invalid partition.*; nothing was left in the queue"):
        control.start(run, config)
    assert config.executor.queue(run) == []
    assert submissions.jobs(run, "coordinator")
    ticked = typed("hpc_swe.launch", "tick", run.root)
    assert (ticked.returncode, config.executor.queue(run)) == (0, []), "what was cancelled stays so"
    assert "submitted nothing: control/STOP forbids it; `launch start` removes that" in ticked.stdout


def test_a_refused_start_ends_no_process_that_runs_by_hand(tmp_path, read):
    run, words = RunDir(tmp_path / "run"), ["counts.inference=0", "counts.rollout=0", "counts.learner=0"]
    words += [f"executor={{type='{__name__}:Picky', refused=['coordinator', 'reward']}}"]
    with pytest.raises(ConfigError, match="nothing was left in the queue"):
        control.start(run, read(*words))
    (run.nodes / "inference-node-1.json").write_text("{}")  # as its process writes it
    assert control.start(run, read(*words)).lost == ["coordinator", "reward"]
    assert not run.stop.exists()


def test_a_merged_configuration_is_shown_as_toml_that_reads_as_the_same(read):
    tree = configuration.dump(
        read('taskset.image="a \\"b\\" \\\\ c"', "rollout.template_arguments={a_b=true}")
    )
    assert tomllib.loads("\n".join(configuration.toml(tree))) == json.loads(json.dumps(tree))


@pytest.mark.slow
def test_a_start_that_waits_lets_go_on_timeout_and_on_interrupt(tmp_path, model):
    run = RunDir(tmp_path / "run")
    words = [*NOBODY, "counts.reward=1", f"model={model}"]
    words += ['sandbox={type="process"}', "tasks.train=1", "tasks.eval=1", "configs/demo.toml"]
    done = typed("hpc_swe.launch", "start", "--wait", 1, *words, "--run", run.root)
    config = existing.load(run)
    try:
        assert (done.returncode, "not finished after 1 s" in done.stderr) == (5, True), done.stderr
        assert f"detached; jobs keep running. `python -m hpc_swe.status {run.root}` shows them" in done.stderr
        [job] = control.alive(run, config)
        line = [sys.executable, "-m", "hpc_swe.launch", "start", *words, "--run", run.root, "--wait", "600"]
        waiting = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert "submitted nothing" in waiting.stdout.readline()
        waiting.send_signal(signal.SIGINT)
        said = waiting.communicate(timeout=DEADLINE_S)[1]
        assert waiting.returncode == 130
        assert said.endswith("interrupted\n")
        assert "Traceback" not in said
        assert control.alive(run, config) == [job]
        assert not run.stop.exists()
    finally:
        control.stop(run, config, now=True)


READERS = [
    *("hpc_swe.launch start", "hpc_swe.evaluate --out=x", "hpc_swe.doctor"),
    *("hpc_swe.engine", "hpc_swe.demo", "hpc_swe.check", "hpc_swe.build_images"),
]


@pytest.mark.slow
@pytest.mark.parametrize("line", READERS)
def test_no_command_answers_an_interrupt_with_a_traceback(tmp_path, line):
    """Each reads a pipe into which nobody writes."""
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    code, said = interrupted([*line.split(), str(pipe)], is_reading)
    assert "Traceback" not in said, said
    assert code in (130, -signal.SIGINT)


def interrupted(words: list[str], moment) -> tuple[int, str]:
    """Return the exit code of a command that was interrupted at a moment, and what it said."""
    line = [sys.executable, "-m", *words]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until(lambda: process.poll() is not None or moment(process.pid))
    until(lambda: interrupt(process) is not None)
    return process.returncode, process.communicate()[1].decode()


def interrupt(process: subprocess.Popen) -> int | None:
    """Once more if need be: an extension that is being loaded may lose an interrupt."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(0.5)
    return None


def is_reading(pid: int) -> bool:
    """Whether it waits in the call that opens a file."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] in ("257", "56")  # openat of x86-64 and ARM


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hpc_swe.launch", "strat", "configs/demo.toml"], "'strat' is not one of start, tick"),
        (["hpc_swe.launch", "start", "--rum=x", "configs/demo.toml"], "unknown argument '--rum=x'; did you"),
        (["hpc_swe.launch", "start", "--steps=1"], "'--steps=1'; keys of the configuration have no dashes"),
        (["hpc_swe.launch", "start", "steps=1"], "no CONFIG.toml"),
        (["hpc_swe.launch", "start", "configs/demo.toml", "groups.grup_size=4"], "grup_size"),
    ],
)
def test_a_misspelt_word_of_the_command_line_is_answered_with_its_like(words, said):
    done = typed(*words)
    assert done.returncode == 2
    assert said in done.stderr
