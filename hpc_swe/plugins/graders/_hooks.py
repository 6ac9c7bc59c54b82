"""Find plugins that take part in how tests run and what is reported of them.

This text goes into the sandbox together with `_reporter` or `_runner`. It runs under Python 3.6 and later.
"""

from typing import Any

PREFIXES = ("pytest_runtest", "pytest_pyfunc", "pytest_collection_m", "pytest_make")


def implementations(config: Any) -> Any:
    """Return name, implementation and function of each hook that takes part in making a report."""
    relay = config.pluginmanager.hook  # pytest 7 and 8 keep only hooks that were called in config.hook
    hooks = sorted(item for item in vars(relay).items() if item[0].startswith(PREFIXES))
    return tuple((name, one, one.function) for name, hook in hooks for one in hook.get_hookimpls())
