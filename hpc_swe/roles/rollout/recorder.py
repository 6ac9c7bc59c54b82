"""Recorder: stands between an agent and the engines, and keeps what was sampled, token by token.

It alone sets how tokens are sampled. Agents of ours call it; command-line agents reach it by `front`.
"""

import dataclasses
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from hpc_swe.conversation import TokenBuilder
from hpc_swe.errors import ConfigError, EngineError, EpisodeError, SandboxError
from hpc_swe.plugins.agents.base import ChatAddress, ContextFull, Refusal, Reply, TurnsSpent
from hpc_swe.records import ExitStatus, Message, RolloutRequest, Sampling, Turn, floats, id_array, ids
from hpc_swe.roles.rollout import openai_server
from hpc_swe.roles.rollout.chains import ChainPlace, Chains
from hpc_swe.roles.rollout.sampler import Sampled, Sampler
from hpc_swe.settings import RolloutConfig

MOST_CHARS = 16
"""Of a token, on average; more is no text but a flood."""
LINGER_S = 30.0
"""What a program gets to end, or to get an answer to less, after a full context or its last turn."""


@dataclass(frozen=True)
class Exchange:
    """An answered request, not yet handed to the agent."""

    index: int
    place: ChainPlace
    history: list[Message]
    goes_on: bool
    """Whether the request extends an earlier one; side calls do not."""
    reply: Reply
    prompt_tokens: int
    completion_tokens: int


