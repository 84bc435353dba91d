"""`jacobi`: a model is fine-tuned to converge faster in Jacobi decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as fn

from outstride.core.contracts import CAUSAL
from outstride.train.corpus_files import TrainingRows
from outstride.train.full_finetune import FullFinetuneRecipe
from outstride.train.recipe import Measurement, recipe
from outstride.train.target import Target

_TEXTS, _LONG = 12, 40
"""Held-out texts that are measured, and tokens of each."""


@dataclass(slots=True)
class JacobiBlocks:
    """Rows of text with blocks of Jacobi drafts after them; a block begins at an anchor.

    Its nodes hold drafts for the positions after the anchor. They see the text up to the anchor and
    the drafts before them.
    """

    tokens: torch.Tensor
    """[rows, length + nodes]: the texts, then the blocks."""
    places: torch.Tensor
    mask: torch.Tensor
    """[rows, length + nodes, length + nodes]"""
    length: int
    block: int
    targets: torch.Tensor
    """The text's token after the position of each node: [rows, blocks, block]."""
    inside: torch.Tensor
    """Whether that is within the text."""


@recipe("jacobi")
class JacobiRecipe(FullFinetuneRecipe):
    """Fine-tunes a model on its own Jacobi iterations, so that drafts converge in few passes.

    Jacobi decoding drafts the next positions, lets the model correct all of them at once, and
    repeats until nothing changes. Here the model runs such iterations at random places of its own
    greedy texts, and learns the final tokens from every stage, the initial noise included. The KL
    divergence from the original's distribution is added to keep its texts. This fine-tunes the model
    itself.

    block: positions that are drafted together. blocks: of them per text and step. keep: weight of
    the KL divergence.

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
        if target.config.attention_pattern != CAUSAL:
            raise ValueError("is for autoregressive models; for masked ones there is certainty")
        super().__init__(target)
        self.block, self.blocks, self.keep = block, blocks, keep

    def loss(self, rows: TrainingRows, numbers: torch.Generator) -> torch.Tensor:
        """Cross-entropy of the final tokens at a random stage, and the KL divergence from the
        original.
        """
        rows = _cut(rows)
        stages = int(torch.randint(self.block, (1,), generator=numbers, device=numbers.device))
        given = self._random_blocks(rows, numbers)
        for _ in range(stages):
            self._iterate(given)
        hidden = self.student.hidden_states(given.tokens, given.mask, given.places)
        text, nodes = hidden[:, : given.length], hidden[:, given.length :]
        counted = given.inside & ~rows.sampled[:, None, None]
        if not bool(counted.any()):
            counted = given.inside
        asked = counted.flatten(1)
        wanted = given.targets.flatten(1)[asked]
        becoming = self.student.map_logits(
            nodes[asked], _cross_entropy, wanted
        ).sum() / asked.sum().clamp(min=1)
        return becoming + self.keep * self._distance(rows, given, text)

    def _distance(
        self, rows: TrainingRows, given: JacobiBlocks, text: torch.Tensor
    ) -> torch.Tensor:
        """KL divergence from the original's distribution at each position of the answers."""
        predicted = _predicts_answer(rows)
        with torch.no_grad():
            sees = given.mask[:, : given.length, : given.length]
            wanted = self.teacher.hidden_states(rows.tokens, sees)[predicted]
        teacher = self.teacher

        def apart(logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                shares = teacher.logits(hidden).log_softmax(-1)
            return (shares.exp() * (shares - logits.log_softmax(-1))).sum(-1)

        return self.student.map_logits(text[predicted], apart, wanted).mean()

    # --- iterations -------------------------------------------------------------------------------

    def _random_blocks(self, rows: TrainingRows, numbers: torch.Generator) -> JacobiBlocks:
        """Blocks at random anchors within the answers, filled with random tokens of the text before."""
        (count, length), device = rows.tokens.shape, rows.tokens.device
        many, block = self.blocks, self.block
        draws = torch.rand(count, many, generator=numbers, device=device)
        length_left = (rows.stops - rows.starts)[:, None]
        anchors = rows.starts[:, None] - 1 + (draws * length_left).long()
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
        return JacobiBlocks(
            tokens=torch.cat([rows.tokens, guessed], dim=1),
            places=torch.cat([text.expand(count, -1), flat], dim=1),
            mask=sees,
            length=length,
            block=block,
            targets=rows.tokens.gather(1, behind.flatten(1)).view_as(places),
            inside=places + 1 < rows.stops[:, None, None],
        )

    @torch.no_grad()
    def _iterate(self, given: JacobiBlocks) -> None:
        """One Jacobi iteration: each draft becomes the model's argmax after those before it."""
        length, block = given.length, given.block
        hidden = self.student.hidden_states(given.tokens, given.mask, given.places)
        places = given.places[:, length:].view(len(hidden), -1, block)
        anchors = (places[..., 0] - 1)[..., None].expand(-1, -1, hidden.shape[-1])
        first = hidden.gather(1, anchors)[:, :, None]
        nodes = hidden[:, length:].view(*places.shape, -1)
        fronts = torch.cat([first, nodes[:, :, :-1]], dim=2).flatten(0, 2)
        predicted = self.student.map_logits(fronts, lambda logits: logits.argmax(-1))
        given.tokens[:, length:] = predicted.view(len(hidden), -1)

    @torch.no_grad()
    def measure(self, held: TrainingRows) -> Measurement:
        """Jacobi decoding after held-out prompts, as `lookahead:level=2` does it."""
        rows = held if bool(held.sampled.all()) else held.take(~held.sampled)
        rows = _cut(rows.take(slice(_TEXTS)).to(self.target.device))
        with self.target.autocast():
            emitted, passes = self._decode(rows)
            predicted, sees = _predicts_answer(rows), _causal_mask(rows.tokens)
            pair = [
                r.hidden_states(rows.tokens, sees)[predicted] for r in (self.student, self.teacher)
            ]
            ours, theirs = (
                r.map_logits(x, lambda logits: logits.argmax(-1))
                for r, x in zip((self.student, self.teacher), pair, strict=True)
            )
        agreed = float((ours == theirs).float().mean())
        return Measurement(emitted / max(passes, 1), figures={"agrees_with_the_original": agreed})

    def _decode(self, rows: TrainingRows) -> tuple[int, int]:
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
        sees = _causal_mask(tokens)
        while bool((live := ends < limits).any()):
            tokens.scatter_(1, ends[:, None] + steps, window)
            hidden = self.student.hidden_states(tokens, sees)
            asked = ends[:, None] - 1 + torch.arange(size + 1, device=device)
            index = asked[..., None].expand(-1, -1, hidden.shape[-1])
            predicted = self.student.map_logits(
                hidden.gather(1, index).flatten(0, 1), lambda logits: logits.argmax(-1)
            ).view(count, -1)
            run = (predicted[:, :-1] == window).long().cumprod(1).sum(1)
            taken = torch.minimum(run + 1, limits - ends) * live
            emitted, passes = emitted + int(taken.sum()), passes + int(live.sum())
            fresh = (places >= ends[:, None]) & (places < (ends + taken)[:, None])
            spread = predicted.gather(1, (places - ends[:, None]).clamp(0, size))
            tokens = torch.where(fresh, spread, tokens)
            # What was said after the run is the next window; its open end comes from the text.
            fill = tokens.gather(1, (7919 * (ends[:, None] + steps + size)) % ends[:, None])
            shift = (taken[:, None] + steps).clamp(max=size)
            window = torch.where(taken[:, None] + steps <= size, predicted.gather(1, shift), fill)
            ends = ends + taken
        return emitted, passes


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return fn.cross_entropy(logits, targets, reduction="none")


def _cut(rows: TrainingRows) -> TrainingRows:
    """Rows without the padding columns that all texts have."""
    return TrainingRows(
        rows.tokens[:, : int(rows.stops.max())], rows.starts, rows.stops, rows.sampled, rows.keys
    )


def _causal_mask(tokens: torch.Tensor) -> torch.Tensor:
    """Each position sees those up to itself: [rows, length, length]."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return (places[None] <= places[:, None]).expand(len(tokens), -1, -1)


def _predicts_answer(rows: TrainingRows) -> torch.Tensor:
    """Positions that predict a token of an answer: [rows, length]."""
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    return (places >= rows.starts[:, None] - 1) & (places < rows.stops[:, None] - 1)
