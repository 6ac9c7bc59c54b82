"""Check a run before a job is submitted; `start`, `--dry-run` and `evaluate` share this list of checks.

Each check is a function that yields its complaints. All complaints are shown together, one a line, so that a
person can correct them in one go.
"""

import inspect
import ipaddress
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from msgspec.structs import replace

from hpc_swe.base.errors import ConfigError, EngineError
from hpc_swe.base.records import Role
from hpc_swe.base.rundir import RunDir
from hpc_swe.cluster.executors.base import (
    LEARNER_PROCESSES,
    GpuGrant,
    own_environment,
)
from hpc_swe.config import conflicts, job_counts
from hpc_swe.config.settings import RunConfig
from hpc_swe.config.tokenization import token_builder
from hpc_swe.launch import create, demonstrations, estimate, existing, submit
from hpc_swe.launch.create import Taken
from hpc_swe.models import builds
from hpc_swe.models.costs import GIB
from hpc_swe.models.engines.base import EngineInfo
from hpc_swe.models.model_shape import ModelShape, refuse_mark
from hpc_swe.models.policies.base import Policy
from hpc_swe.models.weight_files import locate, require_tensors


def require(run: RunDir, config: RunConfig) -> Taken:
    """Run all checks and return what a new run works on; a run that exists has that already.

    Raise ConfigError with one line for each complaint.
    """
    found = [complaint for check in CHECKS for complaint in check(run, config)]
    taken = Taken({})
    if not run.config.exists():
        try:
            taken = create.take(config)
        except ConfigError as error:
            found.append(str(error))
    if found:
        raise ConfigError("\n".join(dict.fromkeys(found)))
    return taken


def _folder(run: RunDir, config: RunConfig) -> Iterator[str]:
    yield from _complaints(lambda: create.require_free(run, config))


def _counts(_: RunDir, config: RunConfig) -> Iterator[str]:
    counts = [config.counts.get(role, 1) for role in job_counts.ROLES[config.mode]]
    if not any(counts):  # the folder is made, and a person starts every job
        return
    for role in job_counts.ROLES[config.mode]:
        is_external = role == "inference" and config.inference.url
        if role == "inference" and job_counts.is_hybrid(config) and not config.counts.get(role, 1):
            yield "counts.inference = 0: hybrid = true needs an engine in the learner's job; ask for one"
        elif config.counts.get(role, 1) == 0 and role not in config.by_hand and not is_external:
            yield (
                f"counts.{role} = 0: a run of mode {config.mode} waits for ever without it; ask for one, or "
                f"add {role!r} to by_hand if you start it yourself"
            )
    if config.mode != "eval" and config.steps == 0:
        yield "steps = 0: there is nothing to do; ask for at least one step"


def _rules(run: RunDir, config: RunConfig) -> Iterator[str]:
    """Check the rules of new runs; an older run that breaks one goes on, until the key changes."""
    is_old = run.config.exists() and run.manifest.exists()
    known = set(conflicts.of_new_runs(existing.load(run))) if is_old else set()
    yield from (message for message in conflicts.of_new_runs(config) if message not in known)


def _model(_: RunDir, config: RunConfig) -> Iterator[str]:
    """Check the model's files; the weights only for roles that load them."""
    model, wanted, engine = Path(config.model), _wanted(config), config.engine
    served = _serves(config) and engine.loads_weights
    if unreadable := [*_unreadable(model)]:
        yield from unreadable
        return
    if served or "learner" in wanted:
        yield from _weights("model", model)
    if _needs_reference(config):
        yield from _weights("reference", Path(config.reference))
    if "rollout" in wanted:
        yield from _complaints(lambda: token_builder(config))
    elif (config.mode, config.sft.source) == ("sft", "demonstrations"):
        yield from _complaints(lambda: demonstrations.check(config))


def _unreadable(model: Path) -> Iterator[str]:
    """Yield what lets nobody read the model's configuration or tokenizer."""
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            yield f"model = {str(model)!r}: {_lacks(name, model)}"
            return
    for path in sorted(model.glob("*.json")):
        yield from _complaints(partial(refuse_mark, path))


def _needs_reference(config: RunConfig) -> bool:
    """Return whether this start makes a learner that loads another folder for its KL term."""
    return bool("learner" in _wanted(config) and config.learner.loss.kl_coefficient > 0 and config.reference)


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


def _policy(_: RunDir, config: RunConfig) -> Iterator[str]:
    """Check that the policy, which somebody else may have written, takes what the learner passes to it."""
    wanted = list(inspect.signature(Policy.build).parameters)[1:]
    found, kind = inspect.signature(config.policy.build), type(config.policy)
    try:
        found.bind(*wanted)
    except TypeError as error:
        missing = [name for name in wanted if name not in found.parameters]
        problem = f"lacks the parameter {', '.join(missing)}" if missing else f"cannot be called: {error}"
        yield (
            f"[policy] type = '{kind.__module__}:{kind.__name__}': build({', '.join(found.parameters)}) "
            f"{problem}; the learner passes {', '.join(wanted)}: see 'To extend' in docs/architecture.md"
        )


def _parallel(_: RunDir, config: RunConfig) -> Iterator[str]:
    model, wanted, engine, policy = Path(config.model), _wanted(config), config.engine, config.policy
    if not (model / "config.json").is_file():
        return
    if "learner" in wanted:
        complaints = [*_complaints(lambda: policy.check_model(model, config.learner.data_parallel))]
        yield from complaints
        if _needs_reference(config) and not complaints:
            shape, reference = ModelShape.read(model), Path(config.reference)
            yield from _complaints(lambda: require_tensors(reference, shape, "reference"))
    if _serves(config):
        yield from _complaints(lambda: engine.check_model(model))


