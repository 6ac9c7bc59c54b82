"""TokenBuilder: what the engine is asked, as ids, and what it answered, as a reply.

A chain of turns is built by `start` once and `extend` for every later prompt:

    start([system, user])         P0             then the engine samples A0
    extend(A0[-1], [tool])        P1             prompt of turn 1 is P0 A0 P1: nothing is rendered twice

Templates render history differently from the latest turn (Qwen3 drops old thoughts), so P1 is not a
difference of two renderings of this conversation. It is what the template writes after the answer of
a fixed small conversation; the checks at load prove that it does not depend on what came before.
"""

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpc_swe.conversation.marks import Said
from hpc_swe.conversation.replies import ToolFormat, parse
from hpc_swe.conversation.template import ChatTemplate, Rendering
from hpc_swe.conversation.tokens import Tokens
from hpc_swe.errors import AgentError, ConfigError, boundary
from hpc_swe.plugins.agents.base import Reply
from hpc_swe.records import Message, ToolCall

_ASKED = Message(role="user", content="A question.")
_ANSWERED = Message(role="assistant", content="An answer.")
_BASE = [_ASKED, _ANSWERED]
_NEW = [
    Message(role="tool", content="Seen."),
    Message(role="tool", content="Done."),
    Message(role="user", content="Go on."),
]
_CALL = ToolCall(name="look", arguments='{"path": "a.py", "why": "it fails"}')
_TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Look.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]
)


