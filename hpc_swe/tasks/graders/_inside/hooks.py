"""Find plugins that take part in how tests run and what is reported of them.

This text goes into the sandbox together with `reporter` or `runner`. It runs under Python 3.6 and later.
"""

from typing import Any

PREFIXES = ("pytest_runtest", "pytest_pyfunc", "pytest_collection_m", "pytest_make")


def implementations(config: Any) -> Any:
    """Return name, part and function of all that takes part in making a report: hooks and what calls them."""
    manager = config.pluginmanager
    relay = manager.hook  # pytest 7 and 8 keep only hooks that were called in config.hook
    hooks = sorted(item for item in vars(relay).items() if item[0].startswith(PREFIXES))
    parts = [(name, one, one.function) for name, hook in hooks for one in hook.get_hookimpls()]
    parts += [(name, hook, hook._hookexec) for name, hook in hooks]  # noqa: SLF001
    executes = manager._inner_hookexec  # noqa: SLF001
    return (*parts, *(("hooks", one, executes) for one in (manager, relay, config.hook)))


def stay_in_process(config: Any) -> None:
    """Turn off what runs tests in other processes: workers of pytest-xdist, children of pytest-forked."""
    for name, value in (("numprocesses", 0), ("maxprocesses", None), ("dist", "no"), ("tx", []), ("px", [])):
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    for name in ("forked", "looponfail"):
        if hasattr(config.option, name):
            setattr(config.option, name, False)
