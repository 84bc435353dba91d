"""From a request's body to requests for the engine: limits, prompts, sampling, grammars, methods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outstride import registry
from outstride.core.structured_output import OutputFormat
from outstride.models.tokenizer import Tokenizer
from outstride.serve import tools
from outstride.serve.chat_prompts import chat_text
from outstride.serve.grammars import check_size, output_format
from outstride.serve.ipc import EngineRequest, Handshake
from outstride.serve.parsing.answer import AnswerFormats, AnswerParser
from outstride.serve.protocol import (
    ChatBody,
    CompletionBody,
    DecodingOptions,
    SamplingBody,
)
from outstride.serve.sampling_fields import method_spec, sampling_params
from outstride.serve.settings import APIError, ServeSettings, invalid

LONG_TEXT = 4096
"""Characters: longer texts are encoded on another thread than the event loop's."""


@dataclass(slots=True)
class ParsedRequest:
    """A valid request: what the engine gets, and what the answer contains."""

    engine_requests: list[EngineRequest]
    """One per prompt."""
    samples: int
    stream: bool
    include_usage: bool
    """Whether a stream ends with its usage."""
    continuous_usage: bool
    """Whether each chunk of a stream has the usage so far."""
    trace: bool
    graphs: bool
    deadline: float
    chat: bool
    answer_parser: Callable[[], AnswerParser | None] = lambda: None
    """Makes a parser for each answer; without one, an answer is all content."""
    shape_param: str = ""
    """The field that asks for structured output."""
    logprobs: int | None = None
    echo: list[str] | None = None
    """Texts of the prompts, to be repeated before the answers."""
    prompt_only: bool = False
    """No tokens were asked for: the one token that the engine generates is dropped."""
    prompt_logprobs: int | None = None
    adapter: str = ""
    """The LoRA adapter that the request names as its model."""
    return_token_ids: bool = False


