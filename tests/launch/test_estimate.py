"""What a run will cost: counts against built models, memory against an H200, and what people see of it."""

import json
import subprocess
import sys

import msgspec
import pytest

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.rundir import RunDir
from hpc_swe.cluster.executors.slurm import Resources, Slurm
from hpc_swe.config import config as configuration
from hpc_swe.launch import estimate, preview
from hpc_swe.launch.plan import RunPlan
from hpc_swe.models import shapes
from hpc_swe.models.costs import GIB
from hpc_swe.models.engines._vllm.memory import cached_token
from hpc_swe.models.engines.vllm import Vllm
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron.memory import MemoryNeeds, cheapest_recompute, learner_memory
from hpc_swe.models.policies.megatron import Megatron
from tests.kit.checkout import ROOT, typed
from tests.kit.ranks import launcher
from tests.kit.toy_model import HERMES, make_model, write_weights

MODELS = shapes.SHAPES | {
    f"{layers} layers of {name}": shapes.SHAPES[name] | {"num_hidden_layers": layers}
    for layers, name in ((8, "8B"), (8, "30B-A3B"), (4, "30B-A3B"))
}
HALF_OF_14B = {"tensor_parallel": 2, "recompute": "elementwise"}
HALF_OF_14B |= {"offload_optimizer": 0.9}
SLURM = """
[executor]
type = "slurm"
account = "lab"

[executor.roles.learner]
nodes = 2
cpus_per_task = 8
mem_gb = 400
timeout_min = 720
options = { gres = "gpu:h100:4" }

[executor.roles.inference]
gpus_per_node = 1

[executor.roles.rollout]
cpus_per_task = 32
"""


