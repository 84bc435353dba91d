"""The ledger: everything is counted once, here, for every surface."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from outstride.core.proposal import Proposal, Verdict
from outstride.core.sequence import Counts, Provenance, Sequence


@dataclass(slots=True)
class Progress:
    """What a step did for one sequence."""

    sequence: Sequence
    tokens: list[int]
    text: str = ""
    finished: bool = False


@dataclass(slots=True)
class Ledger:
    """Totals of an engine. Seconds are by verb: plan, propose, forward, accept, commit."""

    total: Counts = field(default_factory=Counts)
    steps: int = 0
    model_passes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def clock(self, verb: str) -> Iterator[None]:
        """Adds the time spent inside to a verb."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[verb] += time.perf_counter() - start

    def count(
        self, sequence: Sequence, proposal: Proposal, verdict: Verdict, emitted: list[int]
    ) -> None:
        """Enters what one pass did for one sequence, and where its tokens came from."""
        nodes = len(proposal.graph)
        drafted = nodes - proposal.given
        sequence.counts.nodes += nodes
        # A kept draft counts as accepted only if its token was emitted, not cut by a stop rule.
        start = len(sequence.tokens) - len(emitted)
        sources = {}
        if drafted:
            sources = {
                int(proposal.graph.positions[node]): proposal.labels.get(node, sequence.method.name)
                for node in verdict.keep
                if node >= proposal.given
            }
        accepted = sum(start <= position < len(sequence.tokens) for position in sources)
        for counts in (sequence.counts, self.total):
            counts.passes += bool(emitted)
            counts.prompt_passes += not emitted
            counts.proposed += drafted
            counts.accepted += accepted
            counts.emitted += len(emitted)
        step = sequence.counts.passes + sequence.counts.prompt_passes
        for position, token in enumerate(emitted, start=start):
            if position in sources:
                kind, source = "drafted", sources[position]
            else:
                kind, source = ("bonus" if drafted else "plain"), sequence.method.name
            sequence.trace.append(Provenance(token, step, source, kind))

    def record(self, proposals: Iterable[Proposal]) -> None:
        """Enters a step as a whole."""
        self.steps += 1
        self.total.nodes += sum(len(proposal.graph) for proposal in proposals)

    def count_round(self, model: str, sequences: list[Sequence]) -> None:
        """Enters a pass of another model than the target."""
        self.model_passes[model] += 1
        self.total.other_passes += 1
        for sequence in sequences:
            sequence.counts.other_passes += 1
