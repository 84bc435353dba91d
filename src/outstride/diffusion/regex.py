"""`regex`: settle tokens of the likeliest text that matches a regular expression."""

from __future__ import annotations

from dataclasses import replace

import interegular
import numpy as np
from interegular.patterns import InvalidSyntax, Unsupported

from outstride.core.graph import FloatArray
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sampling import gumbel
from outstride.core.sequence import View
from outstride.core.softmax import log_softmax, softmax
from outstride.diffusion.canvas import CanvasState
from outstride.diffusion.token_automaton import IMPOSSIBLE, PathSlot, TokenAutomaton
from outstride.diffusion.unmasker import Prediction, Unmasker, logits_of
from outstride.errors import InvalidParams, MethodFailed
from outstride.registry import method


@method("regex", family="diffusion")
class RegexUnmasker(Unmasker):
    """Fills in text that matches the regular expression `pattern`, as a whole and always.

    Dynamic programming over the states of the pattern finds, at each pass, the likeliest filling of the
    block that can still be completed within the limit on tokens; of its tokens, those of at least the
    probability `threshold` are settled, and always one. Temperature and seed apply; filters such as
    top_p do not, for they might leave nothing that matches.

    Paper: DINGO (Suresh et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block, whole rows of logits; on the host, states times vocabulary per position
    """

    asks = Wants(logprobs=0, logits=True)

    def __init__(self, *, pattern: str, threshold: float = 0.9, block: int = 0) -> None:
        super().__init__(block=block)
        if not 0 < threshold <= 1:
            raise ValueError("needs 0 < threshold <= 1")
        try:
            interegular.parse_pattern(pattern).to_fsm()
        except (InvalidSyntax, Unsupported) as error:
            raise ValueError(f"{pattern!r} is not a regular expression that it knows") from error
        self.pattern = pattern
        self.threshold = threshold
        self._automaton: tuple[object, TokenAutomaton] | None = None

    def _machine(self, view: View) -> TokenAutomaton:
        token_to_bytes = view.token_to_bytes
        if token_to_bytes is None:
            raise MethodFailed("regex needs an engine that knows the bytes of each token")
        if self._automaton is None or self._automaton[0] != token_to_bytes:
            automaton = TokenAutomaton(self.pattern, token_to_bytes, view.vocab_size)
            self._automaton = (token_to_bytes, automaton)
        return self._automaton[1]

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        canvas, at = CanvasState(view), {p.position: p for p in found}
        stop = max(canvas.block(self.block).stop, found[-1].position + 1)
        positions = range(canvas.end, min(stop, canvas.stop))
        path = self._best_path(view, canvas, positions, proposal, scores, at)
        chosen = []
        for position, token in zip(positions, path, strict=True):
            if token is not None and position in at:
                prediction = at[position]
                probability = float(softmax(logits_of(scores, prediction))[token])
                logprob = float(np.log(max(probability, 1e-30)))
                chosen.append(replace(prediction, token=token, logprob=logprob))
        sure = [p for p in chosen if p.forced or p.probability >= self.threshold]
        return sure or [max(chosen, key=lambda p: (p.logprob, -p.position))]

    def _best_path(
        self,
        view: View,
        canvas: CanvasState,
        positions: range,
        proposal: Proposal,
        scores: Scores,
        at: dict[int, Prediction],
    ) -> list[int | None]:
        """The best tokens for these positions. What is settled of them lies on one path to a complete
        text, so a later pass always finds a way on."""
        machine, slots = self._machine(view), []
        for position in positions:
            prediction = at.get(position)
            row = None if prediction is None else self._scores(proposal, scores, prediction)
            slots.append(PathSlot(row, canvas.token(position), tuple(view.endings(position))))
        state, path = machine.read(self._text(view, canvas)), None
        if state is not None:
            path = machine.best_path(state, slots, view.limit - positions.stop)
        if path is None:
            raise InvalidParams(
                f"no text of at most {view.limit - view.prompt_length} tokens matches the pattern "
                f"{self.pattern!r}; allow more tokens"
            )
        return path

    def _text(self, view: View, canvas: CanvasState) -> list[int]:
        """The answer up to the first gap."""
        return [
            token
            for position in range(view.prompt_length, canvas.end)
            if (token := canvas.token(position)) is not None
        ]

    def _scores(self, proposal: Proposal, scores: Scores, prediction: Prediction) -> FloatArray:
        """Log-probabilities of all tokens at a position, processed and, if sampled, with noise."""
        row, sampling = logits_of(scores, prediction), proposal.sampling
        if (processors := proposal.processors.get(prediction.node)) is not None:
            row = processors.apply(row)
        x = log_softmax(row.astype(np.float64) / (sampling.temperature or 1.0))
        if sampling.temperature > 0.0:
            x += gumbel(sampling, prediction.position, np.arange(len(row)))
        return np.maximum(x, IMPOSSIBLE).astype(np.float32)
