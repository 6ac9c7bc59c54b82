"""Runs cases on real ranks: python -m tests.kit.ranks.worker SPEC, once per rank (`launcher.launch`).

A case builds a policy, takes steps on packed sequences, and leaves behind what tests compare.
"""

import contextlib
import ctypes
import errno
import gc
import json
import os
import sys
import time
import weakref
from pathlib import Path


def main() -> None:
    from megatron.core import parallel_state

    *cases, last = json.loads(Path(sys.argv[1]).read_text())
    for case in cases:
        model = weakref.ref(_run(case)._model)
        parallel_state.destroy_model_parallel()  # cases share the process group
        for _ in range(2):  # a view of a parameter keeps its graph, until the first pass removes the view
            if model() is not None:  # a pass takes as long as a step
                gc.collect()
        assert model() is None, f"{case['name']}: the model of a learner that nobody uses is still in memory"
    _run(last).close()


def _run(case: dict):
    import torch
    from msgspec import convert

    from hpc_swe.models.policies._megatron.state import gathered, state
    from hpc_swe.models.policies.base import LossConfig, OptimizerConfig
    from hpc_swe.models.policies.megatron import Megatron
    from hpc_swe.roles.learner.loss import PolicyObjective

    if "piece" in case:  # values, for this case and those after it
        gathered.PIECE, state.AHEAD = case["piece"], 8 * case["piece"]
    print("case", case["name"], flush=True)
    case["objective"] = PolicyObjective(convert(case.get("loss", {}), LossConfig))
    device = "gpu" if torch.cuda.is_available() else "cpu"
    policy = {"device": device, "recompute": "none"} | case.get("policy", {})
    Megatron.logprob_chunk = policy.pop("logprob_chunk", 2048)  # a constant, which small cases shorten
    learner = convert(policy, Megatron).build(
        Path(case["model"]),
        convert({"warmup_steps": 0, "beta2": 0.95} | case.get("optimizer", {}), OptimizerConfig),
        Path(case.get("reference", case["model"])) if case["objective"].needs_reference else None,
    )
    out, found = Path(case["out"]), {"metrics": []}
    out.mkdir(parents=True, exist_ok=True)
    for verb, argument in case["do"]:
        VERBS[verb](learner, argument, case, found)
    (out / f"rank{learner.ranks.rank}.json").write_text(json.dumps(found | {"step": learner.step}))
    return learner


def _train(learner, steps: int, case: dict, found: dict) -> None:
    for _ in range(steps):
        found["metrics"].append(learner.train(_batch(case, learner), case["objective"]))


def _evaluate(learner, steps: int, case: dict, found: dict) -> None:
    """As a validation does; steps that follow must not notice it."""
    from msgspec.structs import replace

    from hpc_swe.models.policies.base import LossConfig
    from hpc_swe.roles.learner.loss import PolicyObjective

    batch = _batch(case, learner)
    found["validation"] = learner.evaluate(batch, PolicyObjective(LossConfig(objective="sft")))
    wide = LossConfig(
        objective="gspo", sequence_clip_low=0.9, sequence_clip_high=2.0, sampler_coefficient=0.0
    )
    found["gspo"] = learner.evaluate(batch, PolicyObjective(wide))
    free = [replace(micro, routing=b"") for micro in batch.microbatches]
    if free != batch.microbatches:
        for name, micro in (("replayed", batch.microbatches), ("free", free)):
            objective = PolicyObjective(LossConfig())
            found[name] = learner.evaluate(replace(batch, microbatches=micro), objective)


def _score(learner, token_ids: list[int], case: dict, found: dict) -> None:
    found["scores"] = learner.logprobs(token_ids)


def _publish(learner, root: str, case: dict, found: dict) -> None:
    from hpc_swe.base.rundir import RunDir
    from hpc_swe.roles.learner.publish import Publisher, Snapshots

    run = RunDir(Path(root))
    run.make()
    publisher = Publisher(run, learner, 1, "learner-test", Snapshots(every=9))
    publisher.publish_weights()
    _train(learner, 1, case, found)
    publisher.publish_weights()


def _keep(learner, name: str, case: dict, found: dict) -> None:
    found[name] = found["scores"]


def _export(learner, words: str, case: dict, found: dict) -> None:
    """A folder's name, or name:carrier."""
    import msgspec

    name, _, carrier = words.partition(":")
    try:
        exported = learner.export(_fresh(learner, Path(case["out"]) / name), carrier or "full")
        found["tensors"] = found[name] = msgspec.to_builtins(exported)
        kept, room = learner._exporter._kept.values(), learner._exporter._room
        found["kept"] = sum(each.nbytes for each in kept)
        found["room"] = 0 if room is None else room.nbytes
    except FloatingPointError as error:
        found["error"] = str(error)


def _refuse(learner, words: str, case: dict, found: dict) -> None:
    """Carrier:rank. That rank's file system refuses the export, and all ranks must learn it."""
    from hpc_swe.base.errors import StorageError
    from hpc_swe.roles.learner.collective import on_all_ranks

    carrier, rank = words.split(":")
    folder = _fresh(learner, Path(case["out"]) / f"refused-{carrier}")
    if learner.ranks.rank == int(rank):
        folder = Path("/sys")  # where nobody can make a file, root included
    try:
        on_all_ranks(learner.ranks, lambda: learner.export(folder, carrier))
    except StorageError as error:
        found[f"refused-{carrier}"] = str(error)


