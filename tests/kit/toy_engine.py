"""An engine in this process: it answers from a script, in tokens that no tokenizer would choose."""

import dataclasses
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.base.errors import EngineError
from hpc_swe.base.records import EngineStages, IdArray, Sampling, WeightVersion
from hpc_swe.models.engines.base import NEW, Completion, Prefix

OPENING = "<|im_start|>assistant\n"
Change = Callable[[Completion], Completion]


@dataclass
class Call:
    url: str
    prompt: list[int]
    sampling: Sampling
    salt: str
    answer: Completion | None = None


@dataclass
class ToyEngine:
    """Says `replies[n]` in the n-th answer of a prompt; samples uniformly how a text is cut into tokens.

    `faults` are used up one a call: an error is raised, a function changes the answer.
    """

    builder: TokenBuilder
    replies: list[str]
    answers: list[list[int]] = field(default_factory=list)
    """Ids, which replace `replies`: the n-th call is answered by the n-th of them."""
    faults: deque[EngineError | Change | None] = field(default_factory=deque)
    apart: dict[str, list[str]] = field(default_factory=dict)
    """A text -> replies to the prompts that hold it, in place of `replies`."""
    version: WeightVersion | None = field(default_factory=WeightVersion)
    on_call: Callable[[Call], None] = lambda call: None
    calls: list[Call] = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    lock: threading.Lock = field(default_factory=threading.Lock)
    routes: bool = False
    """Answers say of each computed token that its experts are its id mod 7 and mod 11."""

    def generate(
        self,
        url: str,
        token: str,
        prompt: IdArray,
        sampling: Sampling,
        timeout_s: float,
        prefix: Prefix = NEW,
    ) -> Completion:
        with self.lock:
            call = Call(url, prompt.tolist(), sampling, prefix.salt)
            self.calls.append(call)
            fault = self.faults.popleft() if self.faults else None
        self.on_call(call)
        if isinstance(fault, EngineError):
            raise fault
        answer = self._answer(call)
        stages = EngineStages(prompt_tokens=len(call.prompt))
        call.answer = dataclasses.replace(fault(answer) if fault else answer, stages=stages)
        if self.routes:
            ids = np.asarray([*call.prompt, *call.answer.token_ids][prefix.routed : -1])
            routing = np.stack((ids % 7, ids % 11), -1).astype(np.uint8)
            call.answer = dataclasses.replace(call.answer, routing=routing)
        return call.answer

    def _answer(self, call: Call) -> Completion:
        if self.answers:
            ids = self.answers[len(self.calls) - 1]
            logprobs = [-(1 + index % 7) / 8 for index in range(len(ids))]
            finish = "stop" if ids and ids[-1] == self.builder.end_id else "length"
            return Completion(ids, logprobs, finish, [(0, len(ids), self.version)] if ids else [])
        text = self.builder.tokens.decode(call.prompt)
        said = text.rpartition(OPENING)[2]
        replies = next((found for word, found in self.apart.items() if word in text), self.replies)
        whole = replies[min(text.count(OPENING), len(replies)) - 1]
        assert whole.startswith(said)
        ids, logprobs = self._sample(whole[len(said) :])
        ids, logprobs = [*ids, self.builder.end_id], [*logprobs, -0.125]
        finish = "stop" if len(ids) <= call.sampling.max_tokens else "length"
        ids, logprobs = ids[: call.sampling.max_tokens], logprobs[: call.sampling.max_tokens]
        return Completion(ids, logprobs, finish, self.version and [(0, len(ids), self.version)])

    def _sample(self, text: str) -> tuple[list[int], list[float]]:
        """Random cuts, so that the ids are seldom those of the whole text encoded again."""
        ids: list[int] = []
        while text:
            cut = self.dice.randint(1, min(4, len(text)))
            ids += self.builder.tokens.encode(text[:cut])
            text = text[cut:]
        return ids, [-self.dice.random() for _ in ids]


def cut_at(count: int, finish: str = "abort") -> Change:
    """The first `count` tokens only."""

    def change(answer: Completion) -> Completion:
        spans = answer.spans and [(0, count, answer.spans[0][2])]
        return Completion(answer.token_ids[:count], answer.logprobs[:count], finish, spans)

    return change
