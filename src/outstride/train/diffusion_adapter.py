"""`diffusion-adapter`: what lets a model that continues its text fill in masks as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint

from outstride.core.contracts import CAUSAL
from outstride.train.layers import Pair, Shape, Weights, heads, layer, norm, turns
from outstride.train.recipe import Measured, Recipe, recipe
from outstride.train.target import Target
from outstride.train.walk import depths, walk
from outstride.train.words import Rows

ADAPTED = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The matrices of a layer that the adapter adds to."""
GROWN = 0.6
"""The share of a training by which blocks have grown to their full size."""
_AT_ONCE = 1 << 28
"""Scores that exist at a time; those of further nodes wait for their turn."""
_TEXTS, _ROWS, _GUESSES = 96, 16, 8
"""Held-out texts that are measured, those of them at once, and guesses of a draft."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks over rows of text, their nodes side by side: what they hold, see and ought to say.

    A block begins with a mask, behind it stand masks and tokens. A node scores the place behind it.
    """

    inputs: torch.Tensor
    """Tokens: [rows, nodes]"""
    masked: torch.Tensor
    """Which of them are masks instead."""
    places: torch.Tensor
    """Their positions."""
    counted: torch.Tensor
    """Which nodes score a place that is open, and within the text."""
    right: torch.Tensor
    """The tokens that belong there."""
    firsts: torch.Tensor
    """Where the block of each node begins: it sees what stands before."""
    owners: torch.Tensor
    """The number of the block of each node, the same in all rows: [nodes]"""


def filled(
    shape: Shape,
    own: Weights,
    low: Weights,
    x: torch.Tensor,
    turn: Pair | None,
    sees: torch.Tensor,
    state: torch.Tensor,
    context: Pair | None,
) -> torch.Tensor:
    """One layer over the nodes of blocks, with the adapter; what stands before is seen without it.

    state: what enters the layer at each position of the text; context: cosines and sines there.
    """
    y = norm(state, own["input_layernorm.weight"], shape.eps)
    before = (heads(shape, own, y, "k", context), heads(shape, own, y, "v", None))
    return layer(shape, {**own, **low}, x, turn, sees, before)


def _losses(
    states: torch.Tensor,
    head: torch.Tensor,
    right: torch.Tensor,
    teacher: torch.Tensor | None,
    soft: float,
) -> torch.Tensor:
    """The loss of each node; `teacher`: the model's own states there, if it is asked as well."""
    scores = fn.linear(states, head).float()
    losses = fn.cross_entropy(scores, right, reduction="none")
    if teacher is None:
        return losses
    wanted = fn.linear(teacher, head).float().log_softmax(-1)
    apart = (wanted.exp() * (wanted - scores.log_softmax(-1))).sum(-1)
    return losses + soft * apart


