"""What the engine and the drafters know of draft heads: one small record for each kind.

A draft head is a trained speculator that is attached to a model: a few further layers, small networks
on stored hidden states, or extra embedding rows. It only drafts; the target model verifies every token,
so no text depends on a draft head. The weights themselves are in the backend (`ops.weights`).

`View.draft_head(name)` returns the base record. A drafter asks `head_of_kind` for the record of the
kind that it can use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from outstride.core.graph import FloatArray, IntArray
from outstride.errors import UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """What all draft heads have.

    kind: the recipe that trained it; a drafter declares the kind that it uses (`Drafter.head_kind`).
    block: how many positions one draft covers, the last settled token included.
    device_chain: whether the backend finds the likeliest chain of drafted tokens itself. It can then
      start the next pass before the host has seen this one.
    """

    autoregressive: ClassVar[bool] = False
    """Whether each drafted token needs the hidden state of the one before it, kept next to its KV.
    Then a later round of a step extends the graph of the round before, and computes only the new
    nodes."""

    kind: str
    block: int
    device_chain: bool = False


@dataclass(frozen=True, slots=True)
class BigramTable:
    """A low-rank correction of a token's logit by the token before it.

    The logit of token t after token s gains left[rows[s]] · right[rows[t]].
    """

    rows: IntArray
    """[vocab_size]: the row of each token in both tables."""
    left: FloatArray
    """[tokens + 1, rank]: by the token before; the last row is for all tokens outside the vocabulary of
    the draft head."""
    right: FloatArray
    """[tokens, rank]: by the token after."""

    @classmethod
    def zeros(cls, vocab_size: int) -> BigramTable:
        """A table that corrects nothing."""
        nothing = np.zeros((1, 1), dtype=np.float32)
        return cls(np.zeros(vocab_size, dtype=np.int64), nothing, nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDraftHead(DraftHead):
    """Layers that draft a whole block in one pass, each position independently of the others.

    After each pass of the target, its hidden states become KV of these layers in the same slots. So the
    draft head has seen what the target has seen, whatever happened to the sequence in between.

    mask: the input token of a position that is to be drafted.
    bigram: joins the independent positions to paths.
    """

    mask: int
    bigram: BigramTable


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleDraftHead(DraftHead):
    """One layer that drafts token by token from the target's hidden states and then from its own."""

    autoregressive: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaDraftHead(DraftHead):
    """Small networks on a stored hidden state of the target, one for each position ahead.

    sequential: whether each network also reads the token and the state of the network before it
      (Hydra), so that it is asked level by level; else all are independent (Medusa).
    feature_range: the columns of `Model.feature` that hold the hidden state which they start from.
    bigram: joins independent networks to paths.
    """

    bigram: BigramTable
    sequential: bool = False
    feature_range: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokensHead(DraftHead):
    """Extra embedding rows that stand for tokens still to come.

    first_token: the id of the first of them; there are `block - 1`.
    rank_accuracy: [block - 1, ranks]: how often the candidate of each depth and rank was right in
      training.
    """

    first_token: int
    rank_accuracy: FloatArray


HeadT = TypeVar("HeadT", bound=DraftHead)


def head_of_kind(head: DraftHead, kind: type[HeadT]) -> HeadT:
    """The same draft head, known to be of this kind; raises UnsupportedModel if it is another one."""
    if not isinstance(head, kind):
        raise UnsupportedModel(
            f"the draft head is {type(head).__name__} (made by {head.kind!r}), but this method "
            f"drafts with {kind.__name__}; pass from=FOLDER with a draft head of that kind"
        )
    return head
