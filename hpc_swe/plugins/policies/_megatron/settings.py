"""Define the keys of the megatron policy.

They have a module of their own, without torch, because the plugin and the code that it loads both need them.
"""

from typing import Annotated, Literal

from msgspec import Meta

from hpc_swe.errors import ConfigError
from hpc_swe.plugins import Plugin


class MegatronSettings(Plugin, frozen=True, kw_only=True):
    """Hold the table [policy] type = "megatron"."""

    tensor_parallel: Annotated[int, Meta(gt=0)] = 1
    """Number of processes that share each layer; groups of them train on different data."""
    device: Literal["gpu", "cpu"] = "gpu"
    """gpu: each process needs one GPU, and the learner refuses to start with fewer. cpu: GPUs are ignored."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of parameters and activations. Gradients are summed, and bfloat16 parameters updated, in float32."""
    distributed_optimizer: bool = True
    """Spread the optimizer's state over the data-parallel ranks."""
    sequence_parallel: bool = False
    """Split the activations between layers over the tensor-parallel ranks, too."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward recomputes: none; those of attention and MLPs; all but the layers' inputs."""
    replay_routing: bool = True
    """Send each token to the experts that the engine chose, where the batch says which: see
    engine.return_routing. false: the routers of the learner choose, as they do without such an engine."""
    logprob_chunk: Annotated[int, Meta(gt=0)] = 2048
    """Number of tokens whose logits exist at one time."""
    delta_base: Literal["host", "gpu"] = "host"
    """Where the values of the last published version are kept when `learner.snapshot_every` > 1: in pinned
    memory of the host, or on the GPU, which is faster. They take two bytes for each bfloat16 parameter of a
    rank's share."""

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError("[policy] sequence_parallel = true needs tensor_parallel > 1")
