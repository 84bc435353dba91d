"""Tool calls that are JSON: Hermes and Qwen, Llama 3, Mistral, DeepSeek, Granite, Phi-4."""

from __future__ import annotations

from typing import Any, ClassVar

from outstride.serve.parsing.tool_format import (
    Block,
    NotACall,
    Schemas,
    ToolFormat,
    json_calls,
    json_end,
    known,
    read_json,
    skip_closer,
    skip_space,
)


class MarkedJSON(ToolFormat):
    """A marker, a JSON object or a list of them, and perhaps a closing marker."""

    closers: ClassVar[dict[str, str]] = {}
    """The closing marker of each opener."""

    def __init__(self) -> None:
        self.openers = tuple(self.closers)
        self.markers = (*self.closers, *filter(None, self.closers.values()))

    def parse(self, text: str, opener: str, tools: Schemas, final: bool) -> Block | None:
        bare = opener in self.first_openers and opener in ("{", "[")
        start = 0 if bare else skip_space(text, len(opener))
        if start == len(text):
            return None
        if text[start] not in "{[":
            raise NotACall
        end = json_end(text, start)
        if end is None:
            return None
        calls = json_calls(read_json(text[start:end]), tools)
        closed = skip_closer(text, end, self.closers.get(opener, ""), final)
        return None if closed is None else Block(closed, calls)


class Hermes(MarkedJSON):
    """Hermes, Qwen 2.5, Qwen 3, Granite 4 and others; also an answer that is nothing but JSON."""

    name = "hermes"
    closers: ClassVar = {"<tool_call>": "</tool_call>"}
    first_openers = ("{", "[")


class Granite(MarkedJSON):
    """Granite 3: a list after a marker."""

    name = "granite"
    closers: ClassVar = {"<|tool_call|>": "", "<tool_call>": "</tool_call>", "<function_call>": ""}
    first_openers = ("{", "[")


class Phi4(MarkedJSON):
    """Phi-4 mini: `functools[…]`, or a list between markers."""

    name = "phi4"
    closers: ClassVar = {"<|tool_call|>": "<|/tool_call|>", "functools": ""}


class Llama3(ToolFormat):
    """Llama 3: JSON objects with `name` and `parameters`, separated by semicolons."""

    name = "llama3"
    openers = ("<|python_tag|>",)
    first_openers = ("{", "[")
    markers = ("<|python_tag|>",)

    def parse(self, text: str, opener: str, tools: Schemas, final: bool) -> Block | None:
        at = skip_space(text, len(opener) if opener in self.openers else 0)
        calls: list[tuple[str, Any]] = []
        end = 0
        while True:
            if at == len(text):
                return Block(end, calls) if final and calls else None
            if text[at] not in "{[":
                raise NotACall
            found = json_end(text, at)
            if found is None:
                return Block(end, calls) if final and calls else None
            calls += json_calls(read_json(text[at:found]), tools)
            end = found
            at = skip_space(text, end)
            if at == len(text):
                return Block(end, calls) if final else None
            if text[at] != ";":
                return Block(end, calls)
            at = skip_space(text, at + 1)


class Mistral(ToolFormat):
    """Mistral: `[TOOL_CALLS]` and a list, or, since version 11, a name and its arguments."""

    name = "mistral"
    openers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def parse(self, text: str, opener: str, tools: Schemas, final: bool) -> Block | None:
        start = skip_space(text, len(opener))
        if start == len(text):
            return None
        if text[start] == "[":
            end = json_end(text, start)
            if end is None:
                return None
            return Block(end, json_calls(read_json(text[start:end]), tools))
        brace = text.find("{", start)
        head = text[start:] if brace < 0 else text[start:brace]
        name = head.partition("[")[0].strip()
        if not any(tool.startswith(name) for tool in tools):
            raise NotACall
        end = None if brace < 0 else json_end(text, brace)
        if end is None:
            return None
        arguments = read_json(text[brace:end])
        return Block(end, [(known(name, tools), arguments)])


class DeepSeek(ToolFormat):
    """DeepSeek V3 and R1 (a fenced block after the name), and V3.1 (JSON after the name)."""

    name = "deepseek"
    _begin, _sep, _end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    _wrappers = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    openers = (_begin, *_wrappers)
    markers = (*openers, _sep, _end)

    def parse(self, text: str, opener: str, tools: Schemas, final: bool) -> Block | None:
        if opener in self._wrappers:
            return Block(len(opener), ())
        end = text.find(self._end)
        if end < 0:
            return None
        head, sep, rest = text[len(opener) : end].partition(self._sep)
        if not sep:
            raise NotACall
        name = head.strip()
        brace = rest.find("{")
        if name not in tools and brace >= 0:  # V3 writes the kind of call first
            name = rest[:brace].partition("```")[0].strip()
        close = json_end(rest, brace) if brace >= 0 else None
        if close is None:
            raise NotACall
        arguments = read_json(rest[brace:close])
        return Block(end + len(self._end), [(known(name, tools), arguments)])
