"""What the cost model learns from a step that was taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outstride.core.proposal import Proposal
from outstride.core.sequence import View
from outstride.policy.cost_model import CostModel, DraftSource
from outstride.policy.draft_budget import Allocation, parts_of


class ObservedStep(Protocol):
    """One sequence's part in a step that was taken, as the engine keeps it."""

    allocation: Allocation
    view: View
    proposal: Proposal
    head_rounds: dict[str, Proposal]
    """What each draft head scored in this step."""


def learn_from_step(
    cost: CostModel,
    parts: Sequence[ObservedStep],
    nodes: int,
    seconds: float,
    draft_seconds: float,
    *,
    sample_plain: bool,
) -> None:
    """Learns from a step of `nodes` nodes: seconds in all, and those that went by while drafting.

    sample_plain: whether to learn from a plain step of a single sequence. These are all alike and
    short, so the caller leaves most of them out.
    """
    users = [part for part in parts if part.head_rounds]
    if users and len(parts) == 1 and _overlaps(users[0]):
        # The pass was under way while the draft was awaited: only both together are known.
        if _cost_aware(users[0]):
            extra = seconds - cost.curve(nodes)[nodes]
            cost.observe_drafting(1, extra, DraftSource.OVERLAPPED_HEAD)
        return
    if not users:
        cost.observe_no_head()
        if len(parts) == 1 and nodes == 1 and not sample_plain:
            return
    chunks, decoding = parts_of([part.allocation for part in parts])
    drafting = [part for part in parts if part.allocation.draft]
    if drafting and all(_cost_aware(part) for part in drafting):
        count, source = len(users), DraftSource.of(len(users), overlapped=False)
        cost.observe_drafting(count or len(drafting), draft_seconds, source)
    # The time of drafting says nothing about passes, nor do passes over some of the layers.
    if all(part.proposal.layers is None for part in parts):
        cost.observe(nodes, seconds - draft_seconds, chunks, decoding)


def _overlaps(part: ObservedStep) -> bool:
    """Whether a draft head took part that is scored while it still drafts."""
    return any(part.view.draft_head(name).device_chain for name in part.head_rounds)


def _cost_aware(part: ObservedStep) -> bool:
    return part.allocation.sequence.method.drafter.cost_aware
