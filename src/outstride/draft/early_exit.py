"""Early exit: the target's own first layers write the draft, the others check it."""

from __future__ import annotations

import numpy as np

from outstride.core.contracts import Demand, Drafter, Rounds
from outstride.core.graph import FloatArray, NodeId, chain
from outstride.core.guess import Guess, Odds, PerTenant, Sign
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.registry import method

DEPTHS = (0.25, 0.35, 0.5, 0.7)
"""The exits that are considered, as parts of the model."""
LONGEST = 6
RETRY = 16
"""So often, in steps, an exit that does not pay is given another chance."""


@method("early-exit", family="self-speculation")
class EarlyExit(Drafter):
    """The target's first layers draft a chain, the remaining ones go on from there and verify it.

    Nothing is computed twice: drafted tokens wait with their shallow states and pass the deep layers
    together. With `layer` and `length` left at 0, both are chosen anew in every step, as the number
    of tokens expected per layer computed, from how often each exit was right so far. Models that
    were not trained to exit early are seldom right and accept little: then it stops drafting, but
    for a trial now and again.

    Paper: DEL (Entezari Zarch et al., 2025); synchronised parallel decoding of FREE (Bae et al., 2023);
      LayerSkip (Elhoushi et al., 2024)
    Exactness: exact
    Needs: nothing
    Cost per step: `length` + 1 passes over the first `layer` layers, and `length` further nodes in
      one pass over the others
    """

    def __init__(self, *, layer: int = 0, length: int = 0) -> None:
        if layer < 0 or length < 0:
            raise ValueError("needs layer >= 0 and length >= 0 (0: chosen on line)")
        self.layer = layer
        self.length = length
        self._odds = PerTenant(Odds)

    def demand(self, view: View) -> Demand:
        _, length, gain = self._choice(view)
        most = max(0, min(length, view.limit - view.end - 1))
        return Demand(most=most, gain=gain)

    def _choice(self, view: View) -> tuple[int, int, float]:
        """Exit, length and expected gain that promise the most tokens per layer computed."""
        depth = view.layers
        exits = [self.layer] if self.layer else sorted({max(1, int(depth * d)) for d in DEPTHS})
        exits = [layer for layer in exits if layer < depth]
        if not exits:
            return 0, 0, 0.0
        odds: Odds = view.state or self._odds.of(view.salt)
        best, value = (exits[0], self.length, 0.0), 0.0 if self.length else 1.0 / depth
        for layer in exits:
            chance, expected, tokens = odds.chance(_sign(layer), 0.5), 1.0, 1.0
            for length in range(1, (self.length or LONGEST) + 1):
                expected *= chance
                tokens += expected
                worth = tokens / ((length + 1) * layer + depth - layer)
                if worth > value and self.length in (0, length):
                    best, value = (layer, length, tokens - 1.0), worth
        if best[1] == 0 and view.steps % RETRY == 0:
            return exits[view.steps // RETRY % len(exits)], 1, 0.5
        return best

    def propose(self, view: View, room: int) -> Rounds:
        given = view.given()
        layer, length, _ = self._choice(view)
        length = min(room, length, view.limit - view.end - 1)
        if length < 1 or len(given) > 1:  # a prompt goes through all layers at once
            return Guess().proposal(view)
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

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Odds:
        odds: Odds = view.state or Odds(self._odds.of(view.salt))
        if proposal.layers is not None:
            drafted, held = len(proposal.graph) - proposal.given, len(verdict.settled) - 1
            for i in range(min(drafted, held + 1)):
                odds.learn(_sign(proposal.layers[0]), i < held)
        return odds


def _sign(layer: int) -> Sign:
    return Sign("early-exit", (layer,))
