"""Unmasking in torch: what a masked model writes behind many prompts at once, pass by pass.

It takes the course that the engine takes: blocks from left to right, at least one token settled per
pass, nothing behind a settled end of text. Prompts come from rows of words; of their answers only the
length is used, which is how long the canvas is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from outstride.core.contracts import Masking
from outstride.errors import UnsupportedModel
from outstride.models.diffusion import masking_of
from outstride.train.target import Target
from outstride.train.whole import Reader
from outstride.train.words import Rows

NEVER = 1 << 30
"""The time of a position that was not settled; and an end that is not there."""
GIVEN = -1
"""The time of a prompt."""
SEEN = 8
"""So many of the likeliest tokens of a position are looked at."""
_ROWS = 128
"""Texts that are written at once."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a model fills in masks, and which tokens end a text."""

    masking: Masking
    ends: tuple[int, ...]

    @classmethod
    def of(cls, target: Target) -> Manner:
        config, tokenizer = target.config, target.tokenizer
        if config.diffusion is None or tokenizer is None:
            raise UnsupportedModel(f"{target.name or 'this model'} fills in no masks")
        masking = masking_of(config.diffusion, tokenizer, config.vocab_size)
        assert masking is not None
        return cls(masking, tuple(sorted(tokenizer.eos_ids)))

    def width(self, rows: Rows) -> int:
        """Positions of the canvases of these rows: whole blocks."""
        longest, size = int(rows.stops.max()), self.masking.block
        return longest if size is None else -(-longest // size) * size

    def blocks(self, places: torch.Tensor) -> torch.Tensor:
        """The number of the block in which each position lies."""
        size = self.masking.block
        return torch.zeros_like(places) if size is None else places // size


@dataclass(frozen=True, slots=True)
class Look:
    """What a pass shows of canvases; each table is [texts, positions]."""

    tokens: torch.Tensor
    """The likeliest token of each position in work."""
    chance: torch.Tensor
    """Its probability; -1 elsewhere."""
    gap: torch.Tensor
    """Its lead over the next."""
    doubt: torch.Tensor
    """The entropy of the likeliest few, all others taken as one, in nats."""
    work: torch.Tensor
    """Open positions of the block in work."""
    settled: torch.Tensor
    forced: torch.Tensor
    """Those in work that nothing will score again."""
    texts: torch.Tensor
    """The numbers of the texts."""


Choose = Callable[[Look], torch.Tensor]
"""Which positions in work to settle; where it chooses none, the surest is settled."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written, and when."""

    tokens: torch.Tensor
    """[texts, positions]; masks where nothing was settled."""
    times: torch.Tensor
    """The pass that settled a position: [texts, positions]; `GIVEN` or `NEVER` where none did."""
    passes: torch.Tensor
    """[texts]"""

    @property
    def said(self) -> torch.Tensor:
        """Where the answers are."""
        return (self.times >= 0) & (self.times < NEVER)

    @property
    def tokens_per_pass(self) -> float:
        return float(self.said.sum() / self.passes.sum().clamp(min=1))


def surest(look: Look) -> torch.Tensor:
    """One position of each text, as `steps` takes it: confidence to two places, then the leftmost."""
    return _largest(look, (100 * look.chance).round())


def _largest(look: Look, values: torch.Tensor) -> torch.Tensor:
    """The position in work of each text with the largest value, the leftmost of equals."""
    values = torch.where(look.work, values, -1.0)
    best = (values == values.amax(1, keepdim=True)).int().argmax(1, keepdim=True)
    return torch.zeros_like(look.work).scatter_(1, best, True) & look.work


def above(threshold: float) -> Choose:
    """All positions that are as sure as that."""
    return lambda look: look.work & (look.chance >= threshold)


@torch.no_grad()
def write(reader: Reader, manner: Manner, rows: Rows, choose: Choose) -> Written:
    """Fills in canvases as long as the rows' answers, behind their prompts."""
    width, parts = manner.width(rows), []
    for first in range(0, len(rows), _ROWS):
        some = rows.take(slice(first, first + _ROWS))
        canvas = Canvases.fresh(manner, some, width)
        while bool((live := canvas.live()).any()):
            texts = live.nonzero().flatten()
            look = canvas.look(reader, texts, first)
            canvas.settle(look, choose(look), texts)
        parts.append(canvas.written)
    return Written(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.times for part in parts]),
        torch.cat([part.passes for part in parts]),
    )


