"""`block-drafter`: a few layers that guess a block of tokens in one pass, from the target's states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint

from outstride.core.contracts import CAUSAL
from outstride.models.grafts.folder import check, read_config, read_tensors
from outstride.train.layers import Pair, Shape, Weights, heads, layer, norm, turns, within
from outstride.train.recipe import Measured, Recipe, recipe
from outstride.train.target import Target
from outstride.train.walk import anchored, depths, said, walk
from outstride.train.words import Rows

DEPTHS = (0.2, 0.5, 0.77, 1.0)
"""Where the target is tapped unless told otherwise, as shares of its layers."""
ROUND = 256
"""The draft vocabulary has a multiple of so many tokens, if the target's has."""
SPREAD = 2.0
"""How far untrained scores lie apart at most. The head is made for surer states than random ones."""
_AT_ONCE = 1 << 28
"""Scores that exist at a time; those of further places wait for their turn."""
_SAMPLE, _TEXTS, _ROWS = 64, 96, 16
"""Texts by which features are scaled; held-out texts that are measured; and those of them at once."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks over rows of text, each of which begins at an anchor.

    A block holds the anchor's token and masks behind it; its places are those masks. Its nodes see
    what stands before the anchor, and each other.
    """

    anchors: torch.Tensor
    """[rows, blocks]"""
    firsts: torch.Tensor
    """Embeddings of the anchors' tokens: [rows, blocks, width]."""
    turn: Pair
    """Cosines and sines of the nodes: [rows, nodes, head size]."""
    sees: torch.Tensor
    """[rows, 1, nodes, length + nodes]"""
    before: torch.Tensor
    """For each place the position in front of it: [rows, blocks, places]."""
    front: torch.Tensor
    """The number of the token there in the draft vocabulary, or its size if it has none."""
    right: torch.Tensor
    """The number of the token that belongs at the place, likewise."""
    inside: torch.Tensor
    """Whether the place is within the text."""


def drafted(
    shape: Shape,
    count: int,
    weights: Weights,
    features: torch.Tensor,
    context: Pair,
    firsts: torch.Tensor,
    turn: Pair,
    sees: torch.Tensor,
) -> torch.Tensor:
    """The normalised states of all places of blocks: [rows, blocks, places, width].

    features: what the target's layers say of each position, [rows, length, taps * width]; context:
    the cosines and sines there.
    """
    y = norm(features, weights["taps.scale"], shape.eps)
    y = norm(fn.linear(y, weights["fc.weight"]), weights["hidden_norm.weight"], shape.eps)
    rows, many, width = firsts.shape
    size = turn[0].shape[1] // many
    masks = weights["mask.weight"].expand(rows, many, size - 1, width)
    x = torch.cat([firsts[:, :, None], masks], dim=2).flatten(1, 2)
    for i in range(count):
        own = within(weights, f"layers.{i}.")
        before = (heads(shape, own, y, "k", context), heads(shape, own, y, "v", None))
        x = layer(shape, own, x, turn, sees, before)
    x = norm(x, weights["norm.weight"], shape.eps)
    return x.view(rows, many, size, width)[:, :, 1:]


def scored(
    states: torch.Tensor, before: torch.Tensor, head: torch.Tensor, after: torch.Tensor
) -> torch.Tensor:
    """The scores of the draft vocabulary: the head's, corrected by the token in front."""
    return fn.linear(states, head).float() + fn.linear(before, after).float()


def _losses(
    states: torch.Tensor,
    before: torch.Tensor,
    head: torch.Tensor,
    after: torch.Tensor,
    right: torch.Tensor,
    teacher: torch.Tensor | None,
    soft: float,
) -> torch.Tensor:
    """The loss at each place; `teacher`: the target's own states there, if it is asked as well."""
    scores = scored(states, before, head, after)
    losses = fn.cross_entropy(scores, right, reduction="none")
    if teacher is None:
        return losses
    wanted = fn.linear(teacher, head).float().log_softmax(-1)
    apart = (wanted.exp() * (wanted - scores.log_softmax(-1))).sum(-1)
    return losses + soft * apart


