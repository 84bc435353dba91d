"""Where an EAGLE head finds the hidden state that a node reads: that of the node before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outstride.core.graph import IntArray
from outstride.ops.contract import Span


def previous_slots(spans: Sequence[Span], page_size: int) -> IntArray:
    """[computed nodes]: the slot of the node before each one; -1 where there is none.

    That is the node's parent or, for roots of the graph, the kept KV of the position before.
    """
    found = []
    for span in spans:
        graph, table = span.graph, span.table
        parents = graph.parents[span.first :]
        slots = np.where(parents >= 0, np.asarray(span.slots)[np.maximum(parents, 0)], -1)
        for node in np.flatnonzero(parents < 0).tolist():
            position = int(graph.positions[span.first + node]) - 1
            fresh = table.positions[: len(table) - table.stale]
            if 0 <= position < len(fresh) and fresh[position] == position:
                index = position
            elif position in fresh:
                index = fresh.index(position)
            else:
                continue
            slots[node] = table.pages[index // page_size] * page_size + index % page_size
        found.append(slots)
    return np.concatenate(found)