def _spoil(learner, rank: int, case: dict, found: dict) -> None:
    """One number of one rank alone is none any more."""
    if learner.ranks.rank == rank:
        next(iter(learner._model.parameters())).data.view(-1)[0] = float("nan")


def _save(learner, folder: str, case: dict, found: dict) -> None:
    learner.save(_fresh(learner, Path(folder)))


def _save_refused(learner, words: str, case: dict, found: dict) -> None:
    """A folder whose file system is full; or folder:place:rank, where that rank's quota ends."""
    from hpc_swe.base.errors import StorageError

    folder, place, rank = (*words.split(":"), "", "")[:3]
    try:
        with _quota_ends(place) if rank == str(learner.ranks.rank) else contextlib.nullcontext():
            learner.save(_fresh(learner, Path(folder)))
    except StorageError as error:
        found.setdefault("refused", []).append(str(error))


@contextlib.contextmanager
def _quota_ends(place: str):
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from hpc_swe.models.policies._megatron.state import checkpoint_files
    from hpc_swe.models.policies._megatron.weights import tensor_writer

    owner, name = {
        "metadata": (filesystem_async.FileSystemWriterAsync, "finish"),
        "configuration": (serialization, "save_config"),
        "file": (checkpoint_files.CheckpointFiles, "_write_file"),
        "values": (tensor_writer, "write_all"),
        "end": (os, "fsync"),
    }[place]
    kept = getattr(owner, name)

    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, "no room")

    setattr(owner, name, refuse)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _measure(learner, folder: str, case: dict, found: dict) -> None:
    """Save and load, and tell the seconds of both, and by how many bytes this process grew.

    Beside that stands the size of its optimizer's state.
    """
    folder = _fresh(learner, Path(folder))
    for verb, act in (("saved", learner.save), ("loaded", learner.load)):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory would hide what is taken again
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of this call
        before, began = _status("VmRSS"), time.monotonic()
        act(folder)
        found[f"{verb}_s"] = time.monotonic() - began
        found[f"{verb}_bytes"] = _status("VmHWM") - before
    state = [each for inner in learner._optimizer.chained_optimizers for each in inner.optimizer.state]
    found["state_bytes"] = 12 * sum(each.numel() for each in state)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def _load(learner, folder: str, case: dict, found: dict) -> None:
    learner.load(Path(folder))


def _resume(learner, folder: str, case: dict, found: dict) -> None:
    from hpc_swe.base.errors import ConfigError

    try:
        learner.load(Path(folder))
    except ConfigError as error:
        found["refused"] = str(error)


def _grads(learner, name: str, case: dict, found: dict) -> None:
    """The summed gradients, exported in place of the weights."""
    kept = [(each, each.data) for each in learner._model.parameters() if each.requires_grad]
    for parameter, _ in kept:
        parameter.data = parameter.main_grad
    learner.export(_fresh(learner, Path(case["out"]) / name))
    for parameter, data in kept:
        parameter.data = data


def _rest(learner, _: object, case: dict, found: dict) -> None:
    """As a learner does that gives its GPUs to engines for a while."""
    learner.release_memory()
    found["left"] = sum(p.untyped_storage().nbytes() for p in learner._model.parameters())
    learner.restore_memory()


VERBS = {
    "train": _train,
    "score": _score,
    "logprobs": _score,
    "keep": _keep,
    "publish": _publish,
    "evaluate": _evaluate,
    "spoil": _spoil,
    "export": _export,
    "refuse": _refuse,
    "save": _save,
    "save_refused": _save_refused,
    "measure": _measure,
    "load": _load,
    "resume": _resume,
    "rest": _rest,
    "grads": _grads,
}


def _fresh(learner, folder: Path) -> Path:
    if learner.ranks.rank == 0:
        folder.mkdir(parents=True)
    learner.ranks.gather(None)
    return folder


def _batch(case: dict, learner):
    """Sequences of case["data"], packed as case["packing"][data rank] says; "filler" trains nothing."""
    import msgspec

    from hpc_swe.base.records import FILLER, Batch, MicroBatch

    sequences = msgspec.msgpack.decode(Path(case["data"]).read_bytes(), type=list[MicroBatch])
    packing = case["packing"][learner.ranks.data_rank]
    micro = [FILLER if part == "filler" else _join([sequences[index] for index in part]) for part in packing]
    parts = case.get("minibatches", [])
    return Batch(step=learner.step, rank=learner.ranks.data_rank, microbatches=micro, minibatches=parts)


def _join(parts):
    from hpc_swe.base.records import MicroBatch

    arrays = ("token_ids", "mask", "logprobs", "advantages", "weights", "routing")
    joined = {name: b"".join([getattr(part, name) for part in parts]) for name in arrays}
    return MicroBatch(sequence_lengths=[n for part in parts for n in part.sequence_lengths], **joined)


if __name__ == "__main__":
    main()