def frequent(tokens: torch.Tensor, size: int, cover: float) -> torch.Tensor:
    """The fewest tokens that make up so much of a text, and some more for a round number; sorted."""
    counts = torch.bincount(tokens.flatten(), minlength=size)
    most, order = counts.sort(descending=True, stable=True)
    reached = most.cumsum(0) >= cover * counts.sum()
    needed = int(reached.int().argmax()) + 1
    return order[: min(size, -(-needed // ROUND) * ROUND)].sort().values


@recipe("block-drafter")
class BlockDrafter(Recipe):
    """A few layers over several of the target's own, which guess the next tokens all at once.

    Their keys and values for what the target has read come from its own states, so drafting starts
    from all that the target knows. A correction of low rank by the token in front makes the guesses
    follow each other.

    layers, block: how many layers, and positions of a block, the last settled token among them.
    taps: the target's layers whose entering states are read, such as `6,15,23,30`; empty: four.
    cover: how much of the answers the draft vocabulary covers. rank: that of the correction.
    anchors: blocks per text and step. decay: what a place weighs beside the one before it.
    soft: the weight of the distance to the target's own distribution.
    begin: the folder of a trained part of the same sizes, to go on from what it has learned.
    compiled: whether torch may compile it on a card.

    Paper: after block-diffusion drafters such as DFlash, with guesses chained as in Clover
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
        if target.config.vision != CAUSAL:
            raise ValueError("drafts for models that continue their text, not for those with masks")
        self.target, self.layers, self.block = target, layers, block
        self.taps = _taps(taps, target.config.layers)
        self.cover, self.rank, self.anchors = cover, rank, anchors
        self.decay, self.soft = decay, soft
        self.weights = _fresh(target, layers, len(self.taps))
        self.vocabulary = self._index = torch.empty(0, dtype=torch.long)
        self._window = 0
        self._begun = self._read(Path(begin)) if begin else {}
        self._scale = self._head = torch.empty(0)
        self._turns: dict[int, Pair] = {}
        self._drafted: Callable[..., torch.Tensor] = drafted
        self._losses: Callable[..., torch.Tensor] = _losses
        if compiled and target.on_card:
            self.compile()

    def compile(self, **how: Any) -> None:
        """Lets torch compile the target's layers, the blocks and the losses, apart from each other."""
        self.target.compile(**how)
        self._drafted = torch.compile(drafted, dynamic=False, **how)
        self._losses = torch.compile(_losses, dynamic=False, **how)

    def _read(self, folder: Path) -> dict[str, torch.Tensor]:
        """The tensors of a part to go on from."""
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

    def prepare(self, rows: Rows) -> None:
        """Chooses the draft vocabulary and the scale of the features, both from the answers."""
        device, size = self.target.device, self.target.config.vocab_size
        self.vocabulary = frequent(rows.tokens[said(rows)], size, self.cover).to(device)
        if self._begun:
            self.vocabulary = self._begun["vocabulary"].long()
        many = len(self.vocabulary)
        self._index = torch.full((size,), many, device=device)
        self._index[self.vocabulary] = torch.arange(many, device=device)
        self._head = self.target.head[self.vocabulary].contiguous()
        self.weights["follow.before.weight"] = torch.randn(many + 1, self.rank).to(device)
        self.weights["follow.after.weight"] = torch.zeros(many, self.rank, device=device)
        self._window = rows.tokens.shape[1]
        if self._begun:
            self._scale = self._begun["taps.scale"]
            self.weights = {name: self._begun[name].float() for name in self.weights}
            return
        some = rows.take(slice(_SAMPLE)).to(device)
        with torch.compiler.set_stance("force_eager"):  # other shapes than those of training
            states = self.target.states(some.tokens, self.taps)
        seen = self._features(states)[said(some)]
        seen = norm(seen, torch.ones_like(seen[0]), self.target.config.norm_eps)
        self._scale = seen.square().mean(0).add(1e-8).rsqrt()

    def loss(self, rows: Rows, numbers: torch.Generator) -> torch.Tensor:
        """Cross-entropy over the places of blocks at random anchors within the answers."""
        last = self.target.config.layers
        states = self.target.states(rows.tokens, (*self.taps, last) if self.soft else self.taps)
        blocks = self._blocks(rows, anchored(rows, self.anchors, numbers))
        teacher = None
        if self.soft:
            at = torch.arange(len(rows), device=blocks.before.device)[:, None, None]
            scale, eps = self.target.weights["model.norm.weight"], self.target.config.norm_eps
            teacher = norm(states[last][at, blocks.before], scale, eps).flatten(0, 2)
        counted = blocks.inside & (blocks.right < len(self.vocabulary))
        places = torch.arange(self.block - 1, device=counted.device)
        weights = self.decay**places * counted
        losses = self._each(self._states(states, blocks), blocks, teacher)
        return (losses.view_as(weights) * weights).sum() / weights.sum().clamp(min=1e-6)

    @torch.no_grad()
    def measure(self, held: Rows) -> Measured:
        """How many guesses of a chain are right, from every position of greedy texts.

        As long as all guesses are right, the tokens in front are those of the text: so one pass over
        the text tells how far each chain gets.
        """
        greedy = held if bool(held.sampled.all()) else held.take(~held.sampled)
        greedy = greedy.take(slice(_TEXTS))
        cuts = range(0, len(greedy), _ROWS)
        with torch.compiler.set_stance("force_eager"):
            parts = [
                self._runs(greedy.take(slice(i, i + _ROWS)).to(self.target.device)) for i in cuts
            ]
        runs, starts, stops = torch.cat(parts).cpu(), greedy.starts.cpu(), greedy.stops.cpu()
        visited = walk(runs, starts, stops)
        room = stops[:, None] - 1 - torch.arange(runs.shape[1])
        known = self._index.cpu()[greedy.tokens.cpu()[said(greedy.to("cpu"))]]
        return Measured(
            tokens_per_pass=float((stops - starts).sum() / visited.sum()),
            by_depth=depths(runs, room, visited, self.block - 1),
            overhead=self._overhead(),
            figures={
                "tokens_per_pass_anywhere": 1 + sum(depths(runs, room, runs >= 0, self.block - 1)),
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

    def _features(self, states: dict[int, torch.Tensor]) -> torch.Tensor:
        return torch.cat([states[tap] for tap in self.taps], dim=-1)

    def _blocks(self, rows: Rows, anchors: torch.Tensor) -> Blocks:
        """Blocks at these anchors; a place behind a row has no token, which `inside` says."""
        tokens, length, device = rows.tokens, rows.tokens.shape[1], rows.tokens.device
        many = anchors.shape[1]
        nodes = anchors[..., None] + torch.arange(self.block, device=device)
        cos, sin = self._turn(length + self.block)
        own = torch.arange(many, device=device).repeat_interleave(self.block)
        sees = torch.cat(
            [
                torch.arange(length, device=device) < anchors[:, own, None],
                (own[:, None] == own).expand(len(tokens), -1, -1),
            ],
            dim=-1,
        )

        def number(positions: torch.Tensor) -> torch.Tensor:
            return self._index[tokens.gather(1, positions.flatten(1)).view_as(positions)]

        before, places = nodes[..., :-1].clamp(max=length - 1), nodes[..., 1:]
        return Blocks(
            anchors=anchors,
            firsts=fn.embedding(tokens.gather(1, anchors), self.target.embedding).float(),
            turn=(cos[nodes.flatten(1)], sin[nodes.flatten(1)]),
            sees=sees[:, None],
            before=before,
            front=number(before),
            right=number(places.clamp(max=length - 1)),
            inside=places < rows.stops[:, None, None],
        )

    def _states(self, states: dict[int, torch.Tensor], blocks: Blocks) -> torch.Tensor:
        features = self._features(states)
        length = features.shape[1]
        cos, sin = self._turn(length + self.block)
        return self._drafted(
            Shape.of(self.target.config),
            self.layers,
            {**self.weights, "taps.scale": self._scale},
            features,
            (cos[:length], sin[:length]),
            blocks.firsts,
            blocks.turn,
            blocks.sees,
        )

    def _each(
        self, states: torch.Tensor, blocks: Blocks, teacher: torch.Tensor | None
    ) -> torch.Tensor:
        """The loss at each place. Where scores are many, they are computed anew on the way back."""
        many = len(self.vocabulary)
        before = fn.embedding(blocks.front.flatten(), self.weights["follow.before.weight"])
        states, right = states.flatten(0, 2), blocks.right.flatten().clamp(max=many - 1)
        after, parts = self.weights["follow.after.weight"], -(-len(right) * many // _AT_ONCE)
        tables = [part.tensor_split(parts) for part in (states, before, right)]
        teachers = [None] * parts if teacher is None else teacher.tensor_split(parts)
        found = []
        for x, y, wanted, other in zip(*tables, teachers, strict=True):
            given = (x, y, self._head, after, wanted, other, self.soft)
            if parts == 1:
                return self._losses(*given)
            found.append(checkpoint(self._losses, *given, use_reentrant=False))
        return torch.cat(found)

    def _runs(self, rows: Rows) -> torch.Tensor:
        """For each position of answers, how many guesses behind it are right; -1 elsewhere."""
        runs = torch.full_like(rows.tokens, -1)
        states = self.target.states(rows.tokens, self.taps)
        head, after = self._head.float(), self.weights["follow.after.weight"]
        steps = torch.arange(self.anchors, device=runs.device)
        for first in range(0, int((rows.stops - rows.starts).max()), self.anchors):
            anchors = rows.starts[:, None] - 1 + first + steps
            blocks = self._blocks(rows, torch.minimum(anchors, rows.stops[:, None] - 2))
            with self.target.autocast():
                found = self._states(states, blocks)
            before = self.weights["follow.before.weight"][blocks.front]
            said = scored(found.float(), before, head, after).argmax(-1)
            hits = (said == blocks.right) & blocks.inside
            runs.scatter_(1, blocks.anchors, hits.long().cumprod(-1).sum(-1))
        return runs

    def _turn(self, length: int) -> Pair:
        if length not in self._turns:
            self._turns[length] = turns(self.target.config, length, self.target.device)
        return self._turns[length]

    def _overhead(self) -> float:
        """Weights that a draft reads, as a share of those that a pass of the target reads."""
        left_out = ("fc.", "mask.", "follow.before.")
        own = sum(v.numel() for name, v in self.weights.items() if not name.startswith(left_out))
        return (own + self._head.numel()) / self.target.size


def _taps(text: str, layers: int) -> tuple[int, ...]:
    if not text:
        return tuple(dict.fromkeys(round(share * layers) for share in DEPTHS))
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or len(set(found)) < len(found) or not 0 <= min(found) <= max(found) <= layers:
        raise ValueError(
            f"taps are different layers from 0 to {layers}, such as 1,{layers}: {text}"
        )
    return found


def _fresh(target: Target, layers: int, taps: int) -> dict[str, torch.Tensor]:
    """Untrained weights, but for those that depend on the vocabulary."""
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
