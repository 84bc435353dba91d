"""`AnswerParser` splits an answer into reasoning, content and calls; `AnswerFormats` chooses how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outstride.serve.parsing import harmony
from outstride.serve.parsing.json_formats import (
    DeepSeek,
    Granite,
    Hermes,
    Llama3,
    Mistral,
    Phi4,
)
from outstride.serve.parsing.reasoning import (
    FORMATS,
    ReasoningFormat,
    ReasoningSplitter,
    opened_in_prompt,
)
from outstride.serve.parsing.tagged_formats import GLM, Gemma, Pythonic, QwenCoder
from outstride.serve.parsing.tool_format import CONTENT, Part, Schemas, ToolFormat, ToolScanner

HARMONY, AUTO, NONE = "harmony", "auto", "none"
TOOL_FORMATS: dict[str, ToolFormat] = {
    found.name: found
    for found in (
        *(Hermes(), Llama3(), Mistral(), DeepSeek(), Granite(), Phi4()),
        *(GLM(), QwenCoder(), Gemma(), Pythonic()),
    )
}
TOOL_PARSERS = (AUTO, HARMONY, *TOOL_FORMATS)
"""The values of `--tool-parser`."""
REASONING_PARSERS = (AUTO, NONE, HARMONY, *FORMATS)
"""The values of `--reasoning-parser`."""
_TOOL_HINTS = (
    ("<|channel|>", HARMONY),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3-coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁call", "deepseek"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call>", "gemma"),
    ("<|/tool_call|>", "phi4"),
    ("functools", "phi4"),
    ("<|tool_call|>", "granite"),
    ("<function_calls>", "pythonic"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ("<|start_header_id|>", "llama3"),
    ("tool_code", "gemma"),
)
"""Texts of chat templates, and the tool format that they belong to; the first that occurs counts."""
_REASONING_HINTS = (
    ("<|channel|>", HARMONY),
    ("<seed:think>", "seed"),
    ("[THINK]", "mistral"),
    ("<|channel>", "gemma"),
    ("</think>", "think"),
    ("<think>", "think"),
)


class PartParser(Protocol):
    """What splits a text that arrives in any pieces into parts."""

    def feed(self, text: str, final: bool = False) -> list[Part]: ...


class AnswerParser:
    """First the reasoning, then the calls in what is left."""

    def __init__(self, reasoning: PartParser | None, tools: PartParser | None) -> None:
        self._reasoning, self._tools = reasoning, tools

    def feed(self, text: str, final: bool = False) -> list[Part]:
        """Takes more text; returns the parts that are certain now. `final`: this is the end."""
        parts = [Part(CONTENT, text)] if text else []
        if self._reasoning is not None:
            parts = self._reasoning.feed(text, final)
        if self._tools is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._tools.feed(part.text) if part.kind == CONTENT else [part]
        if final:
            found += self._tools.feed("", final=True)
        return found


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The formats of a model's answers."""

    tools: str
    """A key of `TOOL_FORMATS`, or harmony."""
    reasoning: str
    """A key of `reasoning.FORMATS`, harmony, or none."""

    @classmethod
    def choose(cls, template: str, tools: str = AUTO, reasoning: str = AUTO) -> AnswerFormats:
        """By the options of the server, or, where they are auto, by the chat template."""
        if tools == AUTO:
            tools = next((name for hint, name in _TOOL_HINTS if hint in template), "hermes")
        if reasoning == AUTO:
            reasoning = next((name for hint, name in _REASONING_HINTS if hint in template), NONE)
        return cls(tools, reasoning)

    def markers(self, with_tools: bool) -> tuple[str, ...]:
        """Texts that must stay in an answer, even if they are special tokens."""
        found: tuple[str, ...] = ()
        if HARMONY in (self.reasoning, self.tools if with_tools else ""):
            found += harmony.MARKERS
        if with_tools and self.tools in TOOL_FORMATS:
            found += TOOL_FORMATS[self.tools].markers
        if (splits := FORMATS.get(self.reasoning)) is not None:
            found += (splits.opener.strip(), splits.closer)
            found += (splits.opener.partition("|channel>")[0] + "|channel>",)
        return found

    def parser(self, prompt: str, tools: Schemas, constrained: bool) -> AnswerParser | None:
        """For one answer; None if it is all content.

        prompt: the rendered chat, which may have opened the reasoning. constrained: a grammar holds
        from the first token on, so the answer is content, or JSON that describes a call.
        """
        if constrained:
            return AnswerParser(None, ToolScanner(TOOL_FORMATS["hermes"], tools)) if tools else None
        if HARMONY in (self.reasoning, self.tools if tools else ""):
            return AnswerParser(harmony.HarmonyParser(tools), None)
        splits: ReasoningFormat | None = FORMATS.get(self.reasoning)
        reasoning = ReasoningSplitter(splits, opened_in_prompt(prompt, splits)) if splits else None
        scanner = ToolScanner(TOOL_FORMATS[self.tools], tools) if tools else None
        return AnswerParser(reasoning, scanner) if reasoning or scanner else None
