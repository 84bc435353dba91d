"""`SequenceManager`: sequences from their request to their end, with the stop rules of each."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

from outstride.core.contracts import Grammar, Method
from outstride.core.params import SamplingParams
from outstride.core.pooling import PooledStates
from outstride.core.proposal import TARGET
from outstride.core.sequence import Sequence, Status
from outstride.engine import admission
from outstride.engine.ledger import SequenceProgress
from outstride.engine.model_runner import ModelRunner
from outstride.engine.scheduler import Scheduler
from outstride.engine.stopping import IncrementalText, Stopper, TokenToBytes
from outstride.errors import MethodFailed, OutstrideError

P = ParamSpec("P")
T = TypeVar("T")
SEED_BITS = 53
"""Bits of a seed that is drawn for a request: a JavaScript number holds it exactly."""


class SequenceManager:
    """Admits requests, forks and ends sequences, and reports the progress of each."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        end_tokens: Collection[int],
        token_to_bytes: TokenToBytes | None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._end_tokens = frozenset(end_tokens)
        self._token_to_bytes = token_to_bytes
        self._ids = itertools.count()
        self._stoppers: dict[int, Stopper] = {}
        self.ended: list[Sequence] = []

    @property
    def running(self) -> list[Sequence]:
        """The sequences that take part in passes."""
        return self._scheduler.running

    # --- start ------------------------------------------------------------------------------------

    def prepare(self, method: Method) -> None:
        """Begins to learn the cost of passes, if this method needs it."""
        target, pool = self._runner.models[TARGET], self._runner.pools[TARGET]
        scheduler = self._scheduler
        scheduler.policy.prepare(method, target, pool, scheduler.limits.nodes)

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        method: Method,
        salt: str,
        grammar: Grammar | None,
        streaming: bool = True,
        priority: int = 0,
        fixed: Mapping[int, int] | None = None,
        stream_canvas: bool = False,
        token_to_bytes: TokenToBytes | None = None,
    ) -> Sequence:
        """Queues a request; raises a RequestError if it cannot be served."""
        runner, drafter = self._runner, method.drafter
        limit = admission.check(runner, tokens, params, method, fixed)
        self.prepare(method)
        number = next(self._ids)
        sequence = Sequence(
            id=number,
            request=number,
            tokens=list(tokens),
            prompt_length=len(tokens),
            params=params,
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
            method=method,
            limit=limit,
            key=runner.target_key(drafter, params.adapter, salt),
            grammar=grammar,
            pending_forks=params.n - 1,
            streaming=streaming,
            priority=priority,
            stream_canvas=stream_canvas,
            token_to_bytes=token_to_bytes,
        )
        if params.pooling is not None:
            sequence.pooled = PooledStates(params.pooling, len(tokens))
        if fixed:
            sequence.fixed, sequence.canvas = fixed, dict(fixed)
            sequence.settled_at = dict.fromkeys(fixed, 0)
        sequence.group.append(sequence)
        self._equip(sequence)
        self._scheduler.add(sequence)
        return sequence

    def fork(self, parent: Sequence, length: int, count: int) -> None:
        """Adds sequences that share a parent's first `length` tokens and the KV of all but one."""
        for _ in range(count):
            child = Sequence(
                id=next(self._ids),
                request=parent.request,
                tokens=parent.tokens[:length],
                prompt_length=parent.prompt_length,
                params=parent.params,
                seed=parent.seed,
                method=parent.method,
                limit=parent.limit,
                index=len(parent.group),
                key=parent.key,
                grammar=parent.grammar,
                group=parent.group,
                prompt_logprobs=parent.prompt_logprobs,
                streaming=parent.streaming,
                priority=parent.priority,
                stream_canvas=parent.stream_canvas,
                token_to_bytes=parent.token_to_bytes,
                fixed=parent.fixed,
                canvas=dict(parent.fixed),
                settled_at=dict.fromkeys(parent.fixed, 0),
            )
            parent.group.append(child)
            stopper = self._equip(child)
            for i, token in enumerate(child.output, start=child.prompt_length + 1):
                stopper.push(token, i)
            table = parent.tables[TARGET]
            cached = length - 1
            if (block := parent.block) is not None:  # whole blocks, and nothing stale
                cached = min(cached, table.valid) // block * block
            child.tables[TARGET] = self._runner.pools[TARGET].fork(table, cached)
            self._scheduler.adopt(child)

    def _equip(self, sequence: Sequence) -> Stopper:
        params = sequence.params
        decode = sequence.token_to_bytes or self._token_to_bytes
        text = IncrementalText(decode, tuple(params.stop)) if decode else None
        stopper = Stopper(params, self._end_tokens, sequence.prompt_length, sequence.limit, text)
        self._stoppers[sequence.id] = stopper
        return stopper

    # --- growth and end ---------------------------------------------------------------------------

    def append(self, sequence: Sequence, token: int) -> str | None:
        """Appends a token; returns the finish reason if the sequence ends with it."""
        sequence.tokens.append(token)
        return self._stoppers[sequence.id].push(token, len(sequence.tokens))

    def end(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence and frees its pages."""
        if sequence.status is Status.FINISHED:
            return
        sequence.finish_reason = reason
        self._scheduler.remove(sequence)
        text = self._stoppers[sequence.id].text
        if text is not None:
            text.finish()
        self.ended.append(sequence)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence whose method raised an error. Other requests are not affected."""
        if not isinstance(error, OutstrideError):
            name = sequence.method.spec or sequence.method.name
            wrapped = MethodFailed(f"method {name} failed: {error!r}")
            wrapped.__cause__ = error
            error = wrapped
        sequence.error = error
        self.end(sequence, "error")

    def run_guarded(
        self, sequence: Sequence, call: Callable[P, T], *args: P.args, **kw: P.kwargs
    ) -> T | None:
        """The result of a call into a method, or None if it raised and its sequence has ended."""
        try:
            return call(*args, **kw)
        except Exception as error:
            self.fail(sequence, error)
            return None

    def progress(self, sequence: Sequence, emitted: list[int]) -> SequenceProgress:
        """The tokens and the text of a sequence since the last call."""
        text, finished = "", sequence.status is Status.FINISHED
        stopper = self._stoppers[sequence.id]
        if stopper.text is not None:
            text = stopper.text.take_new(final=finished)
        if finished:
            del self._stoppers[sequence.id]
        canvas = dict(sequence.canvas) if sequence.stream_canvas else {}
        return SequenceProgress(sequence, emitted, text, finished, canvas)

    def take_ended(self) -> list[Sequence]:
        """The sequences that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended
