"""Stand in for torchvision where it is missing: vLLM imports it for Qwen3.5, and text uses nothing of it.

Each name of its modules is a text, so that tables of them can be made while modules are imported; nothing can
be called.
"""

import sys
from types import ModuleType


class _Unused:
    def __getattr__(self, name: str) -> str:
        return name


def _lookup(name: str) -> _Unused:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Unused()


__version__ = "0"
for each in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    module = ModuleType(f"{__name__}.{each}")
    module.__dict__["__getattr__"] = _lookup
    module.__path__ = []
    sys.modules[module.__name__] = module