def _jobs(run: RunDir, config: RunConfig) -> Iterator[str]:
    for role in _wanted(config):
        order = submit.submission(run, config, role, 1, job_counts.desired(config)[role])
        yield from _complaints(lambda order=order: config.executor.check(order))  # type: ignore[misc]


def _gpus(_: RunDir, config: RunConfig) -> Iterator[str]:
    """Check that each job gets as many GPUs as its processes compute on, and no more, which others need."""
    for role in _wanted(config):
        needed, grant = job_counts.gpus(role, config), config.executor.gpu_grant(role)
        if needed is None or grant is None or grant.count == needed:
            continue
        own = job_counts.processes(role, config)
        if grant.count > needed:
            if role == "inference" or _knows_engines(config):
                yield _surplus(role, needed, grant, config)
            continue
        why, device = ("engine.tensor_parallel", "engine")
        if role == "learner" and needed > own:
            why = "hybrid: counts.inference * engine.tensor_parallel"
        elif role == "learner":
            why, device = LEARNER_PROCESSES, "policy"
        yield (
            f"[executor] {grant.key} gives a job of {role} {grant.count} GPUs, but it needs {needed} "
            f"({why}); ask for {needed}, or set {device}.device = 'cpu'"
        )


def _host_memory(_: RunDir, config: RunConfig) -> Iterator[str]:
    """Check that the learner's job gets the host memory that it surely keeps."""
    grant = config.executor.memory_grant("learner")
    if grant is None or not (Path(config.model) / "config.json").is_file():
        return
    try:
        parts = estimate.host(config)
    except ConfigError:  # `_parallel` says it
        return
    needed = sum(part.bytes for part in parts) / GIB
    if needed > grant.gib:
        listed = ", ".join(f"{part.what} {part.bytes / GIB:.1f}" for part in parts)
        yield (
            f"[executor] {grant.key} is less than the {needed:.1f} GiB of host memory that the learner's job "
            f"takes on each node ({listed}); ask for more, or keep less there"
        )


def _surplus(role: Role, needed: int, grant: GpuGrant, config: RunConfig) -> str:
    size, device = "engine.tensor_parallel", "engine"
    if role == "learner":
        size, device = "learner.data_parallel", "policy"
    more = f"raise {size} to use them" if needed else f"set {device}.device = 'gpu'"
    request = config.executor.request(role, 1, 1)
    nodes = request.nodes if request else 1
    each = f"{needed // nodes} on each node" if nodes > 1 else f"{needed}"
    return (
        f"[executor] {grant.key} gives a job of {role} {grant.count} GPUs, but it computes on {needed}; ask "
        f"for {each}, or {more}"
    )


def _knows_engines(config: RunConfig) -> bool:
    """Return whether the GPUs of engines in the learner's job, if there are any, are counted."""
    return not job_counts.is_hybrid(config) or config.engine.gpus is not None


def _gpu_memory(_: RunDir, config: RunConfig) -> Iterator[str]:
    """Check that the GPUs of learner and engines have what these need at least, where it is known."""
    for need in estimate.gpu_needs(config):
        if need.known_gib and need.least_gib > need.known_gib:
            yield f"{need.what} does not fit: {need.verdict}; {need.remedy}"


def _builds(_: RunDir, config: RunConfig) -> Iterator[str]:
    """Check that torch, vLLM and, where jobs run here, the driver can compute on the configured devices."""
    found = builds.installed()
    if config.executor.is_here:
        found = replace(found, driver_cuda=builds.driver())
    plugins: list[builds.NeedsBuild] = [config.policy] if "learner" in _wanted(config) else []
    plugins += [config.engine] if _serves(config) else []
    for each in plugins:
        if problem := each.build_problem(found):
            yield problem


def _nodes(_: RunDir, config: RunConfig) -> Iterator[str]:
    executor, processes = config.executor, job_counts.processes("learner", config)
    request = executor.request("learner", 1, processes) if job_counts.is_hybrid(config) else None
    if request and request.nodes > 1:
        yield (
            f"hybrid = true needs one node, but [executor] roles.learner.nodes = {request.nodes}: engines "
            "share the learner's GPUs"
        )


def _machine(_: RunDir, config: RunConfig) -> Iterator[str]:
    """Check this machine where jobs run here; on a cluster the workers check their nodes."""
    wanted, executor = job_counts.desired(config), config.executor
    if config.mode != "sft" and executor.is_here:
        yield from _complaints(config.sandbox.check)
    if executor.is_here:
        yield from _complaints(lambda: executor.check_machine(wanted, own_environment()))


def _engine(run: RunDir, config: RunConfig) -> Iterator[str]:
    if config.inference.url and "inference" in job_counts.desired(config):
        yield from _complaints(lambda: _require_usable(config, create.key(run, config)))


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


def _serves(config: RunConfig) -> bool:
    """Return whether the run starts engines, in jobs of their own or in the learner's."""
    return job_counts.is_hybrid(config) or "inference" in _wanted(config)


def _wanted(config: RunConfig) -> list[Role]:
    return [role for role, count in job_counts.desired(config).items() if count]


def _complaints(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except ConfigError as error:
        yield from str(error).splitlines()


CHECKS = (
    *(_folder, _counts, _rules, _model, _policy, _parallel),
    *(_jobs, _gpus, _gpu_memory, _builds, _host_memory, _nodes, _machine, _engine),
)
