"""Build prompts as token ids, and parse completions into replies.

A chain of turns is built by `start` once and `extend` for every later prompt:

    start([system, user])         P0             then the engine samples A0
    extend(A0[-1], [tool])        P1             prompt of turn 1 is P0 A0 P1: nothing is rendered twice

Templates render history differently from the latest turn (Qwen3 drops old thoughts), so P1 is not the
difference of two renderings of this conversation. It is the text that the template writes after the answer
of a fixed small conversation; the checks at load prove that it does not depend on the messages before.
"""

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from hpc_swe.agents.chat.marks import THINK, THOUGHT, CompletionText
from hpc_swe.agents.chat.replies import ALONE, ToolFormat, parse
from hpc_swe.agents.chat.template import ChatTemplate, Rendering
from hpc_swe.agents.chat.tokens import Tokens
from hpc_swe.agents.loops.base import Reply
from hpc_swe.base.errors import AgentError, ConfigError, boundary
from hpc_swe.base.records import Message, ToolCall

_ASKED = Message(role="user", content="A question.")
_ANSWERED = Message(role="assistant", content="An answer.")
_BASE = [_ASKED, _ANSWERED]
_NEW = [
    Message(role="tool", content="Seen."),
    Message(role="tool", content="Done."),
    Message(role="user", content="Go on."),
]
_CALL = ToolCall(name="look", arguments='{"path": "a.py", "why": "it fails"}')
_LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
_TOOLS = json.dumps([{"type": "function", "function": _LOOK}])


class TokenBuilder:
    """Encode and decode conversations with the tokenizer and chat template of a Hugging Face model folder."""

    def __init__(
        self,
        folder: Path,
        tool_format: ToolFormat = "hermes",
        arguments: Mapping[str, object] | None = None,
        stops: Collection[int] = (),
    ) -> None:
        """Read tokenizer.json, tokenizer_config.json and the chat template, and check that they can be used.

        The `arguments` are passed to the template, for example ``enable_thinking``. `stops` are ids at which
        the engine stops beside those of the folder. Raise ConfigError when a file is missing, or when the
        template cannot be used append-only.
        """
        self.tokens = Tokens(folder)
        self._template = ChatTemplate(folder, arguments or {})
        self._format: ToolFormat = tool_format
        try:
            self.end_id = _end_of_turn(self.tokens, self._template)
            # whether an answer continues text of the prompt, to which a tokenizer has added its space already
            self._continues = self.start([_ASKED])[-1] not in self.tokens.control.values()
            self.thoughts = _thoughts(self._template.render([_ASKED], "", generate=True).text)
            self._check()
        except (ConfigError, AgentError) as error:
            raise ConfigError(
                f"{folder}: its chat template cannot be used append-only: {error}; "
                f"change template_arguments or tool_parser in [rollout], or the template: see docs/models.md"
            ) from error
        _require_stop(self.tokens, self.end_id, folder, stops)

    @property
    def largest_id(self) -> int:
        """Return the largest id that conversations may have; a token that nobody writes does not count."""
        called = Message(role="assistant", content="", tool_calls=[_CALL])
        ids, _ = self.demonstration([*_BASE, *_NEW[2:], called, *_NEW, _ANSWERED], _TOOLS)
        return max(self.tokens.largest_plain_id, *ids)

    def start(self, messages: Sequence[Message], tools: str = "", served: bool = False) -> list[int]:
        """Return a chain's first prompt; with `served`, as an engine that renders chats would write it."""
        rendering = self._template.render(messages, tools, generate=True, served=served)
        return self.tokens.encode_parts(rendering.flagged)

    def extend(self, last_id: int, messages: Sequence[Message], tools: str = "") -> list[int]:
        """Return the ids after a completion that ended in `last_id`: a missing end of turn, the messages."""
        ids = self.tokens.encode_parts(self._after(_BASE, messages, tools).flagged)
        return ids[1:] if last_id == self.end_id else ids

    def encode_answer(self, message: Message, thought: str = "") -> list[int]:
        """Return the ids that a policy would sample for an assistant's message, with its end of turn.

        A `thought` comes first, between its marks; the opening mark is left out where the prompt ends in it.
        """
        opening = "" if self.thoughts == "opened" else f"{THINK}\n"
        marked = [(opening, True), (thought, False), (f"\n{THOUGHT}\n\n", True)] if thought else []
        parts = [*marked, *self._answer(message).flagged]
        return [*self.tokens.encode_parts(parts, continues=self._continues), self.end_id]

    def reply(self, completion: Sequence[int], *, truncated: bool = False, tools: str = "") -> Reply:
        """Parse the text and the tool calls of a completion, given as ids with or without its end of turn."""
        ids = completion[:-1] if completion and completion[-1] == self.end_id else completion
        spelled = CompletionText(*self.tokens.spell(ids, continues=self._continues))
        return parse(
            spelled, self._format, truncated=truncated, tools=tools, thinking=self.thoughts == "opened"
        )

    def demonstration(
        self, messages: Sequence[Message], tools: str = "", thoughts: Sequence[str] = ()
    ) -> tuple[list[int], list[int]]:
        """Return the ids and the mask of a conversation; the mask is 1 on answers and their ends of turn.

        Messages after the last answer are left out. `thoughts` has one for each message, or is empty. A
        recorded conversation has the same ids and mask.
        """
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        ids: list[int] = []
        mask: list[int] = []
        done = 0
        for index in answers:
            new = messages[done:index]
            prompt = self.extend(ids[-1], new, tools) if ids else self.start(new, tools)
            answer = self.encode_answer(messages[index], thoughts[index] if thoughts else "")
            ids += prompt + answer
            mask += [0] * len(prompt) + [1] * len(answer)
            done = index + 1
        return ids, mask

    def _after(self, base: Sequence[Message], messages: Sequence[Message], tools: str) -> Rendering:
        """Render what follows the answer that ends `base`: its end of turn, then `messages`."""
        rendering = self._template.render([*base, *messages], _TOOLS if tools else "", generate=True)
        return rendering.cut(len(base) - 1)[1]

    def _answer(self, message: Message) -> Rendering:
        """Render an assistant's message without the template's head and end of turn."""
        head, end = self._template.render(_BASE, "", generate=False).cut(1)
        _, answer = self._template.render([_ASKED, message], "", generate=False).cut(0)
        opening, closing = head.parts[-1], end.text
        if not (answer.parts[0].startswith(opening) and answer.parts[-1].endswith(closing)):
            raise AgentError("the chat template writes this answer unlike a plain one")
        parts = [answer.parts[0].removeprefix(opening), *answer.parts[1:]]
        parts[-1] = parts[-1].removesuffix(closing)
        return Rendering(parts, answer.slots)

    def _check(self) -> None:
        for new in (_NEW[:1], _NEW[:2], _NEW, _NEW[2:]):
            for tools in ("", _TOOLS):
                short, long = (self._after(_BASE * times, new, tools) for times in (1, 2))
                if short.parts != long.parts:
                    raise ConfigError("what it writes for new messages depends on how many came before")
                if not _are_written(short.contents, new):
                    raise ConfigError(f"it does not render each of {[m.role for m in new]} once and in order")
                if self.tokens.encode_parts(short.flagged)[0] != self.end_id:
                    raise ConfigError("it does not end an answer with one and the same control token")
        first = self._template.render(_NEW[2:], "", generate=True)
        if self.tokens.encode_parts(first.flagged) != self.tokens.encode_whole(first.text):
            raise ConfigError("the tokenizer strips or normalizes around control tokens")
        self._check_calls()

    def _check_calls(self) -> None:
        """Prove that tool calls are parsed as the template writes them, with or without control tokens."""
        is_alone = self._format in ALONE
        calls, contents = [_CALL] if is_alone else [_CALL, _CALL], [""] if is_alone else ["", "Let me see."]
        for thought, content in itertools.product(("", "<think>\nhm\n</think>\n\n"), contents):
            message = Message(role="assistant", content=content, tool_calls=calls)
            parts = [(thought, True), *self._answer(message).flagged]
            ids = self.tokens.encode_parts(parts, continues=self._continues)
            spelled = CompletionText(*self.tokens.spell(ids, continues=self._continues))
            reply = parse(spelled, self._format, truncated=False, tools=_TOOLS, thinking=False)
            read = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
            expected = [(call.name, json.loads(call.arguments)) for call in calls]
            if read != expected or reply.content != (thought + content).rstrip():
                wrote = f"writes a tool call as {spelled.text!r}" if spelled.text else "leaves tool calls out"
                raise ConfigError(f"it {wrote}, which is not {self._format}")


