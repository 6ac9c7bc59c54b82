"""Record an agent's chat with the engines, token by token.

The recorder alone sets how tokens are sampled. Our agents call it; programs reach it by `openai_server`.
"""

import dataclasses
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.agents.loops.base import ContextFull, Refusal, Reply, TurnsSpent
from hpc_swe.base.errors import ConfigError, EngineError, EpisodeError, SandboxError
from hpc_swe.base.records import (
    EngineStages,
    ExitStatus,
    Message,
    RolloutRequest,
    Sampling,
    Turn,
    floats,
    id_array,
    ids,
)
from hpc_swe.config.settings import RolloutConfig
from hpc_swe.models.engines.base import Prefix
from hpc_swe.roles.rollout.chains import ChainPlace, Chains
from hpc_swe.roles.rollout.sampler import Sampled, Sampler

MAX_TOKEN_CHARS = 16
"""Highest mean of a prompt that is tokenized; real text has far fewer characters per token."""
LINGER_S = 30.0
"""Seconds that a program gets to end or to send a shorter request after a full context or its last turn."""
OUT_OF_CONTEXT = Refusal(
    ExitStatus.CONTEXT, "the context was full before the reply ended", is_side_request=False
)
"""Holds after a reply that was cut: a program may take it for its last one, and end without a request."""


@dataclass(frozen=True)
class Exchange:
    """Hold the answer to a request until it is delivered to the agent."""

    index: int
    """Of the answer's turn."""
    place: ChainPlace
    history: list[Message]
    """The request's messages and the answer."""
    continues: bool
    """Whether the request extends an earlier one; side requests do not."""
    reply: Reply
    fills_context: bool
    """Whether the reply ended because the context did."""
    prompt_tokens: int
    completion_tokens: int


