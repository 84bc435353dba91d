"""`DeviceLMHead`: logits and sampling, for rows of hidden states that are on the GPU.

A few tokens a row go back to the host. Only what cannot be said in tokens (log-probabilities, whole
rows, logits processors of a request) takes rows of logits there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outstride.core.graph import IntArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.scoring import select
from outstride.ops.contract import HeadInput
from outstride.ops.cuda.chain import ChainFinder
from outstride.ops.cuda.host_io import MetadataRing, PassReply, ReplyBuffers
from outstride.ops.cuda.linear import FLOATS, linear
from outstride.ops.cuda.matrices import LinearScratch, PackedMatrix, round_up
from outstride.ops.cuda.metadata import (
    HEADER_SIZE,
    MAX_CANDIDATES,
    MAX_HEAD_ROWS,
    ROW_SIZES,
    SAMPLING_SIZE,
    HeaderField,
    Int32Array,
    SamplingField,
)
from outstride.ops.cuda.sampler import TokenSampler, fill_sampling


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Hidden states: rows `start` to `stop` of two buffers, and the layer that they enter next."""

    x: torch.Tensor
    """[rows, width] in float32."""
    low: torch.Tensor
    """The same in the format of the weights."""
    start: int
    stop: int
    layer: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """Which kernels the sampling of some rows takes."""

    filtered: bool = False
    """Whether some row has top-k, top-p or min-p."""
    several: bool = False
    """Whether some row wants more than one token."""


def padded(rows: int) -> int:
    """For how many rows kernels are launched."""
    return next((size for size in ROW_SIZES if rows <= size), round_up(rows, ROW_SIZES[-1]))


def tokens_only(proposal: Proposal) -> bool:
    """Whether a proposal wants a few tokens a node and nothing else."""
    wants = proposal.wants
    return (
        wants.best <= MAX_CANDIDATES
        and wants.logprobs is None
        and not wants.rows
        and not wants.logits
        and not proposal.processors
    )


def fill_records(records: Int32Array, wanted: Sequence[HeadInput]) -> tuple[SamplingKernels, bool]:
    """Fills the sampling records of all rows; returns their kernels, and whether tokens are enough."""
    filtered, several, plain, line = False, False, True, 0
    for item in wanted:
        proposal, nodes = item.proposal, item.nodes
        stop = line + len(nodes)
        if not tokens_only(proposal):
            plain = False
        elif proposal.wants.best > 1:
            several = True
            records[line:stop, SamplingField.NUM_TOKENS] = proposal.wants.best
        if proposal.sampling.temperature != 0.0 and stop > line:
            positions = proposal.graph.positions[nodes] + proposal.offset
            filtered |= fill_sampling(records[line:stop], proposal.sampling, positions)
        line = stop
    return SamplingKernels(filtered, several), plain


