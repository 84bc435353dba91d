"""Who is here: sequences from their request to their end, with the stop rules of each."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

from outstride.core.contracts import Grammar, Method
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.core.sequence import Sequence, Status
from outstride.engine import admission
from outstride.engine.ledger import Progress
from outstride.engine.measuring import measure
from outstride.engine.passes import Passes
from outstride.engine.scheduler import Scheduler
from outstride.engine.stopping import Spell, Stopper, Text
from outstride.errors import MethodFailed, OutstrideError

P = ParamSpec("P")
T = TypeVar("T")


class Roster:
    """Takes requests in, forks sequences, ends them, and reports what each has to show."""

    def __init__(
        self,
        passes: Passes,
        scheduler: Scheduler,
        end_tokens: Collection[int],
        spell: Spell | None,
    ) -> None:
        self._passes = passes
        self._scheduler = scheduler
        self._end_tokens = frozenset(end_tokens)
        self._spell = spell
        self._ids = itertools.count()
        self._stoppers: dict[int, Stopper] = {}
        self.ended: list[Sequence] = []

    @property
    def running(self) -> list[Sequence]:
        """Everybody who takes part in passes."""
        return self._scheduler.running

    # --- beginnings -------------------------------------------------------------------------------

    def prepare(self, method: Method) -> None:
        """Measures what passes cost, if this method wants to know and nobody has measured it."""
        if method.drafter.weighed and self._scheduler.cost is None:
            target, pool = self._passes.models[TARGET], self._passes.pools[TARGET]
            self._scheduler.cost = measure(target, pool, self._scheduler.limits.nodes)

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        method: Method,
        salt: str,
        grammar: Grammar | None,
        watched: bool = True,
        priority: int = 0,
        fixed: Mapping[int, int] | None = None,
        painted: bool = False,
    ) -> Sequence:
        """Takes a request in, or says why it cannot be served."""
        passes, drafter = self._passes, method.drafter
        limit = admission.check(passes, tokens, params, method, fixed)
        self.prepare(method)
        number = next(self._ids)
        sequence = Sequence(
            id=number,
            request=number,
            tokens=list(tokens),
            prompt_length=len(tokens),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            method=method,
            limit=limit,
            salt=salt,
            grammar=grammar,
            unborn=params.n - 1,
            watched=watched,
            priority=priority,
            block=passes.vision(TARGET, drafter).block,
            painted=painted,
        )
        if fixed:
            sequence.fixed, sequence.canvas = fixed, dict(fixed)
            sequence.early = dict.fromkeys(fixed, 0)
        sequence.group.append(sequence)
        self._equip(sequence)
        self._scheduler.add(sequence)
        return sequence

    def fork(self, parent: Sequence, length: int, count: int) -> None:
        """Sequences that share a parent's first `length` tokens and read the last of them anew."""
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
                salt=parent.salt,
                grammar=parent.grammar,
                group=parent.group,
                prompt_logprobs=parent.prompt_logprobs,
                watched=parent.watched,
                priority=parent.priority,
                block=parent.block,
                painted=parent.painted,
                fixed=parent.fixed,
                canvas=dict(parent.fixed),
                early=dict.fromkeys(parent.fixed, 0),
            )
            parent.group.append(child)
            stopper = self._equip(child)
            for i, token in enumerate(child.output, start=child.prompt_length + 1):
                stopper.push(token, i)
            table = parent.tables[TARGET]
            entries = length - 1
            if (block := parent.block) is not None:  # whole blocks, and nothing stale
                entries = min(entries, table.fresh) // block * block
            child.tables[TARGET] = self._passes.pools[TARGET].fork(table, entries)
            self._scheduler.adopt(child)

    def _equip(self, sequence: Sequence) -> Stopper:
        params = sequence.params
        text = Text(self._spell, tuple(params.stop)) if self._spell else None
        stopper = Stopper(params, self._end_tokens, sequence.prompt_length, sequence.limit, text)
        self._stoppers[sequence.id] = stopper
        return stopper

    # --- growth and endings -----------------------------------------------------------------------

    def append(self, sequence: Sequence, token: int) -> str | None:
        """Enters the next token; the reason why the sequence ends with it, if it does."""
        sequence.tokens.append(token)
        return self._stoppers[sequence.id].push(token, len(sequence.tokens))

    def end(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence and frees what it held."""
        if sequence.status is Status.FINISHED:
            return
        sequence.finish_reason = reason
        self._scheduler.remove(sequence)
        text = self._stoppers[sequence.id].text
        if text is not None:
            text.finish()
        self.ended.append(sequence)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """One request's method went wrong: that request ends, and nobody else's."""
        if not isinstance(error, OutstrideError):
            name = sequence.method.spec or sequence.method.name
            wrapped = MethodFailed(f"method {name} failed: {error!r}")
            wrapped.__cause__ = error
            error = wrapped
        sequence.error = error
        self.end(sequence, "error")

    def guard(
        self, sequence: Sequence, call: Callable[P, T], *args: P.args, **kw: P.kwargs
    ) -> T | None:
        """What a call into a method returns, or None if it raised and its sequence ended."""
        try:
            return call(*args, **kw)
        except Exception as error:
            self.fail(sequence, error)
            return None

    def progress(self, sequence: Sequence, emitted: list[int]) -> Progress:
        """What a sequence has to show since it was last asked."""
        text, finished = "", sequence.status is Status.FINISHED
        stopper = self._stoppers[sequence.id]
        if stopper.text is not None:
            text = stopper.text.ready(final=finished)
        if finished:
            del self._stoppers[sequence.id]
        canvas = dict(sequence.canvas) if sequence.painted else {}
        return Progress(sequence, emitted, text, finished, canvas)

    def leaving(self) -> list[Sequence]:
        """Everybody who ended since this was last asked."""
        ended, self.ended = self.ended, []
        return ended
