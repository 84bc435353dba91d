"""Tool calling: how tools get into the prompt. `parsing` reads calls from answers.

A chat template that takes tools gets them. For any other, a system message describes them. If a call is
required, a grammar admits nothing else; with `auto`, text that parses as a call becomes one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outstride.core.structured_output import OutputFormat
from outstride.serve.protocol import ChatBody, ChatMessage, Tool, ToolChoice
from outstride.serve.settings import invalid

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_ABOUT = (
    "You can call functions. Each line describes one, with a JSON schema of its arguments:\n{tools}\n"
    "To call a function, answer with nothing but a JSON object that holds its name and its arguments:\n"
    + OPEN
    + '{{"name": "…", "arguments": {{…}}}}'
    + CLOSE
    + "\nIf no function helps, answer in plain words."
)


def offered(body: ChatBody) -> list[Tool]:
    """The tools that this request lets the model use."""
    tools = body.tools or []
    if isinstance(body.tool_choice, ToolChoice):
        wanted = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == wanted]
        if not tools:
            raise invalid(f"tool_choice names {wanted!r}, which is not among tools", "tool_choice")
    if body.tool_choice == "required" and not tools:
        raise invalid("tool_choice is required, but there are no tools", "tool_choice")
    return [] if body.tool_choice == "none" else tools


def must_call(body: ChatBody) -> bool:
    """Whether the answer has to be a call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, ToolChoice)


def call_format(tools: Sequence[Tool]) -> OutputFormat:
    """The JSON schema of a call of one of them."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    defs: dict[str, Any] = {}
    for tool in tools:  # references in a schema start at its root, which moves
        found = (tool.function.parameters or {}).get("$defs")
        defs |= found if isinstance(found, dict) else {}
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return OutputFormat("json_schema", json.dumps({**schema, **({"$defs": defs} if defs else {})}))


def with_tool_prompt(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The conversation with a description of the tools in its system message."""
    lines = [
        json.dumps(
            {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or {"type": "object"},
            },
            ensure_ascii=False,
        )
        for tool in tools
    ]
    about = _ABOUT.format(tools="\n".join(lines))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{about}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": about}, *messages]


def as_plain_message(message: ChatMessage) -> dict[str, Any]:
    """A message for templates that do not take tools: calls and results become text."""
    role, content = message.role, text_of(message)
    if role == "developer":
        role = "system"
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>{content}</tool_response>"}
    for call in message.tool_calls or ():
        inner = (
            f'{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}'
        )
        content += f"{OPEN}{inner}{CLOSE}"
    return {"role": role, "content": content}


def text_of(message: ChatMessage) -> str:
    """The text of a message; raises if it holds anything else."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise invalid(
                f"messages hold text only; there is a part of type {part.type!r}", "messages"
            )
    return "".join(part.text or "" for part in message.content)
