"""Import modules of swebench without the clients of Docker and Modal, which its harness package imports."""

import importlib
import importlib.util
import sys
from types import ModuleType

from hpc_swe.base.errors import ConfigError


def official(name: str) -> ModuleType:
    """Import a module of swebench, such as ``harness.grading``; raise ConfigError if it is not installed."""
    package = "swebench.harness"
    if package not in sys.modules:
        found = importlib.util.find_spec("swebench")
        if found is None or not found.submodule_search_locations:
            raise ConfigError("[grader] swebench is not installed: pip install --no-deps swebench unidiff")
        bare = ModuleType(package)
        bare.__path__ = [f"{found.submodule_search_locations[0]}/harness"]
        sys.modules[package] = bare
    return importlib.import_module(f"swebench.{name}")
