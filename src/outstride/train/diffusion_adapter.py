"""`diffusion-adapter`: a LoRA adapter that lets an autoregressive model fill in masks as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint

from outstride.core.contracts import CAUSAL
from outstride.train.acceptance_length import answer_mask, rates_by_depth, visited_positions
from outstride.train.block_sizes import parse_sizes, shares
from outstride.train.corpus_files import TrainingRows
from outstride.train.layers import (
    LayerShape,
    Pair,
    Weights,
    layer,
    norm,
    project_heads,
    rope_tables,
)
from outstride.train.recipe import Measurement, Recipe, recipe
from outstride.train.target import Target

ADAPTED = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Matrices of a layer that have an adapter."""
GROWN = 0.6
"""Share of the training by which blocks have grown to their full size."""
_AT_ONCE = 1 << 28
"""Scores in memory at once; larger batches are split."""
_TEXTS, _ROWS, _GUESSES = 96, 16, 8
"""Held-out texts that are measured, rows per batch, and tokens of a draft."""


@dataclass(frozen=True, slots=True)
class MaskedBlocks:
    """Blocks over rows of text, their nodes side by side.

    A block begins with a mask, followed by masks and tokens. A node scores the position after its
    own.
    """

    inputs: torch.Tensor
    """Input tokens: [rows, nodes]."""
    masked: torch.Tensor
    """Which inputs are masks instead: [rows, nodes]."""
    places: torch.Tensor
    """Positions of the nodes: [rows, nodes]."""
    counted: torch.Tensor
    """Which nodes score a masked position within the text: [rows, nodes]."""
    targets: torch.Tensor
    """The correct tokens: [rows, nodes]."""
    firsts: torch.Tensor
    """First position of each node's block, which sees the text before it: [rows, nodes]."""
    owners: torch.Tensor
    """Block number of each node, the same in all rows: [nodes]."""


def adapted_layer(
    shape: LayerShape,
    own: Weights,
    low: Weights,
    x: torch.Tensor,
    rope: Pair | None,
    mask: torch.Tensor,
    context_hidden: torch.Tensor,
    context_rope: Pair | None,
) -> torch.Tensor:
    """One layer over the nodes of blocks, with the adapter; the context's keys and values are
    computed without it.

    context_hidden: input of the layer at each position of the text; context_rope: cosines and sines
    there.
    """
    y = norm(context_hidden, own["input_layernorm.weight"], shape.eps)
    before = (
        project_heads(shape, own, y, "k", context_rope),
        project_heads(shape, own, y, "v", None),
    )
    return layer(shape, {**own, **low}, x, rope, mask, before)


def _losses(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    teacher: torch.Tensor | None,
    soft: float,
) -> torch.Tensor:
    """The loss of each node; teacher: the model's own hidden states there, for distillation."""
    scores = fn.linear(hidden, head).float()
    losses = fn.cross_entropy(scores, targets, reduction="none")
    if teacher is None:
        return losses
    wanted = fn.linear(teacher, head).float().log_softmax(-1)
    apart = (wanted.exp() * (wanted - scores.log_softmax(-1))).sum(-1)
    return losses + soft * apart


