"""Merge the options of sbatch that people write with those that hpc_swe writes.

People may write an option with dashes or underscores. False or an empty text leaves an option out.
"""

from collections.abc import Mapping

from hpc_swe.base.errors import ConfigError

Options = dict[str, str | int | bool]

OWN_KEYS = {
    **{"account": "account", "clusters": "cluster", "cluster": "cluster", "signal": "notice_s"},
    **{"partition": "partition, or roles.NAME.partition", "nodes": "roles.NAME.nodes"},
    **{"time": "roles.NAME.timeout_min", "cpus-per-task": "roles.NAME.cpus_per_task"},
}
"""Option -> the key of [executor] that sets it."""
FIXED = (
    *("job-name", "comment", "array", "dependency", "output", "error", "open-mode"),
    *("ntasks", "ntasks-per-node", "parsable", "wait", "test-only"),
)
"""Options by which hpc_swe finds its jobs and their logs again, or divides a job's processes."""
MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
UNCOUNTED = (
    *("gpus", "gpus-per-task", "gpus-per-socket", "tres-per-node", "tres-per-task"),
    *("constraint", "exclusive"),
)
"""Options that may give GPUs without their number per node."""


def named(options: Mapping[str, str | int | bool]) -> Options:
    """Return the options with dashes in their names, as sbatch has them."""
    return {name.replace("_", "-"): value for name, value in options.items()}


def check(options: Mapping[str, str | int | bool], key: str) -> None:
    """Raise ConfigError for an option that has a key of its own, or that no one may set."""
    for name in named(options):
        if name in OWN_KEYS:
            raise ConfigError(f"{key}.{name}: set {OWN_KEYS[name]} of [executor] in its place")
        if name in FIXED:
            raise ConfigError(f"{key}.{name}: hpc_swe sets this option itself; leave it out")


def merged(own: Options, given: Options) -> Options:
    """Return the options of a batch script, where those that people gave replace ours.

    Slurm refuses two options for the memory, and two for the GPUs of which one names their kind.
    """
    replaced = {"mem"} if gives_memory(given) else set()
    if any(_gives_gpus(name, value) for name, value in given.items()):
        replaced.add("gpus-per-node")
    kept = {name: value for name, value in own.items() if name not in replaced}
    return {name: value for name, value in (kept | given).items() if value is not False and value != ""}


def gives_memory(options: Options) -> bool:
    """Return whether options say how much memory a job gets."""
    return any(name in MEMORY for name in options)


def _gives_gpus(name: str, value: str | int | bool) -> bool:
    """Return whether an option says how many GPUs a job gets: of --gres and --tres-per-task, some do."""
    return name.startswith("gpus") or (name.startswith(("gres", "tres-per")) and "gpu" in str(value))
