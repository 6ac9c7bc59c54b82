"""Import what every rank imports, once: ranks are forked from the process that loaded this module."""

import gc
from pathlib import Path

from hpc_swe.models.policies._megatron import uncompiled

if not Path("/dev/nvidiactl").exists():  # a rank with a GPU compiles, so it imports for itself
    with uncompiled():
        import hpc_swe.models.policies._megatron.learner
        import hpc_swe.roles.learner.loop  # noqa: F401
    gc.collect()
    gc.freeze()  # or each collection of each rank looks at, and copies, all that was imported here
