"""Read the answers of engines: completions of our own route or of vLLM's into one shape, `Answer`."""

import base64
import io
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from hpc_swe.base.errors import EngineError, boundary
from hpc_swe.base.records import EngineStages, WeightVersion

INITIAL = "default"  # stamp of the weights that vLLM starts with, until they are given a name
NOT_FINITE = -9999.0  # value that vLLM writes in place of a log-probability that is not finite
NEAR = 0.9
"""Share of the probe's tokens that must agree with the learner, up to the tolerance."""
FARTHEST = 10.0
"""Largest difference of any token of the probe, as a multiple of the tolerance."""
Span = tuple[int, int, WeightVersion]
_T = TypeVar("_T")


class Stamp(Struct):
    """Name the weights that sampled tokens start .. end - 1."""

    version: str
    start: int
    end: int


class TokenScores(Struct):
    """Hold token ids, int32 [n], and their log-probabilities, float64 [n], as bytes."""

    ids: bytes = b""
    logprobs: bytes = b""

    @classmethod
    def of(cls, ids: Sequence[int], logprobs: Sequence[float]) -> "TokenScores":
        return cls(np.asarray(ids, np.int32).tobytes(), np.asarray(logprobs, np.float64).tobytes())

    def of_tokens(self, wanted: Sequence[int]) -> list[float]:
        """Return the log-probabilities; raise EngineError unless they are those of the wanted tokens."""
        with boundary(EngineError, "read log-probabilities"):
            ids: list[int] = np.frombuffer(self.ids, np.int32).tolist()
            logprobs: list[float] = np.frombuffer(self.logprobs, np.float64).tolist()
        if ids != list(wanted) or len(logprobs) != len(ids):
            raise EngineError(f"{len(logprobs)} log-probabilities do not match {len(wanted)} token ids")
        return logprobs


class SampleRequest(Struct):
    """Ask our own route for one completion; the settings are those of vLLM's SamplingParams."""

    token_ids: list[Annotated[int, Meta(ge=0)]]
    sampling_params: dict[str, Any]
    priority: int = 0
    cache_salt: str | None = None


class SampleAnswer(Struct):
    """Hold an answer of our own route."""

    token_ids: list[int]
    sampled: TokenScores
    finish_reason: str
    prompt: TokenScores | None = None
    """Scores of all tokens of the prompt but the first, if they were asked for."""
    stop_reason: int | str | None = None
    weight_versions: list[Stamp] | None = None
    routed_experts: bytes | None = None
    """A numpy file, uint8 [tokens, layers, k]."""
    stages: EngineStages = EngineStages()


