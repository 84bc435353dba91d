"""The Python surface: `LLM` for scripts, `AsyncLLM` for programs that await."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from outstride import registry
from outstride.core.contracts import Method
from outstride.core.holes import Holes, parse
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.core.sequence import Sequence
from outstride.engine.engine import Engine
from outstride.engine.runner import Event, Runner, Ticket
from outstride.engine.scheduler import Limits
from outstride.errors import (
    InvalidParams,
    InvalidPrompt,
    OutstrideError,
    RequestError,
    VocabularyMismatch,
)
from outstride.models.load import Loaded, load
from outstride.results import Chunk, Completion, Filled, Result, completion_of, prompt_logprobs_of

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Seq[int] | Seq[Message]
"""Raw text, token ids, or the messages of a conversation."""


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt rather than a list of them."""
    if isinstance(prompts, str) or _is_messages(prompts):
        return True
    return bool(len(prompts)) and all(isinstance(t, int) for t in prompts)


@dataclass(slots=True)
class _Collector:
    """Turns the events of one request into chunks and a result."""

    prompt: list[int]
    trace: bool
    started: float = field(default_factory=time.perf_counter)
    texts: dict[int, str] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, Completion] = field(default_factory=dict)
    leader: Sequence | None = None
    error: Exception | None = None

    def take(self, event: Event) -> Chunk | None:
        if event.error is not None:
            self.error = event.error
        if event.progress is None:
            return None
        sequence, now = event.progress.sequence, time.perf_counter()
        index = sequence.index
        if index == 0:
            self.leader = sequence
        if sequence.error is not None:
            self.error = sequence.error
        self.texts[index] = self.texts.get(index, "") + event.progress.text
        trace = None
        if self.trace:
            done = self.seen.get(index, 0)
            trace = sequence.trace[done:]
            self.seen[index] = done + len(trace)
        chunk = Chunk(event.progress.text, event.progress.tokens, index, trace)
        if sequence.painted:
            start = sequence.prompt_length
            chunk.canvas = {p - start: token for p, token in event.progress.canvas.items()}
        if event.progress.finished:
            chunk.completion = self.outputs[index] = completion_of(
                sequence,
                self.texts[index],
                now - self.started,
                (sequence.spoke or now) - self.started,
                trace=self.trace,
            )
        return chunk

    def result(self) -> Result:
        return Result(
            prompt_token_ids=self.prompt,
            outputs=[self.outputs[i] for i in sorted(self.outputs)],
            prompt_logprobs=prompt_logprobs_of(self.leader) if self.leader else None,
            error=self.error,
        )


