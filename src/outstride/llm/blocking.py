"""`LLM`: the surface for scripts."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Self

from outstride.core.contracts import Method
from outstride.core.params import SamplingParams
from outstride.engine.runner import Event
from outstride.errors import OutstrideError
from outstride.llm.base import Asked, Base, Message, Prompt, Shaped
from outstride.results import Chunk, Filled, Result


class LLM(Base):
    """A language model that answers in fewer passes.

        llm = LLM("smollm2")
        [answer] = llm.chat("Why is the sky blue?", method="ngram")
        print(answer.text, answer.stats.tokens_per_pass)

    `generate` takes text or token ids as they are, `chat` applies the model's template. Both take one
    prompt or a list, with one method, one set of parameters and one shape for all or for each, and
    return one `Result` per prompt. A single request that fails raises; in a list, it carries its
    `error`. A shape is a `Shape`, or a JSON schema as a mapping: the answer fits it, whatever the
    method. Requests with different salts share neither cached prefixes nor what drafters remember.
    """

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        shape: Shaped | Seq[Shaped | None] | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Result]:
        """Continues prompts as they stand."""
        return self._whole(self._ask_all(prompts, params, method, shape, trace=trace, salt=salt))

    def chat(
        self,
        messages: str | Seq[Message] | Seq[Seq[Message]] | Seq[str],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        method: str | Method | Seq[str | Method] | None = None,
        shape: Shaped | Seq[Shaped | None] | None = None,
        trace: bool = False,
        salt: str = "",
    ) -> list[Result]:
        """Answers a conversation, or a list of them; plain text counts as one user message."""
        asked = self._ask_all(messages, params, method, shape, chat=True, trace=trace, salt=salt)
        return self._whole(asked)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        shape: Shaped | None = None,
        trace: bool = False,
        salt: str = "",
        canvas: bool = False,
    ) -> Iterator[Chunk]:
        """Answers one prompt (messages: by the chat template) piece by piece, one per pass.

        With `canvas`, each pass is reported, with what a masked model has settled beyond gaps.
        """
        asked = self._ask(
            prompt, params, method, shape, trace=trace, salt=salt, watched=True, canvas=canvas
        )
        for _, event in self._events([asked]):
            if (chunk := asked.piece(event)) is not None:
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
        """Fills in the holes of a text, written as `<mask:8>`: one `Filled` for each of n samples.

        The holes say how long the answer is; limits, stops and ends of text play no part.
        """
        asked = self._ask_filling(text, params, method, trace=trace, salt=salt)
        for _, event in self._events([asked]):
            asked.take(event)
        return self._filled(asked)

    def _whole(self, requests: list[Asked | OutstrideError]) -> list[Result]:
        good = [asked for asked in requests if isinstance(asked, Asked)]
        for asked, event in self._events(good):
            asked.take(event)
        return self._alone(
            [
                asked.result() if isinstance(asked, Asked) else Result([], error=asked)
                for asked in requests
            ]
        )

    def _events(self, requests: list[Asked]) -> Iterator[tuple[Asked, Event]]:
        """What happens to requests, until all are done; those left behind are cancelled."""
        inbox: queue.SimpleQueue[tuple[Asked, Event]] = queue.SimpleQueue()

        def sink(asked: Asked) -> Callable[[Event], None]:
            return lambda event: inbox.put((asked, event))

        try:
            for asked in requests:
                asked.ticket.sink = sink(asked)
                self._runner.submit(asked.ticket)
            left = len(requests)
            while left:
                asked, event = inbox.get()
                left -= event.done
                yield asked, event
        finally:
            for asked in requests:
                if not asked.done:
                    self._runner.cancel(asked.ticket)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
