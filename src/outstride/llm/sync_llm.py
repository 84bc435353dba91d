"""`LLM`: the synchronous API."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Self

from outstride.core.contracts import Method
from outstride.core.params import SamplingParams
from outstride.engine.engine_thread import OutputEvent
from outstride.errors import OutstrideError
from outstride.llm.base import FormatLike, LLMBase, Message, Prompt, raise_single_error
from outstride.llm.pending import PendingRequest
from outstride.results import Chunk, Filled, Result


class LLM(LLMBase):
    """A language model with speculative, parallel and diffusion decoding.

        llm = LLM("smollm2")
        [answer] = llm.chat("Why is the sky blue?", method="ngram")
        print(answer.text, answer.stats.tokens_per_pass)

    `generate` takes text or token ids as they are, `chat` applies the model's template. Both take one
    prompt or a list, with one method, one set of parameters and one shape for all or for each, and
    return one `Result` per prompt. A single request that fails raises its error; in a list, its
    `Result` has the `error`. A shape is an `OutputFormat`, or a JSON schema as a mapping: the answer
    fits it under every method. Requests with different salts share neither cached prefixes nor what
    drafters remember.
    """

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        shape: FormatLike | Seq[FormatLike | None] | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Result]:
        """Continues prompts as they are, without a chat template."""
        return self._finish(self._requests(prompts, params, method, shape, trace=trace, salt=salt))

    def chat(
        self,
        messages: str | Seq[Message] | Seq[Seq[Message]] | Seq[str],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        shape: FormatLike | Seq[FormatLike | None] | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Result]:
        """Answers a conversation, or a list of them; plain text is one user message."""
        pending = self._requests(messages, params, method, shape, chat=True, trace=trace, salt=salt)
        return self._finish(pending)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        shape: FormatLike | None = None,
        trace: bool = False,
        salt: str = "",
        canvas: bool = False,
    ) -> Iterator[Chunk]:
        """Streams the answer to one prompt, a chunk per pass; messages use the chat template.

        With `canvas`, every pass has a chunk, with the tokens that a masked model settled beyond gaps.
        """
        pending = self._request(
            prompt, params, method, shape, trace=trace, salt=salt, streaming=True, canvas=canvas
        )
        for _, event in self._events([pending]):
            if (chunk := pending.take_chunk(event)) is not None:
                yield chunk

    def fill(
        self,
        text: str,
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Filled]:
        """Fills in the gaps of a text, written as `<mask:8>`: one `Filled` for each of n samples.

        The gaps determine the length of the answer; max_tokens, stop strings and eos are ignored.
        """
        pending = self._infill_request(text, params, method, trace=trace, salt=salt)
        for _, event in self._events([pending]):
            pending.take(event)
        return self._filled(pending)

    def _finish(self, requests: list[PendingRequest | OutstrideError]) -> list[Result]:
        valid = [pending for pending in requests if isinstance(pending, PendingRequest)]
        for pending, event in self._events(valid):
            pending.take(event)
        return raise_single_error(
            [
                pending.result()
                if isinstance(pending, PendingRequest)
                else Result([], error=pending)
                for pending in requests
            ]
        )

    def _events(
        self, requests: list[PendingRequest]
    ) -> Iterator[tuple[PendingRequest, OutputEvent]]:
        """The events of requests until all are done. Leaving the iteration early cancels the rest."""
        inbox: queue.SimpleQueue[tuple[PendingRequest, OutputEvent]] = queue.SimpleQueue()

        def callback(pending: PendingRequest) -> Callable[[OutputEvent], None]:
            return lambda event: inbox.put((pending, event))

        try:
            for pending in requests:
                pending.handle.callback = callback(pending)
                self.engine_thread.submit(pending.handle)
            left = len(requests)
            while left:
                pending, event = inbox.get()
                left -= event.done
                yield pending, event
        finally:
            for pending in requests:
                if not pending.done:
                    self.engine_thread.cancel(pending.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
