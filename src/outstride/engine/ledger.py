"""The ledger: the only place where passes, nodes and tokens are counted."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from outstride.core.proposal import TARGET, Proposal, Verdict
from outstride.core.sequence import Provenance, Sequence, SequenceCounts


@dataclass(slots=True)
class SequenceProgress:
    """What a step did for one sequence."""

    sequence: Sequence
    tokens: list[int]
    text: str = ""
    finished: bool = False
    canvas: dict[int, int] = field(default_factory=dict)
    """Tokens settled beyond a gap, for requests with `stream_canvas`."""
    drawn: tuple[Proposal, Verdict] | None = None
    """The pass itself, for the same requests."""


@dataclass(slots=True)
class Ledger:
    """Totals of an engine. Seconds are by verb: plan, propose, forward, accept, commit."""

    total: SequenceCounts = field(default_factory=SequenceCounts)
    steps: int = 0
    model_passes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _verb: str = ""
    _since: float = 0.0

    def switch_timer(self, verb: str) -> str:
        """Attributes the time from now on to this verb, or to none; returns the previous verb."""
        now, before = time.perf_counter(), self._verb
        if before:
            self.seconds[before] += now - self._since
        self._verb, self._since = verb, now
        return before

    def count(
        self,
        sequence: Sequence,
        proposal: Proposal,
        verdict: Verdict,
        emitted: list[int],
        expected: float = 0.0,
    ) -> None:
        """Counts what one pass did for one sequence, and records how its tokens came about."""
        nodes, own, total = len(proposal.graph), sequence.counts, self.total
        drafted, new = nodes - proposal.given, len(emitted)
        if new and not own.emitted:
            sequence.first_token_time = time.perf_counter()
        own.nodes += nodes
        own.emitted += new
        total.emitted += new
        masked = drafted and TARGET in sequence.method.drafter.masked_models
        if new or masked:
            own.passes += 1
            total.passes += 1
        else:
            own.prompt_passes += 1
            total.prompt_passes += 1
        step = own.passes + own.prompt_passes
        if not drafted:
            for token in emitted:
                sequence.trace.append(Provenance(token, step, sequence.method.name, "plain"))
            return
        # A kept draft counts as accepted only if its token was emitted, not cut by a stop rule.
        start = len(sequence.tokens) - new
        if masked:
            self._count_unmasked(sequence, drafted, verdict, emitted, start)
            return
        sources = {
            int(proposal.graph.positions[node]): proposal.labels.get(node, sequence.method.name)
            for node in verdict.keep
            if node >= proposal.given
        }
        accepted = sum(start <= position < len(sequence.tokens) for position in sources)
        for counts in (own, total):
            counts.proposed += drafted
            counts.accepted += accepted
            counts.drafts += 1
            counts.expected += expected
        for position, token in enumerate(emitted, start=start):
            if position in sources:
                kind, source = "drafted", sources[position]
                for counts in (own, total):
                    counts.sources[source] = counts.sources.get(source, 0) + 1
            else:
                kind, source = "bonus", sequence.method.name
            sequence.trace.append(Provenance(token, step, source, kind))

    def _count_unmasked(
        self, sequence: Sequence, drafted: int, verdict: Verdict, emitted: list[int], start: int
    ) -> None:
        """Counts a pass over masks. Every such pass counts, even if it settled nothing.

        A token may be settled long before it can be emitted, because tokens to its left are missing.
        """
        step = sequence.counts.passes + sequence.counts.prompt_passes
        for counts in (sequence.counts, self.total):
            counts.proposed += drafted
            counts.accepted += len(verdict.settled)
            counts.drafts += 1
        for settled in verdict.settled:
            sequence.settled_at[int(settled)] = step
        for position, token in enumerate(emitted, start=start):
            when = sequence.settled_at.pop(position, step)
            kind = "unmasked" if when else "given"
            sequence.trace.append(Provenance(token, when, sequence.method.name, kind))

    def record(self, proposals: Iterable[Proposal]) -> int:
        """Counts a step as a whole; returns the number of nodes of its pass."""
        nodes = sum(len(proposal.graph) for proposal in proposals)
        self.steps += 1
        self.total.nodes += nodes
        return nodes

    def count_round(self, model: str, sequences: list[Sequence]) -> None:
        """Counts a pass of a draft model or draft head."""
        self.model_passes[model] += 1
        self.total.other_passes += 1
        for sequence in sequences:
            sequence.counts.other_passes += 1
