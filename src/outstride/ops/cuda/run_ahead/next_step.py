"""`NextStep`: the decode step after the last one, and whether it is worth launching early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outstride.core.contracts import PassInput
from outstride.core.proposal import Proposal, Wants
from outstride.core.sampling import SamplingSpec
from outstride.ops.cuda.host_io import PassReply
from outstride.ops.cuda.lm_head import SamplingKernels
from outstride.ops.cuda.metadata import Int32Array
from outstride.ops.cuda.run_ahead.decode_steps import DecodeSteps


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """What is asked of the LM head for one sequence, but for its positions."""

    sampling: SamplingSpec
    offset: int
    wants: Wants

    @classmethod
    def of(cls, proposal: Proposal) -> ScoringRequest:
        return cls(proposal.sampling, proposal.offset, proposal.wants)

    def same_as(self, proposal: Proposal) -> bool:
        """Whether a proposal asks for just that, of the whole model and without logits processors."""
        return (
            (proposal.wants is self.wants or proposal.wants == self.wants)
            and (proposal.sampling is self.sampling or proposal.sampling == self.sampling)
            and proposal.offset == self.offset
            and proposal.layers is None
            and not proposal.draft_head
            and not proposal.processors
        )


@dataclass(slots=True)
class NextStep:
    """The pass after the last one, if all sequences go on."""

    steps: DecodeSteps
    before: PassReply
    """Brings its input tokens."""
    sampling: Int32Array
    """The sampling records of its rows."""
    requests: list[ScoringRequest]
    """By row."""
    kernels: SamplingKernels
    reply: PassReply | None = None
    """There once it is launched."""

    def match(self, work: Sequence[PassInput], page_size: int) -> list[int] | None:
        """The rows of this pass that the work asks for, if it asks for nothing else."""
        rows = self.steps.match(work, self.before.wait()[:, 0], page_size)
        if rows is None:
            return None
        for row, piece in zip(rows, work, strict=True):
            if not self.requests[row].same_as(piece.proposal):
                return None
        return rows


class HitRate:
    """Whether the next pass should be launched early: if the engine asked for most of the last ones.

    A pass that is not asked for delays the one that is asked for instead. Where drafts come and go
    that happens often; where now and then a prompt comes in between, it does not matter.
    """

    def __init__(self, rate: float = 0.5) -> None:
        self.rate = rate

    @property
    def enough(self) -> bool:
        return self.rate > 0.5

    def learn(self, hit: bool) -> None:
        """Whether the engine asked for what could be known."""
        self.rate += (hit - self.rate) / 4
