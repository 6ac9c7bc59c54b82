"""Check a run before a job is submitted; `start`, `--dry-run` and `evaluate` share this list of checks.

Each check is a function that yields its complaints. All complaints are shown together, one a line, so that a
person can correct them in one go.
"""

import importlib.util
import inspect
import ipaddress
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from msgspec.structs import replace

from hpc_swe.base import cli
from hpc_swe.base.errors import ConfigError, EngineError
from hpc_swe.base.records import Role, RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, orders
from hpc_swe.cluster.executors.base import (
    LEARNER_PROCESSES,
    GpuGrant,
    own_environment,
)
from hpc_swe.config import config as configuration
from hpc_swe.config import conflicts, job_counts
from hpc_swe.config.settings import RunConfig
from hpc_swe.config.tokenization import token_builder
from hpc_swe.launch import create, existing, trajectories
from hpc_swe.launch.estimate import RoleJobs
from hpc_swe.launch.plan import RunPlan
from hpc_swe.models import builds
from hpc_swe.models.costs import GIB
from hpc_swe.models.engines.base import EngineInfo
from hpc_swe.models.model_shape import ModelShape, refuse_mark
from hpc_swe.models.policies.base import Policy
from hpc_swe.models.weight_files import locate, require_tensors

log = logging.getLogger(__name__)


def require(plan: RunPlan) -> None:
    """Raise ConfigError, with one line for each complaint, if the plan cannot be carried out."""
    found = [complaint for check in CHECKS for complaint in check(plan)]
    found += plan.complaints
    if found:
        raise ConfigError("\n".join(dict.fromkeys(found)))
    if plan.made:
        require_alike(plan.run, plan.config)


def _folder(plan: RunPlan) -> Iterator[str]:
    if not plan.made and configuration.FOREIGN_BYTES.search(str(Path.cwd())):
        yield f"{Path.cwd()}: the name is not UTF-8, as records are; start the run in another folder"
    yield from _complaints(lambda: create.require_free(plan.run, plan.config))


def _counts(plan: RunPlan) -> Iterator[str]:
    config = plan.config
    missing = [role for role in job_counts.ROLES[config.mode] if not config.counts.get(role, 1)]
    if len(missing) == len(job_counts.ROLES[config.mode]):  # a person starts every job of the folder
        return
    for role in missing:
        if role == "inference" and job_counts.is_hybrid(config):
            yield "counts.inference = 0: hybrid = true needs an engine in the learner's job; ask for one"
        elif role != "inference" or not config.inference.url:
            log.warning("counts.%s = 0: the run waits until you start that role by sbatch/role.sbatch", role)
    if config.mode != "eval" and config.steps == 0:
        yield "steps = 0: there is nothing to do; ask for at least one step"


def _rules(plan: RunPlan) -> Iterator[str]:
    """Check the rules of new runs; an older run that breaks one goes on, until the key changes."""
    known = set(conflicts.of_new_runs(plan.made)) if plan.made else set()
    for doubt in conflicts.doubts(plan.config) if not plan.made else ():
        log.warning("%s", doubt)
    yield from (message for message in conflicts.of_new_runs(plan.config) if message not in known)
    yield from _tracker(plan.config.tracker)


def _model(plan: RunPlan) -> Iterator[str]:
    """Check the model's files; the weights only for roles that load them."""
    config, engine = plan.config, plan.config.engine
    model = Path(config.model)
    served = _serves(plan) and engine.loads_weights
    if unreadable := [*_unreadable(model)]:
        yield from unreadable
        return
    if served or "learner" in plan.jobs:
        yield from _weights("model", model)
    if _needs_reference(plan):
        yield from _weights("reference", Path(config.reference))
    if "rollout" in plan.jobs:
        yield from _complaints(lambda: token_builder(config))
    elif config.mode == "sft" and not config.sft.trajectories:
        yield from _complaints(lambda: trajectories.check_demonstrations(config))