class Answer(Struct):
    """Hold a completion, whichever route it came from."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_logprobs: list[float] | None = None
    """Of all tokens of the prompt but the first, if they were asked for."""
    stop_reason: int | str | None = None
    weight_versions: list[Stamp] | None = None
    routed_experts: bytes | None = None
    stages: EngineStages = EngineStages()


class _Logprob(Struct):
    logprob: float


class _TokenLogprobs(Struct):
    token_logprobs: list[float]


class _TextChoice(Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _TokenLogprobs
    stop_reason: int | str | None = None
    routed_experts: str | None = None
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _TextAnswer(Struct):
    choices: Annotated[list[_TextChoice], Meta(min_length=1)]


class WeightInfo(Struct):
    """Hold an answer of /weight_info."""

    weight_version: str


class ModelCard(Struct):
    root: str
    max_model_len: int


class Models(Struct):
    """Hold an answer of /v1/models."""

    data: list[ModelCard]


class WeightTransfer(Struct):
    backend: str


class VllmConfig(Struct, frozen=True):
    weight_transfer_config: WeightTransfer | None = None


class Staging(Struct):
    """Hold whether one worker has read the version that it was told to load."""

    is_staged: bool


class Stagings(Struct):
    """Hold the answers of all workers."""

    results: list[Staging]


class CacheReset(Struct):
    """Hold the answer of /reset_prefix_cache."""

    success: bool = True


class ServerInfo(Struct):
    """Hold an answer of /server_info."""

    vllm_config: VllmConfig = VllmConfig()


def decode(kind: type[_T], url: str, data: bytes) -> _T:
    """Decode a JSON answer of `url`; raise EngineError with its beginning if it is none."""
    return _decode(msgspec.json.decode, kind, url, data)


def _decode(read: Callable[..., _T], kind: type[_T], url: str, data: bytes) -> _T:
    try:
        return read(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{url}: unreadable answer: {error}: {data[:300]!r}") from None


def from_samples(url: str, data: bytes, prompt: Sequence[int]) -> Answer:
    """Read an answer of our own route; raise EngineError if log-probabilities are of other tokens."""
    found = _decode(msgspec.msgpack.decode, SampleAnswer, url, data)
    return Answer(
        token_ids=found.token_ids,
        logprobs=found.sampled.of_tokens(found.token_ids),
        finish_reason=found.finish_reason,
        prompt_logprobs=None if found.prompt is None else found.prompt.of_tokens(prompt[1:]),
        stop_reason=found.stop_reason,
        weight_versions=found.weight_versions,
        routed_experts=found.routed_experts,
        stages=found.stages,
    )


def from_completions(url: str, data: bytes, prompt: Sequence[int]) -> Answer:
    """Read an answer of /v1/completions, which every vLLM serves; raise EngineError if it lacks a number."""
    text = decode(_TextAnswer, url, data).choices[0]
    if len(text.logprobs.token_logprobs) != len(text.token_ids):
        count = len(text.logprobs.token_logprobs)
        raise EngineError(f"{count} log-probabilities do not match {len(text.token_ids)} token ids")
    packed, rows = text.routed_experts, text.prompt_logprobs
    with boundary(EngineError, f"{url}: read the routing"):
        experts = None if packed is None else base64.b64decode(packed, validate=True)
    return Answer(
        token_ids=text.token_ids,
        logprobs=text.logprobs.token_logprobs,
        finish_reason=text.finish_reason,
        prompt_logprobs=None if rows is None else _prompt_scores(rows, prompt),
        stop_reason=text.stop_reason,
        routed_experts=experts,
    )


def _prompt_scores(rows: Sequence[dict[str, _Logprob] | None], prompt: Sequence[int]) -> list[float]:
    found = [(row or {}).get(str(i)) for row, i in zip(rows[1:], prompt[1:], strict=False)]
    scores = [each.logprob for each in found if each]
    if len(rows) != len(prompt) or len(scores) != len(prompt) - 1:
        raise EngineError(f"log-probabilities of a prompt do not match its {len(prompt)} token ids")
    return scores


def require_finite(values: Sequence[float]) -> None:
    """Raise EngineError for the first log-probability that is not finite."""
    for place, value in enumerate(values):
        if not math.isfinite(value) or value <= NOT_FINITE:
            raise EngineError(f"log-probability {place} of {len(values)} is {value}")


def to_routing(answer: Answer, wanted: int) -> NDArray[np.uint8]:
    """Return the experts of `wanted` tokens, uint8 [wanted, layers * k]; fewer where the engine aborted.

    vLLM writes a numpy file [tokens, layers, k]. Raise EngineError for any other answer.
    """
    if answer.routed_experts is None:
        if answer.finish_reason == "abort":
            return np.zeros((0, 0), np.uint8)
        raise EngineError("the engine returned no routing: start it with --enable-return-routed-experts")
    with boundary(EngineError, "read the routing"):
        array: NDArray[np.uint8] = np.load(io.BytesIO(answer.routed_experts), allow_pickle=False)
    rows = len(array) if array.ndim == 3 else wanted + 1
    if array.dtype != np.uint8 or rows > wanted:
        raise EngineError(f"a routing of {wanted} tokens has type {array.dtype} and shape {array.shape}")
    ordered = np.sort(array, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():  # vLLM 0.26 gives zeros for a kernel that captures none
        raise EngineError("a routing names an expert twice for one token: this engine captures no experts")
    if rows < wanted and answer.finish_reason != "abort":
        raise EngineError(f"a routing of {wanted} tokens has {rows}")
    return array.reshape(rows, -1)


def to_spans(stamps: list[Stamp], length: int) -> list[Span]:
    """Return the spans of `length` tokens by weight version, with neighbours of one version joined.

    Raise EngineError when a stamp is unknown, or the stamps leave a gap or overlap.
    """
    spans: list[Span] = []
    for stamp in stamps:
        name = stamp.version
        try:
            version = WeightVersion() if name == INITIAL else WeightVersion.parse(name)
        except ValueError as error:
            raise EngineError(f"unknown stamp on tokens: {error}") from None
        if stamp.start != (spans[-1][1] if spans else 0):
            raise EngineError(f"stamps leave a gap before token {stamp.start}")
        start = spans.pop()[0] if spans and spans[-1][2] == version else stamp.start
        spans.append((start, stamp.end, version))
    if (spans[-1][1] if spans else 0) != length:
        raise EngineError(f"stamps cover {spans[-1][1] if spans else 0} of {length} tokens")
    return spans


def least_tolerance(dtype: str, kv_cache_dtype: str) -> float:
    """Return by how much a probe may differ at least, where an engine computes or caches with few bits."""
    if dtype.startswith("fp8"):
        return 0.5  # a tenth of the tokens of random models with large logits differ by .3
    return 0.0 if dtype == "float32" and kv_cache_dtype == "auto" else 0.25


def probe_distance(scores: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the difference that nine of ten tokens do not exceed, or a tenth of the largest if that is more.

    Wrong weights change all tokens. Rounding in bfloat16 changes some tokens, unlikely ones, by more than the
    others: by the largest difference alone, an engine with the right weights would be refused.
    """
    differences = np.abs(np.asarray(scores) - np.asarray(wanted))
    return float(max(np.quantile(differences, NEAR), differences.max() / FARTHEST))
