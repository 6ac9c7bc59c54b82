"""Read the answers of vLLM's routes, which differ between releases, into one shape: `Answer`."""

import base64
import io
import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hpc_swe.errors import EngineError, boundary
from hpc_swe.records import WeightVersion

INITIAL = "default"  # stamp of the weights that vLLM starts with, until they are given a name
NOT_FINITE = -9999.0  # value that vLLM writes in place of a log-probability that is not finite
Span = tuple[int, int, WeightVersion]
_T = TypeVar("_T")


class Logprob(Struct):
    """Hold one token's log-probability; vLLM 0.32 gives its id, 0.26 the text "token_id:493"."""

    logprob: float
    token_id: int = -1
    token: str = ""

    @property
    def id(self) -> int:
        return self.token_id if not self.token else int(self.token.removeprefix("token_id:"))


class Logprobs(Struct):
    content: list[Logprob]


class Stamp(Struct):
    """Name the weights that sampled tokens start .. end - 1."""

    version: str
    start: int
    end: int


class Choice(Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: Logprobs
    stop_reason: int | str | None = None
    weight_versions: list[Stamp] | None = None
    routed_experts: str | None = None


class Answer(Struct):
    """Hold an answer of /inference/v1/generate."""

    choices: list[Choice]
    prompt_logprobs: list[dict[str, Logprob] | None] | None = None


class _TokenLogprobs(Struct):
    token_logprobs: list[float]


class _TextChoice(Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _TokenLogprobs
    stop_reason: int | str | None = None
    routed_experts: str | None = None
    prompt_logprobs: list[dict[str, Logprob] | None] | None = None


class _TextAnswer(Struct):
    choices: list[_TextChoice]


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


class UpdateSeconds(Struct):
    """Hold the seconds of each part of an update, and the bytes read, by worker."""

    results: list[dict[str, float]]


class CacheReset(Struct):
    """Hold the answer of /reset_prefix_cache."""

    success: bool = True


class ServerInfo(Struct):
    """Hold an answer of /server_info."""

    vllm_config: VllmConfig = VllmConfig()


def decode(kind: type[_T], url: str, data: bytes) -> _T:
    """Decode an answer of `url`; raise EngineError with its beginning if it is none."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise EngineError(f"{url}: unreadable answer: {error}: {data[:300]!r}") from None


def from_completions(url: str, data: bytes) -> Answer:
    """Read an answer of /v1/completions."""
    text = decode(_TextAnswer, url, data).choices[0]
    pairs = zip(text.token_ids, text.logprobs.token_logprobs, strict=False)
    sampled = Logprobs([Logprob(logprob, token_id) for token_id, logprob in pairs])
    choice = Choice(
        text.token_ids, text.finish_reason, sampled, text.stop_reason, routed_experts=text.routed_experts
    )
    return Answer([choice], text.prompt_logprobs)


def sampled_logprobs(choice: Choice) -> list[float]:
    """Return the log-probability of each token id; raise EngineError for a wrong id, or one not finite."""
    entries = choice.logprobs.content
    if [entry.id for entry in entries] != choice.token_ids:
        raise EngineError(f"{len(entries)} log-probabilities do not match {len(choice.token_ids)} token ids")
    values = [entry.logprob for entry in entries]
    require_finite(values)
    return values


def require_finite(values: Sequence[float]) -> None:
    """Raise EngineError for the first log-probability that is not finite."""
    for place, value in enumerate(values):
        if not math.isfinite(value) or value <= NOT_FINITE:
            raise EngineError(f"log-probability {place} of {len(values)} is {value}")


def to_routing(choice: Choice, wanted: int) -> NDArray[np.uint8]:
    """Return the experts of `wanted` tokens, uint8 [wanted, layers * k]; fewer where the engine aborted.

    vLLM writes a numpy file [tokens, layers, k] as base64. Raise EngineError for any other answer.
    """
    if choice.routed_experts is None:
        if choice.finish_reason == "abort":
            return np.zeros((0, 0), np.uint8)
        raise EngineError("the engine returned no routing: start it with --enable-return-routed-experts")
    with boundary(EngineError, "read the routing"):
        data = io.BytesIO(base64.b64decode(choice.routed_experts, validate=True))
        array: NDArray[np.uint8] = np.load(data, allow_pickle=False)
    rows = len(array)
    if array.dtype != np.uint8 or array.ndim != 3 or rows > wanted:
        raise EngineError(f"a routing of {wanted} tokens has type {array.dtype} and shape {array.shape}")
    ordered = np.sort(array, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():  # vLLM 0.26 gives zeros for a kernel that captures none
        raise EngineError("a routing names an expert twice for one token: this engine captures no experts")
    if rows < wanted and choice.finish_reason != "abort":
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
