"""What one pass proposed and what was accepted, for clients that ask for `graphs`.

The engine process records numbers (`record_pass`); the HTTP process adds the text (`to_json`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from outstride.core.proposal import TARGET
from outstride.engine.ledger import SequenceProgress


class TracedNode(NamedTuple):
    """A node of the token graph: its parent, its drafter, and whether it was accepted."""

    token: int
    parent: int
    """Index of the parent node; -1 for the first node, the last settled token."""
    source: str
    state: str
    """given, accepted, rejected, or probe: scored to learn from, never kept."""


class PassTrace(NamedTuple):
    """A pass of one answer."""

    step: int
    nodes: list[TracedNode]
    """Empty for a pass over masks: they have no tokens yet."""
    masks: list[int]
    """Positions of the answer that were masked in this pass."""
    settled: dict[int, int]
    """Those of them that the pass settled, with their tokens."""
    canvas: dict[int, int]
    """All tokens that are settled after a masked position."""


def record_pass(progress: SequenceProgress) -> PassTrace | None:
    """The pass that made some progress; None if it only prefilled."""
    sequence = progress.sequence
    if progress.drawn is None or not sequence.counts.emitted + sequence.counts.drafts:
        return None
    proposal, verdict = progress.drawn
    graph, given, start = proposal.graph, proposal.given, sequence.prompt_length
    step = sequence.counts.passes + sequence.counts.prompt_passes
    canvas = {place - start: token for place, token in progress.canvas.items()}
    positions = graph.positions.tolist()
    if TARGET in sequence.method.drafter.masked_models:
        settled = {int(place) - start: int(token) for place, token in verdict.settled.items()}
        known = {*canvas, *range(-start, len(sequence.tokens) - start)} - settled.keys()
        scored = {place + proposal.offset - start for place in positions[given:]}
        return PassTrace(step, [], sorted(scored - known), settled, canvas)
    kept, end, first = set(verdict.keep), len(sequence.tokens), max(given - 1, 0)
    nodes = []
    rows = zip(graph.tokens.tolist(), graph.parents.tolist(), graph.probes.tolist(), strict=True)
    for node, (token, parent, probe) in enumerate(rows):
        if node < first:
            continue
        if node < given:
            state = "given"
        elif node in kept and positions[node] < end:
            state = "accepted"
        else:
            state = "probe" if probe else "rejected"
        source = proposal.labels.get(node, sequence.method.name)
        nodes.append(
            TracedNode(token, max(parent - first, -1) if node >= given else -1, source, state)
        )
    return PassTrace(step, nodes, [], {}, canvas)


def to_json(trace: PassTrace, text_of: Callable[[int], str], vocab_size: int) -> dict[str, Any]:
    """A pass as clients get it."""

    def shown(token: int) -> dict[str, Any]:
        known = 0 <= token < vocab_size  # else an extra embedding row or a mixture: it has no text
        return {"token": token, "text": text_of(token) if known else ""}

    def placed(tokens: dict[int, int]) -> list[dict[str, Any]]:
        return [{"place": place, **shown(token)} for place, token in sorted(tokens.items())]

    return {
        "pass": trace.step,
        "nodes": [
            {**shown(n.token), "parent": n.parent, "source": n.source, "state": n.state}
            for n in trace.nodes
        ],
        "masks": trace.masks,
        "settled": placed(trace.settled),
        "canvas": placed(trace.canvas),
    }
