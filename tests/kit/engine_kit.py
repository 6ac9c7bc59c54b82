"""Tiny models, published versions, and a supervisor in a process of its own."""

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.loader import Plugin, dump
from hpc_swe.base.records import (
    Node,
    ProbeScore,
    TensorInfo,
    Turn,
    WeightManifest,
    WeightVersion,
    float_array,
    id_array,
)
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders
from hpc_swe.cluster.processes import free_port
from hpc_swe.models.engines.base import Weights
from hpc_swe.models.engines.vllm import Vllm
from hpc_swe.roles.inference.child import Child
from tests.kit.checkout import environment
from tests.kit.random_model import save_random
from tests.kit.waiting import DEADLINE_S

TOKEN = "secret"
V0 = WeightVersion()
VOCABULARY = 2048
EOS = 2
CPU = Vllm(max_num_seqs=16, kv_cache_bytes=1 << 27, dtype="float32", device="cpu")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 1,
}


def make_model(
    folder: Path, seed: int, *, stops: bool = False, tied: bool = False, stores_head: bool = False
) -> Path:
    """A random float32 Qwen3; one that `stops` ends its turn after a few tokens."""
    from safetensors.torch import load_file, save_file

    def change(name: str, parameter: Any) -> None:
        if stops and name == "lm_head.weight":
            parameter.zero_()[EOS] = 2.0

    save_random(folder, "Qwen3", SIZES | {"head_dim": 32, "tie_word_embeddings": tied}, seed, change)
    if stores_head:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        save_file(tensors | head, file, metadata={"format": "pt"})
    return folder


