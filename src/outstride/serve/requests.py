"""From a request's body to requests for the engine: limits, prompts, sampling, grammars, methods."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outstride import registry
from outstride.core.contracts import Exactness
from outstride.core.params import SamplingParams
from outstride.core.structured_output import OutputFormat
from outstride.errors import RequestError
from outstride.models.tokenizer import Tokenizer
from outstride.serve import tools
from outstride.serve.grammars import GrammarChecker
from outstride.serve.ipc import EngineRequest, Handshake
from outstride.serve.protocol import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DecodingOptions,
    SamplingBody,
    Tool,
)
from outstride.serve.settings import APIError, ServeSettings, invalid

LONG_TEXT = 4096
"""Characters: longer texts are encoded on another thread than the event loop's."""
MAX_OPTION = 256
"""A client may set a method's option to this number, or to four times its default if that is more."""


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
    tools: list[Tool] = field(default_factory=list)
    must_call: bool = False
    logprobs: int | None = None
    echo: list[str] | None = None
    """Texts of the prompts, to be repeated before the answers."""
    prompt_only: bool = False
    """No tokens were asked for: the one token that the engine generates is dropped."""
    prompt_logprobs: int | None = None


class RequestParser:
    """Checks bodies and makes requests of them. Knows the model by its engine's handshake."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._tokenizer: Tokenizer | None = None
        self._handshake: Handshake | None = None
        self._grammars = GrammarChecker(settings.bounds.schema_bytes)
        registry.discover()

    def on_ready(self, handshake: Handshake, tokenizer: Tokenizer) -> None:
        """Takes the handshake of a new engine."""
        self._tokenizer, self._handshake = tokenizer, handshake
        self._grammars.set_vocabulary(tokenizer, handshake.vocab_size)

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

    # --- requests -----------------------------------------------------------------------------------

    async def chat(self, body: ChatBody, salt: str) -> ParsedRequest:
        """A request to /v1/chat/completions; `salt` separates the tenants of the prefix cache."""
        self._check(body)
        offered = tools.offered(body)
        must_call = tools.must_call(body)
        output_format = await self._grammars.output_format(body.response_format)
        if must_call:
            if output_format is not None:
                raise invalid(
                    "response_format and a required tool call exclude each other", "tool_choice"
                )
            output_format = await self._grammars.check(tools.call_format(offered), "tools")
        ids = await self._encode_chat(body.messages, offered)
        bound = body.max_completion_tokens or body.max_tokens or self._settings.max_tokens
        logprobs = None
        if body.logprobs:
            logprobs = self._logprobs(body.top_logprobs or 0, "top_logprobs")
        elif body.top_logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        parsed = self._parsed(
            body, [ids], bound, output_format, logprobs, body.prompt_logprobs, salt
        )
        parsed.chat, parsed.tools, parsed.must_call = True, offered, must_call
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
        output_format = await self._grammars.output_format(body.response_format)
        parsed = self._parsed(
            body, prompts, max(bound, 1), output_format, logprobs, about_prompt, salt
        )
        parsed.prompt_only = bound == 0
        if echoed:
            parsed.echo = [self.tokenizer.decode(ids, skip_special=False) for ids in prompts]
        return parsed

    def _parsed(
        self,
        body: SamplingBody,
        prompts: list[list[int]],
        bound: int,
        output_format: OutputFormat | None,
        logprobs: int | None,
        about_prompt: int | None,
        salt: str,
    ) -> ParsedRequest:
        own = body.outstride or DecodingOptions()
        handshake, limits = self.handshake, self._settings.bounds
        longest = max(map(len, prompts))
        if longest > min(limits.prompt_tokens, handshake.context - 1):
            raise APIError(
                400,
                f"the prompt has {longest} tokens; it may have "
                f"{min(limits.prompt_tokens, handshake.context - 1)}",
                param="messages" if isinstance(body, ChatBody) else "prompt",
                code="context_length_exceeded",
            )
        bound = min(bound, handshake.context - longest)
        params = self._params(body, bound, logprobs, about_prompt)
        method = self._method(own)
        engine_requests = [
            EngineRequest(
                id=0,
                tokens=ids,
                params=params,
                method=method,
                salt=salt + (body.cache_salt or ""),
                priority=body.priority or 0,
                output_format=output_format,
                trace=own.trace,
                graphs=own.graphs,
                streaming=bool(body.stream),
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
        )

    # --- parts --------------------------------------------------------------------------------------

    def _check(self, body: SamplingBody) -> None:
        """Limits that no type expresses."""
        limits = self._settings.bounds
        if body.model is not None and body.model not in self.names:
            raise APIError(
                404,
                f"this server has no model {body.model!r}; it has {', '.join(self.names)}",
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
        if len(body.logit_bias or ()) > limits.biases:
            raise invalid(f"logit_bias may name {limits.biases} tokens", "logit_bias")
        self._logprobs(body.prompt_logprobs, "prompt_logprobs")
        if body.outstride and body.outstride.graphs and not body.stream:
            raise invalid("graphs come pass by pass: set stream to true", "outstride")

    def _logprobs(self, count: int | None, param: str) -> int | None:
        limit = self._settings.bounds.logprobs
        if count is not None and count > limit:
            raise invalid(f"{param} may be {limit} at most", param)
        return count

    def _params(
        self, body: SamplingBody, bound: int, logprobs: int | None, about_prompt: int | None
    ) -> SamplingParams:
        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        try:
            bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        except ValueError as error:
            raise invalid("logit_bias maps token ids to numbers", "logit_bias") from error
        width = self.handshake.vocab_size
        for name, ids in (("logit_bias", bias), ("stop_token_ids", body.stop_token_ids or ())):
            if any(not 0 <= token < width for token in ids):
                raise invalid(f"{name} names a token outside the vocabulary of {width}", name)
        min_tokens = min(given(body.min_tokens, 0), bound)
        try:
            return SamplingParams(
                temperature=float(given(body.temperature, 1.0)),
                top_k=max(given(body.top_k, 0), 0),
                top_p=float(given(body.top_p, 1.0)),
                min_p=float(given(body.min_p, 0.0)),
                repetition_penalty=float(given(body.repetition_penalty, 1.0)),
                presence_penalty=float(given(body.presence_penalty, 0.0)),
                frequency_penalty=float(given(body.frequency_penalty, 0.0)),
                logit_bias=bias,
                seed=body.seed,
                stop=body.stop or (),
                stop_token_ids=body.stop_token_ids or (),
                max_tokens=bound,
                min_tokens=min_tokens,
                ignore_eos=bool(body.ignore_eos),
                n=body.n or 1,
                logprobs=logprobs,
                prompt_logprobs=about_prompt,
            )
        except RequestError as error:
            raise invalid(str(error)) from error

    def _method(self, own: DecodingOptions) -> str:
        """The method in its usual notation: `name:key=value,…`."""
        spec = own.method or self._settings.method
        for key, value in (own.model_extra or {}).items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if not isinstance(value, bool | int | float | str) or set(text) & set(",=:"):
                raise invalid(
                    f"outstride.{key} must be a number, a string or a boolean", "outstride"
                )
            spec += f"{',' if ':' in spec else ':'}{key}={text}"
        try:
            entry, options = registry.parse(spec)
            _check_sizes(entry, options)
            if "model" not in {option.name for option in entry.options}:
                registry.build(spec)
        except RequestError as error:
            raise invalid(str(error), "outstride") from error
        if spec != self._settings.method and options.get("from", "none") not in ("", "none"):
            raise invalid(
                "a request cannot choose a draft head with `from`; the server's --method can",
                "outstride",
            )
        model = options.get("model")
        if model is not None and model not in self._settings.engine.draft_models:
            raise invalid(
                f"this server has no draft model {model!r}; it is started with --draft-model",
                "outstride",
            )
        if own.method is None and entry.exactness is not Exactness.EXACT:
            raise invalid(
                f"method {entry.name} may change the text: name it to use it", "outstride"
            )
        return spec

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

    async def _encode_chat(self, messages: list[ChatMessage], offered: list[Tool]) -> list[int]:
        return await self.encode(self.chat_text(messages, offered), add_special=False)

    def chat_text(
        self, messages: list[ChatMessage], offered: list[Tool], generation: bool = True
    ) -> str:
        """A conversation in the model's own format."""
        tokenizer, extra = self.tokenizer, {}
        if "tools" in (tokenizer.chat_template or ""):
            plain = [
                {**message.model_dump(exclude_none=True), "content": tools.text_of(message)}
                for message in messages
            ]
            if offered:
                extra["tools"] = [tool.model_dump(exclude_none=True) for tool in offered]
        else:
            plain = [tools.as_plain_message(message) for message in messages]
            if offered:
                plain = tools.with_tool_prompt(plain, offered)
        try:
            return tokenizer.chat(plain, generation, **extra)
        except RequestError as error:
            raise invalid(str(error), "messages") from error


def _check_sizes(entry: registry.MethodEntry, options: Mapping[str, Any]) -> None:
    """Bounds the numbers that a client may set a method's options to."""
    for option in entry.options:
        if option.type is int and option.name in options:
            limit = max(4 * (option.default or 0), MAX_OPTION)
            if options[option.name] > limit:
                raise invalid(f"outstride.{option.name} may be {limit} at most", "outstride")
