"""Engine and learner take the same tensors from a model's folder, or refuse it with file and tensor."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from safetensors.numpy import load_file, save_file  # noqa: E402

from hpc_swe.base.errors import ConfigError  # noqa: E402
from hpc_swe.models.engines._vllm.files import Wanted, read, shapes  # noqa: E402
from hpc_swe.models.policies._megatron.weights.weights import Snapshot  # noqa: E402
from hpc_swe.models.weight_files import HEAD, INDEX, SINGLE, locate  # noqa: E402

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
DOWN, ANGLES = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TENSORS = {
    EMBEDDING: np.arange(12, dtype=np.float32).reshape(4, 3),
    DOWN: np.ones((3, 3), np.float32),
    NORM: np.full(3, 2.0, np.float32),
}
OTHER = np.zeros((4, 3), np.float32)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tied model in two files."""
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    store(tmp_path, {FIRST: (EMBEDDING, DOWN), SECOND: (NORM,)})
    return tmp_path


def store(folder: Path, files: dict[str, tuple[str, ...]]) -> None:
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    where = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def add(path: Path, more: dict[str, np.ndarray]) -> None:
    """Store more in a file that the index does not give to it."""
    save_file(load_file(path) | more, path)


def single(folder: Path, more: dict[str, np.ndarray]) -> None:
    """Store all in one file, without an index."""
    for name in (FIRST, SECOND, INDEX):
        (folder / name).unlink()
    save_file(TENSORS | more, folder / SINGLE)


def consolidate(folder: Path) -> None:
    """Store the same weights as Mistral's own library names them."""
    save_file({"layers.0.attention.wq.weight": OTHER}, folder / "consolidated.safetensors")


def move(folder: Path, name: str, file: str) -> None:
    """Let the index say that a tensor is elsewhere."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": index | {name: file}}))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        lambda folder: single(folder, {}),
        lambda folder: single(folder, {HEAD: TENSORS[EMBEDDING].copy()}),
        lambda folder: add(folder / SECOND, {ANGLES: np.ones(2)}),
        consolidate,
        lambda folder: (folder / "model-00003-of-00003.safetensors").write_bytes(b"partial"),
    ],
    ids=["shards", "one file", "a head that is the embedding", "angles", "consolidated", "a partial file"],
)
def test_engine_and_learner_read_the_same_bits(folder, change):
    change(folder)
    learner = Snapshot(folder)
    found = read(folder, Wanted(shapes(folder, is_tied=True), is_tied=True))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert np.array_equal(found[name].numpy(), tensor)
        assert np.array_equal(learner[name].numpy(), tensor)


REFUSED = {
    "an old copy in another shard": (
        lambda folder: add(folder / SECOND, {DOWN: np.zeros((3, 3), np.float32)}),
        f"{SECOND} stores {DOWN}, which {INDEX} gives to {FIRST}",
    ),
    "an equal copy in another shard": (
        lambda folder: add(folder / SECOND, {DOWN: TENSORS[DOWN]}),
        f"{SECOND} stores {DOWN}, which {INDEX} gives to {FIRST}",
    ),
    "a tensor that the index does not name": (
        lambda folder: add(folder / FIRST, {"extra": OTHER}),
        f"{FIRST} stores extra, which {INDEX} does not name",
    ),
    "another head in a tied model": (
        lambda folder: single(folder, {HEAD: OTHER}),
        f"{SINGLE} stores {HEAD}, which is not {EMBEDDING}, but config.json sets tie_word_embeddings",
    ),
    "a head of another type": (
        lambda folder: single(folder, {HEAD: TENSORS[EMBEDDING].astype(np.float16)}),
        f"{SINGLE} stores {HEAD}, which is not {EMBEDDING}",
    ),
    "an index that is wrong": (
        lambda folder: move(folder, NORM, FIRST),
        f"{FIRST} has no tensor {NORM}, although {INDEX} says so",
    ),
    "an index that promises more": (
        lambda folder: move(folder, "more", FIRST),
        f"{FIRST} has no tensor more, although {INDEX} says so",
    ),
    "a file in another folder": (
        lambda folder: move(folder, NORM, "../" + SECOND),
        f"1 weight files are missing, ../{SECOND} first",
    ),
    "two models in one folder": (
        lambda folder: save_file(TENSORS, folder / SINGLE),
        f"{SINGLE} is beside {INDEX}, which does not name it",
    ),
    "consolidated beside a single file": (
        lambda folder: (single(folder, {}), consolidate(folder)),
        f"consolidated.safetensors stores layers.0.attention.wq.weight, and there is no {INDEX}",
    ),
    "shards without an index": (lambda folder: (folder / INDEX).unlink(), f"has {FIRST}, but no {INDEX}"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_readers_would_read_otherwise_is_refused_by_each_of_them(folder, change, message):
    change(folder)
    with pytest.raises(ConfigError) as refusal:
        locate(folder)
    assert message in str(refusal.value)
    with pytest.raises(ConfigError) as learners:
        Snapshot(folder)
    with pytest.raises(ValueError, match="^") as engines:
        shapes(folder, is_tied=True)
    assert str(refusal.value) == str(learners.value) == str(engines.value)


def test_an_untied_model_may_have_any_head(folder):
    (folder / "config.json").write_text('{"tie_word_embeddings": false}')
    single(folder, {HEAD: OTHER})
    assert locate(folder).keys() == {*TENSORS, HEAD}
    assert not np.array_equal(Snapshot(folder)[HEAD].numpy(), TENSORS[EMBEDDING])


def test_an_index_that_changes_after_its_check_is_another_version(folder):
    """It decides which file has which tensor."""
    from hpc_swe.models.engines._vllm.files import _identities

    before = _identities(folder)
    shutil.copy(folder / INDEX, folder / "kept")
    (folder / "kept").replace(folder / INDEX)
    assert before.keys() == {FIRST, SECOND, INDEX}
    assert _identities(folder) != before
