"""`block-drafter`: a few layers that draft a block of tokens in one pass, from the target's hidden
states.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint

from outstride.core.contracts import CAUSAL
from outstride.models.draft_heads.folder import check, read_config, read_tensors
from outstride.train.acceptance_length import (
    answer_mask,
    rates_by_depth,
    sample_anchors,
    visited_positions,
)
from outstride.train.corpus_files import TrainingRows
from outstride.train.draft_blocks import DraftBlocks, draft_hidden, draft_losses
from outstride.train.draft_vocabulary import draft_scores, frequent_tokens
from outstride.train.layers import (
    LayerShape,
    Pair,
    norm,
    rope_tables,
    within,
)
from outstride.train.recipe import Measurement, Recipe, recipe
from outstride.train.target import Target

DEPTHS = (0.2, 0.5, 0.77, 1.0)
"""Default tapped layers, as shares of the target's depth."""
SPREAD = 2.0
"""Largest spread of untrained scores: the head expects more confident hidden states than random
ones.
"""
_AT_ONCE = 1 << 28
"""Scores in memory at once; larger batches are split."""
_SAMPLE, _TEXTS, _ROWS = 64, 96, 16
"""Texts that scale the features; held-out texts that are measured; rows per batch of the
measurement.
"""


@recipe("block-drafter")
class BlockDrafterRecipe(Recipe):
    """A few layers on several of the target's hidden states, which draft the next tokens all at
    once.

    The keys and values for the prefilled text come from the target's own hidden states, so drafting
    starts from everything that the target has computed. A low-rank correction by the previous token
    makes the draft tokens follow each other.

    layers, block: number of layers, and positions of a block, the last settled token included. taps:
    the target's layers whose inputs are used, such as `6,15,23,30`; empty: four. cover: share of the
    answers' tokens that the draft vocabulary covers. rank: of the correction. anchors: blocks per
    text and step. decay: weight of a place relative to the one before it. soft: weight of the
    distillation loss (KL to the target's distribution). begin: folder of a trained block drafter of
    the same sizes to start from. compiled: whether torch may compile it on a GPU.

    Paper: after block-diffusion drafters such as DFlash, with draft tokens chained as in Clover
    Makes: block-drafter
    """

    def __init__(
        self,
        target: Target,
        *,
        layers: int = 2,
        block: int = 8,
        taps: str = "",
        cover: float = 0.985,
        rank: int = 32,
        anchors: int = 32,
        decay: float = 0.8,
        soft: float = 0.0,
        begin: str = "",
        compiled: bool = True,
    ) -> None:
        if min(layers, block - 1, rank, anchors) < 1:
            raise ValueError("needs layers, rank and anchors of 1 or more, and blocks of 2 or more")
        if not (0 < cover <= 1 and 0 < decay <= 1 and soft >= 0):
            raise ValueError("needs cover and decay above 0 and up to 1, and soft of 0 or more")
        if target.config.attention_pattern != CAUSAL:
            raise ValueError("drafts for autoregressive models, not for masked ones")
        self.target, self.layers, self.block = target, layers, block
        self.taps = _taps(taps, target.config.layers)
        self.cover, self.rank, self.anchors = cover, rank, anchors
        self.decay, self.soft = decay, soft
        self.weights = _fresh(target, layers, len(self.taps))
        self.vocabulary = self._index = torch.empty(0, dtype=torch.long)
        self._window = 0
        self._initial = self._read(Path(begin)) if begin else {}
        self._scale = self._head = torch.empty(0)
        self._rope_tables: dict[int, Pair] = {}
        self._compiled_hidden: Callable[..., torch.Tensor] = draft_hidden
        self._losses: Callable[..., torch.Tensor] = draft_losses
        if compiled and target.on_gpu:
            self.compile()

    def compile(self, **how: Any) -> None:
        """Compiles the target's layers, the blocks and the losses, separately."""
        self.target.compile(**how)
        self._compiled_hidden = torch.compile(draft_hidden, dynamic=False, **how)
        self._losses = torch.compile(draft_losses, dynamic=False, **how)

    def _read(self, folder: Path) -> dict[str, torch.Tensor]:
        """The tensors of a trained block drafter to start from."""
        about = read_config(folder)
        check(self.target.config, about.get("target", {}), folder, self.target.digest)
        own = self.config()
        for name in ("layers", "block", "taps", "rank"):
            if about.get(name) != own[name]:
                raise ValueError(
                    f"{folder} has {name} {about.get(name)} where this training has {own[name]}; "
                    "give the same with --set, or begin anew"
                )
        return {name: value.to(self.target.device) for name, value in read_tensors(folder).items()}

    def prepare(self, rows: TrainingRows) -> None:
        """Chooses the draft vocabulary and the scale of the features, both from the answers."""
        device, size = self.target.device, self.target.config.vocab_size
        self.vocabulary = frequent_tokens(rows.tokens[answer_mask(rows)], size, self.cover).to(
            device
        )
        if self._initial:
            self.vocabulary = self._initial["vocabulary"].long()
        many = len(self.vocabulary)
        self._index = torch.full((size,), many, device=device)
        self._index[self.vocabulary] = torch.arange(many, device=device)
        self._head = self.target.head[self.vocabulary].contiguous()
        self.weights["follow.before.weight"] = torch.randn(many + 1, self.rank).to(device)
        self.weights["follow.after.weight"] = torch.zeros(many, self.rank, device=device)
        self._window = rows.tokens.shape[1]
        if self._initial:
            self._scale = self._initial["taps.scale"]
            self.weights = {name: self._initial[name].float() for name in self.weights}
            return
        some = rows.take(slice(_SAMPLE)).to(device)
        with torch.compiler.set_stance("force_eager"):  # other shapes than those of training
            hidden = self.target.hidden_states(some.tokens, self.taps)
        seen = self._features(hidden)[answer_mask(some)]
        seen = norm(seen, torch.ones_like(seen[0]), self.target.config.norm_eps)
        self._scale = seen.square().mean(0).add(1e-8).rsqrt()

    def loss(self, rows: TrainingRows, numbers: torch.Generator) -> torch.Tensor:
        """Cross-entropy over the places of blocks at random anchors within the answers."""
        last = self.target.config.layers
        hidden = self.target.hidden_states(
            rows.tokens, (*self.taps, last) if self.soft else self.taps
        )
        blocks = self._blocks(rows, sample_anchors(rows, self.anchors, numbers))
        teacher = None
        if self.soft:
            at = torch.arange(len(rows), device=blocks.previous.device)[:, None, None]
            scale, eps = self.target.weights["model.norm.weight"], self.target.config.norm_eps
            teacher = norm(hidden[last][at, blocks.previous], scale, eps).flatten(0, 2)
        counted = blocks.inside & (blocks.targets < len(self.vocabulary))
        places = torch.arange(self.block - 1, device=counted.device)
        weights = self.decay**places * counted
        losses = self._loss_per_place(self._draft_hidden(hidden, blocks), blocks, teacher)
        return (losses.view_as(weights) * weights).sum() / weights.sum().clamp(min=1e-6)

    @torch.no_grad()
    def measure(self, held: TrainingRows) -> Measurement:
        """Acceptance length of a chain, from every position of greedy texts.

        While all draft tokens are correct, the tokens before them are those of the text: so one pass
        over the text gives the length of every chain.
        """
        greedy = held if bool(held.sampled.all()) else held.take(~held.sampled)
        greedy = greedy.take(slice(_TEXTS))
        cuts = range(0, len(greedy), _ROWS)
        with torch.compiler.set_stance("force_eager"):
            chunks = [
                self._count_correct(greedy.take(slice(i, i + _ROWS)).to(self.target.device))
                for i in cuts
            ]
        correct, starts, stops = torch.cat(chunks).cpu(), greedy.starts.cpu(), greedy.stops.cpu()
        visited = visited_positions(correct, starts, stops)
        left = stops[:, None] - 1 - torch.arange(correct.shape[1])
        known = self._index.cpu()[greedy.tokens.cpu()[answer_mask(greedy.to("cpu"))]]
        return Measurement(
            tokens_per_pass=float((stops - starts).sum() / visited.sum()),
            by_depth=rates_by_depth(correct, left, visited, self.block - 1),
            overhead=self._overhead(),
            figures={
                "tokens_per_pass_anywhere": 1
                + sum(rates_by_depth(correct, left, correct >= 0, self.block - 1)),
                "covered": float((known < len(self.vocabulary)).float().mean()),
                "vocabulary": float(len(self.vocabulary)),
            },
        )

    def config(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "block": self.block,
            "taps": list(self.taps),
            "rank": self.rank,
            "window": self._window,
        }

    def state(self) -> dict[str, torch.Tensor]:
        return {"vocabulary": self.vocabulary.int(), "taps.scale": self._scale}

    # --- one batch --------------------------------------------------------------------------------

    def _features(self, hidden: dict[int, torch.Tensor]) -> torch.Tensor:
        return torch.cat([hidden[tap] for tap in self.taps], dim=-1)

    def _blocks(self, rows: TrainingRows, anchors: torch.Tensor) -> DraftBlocks:
        """Blocks at these anchors; a place past the end of a row has no token, which `inside` says."""
        tokens, length, device = rows.tokens, rows.tokens.shape[1], rows.tokens.device
        many = anchors.shape[1]
        nodes = anchors[..., None] + torch.arange(self.block, device=device)
        cos, sin = self._rope(length + self.block)
        own = torch.arange(many, device=device).repeat_interleave(self.block)
        mask = torch.cat(
            [
                torch.arange(length, device=device) < anchors[:, own, None],
                (own[:, None] == own).expand(len(tokens), -1, -1),
            ],
            dim=-1,
        )

        def number(positions: torch.Tensor) -> torch.Tensor:
            return self._index[tokens.gather(1, positions.flatten(1)).view_as(positions)]

        before, places = nodes[..., :-1].clamp(max=length - 1), nodes[..., 1:]
        return DraftBlocks(
            anchors=anchors,
            anchor_embeddings=fn.embedding(
                tokens.gather(1, anchors), self.target.embedding
            ).float(),
            rope=(cos[nodes.flatten(1)], sin[nodes.flatten(1)]),
            mask=mask[:, None],
            previous=before,
            previous_tokens=number(before),
            targets=number(places.clamp(max=length - 1)),
            inside=places < rows.stops[:, None, None],
        )

    def _draft_hidden(self, hidden: dict[int, torch.Tensor], blocks: DraftBlocks) -> torch.Tensor:
        features = self._features(hidden)
        length = features.shape[1]
        cos, sin = self._rope(length + self.block)
        return self._compiled_hidden(
            LayerShape.of(self.target.config),
            self.layers,
            {**self.weights, "taps.scale": self._scale},
            features,
            (cos[:length], sin[:length]),
            blocks.anchor_embeddings,
            blocks.rope,
            blocks.mask,
        )

    def _loss_per_place(
        self, hidden: torch.Tensor, blocks: DraftBlocks, teacher: torch.Tensor | None
    ) -> torch.Tensor:
        """The loss at each place. Large score matrices are split and recomputed in the backward
        pass.
        """
        many = len(self.vocabulary)
        before = fn.embedding(
            blocks.previous_tokens.flatten(), self.weights["follow.before.weight"]
        )
        hidden, targets = hidden.flatten(0, 2), blocks.targets.flatten().clamp(max=many - 1)
        after, chunks = self.weights["follow.after.weight"], -(-len(targets) * many // _AT_ONCE)
        tables = [table.tensor_split(chunks) for table in (hidden, before, targets)]
        teachers = [None] * chunks if teacher is None else teacher.tensor_split(chunks)
        found = []
        for x, y, wanted, other in zip(*tables, teachers, strict=True):
            given = (x, y, self._head, after, wanted, other, self.soft)
            if chunks == 1:
                return self._losses(*given)
            found.append(checkpoint(self._losses, *given, use_reentrant=False))
        return torch.cat(found)

    def _count_correct(self, rows: TrainingRows) -> torch.Tensor:
        """Number of correct draft tokens after each position of answers; -1 elsewhere: [rows,
        length].
        """
        correct = torch.full_like(rows.tokens, -1)
        hidden = self.target.hidden_states(rows.tokens, self.taps)
        head, after = self._head.float(), self.weights["follow.after.weight"]
        steps = torch.arange(self.anchors, device=correct.device)
        for first in range(0, int((rows.stops - rows.starts).max()), self.anchors):
            anchors = rows.starts[:, None] - 1 + first + steps
            blocks = self._blocks(rows, torch.minimum(anchors, rows.stops[:, None] - 2))
            with self.target.autocast():
                found = self._draft_hidden(hidden, blocks)
            before = self.weights["follow.before.weight"][blocks.previous_tokens]
            answer_mask = draft_scores(found.float(), before, head, after).argmax(-1)
            hits = (answer_mask == blocks.targets) & blocks.inside
            correct.scatter_(1, blocks.anchors, hits.long().cumprod(-1).sum(-1))
        return correct

    def _rope(self, length: int) -> Pair:
        if length not in self._rope_tables:
            self._rope_tables[length] = rope_tables(self.target.config, length, self.target.device)
        return self._rope_tables[length]

    def _overhead(self) -> float:
        """Weights that a draft reads, as a share of those that a pass of the target reads."""
        left_out = ("fc.", "mask.", "follow.before.")
        own = sum(v.numel() for name, v in self.weights.items() if not name.startswith(left_out))
        return (own + self._head.numel()) / self.target.size


def _taps(text: str, layers: int) -> tuple[int, ...]:
    if not text:
        return tuple(dict.fromkeys(round(share * layers) for share in DEPTHS))
    try:
        found = tuple(int(table) for table in text.split(","))
    except ValueError:
        found = ()
    if not found or len(set(found)) < len(found) or not 0 <= min(found) <= max(found) <= layers:
        raise ValueError(
            f"taps are different layers from 0 to {layers}, such as 1,{layers}: {text}"
        )
    return found


def _fresh(target: Target, layers: int, taps: int) -> dict[str, torch.Tensor]:
    """Untrained weights, except those that depend on the vocabulary."""
    width, device = target.config.hidden_size, target.device

    def matrix(rows: int, columns: int, spread: float) -> torch.Tensor:
        return (spread * torch.randn(rows, columns)).to(device)

    scale = target.weights["model.norm.weight"]
    apart = float((target.head * scale).square().sum(1).mean().sqrt())
    near = float(target.embedding.float().std())
    weights = {
        "fc.weight": matrix(width, taps * width, (taps * width) ** -0.5),
        "hidden_norm.weight": torch.ones(width, device=device),
        "mask.weight": matrix(1, width, near),
        "norm.weight": scale * min(1.0, SPREAD / apart),
    }
    shapes = within(target.weights, "model.layers.0.")
    for i in range(layers):
        for name, (rows, *columns) in ((n, v.shape) for n, v in shapes.items()):
            if name.endswith("layernorm.weight"):
                weights[f"layers.{i}.{name}"] = torch.ones(rows, device=device)
            elif name.endswith("proj.weight"):  # no biases, no norms of heads
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                spread = ((2 * layers if last else 1) * columns[0]) ** -0.5
                weights[f"layers.{i}.{name}"] = matrix(rows, columns[0], spread)
    return weights