def _unreadable(model: Path) -> Iterator[str]:
    """Yield what lets nobody read the model's configuration or tokenizer."""
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            yield f"model = {str(model)!r}: {_lacks(name, model)}"
            return
    for path in sorted(model.glob("*.json")):
        yield from _complaints(partial(refuse_mark, path))


def _needs_reference(plan: RunPlan) -> bool:
    """Return whether this start makes a learner that loads another folder for its KL term."""
    has_term = plan.config.learner.loss.kl_coefficient > 0
    return "learner" in plan.jobs and has_term and bool(plan.config.reference)


def _lacks(name: str, folder: Path) -> str:
    """Say that a folder of a model lacks a file, and what to give instead."""
    if not folder.is_dir():
        what = "a file" if folder.exists() else "no such folder, and a run downloads nothing"
        return f"{what}; give the folder of a Hugging Face model"
    if (folder / "adapter_config.json").exists():
        return "it holds adapters alone; merge them into their model, or give the folder above of a run"
    if any(folder.glob("delta-*.safetensors")):
        full = sorted(each.parent.name for each in folder.absolute().parent.glob("v*/config.json"))
        return (
            "it holds only what changed since the version before; give a full version, the run's last one or "
            f"one of: {', '.join(full) or 'none is left beside it'}"
        )
    return f"no {name} there; give the folder of a Hugging Face model"


