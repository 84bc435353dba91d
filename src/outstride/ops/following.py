"""Where the states lie that nodes of a trained part go on from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outstride.core.graph import IntArray
from outstride.ops.contract import Span


def before(spans: Sequence[Span], page_size: int) -> IntArray:
    """The slot of what stands before each computed node; -1 where nothing does.

    That is the node's parent, or the entry of the position before, where the graph begins there.
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
                entry = position
            elif position in fresh:
                entry = fresh.index(position)
            else:
                continue
            slots[node] = table.pages[entry // page_size] * page_size + entry % page_size
        found.append(slots)
    return np.concatenate(found)