@recipe("diffusion-adapter")
class DiffusionAdapter(Recipe):
    """A gated low-rank adapter and a mask, with which a model fills in blocks of its own text.

    With the gate open, masks and tokens of a block see each other and all before the block. With the
    gate closed the model is what it was, bit for bit; what stands before a block is read so.

    rank: that of what is added to each matrix. sizes: of blocks, grown one by one while training.
    nodes: of blocks, per text and step. whole: the share of blocks that are nothing but masks; the
    others come in pairs with opposite masks. soft: the weight of the distance to the model's own
    distribution. compiled: whether torch may compile it on a card.

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
        if target.config.vision != CAUSAL:
            raise ValueError("is for models that continue their text; this one fills in masks")
        self.target, self.rank, self.nodes = target, rank, nodes
        self.sizes = _sizes(sizes, nodes)
        self.whole, self.soft = whole, soft
        self.weights = _fresh(target, rank)
        self._window = 0
        self._turns: dict[int, Pair] = {}
        self._filled: Callable[..., torch.Tensor] = filled
        self._losses: Callable[..., torch.Tensor] = _losses
        if compiled and target.on_card:
            self.compile()

    def compile(self, **how: Any) -> None:
        """Lets torch compile the layers, with and without the adapter, and the losses."""
        self.target.compile(**how)
        self._filled = torch.compile(filled, dynamic=False, **how)
        self._losses = torch.compile(_losses, dynamic=False, **how)

    def prepare(self, rows: Rows) -> None:
        self._window = rows.tokens.shape[1]

    def loss(self, rows: Rows, numbers: torch.Generator) -> torch.Tensor:
        """Cross-entropy of what is open, over blocks of all sizes that are in use by now."""
        states = self.read(rows, final=bool(self.soft))
        device = rows.tokens.device
        many = max(1, min(len(self.sizes), int(self.progress / GROWN * len(self.sizes)) + 1))
        parts = []
        for size, pairs in shares(self.sizes[:many], self.nodes):
            shape = (len(rows), pairs)
            whole = torch.rand(shape, generator=numbers, device=device) < self.whole
            draws = torch.rand(*shape, 2, generator=numbers, device=device)
            draws[..., 1] = torch.where(whole, draws[..., 1], draws[..., 0])
            shown = torch.rand(*shape, 1, generator=numbers, device=device)
            hidden = torch.rand(*shape, size, generator=numbers, device=device) < shown
            masks = torch.stack([hidden, ~hidden], dim=2) | whole[..., None, None]
            room = (rows.stops - rows.starts - 1).clamp(min=1)[:, None]
            firsts = rows.starts[:, None] + (draws.flatten(1) * room).long()
            parts.append((firsts, masks.flatten(1, 2)))
        blocks = self._blocks(rows, parts)
        teacher = None
        if self.soft:
            last = states[self.target.config.layers]
            index = blocks.places.clamp(max=last.shape[1] - 1)[..., None]
            teacher = self._normed(last.gather(1, index.expand(-1, -1, last.shape[2])))
        weights = blocks.counted.float()
        losses = self._each(self._through(states, blocks), blocks.right, teacher)
        return (losses.view_as(weights) * weights).sum() / weights.sum().clamp(min=1e-6)

    @torch.no_grad()
    def measure(self, held: Rows) -> Measured:
        """How far drafts of masks get along greedy texts, and the loss by size of block."""
        greedy = held if bool(held.sampled.all()) else held.take(~held.sampled)
        greedy = greedy.take(slice(_TEXTS))
        runs, sums = [], dict.fromkeys(("ar", *self.sizes), torch.zeros(2, dtype=torch.float64))
        with torch.compiler.set_stance("force_eager"), self.target.autocast():
            for first in range(0, len(greedy), _ROWS):
                rows = greedy.take(slice(first, first + _ROWS)).to(self.target.device)
                states = self.read(rows, final=True)
                runs.append(self._runs(rows, states))
                for name, found in self.sums(rows, states, first):
                    sums[name] = sums[name] + found.double().cpu()
        found, starts, stops = torch.cat(runs).cpu(), greedy.starts.cpu(), greedy.stops.cpu()
        visited = walk(found, starts, stops)
        room = stops[:, None] - 1 - torch.arange(found.shape[1])
        chosen = visited & (torch.arange(found.shape[1]) >= starts[:, None])
        figures = {f"loss_{name}": float(both[0] / both[1]) for name, both in sums.items()}
        return Measured(
            tokens_per_pass=float((stops - starts).sum() / visited.sum()),
            by_depth=depths(found, room, chosen, _GUESSES),
            carried=1.0,
            figures=figures,
        )

    def config(self) -> dict[str, Any]:
        return {"rank": self.rank, "block": max(self.sizes), "window": self._window}

    # --- one batch --------------------------------------------------------------------------------

    def read(self, rows: Rows, *, final: bool) -> dict[int, torch.Tensor]:
        """What enters each layer at each position with the gate closed."""
        return self.target.states(rows.tokens, range(self.target.config.layers + final))

    def _blocks(self, rows: Rows, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Blocks:
        """Blocks of several sizes: where they begin, [rows, blocks], and which of their places are
        open, [rows, blocks, size]: the mask in front scores the first of them."""
        tokens, length, device = rows.tokens, rows.tokens.shape[1], rows.tokens.device
        firsts, places, opened, hidden, owners, many = [], [], [], [], [], 0
        for begin, masks in parts:
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
        return Blocks(
            inputs=tokens.gather(1, at.clamp(max=length - 1)),
            masked=torch.cat(hidden, dim=1),
            places=at,
            counted=torch.cat(opened, dim=1),
            right=tokens.gather(1, (at + 1).clamp(max=length - 1)),
            firsts=torch.cat(firsts, dim=1),
            owners=torch.cat(owners),
        )

    def _through(self, states: dict[int, torch.Tensor], blocks: Blocks) -> torch.Tensor:
        """The normalised states of all nodes: [rows, nodes, width]."""
        config, length = self.target.config, states[0].shape[1]
        embedded = fn.embedding(blocks.inputs, self.target.embedding).float()
        x = torch.where(blocks.masked[..., None], self.weights["mask.weight"], embedded)
        cos, sin = self._turn(length + max(*self.sizes, _GUESSES))
        at = blocks.places
        turn, context = (cos[at], sin[at]), (cos[:length], sin[:length])
        sees = self._sees(blocks, length, None)
        for i, low in enumerate(self._low()):
            window = config.windows[i]
            seen = sees if window is None else self._sees(blocks, length, window)
            pairs = (turn, context) if config.rope_layers[i] else (None, None)
            own = self.target.layer(i)
            x = self._filled(Shape.of(config), own, low, x, pairs[0], seen, states[i], pairs[1])
        return self._normed(x)

    def _sees(self, blocks: Blocks, length: int, window: int | None) -> torch.Tensor:
        """[rows, 1, nodes, length + nodes]"""
        texts = torch.arange(length, device=blocks.places.device)
        before = texts < blocks.firsts[..., None]
        if window is not None:
            before = before & (blocks.places[..., None] - texts < window)
        own = (blocks.owners[:, None] == blocks.owners).expand(len(before), -1, -1)
        return torch.cat([before, own], dim=-1)[:, None]

    def _low(self) -> Iterator[dict[str, torch.Tensor]]:
        """What is added to the matrices of each layer."""
        parts = {
            name: value.view(-1, self.rank, value.shape[1]).unbind(0)
            for name, value in self.weights.items()
            if name != "mask.weight"
        }
        for i in range(self.target.config.layers):
            yield {name: values[i] for name, values in parts.items()}

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.target.weights["model.norm.weight"], self.target.config.norm_eps)

    def _each(
        self, states: torch.Tensor, right: torch.Tensor, teacher: torch.Tensor | None
    ) -> torch.Tensor:
        """The loss of each node. Where scores are many, they are computed anew on the way back."""
        head = self.target.head
        states, right = states.flatten(0, 1), right.flatten()
        count = -(-len(right) * len(head) // _AT_ONCE)
        teachers: Sequence[torch.Tensor | None] = [None] * count
        if teacher is not None:
            teachers = teacher.flatten(0, 1).tensor_split(count)
        found = []
        for x, wanted, other in zip(
            states.tensor_split(count), right.tensor_split(count), teachers, strict=True
        ):
            given = (x, head, wanted, other, self.soft)
            if count == 1:
                return self._losses(*given)
            found.append(checkpoint(self._losses, *given, use_reentrant=False))
        return torch.cat(found)

    # --- measuring --------------------------------------------------------------------------------

    def _runs(self, rows: Rows, states: dict[int, torch.Tensor]) -> torch.Tensor:
        """For each position of answers, how many guesses behind it are right that masks made from
        this position on; -1 elsewhere. Before an answer begins there are no masks yet."""
        runs = torch.full_like(rows.tokens, -1)
        runs.scatter_(1, rows.starts[:, None] - 1, 0)
        many = max(1, self.nodes // _GUESSES)
        for first in range(0, int((rows.stops - rows.starts).max()), many):
            firsts = rows.starts[:, None] + first + torch.arange(many, device=runs.device)
            firsts = torch.minimum(firsts, rows.stops[:, None] - 1)
            masks = torch.ones(*firsts.shape, _GUESSES, dtype=torch.bool, device=runs.device)
            blocks = self._blocks(rows, [(firsts, masks)])
            said = fn.linear(self._through(states, blocks), self.target.head).argmax(-1)
            hits = ((said == blocks.right) & blocks.counted).view_as(masks)
            runs.scatter_(1, firsts, hits.long().cumprod(-1).sum(-1))
        return runs

    def sums(
        self, rows: Rows, states: dict[int, torch.Tensor], seed: int
    ) -> Iterator[tuple[str | int, torch.Tensor]]:
        """Losses and how many there are: of the model itself, and by size of block where any number
        of places behind the first, drawn evenly, is open."""
        numbers = torch.Generator().manual_seed(seed)
        right, answer = rows.tokens[:, 1:], _answers(rows)[:, 1:]
        own = self._normed(states[self.target.config.layers][:, :-1])[answer]
        losses = self._each(own[None], right[answer], None)
        yield "ar", torch.stack([losses.sum(), losses.new_tensor(float(len(losses)))])
        for size in self.sizes:
            shape = (len(rows), max(1, self.nodes // size), size)
            draws = torch.rand(shape[:2], generator=numbers)
            hidden = torch.rand(shape, generator=numbers) < torch.rand(
                *shape[:2], 1, generator=numbers
            )
            hidden[..., -1] = False
            room = (rows.stops - rows.starts - 1).clamp(min=1)[:, None]
            firsts = rows.starts[:, None] + (draws.to(room.device) * room).long()
            blocks = self._blocks(rows, [(firsts, hidden.to(room.device))])
            losses = self._each(self._through(states, blocks), blocks.right, None)
            losses = (losses.view(shape) * blocks.counted.view(shape)).sum(-1)
            counts = blocks.counted.view(shape).sum(-1)
            means = losses / counts.clamp(min=1)
            yield size, torch.stack([means.sum(), (counts > 0).float().sum()])

    def _turn(self, length: int) -> Pair:
        if length not in self._turns:
            self._turns[length] = turns(self.target.config, length, self.target.device)
        return self._turns[length]


def _answers(rows: Rows) -> torch.Tensor:
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    return (places >= rows.starts[:, None]) & (places < rows.stops[:, None])


def shares(sizes: Sequence[int], nodes: int) -> list[tuple[int, int]]:
    """How many pairs of blocks of each size make up so many nodes, about as many nodes of each."""
    found, left = [], nodes
    for many, size in zip(range(len(sizes), 0, -1), sorted(sizes, reverse=True), strict=True):
        pairs = max(1, left // (2 * size * many)) if many > 1 else left // (2 * size)
        found.append((size, pairs))
        left -= 2 * size * pairs
    return found


def _sizes(text: str, nodes: int) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 2 or list(found) != sorted(set(found)):
        raise ValueError(f"sizes are rising numbers from 2 on, such as 2,4,8: {text}")
    if nodes % (2 * found[0]) or any(size % found[0] for size in found):
        raise ValueError(f"sizes and half the nodes are multiples of the first size, {found[0]}")
    if nodes < 2 * sum(found):
        raise ValueError(f"blocks of these sizes, two of each, need {2 * sum(found)} nodes")
    return found


def _fresh(target: Target, rank: int) -> dict[str, torch.Tensor]:
    """An adapter that adds nothing yet: all layers' rows of one kind are one matrix."""
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
