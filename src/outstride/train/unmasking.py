"""Masked decoding in torch: what a masked model writes after many prompts at once, pass by pass.

It decodes as the engine does: blocks from left to right, at least one token settled per pass,
nothing after a settled end-of-text token. Prompts come from training rows; only the length of their
answers is used, as the length of the canvas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from outstride.core.contracts import MaskedSpec
from outstride.errors import UnsupportedModel
from outstride.models.diffusion import masked_spec_of
from outstride.train.corpus_files import TrainingRows
from outstride.train.full_finetune import DifferentiableModel
from outstride.train.target import Target

NEVER = 1 << 30
"""The time of a position that is not settled; and the position of a missing end of text."""
GIVEN = -1
"""The time of a prompt token."""
SEEN = 8
"""Number of most likely tokens per position that are used."""
_ROWS = 128
"""Texts that are written at once."""


@dataclass(frozen=True, slots=True)
class MaskedDecoding:
    """How a model fills in masks, and which tokens end a text."""

    spec: MaskedSpec
    ends: tuple[int, ...]

    @classmethod
    def of(cls, target: Target) -> MaskedDecoding:
        config, tokenizer = target.config, target.tokenizer
        if config.diffusion is None or tokenizer is None:
            raise UnsupportedModel(f"{target.name or 'this model'} fills in no masks")
        spec = masked_spec_of(config.diffusion, tokenizer, config.vocab_size)
        assert spec is not None
        return cls(spec, tuple(sorted(tokenizer.eos_ids)))

    def width(self, rows: TrainingRows) -> int:
        """Positions of the canvases of these rows: whole blocks."""
        longest, size = int(rows.stops.max()), self.spec.block
        return longest if size is None else -(-longest // size) * size

    def blocks(self, places: torch.Tensor) -> torch.Tensor:
        """Block number of each position."""
        size = self.spec.block
        return torch.zeros_like(places) if size is None else places // size


@dataclass(frozen=True, slots=True)
class CanvasScores:
    """The scores of one pass over canvases; each tensor is [texts, positions]."""

    tokens: torch.Tensor
    """The most likely token of each masked position of the current block."""
    probability: torch.Tensor
    """Its probability; -1 elsewhere."""
    margin: torch.Tensor
    """Its margin over the second most likely token."""
    entropy: torch.Tensor
    """Entropy of the most likely few tokens, all others counted as one, in nats."""
    work: torch.Tensor
    """Masked positions of the current block."""
    settled: torch.Tensor
    forced: torch.Tensor
    """Those of them that no later pass scores again."""
    texts: torch.Tensor
    """Numbers of the texts: [texts]."""


Choose = Callable[[CanvasScores], torch.Tensor]
"""Chooses the positions to settle; where it chooses none, the most confident one is settled."""


@dataclass(frozen=True, slots=True)
class FinishedCanvases:
    """Settled tokens, and the pass that settled each."""

    tokens: torch.Tensor
    """[texts, positions]; masks where nothing was settled."""
    times: torch.Tensor
    """The pass that settled a position, [texts, positions]; `GIVEN` or `NEVER` where none did."""
    passes: torch.Tensor
    """[texts]"""

    @property
    def answers(self) -> torch.Tensor:
        """Positions of answer tokens."""
        return (self.times >= 0) & (self.times < NEVER)

    @property
    def tokens_per_pass(self) -> float:
        return float(self.answers.sum() / self.passes.sum().clamp(min=1))


def most_confident(scores: CanvasScores) -> torch.Tensor:
    """One position of each text, as `steps` chooses it: confidence to two decimals, then the
    leftmost.
    """
    return _largest(scores, (100 * scores.probability).round())


def _largest(scores: CanvasScores, values: torch.Tensor) -> torch.Tensor:
    """The position of each text with the largest value, the leftmost of equals."""
    values = torch.where(scores.work, values, -1.0)
    best = (values == values.amax(1, keepdim=True)).int().argmax(1, keepdim=True)
    return torch.zeros_like(scores.work).scatter_(1, best, True) & scores.work


def at_least(threshold: float) -> Choose:
    """Chooses all positions with at least this confidence."""
    return lambda scores: scores.work & (scores.probability >= threshold)


@torch.no_grad()
def write(
    model: DifferentiableModel, decoding: MaskedDecoding, rows: TrainingRows, choose: Choose
) -> FinishedCanvases:
    """Fills in canvases as long as the rows' answers, after their prompts."""
    width, done = decoding.width(rows), []
    for first in range(0, len(rows), _ROWS):
        some = rows.take(slice(first, first + _ROWS))
        canvas = Canvases.fresh(decoding, some, width)
        while bool((live := canvas.live()).any()):
            texts = live.nonzero().flatten()
            scores = canvas.score(model, texts, first)
            canvas.settle(scores, choose(scores), texts)
        done.append(canvas.written)
    return FinishedCanvases(
        torch.cat([one.tokens for one in done]),
        torch.cat([one.times for one in done]),
        torch.cat([one.passes for one in done]),
    )


