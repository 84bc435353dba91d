"""`GrammarCompiler` compiles output formats; a `GrammarMatcher` gives the allowed tokens.

llguidance does the parsing. Here its matchers become pure: a query has a path of tokens, and the
result depends on that path alone, so that commit and rollback need no bookkeeping. Matchers are cached
by path, because the next query is mostly about the same path with one more token.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from llguidance import (
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
    StructTag,
    TokenizerWrapper,
    grammar_from,
)

from outstride.core.graph import BoolArray
from outstride.core.structured_output import KINDS, OutputFormat
from outstride.errors import InvalidGrammar
from outstride.grammar.closing import CompletionSearch

Bits: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
MAX_STATES = 256
"""Paths that a matcher caches."""


class Vocabulary(Protocol):
    """The methods of a tokenizer that are needed."""

    eos_ids: frozenset[int]

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


class _TokenizerAdapter:
    """A vocabulary in the form that llguidance takes."""

    def __init__(self, vocabulary: Vocabulary, ends: Sequence[int]) -> None:
        known = range(vocabulary.vocab_size)
        self._vocabulary = vocabulary
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.tokens = [vocabulary.token_bytes(token) for token in known]
        self.special_token_ids = [token for token in known if vocabulary.is_special(token)]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._vocabulary.encode(text, add_special=False)


@dataclass(slots=True)
class _State:
    """The matcher after one path, with its cached results."""

    matcher: LLMatcher
    bits: Bits | None = None
    forced: tuple[int, ...] | None = None


class GrammarCompiler:
    """Compiles output formats for one vocabulary, on any thread. The latest ones stay compiled."""

    def __init__(self, vocabulary: Vocabulary, width: int | None = None, keep: int = 64) -> None:
        ends = sorted(vocabulary.eos_ids)
        if not ends:
            raise InvalidGrammar("this model has no end-of-text token; structured output needs one")
        self._ends = ends
        self._width = max(width or 0, vocabulary.vocab_size)
        adapter = _TokenizerAdapter(vocabulary, ends)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(adapter), n_vocab=self._width, eos_token=list(ends)
        )
        self._completions = CompletionSearch(adapter.tokens, ends)
        self._keep = keep
        self._compiled: OrderedDict[OutputFormat, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        """Guards the cache. It is not held while a grammar is compiled."""

    def check(self, shape: OutputFormat) -> None:
        """Raises InvalidGrammar, with what is wrong or not supported."""
        self._matcher(shape)

    def compile(self, shape: OutputFormat, max_tokens: int | None = None) -> GrammarMatcher:
        """A matcher for one request; with `max_tokens`, answers end within that many tokens.

        A format that no answer of that length fits is followed until the bound cuts it.
        """
        return GrammarMatcher(
            self._matcher(shape), self._ends, self._width, self._completions, max_tokens
        )

    def _matcher(self, shape: OutputFormat) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(shape)
        if found is None:
            found = LLMatcher(
                self._tokenizer,
                _grammar(shape),
                log_level=0,
                limits=LLParserLimits(max_grammar_size=200_000),
            )
            if message := found.get_error():
                raise InvalidGrammar(f"the {shape.kind} cannot be followed: {_summary(message)}")
        with self._lock:
            self._compiled[shape] = found
            self._compiled.move_to_end(shape)
            while len(self._compiled) > self._keep:
                self._compiled.popitem(last=False)
        return found


def _grammar(shape: OutputFormat) -> str:
    """The grammar in llguidance's notation. JSON has no whitespace: it could go on for ever."""
    compact: Any = {"whitespace_flexible": False}
    try:
        if shape.kind == "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=compact)
        if shape.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(json.loads(shape.text), overrides=compact)
        if shape.kind == "regex":
            return LLMatcher.grammar_from_regex(shape.text)
        if shape.kind == "ebnf":
            return grammar_from("ebnf", shape.text)
        if shape.kind == "lark":
            return LLMatcher.grammar_from_lark(shape.text)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"the {shape.kind} cannot be read: {_summary(str(error))}") from error
    raise InvalidGrammar(f"unknown kind {shape.kind!r}; known are {', '.join(KINDS)}")


def structural_tags(tags: Sequence[tuple[str, str, Any, str]]) -> str:
    """A Lark grammar of free text with structures: trigger, begin, JSON schema and end of each."""
    found = [
        StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)
        for trigger, begin, schema, end in tags
    ]
    return StructTag.to_grammar(found, assume_special=False)


def _summary(message: str) -> str:
    """The useful part of an error message, on one line."""
    return " ".join(message.split("<state>")[0].split())[:500]


@dataclass(slots=True)
class GrammarMatcher:
    """The tokens that one request's format allows, for all its samples. It is a `Grammar`."""

    root: LLMatcher
    ends: Collection[int]
    width: int
    completions: CompletionSearch
    max_tokens: int | None = None
    _states: OrderedDict[tuple[int, ...], _State] = field(default_factory=OrderedDict)
    _margin: int = -1
    """How many tokens before the bound completions are searched; -1: not known yet."""

    def allowed(self, output: Sequence[int]) -> BoolArray | None:
        """The mask after an output; None after one that does not fit the format, as in drafts."""
        path = tuple(output)
        state = self._at(path)
        if state is None:
            return None
        if state.bits is None:
            state.bits = self._mask(path, state.matcher)
        mask: BoolArray = np.unpackbits(state.bits, count=self.width, bitorder="little").view(
            np.bool_
        )
        return mask

    def allows(self, output: Sequence[int], token: int) -> bool:
        """Whether one token may follow."""
        mask = self.allowed(output)
        return mask is not None and 0 <= token < len(mask) and bool(mask[token])

    def jump_forward(self, output: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the text that must follow. Other tokens may only encode the same text."""
        path = tuple(output)
        state = self._at(path)
        if state is None or state.matcher.is_stopped():
            return ()
        if state.forced is None:
            state.forced = tuple(state.matcher.compute_ff_tokens())
        return state.forced

    def _at(self, path: tuple[int, ...]) -> _State | None:
        """The state after a path, continued from the longest cached part of it."""
        states = self._states
        found = states.get(path)
        if found is not None:
            states.move_to_end(path)
            return found
        known = len(path) - 1
        while known > 0 and path[:known] not in states:
            known -= 1
        start = states[path[:known]].matcher if known > 0 else self.root
        matcher = start.deep_copy()
        if known < len(path) and not self._follow(matcher, path[max(known, 0) :]):
            return None
        states[path] = found = _State(matcher)
        while len(states) > MAX_STATES:
            states.popitem(last=False)
        return found

    def _follow(self, matcher: LLMatcher, tokens: Sequence[int]) -> bool:
        for token in tokens:
            if matcher.is_stopped():
                if token not in self.ends:
                    return False
            elif matcher.try_consume_tokens([token]) != 1:
                return False
        return True

    def _mask(self, path: tuple[int, ...], matcher: LLMatcher) -> Bits:
        """The mask as bits; near the bound, only the next token of a completion."""
        if self.max_tokens is not None and not matcher.is_stopped():
            if self._margin < 0:
                self._margin = self.completions.margin(self.root)
            left = self.max_tokens - len(path)
            if left <= self._margin and (only := self.completions.next(matcher, left)) is not None:
                bits = np.zeros((self.width + 7) // 8, dtype=np.uint8)
                bits[only // 8] = 1 << only % 8
                return bits
        return np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
