"""Which defects of megatron-core that compat.py mends are still there: python -m ...defects MODEL."""

import errno
import inspect
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path


def in_source() -> dict[str, bool]:
    """The defects that the text of megatron-core shows, before anything is mended."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.moe import moe_utils

    writer = filesystem_async.FileSystemWriterAsync
    gather = DistributedOptimizer.get_parameter_state_dp_zero
    return {
        "undefined name in the router": not hasattr(moe_utils, "te_general_gemm"),
        "helper process": "Manager()" in inspect.getsource(filesystem_async._get_write_results_queue),
        "many copies of the state": "torch.zeros(" in inspect.getsource(gather),
        "writers clone parts": "ten.clone()" in inspect.getsource(writer.prepare_write_data),
        "all tensors go to the host first": '.to("cpu"' in inspect.getsource(writer.preload_tensors),
        "writers are forked": '"fork"' in inspect.getsource(writer.write_preloaded_data_multiproc),
    }


def main() -> None:
    import torch
    from megatron.core import utils
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    found = in_source()

    from hpc_swe.models.policies._megatron.kernels import compat
    from hpc_swe.models.policies._megatron.state import saving
    from hpc_swe.models.policies.base import OptimizerConfig
    from hpc_swe.models.policies.megatron import Megatron

    compat.mark_shards = lambda model: None
    policy = Megatron(dtype="float32", device="gpu" if torch.cuda.is_available() else "cpu")
    learner = policy.build(Path(sys.argv[1]), OptimizerConfig(), None)
    linear = learner._model.decoder.layers[0].mlp.linear_fc1.weight
    found["no marks on shards"] = not hasattr(linear, "tensor_model_parallel")

    (inner,) = learner._optimizer.chained_optimizers
    found["no state before a step"] = _raises(AssertionError, inner.state_dict)
    compat.prepare_state(learner._optimizer)
    inner.load_state_dict(inner.state_dict())
    steps = [state["step"] for state in inner.optimizer.state.values()]
    found["one step count for all"] = len({step.data_ptr() for step in steps}) < len(steps)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    filesystem_async.FileSystemWriterAsync.finish = full
    saving.collect_metadata_errors = lambda: nullcontext([])
    with tempfile.TemporaryDirectory() as folder:
        found["last files fail on rank 0 alone"] = _raises(OSError, lambda: learner.save(Path(folder)))
    learner.close()
    with compat.cpu_as_cuda():
        norm, _ = utils.local_multi_tensor_l2_norm(0, None, [[torch.full((2**24,), 0.1)]], False)
    found["norms of many values are wrong on a CPU"] = abs(norm.item() / (0.1 * 2**12) - 1) > 1e-4
    print("FOUND", json.dumps(found))


def _raises(kind: type[Exception], act) -> bool:
    try:
        act()
    except kind:
        return True
    return False


if __name__ == "__main__":
    main()
