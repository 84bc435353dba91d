"""Structured output in the HTTP process: response formats become grammars, and wrong ones a 400."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

from outstride.core.structured_output import OutputFormat
from outstride.errors import RequestError
from outstride.grammar.matcher import GrammarCompiler
from outstride.models.tokenizer import Tokenizer
from outstride.serve.protocol import ResponseFormat
from outstride.serve.settings import APIError, invalid


class GrammarChecker:
    """Compiles grammars before a request is admitted, on a thread of its own.

    The event loop goes on meanwhile. There is one thread because a `GrammarCompiler` is used by one
    thread at a time; the engine process compiles the grammar again for its own use.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._vocabulary: tuple[Tokenizer, int] | None = None
        self._compiler: tuple[Tokenizer, GrammarCompiler] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def set_vocabulary(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """The tokenizer of the model, which grammars are compiled for."""
        self._vocabulary = tokenizer, vocab_size

    async def output_format(self, wanted: ResponseFormat | None) -> OutputFormat | None:
        """What `response_format` asks for; None for plain text."""
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return OutputFormat("json_object")
        if wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                raise invalid("response_format lacks json_schema.schema", "response_format")
            text = json.dumps(wanted.json_schema.schema_)
        elif wanted.type == "regex":
            text = wanted.regex or ""
        else:
            text = wanted.grammar or ""
        if not text:
            field = "regex" if wanted.type == "regex" else "grammar"
            raise invalid(f"response_format of type {wanted.type} lacks {field}", "response_format")
        return await self.check(OutputFormat(wanted.type, text), "response_format")

    async def check(self, wanted: OutputFormat, param: str) -> OutputFormat:
        """The same format, once its grammar has been compiled; raises a 400 if it cannot be."""
        if len(wanted.text) > self._max_bytes:
            raise invalid(f"a schema or grammar may have {self._max_bytes} bytes", param)
        if self._vocabulary is None:
            raise APIError(503, "the model is being loaded", kind="server_error", code="not_ready")
        tokenizer, vocab_size = self._vocabulary

        def compile_grammar() -> None:
            if self._compiler is None or self._compiler[0] is not tokenizer:
                self._compiler = tokenizer, GrammarCompiler(tokenizer, vocab_size)
            self._compiler[1].check(wanted)

        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, compile_grammar)
        except RequestError as error:
            raise invalid(str(error), param) from error
        return wanted
