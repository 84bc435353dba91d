"""`jacobi`: a model is taught to see through its own half-finished guesses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as fn

from outstride.core.contracts import CAUSAL
from outstride.train.recipe import Measured, recipe
from outstride.train.target import Target
from outstride.train.whole import Whole
from outstride.train.words import Rows

_TEXTS, _LONG = 12, 40
"""Held-out texts that are measured, and tokens of each."""


@dataclass(slots=True)
class Guesses:
    """Rows of text with blocks of guesses behind them; a block begins at an anchor.

    Its nodes hold guesses for the positions behind the anchor. They see the text up to the anchor and
    the guesses before them.
    """

    tokens: torch.Tensor
    """[rows, length + nodes]: the texts, then the blocks."""
    places: torch.Tensor
    sees: torch.Tensor
    """[rows, length + nodes, length + nodes]"""
    length: int
    block: int
    right: torch.Tensor
    """What stands in the text behind the position of each node: [rows, blocks, block]."""
    inside: torch.Tensor
    """Whether that is within the text."""


@recipe("jacobi")
class Jacobi(Whole):
    """Fine-tunes a model on its own fixed-point iterations, so that guesses come true in few passes.

    Jacobi decoding guesses the next positions, lets the model correct all of them at once, and goes on
    until nothing changes. Here the model goes through such iterations at random places of its own
    greedy texts, and learns from every stage of them, the noise of the beginning included, what stands
    there in the end. That its words stay its words, a distance to the original's distribution is
    added. It is the model itself that changes.

    block: positions that are guessed together. blocks: of them per text and step.
    keep: the weight of staying as it was.

    Paper: Jacobi Forcing (Hu et al., 2025); noise as in Make Some Noise (Wang et al., 2024);
      consistency training of CLLM (Kou et al., 2024)
    Makes: the model itself, for lookahead
    """

    def __init__(
        self,
        target: Target,
        *,
        block: int = 8,
        blocks: int = 8,
        keep: float = 1.0,
    ) -> None:
        if min(block - 1, blocks) < 1 or keep < 0:
            raise ValueError("needs block of 2 or more, blocks of 1 or more and keep of 0 or more")
        if target.config.vision != CAUSAL:
            raise ValueError("is for models that continue their text; for masks there is certainty")
        super().__init__(target)
        self.block, self.blocks, self.keep = block, blocks, keep

    def loss(self, rows: Rows, numbers: torch.Generator) -> torch.Tensor:
        """What stages of iterations become, and the distance to the original on the text."""
        rows = _cut(rows)
        stages = int(torch.randint(self.block, (1,), generator=numbers, device=numbers.device))
        given = self._guesses(rows, numbers)
        for _ in range(stages):
            self._correct(given)
        states = self.reader.states(given.tokens, given.sees, given.places)
        text, nodes = states[:, : given.length], states[:, given.length :]
        counted = given.inside & ~rows.sampled[:, None, None]
        if not bool(counted.any()):
            counted = given.inside
        asked = counted.flatten(1)
        wanted = given.right.flatten(1)[asked]
        becoming = self.reader.over(nodes[asked], _wrong, wanted).sum() / asked.sum().clamp(min=1)
        return becoming + self.keep * self._distance(rows, given, text)

    def _distance(self, rows: Rows, given: Guesses, text: torch.Tensor) -> torch.Tensor:
        """From the original's distribution behind each position of the answers."""
        said = _said(rows)
        with torch.no_grad():
            sees = given.sees[:, : given.length, : given.length]
            wanted = self.teacher.states(rows.tokens, sees)[said]
        teacher = self.teacher

        def apart(logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                shares = teacher.logits(states).log_softmax(-1)
            return (shares.exp() * (shares - logits.log_softmax(-1))).sum(-1)

        return self.reader.over(text[said], apart, wanted).mean()

    # --- iterations -------------------------------------------------------------------------------

    def _guesses(self, rows: Rows, numbers: torch.Generator) -> Guesses:
        """Blocks at random anchors within the answers, filled with tokens from anywhere before."""
        (count, length), device = rows.tokens.shape, rows.tokens.device
        many, block = self.blocks, self.block
        draws = torch.rand(count, many, generator=numbers, device=device)
        room = (rows.stops - rows.starts)[:, None]
        anchors = rows.starts[:, None] - 1 + (draws * room).long()
        anchors = torch.minimum(anchors, rows.stops[:, None] - 2)
        places = anchors[..., None] + 1 + torch.arange(block, device=device)
        noise = torch.rand(count, many, block, generator=numbers, device=device)
        sources = (noise * (anchors[..., None] + 1)).long()
        guessed = rows.tokens.gather(1, sources.flatten(1))
        behind = (places + 1).clamp(max=length - 1)
        own = torch.arange(many, device=device).repeat_interleave(block)
        text = torch.arange(length, device=device)
        flat = places.flatten(1)
        before = text <= anchors[:, own, None]
        among = (own[:, None] == own) & (flat[:, None] <= flat[:, :, None])
        sees = torch.zeros(
            count, length + len(own), length + len(own), dtype=torch.bool, device=device
        )
        sees[:, :length, :length] = text[None] <= text[:, None]
        sees[:, length:, :length] = before
        sees[:, length:, length:] = among
        return Guesses(
            tokens=torch.cat([rows.tokens, guessed], dim=1),
            places=torch.cat([text.expand(count, -1), flat], dim=1),
            sees=sees,
            length=length,
            block=block,
            right=rows.tokens.gather(1, behind.flatten(1)).view_as(places),
            inside=places + 1 < rows.stops[:, None, None],
        )

    @torch.no_grad()
    def _correct(self, given: Guesses) -> None:
        """One iteration: each guess becomes what the model says behind those before it."""
        length, block = given.length, given.block
        states = self.reader.states(given.tokens, given.sees, given.places)
        places = given.places[:, length:].view(len(states), -1, block)
        anchors = (places[..., 0] - 1)[..., None].expand(-1, -1, states.shape[-1])
        first = states.gather(1, anchors)[:, :, None]
        nodes = states[:, length:].view(*places.shape, -1)
        fronts = torch.cat([first, nodes[:, :, :-1]], dim=2).flatten(0, 2)
        said = self.reader.over(fronts, lambda logits: logits.argmax(-1))
        given.tokens[:, length:] = said.view(len(states), -1)

    @torch.no_grad()
    def measure(self, held: Rows) -> Measured:
        """Jacobi decoding behind held-out prompts, as `lookahead:level=2` does it."""
        rows = held if bool(held.sampled.all()) else held.take(~held.sampled)
        rows = _cut(rows.take(slice(_TEXTS)).to(self.target.device))
        with self.target.autocast():
            emitted, passes = self._decode(rows)
            said, sees = _said(rows), _before(rows.tokens)
            pair = [r.states(rows.tokens, sees)[said] for r in (self.reader, self.teacher)]
            ours, theirs = (
                r.over(x, lambda logits: logits.argmax(-1))
                for r, x in zip((self.reader, self.teacher), pair, strict=True)
            )
        agreed = float((ours == theirs).float().mean())
        return Measured(emitted / max(passes, 1), figures={"agrees_with_the_original": agreed})

    def _decode(self, rows: Rows) -> tuple[int, int]:
        """Tokens and passes of plain Jacobi decoding over all prompts, each with its own window."""
        count, device, size = len(rows), rows.tokens.device, self.block - 1
        width = int(rows.starts.max()) + _LONG + size + 1
        tokens = torch.zeros(count, width, dtype=torch.long, device=device)
        known = min(width, rows.tokens.shape[1])
        tokens[:, :known] = rows.tokens[:, :known]
        ends, places = rows.starts.clone(), torch.arange(width, device=device)
        limits = torch.minimum(rows.stops, rows.starts + _LONG)
        steps = torch.arange(size, device=device)
        window = tokens.gather(1, (7919 * (ends[:, None] + steps)) % ends[:, None])
        emitted = passes = 0
        sees = _before(tokens)
        while bool((live := ends < limits).any()):
            tokens.scatter_(1, ends[:, None] + steps, window)
            states = self.reader.states(tokens, sees)
            asked = ends[:, None] - 1 + torch.arange(size + 1, device=device)
            index = asked[..., None].expand(-1, -1, states.shape[-1])
            said = self.reader.over(
                states.gather(1, index).flatten(0, 1), lambda logits: logits.argmax(-1)
            ).view(count, -1)
            run = (said[:, :-1] == window).long().cumprod(1).sum(1)
            taken = torch.minimum(run + 1, limits - ends) * live
            emitted, passes = emitted + int(taken.sum()), passes + int(live.sum())
            fresh = (places >= ends[:, None]) & (places < (ends + taken)[:, None])
            spread = said.gather(1, (places - ends[:, None]).clamp(0, size))
            tokens = torch.where(fresh, spread, tokens)
            # What was said behind the run is the next window; its open end comes from the text.
            fill = tokens.gather(1, (7919 * (ends[:, None] + steps + size)) % ends[:, None])
            shift = (taken[:, None] + steps).clamp(max=size)
            window = torch.where(taken[:, None] + steps <= size, said.gather(1, shift), fill)
            ends = ends + taken
        return emitted, passes


def _wrong(logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return fn.cross_entropy(logits, right, reduction="none")


def _cut(rows: Rows) -> Rows:
    """Without the columns that are behind all texts."""
    return Rows(
        rows.tokens[:, : int(rows.stops.max())], rows.starts, rows.stops, rows.sampled, rows.keys
    )


def _before(tokens: torch.Tensor) -> torch.Tensor:
    """Each position sees those up to itself: [rows, length, length]."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return (places[None] <= places[:, None]).expand(len(tokens), -1, -1)


def _said(rows: Rows) -> torch.Tensor:
    """The positions behind which a token of an answer stands."""
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    return (places >= rows.starts[:, None] - 1) & (places < rows.stops[:, None] - 1)
