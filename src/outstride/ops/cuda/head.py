"""`Head`: the vocabulary and the choice of tokens, for rows of states that are on the card.

What goes back to the host is a few tokens a row. Only what cannot be said in tokens (log-probabilities,
whole rows, rules of a request) takes rows of logits there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outstride.core.graph import IntArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.select import select
from outstride.ops.contract import Wanted
from outstride.ops.cuda.chain import Chain
from outstride.ops.cuda.choose import COUNT, Chooser, fill
from outstride.ops.cuda.layout import BEST, HEAD_ROWS, HEADER, PLACES, SIZES, Words
from outstride.ops.cuda.linear import FLOATS, linear
from outstride.ops.cuda.matrices import Matrix, Scratch, up
from outstride.ops.cuda.transfer import Replies, Reply, Ring


@dataclass(frozen=True, slots=True)
class Rows:
    """States: some rows of a buffer, and the layer that they enter next."""

    x: torch.Tensor
    low: torch.Tensor
    start: int
    stop: int
    layer: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Kind:
    """What kernels the choice of some rows takes."""

    filtered: bool = False
    """Whether some of them have filters."""
    several: bool = False
    """Whether some of them want more than one token."""


def padded(rows: int) -> int:
    """For how many rows kernels are launched."""
    return next((size for size in SIZES if rows <= size), up(rows, SIZES[-1]))


def simple(proposal: Proposal) -> bool:
    """Whether a proposal wants a few tokens a node and nothing else."""
    wants = proposal.wants
    return (
        wants.best <= BEST
        and wants.logprobs is None
        and not wants.rows
        and not wants.logits
        and not proposal.rules
    )


def fill_draws(draws: Words, wanted: Sequence[Wanted]) -> tuple[Kind, bool]:
    """Describes everybody's draws; says what kernels they take, and whether all are simple."""
    filtered, several, plain, line = False, False, True, 0
    for item in wanted:
        proposal, nodes = item.proposal, item.nodes
        stop = line + len(nodes)
        if not simple(proposal):
            plain = False
        elif proposal.wants.best > 1:
            several = True
            draws[line:stop, COUNT] = proposal.wants.best
        if proposal.draw.temperature != 0.0 and stop > line:
            filtered |= fill(
                draws[line:stop], proposal.draw, proposal.graph.positions[nodes] + proposal.offset
            )
        line = stop
    return Kind(filtered, several), plain


def width(proposal: Proposal, vocab: int) -> int:
    """How many tokens a node of this proposal gets."""
    return max(1, min(proposal.wants.best, vocab))


