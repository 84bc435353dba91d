"""The output items of `/v1/responses`, and the events of its streams."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from outstride.serve.ipc import RequestEnd
from outstride.serve.parsing.tool_format import CALL, CONTENT, Part
from outstride.serve.responses_protocol import ResponsesBody

Event = dict[str, Any]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


class ResponseState:
    """A response while it grows: its output items, and the events that tell of each change."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self.id = new_id("resp")
        self.output: list[dict[str, Any]] = []
        self.status = "in_progress"
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] | None = None
        self._created = int(time.time())
        self._body, self._model = body, model
        self._open = ""
        """The kind of the item that grows."""
        self._sequence = 0

    # --- the object ---------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The response object as it is now."""
        body = self._body
        given = body.model_dump(by_alias=True, exclude_none=True, include={"tools", "tool_choice"})
        cut = self.status == "incomplete"
        shape = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self.status,
            "background": bool(body.background),
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **shape},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self.usage,
            "user": body.user,
        }

    # --- growth -------------------------------------------------------------------------------------

    def begin(self) -> list[Event]:
        """The first events of a stream."""
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def add(self, part: Part) -> list[Event]:
        """Adds a part of the answer."""
        if part.kind == CALL:
            return [*self._close(), *self._call(part)]
        events: list[Event] = []
        if self._open != part.kind:
            events += [*self._close(), *self._begin_item(part.kind)]
        item = self.output[-1]
        item["content"][0]["text"] += part.text
        name = "output_text" if part.kind == CONTENT else "reasoning_text"
        return [*events, self._about(f"response.{name}.delta", delta=part.text)]

    def end(
        self, end: RequestEnd | None, usage: Mapping[str, Any], reasoning: int = 0
    ) -> list[Event]:
        """Ends the answer; reasoning: how many of its tokens are reasoning, where it is known."""
        events = self._close()
        self.usage = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": dict(usage["prompt_tokens_details"]),
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
            "outstride": usage["outstride"],
        }
        cut = end is not None and end.reason == "length"
        self.status = "incomplete" if cut else "completed"
        if cut and self.output:
            self.output[-1]["status"] = "incomplete"
        return [*events, self._whole(f"response.{self.status}")]

    def fail(self, code: str, message: str) -> list[Event]:
        """Ends the answer with an error."""
        self.status, self.error = "failed", {"code": code, "message": message}
        return [self._whole("response.failed")]

    def to_messages(self) -> list[dict[str, Any]]:
        """The answer as messages of the conversation that goes on after it."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self.output:
            if item["type"] == "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message["tool_calls"] = [*message.get("tool_calls", ()), call]
            elif item["type"] == "message":
                message["content"] += item["content"][0]["text"]
        return [message]

    # --- items --------------------------------------------------------------------------------------

    def _begin_item(self, kind: str) -> list[Event]:
        self._open = kind
        item: dict[str, Any]
        text: dict[str, Any] = {
            "type": "output_text",
            "text": "",
            "annotations": [],
            "logprobs": [],
        }
        if kind == CONTENT:
            item = {"id": new_id("msg"), "type": "message", "role": "assistant"}
        else:
            item = {"id": new_id("rs"), "type": "reasoning", "summary": []}
            text = {"type": "reasoning_text", "text": ""}
        self.output.append({**item, "status": "in_progress", "content": []})
        added = self._item("response.output_item.added")
        self.output[-1]["content"] = [text]
        return [added, self._about("response.content_part.added", part=dict(text))]

    def _close(self) -> list[Event]:
        """Ends the item that grows, if there is one."""
        if not self._open:
            return []
        item = self.output[-1]
        item["status"] = "completed"
        part = item["content"][0]
        name = "output_text" if self._open == CONTENT else "reasoning_text"
        self._open = ""
        more: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
        return [
            self._about(f"response.{name}.done", text=part["text"], **more),
            self._about("response.content_part.done", part=dict(part)),
            self._item("response.output_item.done"),
        ]

    def _call(self, part: Part) -> list[Event]:
        item: dict[str, Any] = {
            "id": new_id("fc"),
            "type": "function_call",
            "call_id": new_id("call"),
        }
        item |= {"name": part.name, "arguments": "", "status": "in_progress"}
        self.output.append(item)
        events = [self._item("response.output_item.added")]
        place = {"item_id": item["id"], "output_index": len(self.output) - 1}
        item |= {"arguments": part.text, "status": "completed"}
        events += [
            self._event("response.function_call_arguments.delta", **place, delta=part.text),
            self._event(
                "response.function_call_arguments.done",
                **place,
                name=part.name,
                arguments=part.text,
            ),
        ]
        return [*events, self._item("response.output_item.done")]

    # --- events -------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _whole(self, kind: str) -> Event:
        value = self.to_json()
        return self._event(kind, response={**value, "output": [dict(i) for i in value["output"]]})

    def _item(self, kind: str) -> Event:
        return self._event(kind, output_index=len(self.output) - 1, item=dict(self.output[-1]))

    def _about(self, kind: str, **fields: Any) -> Event:
        """An event about the content of the last item."""
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        if "delta" in fields and "output_text" in kind:
            fields["logprobs"] = []
        return self._event(kind, **place, content_index=0, **fields)