@dataclass(slots=True)
class Canvases:
    """Texts that are being filled in."""

    decoding: MaskedDecoding
    tokens: torch.Tensor
    times: torch.Tensor
    passes: torch.Tensor
    limits: torch.Tensor
    """[texts]: where each canvas ends."""
    cuts: torch.Tensor
    """[texts]: the position after a settled end-of-text token."""

    @classmethod
    def fresh(cls, decoding: MaskedDecoding, rows: TrainingRows, width: int) -> Canvases:
        """Prompts followed by masks."""
        tokens = torch.full((len(rows), width), decoding.spec.token, device=rows.tokens.device)
        known = min(width, rows.tokens.shape[1])
        tokens[:, :known] = rows.tokens[:, :known]
        places = torch.arange(width, device=tokens.device)
        prompt = places < rows.starts[:, None]
        return cls(
            decoding,
            torch.where(prompt, tokens, decoding.spec.token),
            torch.where(prompt, GIVEN, NEVER),
            torch.zeros_like(rows.stops),
            rows.stops,
            torch.full_like(rows.stops, NEVER),
        )

    @classmethod
    def at(
        cls,
        decoding: MaskedDecoding,
        written: FinishedCanvases,
        limits: torch.Tensor,
        times: torch.Tensor,
    ) -> Canvases:
        """Texts as they were before these passes, one for each: [texts]."""
        settled = written.times < times[:, None]
        tokens = torch.where(settled, written.tokens, decoding.spec.token)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        ends = settled & (written.times >= 0) & _is_in(tokens, decoding.ends)
        cuts = torch.where(ends, place + 1, NEVER).amin(1)
        when = torch.where(settled, written.times, NEVER)
        return cls(decoding, tokens, when, times, limits, cuts)

    @property
    def written(self) -> FinishedCanvases:
        return FinishedCanvases(self.tokens, self.times, self.passes)

    @property
    def places(self) -> torch.Tensor:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    def open(self) -> torch.Tensor:
        stops = torch.minimum(self.limits, self.cuts)
        return (self.times == NEVER) & (self.places < stops[:, None])

    def live(self) -> torch.Tensor:
        return self.open().any(1)

    def work(self) -> torch.Tensor:
        """Masked positions of the current block."""
        found, blocks = self.open(), self.decoding.blocks(self.places)
        return found & (blocks == blocks[found.int().argmax(1)][:, None])

    def mask(self) -> torch.Tensor:
        """Which position sees which: [texts, positions, positions]."""
        size, places, width = self.decoding.spec.block, self.places, self.tokens.shape[1]
        seen = torch.minimum(self.limits, self.cuts)
        if size is not None:  # all of the block is there, to its end
            first = self.open().int().argmax(1)
            seen = torch.minimum((first // size + 1) * size, self.cuts)
        blocks = self.decoding.blocks(places)
        visible = (blocks[None] <= blocks[:, None])[None] & (places < seen[:, None])[:, None]
        return visible | torch.eye(width, dtype=torch.bool, device=places.device)

    def take(self, texts: torch.Tensor) -> Canvases:
        tables = (self.tokens, self.times, self.passes, self.limits, self.cuts)
        return Canvases(self.decoding, *(table[texts] for table in tables))

    def hidden_states(self, model: DifferentiableModel, work: torch.Tensor) -> torch.Tensor:
        """Hidden states that score the positions of `work`: [positions, width]."""
        hidden = model.hidden_states(self.tokens, self.mask())
        if self.decoding.spec.shifted:
            hidden = hidden.roll(1, dims=1)
        return hidden[work]

    def score(
        self, model: DifferentiableModel, texts: torch.Tensor, first: int = 0
    ) -> CanvasScores:
        """One pass over some of the texts."""
        some = self.take(texts)
        work = some.work()
        with torch.autocast(self.tokens.device.type, torch.bfloat16, enabled=self.tokens.is_cuda):
            found = model.map_logits(
                some.hidden_states(model, work), lambda logits: _token_scores(logits, self.decoding)
            )
        shown = torch.full((*work.shape, 4), -1.0, device=work.device)
        shown[work] = found
        spec, places = self.decoding.spec, self.places
        forced = torch.zeros_like(work)
        if spec.shifted and spec.block is not None:
            forced = work & (places % spec.block == 0)
        tokens, probability, margin, entropy = shown.unbind(-1)
        settled = some.times < NEVER
        return CanvasScores(
            tokens.long(), probability, margin, entropy, work, settled, forced, texts + first
        )

    def settle(self, scores: CanvasScores, chosen: torch.Tensor, texts: torch.Tensor) -> None:
        """Settles the chosen positions, and at least one for each text."""
        chosen = (chosen & scores.work) | scores.forced
        chosen |= _largest(scores, scores.probability) & ~chosen.any(1, keepdim=True)
        self.tokens[texts] = torch.where(chosen, scores.tokens, self.tokens[texts])
        now = self.passes[texts][:, None]
        self.times[texts] = torch.where(chosen, now, self.times[texts])
        self.passes[texts] += 1
        ends = chosen & _is_in(scores.tokens, self.decoding.ends)
        cuts = torch.where(ends, self.places + 1, NEVER).amin(1)
        self.cuts[texts] = torch.minimum(self.cuts[texts], cuts)


def agreement(found: FinishedCanvases, plain: FinishedCanvases) -> dict[str, float]:
    """Agreement with other texts: share of equal tokens, and of equal answers."""
    same = (found.tokens == plain.tokens) | ~plain.answers
    return {
        "same_tokens": float((same & plain.answers).sum() / plain.answers.sum().clamp(min=1)),
        "same_answers": float(same.all(1).float().mean()),
        "tokens_per_pass_of_steps": plain.tokens_per_pass,
    }


def rows_by_key(keys: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Numbers of texts among those that were written (sorted keys); unknown keys map to some of
    them.
    """
    text = torch.searchsorted(written, keys).clamp(max=len(written) - 1)
    return torch.where(written[text] == keys, text, keys % len(written))


def _token_scores(logits: torch.Tensor, decoding: MaskedDecoding) -> torch.Tensor:
    """Token, probability, margin and entropy of each row of logits: [rows, 4]. The mask token is
    excluded.
    """
    shares = logits.softmax(-1)
    values, tokens = shares.topk(min(SEEN, shares.shape[-1]), dim=-1)
    first = (tokens[:, 0] == decoding.spec.token).long()[:, None]
    token, probability = tokens.gather(1, first), values.gather(1, first)
    rest = (1 - values.sum(-1, keepdim=True)).clamp(min=0)
    every = torch.cat([values, rest], dim=-1)
    entropy = -(every * every.clamp(min=1e-12).log()).sum(-1, keepdim=True)
    second = values.gather(1, 1 - first)
    return torch.cat([token.float(), probability, probability - second, entropy], dim=-1)


def _is_in(tokens: torch.Tensor, ids: Collection[int]) -> torch.Tensor:
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for token in ids:
        found |= tokens == token
    return found
