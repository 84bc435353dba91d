"""Pruning: the target's first layers look at a tree, and the others see what they leave of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outstride import registry
from outstride.core.contracts import Demand, Drafter, Rounds
from outstride.core.graph import NodeId, TokenGraph
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.registry import method


@method("prune", family="self-speculation")
class Prune(Drafter):
    """Cuts weak branches off another drafter's tree once the target's first layers have seen them.

    The whole tree passes the first `layer` layers (0: half of them; a model that has no more is not
    pruned). There the model's own head says what may follow each node; a branch whose token is not
    among the first `keep` candidates behind its parent is cut off, with all that hangs from it. The
    others go on from the states that they have reached, so nothing is computed twice. It pays where
    a node costs about what it computes, where the head is small beside the layers, and where the
    first layers have something to say: those of a model that was not trained for early exits give
    up good branches with the bad ones.

    Paper: early pruning of ProPD (Zhong et al., 2024), with the model's own head and a fixed `keep`
    Exactness: exact
    Needs: nothing
    Cost per step: what `of` costs; its nodes pass the first `layer` layers and those with children the
      head, in a pass of their own; the survivors' entries are moved together and pass the rest
    """

    def __init__(self, *, of: str = "recycle", layer: int = 0, keep: int = 16) -> None:
        if layer < 0 or keep < 1:
            raise ValueError("needs layer >= 0 (0: half of the model) and keep >= 1")
        self.layer = layer
        self.keep = keep
        self._of = drafter = registry.build(of).drafter
        if not drafter.trimmable or drafter.weighed or drafter.models or drafter.grafts:
            raise ValueError(
                f"{of!r} cannot be pruned: `of` takes a drafter that looks up a guess and says how "
                "large, such as recycle, suffix or mix"
            )
        self.wants, self.tokens = drafter.wants, drafter.tokens

    def demand(self, view: View) -> Demand:
        return self._of.demand(view)

    def propose(self, view: View, room: int) -> Rounds:
        whole = yield from self._of.propose(view, room)
        layer, given = self.layer or view.layers // 2, whole.given
        if not 0 < layer < view.layers or given > 1 or len(whole.graph) == given:
            return whole  # a prompt goes through all layers at once
        asked = tuple(sorted({int(parent) for parent in whole.graph.parents[given:]}))
        wants = Wants(nodes=asked, best=self.keep, hidden=(layer,))
        early = yield replace(whole, layers=(0, layer), wants=wants)
        nodes = surviving(whole.graph, given, early)
        places = {node: place for place, node in enumerate(nodes)}
        return replace(
            whole,
            graph=whole.graph.part(nodes),
            layers=(layer, view.layers),
            hidden=early.hidden[layer][list(nodes)],
            survivors=nodes,
            labels={places[n]: label for n, label in whole.labels.items() if n in places},
        )

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Any:
        return self._of.observe(view, proposal, scores, verdict)


def surviving(graph: TokenGraph, given: int, early: Scores) -> tuple[int, ...]:
    """What is given, and each node that its parent's early scores foresee, if the parent survives."""
    foreseen = {node: set(early.rivals(NodeId(node))) for node in early.nodes.tolist()}
    tokens, parents = graph.tokens.tolist(), graph.parents.tolist()
    alive = list(range(given))
    living = set(alive)
    for node in range(given, len(tokens)):
        if parents[node] in living and tokens[node] in foreseen[parents[node]]:
            living.add(node)
            alive.append(node)
    return tuple(alive)
