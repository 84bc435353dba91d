"""Blocks that match a pattern, at the highest probability."""

from __future__ import annotations

import interegular
from interegular.patterns import InvalidSyntax, Unsupported

from outstride.core.proposal import Wants
from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("regex", family="diffusion", acceptor="regex")
class Regex(Canvas):
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
