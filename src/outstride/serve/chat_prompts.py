"""Conversations in the model's own format."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from outstride.errors import RequestError
from outstride.models.chat_text import ChatText
from outstride.models.tokenizer import Tokenizer
from outstride.serve import tools
from outstride.serve.protocol import ChatMessage, Tool
from outstride.serve.settings import invalid

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "self"})
"""Variables of chat templates that have fields of their own."""


class CallArguments(dict[str, Any]):
    """Arguments of an earlier call. Some templates take an object, others print it: then it is JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    offered: Sequence[Tool] = (),
    *,
    generation: bool | None = None,
    continue_final: bool = False,
    variables: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
) -> str:
    """A conversation in the model's own format; raises a 400 if it has none.

    generation: whether the beginning of an answer follows; by default, unless the last message is
    continued. continue_final: the prompt ends within the last message. variables: for the template.
    """
    if continue_final and generation:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    extra: dict[str, Any] = dict(variables or {})
    if clash := RESERVED.intersection(extra):
        name = min(clash)
        raise invalid(f"chat_template_kwargs must not set {name}", "chat_template_kwargs")
    template = tokenizer.chat_template or ""
    if reasoning_effort is not None and "reasoning_effort" in template:
        extra.setdefault("reasoning_effort", reasoning_effort)
    if tokenizer.takes_tools:
        plain = [_as_dict(message) for message in messages]
        if offered:
            extra["tools"] = [tool.model_dump(exclude_none=True) for tool in offered]
    else:
        plain = [tools.as_plain_message(message) for message in messages]
        if offered:
            plain = tools.with_tool_prompt(plain, offered)
    mark = ""
    if continue_final:
        # Letters only, so that no template changes it; random, so that no message contains it.
        mark = "".join(secrets.choice("abcdefghijklmnop") for _ in range(32))
        plain[-1] = {**plain[-1], "content": plain[-1]["content"] + mark}
    try:
        text = tokenizer.chat(plain, not continue_final and generation is not False, **extra)
    except RequestError as error:
        raise invalid(str(error), "messages") from error
    except Exception as error:  # a template is a program, and its variables come from the request
        raise invalid(f"the chat template failed: {error}", "messages") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:  # from a tool or a variable: fields of text are checked
        raise invalid("tools or chat_template_kwargs hold half a character", "messages") from error
    return _cut(text, mark) if mark else text


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    """A message as templates that know tools take it."""
    found = {**message.model_dump(exclude_none=True), "content": tools.text_of(message)}
    for call in found.get("tool_calls", ()):
        try:
            arguments = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            call["function"]["arguments"] = CallArguments(arguments)
    return found


def _cut(text: ChatText, mark: str) -> ChatText:
    """The prompt up to the mark at the end of the last message."""
    end = text.find(mark)
    if end < 0:
        raise invalid(
            "the chat template does not show the last message as it is; it cannot be continued",
            "continue_final_message",
        )
    plain = [(start, min(stop, end)) for start, stop in text.plain if start < end]
    return ChatText(text[:end], plain)