@dataclass(slots=True)
class Canvases:
    """Texts that are being filled in."""

    manner: Manner
    tokens: torch.Tensor
    times: torch.Tensor
    passes: torch.Tensor
    limits: torch.Tensor
    """[texts]: where each canvas ends."""
    cuts: torch.Tensor
    """[texts]: behind which position an end of text was settled."""

    @classmethod
    def fresh(cls, manner: Manner, rows: Rows, width: int) -> Canvases:
        """Prompts, and masks behind them."""
        tokens = torch.full((len(rows), width), manner.masking.token, device=rows.tokens.device)
        known = min(width, rows.tokens.shape[1])
        tokens[:, :known] = rows.tokens[:, :known]
        places = torch.arange(width, device=tokens.device)
        prompt = places < rows.starts[:, None]
        return cls(
            manner,
            torch.where(prompt, tokens, manner.masking.token),
            torch.where(prompt, GIVEN, NEVER),
            torch.zeros_like(rows.stops),
            rows.stops,
            torch.full_like(rows.stops, NEVER),
        )

    @classmethod
    def at(
        cls, manner: Manner, written: Written, limits: torch.Tensor, times: torch.Tensor
    ) -> Canvases:
        """Texts as they stood before these passes, one for each: [texts]."""
        settled = written.times < times[:, None]
        tokens = torch.where(settled, written.tokens, manner.masking.token)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        ends = settled & (written.times >= 0) & _is_in(tokens, manner.ends)
        cuts = torch.where(ends, place + 1, NEVER).amin(1)
        when = torch.where(settled, written.times, NEVER)
        return cls(manner, tokens, when, times, limits, cuts)

    @property
    def written(self) -> Written:
        return Written(self.tokens, self.times, self.passes)

    @property
    def places(self) -> torch.Tensor:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    def open(self) -> torch.Tensor:
        stops = torch.minimum(self.limits, self.cuts)
        return (self.times == NEVER) & (self.places < stops[:, None])

    def live(self) -> torch.Tensor:
        return self.open().any(1)

    def work(self) -> torch.Tensor:
        """The open positions of the block in work."""
        found, blocks = self.open(), self.manner.blocks(self.places)
        return found & (blocks == blocks[found.int().argmax(1)][:, None])

    def sees(self) -> torch.Tensor:
        """Which position sees which: [texts, positions, positions]."""
        size, places, width = self.manner.masking.block, self.places, self.tokens.shape[1]
        seen = torch.minimum(self.limits, self.cuts)
        if size is not None:  # all of the block is there, to its end
            first = self.open().int().argmax(1)
            seen = torch.minimum((first // size + 1) * size, self.cuts)
        blocks = self.manner.blocks(places)
        visible = (blocks[None] <= blocks[:, None])[None] & (places < seen[:, None])[:, None]
        return visible | torch.eye(width, dtype=torch.bool, device=places.device)

    def take(self, texts: torch.Tensor) -> Canvases:
        tables = (self.tokens, self.times, self.passes, self.limits, self.cuts)
        return Canvases(self.manner, *(table[texts] for table in tables))

    def states(self, reader: Reader, work: torch.Tensor) -> torch.Tensor:
        """The states that score the positions in work: [positions in work, width]."""
        states = reader.states(self.tokens, self.sees())
        if self.manner.masking.shifted:
            states = states.roll(1, dims=1)
        return states[work]

    def look(self, reader: Reader, texts: torch.Tensor, first: int = 0) -> Look:
        """One pass over some of the texts."""
        some = self.take(texts)
        work = some.work()
        with torch.autocast(self.tokens.device.type, torch.bfloat16, enabled=self.tokens.is_cuda):
            found = reader.over(
                some.states(reader, work), lambda logits: _shown(logits, self.manner)
            )
        shown = torch.full((*work.shape, 4), -1.0, device=work.device)
        shown[work] = found
        masking, places = self.manner.masking, self.places
        forced = torch.zeros_like(work)
        if masking.shifted and masking.block is not None:
            forced = work & (places % masking.block == 0)
        tokens, chance, gap, doubt = shown.unbind(-1)
        settled = some.times < NEVER
        return Look(tokens.long(), chance, gap, doubt, work, settled, forced, texts + first)

    def settle(self, look: Look, chosen: torch.Tensor, texts: torch.Tensor) -> None:
        """Enters what was chosen, and at least one token for each text."""
        chosen = (chosen & look.work) | look.forced
        chosen |= _largest(look, look.chance) & ~chosen.any(1, keepdim=True)
        self.tokens[texts] = torch.where(chosen, look.tokens, self.tokens[texts])
        now = self.passes[texts][:, None]
        self.times[texts] = torch.where(chosen, now, self.times[texts])
        self.passes[texts] += 1
        ends = chosen & _is_in(look.tokens, self.manner.ends)
        cuts = torch.where(ends, self.places + 1, NEVER).amin(1)
        self.cuts[texts] = torch.minimum(self.cuts[texts], cuts)


def agreement(found: Written, plain: Written) -> dict[str, float]:
    """How much of other texts is there: tokens, and whole answers."""
    same = (found.tokens == plain.tokens) | ~plain.said
    return {
        "same_tokens": float((same & plain.said).sum() / plain.said.sum().clamp(min=1)),
        "same_answers": float(same.all(1).float().mean()),
        "tokens_per_pass_of_steps": plain.tokens_per_pass,
    }


def numbers_of(keys: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """The numbers of texts among those that were written (sorted); for others some of them stand in."""
    text = torch.searchsorted(written, keys).clamp(max=len(written) - 1)
    return torch.where(written[text] == keys, text, keys % len(written))


def _shown(logits: torch.Tensor, manner: Manner) -> torch.Tensor:
    """Token, probability, lead and doubt of each row of logits: [rows, 4]. A mask is no answer."""
    shares = logits.softmax(-1)
    values, tokens = shares.topk(min(SEEN, shares.shape[-1]), dim=-1)
    first = (tokens[:, 0] == manner.masking.token).long()[:, None]
    token, chance = tokens.gather(1, first), values.gather(1, first)
    rest = (1 - values.sum(-1, keepdim=True)).clamp(min=0)
    every = torch.cat([values, rest], dim=-1)
    doubt = -(every * every.clamp(min=1e-12).log()).sum(-1, keepdim=True)
    rival = values.gather(1, 1 - first)
    return torch.cat([token.float(), chance, chance - rival, doubt], dim=-1)


def _is_in(tokens: torch.Tensor, ids: Collection[int]) -> torch.Tensor:
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for token in ids:
        found |= tokens == token
    return found