class TokenBuilder:
    """Reads tokenizer.json, tokenizer_config.json and the chat template of a Hugging Face model folder."""

    def __init__(
        self,
        folder: Path,
        tool_format: ToolFormat = "hermes",
        arguments: Mapping[str, object] | None = None,
        stops: Collection[int] = (),
    ) -> None:
        """`arguments` go to the template as they are, for example ``enable_thinking``. `stops` are ids at
        which the engine stops beside those of the folder.

        Raises:
            ConfigError: A file is missing, or the template cannot be used append-only.
        """
        self.tokens = Tokens(folder)
        self._template = ChatTemplate(folder, arguments or {})
        self._format: ToolFormat = tool_format
        try:
            self.end_id = _end_of_turn(self.tokens, self._template, folder, stops)
            opening = self._template.render([_ASKED], "", generate=True).text
            self._thinks = opening.rfind("<think>") > opening.rfind("</think>")
            self._check()
        except (ConfigError, AgentError) as error:
            raise ConfigError(
                f"{folder}: its chat template cannot be used append-only: {error}; "
                f"change template_arguments or tool_parser in [rollout], or the template"
            ) from error

    def start(self, messages: Sequence[Message], tools: str = "", served: bool = False) -> list[int]:
        """The first prompt of a chain; `served` as an engine that renders chats itself would write it."""
        rendering = self._template.render(messages, tools, generate=True, served=served)
        return self.tokens.encode_parts(rendering.flagged)

    def extend(self, last_id: int, messages: Sequence[Message], tools: str = "") -> list[int]:
        """What follows a completion that ended in `last_id`: its end of turn if cut, then the messages."""
        ids = self.tokens.encode_parts(self._after(_BASE, messages, tools).flagged)
        return ids[1:] if last_id == self.end_id else ids

    def written(self, message: Message) -> list[int]:
        """The ids with which a policy would have said an assistant's message, end of turn included."""
        return self.tokens.encode_parts(self._spoken(message).flagged) + [self.end_id]

    def reply(self, completion: Sequence[int], *, truncated: bool = False, tools: str = "") -> Reply:
        """What a completion says."""
        said = completion[:-1] if completion and completion[-1] == self.end_id else completion
        spelled = Said(*self.tokens.spell(said))
        return parse(spelled, self._format, truncated=truncated, tools=tools, thinking=self._thinks)

    def demonstration(self, messages: Sequence[Message], tools: str = "") -> tuple[list[int], list[int]]:
        """Ids and mask of a whole conversation; 1 on what the policy is to say, its end of turn included.

        What follows the last answer is left out. A recorded conversation has the very same ids and mask.
        """
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        ids: list[int] = []
        mask: list[int] = []
        done = 0
        for index in answers:
            new = messages[done:index]
            prompt = self.extend(ids[-1], new, tools) if ids else self.start(new, tools)
            answer = self.written(messages[index])
            ids += prompt + answer
            mask += [0] * len(prompt) + [1] * len(answer)
            done = index + 1
        return ids, mask

    def _after(self, base: Sequence[Message], messages: Sequence[Message], tools: str) -> Rendering:
        """What the template writes after the answer that ends `base`: its end of turn, then `messages`."""
        rendering = self._template.render([*base, *messages], _TOOLS if tools else "", generate=True)
        return rendering.cut(len(base) - 1)[1]

    def _spoken(self, message: Message) -> Rendering:
        """An assistant's message without the template's head and end of turn."""
        head, end = self._template.render(_BASE, "", generate=False).cut(1)
        _, said = self._template.render([_ASKED, message], "", generate=False).cut(0)
        opening, closing = head.parts[-1], end.text
        if not (said.parts[0].startswith(opening) and said.parts[-1].endswith(closing)):
            raise AgentError("the chat template writes this answer unlike a plain one")
        parts = [said.parts[0].removeprefix(opening), *said.parts[1:]]
        parts[-1] = parts[-1].removesuffix(closing)
        return Rendering(parts, said.slots)

    def _check(self) -> None:
        """Prove on a small conversation that appending is right."""
        for new in (_NEW[:1], _NEW[:2], _NEW, _NEW[2:]):
            for tools in ("", _TOOLS):
                short, long = (self._after(_BASE * times, new, tools) for times in (1, 2))
                if short.parts != long.parts:
                    raise ConfigError("what it writes for new messages depends on how many came before")
                if short.contents != [message.content for message in new]:
                    raise ConfigError(f"it does not render each of {[m.role for m in new]} once and in order")
                if self.tokens.encode_parts(short.flagged)[0] != self.end_id:
                    raise ConfigError("it does not end an answer with one and the same control token")
        first = self._template.render(_NEW[2:], "", generate=True)
        if self.tokens.encode_parts(first.flagged) != self.tokens.encode_whole(first.text):
            raise ConfigError("the tokenizer strips or normalizes around control tokens")
        self._check_calls()

    def _check_calls(self) -> None:
        """Prove that calls are read as the template writes them, which of the marks ever are tokens."""
        for thought, content in itertools.product(("", "<think>\nhm\n</think>\n\n"), ("", "Let me see.")):
            message = Message(role="assistant", content=content, tool_calls=[_CALL, _CALL])
            ids = self.tokens.encode_parts([(thought, True), *self._spoken(message).flagged])
            said = Said(*self.tokens.spell(ids))
            reply = parse(said, self._format, truncated=False, tools=_TOOLS, thinking=False)
            read = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
            expected = [(_CALL.name, json.loads(_CALL.arguments))] * 2
            if read != expected or reply.content != (thought + content).rstrip():
                raise ConfigError(f"it writes a tool call as {said.text!r}, which is not {self._format}")


def _end_of_turn(tokens: Tokens, template: ChatTemplate, folder: Path, stops: Collection[int]) -> int:
    """The control token that the template writes after an answer, which must also stop the engine."""
    _, end = template.render(_BASE, "", generate=False).cut(1)
    ids = tokens.encode_parts(end.flagged)
    names = {number: name for name, number in tokens.control.items()}
    if not ids or ids[0] not in names:
        raise ConfigError(f"it ends an answer with {end.text!r}, which does not begin with a control token")
    source, known = _stop_ids(folder)
    if source and ids[0] not in {*known, *stops}:
        raise ConfigError(
            f"it ends an answer with {names[ids[0]]}, but the engine stops at "
            f"{[names.get(i, i) for i in [*known, *stops]]}, by {source}; "
            f"add {ids[0]} to eos_token_id in generation_config.json"
        )
    return ids[0]


def _stop_ids(folder: Path) -> tuple[str, list[int]]:
    """The file that says where an engine ends a completion, and its ids; "" where there is none.

    Engines read config.json only in a folder without generation_config.json, whether or not that has any.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.exists():
            with boundary(ConfigError, f"read {path}"):
                value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            return name, value if isinstance(value, list) else [value] if isinstance(value, int) else []
    return "", []