@pytest.fixture
def shape(tmp_path):
    def read(name):
        (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
        return ModelShape.read(tmp_path)

    return read


@pytest.fixture
def read(tmp_path):
    model = make_model(tmp_path / "model", HERMES)
    (model / "config.json").write_text(json.dumps(MODELS["8B"]))
    (model / "generation_config.json").write_text('{"eos_token_id": 322}')
    write_weights(model)

    def config(*overrides, executor=SLURM):
        (tmp_path / "executor.toml").write_text(executor)
        words = [f"model={tmp_path / 'model'}", 'sandbox={type="process"}', *overrides]
        return configuration.read(ROOT / "configs/demo.toml", tmp_path / "executor.toml", overrides=words)

    return config


# parameters


@pytest.mark.parametrize(
    ("name", "count"),
    [("0.6B", 596_049_920), ("4B", 4_022_468_096), ("8B", 8_190_735_360), ("30B-A3B", 30_532_122_624)],
)
def test_published_models_have_as_many_parameters_as_published(shape, name, count):
    assert shape(name).parameters.total == count


@pytest.mark.slow
def test_count_is_that_of_models_that_are_built(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tests.kit.ranks import tiny

    models = tiny.make_models(tmp_path / "tiny")
    subprocess.run(
        [sys.executable, "-m", "hpc_swe.demo.model", "--out", tmp_path / "demo"], cwd=ROOT, check=True
    )
    for folder in [*models.values(), tmp_path / "demo"]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        counted = ModelShape.read(folder).parameters.total
        assert counted == sum(parameter.numel() for parameter in model.parameters()), folder.name


# memory


@pytest.mark.parametrize(
    ("name", "tokens", "settings", "measured"),
    [
        ("0.6B", 32768, {"recompute": "none"}, 56.96),
        ("0.6B", 32768, {"recompute": "elementwise"}, 37.72),
        ("4B", 16384, {"recompute": "elementwise"}, 108.92),
        ("4B", 65536, {"recompute": "products"}, 103.99),
        ("8 layers of 8B", 32768, {"recompute": "none"}, 86.50),
        ("8 layers of 8B", 32768, {"recompute": "elementwise"}, 71.50),
        ("8 layers of 8B", 32768, {"recompute": "products"}, 55.60),
        ("8 layers of 8B", 32768, {"recompute": "full"}, 55.07),
        ("4 layers of 30B-A3B", 16384, {"recompute": "none"}, 64.45),
        ("14B", 32768, HALF_OF_14B, 122.0),
        ("8 layers of 30B-A3B", 65536, {"recompute": "elementwise", "expert_parallel": 2}, 83.8),
    ],
)
def test_learner_memory_is_what_an_h200_was_measured_to_use(shape, name, tokens, settings, measured):
    """torch.cuda.max_memory_allocated of two whole steps, torch 2.11, megatron-core 0.16.1."""
    ranks = settings.get("expert_parallel", 1)
    peak = learner_memory(shape(name), Megatron(**settings), ranks, tokens).total.bytes / GIB
    assert peak == pytest.approx(measured, rel=0.05)


def test_data_parallel_ranks_share_the_optimizer(shape):
    def optimizer(ranks):
        memory = learner_memory(shape("8B"), Megatron(), ranks, 4096)
        return next(part.bytes for part in memory.parts if part.what == "optimizer")

    assert optimizer(4) == optimizer(1) / 4 == 3 * shape("8B").parameters.total


@pytest.mark.parametrize(
    ("name", "tokens", "settings", "gib", "chosen"),
    [
        ("4B", 16384, {}, 180, "none"),
        ("4B", 16384, {}, 139, "elementwise"),
        ("4B", 16384, {}, 94, "products"),
        ("4B", 65536, {}, 139, "products"),
        ("4B", 16384, {}, 40, "full"),  # the least, although it does not fit
        ("4B", 65536, {"offload_optimizer": 1.0}, 79, "products"),
        ("8B", 28672, {"tensor_parallel": 2}, 139, "elementwise"),
        ("8B", 28672, {"tensor_parallel": 4}, 79, "elementwise"),
        ("30B-A3B", 32768, {"tensor_parallel": 4}, 139, "elementwise"),
        ("30B-A3B", 32768, {"expert_parallel": 8}, 139, "products"),
    ],
)
def test_fastest_recomputation_that_fits_is_chosen(shape, name, tokens, settings, gib, chosen):
    policy, ranks = Megatron(recompute="auto", **settings), 8 if name == "30B-A3B" else 1
    assert cheapest_recompute(shape(name), policy, ranks, MemoryNeeds(tokens), gib * GIB) == chosen


def test_recomputation_is_chosen_for_routing_that_is_not_even(shape):
    """A GPU whose experts get a quarter more tokens than others' must not run out of memory."""
    policy, needs = Megatron(recompute="auto", expert_parallel=8), MemoryNeeds(32768)
    even = learner_memory(shape("30B-A3B"), Megatron(recompute="elementwise", expert_parallel=8), 8, 32768)
    free = 1.15 * even.total.bytes + 2 * GIB
    assert cheapest_recompute(shape("30B-A3B"), policy, 8, needs, free) != "elementwise"
    assert cheapest_recompute(shape("30B-A3B"), policy, 8, needs, 1.25 * free) == "elementwise"


def test_recomputation_that_is_chosen_leaves_room_for_the_last_version(shape):
    """The last version takes 7.6 GiB of each of two GPUs."""
    policy, deltas = Megatron(recompute="auto"), MemoryNeeds(16384, ["last version"])
    peak = learner_memory(shape("8B"), Megatron(recompute="elementwise"), 2, 16384).total.bytes
    free = 1.15 * peak + 2 * GIB
    assert cheapest_recompute(shape("8B"), policy, 2, deltas, free) == "elementwise"
    on_gpu = Megatron(recompute="auto", delta_base="gpu")
    assert cheapest_recompute(shape("8B"), on_gpu, 2, deltas, free) != "elementwise"
    assert cheapest_recompute(shape("8B"), on_gpu, 2, MemoryNeeds(16384), free) == "elementwise"


def test_host_memory_of_a_rank_lists_what_it_keeps(shape):
    def found(reference="initial model", **settings):
        memory = learner_memory(shape("8B"), Megatron(**settings), 2, 4096, [reference, "last version"])
        return {part.what: part.bytes for part in memory.host}

    count = shape("8B").parameters.total
    names = ("reference, and policy meanwhile", "last version, for deltas")
    assert found() == dict(zip(names, (4 * count, 2 * count / 2), strict=True))
    assert names[1] not in found(delta_base="gpu")
    on_gpu = learner_memory(shape("8B"), Megatron(delta_base="gpu"), 2, 4096, ["last version"]).parts
    assert [part.bytes for part in on_gpu if part.what == names[1]] == [count]
    assert found(lora_rank=8).keys() == {"weights below adapters"}
    with_other = found("other reference", lora_rank=8)
    assert with_other.keys() == {"weights below adapters", names[0]}
    assert with_other[names[0]] == found("other reference")[names[0]] == 4 * count


def test_stages_share_layers_and_expert_parallel_ranks_share_experts(shape):
    def held(name, ranks, **settings):
        memory = learner_memory(shape(name), Megatron(**settings), ranks, 4096)
        return {part.what: part.bytes for part in memory.parts}

    known = shape("8B").parameters
    staged = held("8B", 1, pipeline_parallel=4)
    assert staged["weights"] == 2 * (known.tables / 2 + (known.split + known.whole) / 4)
    assert staged["activations"] == held("8B", 1)["activations"], "the first stage holds four microbatches"
    assert held("8B", 1, context_parallel=4)["activations"] == held("8B", 1)["activations"] / 4
    assert held("8B", 1, context_parallel=4)["optimizer"] == held("8B", 4)["optimizer"]
    known, divided = shape("30B-A3B").parameters, held("30B-A3B", 8, expert_parallel=8)
    assert divided["weights"] == 2 * (known.total - known.experts * 7 / 8)
    assert divided["optimizer"] == held("30B-A3B", 8)["optimizer"] == 12 * known.total / 8


def test_cache_holds_as_many_tokens_as_its_bytes_say_and_at_least_a_head(shape, tmp_path):
    assert cached_token(shape("8B"), 1, 2) == 2 * 36 * 8 * 128 * 2
    assert cached_token(shape("8B"), 8, 2) == 2 * 36 * 128 * 2
    assert cached_token(shape("30B-A3B"), 8, 2) == 2 * 48 * 128 * 2
    shape("8B")
    said = Vllm(kv_cache_bytes=40 * GIB).memory(tmp_path, 32768).parts
    assert said[1].formula == "291,271 tokens: 8 full contexts"
    assert [round(part.bytes / GIB, 1) for part in said] == [15.3, 40.0]
    said = Vllm(kv_cache_bytes=40 * GIB, kv_cache_dtype="fp8_e4m3").memory(tmp_path, 32768).parts
    assert said[1].formula == "582,542 tokens: 17 full contexts"
    assert [round(part.bytes / GIB, 1) for part in said] == [15.3, 40.0]
    said = Vllm(dtype="fp8_e4m3").memory(tmp_path, 32768).parts
    assert round(said[0].bytes / GIB, 1) == 8.8, "the embedding and the head keep 16 bits"


# the scheduler


@pytest.mark.parametrize(
    ("resources", "common", "count"),
    [
        (Resources(), {}, 0),
        (Resources(gpus_per_node=2), {}, 2),
        (Resources(options={"gres": "gpu:h100:4"}), {}, 4),
        (Resources(options={"gres": "lustre:1,gpu:8"}), {}, 8),
        (Resources(options={"gres": "gpu"}), {}, 1),
        (Resources(), {"gpus-per-node": "a100:4"}, 4),
        (Resources(options={"gpus_per_node": "a100:4"}), {"gpus-per-node": 2}, 4),
        (Resources(gpus_per_node=2), {"gpus-per-node": False}, 0),
    ],
)
def test_gpus_are_counted_in_every_spelling(resources, common, count):
    assert Slurm(options=common, roles={"learner": resources}).gpus_per_node("learner") == count


def test_what_is_asked_of_slurm_is_counted_for_each_role(read):
    config = read("policy.tensor_parallel=8", "counts.rollout=16")
    found = {role: jobs.request for role, jobs in estimate.jobs(config).items()}
    assert (found["learner"].nodes, found["learner"].cores, found["learner"].gpus) == (2, 64, 8)
    assert (found["learner"].memory_gb, found["learner"].hours) == (800, 12)
    assert (found["rollout"].nodes, found["rollout"].cores, found["rollout"].gpus) == (16, 512, 0)
    assert found["inference"].gpus == 1


def costs(config):
    return estimate.costs(config, estimate.jobs(config))


class Strange(Vllm, frozen=True, kw_only=True):
    """An engine that cannot read the model."""

    def memory(self, model, context):
        raise ConfigError("no such model")


def test_what_an_engine_does_not_know_takes_no_other_estimate_away(read):
    known = read("engine.device=gpu", "policy.device=gpu")
    found, full = costs(msgspec.structs.replace(known, engine=Strange())), costs(known)
    assert found.engine is None
    assert found.learner is not None
    assert (found.learner, found.host, found.disk) == (full.learner, full.host, full.disk)


def crowded(*words):
    files = [ROOT / "configs/demo.toml"] + [
        ROOT / f"configs/{word}.toml" for word in words if "=" not in word
    ]
    config = configuration.read(*files, overrides=[word for word in words if "=" in word])
    return [message.partition(" ")[0] for message in estimate.crowded(config, estimate.jobs(config), 2)]


@pytest.mark.parametrize(
    ("words", "roles"),
    [
        ((), []),
        (("rollout.slots=40",), ["rollout.slots"]),
        (("rollout.slots=20", "counts.rollout=2"), ["rollout.slots"]),
        (("reward.slots=9", "counts.rollout=0", "rollout.slots=90"), ["reward.slots"]),
        (("slurm", "counts.rollout=100", "rollout.slots=256", "reward.slots=16"), []),
        (("slurm", "rollout.slots=257", "reward.slots=17"), ["rollout.slots", "reward.slots"]),
        (("slurm_demo",), []),
    ],
)
def test_workers_with_more_slots_than_their_cores_serve_are_named(words, roles):
    """Those of a cluster have the cores of their job; those of one machine share it."""
    assert crowded(*words) == roles


# the run folder


def parts(config):
    return {part.what: part for part in costs(config).disk}


def test_folder_holds_the_newest_versions_and_every_milestone(read):
    weights = 2 * 8_190_735_360 + estimate.COMPANIONS
    few = parts(read("policy.dtype=bfloat16", "steps=100", "eval.every=0"))
    assert few["weights/"].bytes == 4 * weights
    assert few["checkpoints/"].bytes == 3 * 14 * 8_190_735_360
    for checkpoint_s, kept in ((60, 6), (0, 3)):  # by time any step may have one
        words = ["retention.keep_every=15", f"learner.checkpoint_s={checkpoint_s}"]
        many = parts(read("policy.dtype=bfloat16", "steps=100", "eval.every=0", *words))
        assert many["weights/"].bytes == (4 + 6) * weights
        assert many["checkpoints/"].bytes == (3 + kept) * 14 * 8_190_735_360


@pytest.mark.parametrize(
    ("words", "versions", "checkpoints"),
    [
        (["eval.every=5"], 2, 2),
        (["eval.every=30", "learner.checkpoint_s=0"], 2, 2),  # checkpoints of steps 30, 60 and 90
        (["eval.every=33", "learner.checkpoint_s=0"], 2, 0),
        (["eval.every=33"], 2, 2),
    ],
)
def test_the_best_weights_and_those_under_evaluation_are_counted(read, words, versions, checkpoints):
    without, found = (parts(read("steps=100", *more)) for more in (["eval.every=0"], words))
    for name, count in (("weights/", versions), ("checkpoints/", checkpoints)):
        each = without[name].bytes / (4 if name == "weights/" else 3)
        assert found[name].bytes - without[name].bytes == pytest.approx(count * each)


def test_run_that_only_evaluates_keeps_neither_weights_nor_batches(read):
    only = "eval={samples=4, tasks=0, decodings={plain={}, greedy={temperature=0.0}}}"
    found = parts(read("mode=eval", only))
    assert not {"weights/", "checkpoints/", "batches/", "archive/"} & set(found)
    assert found["evals/"].bytes == 128 * (4 + 1) * 512 * estimate.EPISODE_TOKEN


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_checkpoint_and_weights_on_disk_are_as_large_as_counted(tmp_path, read, dtype, monkeypatch):
    pytest.importorskip("megatron.core")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    (tmp_path / "save.py").write_text(SAVE)
    launcher.launch(1, tmp_path / "save.py", str(tmp_path), dtype)
    words = [f"policy.dtype={dtype}", "policy.tensor_parallel=1", "eval.every=0"]
    config = read(*words, f"model={tmp_path / 'built'}")
    for name, versions in (("weights", 4), ("checkpoints", 3)):
        folder = tmp_path / name
        found = sum(path.stat().st_size for path in folder.iterdir())
        part = parts(config)[f"{name}/"]
        counted = part.bytes / versions - (estimate.COMPANIONS if name == "weights" else 0)
        assert counted == pytest.approx(found, rel=0.02)
        assert part.inodes / versions >= len(list(folder.iterdir())) + 2  # the folder and its manifest


SAVE = """
import sys
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
from hpc_swe.models.policies.base import OptimizerConfig
from hpc_swe.models.policies.megatron import Megatron
root = Path(sys.argv[1])
sizes = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4)
sizes |= dict(vocab_size=4096, num_key_value_heads=2, head_dim=64, tie_word_embeddings=False)
Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(root / "built")
policy = Megatron(device="cpu", dtype=sys.argv[2])
learner = policy.build(root / "built", OptimizerConfig(), None)
for name, write in (("weights", learner.export), ("checkpoints", learner.save)):
    (root / name).mkdir()
    write(root / name)
learner.close()
"""


# the dry run


def test_there_is_one_script_an_array(read, tmp_path):
    config = read("counts.rollout=2500", "policy.tensor_parallel=8")
    found = preview.scripts(RunPlan(RunDir(tmp_path / "run"), config))
    heads = [script.splitlines()[0] for script in found if "rollout" in script.splitlines()[0]]
    assert heads == [
        "### rollout: submission 1, 1000 of 2500 jobs",
        "### rollout: submission 2, 1000 of 2500 jobs",
        "### rollout: submission 3, 500 of 2500 jobs",
    ]
    assert "#SBATCH --array=0-499\n" in found[-2] + found[-1]


def test_a_hybrid_run_says_what_host_memory_its_halves_need(read):
    words = ["hybrid=true", "policy.dtype=bfloat16", "engine.dtype=bfloat16", "counts.inference=2"]
    words += ["engine.device=gpu", "policy.device=gpu"]
    found = {part.what: part.formula for part in costs(read(*words)).host}
    assert found["hybrid: the learner's state"] == "1 x 53.40 GiB", (
        "14 bytes, over tp = 2, on each of two nodes"
    )
    assert found["hybrid: engines asleep"] == "2 x 15.26 GiB, at most twice"
    words += ["learner.snapshot_every=10", "policy.delta_base=gpu", "engine.dtype=fp8_e4m3"]
    found = {part.what: part.formula for part in costs(read(*words)).host}
    assert found["hybrid: the learner's state"] == "1 x 61.03 GiB", "16 bytes, with the last version"
    assert found["hybrid: engines' published weights"] == "2 x 2 P"


@pytest.mark.parametrize(
    ("gib", "said"),
    [
        (
            0,
            "learner: no verdict, since the memory of its GPU is unknown: set executor.roles.learner.gpu_gib",
        ),
        (20, "learner: does not fit: it needs at least 7"),
        (80, "learner: may run out of memory: it needs at least 7"),
        (141, "learner: fits: it needs at least 7"),
    ],
)
def test_a_dry_run_compares_what_is_needed_with_what_a_gpu_has(tmp_path, read, gib, said):
    words = ["policy.device=gpu", "policy.dtype=bfloat16", "policy.recompute=full"]
    words += ["policy.tensor_parallel=2", f"executor.roles.learner.gpu_gib={gib}"]
    found = preview.cost_tables(RunPlan(RunDir(tmp_path / "run"), read(*words)))
    assert next(each for each in found if str(each).startswith("learner:")).startswith(said)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "mem_gb=46",
            "may be short: the job keeps at least 45.8 GiB, and executor.roles.learner.mem_gb = 46; ask for "
            "a tenth more, for programs",
        ),
        (
            "mem_gb=51",
            "the parts listed fit: the job keeps at least 45.8 GiB, and executor.roles.learner.mem_gb = 51",
        ),
        (
            "mem_gb=40",
            "does not fit: the job keeps at least 45.8 GiB, and executor.roles.learner.mem_gb = 40",
        ),
        ("options.mem=400G", "no verdict: an option of sbatch, or this machine, says how much the job gets"),
    ],
)
def test_a_dry_run_compares_host_memory_with_what_a_job_asks_for(tmp_path, read, key, said):
    words = ["policy.dtype=bfloat16", "policy.offload_optimizer=1", f"executor.roles.learner.{key}"]
    found = preview.cost_tables(RunPlan(RunDir(tmp_path / "run"), read(*words)))
    assert f"host memory: {said}" in found