@recipe("diffusion-adapter")
class DiffusionAdapterRecipe(Recipe):
    """A gated LoRA adapter and a mask embedding, with which a model fills in blocks of its own text.

    With the gate open, masks and tokens of a block see each other and all text before the block.
    With the gate closed the model is unchanged, bit for bit; the context before a block is computed
    that way.

    rank: of the adapter. sizes: block sizes, added one by one during training. nodes: block nodes
    per text and step. whole: share of blocks that are fully masked; the others come in pairs with
    complementary masks. soft: weight of the distillation loss (KL to the model's own distribution).
    compiled: whether torch may compile it on a GPU.

    Paper: gated LoRA (Samragh et al., 2025); SBD (Gat et al., 2025); Fast-dLLM v2 (Wu et al., 2025)
    Makes: self-diffuse
    """

    def __init__(
        self,
        target: Target,
        *,
        rank: int = 8,
        sizes: str = "2,4,8,16,32",
        nodes: int = 256,
        whole: float = 0.5,
        soft: float = 0.0,
        compiled: bool = True,
    ) -> None:
        if rank < 1 or not 0 <= whole <= 1 or soft < 0:
            raise ValueError("needs rank of 1 or more, whole from 0 to 1 and soft of 0 or more")
        if target.config.attention_pattern != CAUSAL:
            raise ValueError("is for autoregressive models; this one is masked")
        self.target, self.rank, self.nodes = target, rank, nodes
        self.sizes = parse_sizes(sizes, nodes)
        self.whole, self.soft = whole, soft
        self.weights = _fresh(target, rank)
        self._window = 0
        self._rope_tables: dict[int, Pair] = {}
        self._compiled_layer: Callable[..., torch.Tensor] = adapted_layer
        self._losses: Callable[..., torch.Tensor] = _losses
        if compiled and target.on_gpu:
            self.compile()

    def compile(self, **how: Any) -> None:
        """Compiles the layers, with and without the adapter, and the losses."""
        self.target.compile(**how)
        self._compiled_layer = torch.compile(adapted_layer, dynamic=False, **how)
        self._losses = torch.compile(_losses, dynamic=False, **how)

    def prepare(self, rows: TrainingRows) -> None:
        self._window = rows.tokens.shape[1]

    def loss(self, rows: TrainingRows, numbers: torch.Generator) -> torch.Tensor:
        """Cross-entropy of masked positions, over blocks of all sizes in use so far."""
        hidden = self.context_hidden(rows, final=bool(self.soft))
        device = rows.tokens.device
        many = max(1, min(len(self.sizes), int(self.progress / GROWN * len(self.sizes)) + 1))
        groups = []
        for size, pairs in shares(self.sizes[:many], self.nodes):
            shape = (len(rows), pairs)
            whole = torch.rand(shape, generator=numbers, device=device) < self.whole
            draws = torch.rand(*shape, 2, generator=numbers, device=device)
            draws[..., 1] = torch.where(whole, draws[..., 1], draws[..., 0])
            shown = torch.rand(*shape, 1, generator=numbers, device=device)
            masked = torch.rand(*shape, size, generator=numbers, device=device) < shown
            masks = torch.stack([masked, ~masked], dim=2) | whole[..., None, None]
            left = (rows.stops - rows.starts - 1).clamp(min=1)[:, None]
            firsts = rows.starts[:, None] + (draws.flatten(1) * left).long()
            groups.append((firsts, masks.flatten(1, 2)))
        blocks = self._blocks(rows, groups)
        teacher = None
        if self.soft:
            last = hidden[self.target.config.layers]
            index = blocks.places.clamp(max=last.shape[1] - 1)[..., None]
            teacher = self._normed(last.gather(1, index.expand(-1, -1, last.shape[2])))
        weights = blocks.counted.float()
        losses = self._loss_per_node(self._block_hidden(hidden, blocks), blocks.targets, teacher)
        return (losses.view_as(weights) * weights).sum() / weights.sum().clamp(min=1e-6)

    @torch.no_grad()
    def measure(self, held: TrainingRows) -> Measurement:
        """Acceptance length of mask drafts along greedy texts, and the loss by block size."""
        greedy = held if bool(held.sampled.all()) else held.take(~held.sampled)
        greedy = greedy.take(slice(_TEXTS))
        runs, sums = [], dict.fromkeys(("ar", *self.sizes), torch.zeros(2, dtype=torch.float64))
        with torch.compiler.set_stance("force_eager"), self.target.autocast():
            for first in range(0, len(greedy), _ROWS):
                rows = greedy.take(slice(first, first + _ROWS)).to(self.target.device)
                hidden = self.context_hidden(rows, final=True)
                runs.append(self._count_correct(rows, hidden))
                for name, found in self.sums(rows, hidden, first):
                    sums[name] = sums[name] + found.double().cpu()
        found, starts, stops = torch.cat(runs).cpu(), greedy.starts.cpu(), greedy.stops.cpu()
        visited = visited_positions(found, starts, stops)
        left = stops[:, None] - 1 - torch.arange(found.shape[1])
        chosen = visited & (torch.arange(found.shape[1]) >= starts[:, None])
        figures = {f"loss_{name}": float(both[0] / both[1]) for name, both in sums.items()}
        return Measurement(
            tokens_per_pass=float((stops - starts).sum() / visited.sum()),
            by_depth=rates_by_depth(found, left, chosen, _GUESSES),
            masks_per_node=1.0,
            figures=figures,
        )

    def config(self) -> dict[str, Any]:
        return {"rank": self.rank, "block": max(self.sizes), "window": self._window}

    # --- one batch --------------------------------------------------------------------------------

    def context_hidden(self, rows: TrainingRows, *, final: bool) -> dict[int, torch.Tensor]:
        """Inputs of each layer at each position with the gate closed."""
        return self.target.hidden_states(rows.tokens, range(self.target.config.layers + final))

    def _blocks(
        self, rows: TrainingRows, groups: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> MaskedBlocks:
        """Blocks of several sizes: their first positions, [rows, blocks], and which of their places
        are masked, [rows, blocks, size]: the leading mask scores the first place.
        """
        tokens, length, device = rows.tokens, rows.tokens.shape[1], rows.tokens.device
        firsts, places, opened, hidden, owners, many = [], [], [], [], [], 0
        for begin, masks in groups:
            count, size = masks.shape[1:]
            steps = torch.arange(size, device=device)
            inside = begin[..., None] + 1 + steps < rows.stops[:, None, None]
            front = torch.ones_like(masks[..., :1])
            hidden.append(torch.cat([front, (masks | ~inside)[..., :-1]], dim=-1).flatten(1))
            opened.append((masks & inside).flatten(1))
            places.append((begin[..., None] + steps).flatten(1))
            firsts.append(begin.repeat_interleave(size, dim=1))
            owners.append(torch.arange(many, many + count, device=device).repeat_interleave(size))
            many += count
        at = torch.cat(places, dim=1)
        return MaskedBlocks(
            inputs=tokens.gather(1, at.clamp(max=length - 1)),
            masked=torch.cat(hidden, dim=1),
            places=at,
            counted=torch.cat(opened, dim=1),
            targets=tokens.gather(1, (at + 1).clamp(max=length - 1)),
            firsts=torch.cat(firsts, dim=1),
            owners=torch.cat(owners),
        )

    def _block_hidden(self, hidden: dict[int, torch.Tensor], blocks: MaskedBlocks) -> torch.Tensor:
        """Normalized hidden states of all nodes: [rows, nodes, width]."""
        config, length = self.target.config, hidden[0].shape[1]
        embedded = fn.embedding(blocks.inputs, self.target.embedding).float()
        x = torch.where(blocks.masked[..., None], self.weights["mask.weight"], embedded)
        cos, sin = self._rope(length + max(*self.sizes, _GUESSES))
        at = blocks.places
        rope, context_rope = (cos[at], sin[at]), (cos[:length], sin[:length])
        mask = self._mask(blocks, length, None)
        for i, low in enumerate(self._adapters()):
            window = config.windows[i]
            seen = mask if window is None else self._mask(blocks, length, window)
            pairs = (rope, context_rope) if config.rope_layers[i] else (None, None)
            own = self.target.layer(i)
            x = self._compiled_layer(
                LayerShape.of(config), own, low, x, pairs[0], seen, hidden[i], pairs[1]
            )
        return self._normed(x)

    def _mask(self, blocks: MaskedBlocks, length: int, window: int | None) -> torch.Tensor:
        """Attention mask: [rows, 1, nodes, length + nodes]."""
        texts = torch.arange(length, device=blocks.places.device)
        before = texts < blocks.firsts[..., None]
        if window is not None:
            before = before & (blocks.places[..., None] - texts < window)
        own = (blocks.owners[:, None] == blocks.owners).expand(len(before), -1, -1)
        return torch.cat([before, own], dim=-1)[:, None]

    def _adapters(self) -> Iterator[dict[str, torch.Tensor]]:
        """The adapter weights of each layer."""
        groups = {
            name: value.view(-1, self.rank, value.shape[1]).unbind(0)
            for name, value in self.weights.items()
            if name != "mask.weight"
        }
        for i in range(self.target.config.layers):
            yield {name: values[i] for name, values in groups.items()}

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.target.weights["model.norm.weight"], self.target.config.norm_eps)

    def _loss_per_node(
        self, hidden: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor | None
    ) -> torch.Tensor:
        """The loss of each node. Large score matrices are split and recomputed in the backward pass."""
        head = self.target.head
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        count = -(-len(targets) * len(head) // _AT_ONCE)
        teachers: Sequence[torch.Tensor | None] = [None] * count
        if teacher is not None:
            teachers = teacher.flatten(0, 1).tensor_split(count)
        found = []
        for x, wanted, other in zip(
            hidden.tensor_split(count), targets.tensor_split(count), teachers, strict=True
        ):
            given = (x, head, wanted, other, self.soft)
            if count == 1:
                return self._losses(*given)
            found.append(checkpoint(self._losses, *given, use_reentrant=False))
        return torch.cat(found)

    # --- measuring --------------------------------------------------------------------------------

    def _count_correct(self, rows: TrainingRows, hidden: dict[int, torch.Tensor]) -> torch.Tensor:
        """Number of correct tokens drafted by masks from each position of answers on; -1 elsewhere.
        There are no masks before an answer begins.
        """
        runs = torch.full_like(rows.tokens, -1)
        runs.scatter_(1, rows.starts[:, None] - 1, 0)
        many = max(1, self.nodes // _GUESSES)
        for first in range(0, int((rows.stops - rows.starts).max()), many):
            firsts = rows.starts[:, None] + first + torch.arange(many, device=runs.device)
            firsts = torch.minimum(firsts, rows.stops[:, None] - 1)
            masks = torch.ones(*firsts.shape, _GUESSES, dtype=torch.bool, device=runs.device)
            blocks = self._blocks(rows, [(firsts, masks)])
            predicted = fn.linear(self._block_hidden(hidden, blocks), self.target.head).argmax(-1)
            hits = ((predicted == blocks.targets) & blocks.counted).view_as(masks)
            runs.scatter_(1, firsts, hits.long().cumprod(-1).sum(-1))
        return runs

    def sums(
        self, rows: TrainingRows, hidden: dict[int, torch.Tensor], seed: int
    ) -> Iterator[tuple[str | int, torch.Tensor]]:
        """Sums and counts of losses: of the model itself ("ar"), and by block size, where a
        uniformly random number of places after the first is masked.
        """
        numbers = torch.Generator().manual_seed(seed)
        targets, answer = rows.tokens[:, 1:], answer_mask(rows)[:, 1:]
        own = self._normed(hidden[self.target.config.layers][:, :-1])[answer]
        losses = self._loss_per_node(own[None], targets[answer], None)
        yield "ar", torch.stack([losses.sum(), losses.new_tensor(float(len(losses)))])
        for size in self.sizes:
            shape = (len(rows), max(1, self.nodes // size), size)
            draws = torch.rand(shape[:2], generator=numbers)
            masked = torch.rand(shape, generator=numbers) < torch.rand(
                *shape[:2], 1, generator=numbers
            )
            masked[..., -1] = False
            left = (rows.stops - rows.starts - 1).clamp(min=1)[:, None]
            firsts = rows.starts[:, None] + (draws.to(left.device) * left).long()
            blocks = self._blocks(rows, [(firsts, masked.to(left.device))])
            losses = self._loss_per_node(self._block_hidden(hidden, blocks), blocks.targets, None)
            losses = (losses.view(shape) * blocks.counted.view(shape)).sum(-1)
            counts = blocks.counted.view(shape).sum(-1)
            means = losses / counts.clamp(min=1)
            yield size, torch.stack([means.sum(), (counts > 0).float().sum()])

    def _rope(self, length: int) -> Pair:
        if length not in self._rope_tables:
            self._rope_tables[length] = rope_tables(self.target.config, length, self.target.device)
        return self._rope_tables[length]


def _fresh(target: Target, rank: int) -> dict[str, torch.Tensor]:
    """An adapter that adds nothing yet; the low-rank rows of all layers form one matrix per kind."""
    own, layers, device = target.layer(0), target.config.layers, target.device
    embedding = target.embedding.float()
    near = 0.1 * embedding.std() * torch.randn(1, embedding.shape[1]).to(device)
    weights = {"mask.weight": embedding.mean(0, keepdim=True) + near}
    for name in ADAPTED:
        rows, columns = own[f"{name}.weight"].shape
        low = columns**-0.5 * torch.randn(layers * rank, columns)
        weights[f"{name}.low"] = low.to(device)
        weights[f"{name}.high"] = torch.zeros(layers * rank, rows, device=device)
    return weights
