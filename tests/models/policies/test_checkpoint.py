"""Checkpoints resume at another tensor-parallel size, and repeat the run bit for bit at the same."""

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.kit.random_model import save_random  # noqa: E402
from tests.kit.ranks import launcher, tiny  # noqa: E402

TP1 = {"dtype": "float32"}
EP2 = TP1 | {"expert_parallel": 2}
PP2 = TP1 | {"pipeline_parallel": 2}
CP2 = TP1 | {"context_parallel": 2}
TP2 = TP1 | {"tensor_parallel": 2}
BF16 = {"dtype": "bfloat16", "tensor_parallel": 2}
HALF = {"offload_optimizer": 0.5}
HALVES = [[[0, 1]], [[2, 3]]]
PIECE = 2**18


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tiny.make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def base(tmp_path_factory, models):
    """What the cases of tiny models have in common."""
    folder = tmp_path_factory.mktemp("data")
    model = AutoModelForCausalLM.from_pretrained(models["dense"], dtype=torch.float32)
    return {
        "optimizer": {"lr": 1e-3, "warmup_steps": 3, "steps": 6, "decay_share": 0.5},
        "data": tiny.write_sequences(folder / "data.msgpack", tiny.make_sequences(model)),
        "model": str(models["dense"]),
        "packing": [[[0, 1], [2, 3]]],
        "loss": {"objective": "decoupled"},
        "piece": 1001,  # so that no matrix is gathered as a whole
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory, models, base):
    """Two steps, a checkpoint, three more; and the three more again in other processes."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def first(name, policy, model="dense", **more):
        do = [("train", 2), ("save", str(folder / f"step2{name}")), ("train", 3), ("export", "after")]
        return base | {"name": "first" + name, "policy": policy, "do": do, "model": str(models[model])} | more

    def again(name, of, policy, **more):
        steps = [("train", 2), ("rest", None), ("train", 1)]
        do = [("load", str(folder / f"step2{of}")), ("rest", None), *steps, ("export", "after")]
        return base | {"name": name, "policy": policy, "do": do} | more

    answers = launcher.run_cases(
        2,
        [
            first("", TP2),
            first("-bf16", BF16, "sharded"),
            again("same", "", TP2),
            again("same-bf16", "-bf16", BF16, model=str(models["sharded"])),
            again("data-parallel", "", TP1, packing=HALVES),
            again("hosted-data-parallel", "", TP1 | {"offload_optimizer": 0.7}, packing=HALVES),
            first("-hosted-bf16", BF16 | {"offload_optimizer": 0.6}, "sharded"),
            again("fetched-bf16", "-hosted-bf16", BF16, model=str(models["sharded"])),
            first("-shared", TP1 | HALF, packing=HALVES),
            again("same-shared", "-shared", TP1 | HALF, packing=HALVES),
            again("tensor-parallel", "-shared", TP2),
            first("-moe", EP2, "moe", packing=HALVES),
            again("hosted-moe", "-moe", EP2 | HALF, model=str(models["moe"]), packing=HALVES),
            again("same-moe", "-moe", EP2, model=str(models["moe"]), packing=HALVES),
            again("moe-pipeline-parallel", "-moe", PP2, model=str(models["moe"])),
            first("-moe-pipeline", PP2, "moe"),
            again("moe-context-parallel", "-moe-pipeline", CP2, model=str(models["moe"])),
            first("-shared-expert", TP2, "hybrid-moe"),
            again("undivided-expert", "-shared-expert", TP1, packing=HALVES, model=str(models["hybrid-moe"])),
        ],
        folder,
    )
    quarters = [[[0]], [[1]], [[2]], [[3]]]
    experts = {"model": str(models["moe"]), "packing": quarters}
    words = [again("same-experts", "-experts", EP2, **experts)]
    answers |= launcher.run_cases(4, [first("-experts", EP2, "moe", packing=quarters), *words], folder)
    answers |= launcher.run_cases(1, [again("one", "", TP1)], folder)
    return folder, answers


def curve(answers, name):
    return [(m["policy/loss"], m["policy/grad_norm"], m["policy/lr"]) for m in answers[name][0]["metrics"]][
        -3:
    ]


def weights(folder, name):
    found = {}
    for path in sorted((folder / name / "after").glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("kind", ["", "-bf16", "-shared", "-moe", "-experts"])
def test_replay_after_a_resume_and_two_rests_is_bit_equal(runs, kind):
    """In a rest the learner moves all that it keeps on its device to host memory and back."""
    folder, answers = runs
    assert {rank["left"] for rank in answers["same" + kind]} == {0}
    assert curve(answers, "same" + kind) == curve(answers, "first" + kind)
    expected, found = weights(folder, "first" + kind), weights(folder, "same" + kind)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("hosted-data-parallel", "data-parallel"),
        ("first-hosted-bf16", "first-bf16"),
        ("fetched-bf16", "first-bf16"),
        ("hosted-moe", "first-moe"),
    ],
)
def test_state_in_host_memory_changes_no_bit_of_a_step_or_a_resume(runs, name, like):
    folder, answers = runs
    assert curve(answers, name) == curve(answers, like)
    expected, found = weights(folder, like), weights(folder, name)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("one", "first"),
        ("data-parallel", "first"),
        ("tensor-parallel", "first-shared"),
        ("moe-pipeline-parallel", "first-moe"),
        ("moe-context-parallel", "first-moe-pipeline"),
        ("undivided-expert", "first-shared-expert"),
    ],
)
def test_a_checkpoint_resumes_at_another_layout(runs, name, first):
    folder, answers = runs
    expected = curve(answers, first)
    for got, wanted in zip(curve(answers, name), expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)


def test_steps_and_learning_rate_go_on_where_they_stopped(runs):
    _, answers = runs
    assert {rank["step"] for name in answers for rank in answers[name]} == {5}
    rates = [m["policy/lr"] for m in answers["first"][0]["metrics"]]
    # warm-up 1/3, 2/3, 1; then down over the last 3 of 6 steps, so that the 6th is still above 0
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 0.75e-3, 0.5e-3])
    assert [m["policy/lr"] for m in answers["same"][0]["metrics"]] == rates[2:]


def test_bfloat16_trains_and_exports_what_it_loaded_from_shards(runs, models):
    folder, answers = runs
    names = json.loads((Path(models["sharded"], "model.safetensors.index.json")).read_text())["weight_map"]
    found = weights(folder, "first-bf16")
    assert found.keys() == names.keys()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert json.loads((folder / "first-bf16/after/config.json").read_text())["dtype"] == "bfloat16"


WIDE = tiny.SIZES | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A case whose checkpoint has 77 MB."""
    folder = tmp_path_factory.mktemp("wide")
    model = save_random(folder / "model", "Qwen3", WIDE | {"head_dim": 16}, dtype="bfloat16")
    (model / "tokenizer.json").write_text("{}")
    small = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    data = tiny.write_sequences(folder / "data", tiny.make_sequences(small))
    return {"model": str(model), "policy": {"dtype": "bfloat16"}, "piece": PIECE, "data": data}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, wide):
    """Bytes of host memory that saves and loads take; the optimizer is in it or on a device."""
    folder = tmp_path_factory.mktemp("measured")
    do = {name: [("train", 1), ("measure", str(folder / name))] for name in ("hosted", "shared")}
    hosted = {"name": "hosted", "packing": [[[0, 1], [2, 3]]], "do": do["hosted"]}
    hosted["policy"] = {"dtype": "bfloat16", "offload_optimizer": 1.0}
    shared = {"name": "shared", "packing": HALVES, "do": do["shared"]}
    answers = launcher.run_cases(1, [wide | hosted], folder / "out")
    answers |= launcher.run_cases(2, [wide | shared], folder / "out")
    words = WIDE | {"vocab_size": 2**17, "num_hidden_layers": 2, "tie_word_embeddings": True}
    table = save_random(folder / "table", "Qwen3", words | {"head_dim": 16}, dtype="bfloat16")
    (table / "tokenizer.json").write_text("{}")
    do = [("train", 1), ("measure", str(folder / "words"))]
    words = {"name": "words", "model": str(table), "packing": HALVES, "do": do}
    answers |= launcher.run_cases(2, [wide | words], folder / "out")
    for rank, found in enumerate(answers["shared"]):
        files = (folder / "shared").glob(f"__{rank}_*.distcp")
        found["written_bytes"] = sum(path.stat().st_size for path in files)
    for name, ranks in answers.items():
        for rank in ranks:
            print(name, {key: rank[key] for key in rank if key.endswith(("_s", "_bytes"))})
    return answers