class DeviceLMHead:
    """The LM head of a model, or that of a draft head.

    vocabulary: the tokens that a draft head chooses from. The logits of its candidates come back with
      them, and with `chain` the most likely chain of them, if the header asks for it.
    """

    def __init__(
        self,
        matrix: PackedMatrix,
        eps: float,
        vocab: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        pdl: bool,
        vocabulary: IntArray | None = None,
        chain: ChainFinder | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self.chain = chain
        self.matrix, self._eps, self.vocab, self._pdl = matrix, eps, vocab, pdl
        self._width, self._device, self._dtype = width, device, dtype
        self._scratch = LinearScratch.make(device, MAX_HEAD_ROWS)
        shape = (MAX_HEAD_ROWS, round_up(vocab, 256))
        self._logits = torch.zeros(shape, dtype=torch.float32, device=device)
        self._sampler = TokenSampler(device, MAX_HEAD_ROWS, vocab)
        self._ring = MetadataRing(device, HEADER_SIZE + MAX_HEAD_ROWS * (1 + SAMPLING_SIZE))
        self.replies = ReplyBuffers(device, candidates=vocabulary is not None)

    @property
    def sampled(self) -> torch.Tensor:
        """The tokens that were sampled last [MAX_HEAD_ROWS]."""
        return self._sampler.best

    def launch(
        self,
        low: torch.Tensor,
        rows: int,
        kernels: SamplingKernels,
        words: torch.Tensor,
        rows_at: int,
        sampling_at: int,
    ) -> None:
        """Logits of the rows of `low` that `words` names from `rows_at` on, and their tokens."""
        linear(
            self.matrix,
            low,
            rows,
            FLOATS,
            self._scratch,
            out=self._logits,
            norm=self._eps,
            gather=words[rows_at : rows_at + rows],
            pdl=self._pdl,
        )
        sampler, replies = self._sampler, self.replies
        sampler.sample(
            self._logits,
            words[sampling_at : sampling_at + rows * SAMPLING_SIZE],
            rows,
            replies.tokens,
            words[HeaderField.REPLY : HeaderField.REPLY + 1],
            filtered=kernels.filtered,
            several=kernels.several,
            sums=replies.sums,
        )
        if self.chain is not None:
            self.chain.find(
                words, sampler.picked, sampler.picked_sums, replies.chains, replies.probabilities
            )

    def fill(
        self, records: Int32Array, wanted: Sequence[HeadInput]
    ) -> tuple[SamplingKernels, bool]:
        """Fills sampling records; returns what kernels they take, and whether tokens are enough."""
        if self._vocabulary is None:
            return fill_records(records, wanted)
        line = 0
        for item in wanted:
            stop = line + len(item.nodes)
            records[line:stop, SamplingField.NUM_TOKENS] = self.num_candidates(item.proposal)
            line = stop
        return SamplingKernels(several=True), True

    def num_candidates(self, proposal: Proposal) -> int:
        """How many candidates a draft head gives for a node."""
        return max(1, min(proposal.wants.best, MAX_CANDIDATES, self.vocab))

    def scores(self, wanted: Sequence[HeadInput], reply: PassReply) -> list[Scores]:
        """Waits for the tokens of a launch, and makes scores of them."""
        best = reply.wait()
        scores, start = [], 0
        for item in wanted:
            stop = start + len(item.nodes)
            if self._vocabulary is not None and reply.sums is not None:
                some = slice(start, stop), slice(self.num_candidates(item.proposal))
                values = reply.sums[some]
                scores.append(
                    Scores(
                        item.nodes,
                        self._vocabulary[best[some]],
                        values=values,
                        chain=reply.chain,
                        chain_probabilities=reply.probabilities,
                    )
                )
            elif tokens_only(item.proposal):
                count = max(1, min(item.proposal.wants.best, self.vocab))
                scores.append(Scores(nodes=item.nodes, best=best[start:stop, :count]))
            else:
                raw = self._logits[start:stop, : self.vocab].cpu().numpy()
                scores.append(select(item.proposal, item.nodes, raw.copy()))
            start = stop
        return scores

    # --- without a pass ---------------------------------------------------------------------------

    def alone(
        self, wanted: Sequence[HeadInput], default: torch.Tensor
    ) -> Callable[[], list[Scores]]:
        """Scores of hidden states that are computed, in chunks; `default` is their usual buffer."""
        low, rows = self.rows_of(wanted, default)
        chunks: list[list[Callable[[], list[Scores]]]] = [[] for _ in wanted]
        start = 0
        for i, item in enumerate(wanted):
            for at in range(0, len(item.nodes), MAX_HEAD_ROWS):
                some = replace(item, nodes=item.nodes[at : at + MAX_HEAD_ROWS])
                stop = start + len(some.nodes)
                chunks[i].append(self._chunk(some, low, rows[start:stop]))
                start = stop

        def scores() -> list[Scores]:
            return [
                Scores.joined([chunk()[0] for chunk in found]) if found else self._nothing(item)
                for item, found in zip(wanted, chunks, strict=True)
            ]

        return scores

    def _chunk(
        self, item: HeadInput, low: torch.Tensor, rows: list[int]
    ) -> Callable[[], list[Scores]]:
        """Scores of at most MAX_HEAD_ROWS nodes."""
        count, size = len(rows), padded(len(rows))
        words = np.zeros(HEADER_SIZE + size * (1 + SAMPLING_SIZE), dtype=np.int32)
        words[HEADER_SIZE : HEADER_SIZE + count] = rows
        sampling_at = HEADER_SIZE + size
        kernels, plain = self.fill(words[sampling_at:].reshape(size, SAMPLING_SIZE), [item])
        reply = self.replies.take(count)
        words[HeaderField.REPLY] = reply.slot
        self._ring.send(words)
        self.launch(low, size, kernels, self._ring.words, HEADER_SIZE, sampling_at)
        reply.launched()
        return self.collect([item], reply, plain)

    def collect(
        self, wanted: Sequence[HeadInput], reply: PassReply, plain: bool
    ) -> Callable[[], list[Scores]]:
        """The scores, later if they can wait: logits must be read before more is launched."""
        if plain:
            return lambda: self.scores(wanted, reply)
        scores = self.scores(wanted, reply)
        return lambda: scores

    def _nothing(self, item: HeadInput) -> Scores:
        return select(item.proposal, item.nodes, np.zeros((0, self.vocab), dtype=np.float32))

    def rows_of(
        self, wanted: Sequence[HeadInput], default: torch.Tensor
    ) -> tuple[torch.Tensor, list[int]]:
        """One buffer with the hidden states of all wanted nodes, and the row of each node in it."""
        low: torch.Tensor | None = None
        rows: list[int] = []
        for item in wanted:
            hidden = item.hidden
            if not len(item.nodes):
                continue
            if not isinstance(hidden, HiddenRows) or (low is not None and hidden.low is not low):
                return self._gathered(wanted)
            low = hidden.low
            rows += (item.nodes + (hidden.start - item.first)).tolist()
        return default if low is None else low, rows

    def _gathered(self, wanted: Sequence[HeadInput]) -> tuple[torch.Tensor, list[int]]:
        """Hidden states from several buffers, copied into one."""
        copied: list[torch.Tensor] = []
        rows: list[int] = []
        at = 0
        for item in wanted:
            hidden = item.hidden
            if not len(item.nodes):
                continue
            if isinstance(hidden, HiddenRows):
                copied.append(hidden.low[hidden.start : hidden.stop])
            else:
                array = np.ascontiguousarray(hidden, dtype=np.float32)
                some = torch.from_numpy(array).to(self._device, self._dtype)
                copied.append(torch.nn.functional.pad(some, (0, self._width - some.shape[1])))
            rows += [node - item.first + at for node in item.nodes.tolist()]
            at += len(copied[-1])
        return torch.cat(copied), rows
