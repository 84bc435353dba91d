"""`plain`: one token per pass, the text that every exact method must return."""

from __future__ import annotations

from outstride.core.contracts import Drafter
from outstride.registry import method


@method("plain", family="baseline")
class Plain(Drafter):
    """One token per pass, nothing drafted.

    Paper: none; this is ordinary autoregressive decoding
    Exactness: exact by definition
    Needs: nothing
    Cost per step: one node
    """