def test_a_checkpoint_of_state_in_host_memory_copies_none_of_it(measured):
    """Of the largest matrix only what is being written; Megatron collects and clones all of the state."""
    (rank,) = measured["hosted"]
    assert rank["state_bytes"] > 60e6
    assert rank["saved_bytes"] < rank["state_bytes"] / 4


def test_ranks_that_share_state_write_about_as_much_each(measured):
    state = measured["shared"][0]["state_bytes"]
    weights = 2 / 12 * 2 * state
    first, other = (rank["written_bytes"] for rank in measured["shared"])
    assert other == pytest.approx(state, rel=0.1)
    assert first == pytest.approx(state + weights, rel=0.1), "the first one writes the weights, too"


def test_ranks_that_share_state_hold_pieces_of_it_while_they_save(measured):
    """A job that needs memory for its part of a large model is killed at its first checkpoint."""
    for rank in measured["words"]:
        assert rank["state_bytes"] > 200e6
        assert rank["saved_bytes"] < rank["state_bytes"] / 4


@pytest.mark.parametrize("size", ["128k", "8m"], ids=["files", "values"])
def test_a_save_that_finds_no_room_ends_on_all_ranks(tmp_path, tmpfs, wide, size):
    """For all of the files, or for the values alone; then training and later saves go on."""
    small = tmpfs(tmp_path / "small", f"size={size}")
    do = [
        ("train", 1),
        ("save_refused", str(small / "saved")),
        ("train", 1),
        ("save", str(tmp_path / "saved")),
    ]
    case = wide | {"name": "full", "packing": HALVES, "do": do}
    answers = launcher.run_cases(2, [case], tmp_path / "out")["full"]
    assert all(rank["refused"][0].startswith(f"{small}/saved: no space is left") for rank in answers)
    assert (tmp_path / "saved/metadata.json").exists()