class Recorder:
    """One episode's chat, from one or several threads."""

    def __init__(
        self, builder: TokenBuilder, sampler: Sampler, request: RolloutRequest, config: RolloutConfig
    ) -> None:
        """Start the episode's clock.

        Raises:
            ConfigError: Training with settings under which the log-probabilities are not the sampler's.
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
        self._asking = 0
        self._asked_at = 0.0
        self._engine_s = 0.0
        self._turns_left = math.inf
        self._refused_at = math.inf
        self.linger_s = LINGER_S
        self.counts: Counter[str] = Counter()
        self._opened: list[list[Message]] = []
        self.messages: list[Message] = []
        """The history that the last delivered reply ended, side calls apart; for people."""
        self.failure: EpisodeError | None = None
        """What makes the episode an infrastructure failure, whatever the agent made of it."""
        self.refusal: Refusal | None = None
        """Why a request was not answered, unless a conversation went on since."""

    def __call__(self, messages: Sequence[Message], tools: str = "") -> Reply:
        """The policy's next message. `tools` is the JSON list that the chat template shows, or empty.

        Raises:
            ContextFull: The prompt leaves no room to answer.
            EngineError: No engine answered in time.
            SandboxError: The episode took too long beside the engine.
            AgentError: The chat template refuses the messages.
            TurnsSpent: All turns that `serve` allows are.
        """
        exchange = self.ask(messages, tools)
        self.deliver(exchange)
        return exchange.reply

    def ask(self, messages: Sequence[Message], tools: str = "") -> Exchange:
        """Sample an answer; `deliver` says that it arrived. Raises as a call does."""
        started = time.monotonic()
        self._require_open()
        self._require_size(messages, tools)
        with self._lock:
            place = self._chains.place(messages, tools)
            goes_on = place.parent is not None
            engine = "" if place.parent is None else self._chains.turns[place.parent].engine
            if self._config.history == "template":
                place = dataclasses.replace(place, parent=None, new=list(messages))
            prefix = self._chains.prefix(place.parent)
        appended = ids(self._render(prefix, place.new, tools))
        prompt = id_array(b"".join([*prefix, appended]))
        sampling = self._fit(len(prompt))
        with self._engine_clock():
            sampled = self._sampler.sample(prompt, sampling, engine)
        seconds = time.monotonic() - started
        index = self._keep(place.parent, appended, sampling, sampled, seconds)
        reply = self._reply(sampled, tools)
        history = [*messages, Message(role="assistant", content=reply.content, tool_calls=reply.tool_calls)]
        return Exchange(index, place, history, goes_on, reply, len(prompt), len(sampled.token_ids))

    def deliver(self, exchange: Exchange) -> None:
        """The reply reached the agent: its turn may be trained and extended."""
        with self._lock:
            self._chains.deliver(exchange.index, exchange.place, exchange.history[-1])
            if exchange.goes_on or not self.messages:
                self.messages = exchange.history
            # Whoever was answered lives on: what it does next may take longer than it lingers.
            self._refused_at = math.inf
            if exchange.goes_on:
                self.refusal = None
                self._opened.append(exchange.history[:1])

    def retract(self, exchange: Exchange) -> None:
        """The reply did not arrive after all."""
        with self._lock:
            self._chains.retract(exchange.index)

    def is_aside(self, status: ExitStatus, messages: Sequence[Message], tools: str) -> bool:
        """Whether a refused request is of no conversation; a limit meets those that were rewritten, too."""
        with self._lock:
            opened = [self.messages[:1], *self._opened]
            if not self.messages or (status.is_truncated and list(messages[:1]) in opened):
                return False
            return self._chains.place(messages, tools).parent is None

    def refuse(self, status: ExitStatus, why: str, *, is_aside: bool = False) -> None:
        """A request was not answered, and the episode ends so if the program leaves it at that."""
        now = self.beside_engine_s
        with self._lock:
            if self.refusal is None or self.refusal.is_aside or not is_aside:
                self.refusal = Refusal(status, why, is_aside)
            if status.is_truncated:
                self._refused_at = min(self._refused_at, now)

    def ignore(self, count: int) -> None:
        """Count settings that a client sent and that are the recorder's alone to choose."""
        with self._lock:
            self.counts["ignored_settings"] += count

    @contextmanager
    def serve(self, listener: socket.socket, most_turns: int) -> Iterator[ChatAddress]:
        """This chat as an OpenAI-style server, for agents that are programs; see `front`."""
        self._turns_left = most_turns
        with openai_server.serve(self, listener) as address:
            yield address

    def clock(self) -> float:
        """Seconds beside the engine; infinite when a program that goes on could change nothing."""
        spent_s = self.beside_engine_s
        is_over = self._closed or self.failure is not None or spent_s > self._refused_at + self.linger_s
        return math.inf if is_over else spent_s

    @property
    def has_sampled(self) -> bool:
        """Whether the policy has said anything."""
        with self._lock:
            return bool(self._chains.turns)

    @property
    def main(self) -> int:
        """Index of the turn that starts the agent's own conversation."""
        with self._lock:
            return self._chains.main()

    def close(self, why: str) -> list[Turn]:
        """All turns; what is still asked from now on is refused."""
        with self._lock:
            self._closed = why
            turns = list(self._chains.turns)
            self.counts["undelivered"] = sum(not turn.delivered for turn in turns)
            self.counts["chains"] = sum(turn.parent is None for turn in turns)
            return turns

    @property
    def total_s(self) -> float:
        """Wall seconds since the episode began."""
        return time.monotonic() - self._started

    @property
    def engine_s(self) -> float:
        """Those in which at least one request was at the engines."""
        with self._lock:
            return self._engine_s + (time.monotonic() - self._asked_at if self._asking else 0.0)

    @property
    def beside_engine_s(self) -> float:
        """The others."""
        return self.total_s - self.engine_s

    @contextmanager
    def _engine_clock(self) -> Iterator[None]:
        with self._lock:
            if self._turns_left <= 0:
                raise TurnsSpent("all turns of the episode are spent")
            self._turns_left -= 1
            self._asked_at = self._asked_at if self._asking else time.monotonic()
            self._asking += 1
        try:
            yield
        except EngineError as error:
            self.failure = error
            raise
        finally:
            with self._lock:
                self._asking -= 1
                self._engine_s += 0.0 if self._asking else time.monotonic() - self._asked_at

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError(self._closed)
        limit = self._config.episode_timeout_s
        if self.beside_engine_s > limit:
            self.failure = SandboxError(
                f"the episode took {self.beside_engine_s:.0f} s beside the engine; "
                f"[rollout] episode_timeout_s = {limit:g}"
            )
            raise self.failure

    def _require_size(self, messages: Sequence[Message], tools: str) -> None:
        """Before the tokenizer sees it, which takes a hundred times the memory of the text."""
        calls = sum(len(call.arguments) for message in messages for call in message.tool_calls)
        size = len(tools) + calls + sum(len(message.content) for message in messages)
        if size > MOST_CHARS * self._config.context:
            self.counts["context_full"] += 1
            raise ContextFull(
                f"the prompt's {size} characters are over {MOST_CHARS} a token of the context length "
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
        self, parent: int | None, appended: bytes, sampling: Sampling, sampled: Sampled, seconds: float
    ) -> int:
        turn = Turn(
            parent=parent,
            appended_ids=appended,
            completion_ids=ids(sampled.token_ids),
            logprobs=floats(sampled.logprobs),
            spans=sampled.spans,
            sampling=sampling,
            engine=sampled.engine,
            finish_reason=sampled.finish_reason,
            delivered=False,
            seconds=seconds,
        )
        with self._lock:
            self.counts["continued"] += sampled.continued
            return self._chains.add(turn)

    def _reply(self, sampled: Sampled, tools: str) -> Reply:
        cut = sampled.finish_reason == "length"
        reply = self._builder.reply(sampled.token_ids, truncated=cut, tools=tools)
        self.counts["parse_errors"] += bool(reply.parse_error)
        return reply
