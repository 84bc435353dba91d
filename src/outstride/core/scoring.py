"""From raw logits to `Scores`: applies `core.sampling` node by node."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.sampling import best, logprobs, probabilities


def select(
    proposal: Proposal,
    nodes: IntArray,
    raw: FloatArray,
    hidden: Mapping[int, FloatArray] | None = None,
) -> Scores:
    """The requested outputs of a proposal, from one row of raw logits per node.

    Rows of `best` with fewer tokens than requested are filled up with -1.
    """
    wants = proposal.wants
    count = max(1, min(wants.best, raw.shape[1]))
    chosen = np.full((len(nodes), count), -1, dtype=np.int64)
    listed, rows = [], []
    for i, (node, row) in enumerate(zip(nodes.tolist(), raw, strict=True)):
        processors = proposal.processors.get(node)
        processed = row if processors is None else processors.apply(row)
        position = int(proposal.graph.positions[node]) + proposal.offset
        found = best(processed, proposal.sampling, position, count)
        chosen[i, : len(found)] = found
        if wants.logprobs is not None:
            token = wants.of.get(node, int(found[0]))
            listed.append(tuple(logprobs(row, [token], wants.logprobs)))
        if wants.rows:
            rows.append(probabilities(processed, proposal.sampling))
    return Scores(
        nodes=nodes,
        best=chosen,
        logprobs=tuple(listed),
        rows=np.asarray(rows, dtype=np.float32) if wants.rows else None,
        logits=raw if wants.logits else None,
        hidden=hidden or {},
    )
