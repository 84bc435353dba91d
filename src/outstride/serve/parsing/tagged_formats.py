"""Tool calls with tags around each argument (GLM-4.5, Qwen3-Coder), Gemma's, and Python calls."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from outstride.serve.parsing.tool_format import (
    Block,
    NotACall,
    Schemas,
    ToolFormat,
    known,
    skip_closer,
    skip_space,
)


def typed(text: str, name: str, key: str, tools: Schemas) -> Any:
    """An argument that is written as bare text, with the type that the tool's schema gives it."""
    properties = tools.get(name, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


class GLM(ToolFormat):
    """GLM-4.5 and later: the name, then pairs of `<arg_key>` and `<arg_value>`."""

    name = "glm"
    openers = ("<tool_call>",)
    markers = (
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
        *("<arg_value>", "</arg_value>"),
    )
    _pair = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)

    def parse(self, text: str, opener: str, tools: Schemas, final: bool) -> Block | None:
        close = "</tool_call>"
        end = text.find(close)
        if end < 0:
            return None
        inner = text[len(opener) : end]
        name, _, pairs = inner.partition("<arg_key>")
        arguments: dict[str, Any] = {}
        name, at = known(name.strip(), tools), 0
        pairs = f"<arg_key>{pairs}" if pairs else ""
        while at < len(pairs):
            found = self._pair.match(pairs, at)
            if found is None:
                raise NotACall
            key = found[1].strip()
            arguments[key] = typed(found[2], name, key, tools)
            at = found.end()
        return Block(end + len(close), [(name, arguments)])


class QwenCoder(ToolFormat):
    """Qwen3-Coder: `<function=name>` with `<parameter=key>` in it."""

    name = "qwen3-coder"
    openers = ("<tool_call>", "<function=")
    markers = ("<tool_call>", "</tool_call>")
    _parameter = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)

    def parse(self, text: str, opener: str, tools: Schemas, final: bool) -> Block | None:
        start = 0 if opener == "<function=" else skip_space(text, len(opener))
        head = "<function="
        if not text.startswith(head, start):
            if head.startswith(text[start:]):
                return None
            raise NotACall
        end = text.find("</function>", start)
        if end < 0:
            return None
        name, closed, inner = text[start + len(head) : end].partition(">")
        if not closed:
            raise NotACall
        name = known(name.strip().strip("\"'"), tools)
        arguments = {}
        for key, value in self._parameter.findall(inner):
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key.strip()] = typed(value, name, key.strip(), tools)
        end += len("</function>")
        close = "</tool_call>" if opener == "<tool_call>" else ""
        closed_at = skip_closer(text, end, close, final)
        return None if closed_at is None else Block(closed_at, [(name, arguments)])


class Gemma(ToolFormat):
    """FunctionGemma and Gemma 4: `call:name{key:value}`; Gemma 3: a Python call in a fenced block."""

    name = "gemma"
    _closers = {  # noqa: RUF012
        "<start_function_call>": "<end_function_call>",
        "<|tool_call>": "<tool_call|>",
        "```tool_code\n": "\n```",
    }
    openers = tuple(_closers)
    markers = (
        *("<start_function_call>", "<end_function_call>", "<|tool_call>", "<tool_call|>"),
        *("<escape>", '<|"|>'),
    )

    def parse(self, text: str, opener: str, tools: Schemas, final: bool) -> Block | None:
        closer = self._closers[opener]
        end = text.find(closer, len(opener))
        if end < 0:
            return None
        inner, length = text[len(opener) : end].strip(), end + len(closer)
        if opener.startswith("`"):
            return Block(length, python_calls(inner, tools))
        found = re.match(r"call:\s*([\w.-]+)\s*(?=\{)", inner)
        if found is None:
            raise NotACall
        arguments = GemmaValue(inner[found.end() :]).read()
        return Block(length, [(known(found[1], tools), arguments)])


class GemmaValue:
    """Reads Gemma's notation of arguments: bare keys, and strings between delimiters."""

    _string = re.compile(
        r'<escape>(.*?)<escape>|<\|"\|>(.*?)<\|"\|>|"((?:\\.|[^"\\])*)"', re.DOTALL
    )
    _bare = re.compile(r"[^,:{}\[\]]+")

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> Any:
        """The whole value; raises `NotACall`."""
        value = self._value()
        if skip_space(self._text, self._at) != len(self._text):
            raise NotACall
        return value

    def _take(self, token: str) -> bool:
        self._at = skip_space(self._text, self._at)
        if self._text.startswith(token, self._at):
            self._at += len(token)
            return True
        return False

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._at = skip_space(self._text, self._at)
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _value(self) -> Any:
        if self._take("{"):
            entries: dict[str, Any] = {}
            while not self._take("}"):
                key = self._value()
                if not isinstance(key, str | int | float) or not self._take(":"):
                    raise NotACall
                entries[str(key)] = self._value()
                if not self._take(",") and not self._text.startswith("}", self._at):
                    raise NotACall
            return entries
        if self._take("["):
            items: list[Any] = []
            while not self._take("]"):
                items.append(self._value())
                if not self._take(",") and not self._text.startswith("]", self._at):
                    raise NotACall
            return items
        if (found := self._match(self._string)) is not None:
            return next((group for group in found.groups() if group is not None), "")
        if (found := self._match(self._bare)) is None:
            raise NotACall
        try:
            return json.loads(found[0].strip())
        except ValueError:
            return found[0].strip()


class Pythonic(ToolFormat):
    """Llama 3.2 and 4, OLMo 3: a list of Python calls, alone or between tags."""

    name = "pythonic"
    openers = ("<function_calls>", "<|python_start|>")
    first_openers = ("[",)
    markers = ("<function_calls>", "</function_calls>", "<|python_start|>", "<|python_end|>")

    def parse(self, text: str, opener: str, tools: Schemas, final: bool) -> Block | None:
        if opener == "[":
            end = _bracket_end(text)
            if end is None:
                return None
            return Block(end, python_calls(text[:end], tools))
        closer = "</function_calls>" if opener == self.openers[0] else "<|python_end|>"
        end = text.find(closer)
        if end < 0:
            return None
        return Block(end + len(closer), python_calls(text[len(opener) : end].strip(), tools))


def _bracket_end(text: str) -> int | None:
    """The end of a Python list at the beginning of a text; None if it is not complete."""
    depth, quote, escaped = 0, "", False
    for at, c in enumerate(text):
        if quote:
            if escaped:
                escaped = False
            elif c == "\\":
                escaped = True
            elif c == quote:
                quote = ""
        elif c in "\"'":
            quote = c
        elif c in "[({":
            depth += 1
        elif c in "])}":
            depth -= 1
            if depth == 0:
                return at + 1
    return None


def python_calls(text: str, tools: Schemas) -> list[tuple[str, Any]]:
    """Calls with literal keyword arguments: one per line, or a list. Raises `NotACall`."""
    try:
        body = ast.parse(text).body
        found: list[ast.expr] = []
        for statement in body:
            if not isinstance(statement, ast.Expr):
                raise NotACall
            value = statement.value
            if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "print":
                value = value.args[0]
            found += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        calls = []
        for call in found:
            if not isinstance(call, ast.Call) or call.args:
                raise NotACall
            name = known(ast.unparse(call.func), tools)
            arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg}
            json.dumps(arguments)
            calls.append((name, arguments))
    except (ValueError, SyntaxError, TypeError, IndexError, RecursionError, MemoryError) as error:
        raise NotACall from error
    if not calls:
        raise NotACall
    return calls