class RequestParser:
    """Checks bodies and makes requests of them. Knows the model by its engine's handshake."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._tokenizer: Tokenizer | None = None
        self._handshake: Handshake | None = None
        self.formats = AnswerFormats.choose("", settings.tool_parser, settings.reasoning_parser)
        registry.discover()

    def on_ready(self, handshake: Handshake, tokenizer: Tokenizer) -> None:
        """Takes the handshake of a new engine."""
        self._tokenizer, self._handshake = tokenizer, handshake
        self.formats = AnswerFormats.choose(
            tokenizer.chat_template or "",
            self._settings.tool_parser,
            self._settings.reasoning_parser,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise APIError(503, "the model is being loaded", kind="server_error", code="not_ready")
        return self._tokenizer

    @property
    def handshake(self) -> Handshake:
        if self._handshake is None:
            raise APIError(503, "the model is being loaded", kind="server_error", code="not_ready")
        return self._handshake

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model."""
        return self._settings.names or (self._settings.engine.model,)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters, which requests name as their model."""
        return tuple(self._settings.engine.adapters)

    def fingerprint_of(self, adapter: str) -> str:
        """The fingerprint of requests with this LoRA adapter; empty: without one."""
        return self.handshake.adapters[adapter] if adapter else self.handshake.fingerprint

    # --- requests -----------------------------------------------------------------------------------

    async def chat(self, body: ChatBody, salt: str) -> ParsedRequest:
        """A request to /v1/chat/completions; `salt` separates the tenants of the prefix cache."""
        self._check(body)
        offered = tools.offered(body)
        must_call = tools.must_call(body)
        shape, shape_param = output_format(body, self._settings.bounds.schema_bytes)
        if must_call:
            if shape is not None:
                raise invalid(
                    "response_format and a required tool call exclude each other", "tool_choice"
                )
            shape_param = "tools"
            shape = tools.call_format(offered)
            check_size(shape, shape_param, self._settings.bounds.schema_bytes)
        prompt = chat_text(
            self.tokenizer,
            body.messages,
            offered,
            generation=body.add_generation_prompt,
            continue_final=bool(body.continue_final_message),
            variables=body.chat_template_kwargs,
            reasoning_effort=body.reasoning_effort,
        )
        ids = await self.encode(prompt, add_special=False)
        bound = body.max_completion_tokens or body.max_tokens or self._settings.max_tokens
        logprobs = None
        if body.logprobs:
            logprobs = self._logprobs(body.top_logprobs or 0, "top_logprobs")
        elif body.top_logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        constrained, formats = shape is not None, self.formats
        visible = () if constrained else formats.markers(bool(offered))
        parsed = self._parsed(
            body, [ids], bound, shape, logprobs, body.prompt_logprobs, salt, visible
        )
        parsed.chat, parsed.shape_param = True, shape_param
        schemas = {tool.function.name: tool.function.parameters or {} for tool in offered}
        if offered or formats.reasoning != "none":
            parsed.answer_parser = lambda: formats.parser(prompt, schemas, constrained)
        return parsed

    async def completion(self, body: CompletionBody, salt: str) -> ParsedRequest:
        """A request to /v1/completions."""
        self._check(body)
        if body.suffix:
            raise invalid("suffix is not supported", "suffix")
        if body.best_of not in (None, body.n or 1):
            raise invalid("best_of is not supported; set n", "best_of")
        prompts = await self._prompts(body.prompt)
        logprobs = self._logprobs(body.logprobs, "logprobs")
        echoed = bool(body.echo)
        about_prompt = body.prompt_logprobs
        if echoed and logprobs is not None:
            about_prompt = max(logprobs, about_prompt or 0)
        bound = 16 if body.max_tokens is None else body.max_tokens
        if bound == 0 and not echoed and about_prompt is None:
            raise invalid(
                "max_tokens must be at least 1, unless echo or prompt_logprobs is set", "max_tokens"
            )
        shape, shape_param = output_format(body, self._settings.bounds.schema_bytes)
        parsed = self._parsed(body, prompts, max(bound, 1), shape, logprobs, about_prompt, salt)
        parsed.shape_param = shape_param
        parsed.prompt_only = bound == 0
        if echoed:
            parsed.echo = [
                self.tokenizer.decode(request.tokens, skip_special=False)
                for request in parsed.engine_requests
            ]
        return parsed

    def _parsed(
        self,
        body: SamplingBody,
        prompts: list[list[int]],
        bound: int,
        shape: OutputFormat | None,
        logprobs: int | None,
        about_prompt: int | None,
        salt: str,
        visible: tuple[str, ...] = (),
    ) -> ParsedRequest:
        own = body.outstride or DecodingOptions()
        handshake, limits = self.handshake, self._settings.bounds
        prompts = self._truncated(body, prompts, bound)
        bound = min(bound, handshake.context - max(map(len, prompts)))
        tokenizer, size = self.tokenizer, handshake.vocab_size
        params = sampling_params(
            body,
            tokenizer,
            size,
            bound,
            logprobs,
            about_prompt=about_prompt,
            visible=visible,
            adapter=self._adapter(body),
        )
        method = method_spec(own, self._settings)
        engine_requests = [
            EngineRequest(
                id=0,
                tokens=ids,
                params=params,
                method=method,
                salt=salt + (body.cache_salt or ""),
                priority=body.priority or 0,
                output_format=shape,
                trace=own.trace,
                graphs=own.graphs,
                streaming=bool(body.stream),
                return_token_ids=bool(body.return_token_ids),
            )
            for ids in prompts
        ]
        return ParsedRequest(
            engine_requests=engine_requests,
            samples=params.n,
            stream=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            continuous_usage=bool(
                body.stream_options and body.stream_options.continuous_usage_stats
            ),
            trace=own.trace,
            graphs=own.graphs,
            deadline=min(own.deadline or limits.deadline, limits.deadline),
            chat=False,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            adapter=params.adapter,
            return_token_ids=bool(body.return_token_ids),
        )

    # --- parts --------------------------------------------------------------------------------------

    def _check(self, body: SamplingBody) -> None:
        """Limits that no type expresses."""
        limits = self._settings.bounds
        known = (*self.names, *self.adapters)
        if body.model is not None and body.model not in known:
            raise APIError(
                404,
                f"this server has no model {body.model!r}; it has {', '.join(known)}",
                param="model",
                code="model_not_found",
            )
        if (body.n or 1) > limits.samples:
            raise invalid(f"n may be {limits.samples} at most", "n")
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if len(stops) > limits.stops or any(len(stop) > limits.stop_length for stop in stops):
            raise invalid(
                f"there may be {limits.stops} stop strings of {limits.stop_length} characters",
                "stop",
            )
        words = body.bad_words or ()
        if len(words) > limits.bad_words or any(len(w) > limits.stop_length for w in words):
            raise invalid(
                f"there may be {limits.bad_words} bad words of {limits.stop_length} characters",
                "bad_words",
            )
        if len(body.logit_bias or ()) > limits.biases:
            raise invalid(f"logit_bias may name {limits.biases} tokens", "logit_bias")
        self._logprobs(body.prompt_logprobs, "prompt_logprobs")
        if body.outstride and body.outstride.graphs and not body.stream:
            raise invalid("graphs come pass by pass: set stream to true", "outstride")

    def _truncated(
        self, body: SamplingBody, prompts: list[list[int]], bound: int
    ) -> list[list[int]]:
        """The prompts, or their last tokens if the body asks for them; raises if one is too long."""
        keep, context = body.truncate_prompt_tokens, self.handshake.context
        if keep == 0:
            raise invalid(
                "truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens"
            )
        if keep is not None:
            keep = keep if keep > 0 else max(context - bound, 1)
            prompts = [ids[-keep:] for ids in prompts]
        longest, limit = max(map(len, prompts)), self._settings.bounds.prompt_tokens
        if longest > min(limit, context - 1):
            raise APIError(
                400,
                f"the prompt has {longest} tokens; it may have {min(limit, context - 1)}",
                param="messages" if isinstance(body, ChatBody) else "prompt",
                code="context_length_exceeded",
            )
        return prompts

    def _logprobs(self, count: int | None, param: str) -> int | None:
        limit = self._settings.bounds.logprobs
        if count is not None and count > limit:
            raise invalid(f"{param} may be {limit} at most", param)
        return count

    def _adapter(self, body: SamplingBody) -> str:
        """The LoRA adapter that a request names as its model; empty: it names none."""
        return body.model if body.model is not None and body.model in self.adapters else ""

    async def _prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, str):
            found = [await self.encode(prompt)]
        elif isinstance(prompt[0], int):
            found = [prompt]
        else:
            limit = self._settings.bounds.prompts
            if len(prompt) > limit:
                raise invalid(f"there may be {limit} prompts in a request", "prompt")
            found = [await self.encode(p) if isinstance(p, str) else p for p in prompt]
        width = self.handshake.vocab_size
        for ids in found:
            if not ids:
                raise invalid("a prompt is empty", "prompt")
            if max(ids) >= width:
                raise invalid(f"a token id is outside the vocabulary of {width}", "prompt")
        return found

    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text; a long one is encoded on another thread."""
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special)
        return self.tokenizer.encode(text, add_special)