def _weights(key: str, folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield f"{key} = '{folder}': {_lacks('config.json', folder)}"
        return
    yield from _complaints(lambda: locate(folder))


def _policy(plan: RunPlan) -> Iterator[str]:
    """Check that the policy, which somebody else may have written, takes what the learner passes to it."""
    wanted = list(inspect.signature(Policy.build).parameters)[1:]
    found, kind = inspect.signature(plan.config.policy.build), type(plan.config.policy)
    try:
        found.bind(*wanted)
    except TypeError as error:
        missing = [name for name in wanted if name not in found.parameters]
        problem = f"lacks the parameter {', '.join(missing)}" if missing else f"cannot be called: {error}"
        yield (
            f"[policy] type = '{kind.__module__}:{kind.__name__}': build({', '.join(found.parameters)}) "
            f"{problem}; the learner passes {', '.join(wanted)}: see 'To extend' in docs/architecture.md"
        )


def _computing(plan: RunPlan) -> Iterator[str]:
    """Check that policy and engine can compute the model, with the torch, vLLM and driver that are here."""
    config, installed = plan.config, builds.installed()
    model, learns, serves = Path(config.model), "learner" in plan.jobs, _serves(plan)
    if config.executor.is_here:
        installed = replace(installed, driver_cuda=builds.driver())
    plugins: list[builds.NeedsBuild] = [
        *([config.policy] if learns else []),
        *([config.engine] if serves else []),
    ]
    yield from filter(None, (plugin.build_problem(installed) for plugin in plugins))
    if not (model / "config.json").is_file():
        return
    if learns:
        size = config.learner.data_parallel
        complaints = [*_complaints(lambda: config.policy.check_model(model, size))]
        yield from complaints
        if _needs_reference(plan) and not complaints:
            shape, reference = ModelShape.read(model), Path(config.reference)
            yield from _complaints(lambda: require_tensors(reference, shape, "reference"))
    if serves:
        yield from _complaints(lambda: config.engine.check_model(model, config.rollout.context))


def _gpus(plan: RunPlan) -> Iterator[str]:
    """Check that each job gets as many GPUs as its processes compute on, and no more, which others need."""
    for role, jobs in plan.jobs.items():
        needed, grant = jobs.gpus, jobs.gpu_grant
        if needed is None or grant is None or grant.count == needed:
            continue
        if grant.count > needed:
            if role == "inference" or _knows_engines(plan.config):
                yield _surplus(role, jobs, grant)
            continue
        why, device = ("engine.tensor_parallel", "engine")
        if role == "learner" and needed > jobs.processes:
            why = "hybrid: counts.inference * engine.tensor_parallel"
        elif role == "learner":
            why, device = LEARNER_PROCESSES, "policy"
        yield (
            f"[executor] {grant.key} gives a job of {role} {grant.count} GPUs, but it needs {needed} "
            f"({why}); ask for {needed}, or set {device}.device = 'cpu'"
        )


def _host_memory(plan: RunPlan) -> Iterator[str]:
    """Check that the learner's job gets the host memory that it surely keeps."""
    grant, parts = plan.jobs["learner"].memory_grant if "learner" in plan.jobs else None, plan.costs.host
    needed = sum(part.bytes for part in parts) / GIB
    if grant and needed > grant.gib:
        listed = ", ".join(f"{part.what} {part.bytes / GIB:.1f}" for part in parts)
        yield (
            f"[executor] {grant.key} is less than the {needed:.1f} GiB of host memory that the learner's job "
            f"takes on each node ({listed}); ask for more, or keep less there"
        )


def _surplus(role: Role, jobs: RoleJobs, grant: GpuGrant) -> str:
    size, device, needed = "engine.tensor_parallel", "engine", jobs.gpus or 0
    if role == "learner":
        size, device = "learner.data_parallel", "policy"
    more = f"raise {size} to use them" if needed else f"set {device}.device = 'gpu'"
    each = f"{needed // jobs.nodes} on each node" if jobs.nodes > 1 else f"{needed}"
    return (
        f"[executor] {grant.key} gives a job of {role} {grant.count} GPUs, but it computes on {needed}; ask "
        f"for {each}, or {more}"
    )


def _knows_engines(config: RunConfig) -> bool:
    """Return whether the GPUs of engines in the learner's job, if there are any, are counted."""
    return not job_counts.is_hybrid(config) or config.engine.gpus is not None


def _gpu_memory(plan: RunPlan) -> Iterator[str]:
    """Check that the GPUs of learner and engines have what these need at least, where it is known."""
    for need in plan.costs.gpus:
        if need.known_gib and need.least_gib > need.known_gib:
            yield f"{need.what} does not fit: {need.verdict}; {need.remedy}"


def _nodes(plan: RunPlan) -> Iterator[str]:
    nodes = plan.jobs["learner"].nodes if "learner" in plan.jobs else 1
    if job_counts.is_hybrid(plan.config) and nodes > 1:
        yield (
            f"hybrid = true needs one node, but [executor] roles.learner.nodes = {nodes}: engines share "
            "the learner's GPUs"
        )


def _machine(plan: RunPlan) -> Iterator[str]:
    """Check what the executor may run, and this machine where jobs run here; workers check other nodes."""
    executor, counts = plan.config.executor, {role: jobs.count for role, jobs in plan.jobs.items()}
    if "rollout" in job_counts.ROLES[plan.config.mode] and executor.is_here:
        yield from _complaints(plan.config.sandbox.check)
    for each in plan.submissions:
        yield from _complaints(partial(executor.check, each))
    if executor.is_here:
        yield from _complaints(lambda: executor.check_machine(counts, own_environment()))


def _tracker(package: str) -> Iterator[str]:
    """Check that the package is there that curves are sent to; jobs run with this interpreter."""
    found = importlib.util.find_spec(package) if package else None
    if package and not (found and found.origin):  # a folder of that name without code has no origin
        yield (
            f"tracker = {package!r}: {sys.executable} has no such package; pip install "
            f"{package}, or leave the key out"
        )


def _engine(plan: RunPlan) -> Iterator[str]:
    if plan.config.inference.url and "inference" in job_counts.ROLES[plan.config.mode]:
        yield from _complaints(lambda: _require_usable(plan.config, create.key(plan.run, plan.config)))


def _require_usable(config: RunConfig, key: str) -> None:
    """Raise ConfigError, with the remedies, unless the engine of `inference.url` can serve this run."""
    url = config.inference.url
    if _is_loopback(url) and not config.executor.is_here:
        raise ConfigError(
            f"inference.url = {url!r} is another machine for each job; write this host's name in place of it"
        )
    start = "start it with the command that `python -m hpc_swe.engine` prints"
    try:
        problem, remedy = _problem(config, config.engine.inspect(url, key))
    except EngineError as error:
        problem, remedy = str(error), f"give its key in {create.ENGINE_KEY}"
    if problem:
        ways = [remedy, start, "leave inference.url (VLLM_URL) out for engines of our own"]
        raise ConfigError(f"inference.url = {url!r}: {problem}. Either {', or '.join(ways)}")


def _problem(config: RunConfig, info: EngineInfo) -> tuple[str, str]:
    """Return why the engine cannot serve this run, and what to set; two empty texts if it can."""
    if not _is_same(info.model, Path(config.model)):
        return (
            f"it serves another model, {info.model}, than model = {config.model!r}",
            "set model to its folder",
        )
    if (longest := info.max_model_len) < config.rollout.context:
        problem = f"it takes {longest} tokens, less than rollout.context = {config.rollout.context}"
        return problem, f"set rollout.context to at most {longest}"
    if config.mode == "grpo" and not info.can_update:
        return (
            "it has no routes that update its weights, so it could not sample the trained policy",
            'set mode = "eval"',
        )
    return "", ""


def _is_same(served: str, model: Path) -> bool:
    """Compare folders where the served one is visible, else names: an engine may run in a container."""
    if Path(served).is_dir():
        return Path(served).samefile(model)
    return Path(served).name == model.resolve().name


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serves(plan: RunPlan) -> bool:
    """Return whether the run starts engines, in jobs of their own or in the learner's."""
    return job_counts.is_hybrid(plan.config) or "inference" in plan.jobs


def differences(run: RunDir, config: RunConfig) -> list[str]:
    """List the keys that may not change but differ from the run's, as ``key: old -> new``."""
    manifest = atomic.get(run.manifest, RunManifest)
    found = configuration.forbidden_changes(existing.load(run), config, Path(manifest.folder))
    models = [change for change in found if change.startswith("model:")]
    if models and create.digest(Path(config.model)) == manifest.model_sha256:
        found.remove(models[0])  # the same model in another folder
    return found


def require_alike(run: RunDir, config: RunConfig) -> None:
    """Raise ConfigError with the keys that differ, of those that decide what the run trains."""
    follows = "learner.optimizer.decay_share follows them: start another run from the last weights"
    found = differences(run, config)
    refused = [f"{change} ({follows})" if change.startswith("steps:") else change for change in found]
    if refused:
        raise ConfigError(
            f"{run.root} exists with another configuration, and these keys decide what it trains: "
            f"{'; '.join(refused)}. Continue with the old values (`launch start --run "
            f"{cli.quoted(run.root)}`), or name another folder with {create.option(config)}"
        )
    _require_size(run, config)


def _require_size(run: RunDir, config: RunConfig) -> None:
    """Raise ConfigError if a learner's job goes on that has another number of processes."""
    old, new = (job_counts.processes("learner", each) for each in (existing.load(run), config))
    jobs = config.executor.queue(run) if old != new and not orders.active(run) else []
    if any(job.role == "learner" and job.state != "broken" for job in jobs):
        raise ConfigError(
            f"{run.root}: {LEARNER_PROCESSES} = {new}, but the learner's job has {old} processes; `launch "
            "stop` it first"
        )


def _complaints(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except ConfigError as error:
        yield from str(error).splitlines()


CHECKS = (
    *(_folder, _counts, _policy, _gpus, _gpu_memory, _host_memory, _nodes),
    *(_rules, _model, _computing, _engine, _machine),
)
