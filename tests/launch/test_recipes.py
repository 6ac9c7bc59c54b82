"""Each row of docs/recipes.md: it is accepted, fits, leaves no GPU unused, and takes as long as it says."""

import json
import math
import re
from pathlib import Path

import pytest

from hpc_swe.base.rundir import RunDir
from hpc_swe.config import config as configuration
from hpc_swe.launch import checks, preview
from hpc_swe.launch.plan import RunPlan
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.tasks.sets.swebench import Swebench
from tests.kit.checkout import ROOT
from tests.kit.toy_model import CODER, HERMES, make_model, write_weights
from tests.launch.test_estimate import MODELS

PAGE = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if re.match(r"\| `(\d+x)+\w+` ", line)
]
SHAPES = {"qwen3_4b": "4B", "qwen3_8b": "8B", "qwen3_14b": "14B", "qwen3_coder_30b_a3b": "30B-A3B"}
SHAPES |= {"qwen35_4b": "3.5-4B", "qwen35_9b": "3.5-9B", "qwen35_35b_a3b": "3.5-35B-A3B"}
RATES = {"a100": (312e12, 2.0e12), "h100": (989e12, 3.35e12), "gh200": (989e12, 4.0e12)}
"""FLOP/s in bfloat16 and bytes of memory a second, by datasheets."""
# This machine is no node of the recipe.
NOT_HERE = r"build for (CPUs|GPUs)|this machine has \d+|needs the package fla-core|vLLM imports torchvision"


def words(cell):
    return re.findall("`([^`]+)`", cell)


def planned(folder, files, name, overrides=()):
    """The plan of a start from configurations, with the published sizes of a model and no tasks."""
    model = make_model(
        folder / "model", HERMES if name.startswith("qwen3_") and "coder" not in name else CODER
    )
    (model / "config.json").write_text(json.dumps(MODELS[SHAPES[name]] | {"max_position_embeddings": 40960}))
    (model / "generation_config.json").write_text('{"eos_token_id": 322}')
    write_weights(model)
    paths = [ROOT / f"configs/{file}.toml" for file in files]
    config = configuration.read(*paths, overrides=[f"model={model}", *overrides])
    return RunPlan(RunDir(folder / "run"), config)


def complaints(plan):
    found = [complaint for check in checks.CHECKS for complaint in check(plan)]
    return [complaint for complaint in found if not re.search(NOT_HERE, complaint)]


def test_the_page_has_recipes_for_each_machine_and_each_model():
    machines = {path.stem for path in (ROOT / "configs/recipes").glob("*x*.toml")}
    assert {word for row in ROWS for word in words(row[0])} == machines
    assert {word for row in ROWS for word in words(row[1])} == set(SHAPES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(words("".join(row[:3]))))
def test_a_recipe_fits_and_leaves_no_gpu_unused(tmp_path, row):
    (machine,), (name,), more, tasks = map(words, row[:4])
    files = [*tasks, "slurm", f"recipes/{machine}", f"models/{name}"]
    files += [f"recipes/{word}" for word in more if "=" not in word]
    plan = planned(tmp_path, files, name, [word for word in more if "=" in word])
    assert complaints(plan) == []
    learner, engine = plan.costs.gpus
    assert learner.known_gib
    assert engine.known_gib > engine.least_gib
    assert learner.chosen, "recompute is left to the learner, which knows what is free"
    assert not learner.is_tight
    assert not any("host memory: may be short" in str(each) for each in preview.cost_tables(plan))
    asked = [jobs.request for jobs in plan.jobs.values()]
    gpus = math.prod(map(int, re.findall(r"(\d+)x", machine)))
    assert sum(each.gpus for each in asked) == gpus
    assert [row[4], row[5]] == [str(gpus), f"{learner.least_gib:.1f}"]
    if said := re.search(r"for (\d+) cores and (\d+) GB", one_node(machine)) if not more else None:
        assert sum(each.cores for each in asked) == int(said[1])
        assert sum(each.memory_gb for each in asked) == int(said[2])
    assert float(row[6].replace(",", "")) == pytest.approx(hours(plan, machine), rel=0.05)


def one_node(machine):
    return " ".join((ROOT / f"configs/recipes/{machine}.toml").read_text().replace("\n#", "").split())


def hours(plan, machine):
    """The arithmetic of docs/recipes.md."""
    config, shape = plan.config, ModelShape.read(Path(plan.config.model))
    at_once = config.rollout.slots * config.counts["rollout"]
    sampled = 2 * config.groups.groups_per_step * config.groups.group_size
    if isinstance(config.taskset, Swebench):
        return config.steps * (6 * max(2, math.ceil(sampled / at_once)) + 4) / 60
    flops, bandwidth = RATES[machine.rpartition("x")[2]]
    engines, size = config.counts["inference"], config.engine.tensor_parallel
    cached = 6000 * 4 * shape.attention_layers * shape.groups * shape.head_dim
    read = 2 * shape.parameters.total + at_once / engines * cached
    episode_s = 2500 * (read / (0.9 * bandwidth * size) + 0.0065) + 37 * 0.7
    sampling_s = sampled * episode_s / at_once
    token = 6 * shape.parameters.total + 6 * shape.attention_layers * shape.heads * shape.head_dim * 10_000
    ranks = config.policy.processes * config.learner.data_parallel
    training_s = sampled / 2 * 10_000 * token / (0.25 * flops * ranks)
    step_s = sampling_s + training_s + 30 if config.hybrid else max(sampling_s, training_s)
    return config.steps * 1.05 * step_s / 3600


def test_four_gpus_without_slurm_are_all_used(tmp_path):
    plan = planned(tmp_path, ["swepdb", "recipes/local_4", "models/qwen3_8b"], "qwen3_8b")
    assert complaints(plan) == []
    grants = [(jobs.gpus, jobs.gpu_grant.count) for jobs in plan.jobs.values() if jobs.gpus]
    assert grants == [(2, 2), (2, 2)]
