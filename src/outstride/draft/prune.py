"""`prune`: the target's first layers prune a draft tree before the other layers verify it."""

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
    pruned). There the model's own LM head predicts what may follow each node; a branch whose token is
    not among the first `keep` candidates after its parent is pruned, with its whole subtree. The
    others go on from the hidden states that they have reached, so nothing is computed twice. It pays
    where the cost of a pass grows with its nodes, where the LM head is small next to the layers, and
    where the first layers predict well: those of a model that was not trained for early exits prune
    good branches with the bad ones.

    Paper: early pruning of ProPD (Zhong et al., 2024), with the model's own LM head in place of a
      trained one and a fixed `keep`; its dynamic tree sizes are not here
    Exactness: exact
    Needs: nothing
    Cost per step: the cost of `of`; its nodes pass the first `layer` layers and those with children
      the LM head, in a pass of their own; the KV of the survivors is moved together and they pass the
      other layers
    """

    layer_ranges = True

    def __init__(self, *, of: str = "recycle", layer: int = 0, keep: int = 16) -> None:
        if layer < 0 or keep < 1:
            raise ValueError("needs layer >= 0 (0: half of the model) and keep >= 1")
        self.layer = layer
        self.keep = keep
        self._of = drafter = registry.build(of).drafter
        if not drafter.prunable or drafter.cost_aware or drafter.models or drafter.draft_heads:
            raise ValueError(
                f"{of!r} cannot be pruned: `of` takes a method that looks up a draft tree without a "
                "model of its own, such as recycle, suffix or mix"
            )
        self.wants, self.input_tokens = drafter.wants, drafter.input_tokens

    def demand(self, view: View) -> Demand:
        return self._of.demand(view)

    def on_backoff(self, view: View, steps: int) -> None:
        self._of.on_backoff(view, steps)

    def propose(self, view: View, budget: int) -> Rounds:
        whole = yield from self._of.propose(view, budget)
        layer, given = self.layer or view.layers // 2, whole.given
        if not 0 < layer < view.layers or given > 1 or len(whole.graph) == given:
            return whole  # a prompt passes all layers at once
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
    """The given nodes, and each node among its parent's early candidates whose parent survives."""
    candidates = {node: set(early.candidates(NodeId(node))) for node in early.nodes.tolist()}
    tokens, parents = graph.tokens.tolist(), graph.parents.tolist()
    alive = list(range(given))
    living = set(alive)
    for node in range(given, len(tokens)):
        if parents[node] in living and tokens[node] in candidates[parents[node]]:
            living.add(node)
            alive.append(node)
    return tuple(alive)