class Recorder:
    """Answer and record the requests of one episode, from one or several threads."""

    def __init__(
        self, builder: TokenBuilder, sampler: Sampler, request: RolloutRequest, config: RolloutConfig
    ) -> None:
        """Start the episode's clock.

        Raise ConfigError if a training request has sampling settings that change the token probabilities.
        """
        if request.split == "train" and not request.sampling.is_plain:
            raise ConfigError(
                f"[sampling] {request.sampling}: training needs temperature 1, top_p 1, top_k 0, min_p 0"
            )
        self._builder, self._sampler, self._config = builder, sampler, config
        self._sampling = request.sampling
        self._lock = threading.Lock()
        self._chains = Chains()
        self._closed = ""
        self._started = time.monotonic()
        self._in_flight = 0
        """Requests that are at the engines."""
        self._busy_since = 0.0
        self._engine_s = 0.0
        self.turns_left = math.inf
        """Turns that may still be sampled."""
        self._refused_at = math.inf
        """The clock outside the engine when a limit refused a request, unless one was answered since."""
        self.linger_s = LINGER_S
        self.answers = 0
        """Answers of engines so far, parts of a completion counted each."""
        self.counts: Counter[str] = Counter()
        self.stages = EngineStages()
        self._openings: list[list[Message]] = []
        """The first message of each conversation that was continued."""
        self.messages: list[Message] = []
        """The history that ended in the last delivered reply, without side requests; for people."""
        self.failure: EpisodeError | None = None
        """The infrastructure failure of the episode, however the agent reports it."""
        self.refusal: Refusal | None = None
        """Why the last request was refused, or the next one would be; None after one that continued."""

    def __call__(self, messages: Sequence[Message], tools: str = "") -> Reply:
        """Return the policy's next message. `tools` is the JSON list that the chat template shows, or empty.

        Raise ContextFull if the prompt leaves no room for an answer, and TurnsSpent if no turn is left;
        AgentError if the chat template refuses the messages; EngineError if no engine answered in time; and
        SandboxError if the episode exceeded its time-out outside the engines.
        """
        exchange = self.ask(messages, tools)
        self.deliver(exchange)
        return exchange.reply

    def ask(self, messages: Sequence[Message], tools: str = "") -> Exchange:
        """Sample an answer without delivering it; it raises what a call raises."""
        started = time.monotonic()
        self._require_open()
        self._require_size(messages, tools)
        with self._lock:
            place = self._chains.place(messages, tools)
            continues = place.parent is not None
            parent = place.parent
            engine = "" if parent is None else self._chains.turns[parent].engine
            salt = "" if parent is None else self._chains.salts[parent]
            if self._config.history == "template":
                place = dataclasses.replace(place, parent=None, new=list(messages))
            prefix = self._chains.prefix(place.parent)
        appended = ids(self._render(prefix, place.new, tools))
        prompt = id_array(b"".join([*prefix, appended]))
        sampling = self._fit(len(prompt))
        with self._engine_clock():
            # The last token of an answer becomes routed only as part of the next prompt.
            known = Prefix(max(0, sum(map(len, prefix)) // 4 - 1), salt)
            sampled = self._sampler.sample(prompt, sampling, engine, known, self._count_answer)
        seconds = time.monotonic() - started
        index = self._keep(place, appended, sampling, sampled, seconds)
        cut = sampled.finish_reason == "length"
        reply = self._builder.reply(sampled.token_ids, truncated=cut, tools=tools)
        self.counts["parse_errors"] += bool(reply.parse_error)
        history = [*messages, Message(role="assistant", content=reply.content, tool_calls=reply.tool_calls)]
        fills_context = cut and sampling.max_tokens < self._sampling.max_tokens
        sizes = len(prompt), len(sampled.token_ids)
        return Exchange(index, place, history, continues, reply, fills_context, *sizes)

    def deliver(self, exchange: Exchange) -> None:
        """Note that the reply reached the agent, so that its turn may be trained and extended."""
        with self._lock:
            self._chains.deliver(exchange.index, exchange.place, exchange.history[-1])
            if exchange.continues or not self.messages:
                self.messages = exchange.history
            # The program got an answer and continues: its next action may take longer than `linger_s`.
            self._refused_at = math.inf
            if exchange.continues:
                self.refusal = OUT_OF_CONTEXT if exchange.fills_context else None
                self._openings.append(exchange.history[:1])

    def retract(self, exchange: Exchange) -> None:
        """Note that a delivered reply did not reach the agent after all."""
        with self._lock:
            self._chains.retract(exchange.index)

    def is_side_request(self, status: ExitStatus, messages: Sequence[Message], tools: str) -> bool:
        """Return whether a refused request belongs to none of the conversations so far.

        One that a limit refused may have been rewritten, so its first message decides.
        """
        with self._lock:
            openings = [self.messages[:1], *self._openings]
            if not self.messages or (status.is_truncated and list(messages[:1]) in openings):
                return False
            return self._chains.place(messages, tools).parent is None

    def refuse(self, status: ExitStatus, why: str, *, is_side_request: bool = False) -> None:
        """Note that a request was refused; the episode ends with this status if the program ends now."""
        now = self.outside_engine_s
        with self._lock:
            if self.refusal is None or self.refusal.is_side_request or not is_side_request:
                self.refusal = Refusal(status, why, is_side_request)
            if status.is_truncated:
                self._refused_at = min(self._refused_at, now)

    def clock(self) -> float:
        """Return the seconds outside the engines; infinite once the episode's result can no longer change."""
        spent_s = self.outside_engine_s
        is_over = self._closed or self.failure is not None or spent_s > self._refused_at + self.linger_s
        return math.inf if is_over else spent_s

    @property
    def has_sampled(self) -> bool:
        """Return whether the policy has sampled a turn."""
        with self._lock:
            return bool(self._chains.turns)

    @property
    def main(self) -> int:
        """Return the index of the turn that starts the agent's own conversation."""
        with self._lock:
            return self._chains.main()

    def close(self, why: str) -> list[Turn]:
        """Return all turns, and refuse further requests with the reason `why`."""
        with self._lock:
            self._closed = why
            turns = list(self._chains.turns)
            self.counts["undelivered"] = sum(not turn.delivered for turn in turns)
            self.counts["chains"] = sum(turn.parent is None for turn in turns)
            return turns

    @property
    def total_s(self) -> float:
        """Return the wall seconds since the episode began."""
        return time.monotonic() - self._started

    @property
    def engine_s(self) -> float:
        """Return the wall seconds in which at least one request was at the engines."""
        with self._lock:
            return self._engine_s + (time.monotonic() - self._busy_since if self._in_flight else 0.0)

    @property
    def outside_engine_s(self) -> float:
        """Return the wall seconds in which no request was at the engines."""
        return self.total_s - self.engine_s

    @contextmanager
    def _engine_clock(self) -> Iterator[None]:
        with self._lock:
            if self.turns_left <= 0:
                raise TurnsSpent("all turns of the episode are spent")
            self.turns_left -= 1
            self._busy_since = self._busy_since if self._in_flight else time.monotonic()
            self._in_flight += 1
        try:
            yield
        except EngineError as error:
            self.failure = error
            raise
        finally:
            with self._lock:
                self._in_flight -= 1
                self._engine_s += 0.0 if self._in_flight else time.monotonic() - self._busy_since

    def _count_answer(self) -> None:
        with self._lock:
            self.answers += 1

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError(self._closed)
        limit = self._config.episode_timeout_s
        if self.outside_engine_s > limit:
            self.failure = SandboxError(
                f"the episode took {self.outside_engine_s:.0f} s outside the engine; "
                f"[rollout] episode_timeout_s = {limit:g}"
            )
            raise self.failure

    def _require_size(self, messages: Sequence[Message], tools: str) -> None:
        """Refuse a huge prompt before it is tokenized, which takes a hundred times the memory of the text."""
        calls = sum(len(call.arguments) for message in messages for call in message.tool_calls)
        size = len(tools) + calls + sum(len(message.content) for message in messages)
        if size > MAX_TOKEN_CHARS * self._config.context:
            self.counts["context_full"] += 1
            raise ContextFull(
                f"the prompt's {size} characters are over {MAX_TOKEN_CHARS} a token of the context length "
                f"{self._config.context}"
            )

    def _render(self, prefix: list[bytes], new: list[Message], tools: str) -> list[int]:
        if not prefix:
            return self._builder.start(new, tools, served=self._config.history == "template")
        last = id_array(prefix[-1])
        return self._builder.extend(int(last[-1]) if len(last) else -1, new, tools)

    def _fit(self, prompt_tokens: int) -> Sampling:
        room = self._config.context - prompt_tokens
        least = min(self._config.min_tokens, self._sampling.max_tokens)
        if room < least:
            self.counts["context_full"] += 1
            raise ContextFull(
                f"the prompt's {prompt_tokens} tokens leave {max(room, 0)} of the context length "
                f"{self._config.context}; an answer needs {least}"
            )
        return replace(self._sampling, max_tokens=min(room, self._sampling.max_tokens))

    def _keep(
        self, place: ChainPlace, appended: bytes, sampling: Sampling, sampled: Sampled, seconds: float
    ) -> int:
        turn = Turn(
            parent=place.parent,
            appended_ids=appended,
            completion_ids=ids(sampled.token_ids),
            logprobs=floats(sampled.logprobs),
            spans=sampled.spans,
            sampling=sampling,
            engine=sampled.engine,
            finish_reason=sampled.finish_reason,
            delivered=False,
            seconds=seconds,
            routing=sampled.routing,
            tools=place.tools,
        )
        with self._lock:
            self.counts["continued"] += sampled.continued
            self.stages += sampled.stages
            return self._chains.add(turn, sampled.salt)
