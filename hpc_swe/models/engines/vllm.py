"""Run vLLM: token ids go in and come out, and weights are updated through its weight-transfer API.

Requests use a route of our own (`_vllm.samples`), so that nothing is ever tokenized again and vLLM needs no
tokenizer (--tokens-only). An engine that somebody else runs has vLLM's /v1/completions instead. vLLM 0.26
stamps no versions.
"""

import logging
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from hpc_swe.base.errors import ConfigError, EngineError, NoAnswer, Overdue, boundary
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import FREE, IdArray, ProbeScore, Sampling, WeightVersion
from hpc_swe.models.builds import Builds, missing_remedy, vllm_problem
from hpc_swe.models.costs import MemoryEstimate
from hpc_swe.models.engines import _answers, _http
from hpc_swe.models.engines._answers import Answer, decode
from hpc_swe.models.engines._vllm import environment as vllm_environment
from hpc_swe.models.engines._vllm import memory as vllm_memory
from hpc_swe.models.engines._vllm import sleep as vllm_sleep
from hpc_swe.models.engines._vllm import update as vllm_update
from hpc_swe.models.engines._vllm.environment import BACKEND, FP8
from hpc_swe.models.engines._vllm.gate import SAMPLE
from hpc_swe.models.engines._vllm.update import UpdateRoutes
from hpc_swe.models.engines.base import NEW, Completion, Engine, EngineInfo, Prefix, Weights
from hpc_swe.models.model_shape import ModelShape, has_delta_nets, read_config

ANSWER_TIMEOUT_S = 60.0
SLOWEST_TOKENS_PER_S = 0.5
"""Slowest rate of one completion, queueing included; an engine that is slower has lost the request."""
FEWEST_TIMED_TOKENS = 2048
"""A request for fewer tokens may take as long as one for so many: both queue for the same time."""
FIRST = {"priority": -1}
"""vLLM schedules this request before all others, whose priority is 0; they keep their order."""
GREEDY = Sampling(temperature=0.0, max_tokens=1)
NGRAM = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_min":2,"prompt_lookup_max":4}'
"""Propose what followed the last four, three or two tokens earlier in the same text."""

log = logging.getLogger(__name__)


