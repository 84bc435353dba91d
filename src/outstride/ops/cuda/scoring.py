"""`PassScorer`: launches passes together with their LM head, and starts run-ahead after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from outstride.core.proposal import Scores
from outstride.ops.contract import HeadInput
from outstride.ops.cuda.batch_metadata import BatchMetadata
from outstride.ops.cuda.chain import request_chain
from outstride.ops.cuda.draft_heads import CudaDraftHead
from outstride.ops.cuda.launch import DeferredPass, PassLauncher
from outstride.ops.cuda.lm_head import DeviceLMHead, SamplingKernels, padded
from outstride.ops.cuda.metadata import MAX_CANDIDATES, MAX_HEAD_ROWS, HeaderField
from outstride.ops.cuda.run_ahead.controller import LaunchedPass, RunAhead


class PassScorer:
    """The LM head of a model and those of its draft heads."""

    def __init__(
        self,
        head: DeviceLMHead,
        draft_heads: Mapping[str, CudaDraftHead],
        launcher: PassLauncher,
        run_ahead: RunAhead,
    ) -> None:
        self.head = head
        self._draft_heads, self._launcher, self._run_ahead = draft_heads, launcher, run_ahead

    def _head_of(self, draft_head: str) -> DeviceLMHead:
        """The model's own, or that of a draft head."""
        return self._draft_heads[draft_head].head if draft_head else self.head

    def score_computed(
        self, wanted: Sequence[HeadInput], low: torch.Tensor
    ) -> Callable[[], list[Scores]]:
        """Scores of hidden states that are computed already, some perhaps those of draft heads.

        low: the buffer in which hidden states usually are.
        """
        groups: dict[str, list[int]] = {}
        for i, item in enumerate(wanted):
            groups.setdefault(item.proposal.draft_head, []).append(i)
        pending = [
            (members, self._head_of(name).alone([wanted[i] for i in members], low))
            for name, members in groups.items()
        ]

        def scores() -> list[Scores]:
            found = {
                i: one for members, wait in pending for i, one in zip(members, wait(), strict=True)
            }
            return [found[i] for i in range(len(wanted))]

        return scores

    def score_deferred(
        self,
        deferred: DeferredPass,
        metadata: BatchMetadata,
        wanted: Sequence[HeadInput],
        low: torch.Tensor,
    ) -> Callable[[], list[Scores]]:
        """Launches a whole pass with its LM head; where it can be known, the pass after it, too."""
        some = next((item for item in wanted if len(item.nodes)), wanted[0])
        head = self._head_of(some.proposal.draft_head)
        count = sum(len(item.nodes) for item in wanted)
        if not 0 < count <= MAX_HEAD_ROWS:
            self._launcher.start(metadata, deferred, 0, SamplingKernels(), head)
            return head.alone(wanted, low)
        _, rows = head.rows_of(wanted, low)
        records = metadata.set_head_rows(rows)
        kernels, plain = head.fill(records, wanted)
        reply = head.replies.take(count)
        metadata.words[HeaderField.REPLY] = reply.slot
        own = head is self.head
        if not own and len(wanted) == 1 and count <= MAX_CANDIDATES:  # ask for a chain, too
            (item,) = wanted
            reply.chain_length = count
            first = item.proposal.graph.positions.item(int(item.nodes[0]))
            request_chain(metadata.words, count, item.proposal.sampling, first)
        # A draft head has few layers, and the pass after a decode step is launched early.
        cut = own and deferred.batch.steps is None
        self._launcher.start(metadata, deferred, padded(count), kernels, head, cut=cut)
        reply.launched()
        if plain:
            self._run_ahead.after(
                LaunchedPass(deferred, metadata, wanted, head, kernels, records, reply)
            )
        return head.collect(wanted, reply, plain)
