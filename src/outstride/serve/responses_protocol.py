"""Bodies of `/v1/responses`, and how they become chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outstride.serve.protocol import (
    ChatBody,
    ContentPart,
    DecodingOptions,
    Flag,
    OpenModel,
    StrictModel,
    Text,
)
from outstride.serve.settings import invalid
from outstride.serve.validation import validated

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class InputItem(OpenModel):
    """A message, a call, the output of a call, or reasoning."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Text | None = None
    output: Text | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None


class FunctionTool(OpenModel):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag = None


class NamedTool(OpenModel):
    type: Literal["function"]
    name: str


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=200)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag = None


class TextOptions(StrictModel):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(OpenModel):
    effort: str | None = None


class ResponsesBody(StrictModel):
    """/v1/responses"""

    input: Text | Annotated[list[InputItem], Field(max_length=10_000)]
    model: str | None = Field(None, max_length=500)
    instructions: Text | None = None
    previous_response_id: str | None = Field(None, max_length=200)
    store: Flag = True
    stream: Flag = False
    background: Flag = False
    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Flag = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    # not part of OpenAI's API
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    top_k: int | None = Field(0, ge=-1)
    min_p: float | None = Field(0.0, ge=0, le=1)
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = Field(None, max_length=500)
    priority: int | None = Field(0, ge=-(2**31), le=2**31)
    outstride: DecodingOptions | None = None
    # accepted, without effect
    include: list[str] | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None


_SAME: tuple[str, ...] = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "seed",
    "top_k",
    "min_p",
)
_SAME = (*_SAME, "chat_template_kwargs", "cache_salt", "priority")
"""Fields that a chat has under the same name."""


def to_chat(body: ResponsesBody, messages: list[dict[str, Any]]) -> ChatBody:
    """The chat that answers a request; `messages` is the conversation so far."""
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    start = []
    if body.instructions:
        start = [{"role": "system", "content": body.instructions}]
    values["messages"] = start + messages
    values["max_completion_tokens"] = body.max_output_tokens
    if body.truncation == "auto":
        values["truncate_prompt_tokens"] = -1
    if body.reasoning is not None:
        values["reasoning_effort"] = body.reasoning.effort
    if body.outstride is not None:
        values["outstride"] = body.outstride.model_dump(exclude_unset=True)
    if body.tools:
        values["tools"] = [_tool(tool) for tool in body.tools]
    if isinstance(body.tool_choice, NamedTool):
        values["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tool_choice is not None:
        values["tool_choice"] = body.tool_choice
    wanted = body.text.format if body.text is not None else None
    if wanted is not None and wanted.type != "text":
        values["response_format"] = {"type": wanted.type}
        if wanted.type == "json_schema":
            schema = {"name": wanted.name or "answer", "schema": wanted.schema_}
            values["response_format"]["json_schema"] = schema
    if not values["messages"]:
        raise invalid("input is empty", "input")
    return validated(ChatBody, values)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    if tool.type != "function" or not tool.name:
        raise invalid(
            f"there is a tool of type {tool.type!r}; only functions with a name are supported",
            "tools",
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def to_messages(given: str | list[InputItem]) -> list[dict[str, Any]]:
    """Input items as the messages of a chat; calls of one turn become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for item in given:
        kind = item.type or ("message" if item.role else "unknown")
        if kind == "message" and item.role is not None:
            messages.append({"role": item.role, "content": _text(item.content)})
        elif kind == "function_call" and item.name and item.call_id:
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant":
                messages.append(last := {"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            call = {"id": item.call_id, "type": "function", "function": function}
            last["tool_calls"] = [*last.get("tool_calls", ()), call]
        elif kind == "function_call_output" and item.call_id:
            content = _text(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif kind == "reasoning":
            reasoning += _text(item.content)
            continue
        else:
            raise invalid(
                f"an item of type {kind!r} is not supported, or lacks its fields; items are messages, "
                "function_call, function_call_output and reasoning",
                "input",
            )
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return messages


def _text(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in TEXT_PARTS or part.text is None:
            raise invalid(f"input holds text only; there is a part of type {part.type!r}", "input")
    return "".join(part.text or "" for part in content)