class Head:
    """The head of a model, and what comes back from it; or that of a trained part, which guesses.

    listed: the tokens that a part's guesses are among. Their logits come back with them, and with
      `chain` the likeliest chain of them, if the words ask for it.
    """

    def __init__(
        self,
        matrix: Matrix,
        eps: float,
        vocab: int,
        states: int,
        device: torch.device,
        dtype: torch.dtype,
        pdl: bool,
        listed: IntArray | None = None,
        chain: Chain | None = None,
    ) -> None:
        self._listed = listed
        self.chain = chain
        self.matrix, self._eps, self.vocab, self._pdl = matrix, eps, vocab, pdl
        self._states, self._device, self._dtype = states, device, dtype
        self._scratch = Scratch.make(device, HEAD_ROWS)
        shape = (HEAD_ROWS, up(vocab, 256))
        self._logits = torch.zeros(shape, dtype=torch.float32, device=device)
        self._chooser = Chooser(device, HEAD_ROWS, vocab)
        self._words = Ring(device, HEADER + HEAD_ROWS * (1 + PLACES))
        self.replies = Replies(device, guesses=listed is not None)

    @property
    def chosen(self) -> torch.Tensor:
        """The tokens that were chosen last."""
        return self._chooser.best

    def launch(
        self, low: torch.Tensor, rows: int, kind: Kind, words: torch.Tensor, at: int, room: int
    ) -> None:
        """Logits of the rows that words from `at` on name, and the choice; draws come `room` later."""
        linear(
            self.matrix,
            low,
            rows,
            FLOATS,
            self._scratch,
            out=self._logits,
            norm=self._eps,
            gather=words[at : at + rows],
            pdl=self._pdl,
        )
        draws = words[at + room : at + room + rows * PLACES]
        self._chooser.choose(
            self._logits,
            draws,
            rows,
            self.replies.memory,
            words[:1],
            filtered=kind.filtered,
            several=kind.several,
            sums=self.replies.sums,
        )
        if self.chain is not None:
            chooser, replies = self._chooser, self.replies
            self.chain.find(
                words, chooser.picked, chooser.picked_sums, replies.chains, replies.chances
            )

    def describe(self, draws: Words, wanted: Sequence[Wanted]) -> tuple[Kind, bool]:
        """Describes everybody's draws; says what kernels they take, and whether all are simple."""
        if self._listed is None:
            return fill_draws(draws, wanted)
        line = 0
        for item in wanted:
            draws[line : line + len(item.nodes), COUNT] = self.several(item.proposal)
            line += len(item.nodes)
        return Kind(several=True), True

    def several(self, proposal: Proposal) -> int:
        """How many guesses a part makes for a node."""
        return max(1, min(proposal.wants.best, BEST, self.vocab))

    def found(self, wanted: Sequence[Wanted], reply: Reply) -> list[Scores]:
        """What a start of the head yielded."""
        best = reply.wait()
        scores, start = [], 0
        for item in wanted:
            stop = start + len(item.nodes)
            if self._listed is not None and reply.sums is not None:
                some = slice(start, stop), slice(self.several(item.proposal))
                values = reply.sums[some]
                scores.append(
                    Scores(
                        item.nodes,
                        self._listed[best[some]],
                        values=values,
                        chain=reply.chain,
                        chances=reply.chances,
                    )
                )
            elif simple(item.proposal):
                count = width(item.proposal, self.vocab)
                scores.append(Scores(nodes=item.nodes, best=best[start:stop, :count]))
            else:
                raw = self._logits[start:stop, : self.vocab].cpu().numpy()
                scores.append(select(item.proposal, item.nodes, raw.copy()))
            start = stop
        return scores

    # --- by itself --------------------------------------------------------------------------------

    def alone(self, wanted: Sequence[Wanted], default: torch.Tensor) -> Callable[[], list[Scores]]:
        """The head of states that are there, in pieces; `default` is where states are as a rule."""
        low, places = self.collected(wanted, default)
        pieces: list[list[Callable[[], list[Scores]]]] = [[] for _ in wanted]
        start = 0
        for i, item in enumerate(wanted):
            for at in range(0, len(item.nodes), HEAD_ROWS):
                some = replace(item, nodes=item.nodes[at : at + HEAD_ROWS])
                stop = start + len(some.nodes)
                pieces[i].append(self._piece(some, low, places[start:stop]))
                start = stop

        def scores() -> list[Scores]:
            return [
                Scores.joined([piece()[0] for piece in found]) if found else self._nothing(item)
                for item, found in zip(wanted, pieces, strict=True)
            ]

        return scores

    def _piece(
        self, item: Wanted, low: torch.Tensor, places: list[int]
    ) -> Callable[[], list[Scores]]:
        """Scores of at most HEAD_ROWS nodes."""
        count = len(places)
        rows = padded(count)
        words = np.zeros(HEADER + rows * (1 + PLACES), dtype=np.int32)
        words[HEADER : HEADER + count] = places
        draws = words[HEADER + rows :].reshape(rows, PLACES)
        kind, plain = self.describe(draws, [item])
        reply = self.replies.take(count)
        words[0] = reply.place
        self._words.send(words)
        self.launch(low, rows, kind, self._words.words, HEADER, rows)
        reply.launched()
        return self.collect([item], reply, plain)

    def collect(
        self, wanted: Sequence[Wanted], reply: Reply, plain: bool
    ) -> Callable[[], list[Scores]]:
        """The scores, later if they can wait: rows of logits must be read before more is launched."""
        if plain:
            return lambda: self.found(wanted, reply)
        scores = self.found(wanted, reply)
        return lambda: scores

    def _nothing(self, item: Wanted) -> Scores:
        return select(item.proposal, item.nodes, np.zeros((0, self.vocab), dtype=np.float32))

    def collected(
        self, wanted: Sequence[Wanted], default: torch.Tensor
    ) -> tuple[torch.Tensor, list[int]]:
        """One buffer that holds everybody's states, and the row of each wanted node in it."""
        low: torch.Tensor | None = None
        places: list[int] = []
        for item in wanted:
            state = item.state
            if not len(item.nodes):
                continue
            if not isinstance(state, Rows) or (low is not None and state.low is not low):
                return self._gathered(wanted)
            low = state.low
            places += (item.nodes + (state.start - item.first)).tolist()
        return default if low is None else low, places

    def _gathered(self, wanted: Sequence[Wanted]) -> tuple[torch.Tensor, list[int]]:
        """States from several buffers, copied into one."""
        rows: list[torch.Tensor] = []
        places: list[int] = []
        at = 0
        for item in wanted:
            state = item.state
            if not len(item.nodes):
                continue
            if isinstance(state, Rows):
                rows.append(state.low[state.start : state.stop])
            else:
                array = np.ascontiguousarray(state, dtype=np.float32)
                part = torch.from_numpy(array).to(self._device, self._dtype)
                rows.append(torch.nn.functional.pad(part, (0, self._states - part.shape[1])))
            places += [node - item.first + at for node in item.nodes.tolist()]
            at += len(rows[-1])
        return torch.cat(rows), places