def test_a_dry_run_without_a_model_says_why_no_memory_is_known(tmp_path, read):
    found = preview.cost_tables(RunPlan(RunDir(tmp_path / "run"), read(f"model={tmp_path}")))
    assert "memory not known: no model folder (its config.json alone is enough)" in "\n".join(map(str, found))


def test_a_layout_that_cannot_be_gets_no_verdict(tmp_path, read):
    plan = RunPlan(RunDir(tmp_path / "run"), read("policy.expert_parallel=3", "policy.device=gpu"))
    assert "learner: fits" not in "\n".join(map(str, preview.cost_tables(plan)))
    assert not any(need.what == "learner" for need in plan.costs.gpus)


@pytest.mark.parametrize(("gib", "level"), [(0, ""), (80, "full"), (141, "elementwise")])
def test_a_dry_run_says_what_backward_will_recompute(tmp_path, read, gib, level):
    """An upper bound: the driver counts 80 GiB where torch finds 79 free."""
    words = ["policy.device=gpu", "policy.dtype=bfloat16", "policy.tensor_parallel=2"]
    words += [f"executor.roles.learner.gpu_gib={gib}", "batches.microbatch_tokens=24576"]
    config = read(*words, "engine.device=gpu")
    (need, _) = costs(config).gpus
    assert need.chosen == level
    said = "\n".join(map(str, preview.cost_tables(RunPlan(RunDir(tmp_path / "run"), config))))
    assert (f"'full', as in the table; 'auto' will take {level!r}, of" in said) == (gib > 80)


