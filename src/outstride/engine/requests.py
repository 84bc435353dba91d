"""Requests: how they enter an engine and leave it."""

from __future__ import annotations

from collections.abc import Mapping

from outstride.core.contracts import Grammar, Method
from outstride.core.params import SamplingParams
from outstride.core.sequence import Sequence
from outstride.engine.api import EngineAPI
from outstride.engine.stopping import TokenToBytes


class EngineRequests(EngineAPI):
    """The part of an engine that takes requests in, ends them, and checks the caches."""

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        method: Method,
        *,
        salt: str = "",
        grammar: Grammar | None = None,
        streaming: bool = True,
        priority: int = 0,
        fixed: Mapping[int, int] | None = None,
        stream_canvas: bool = False,
        token_to_bytes: TokenToBytes | None = None,
    ) -> Sequence:
        """Queues a request; its n samples fork off once the prompt is computed.

        streaming: whether each pass is reported, not only the end.
        fixed: tokens after the prompt that are known already, by position.
        stream_canvas: whether tokens beyond gaps are reported, too.
        token_to_bytes: detokenizes the output, instead of the engine's own function.
        """
        return self.sequences.submit(
            tokens,
            params,
            method,
            salt,
            grammar,
            streaming,
            priority,
            fixed,
            stream_canvas,
            token_to_bytes,
        )

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence at once; its text so far stays."""
        self.sequences.end(sequence, "cancelled")

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every pool agrees with every block table."""
        for name, pool in list(self.runner.pools.items()):
            pool.check_integrity(s.tables[name] for s in self.scheduler if name in s.tables)
