"""From a request's body to jobs for the engine: limits, prompts, parameters, shapes, methods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outstride import registry
from outstride.core.contracts import Exactness
from outstride.core.params import SamplingParams
from outstride.core.shape import Shape
from outstride.errors import RequestError
from outstride.grammar.guide import Guides
from outstride.models.tokenizer import Tokenizer
from outstride.serve import tools
from outstride.serve.bodies import (
    ChatBody,
    CompletionBody,
    Message,
    Own,
    ResponseFormat,
    Sampled,
    Tool,
)
from outstride.serve.settings import Refusal, ServeSettings, invalid
from outstride.serve.wire import Hello, Job

LONG = 4096
"""Characters from which on a text is encoded beside the event loop."""
SIZE = 256
"""The largest number that a client may set an option to, if four times its default is not more."""


@dataclass(slots=True)
class Order:
    """A request that can be carried out."""

    jobs: list[Job]
    samples: int
    stream: bool
    usage: bool
    """Whether a stream ends with its usage."""
    trace: bool
    graphs: bool
    deadline: float
    chat: bool
    tools: list[Tool] = field(default_factory=list)
    must_call: bool = False
    logprobs: int | None = None
    echo: list[str] | None = None
    """Texts of the prompts, to be repeated before the answers."""
    silent: bool = False
    """No tokens were asked for: what the engine says beyond the prompt is dropped."""
    prompt_logprobs: int | None = None


class Clerk:
    """Makes orders. Knows the model by what its engine said of it."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._tokenizer: Tokenizer | None = None
        self._hello: Hello | None = None
        self._guides: Guides | None = None
        registry.discover()

    def meet(self, hello: Hello, tokenizer: Tokenizer) -> None:
        """Takes note of an engine."""
        if tokenizer is not self._tokenizer:
            self._tokenizer, self._guides = tokenizer, None
        self._hello = hello

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise Refusal(503, "the model is being loaded", kind="server_error", code="not_ready")
        return self._tokenizer

    @property
    def hello(self) -> Hello:
        if self._hello is None:
            raise Refusal(503, "the model is being loaded", kind="server_error", code="not_ready")
        return self._hello

    @property
    def names(self) -> tuple[str, ...]:
        """What the model is called."""
        return self._settings.names or (self._settings.engine.model,)

    # --- orders -------------------------------------------------------------------------------------

    async def chat(self, body: ChatBody, salt: str) -> Order:
        """An order for /v1/chat/completions."""
        self._check(body)
        offered = tools.offered(body)
        must_call = tools.must_call(body)
        shape = self._shape(body.response_format)
        if must_call:
            if shape is not None:
                raise invalid("response_format cannot go with a required tool call", "tool_choice")
            shape = self._checked(tools.shape_of(offered), "tools")
        ids = await self._encode_chat(body.messages, offered)
        bound = body.max_completion_tokens or body.max_tokens or self._settings.max_tokens
        logprobs = None
        if body.logprobs:
            logprobs = self._logprobs(body.top_logprobs or 0, "top_logprobs")
        elif body.top_logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        order = self._order(body, [ids], bound, shape, logprobs, body.prompt_logprobs, salt)
        order.chat, order.tools, order.must_call = True, offered, must_call
        return order

    async def completion(self, body: CompletionBody, salt: str) -> Order:
        """An order for /v1/completions."""
        self._check(body)
        if body.suffix:
            raise invalid("suffix is not supported", "suffix")
        if body.best_of not in (None, body.n or 1):
            raise invalid("best_of is not supported; ask for n answers", "best_of")
        prompts = await self._prompts(body.prompt)
        logprobs = self._logprobs(body.logprobs, "logprobs")
        echoed = bool(body.echo)
        about_prompt = body.prompt_logprobs
        if echoed and logprobs is not None:
            about_prompt = max(logprobs, about_prompt or 0)
        bound = 16 if body.max_tokens is None else body.max_tokens
        shape = self._shape(body.response_format)
        order = self._order(body, prompts, max(bound, 1), shape, logprobs, about_prompt, salt)
        order.silent = bound == 0
        if echoed:
            order.echo = [self.tokenizer.decode(ids, skip_special=False) for ids in prompts]
        return order

    def _order(
        self,
        body: Sampled,
        prompts: list[list[int]],
        bound: int,
        shape: Shape | None,
        logprobs: int | None,
        about_prompt: int | None,
        salt: str,
    ) -> Order:
        own = body.outstride or Own()
        hello, limits = self.hello, self._settings.bounds
        longest = max(map(len, prompts))
        if longest > min(limits.prompt_tokens, hello.context - 1):
            raise Refusal(
                400,
                f"the prompt has {longest} tokens; it may have "
                f"{min(limits.prompt_tokens, hello.context - 1)}",
                param="messages" if isinstance(body, ChatBody) else "prompt",
                code="context_length_exceeded",
            )
        bound = min(bound, hello.context - longest)
        params = self._params(body, bound, logprobs, about_prompt)
        method = self._method(own)
        jobs = [
            Job(
                id=0,
                tokens=ids,
                params=params,
                method=method,
                salt=salt + (body.cache_salt or ""),
                priority=body.priority or 0,
                shape=shape,
                trace=own.trace,
                graphs=own.graphs,
                watched=bool(body.stream),
            )
            for ids in prompts
        ]
        return Order(
            jobs=jobs,
            samples=params.n,
            stream=bool(body.stream),
            usage=bool(body.stream_options and body.stream_options.include_usage),
            trace=own.trace,
            graphs=own.graphs,
            deadline=min(own.deadline or limits.deadline, limits.deadline),
            chat=False,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )

    # --- parts --------------------------------------------------------------------------------------

    def _check(self, body: Sampled) -> None:
        """Limits that no type expresses."""
        limits = self._settings.bounds
        if body.model is not None and body.model not in self.names:
            raise Refusal(
                404,
                f"there is no model {body.model!r} here; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        if (body.n or 1) > limits.samples:
            raise invalid(f"n may be {limits.samples} at the most", "n")
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
        most = self._settings.bounds.logprobs
        if count is not None and count > most:
            raise invalid(f"{param} may be {most} at the most", param)
        return count

    def _params(
        self, body: Sampled, bound: int, logprobs: int | None, about_prompt: int | None
    ) -> SamplingParams:
        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        try:
            bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        except ValueError as error:
            raise invalid("logit_bias maps token ids to numbers", "logit_bias") from error
        width = self.hello.vocab_size
        for name, ids in (("logit_bias", bias), ("stop_token_ids", body.stop_token_ids or ())):
            if any(not 0 <= token < width for token in ids):
                raise invalid(f"{name} names a token outside the vocabulary of {width}", name)
        least = min(given(body.min_tokens, 0), bound)
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
                min_tokens=least,
                ignore_eos=bool(body.ignore_eos),
                n=body.n or 1,
                logprobs=logprobs,
                prompt_logprobs=about_prompt,
            )
        except RequestError as error:
            raise invalid(str(error)) from error

    def _method(self, own: Own) -> str:
        """The method as it is written everywhere: `name:key=value,…`."""
        spec = own.method or self._settings.method
        for key, value in (own.model_extra or {}).items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if not isinstance(value, bool | int | float | str) or set(text) & set(",=:"):
                raise invalid(f"outstride.{key} must be a number, a word or a flag", "outstride")
            spec += f"{',' if ':' in spec else ':'}{key}={text}"
        try:
            entry, options = registry.parse(spec)
            _check_sizes(entry, options)
            if "model" not in {option.name for option in entry.options}:
                registry.build(spec)
        except RequestError as error:
            raise invalid(str(error), "outstride") from error
        if options.get("from", "none") not in ("", "none"):
            raise invalid("trained parts are chosen by whoever starts the server", "outstride")
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

    def _shape(self, wanted: ResponseFormat | None) -> Shape | None:
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return Shape("json_object")
        if wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                raise invalid("response_format lacks json_schema.schema", "response_format")
            text = json.dumps(wanted.json_schema.schema_)
        elif wanted.type == "regex":
            text = wanted.regex or ""
        else:
            text = wanted.grammar or ""
        if not text:
            raise invalid(
                f"response_format of type {wanted.type} lacks its text", "response_format"
            )
        return self._checked(Shape(wanted.type, text), "response_format")

    def _checked(self, shape: Shape, param: str) -> Shape:
        most = self._settings.bounds.schema_bytes
        if len(shape.text) > most:
            raise invalid(f"a schema or grammar may have {most} bytes", param)
        if self._guides is None:
            self._guides = Guides(self.tokenizer, self.hello.vocab_size)
        try:
            self._guides.check(shape)
        except RequestError as error:
            raise invalid(str(error), param) from error
        return shape

    async def _prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, str):
            found = [await self.encode(prompt)]
        elif isinstance(prompt[0], int):
            found = [prompt]
        else:
            most = self._settings.bounds.prompts
            if len(prompt) > most:
                raise invalid(f"there may be {most} prompts in a request", "prompt")
            found = [await self.encode(p) if isinstance(p, str) else p for p in prompt]
        width = self.hello.vocab_size
        for ids in found:
            if not ids:
                raise invalid("a prompt is empty", "prompt")
            if max(ids) >= width:
                raise invalid(f"a token id is outside the vocabulary of {width}", "prompt")
        return found

    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text; a long one does not hold up others meanwhile."""
        if len(text) > LONG:
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special)
        return self.tokenizer.encode(text, add_special)

    async def _encode_chat(self, messages: list[Message], offered: list[Tool]) -> list[int]:
        return await self.encode(self.chat_text(messages, offered), add_special=False)

    def chat_text(
        self, messages: list[Message], offered: list[Tool], generation: bool = True
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
            plain = [tools.spoken(message) for message in messages]
            if offered:
                plain = tools.told(plain, offered)
        try:
            return tokenizer.chat(plain, generation, **extra)
        except RequestError as error:
            raise invalid(str(error), "messages") from error


def _check_sizes(entry: registry.Entry, options: Mapping[str, Any]) -> None:
    """Numbers that a server's owner may choose freely are bounded for its clients."""
    for option in entry.options:
        if option.type is int and option.name in options:
            most = max(4 * (option.default or 0), SIZE)
            if options[option.name] > most:
                raise invalid(f"outstride.{option.name} may be {most} at the most", "outstride")