def make_weights(folder: Path) -> Path:
    """Weights for who computes nothing."""
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file({"w": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    return folder


def publish(
    run: RunDir,
    model: Path,
    version: WeightVersion,
    *,
    probe: ProbeScore | None = None,
    damage: Callable[[Path], None] = lambda _: None,
    listed: Path | None = None,
    parent: WeightVersion | None = None,
) -> Path:
    """A version with the weights of `model`, damaged after the checksums; `listed` tells its tensors."""

    def fill(stage: Path) -> WeightManifest:
        shutil.copytree(model, stage, dirs_exist_ok=True)
        files = {path.name: folders.describe(path) for path in stage.iterdir()}
        damage(stage)
        return WeightManifest(
            writer="test",
            files=files,
            version=version,
            tensors=tensors(listed or model),
            probe=probe,
            parent=parent,
        )

    folders.publish(run.weight(version), fill)
    return run.weight(version)


def tensors(model: Path) -> dict[str, TensorInfo]:
    names = {"F32": "float32", "BF16": "bfloat16"}
    found = {}
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        for name, info in header.items():
            digest = hashlib.sha256(name.encode()).hexdigest()
            found[name] = TensorInfo(dtype=names[info["dtype"]], shape=info["shape"], sha256=digest)
    return found


def publish_delta(run: RunDir, models: tuple[Path, Path], version: WeightVersion, parent: Weights) -> Weights:
    """What changed from the first model to the second one, as a learner writes it, after `parent`."""
    import torch
    from safetensors.torch import load_file, save_file

    from hpc_swe.models.deltas.tensor_delta import Digests, encode, text

    old, new = (load_file(model / "model.safetensors") for model in models)
    computer = Digests(torch.device("cpu"))

    def fill(stage: Path) -> WeightManifest:
        stored: dict[str, torch.Tensor] = {}
        infos = {}
        for name, tensor in new.items():
            changes = encode(old[name], tensor)
            if changes is None:
                stored[name] = tensor
            elif len(changes.codes):
                stored |= {f"{name}:codes": changes.codes, f"{name}:others": changes.others}
            digest = text(int(computer.tensor(tensor)))
            dtype = str(tensor.dtype).removeprefix("torch.")
            infos[name] = TensorInfo(dtype=dtype, shape=list(tensor.shape), digest=digest)
        for number, kind in enumerate(
            (":codes", ""), 1
        ):  # a learner may spread a tensor's two parts over files
            part = {n: each for n, each in stored.items() if n.endswith(":codes") == bool(kind)}
            save_file(part, stage / f"delta-{number:05d}-of-00002.safetensors")
        files = {path.name: folders.describe(path) for path in stage.iterdir()}
        return WeightManifest(
            writer="test", files=files, version=version, tensors=infos, parent=parent.version
        )

    folders.publish(run.weight(version), fill)
    return verified(run, version, parent)


def publish_adapters(run: RunDir, model: Path, version: WeightVersion) -> None:
    """Adapters of one matrix of a model, as a learner writes them."""
    import torch
    from safetensors.torch import load_file, save_file

    from hpc_swe.models.deltas.low_rank import ADAPTER_CONFIG, ADAPTER_TENSORS, Factors
    from hpc_swe.models.deltas.tensor_delta import Digests, text

    name = "model.layers.0.mlp.down_proj"
    tensors = load_file(model / "model.safetensors")
    outputs, inputs = tensors[f"{name}.weight"].shape
    a, b = torch.ones(1, inputs), torch.linspace(-1, 1, outputs).view(outputs, 1)
    Factors(a, b, 0.5).merge(tensors[f"{name}.weight"], tensors[f"{name}.weight"])
    computer = Digests(torch.device("cpu"))

    def fill(stage: Path) -> WeightManifest:
        stored = {f"base_model.model.{name}.lora_{each}.weight": part for each, part in (("A", a), ("B", b))}
        save_file(stored, stage / ADAPTER_TENSORS)
        (stage / ADAPTER_CONFIG).write_text('{"r": 2, "lora_alpha": 1}')
        infos = {
            each: TensorInfo(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                digest=text(int(computer.tensor(tensor))),
            )
            for each, tensor in tensors.items()
        }
        files = {path.name: folders.describe(path) for path in stage.iterdir()}
        return WeightManifest(writer="test", files=files, version=version, tensors=infos, parent=V0)

    folders.publish(run.weight(version), fill)


def verified(run: RunDir, version: WeightVersion, parent: Weights | None = None) -> Weights:
    """A published version, as a supervisor gives it to an engine."""
    folder = run.weight(version)
    manifest = folders.manifest(folder, WeightManifest)
    return Weights(version, folder, manifest, folders.verify(folder, manifest, lambda: False), parent)


def make_run(root: Path) -> RunDir:
    run = RunDir(root)
    run.make()
    run.token.write_text(TOKEN)
    return run


def supervise(
    run: RunDir,
    engine: Plugin,
    model: Path,
    *,
    scratch: str = "/tmp",
    turns: str = "",
    max_restarts: int = 3,
    context: int = 2048,
    **inference: object,
) -> "subprocess.Popen[str]":
    """One that takes turns with a learner when `turns` names their folder."""
    settings = {
        "run": str(run.root),
        "engine": dump(engine),
        "model": str(model),
        "context": context,
        "turns": turns,
        "max_restarts": max_restarts,
        "inference": inference,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kit.supervise", json.dumps(settings)],
        env=environment(OMP_NUM_THREADS="1", TMPDIR=scratch),
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def supervisors(run: RunDir, model: Path) -> "Iterator[Callable[..., subprocess.Popen[str]]]":
    """`supervise`, whose processes end with the block."""
    started = []

    def begin(engine: Plugin, **inference: object) -> "subprocess.Popen[str]":
        started.append(supervise(run, engine, model, **inference))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def node(run: RunDir) -> Node | None:
    """The inference node's cell."""
    for name in atomic.names(run.nodes):
        if name.startswith("inference"):
            try:
                return atomic.get(run.nodes / name, Node)
            except (FileNotFoundError, CorruptRecord):
                return None
    return None


def await_node(run: RunDir, condition: Callable[[Node], bool], timeout_s: float = DEADLINE_S) -> Node:
    deadline = time.monotonic() + timeout_s
    while (found := node(run)) is None or not condition(found):
        assert time.monotonic() < deadline, f"after {timeout_s} s the node cell says {found}"
        time.sleep(0.02)
    return found


def is_serving(version: WeightVersion) -> Callable[[Node], bool]:
    return lambda node: node.state == "ready" and node.versions == [version] and not node.reading


@contextlib.contextmanager
def serving(
    engine: Vllm, model: Path, log: Path, version: WeightVersion = V0, context: int = 2048
) -> Iterator[str]:
    """Run the engine itself, without a supervisor, and yield its URL once it serves a version."""
    url = f"http://127.0.0.1:{(port := free_port('127.0.0.1'))}"
    child = Child(engine.command(model, "127.0.0.1", port, "test", context), engine.environment(TOKEN), log)
    try:
        deadline = time.monotonic() + 900
        while not engine.is_healthy(url):
            child.require_alive()
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        engine.adopt(url, TOKEN, version, None)
        yield url
    finally:
        child.stop()


def require_exact(engine: Vllm, url: str, turns: list[Turn], version: WeightVersion) -> None:
    """Let the engine score every turn after its own parents: it agrees on every sampled token."""
    chains: list[list[int]] = []
    for turn in turns:
        before = [] if turn.parent is None else chains[turn.parent]
        prompt = before + id_array(turn.appended_ids).tolist()
        chains.append(prompt + turn.completion.tolist())
        scores = engine.score(url, TOKEN, chains[-1])[len(prompt) - 1 :]
        np.testing.assert_allclose(scores, float_array(turn.logprobs), atol=1e-4)
        assert [(s.oldest, s.newest) for s in turn.spans] == [(version, version)] * len(turn.spans)
        assert (turn.spans[0].start, turn.spans[-1].end) == (0, len(turn.completion))


def processes(marker: str) -> list[int]:
    """Living processes with `marker` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state = (path / "stat").read_bytes().rpartition(b")")[2].split()[0].decode()
            if state != "Z" and marker.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def json_replies(path: Path, replies: list[object]) -> str:
    path.write_bytes(msgspec.json.encode(replies))
    return str(path)