class _Base:
    """A model, its tokenizer and an engine; what both surfaces share."""

    def __init__(
        self,
        model: str | Path | Loaded = "smollm2",
        *,
        pages: int | None = None,
        max_nodes: int = 256,
        max_sequences: int = 64,
        weights: str = "auto",
    ) -> None:
        self._pages, self._weights = pages, weights
        if not isinstance(model, Loaded):
            model = load(str(model), pages=pages, weights=weights)
        loaded = model
        if max_nodes < 1 or max_sequences < 1:
            raise InvalidParams("max_nodes and max_sequences must be at least 1")
        self.name = loaded.name
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.engine = Engine(
            {TARGET: loaded.model},
            limits=Limits(nodes=max_nodes, sequences=max_sequences),
            end_tokens=self.tokenizer.eos_ids,
            spell=self._spell,
        )
        self._runner = Runner(self.engine)
        self._methods: dict[str, Method] = {}
        registry.discover()

    def _spell(self, token: int) -> bytes:
        """What a token adds to an answer: marks of structure add nothing."""
        return b"" if self.tokenizer.is_special(token) else self.tokenizer.token_bytes(token)

    @property
    def fingerprint(self) -> str:
        """Names what the promise covers: weights, operations and build."""
        return self.model.fingerprint

    @property
    def default_method(self) -> str:
        """What requests get that name no method: the plainest that the model can be decoded with."""
        return "plain" if self.model.vision.block is None else "steps"

    def method(self, spec: str | Method | None = None) -> Method:
        """A method as written, with the model it names loaded."""
        if isinstance(spec, Method):
            return spec
        spec = spec or self.default_method
        if spec not in self._methods:
            entry, options = registry.parse(spec)
            given = {}
            if "model" in {option.name for option in entry.options}:
                given["model"] = self._draft_model(str(options["model"]))
            self._methods[spec] = registry.build(spec, **given)
        return self._methods[spec]

    def _draft_model(self, name: str) -> str:
        key = f"draft {name}"
        if key not in self.engine.passes.models:
            loaded = load(name, pages=self._pages, weights=self._weights)
            if not self.tokenizer.same_vocabulary(loaded.tokenizer):
                raise VocabularyMismatch(
                    f"{name} cannot draft for {self.name}: their vocabularies differ "
                    f"({loaded.tokenizer.vocab_size} and {self.tokenizer.vocab_size} tokens)"
                )
            self.engine.passes.add(key, loaded.model)
        return key

    def encode(self, prompt: Prompt, *, chat: bool = False) -> list[int]:
        """The token ids of a prompt: text as it stands, a conversation by the chat template."""
        if isinstance(prompt, str):
            if chat:
                prompt = [{"role": "user", "content": prompt}]
            else:
                return self.tokenizer.encode(prompt)
        if _is_messages(prompt):
            text = self.tokenizer.chat([m for m in prompt if isinstance(m, Mapping)])
            return self.tokenizer.encode(text, add_special=False)
        listed = list(prompt) if isinstance(prompt, Iterable) else [None]
        tokens = [t for t in listed if isinstance(t, int) and not isinstance(t, bool)]
        if len(tokens) != len(listed):
            raise InvalidPrompt("a prompt is text, token ids, or messages with role and content")
        return tokens

    def _ticket(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        method: str | Method | None,
        sink: Callable[[Event], None],
        *,
        chat: bool,
        trace: bool,
        salt: str,
        watched: bool,
        painted: bool = False,
    ) -> tuple[Ticket, _Collector]:
        tokens = self.encode(prompt, chat=chat)
        params = params or SamplingParams()
        ticket = Ticket(tokens, params, self.method(method), sink, salt, watched, painted=painted)
        return ticket, _Collector(tokens, trace)

    @staticmethod
    def _spread(what: str, value: Any, count: int) -> list[Any]:
        """One value for all prompts, or one for each."""
        if not isinstance(value, list | tuple):
            return [value] * count
        if len(value) != count:
            raise RequestError(f"{len(value)} values of {what} for {count} prompts")
        return list(value)

    def _requests(
        self, prompts: Any, params: Any, method: Any
    ) -> list[tuple[Prompt, SamplingParams | None, str | Method | None]]:
        listed = [prompts] if _is_one(prompts) else list(prompts)
        return list(
            zip(
                listed,
                self._spread("params", params, len(listed)),
                self._spread("method", method, len(listed)),
                strict=True,
            )
        )

    def close(self) -> None:
        """Ends the engine; what runs is cancelled."""
        self._runner.close()


