"""What one pass proposed and what held, for those who want to look into it.

The engine's process takes down the bare numbers, this process's `told` spells them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from outstride.core.proposal import TARGET
from outstride.engine.ledger import Progress


class Node(NamedTuple):
    """A node of the graph: what hangs where, who guessed it, and how it fared."""

    token: int
    parent: int
    """Index of the node that it hangs below; -1 for the first, the last settled token."""
    source: str
    state: str
    """given, accepted, rejected, or probe: scored to learn from, never kept."""


class Drawing(NamedTuple):
    """A pass of one answer."""

    step: int
    nodes: list[Node]
    """None for a pass over masks: they have no tokens yet."""
    masks: list[int]
    """Places of the answer that were open in this pass."""
    settled: dict[int, int]
    """Those of them that it settled."""
    canvas: dict[int, int]
    """Everything that stands beyond a gap now."""


def drawn(progress: Progress) -> Drawing | None:
    """The pass behind some progress; None if it only read the prompt."""
    sequence = progress.sequence
    if progress.drawn is None or not sequence.counts.emitted + sequence.counts.drafts:
        return None
    proposal, verdict = progress.drawn
    graph, given, start = proposal.graph, proposal.given, sequence.prompt_length
    step = sequence.counts.passes + sequence.counts.prompt_passes
    canvas = {place - start: token for place, token in progress.canvas.items()}
    positions = graph.positions.tolist()
    if TARGET in sequence.method.drafter.fills:
        settled = {int(place) - start: int(token) for place, token in verdict.settled.items()}
        known = {*canvas, *range(-start, len(sequence.tokens) - start)} - settled.keys()
        looked_at = {place + proposal.offset - start for place in positions[given:]}
        return Drawing(step, [], sorted(looked_at - known), settled, canvas)
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
        nodes.append(Node(token, max(parent - first, -1) if node >= given else -1, source, state))
    return Drawing(step, nodes, [], {}, canvas)


def told(drawing: Drawing, spell: Callable[[int], str], vocab_size: int) -> dict[str, Any]:
    """A drawing as clients get it."""

    def shown(token: int) -> dict[str, Any]:
        known = 0 <= token < vocab_size  # else an extra row, or a mixture: there is no text for it
        return {"token": token, "text": spell(token) if known else ""}

    def placed(tokens: dict[int, int]) -> list[dict[str, Any]]:
        return [{"place": place, **shown(token)} for place, token in sorted(tokens.items())]

    return {
        "pass": drawing.step,
        "nodes": [
            {**shown(n.token), "parent": n.parent, "source": n.source, "state": n.state}
            for n in drawing.nodes
        ],
        "masks": drawing.masks,
        "settled": placed(drawing.settled),
        "canvas": placed(drawing.canvas),
    }
