"""List the back ends that our learner is compared with; without torch, so that the command can name them.

All peers are transformers' model under PyTorch's FSDP2, which `fsdp2.py` runs, with float32 weights in the
optimizer, bfloat16 products and float32 sums of gradients, as our learner has.

`fsdp2` is as fast as we can make it. It has the kernels of attention that our learner chooses, each layer
compiled, our output layer that never holds all logits, and fused AdamW.

`published-a` and `published-b` are the settings of two published systems, slime's FSDP learner and verl's, as
far as packages allow: flash attention is torch's own instead of that of the package flash-attn. Left out, in
their favour, are the passes of the reference model and of the old policy, verl's offloading of the optimizer
and its sequence parallelism.
"""

from dataclasses import dataclass, replace
from typing import Literal

from hpc_swe.base.cli import suggestion
from hpc_swe.base.errors import ConfigError


@dataclass(frozen=True)
class PeerSettings:
    """Say how a peer trains."""

    recompute: Literal["none", "mlp", "full"] = "none"
    """What backward computes again: nothing by request (the compiler may still), the MLPs, or each layer."""
    compiled: bool = True
    """Whether each layer is compiled."""
    fused_head: bool = True
    """Whether the output layer works through chunks of trained tokens, or makes the logits of all tokens."""
    fused_optimizer: bool = True
    """Whether AdamW is one kernel, or torch's default."""
    fast_attention: bool = True
    """Whether each sequence gets the fastest kernel, or flash attention."""
    packed: bool = True
    """Whether a microbatch has all sequences of a pack, or one."""


_PUBLISHED = PeerSettings(
    "full", compiled=False, fused_head=False, fused_optimizer=False, fast_attention=False
)
PEERS = {
    "fsdp2": PeerSettings(),
    "fsdp2:mlp": PeerSettings("mlp"),
    "fsdp2:full": PeerSettings("full"),
    "published-a": _PUBLISHED,
    "published-b": replace(_PUBLISHED, packed=False),
}
"""Column -> settings."""
NEXT = {"fsdp2": "fsdp2:mlp", "fsdp2:mlp": "fsdp2:full"}
"""Column -> the one to try when it runs out of memory."""


def parse_peers(text: str) -> list[str]:
    """Return the columns that a text such as "fsdp2,published-a" names; raise ConfigError for another name.

    Example:
        >>> parse_peers("none")
        []
    """
    names = [] if text == "none" else [word.strip() for word in text.split(",")]
    for name in names:
        if name not in PEERS:
            known = ("none", *PEERS)
            raise ConfigError(f"--peer {name!r} is none of {', '.join(known)}{suggestion(name, known)}")
    return names