class LLM(_Base):
    """A language model that answers in fewer passes.

        llm = LLM("smollm2")
        [answer] = llm.chat("Why is the sky blue?", method="ngram")
        print(answer.text, answer.stats.tokens_per_pass)

    `generate` takes text or token ids as they are, `chat` applies the model's template. Both take one
    prompt or a list, with one method and one set of parameters for all or for each, and return one
    `Result` per prompt. A single request that fails raises; in a list, it carries its `error`.
    Requests with different salts share neither cached prefixes nor what drafters remember.
    """

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        trace: bool = False,
        salt: str = "",
        _chat: bool = False,
    ) -> list[Result]:
        """Continues prompts as they stand."""
        inbox: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        requests = self._requests(prompts, params, method)
        collectors: dict[int, _Collector] = {}
        results: dict[int, Result] = {}
        tickets = []
        for i, (prompt, its_params, its_method) in enumerate(requests):
            try:
                ticket, collectors[i] = self._ticket(
                    prompt,
                    its_params,
                    its_method,
                    lambda event, i=i: inbox.put((i, event)),  # type: ignore[misc]
                    chat=_chat,
                    trace=trace,
                    salt=salt,
                    watched=False,
                )
                tickets.append(ticket)
                self._runner.submit(ticket)
            except OutstrideError as error:
                results[i] = Result([], error=error)
        try:
            while len(results) < len(requests):
                i, event = inbox.get()
                collectors[i].take(event)
                if event.done:
                    results[i] = collectors[i].result()
        except BaseException:
            for ticket in tickets:
                self._runner.cancel(ticket)
            raise
        if len(requests) == 1 and (failure := results[0].error) is not None:
            raise failure
        return [results[i] for i in range(len(requests))]

    def chat(
        self,
        messages: str | Seq[Message] | Seq[Seq[Message]] | Seq[str],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Result]:
        """Answers a conversation, or a list of them; plain text counts as one user message."""
        return self.generate(messages, params, method=method, trace=trace, salt=salt, _chat=True)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        trace: bool = False,
        salt: str = "",
        canvas: bool = False,
    ) -> Iterator[Chunk]:
        """Answers one prompt (messages: by the chat template) piece by piece, one per pass.

        With `canvas`, each pass is reported, with what a masked model has settled beyond gaps.
        """
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ticket, collector = self._ticket(
            prompt,
            params,
            method,
            inbox.put,
            chat=False,
            trace=trace,
            salt=salt,
            watched=True,
            painted=canvas,
        )
        self._runner.submit(ticket)
        done = False
        try:
            while not done:
                event = inbox.get()
                done = event.done
                chunk = collector.take(event)
                if collector.error is not None:
                    raise collector.error
                if chunk is not None and (canvas or chunk):
                    yield chunk
        finally:
            if not done:
                self._runner.cancel(ticket)

    def fill(
        self,
        text: str,
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Filled]:
        """Fills in the holes of a text, written as `<mask:8>`: one `Filled` for each of n samples.

        The holes say how long the answer is; limits, stops and ends of text play no part.
        """
        encode = self.tokenizer.encode
        holes = parse(text, lambda piece, first: encode(piece, add_special=first))
        size = holes.length - len(holes.prompt)
        params = replace(
            params or SamplingParams(), max_tokens=size, min_tokens=size, ignore_eos=True
        )
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ticket = Ticket(holes.prompt, params, self.method(method), inbox.put, salt, watched=False)
        ticket.fixed = holes.fixed
        collector, done = _Collector(holes.prompt, trace), False
        self._runner.submit(ticket)
        try:
            while not done:
                event = inbox.get()
                done = event.done
                collector.take(event)
        finally:
            if not done:
                self._runner.cancel(ticket)
        if collector.error is not None:
            raise collector.error
        return [self._filled(holes, output) for output in collector.result().outputs]

    def _filled(self, holes: Holes, output: Completion) -> Filled:
        tokens, decode = [*holes.prompt, *output.token_ids], self.tokenizer.decode
        spans = [decode([tokens[p] for p in span]) for span in holes.spans]
        return Filled(decode(tokens), spans, output)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncLLM(_Base):
    """`LLM` for programs that await. Cancelling a task or leaving a stream frees its pages."""

    async def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        trace: bool = False,
        salt: str = "",
        _chat: bool = False,
    ) -> list[Result]:
        """Continues prompts as they stand."""
        requests = self._requests(prompts, params, method)
        results = await asyncio.gather(
            *(self._collect(*request, chat=_chat, trace=trace, salt=salt) for request in requests)
        )
        if len(results) == 1 and results[0].error is not None:
            raise results[0].error
        return results

    async def chat(
        self,
        messages: str | Seq[Message] | Seq[Seq[Message]] | Seq[str],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Result]:
        """Answers a conversation, or a list of them; plain text counts as one user message."""
        return await self.generate(
            messages, params, method=method, trace=trace, salt=salt, _chat=True
        )

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> AsyncIterator[Chunk]:
        """Answers one prompt (messages: by the chat template) piece by piece, one per pass."""
        events = self._events(
            prompt, params, method, chat=False, trace=trace, salt=salt, watched=True
        )
        async for collector, chunk in events:
            if collector.error is not None:
                raise collector.error
            if chunk:
                yield chunk

    async def _collect(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        method: str | Method | None,
        *,
        chat: bool,
        trace: bool,
        salt: str,
    ) -> Result:
        result = Result([])
        try:
            events = self._events(
                prompt, params, method, chat=chat, trace=trace, salt=salt, watched=False
            )
            async for collector, _ in events:
                result = collector.result()
        except OutstrideError as error:
            return Result([], error=error)
        return result

    async def _events(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        method: str | Method | None,
        *,
        chat: bool,
        trace: bool,
        salt: str,
        watched: bool,
    ) -> AsyncIterator[tuple[_Collector, Chunk | None]]:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, event)

        ticket, collector = self._ticket(
            prompt, params, method, sink, chat=chat, trace=trace, salt=salt, watched=watched
        )
        self._runner.submit(ticket)
        done = False
        try:
            while not done:
                event = await inbox.get()
                done = event.done
                yield collector, collector.take(event)
        finally:
            if not done:
                self._runner.cancel(ticket)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)