def dry(tmp_path, *words, **path):
    where = ["--run", tmp_path / "run", "--dry-run"]
    return typed("hpc_swe.launch", "start", "configs/demo.toml", *words, *where, **path)


@pytest.mark.slow
def test_dry_run_makes_nothing_and_needs_no_slurm(tmp_path, read):
    config = read("policy.tensor_parallel=8")
    words = [tmp_path / "executor.toml", "policy.tensor_parallel=8", f"model={config.model}"]
    words += ["executor.roles.learner.options={gres='lustre:1'}", "executor.roles.inference.gpus_per_node=0"]
    before = sorted(tmp_path.iterdir())
    done = dry(tmp_path, *words, 'sandbox={type="process"}', PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gres=lustre:1\n" in done.stdout
    assert "P = 8,190,735,360, tp = 8, dp = 1" in done.stdout
    assert done.stdout.isascii()
    tables, _, scripts = done.stdout.partition("### coordinator")
    assert max(map(len, tables.splitlines())) <= 80
    assert "merged configuration" not in scripts
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_dry_run_of_a_local_run_says_so_and_ends_with_what_start_refuses(tmp_path, read):
    config = read("policy.tensor_parallel=2")
    sandbox = 'sandbox={type="apptainer", images="no-such-images"}'
    done = dry(tmp_path, f"model={config.model}", sandbox)
    assert "all on this machine; nothing is asked of a scheduler" in " ".join(done.stdout.split())
    assert "the run folder at its fullest" in done.stdout
    assert done.returncode == 2
    assert "no-such-images" in done.stderr
