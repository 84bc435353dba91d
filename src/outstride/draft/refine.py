"""Open positions carry what the model believes of them, not just a mask."""

from __future__ import annotations

from outstride.core.canvas import recall
from outstride.core.graph import Mixture
from outstride.core.proposal import Wants
from outstride.core.sequence import View
from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("refine", family="diffusion", acceptor="refine")
class Refine(Canvas):
    """Lets beliefs settle before tokens: a mask is blended with the embeddings of its likeliest tokens.

    An open position enters a pass as a mixture of the mask and its `tokens` likeliest tokens, whose
    share is `blend` times its certainty. Up to `latent` passes only refine these beliefs, until their
    mean KL divergence between passes falls below `calm`; then positions are settled by `threshold`,
    and all the rest once the divergence is below `still`.

    Paper: Latent Refinement Decoding, LRD (Zhu et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block, whole rows of logits; some passes settle nothing
    """

    asks = Wants(logprobs=0, logits=True)

    def __init__(
        self,
        *,
        threshold: float = 0.9,
        blend: float = 0.5,
        tokens: int = 8,
        latent: int = 4,
        calm: float = 0.1,
        still: float = 0.001,
        block: int = 0,
    ) -> None:
        super().__init__(block=block)
        if not (0 < threshold <= 1 and 0 <= blend <= 1 and tokens >= 1 and latent >= 0):
            raise ValueError(
                "needs 0 < threshold <= 1, 0 <= blend <= 1, tokens >= 1 and latent >= 0"
            )
        if calm < 0 or still < 0:
            raise ValueError("needs calm >= 0 and still >= 0")

    def input(self, view: View, position: int, mask: int) -> int | Mixture:
        note = recall(view).note
        if view.token_at(position) is None and note is not None and position in note.inputs:
            mixture: Mixture = note.inputs[position]
            return mixture
        return super().input(view, position, mask)
