"""`early-exit`: the target's first layers draft, the other layers verify."""

from __future__ import annotations

import numpy as np

from outstride.core.contracts import Demand, Drafter, Rounds
from outstride.core.draft_tree import AcceptanceEstimator, AcceptanceKey, DraftTree, PerPrefixKey
from outstride.core.graph import FloatArray, NodeId, chain
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.registry import method

DEPTHS = (0.25, 0.35, 0.5, 0.7)
"""The exit layers that are considered, as shares of the model's depth."""
MAX_LENGTH = 6
"""The longest draft that is considered."""
RETRY = 16
"""After how many steps an exit layer that does not pay is tried again."""


@method("early-exit", family="self-speculation")
class EarlyExit(Drafter):
    """The target's first layers draft a chain, the remaining ones go on from there and verify it.

    Nothing is computed twice: drafted tokens wait with the hidden states of their exit layer and pass
    the deep layers together. With `layer` and `length` left at 0, both are chosen anew in every step
    for the most expected tokens per layer computed, from the acceptance rate of each exit so far.
    Models that were not trained to exit early have low acceptance rates: then it stops drafting, apart
    from a trial now and then. Of the papers, the decoding is here: DEL's choice of exit and length by
    running acceptance rates (here of four exits, each counted only where it was used), FREE's deep
    pass over all waiting tokens (here it verifies them; FREE keeps them unchecked), and LayerSkip's
    reuse of KV and hidden states. The training of FREE and LayerSkip is not.

    Paper: DEL (Entezari Zarch et al., 2025), its choice of exit and length in a simpler form; the
      synchronised deep pass of FREE (Bae et al., 2023); the self-speculation of LayerSkip (Elhoushi et
      al., 2024); none of their training
    Exactness: exact
    Needs: nothing
    Cost per step: `length` + 1 passes over the first `layer` layers, and `length` further nodes in
      one pass over the others
    """

    layer_ranges = True

    def __init__(self, *, layer: int = 0, length: int = 0) -> None:
        if layer < 0 or length < 0:
            raise ValueError("needs layer >= 0 and length >= 0 (0: chosen online)")
        self.layer = layer
        self.length = length
        self._rates = PerPrefixKey(AcceptanceEstimator)

    def demand(self, view: View) -> Demand:
        _, length, gain = self._choice(view)
        return Demand(max_nodes=max(0, min(length, view.limit - view.end - 1)), gain=gain)

    def _choice(self, view: View) -> tuple[int, int, float]:
        """The exit layer, length and expected gain with the most expected tokens per layer computed."""
        depth = view.layers
        exits = [self.layer] if self.layer else sorted({max(1, int(depth * d)) for d in DEPTHS})
        exits = [layer for layer in exits if layer < depth]
        if not exits:
            return 0, 0, 0.0
        rates: AcceptanceEstimator = view.state or self._rates.peek(view.key)
        best, value = (exits[0], self.length, 0.0), 0.0 if self.length else 1.0 / depth
        for layer in exits:
            rate, expected, tokens = rates.rate(_key(layer), 0.5), 1.0, 1.0
            for length in range(1, (self.length or MAX_LENGTH) + 1):
                expected *= rate
                tokens += expected
                worth = tokens / ((length + 1) * layer + depth - layer)
                if worth > value and self.length in (0, length):
                    best, value = (layer, length, tokens - 1.0), worth
        if best[1] == 0 and view.steps % RETRY == 0:
            return exits[view.steps // RETRY % len(exits)], 1, 0.5
        return best

    def propose(self, view: View, budget: int) -> Rounds:
        given = view.given()
        layer, length, _ = self._choice(view)
        length = min(budget, length, view.limit - view.end - 1)
        if length < 1 or len(given) > 1:  # a prompt passes all layers at once
            return DraftTree().proposal(view)
        graph, states = given, []
        for i in range(length + 1):
            last = NodeId(len(graph) - 1)
            wants = Wants(nodes=(last,) if i < length else (), hidden=(layer,))
            scores = yield Proposal(graph, len(given), layers=(0, layer), wants=wants)
            states.append(scores.hidden[layer])
            if i < length:
                graph = graph.grow(chain([scores.token(last)], view.end + i))
        hidden: FloatArray = np.concatenate(states)
        return Proposal(graph, len(given), layers=(layer, view.layers), hidden=hidden)

    def observe(
        self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict
    ) -> AcceptanceEstimator:
        rates: AcceptanceEstimator = view.state or AcceptanceEstimator(self._rates.of(view.key))
        if proposal.layers is not None:
            drafted, accepted = len(proposal.graph) - proposal.given, len(verdict.settled) - 1
            for i in range(min(drafted, accepted + 1)):
                rates.learn(_key(proposal.layers[0]), i < accepted)
        return rates


def _key(layer: int) -> AcceptanceKey:
    return AcceptanceKey("early-exit", (layer,))