ANYWHERE = [f"{place}:{rank}" for place in ("file", "values", "end") for rank in (0, 1)]
PLACES = ["metadata:0", "configuration:0", *ANYWHERE]


def test_a_save_that_one_rank_cannot_end_is_refused_on_all(tmp_path, base):
    """What it did not write would be zeros, with a checksum that fits."""
    refused = [("save_refused", f"{tmp_path / place.replace(':', '-')}:{place}") for place in PLACES]
    do = [("train", 1), *refused, ("train", 1), ("save", str(tmp_path / "saved"))]
    case = base | {"name": "quota", "policy": TP1, "packing": HALVES, "do": do}
    for rank in launcher.run_cases(2, [case], tmp_path / "out")["quota"]:
        assert len(rank["refused"]) == len(PLACES)
        assert all("the quota is used up" in refusal for refusal in rank["refused"])
    assert (tmp_path / "saved/metadata.json").exists()


def test_a_resume_takes_host_memory_for_pieces_of_the_state(measured):
    """Each rank of a job that needs more to resume is killed for ever."""
    (rank,) = measured["hosted"]
    assert rank["loaded_bytes"] < rank["state_bytes"] / 2
    for rank in measured["shared"]:
        whole = 2 * rank["state_bytes"]
        assert whole > 60e6
        assert rank["loaded_bytes"] < whole / 2


def test_a_resume_loads_a_table_of_words_by_rows(measured):
    """It is nearly all of this model, in bfloat16 and as three float32 tensors of the optimizer's state."""
    for rank in measured["words"]:
        table = 4 * 2**17 * 256
        assert 2 * rank["state_bytes"] > 3 * table
        assert rank["loaded_bytes"] < 0.75 * table, (
            "half of one such tensor is the weight as a tensor of bfloat16"
        )
