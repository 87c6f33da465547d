"""A conversation, and how the rows of the usual data formats are read as one.

Scope: OpenAI `messages`, ShareGPT `conversations`, Alpaca `instruction/input/output`, with columns under other names.
Not here: reading rows from files (`rows.py`), the text of a conversation and its tokens (`template.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

ASSISTANT = "assistant"
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
    "model": ASSISTANT,
    "tool": "tool",
    "observation": "tool",
    "function_call": "function_call",
}
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""Fields of a message that a chat template may read besides role and content."""


class RowFaultError(Exception):
    """A row that cannot be used; rows are counted by `reason`, `detail` is of this row alone."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. trained: false for an answer that the data exempts (`weight: 0`). extra: fields kept as found."""

    role: str
    content: str
    trained: bool = True
    extra: tuple[tuple[str, Any], ...] = ()

    def for_template(self) -> dict[str, Any]:
        """What a chat template sees."""
        return {"role": self.role, "content": self.content, **dict(self.extra)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns in order, and the tools that they may call."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()

    def digest(self) -> int:
        """64 bits that tell conversations apart; equal ones are duplicates."""
        turns = [[*sorted(message.for_template().items()), message.trained] for message in self.messages]
        content = json.dumps([turns, self.tools], sort_keys=True, default=str)
        return int.from_bytes(blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """Which columns and tags hold what. formatting `auto`: told by the row's own columns."""

    formatting: Literal["auto", "alpaca", "sharegpt"] = "auto"
    prompt: str = "instruction"
    query: str = "input"
    response: str = "output"
    history: str = "history"
    messages: str = "conversations"
    system: str = "system"
    tools: str = "tools"
    role_tag: str = "from"
    content_tag: str = "value"
    roles: tuple[tuple[str, str], ...] = ()
    """Role names of this data set before the usual ones: (name, meaning)."""


AUTO = RowFormat()
OPENAI = RowFormat(formatting="sharegpt", messages="messages", role_tag="role", content_tag="content")
_SHAREGPT = RowFormat(formatting="sharegpt")
_SHAREGPT_OPENAI_TAGS = RowFormat(formatting="sharegpt", role_tag="role", content_tag="content")
_ALPACA = RowFormat(formatting="alpaca")


def conversation_of(row: object, fmt: RowFormat) -> Conversation:
    """The conversation in one row. Raises RowFaultError with the reason when it holds none that can be used."""
    if not isinstance(row, Mapping):
        raise RowFaultError("not an object", f"a {type(row).__name__}")
    fmt = _detected(row) if fmt.formatting == "auto" else fmt
    messages = _from_alpaca(row, fmt) if fmt.formatting == "alpaca" else _from_turns(row, fmt)
    system = row.get(fmt.system)
    if system not in (None, "") and messages[0].role != "system":
        messages = [Message(role="system", content=_text(system, fmt.system)), *messages]
    _check(messages)
    return Conversation(messages=tuple(messages), tools=_tools(row.get(fmt.tools)))


def _detected(row: Mapping[Any, Any]) -> RowFormat:
    if "messages" in row:
        return OPENAI
    if "conversations" in row:
        turns = row["conversations"]
        first = turns[0] if isinstance(turns, list) and turns else None
        return _SHAREGPT_OPENAI_TAGS if isinstance(first, Mapping) and "role" in first else _SHAREGPT
    if "instruction" in row and "output" in row:
        return _ALPACA
    found = ", ".join(str(key) for key in list(row)[:6]) or "nothing"
    raise RowFaultError("no known columns", f"`messages`, `conversations` or `instruction` and `output`; found {found}")


def _from_alpaca(row: Mapping[Any, Any], fmt: RowFormat) -> list[Message]:
    question = _text(row.get(fmt.prompt), fmt.prompt)
    query = row.get(fmt.query)
    if query not in (None, ""):
        question = f"{question}\n{_text(query, fmt.query)}" if question else _text(query, fmt.query)
    earlier = row.get(fmt.history) or []
    messages: list[Message] = []
    for pair in earlier if isinstance(earlier, list) else [earlier]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowFaultError(f"`{fmt.history}` is not a list of pairs")
        messages += [Message(role="user", content=_text(pair[0], fmt.history)),
                     Message(role=ASSISTANT, content=_text(pair[1], fmt.history))]  # fmt: skip
    answer = _text(row.get(fmt.response), fmt.response)
    return [*messages, Message(role="user", content=question), Message(role=ASSISTANT, content=answer)]


def _from_turns(row: Mapping[Any, Any], fmt: RowFormat) -> list[Message]:
    turns = row.get(fmt.messages)
    if not isinstance(turns, list | tuple) or not turns:
        raise RowFaultError(f"`{fmt.messages}` is not a list of turns")
    own = dict(fmt.roles)
    return [_turn(turn, fmt, own) for turn in turns]


def _turn(turn: object, fmt: RowFormat, own: Mapping[str, str]) -> Message:
    if not isinstance(turn, Mapping):
        raise RowFaultError("a turn is not an object", f"a {type(turn).__name__}")
    name = turn.get(fmt.role_tag)
    role = own.get(str(name)) or _ROLES.get(str(name))
    if role is None:
        raise RowFaultError("unknown role", f"`{fmt.role_tag}` is {name!r}")
    extra = {key: turn[key] for key in _KEPT if turn.get(key) is not None}
    content = turn.get(fmt.content_tag)
    if role == "function_call":
        role, extra["tool_calls"], content = ASSISTANT, _calls(content), ""
    text = "" if content is None and "tool_calls" in extra else _text(content, fmt.content_tag)
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise RowFaultError("`weight` of a turn is neither 0 nor 1", repr(weight))
    return Message(role=role, content=text, trained=weight != 0, extra=tuple(sorted(extra.items())))


def _text(value: object, field: str) -> str:
    """Text as it stands, or the text parts of a list of parts put together."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value:
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in value]
        other = next((kind for kind in kinds if kind != "text"), None)
        if other is not None:
            raise RowFaultError("content that is not text", f"a part of type {other!r} in `{field}`")
        return "".join(_text(part.get("text"), field) for part in value)
    raise RowFaultError("content that is not text", f"`{field}` is {'missing' if value is None else repr(value)[:40]}")


def _calls(content: object) -> list[dict[str, Any]]:
    try:
        found: Any = json.loads(content) if isinstance(content, str) else content
        calls = found if isinstance(found, list) else [found]
        return [{"type": "function", "function": {k: call[k] for k in ("name", "arguments")}} for call in calls]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RowFaultError("a function call is not JSON with `name` and `arguments`") from None


def _tools(value: object) -> tuple[Any, ...]:
    if value in (None, "", []):
        return ()
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise RowFaultError("`tools` is not JSON") from None
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def _check(messages: list[Message]) -> None:
    if any(message.role == "system" for message in messages[1:]):
        raise RowFaultError("a system turn that is not the first")
    answers = [message for message in messages if message.role == ASSISTANT]
    if not answers:
        raise RowFaultError("no assistant turn")
    if any(not message.content.strip() and not dict(message.extra).get("tool_calls") for message in answers):
        raise RowFaultError("an empty answer")
    if not any(message.trained for message in answers):
        raise RowFaultError("every answer has the weight 0")