class Vllm(Plugin, Engine, frozen=True, kw_only=True):
    """Run `vllm serve` as a child process."""

    loads_weights: ClassVar[bool] = True
    vital: ClassVar[str] = "VLLM::"  # of engine cores and workers
    max_num_seqs: int = 64
    """Requests that one forward pass may serve."""
    kv_cache_bytes: int = 0
    """Bytes of the KV cache; 0 is what vLLM finds free. Set it on a CPU, or where processes share a GPU."""
    gpu_memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of each GPU's memory that the engine may use, and that must be free when it starts."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8_e4m3"] = "bfloat16"
    """Type of weights and activations; auto is what the model's config.json says. With fp8_e4m3 matrices of a
    dense model's layers and their inputs have 8 bits, scaled by rows and tokens; all else is bfloat16."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Type of cached keys and values; auto is that of activations. With fp8_e4m3 there is room for twice as
    many tokens, sampled from coarser log-probabilities, which are recorded as they are. Models whose keys
    have biases, such as Qwen2.5, are refused."""
    head_dtype: Literal["auto", "float32"] = "auto"
    """Type of logits; auto is `dtype`. With float32 they are the learner's, whose logits are never rounded to
    16 bits."""
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1
    """GPUs, or CPU workers, that share each layer."""
    device: Literal["gpu", "cpu"] = "gpu"
    """Device of the model; gpu needs `tensor_parallel` GPUs, and the engine does not start with fewer."""
    stop_token_ids: list[int] = []
    """Further stop tokens; the chat template's end of turn, where generation_config.json does not name it."""
    return_routing: bool = False
    """Return which experts computed each token, so that the learner can send it to the same ones. It needs a
    model with at most 255 experts, and a GPU."""
    speculation: Literal["", "ngram"] = ""
    """How tokens are proposed of which one forward pass checks several; empty: none are. ngram: those that
    followed the same tokens before, which may be fast where answers repeat text. The distribution and its
    log-probabilities stay the model's. It needs numba."""
    load_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds until an engine is healthy, after its start and after its connection was lost, and until it
    answers while weights are updated or probed; a slower engine is replaced."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What happens to cached keys and values when weights change. recompute: they are computed again with the
    new weights. keep: running requests, and later ones that extend the same conversation, go on at once from
    caches of older weights; a conversation that begins afterwards shares none of them. Recorded
    log-probabilities are those that the engine sampled from."""
    program: str = ""
    """Path of vllm; empty finds it beside this interpreter, then on PATH."""
    environ: dict[str, str] = {}
    """Environment variables of the engine's process."""
    extra: list[str] = []
    """More arguments of vllm serve."""

    def __post_init__(self) -> None:
        """Refuse arguments with which an engine would answer falsely."""
        vllm_environment.require_sound(self.extra)
        if self.head_dtype != "auto" and any(word.startswith("--hf-overrides") for word in self.extra):
            raise ConfigError(
                f"[engine] head_dtype = {self.head_dtype!r} would be lost, since vLLM takes the last "
                "--hf-overrides, which is that of extra; write head_dtype into it, and not as a key"
            )

    def command(self, model: Path, host: str, port: int, name: str, context: int) -> Sequence[str]:
        if not (model / "config.json").is_file():
            raise ConfigError(f"[engine] model = {str(model)!r}: no config.json there; name a model's folder")
        options = {
            "host": host,
            "port": port,
            **self._of_model(name, context),
            "kv-cache-dtype": self.kv_cache_dtype,
            "max-num-seqs": self.max_num_seqs,
            "config-format": "hf",  # "auto" prefers the files of Mistral's own library, as no learner does
            "load-format": "safetensors",
            "scheduling-policy": "priority",
            "worker-extension-cls": "hpc_swe.models.engines._vllm.worker.WorkerExtension",
            "weight-transfer-config": f'{{"backend":"{BACKEND}"}}',
            "middleware": "hpc_swe.models.engines._vllm.worker.BearerToken",
        }
        if self.device == "gpu":
            options["gpu-memory-utilization"] = self.gpu_memory_share
        if self.speculation:
            options["speculative-config"] = NGRAM
        if self.head_dtype != "auto":
            options["hf-overrides"] = f'{{"head_dtype":"{self.head_dtype}"}}'
        if self.tensor_parallel == 1:
            options["distributed-executor-backend"] = "uni"
        flags = ["--tokens-only", "--disable-uvicorn-access-log", "--enable-logging-iteration-details"]
        flags += vllm_environment.flags_of(read_config(model), on_gpu=self.device == "gpu")
        flags += ["--enable-return-routed-experts"] if self.return_routing else []
        beside = Path(sys.executable).with_name("vllm")
        program = self.program or (str(beside) if beside.exists() else shutil.which("vllm"))
        if not program:
            raise ConfigError(f"[engine] program: no vllm beside {sys.executable} nor on PATH; name its path")
        return [program, "serve", str(model), *_words(options), *flags, *self.extra]

    def _of_model(self, name: str, context: int) -> dict[str, str | int | float]:
        cache = {"kv-cache-memory-bytes": self.kv_cache_bytes} if self.kv_cache_bytes else {}
        return {
            "served-model-name": name,
            **vllm_environment.numbers(self.dtype),
            "max-model-len": context,
            "tensor-parallel-size": self.tensor_parallel,
            "generation-config": "vllm",
            **cache,
        }

    def serving(self, model: Path, name: str, context: int) -> Sequence[str]:
        flags = vllm_environment.flags_of(read_config(model), on_gpu=self.device == "gpu")
        return ["vllm", "serve", str(model), *_words(self._of_model(name, context)), *flags]

    def environment(self, token: str) -> dict[str, str]:
        return vllm_environment.environment(token, on_cpu=self.device == "cpu") | self.environ

    @property
    def gpus(self) -> int:
        return self.tensor_parallel if self.device == "gpu" else 0

    def build_problem(self, found: Builds) -> str:
        return "" if self.program else vllm_problem(self.device, found)  # a program brings its own packages

    def check_model(self, model: Path, context: int) -> None:
        vllm_memory.check(model, self.tensor_parallel, context)
        vllm_memory.check_coarse(model, weights=self.dtype == FP8, cache=self.kv_cache_dtype == FP8)
        if has_delta_nets(read_config(model)) and not self.program and not find_spec("torchvision"):
            raise ConfigError(
                f"[engine] vLLM imports torchvision for the model_type of {model / 'config.json'}; "
                + missing_remedy(self.device, "install the build of torchvision of this torch and device")
            )
        if self.speculation and not self.program and not find_spec("numba"):
            raise ConfigError(
                f"[engine] speculation = {self.speculation!r}: vLLM proposes tokens with numba; install it"
            )
        experts = ModelShape.read(model).experts if self.return_routing else 1
        if not 0 < experts < FREE + 1:
            raise ConfigError(
                f"[engine] return_routing = true needs 1 to {FREE} experts; the model has {experts}"
            )
        if self.return_routing and self.loads_weights and self.device == "cpu":
            raise ConfigError("[engine] return_routing = true needs a GPU: vLLM captures no experts on a CPU")

    def memory(self, model: Path, context: int) -> MemoryEstimate:
        size = 4 if self.dtype == "float32" else 2
        found = vllm_memory.estimate(
            ModelShape.read(model),
            self.tensor_parallel,
            vllm_memory.Sizes(1 if self.dtype == FP8 else size, size if self.kv_cache_dtype == "auto" else 1),
            sequences=self.max_num_seqs,
            context=context,
            given=self.kv_cache_bytes,
        )
        return found if self.kv_cache_bytes else replace(found, least=found.least / self.gpu_memory_share)

    def is_healthy(self, url: str) -> bool:
        try:
            _http.call(url, "", "/health", None, 10.0)
        except EngineError:
            return False
        return True

    def is_alive(self, url: str, token: str, timeout_s: float) -> bool:
        """Return whether every worker answers a call, which it does between two forward passes."""
        body = msgspec.json.encode({"method": "check_health"})
        try:
            _http.call_on_new_connection(url, token, "/collective_rpc", body, timeout_s)
        except _http.Refused as error:
            return error.status == 404 and self.is_healthy(url)  # an engine without control routes
        except NoAnswer:
            return False
        return True

    @property
    def sleep_arguments(self) -> Sequence[str]:
        return ["--enable-sleep-mode"] if self.device == "gpu" else []  # a CPU's workers only pause

    def sleep(self, url: str, token: str) -> float | None:
        return vllm_sleep.sleep(url, token, self.load_timeout_s)

    def wake(self, url: str, token: str) -> None:
        vllm_sleep.wake(url, token, self.load_timeout_s)

    def inspect(self, url: str, token: str) -> EngineInfo:
        """Read /v1/models and /server_info.

        The second route exists only in vLLM's development mode, without which weights cannot be updated.
        """
        [card, *_] = decode(_answers.Models, url, self._get(url, token, "/v1/models")).data
        info = self._get(url, token, "/server_info?config_format=json", absent=b"{}")
        transfer = decode(_answers.ServerInfo, url, info).vllm_config.weight_transfer_config
        can_update = transfer is not None and transfer.backend == BACKEND
        return EngineInfo(card.root, card.max_model_len, can_update)

    def stamp(self, url: str, token: str) -> str | None:
        """Read the stamp from /weight_info; return None where the release has no such route."""
        data = self._get(url, token, "/weight_info", absent=b"")
        return decode(_answers.WeightInfo, url, data).weight_version if data else None

    def adopt(self, url: str, token: str, version: WeightVersion, probe: ProbeScore | None) -> None:
        """Compare the probe, then set the stamp where the release has stamps."""
        if probe is not None:
            self._require_probe(self.score(url, token, probe.token_ids), version, probe)
        if self.stamp(url, token) is not None:
            self._routes(url, token).call("/update_weight_version", {"new_version": version.name})

    def reload(self, url: str, token: str, weights: Weights) -> None:
        """Pause, swap, resume, then compare the probe; a version that fails it is swapped out again.

        Until the probe has passed, the engine keeps all answers back; if it fails, it refuses them. The
        probe is asked for while the engine pauses, so that it is in the first forward pass of all requests
        that were kept: after it, prompts that must be computed again would let it wait.
        """
        before, routes = self.stamp(url, token), self._routes(url, token)
        version, probe = weights.version, weights.manifest.probe if weights.manifest else None
        update, stamp = vllm_update.describe(weights), before and version.name
        try:
            scores = routes.swap(update, stamp, lambda: probe and self._ask(url, token, probe))
        except (NoAnswer, Overdue):
            raise
        except EngineError as error:
            raise EngineError(f"{weights.folder}: not loaded: {error}") from error
        try:
            if probe and scores:
                self._require_probe(scores.result(), version, probe)
        except (NoAnswer, Overdue):
            raise
        except EngineError:
            with vllm_update.ends_engine(f"{url}: the weights before {version.name} are not back"):
                routes.swap({"path": ""}, before, lambda: None)
                routes.release()
            raise
        routes.release()

    def generate(
        self,
        url: str,
        token: str,
        prompt: IdArray,
        sampling: Sampling,
        timeout_s: float,
        prefix: Prefix = NEW,
    ) -> Completion:
        """Sample one completion; the request names every setting that shapes the distribution."""
        wait = (timeout_s, timeout_s + max(sampling.max_tokens, FEWEST_TIMED_TOKENS) / SLOWEST_TOKENS_PER_S)
        more = {"routed_experts_prompt_start": prefix.routed} if self.return_routing else {}
        salt = prefix.salt if self.kv_on_update == "keep" else ""
        answer = self._request(url, token, prompt.tolist(), sampling, wait, salt, **more)
        ids, logprobs = answer.token_ids, answer.logprobs
        _answers.require_finite(logprobs)
        if answer.finish_reason not in ("stop", "length", "abort"):
            raise EngineError(f"{url}: finish reason {answer.finish_reason!r}")
        if answer.finish_reason == "stop" and not (ids and answer.stop_reason in (None, ids[-1])):
            raise EngineError(f"{url}: stopped by {answer.stop_reason!r}, which is not the last token id")
        stamps = answer.weight_versions
        spans = None if stamps is None else _answers.to_spans(stamps, len(ids))
        rows = len(prompt) + len(ids) - 1 - prefix.routed
        routing = _answers.to_routing(answer, rows) if self.return_routing else None
        return Completion(ids, logprobs, answer.finish_reason, spans, routing, answer.stages)

    def score(self, url: str, token: str, token_ids: Sequence[int], *, swap_s: float = 0.0) -> list[float]:
        """Return the log-probabilities of all tokens but the first; vLLM does not use its prefix cache here.

        The engine computes them before other requests, and for `swap_s` seconds it may compute nothing.
        Raise EngineError when their number is wrong, or one is missing or not finite.
        """
        wait = (swap_s + min(ANSWER_TIMEOUT_S, self.load_timeout_s), swap_s + self.load_timeout_s)
        answer = self._request(url, token, list(token_ids), GREEDY, wait, prompt_logprobs=0)
        if answer.prompt_logprobs is None:
            raise EngineError(f"{url}: no log-probabilities of the prompt")
        _answers.require_finite(answer.prompt_logprobs)
        return answer.prompt_logprobs

    def _request(
        self,
        url: str,
        token: str,
        ids: list[int],
        sampling: Sampling,
        wait: tuple[float, float],
        salt: str = "",
        **more: int,
    ) -> Answer:
        """Request one completion; `wait` is the seconds without data before a check, and those in all.

        Only requests with the same `salt` share a prefix cache.
        """
        # No seed: on a CPU with chunked prefill a seeded request ends the engine for everybody.
        settings = msgspec.structs.asdict(sampling) | {
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": self.stop_token_ids,
            "logprobs": 0,
            "detokenize": False,
            **more,
        }
        is_probe = "prompt_logprobs" in more
        query = "?probe" if is_probe else ""  # an answer that is never kept back
        top = (FIRST if is_probe else {}) | ({"cache_salt": salt} if salt else {})
        body = msgspec.json.encode({"token_ids": ids, "sampling_params": settings, **top})
        check_s, deadline = wait[0], time.monotonic() + wait[1]

        def keep_waiting() -> bool:
            if time.monotonic() > deadline:
                raise Overdue(f"{url}: no completion of {sampling.max_tokens} tokens in {wait[1]:g} s")
            return self.is_alive(url, token, check_s)

        try:
            data = _http.call(url, token, f"{SAMPLE}{query}", body, check_s, keep_waiting)
            return _answers.from_samples(url, data, ids)
        except _http.Refused as error:
            if error.status not in (403, 404):
                raise
        del settings["detokenize"]  # an engine that somebody else runs has only vLLM's routes
        flags = {"return_token_ids": True, "return_tokens_as_token_ids": True}  # without a tokenizer, too
        body = msgspec.json.encode({"prompt": ids, **flags, **settings, **top})
        data = _http.call(url, token, f"/v1/completions{query}", body, check_s, keep_waiting)
        return _answers.from_completions(url, data, ids)

    def _ask(self, url: str, token: str, probe: ProbeScore) -> "Future[list[float]]":
        pool = ThreadPoolExecutor(1, "probe")
        scores = pool.submit(self.score, url, token, probe.token_ids, swap_s=self.load_timeout_s)
        pool.shutdown(wait=False)  # an engine that hangs is replaced before it answers
        return scores

    def _require_probe(self, scores: Sequence[float], version: WeightVersion, probe: ProbeScore) -> None:
        with boundary(EngineError, f"{version.name}: its manifest's probe"):
            difference = _answers.probe_distance(scores, probe.logprobs)
        mean = fmean(abs(mine - theirs) for mine, theirs in zip(scores, probe.logprobs, strict=True))
        log.debug("compared %s: |difference| of the probe's log-probabilities %.3g, mean", version.name, mean)
        tolerance = max(probe.tolerance, _answers.least_tolerance(self.dtype, self.kv_cache_dtype))
        if not difference <= tolerance:
            raise EngineError(
                f"{version.name}: the probe's log-probabilities differ from the learner's by"
                f" {difference:.4g}, more than {tolerance:g}"
            )

    def _routes(self, url: str, token: str) -> UpdateRoutes:
        return UpdateRoutes(url, token, self.load_timeout_s, clears=self.kv_on_update == "recompute")

    def _get(self, url: str, token: str, path: str, absent: bytes | None = None) -> bytes:
        try:
            return _http.call(url, token, path, None, ANSWER_TIMEOUT_S)
        except _http.Refused as error:
            if error.status == 404 and absent is not None:
                return absent
            if error.status in (401, 403):
                raise EngineError(f"{url} refuses the key (HTTP {error.status})") from None
            raise


def _words(options: Mapping[str, object]) -> list[str]:
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]
