"""`any-subset`: parallel samples of all masks, checked one after the other in a single pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outstride.core.contracts import AttentionPattern, Demand, MaskedSpec, Rounds
from outstride.core.graph import FloatArray, NodeId, Position, TokenId, chain
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sampling import LogitsProcessors, Purpose, probabilities, sample, uniform
from outstride.core.sequence import View
from outstride.diffusion.canvas import CanvasState, random_priority, recall, spec_of
from outstride.diffusion.unmasker import Prediction, Unmasker, logits_of, predictions
from outstride.registry import method


@dataclass(frozen=True, slots=True)
class SampledMasks:
    """Tokens sampled in parallel that wait to be checked, by position in the order of settling."""

    tokens: dict[int, int]
    rows: dict[int, FloatArray]
    """The distributions that they were sampled from."""


@method("any-subset", family="diffusion")
class AnySubsetUnmasker(Unmasker):
    """Guesses all masks at once, then checks the guesses one after the other in a single pass.

    One pass samples every position of the window given the settled tokens alone. The next pass
    computes these samples as a chain, in the order of settling, with a mask next to each: its row is
    the distribution given all samples before it. Rejection sampling keeps a run of them and replaces
    the first that fails. The first sample always holds, so there are never more passes than tokens.
    `order` is left (to right) or random; under a grammar it is always left, because a grammar only
    knows what may follow a complete beginning. The speculative decoding of the paper is here,
    with samples of the model itself as the draft. The any-subset models that the paper trains are
    not: any causal model with masks that do not see each other will do.

    Paper: any-subset speculative decoding, ASSD (Guo and Ermon, 2025), without its models and
      their training
    Exactness: distribution of the model's own one-by-one sampling in the same order
    Needs: an any-order model with causal attention
    Cost per step: in turn, one window of masks, and up to twice as many nodes
    """

    def __init__(self, *, order: str = "left", block: int = 8) -> None:
        super().__init__(block=block)
        if order not in ("left", "random") or block < 1:
            raise ValueError("needs order left or random, and block >= 1")
        self.order = order

    def unsupported_reason(
        self, vision: AttentionPattern, masking: MaskedSpec | None
    ) -> str | None:
        if vision.block is not None or masking is None or masking.block is not None:
            return "it needs causal attention and masks that do not see each other"
        return super().unsupported_reason(vision, masking)

    def _open(self, view: View) -> list[int]:
        """Open positions of the window in the order of settling."""
        canvas = CanvasState(view)
        positions = canvas.open(canvas.block(self.block))
        if self.order == "random" and view.grammar is None:
            positions.sort(key=lambda p: (random_priority(view, 0, p), p))
        return positions

    def demand(self, view: View) -> Demand:
        waiting: SampledMasks | None = recall(view).note
        size = len(self._open(view)) if waiting is None else 2 * len(waiting.tokens)
        size += len(self._ready(view))
        return Demand(min_nodes=size, max_nodes=size, gain=1.0)

    def propose(self, view: View, budget: int) -> Rounds:
        masked, waiting = spec_of(view), recall(view).note
        if budget <= 0 or masked is None:
            return (yield from super().propose(view, 0))
        graph = given = self._given(view)
        above, nodes = NodeId(len(given) - 1), []
        if waiting is None:
            for position in self._open(view):
                nodes.append(len(graph))
                graph = graph.grow(chain([masked.token], position, probe=True), at=above)
        else:
            for position, token in waiting.tokens.items():
                nodes.append(len(graph))
                graph = graph.grow(chain([masked.token], position, probe=True), at=above)
                graph = graph.grow(chain([token], position), at=above)
                above = NodeId(len(graph) - 1)
        constrained = view.grammar is not None
        wants = Wants(nodes=tuple(nodes), logprobs=0, rows=True, logits=constrained)
        return Proposal(graph, len(given), offset=0, wants=wants)

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        return found[:1]

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        waiting: SampledMasks | None = recall(view).note
        found = {prediction.node: prediction for prediction in predictions(proposal, scores)}
        samples = [found[node] for node in sorted(found)]
        if not samples:
            keep = tuple(NodeId(node) for node in range(proposal.given))
            return Verdict(keep=keep, note=waiting)
        if waiting is None:
            return self._sample(view, proposal, scores, samples)
        return self._check(view, proposal, scores, samples, waiting)

    def _sample(
        self, view: View, proposal: Proposal, scores: Scores, samples: list[Prediction]
    ) -> Verdict:
        """Settles the first sample; the others wait for the next pass."""
        first, *rest = samples
        if view.closing(first.position, first.token):
            rest = [p for p in rest if p.position < first.position]
        rows = {p.position: scores.probabilities(p.node) for p in rest}
        return Verdict(
            settled={Position(first.position): TokenId(first.token)},
            keep=tuple(NodeId(node) for node in range(proposal.given)),
            nodes={Position(first.position): first.node},
            note=SampledMasks({p.position: p.token for p in rest}, rows) if rest else None,
        )

    def _check(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        samples: list[Prediction],
        waiting: SampledMasks,
    ) -> Verdict:
        """Settles the run of waiting samples that rejection sampling keeps, and one replacement."""
        keep = [NodeId(node) for node in range(proposal.given)]
        settled: dict[Position, TokenId] = {}
        nodes: dict[Position, NodeId] = {}
        text = view.tokens[view.prompt_length :]
        for prediction in samples:
            position = Position(prediction.position)
            token, q = waiting.tokens[prediction.position], waiting.rows[prediction.position]
            p = self._row(view, proposal, scores, prediction, text)
            if p is None:
                break
            nodes[position] = prediction.node
            draw = uniform(replace(proposal.sampling, purpose=Purpose.ACCEPT), position)
            if draw * float(q[token]) < float(p[token]):
                settled[position] = TokenId(token)
                text = [*text, token]
                keep.append(NodeId(prediction.node + 1))  # the sample stands after its mask
                if view.closing(position, token):
                    break
                continue
            rest = np.maximum(p - q, np.float32(0.0))
            residual = replace(proposal.sampling, purpose=Purpose.RESIDUAL)
            settled[position] = TokenId(sample(rest if rest.any() else p, residual, position))
            break
        return Verdict(settled=settled, keep=tuple(keep), nodes=nodes)

    def _row(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        prediction: Prediction,
        text: Sequence[int],
    ) -> FloatArray | None:
        """The distribution at a position after the text that is taken; None where nothing may follow.

        The engine attached the grammar's mask for what was settled before the pass; here it is that
        for the path that was accepted since.
        """
        if view.grammar is None:
            return scores.probabilities(prediction.node)
        allowed = view.grammar.allowed(text)
        if allowed is not None and not allowed.any():
            return None  # the next step reports it: then this is no draft any more
        processors = proposal.processors.get(prediction.node, LogitsProcessors())
        row = replace(processors, allowed=allowed).apply(logits_of(scores, prediction))
        return probabilities(row, proposal.sampling)