def _are_written(texts: Sequence[str], messages: Sequence[Message]) -> bool:
    """Return whether each text has its message, as it is or in JSON."""
    return len(texts) == len(messages) and all(
        message.content in text for text, message in zip(texts, messages, strict=True)
    )


def _thoughts(opening: str) -> Literal["free", "opened", "closed"]:
    """Return whether a prompt leaves it to the policy to think, begins a thought, or ends an empty one."""
    if opening.rfind(THINK) > opening.rfind(THOUGHT):
        return "opened"
    return "closed" if opening.rstrip().endswith(THOUGHT) else "free"


def _end_of_turn(tokens: Tokens, template: ChatTemplate) -> int:
    _, end = template.render(_BASE, "", generate=False).cut(1)
    ids = tokens.encode_parts(end.flagged)
    if not ids or ids[0] not in tokens.control.values():
        raise ConfigError(f"it ends an answer with {end.text!r}, which does not begin with a control token")
    return ids[0]


def _require_stop(tokens: Tokens, end: int, folder: Path, stops: Collection[int]) -> None:
    """Raise ConfigError unless the engine stops at the end of a turn, where a file says where it stops."""
    source, known = _stop_ids(folder)
    if source and end not in {*known, *stops}:
        names = {number: name for name, number in tokens.control.items()}
        raise ConfigError(
            f"{folder / source}: the engine stops at {[names.get(i, i) for i in [*known, *stops]]}, but the "
            f"chat template ends an answer with {names[end]}; add {end} to eos_token_id in "
            "generation_config.json, or to engine.stop_token_ids"
        )


def _stop_ids(folder: Path) -> tuple[str, list[int]]:
    """Return the file that lists the ids at which engines stop, and these ids; "" and none without a file.

    Engines read config.json only in a folder without generation_config.json, even if that lists no ids.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.exists():
            with boundary(ConfigError, f"read {path}"):
                value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            return name, value if isinstance(value, list) else [value] if isinstance(value, int) else []
    return "", []
