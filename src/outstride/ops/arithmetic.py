"""The arithmetic of a pass in plain torch, in shapes that never change.

Each function guarantees that a row's bits depend on that row alone. Libraries do not: a matrix product
chooses its kernel by the number of rows, a reduction by the length and place of a row, and fused
activations handle the tail of a buffer differently. So every product here has a *fixed* shape (a
tile of rows, padded with zeros), every sum is a product with ones or a fixed tree of additions, and
everything else is an elementwise function whose result does not depend on where an element is in
memory.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from outstride.ops.attention_plan import KEYS, ROWS, AttentionPlan
from outstride.ops.routing import Routing
from outstride.ops.switches import ClampedSwiglu
from outstride.ops.weights import ExpertWeights

TILE = 16
"""Rows of every matrix product. One row costs what sixteen cost, and gets the same bits."""
WIDTH = 8192
"""Maximum columns of a product: libraries copy the whole matrix, and keep that memory."""
SPARE = 4
"""Columns of ones after each cached value: the product with them is the sum of the weights."""

_TINY = 1e-20
"""Keeps a sum of weights that are all zero from dividing by zero."""
_FLOOR = -1e30
"""The maximum of a block in which a row sees no key."""


def padded(rows: int) -> int:
    """`rows` rounded up to whole tiles."""
    return -(-rows // TILE) * TILE


def pad(x: torch.Tensor) -> torch.Tensor:
    """Rows of zeros added up to a whole tile."""
    rows = padded(len(x))
    if rows == len(x):
        return x.contiguous()
    result = x.new_zeros(rows, *x.shape[1:])
    result[: len(x)] = x
    return result


class Multiplies(Protocol):
    """A matrix that a backend keeps in a format of its own, and multiplies itself."""

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T: [rows, in] to [rows, out]."""
        ...


def linear(
    x: torch.Tensor, weight: torch.Tensor | Multiplies, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, tile by tile: x [rows, in], whole tiles of rows; weight [out, in]."""
    if not isinstance(weight, torch.Tensor):
        found = weight.times(x)
        return found if bias is None else found + bias
    result = x.new_empty(len(x), len(weight))
    for left in range(0, len(weight), WIDTH):
        columns, into = weight[left : left + WIDTH].t(), result[:, left : left + WIDTH]
        for start in range(0, len(x), TILE):
            torch.mm(x[start : start + TILE], columns, out=into[start : start + TILE])
    if bias is not None:
        result += bias
    return result


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight [.., width]; the mean is a product with ones."""
    width = x.shape[-1]
    ones = x.new_ones(TILE, width)
    squares = (x * x).view(-1, width)
    mean = linear(squares, ones)[:, :1].div_(width).view(*x.shape[:-1], 1)
    return x * mean.add_(eps).rsqrt_() * weight


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norms of [rows, heads, head_dim]: per head, or over all heads if there is a weight for each."""
    if len(weight) == x.shape[-1]:
        return rms_norm(x.contiguous(), weight, eps)
    return rms_norm(x.reshape(len(x), -1), weight, eps).view(x.shape)


def rope_tables(
    positions: torch.Tensor, inverse: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of each row's angles, [rows, 1, head_dim / 2].

    Pairs whose frequency is 0 have no RoPE, and are not multiplied by its factor either.
    """
    angles = (positions.to(torch.float32)[:, None] * inverse)[:, None]
    factors = torch.where(inverse == 0, 1.0, factor)
    return angles.cos().mul_(factors), angles.sin().mul_(factors)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of x [rows, heads, head_dim], whose two halves are rotated against each other."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(gate) * up; written out, because the library's depends on the buffer's tail."""
    return (gate / (gate.neg().exp_().add_(1.0))).mul_(up)


def sigmoid_gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """sigmoid(x @ weight), [rows, 1]: x has whole tiles of rows."""
    product = linear(x, weight.expand(TILE, -1).contiguous())[:, :1]
    return 1.0 / product.neg().exp_().add_(1.0)


def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, with the tanh approximation: 0.5 (1 + tanh(u)) is the sigmoid of 2 u."""
    twice = (gate * gate * gate * 0.044715 + gate) * (2 * math.sqrt(2 / math.pi))
    return (gate / (twice.neg_().exp_().add_(1.0))).mul_(up)


def clamped_swiglu_mul(gate: torch.Tensor, up: torch.Tensor, spec: ClampedSwiglu) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate and up clamped."""
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return (gate / ((gate * -spec.alpha).exp_().add_(1.0))).mul_(up.add_(1.0))


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap)"""
    powers = (x.abs() * (-2.0 / cap)).exp_()
    return ((1.0 - powers) / (1.0 + powers)).mul_(cap).copysign_(x)


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of each row, [rows, 1], as a product with ones. `x` has whole tiles of rows."""
    return linear(x, x.new_ones(TILE, x.shape[-1]))[:, :1]


def ranked(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, count]: the columns of the highest scores of each row; ties: the lowest column first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row and their weights, both [rows, per_token], best first."""
    if routing.sigmoid:
        scores = 1.0 / logits.neg().exp_().add_(1.0)
    else:
        powers = (logits - logits.amax(dim=-1, keepdim=True)).exp_()
        scores = powers / row_sum(powers)
    rated = scores if bias is None else scores + bias
    if routing.groups_kept < routing.groups:
        members = rated.view(len(rated), routing.groups, -1)
        best = members.sort(dim=-1, descending=True).values
        kept = ranked(best[..., :2].sum(dim=-1), routing.groups_kept)
        shut = torch.ones_like(members[..., 0]).scatter_(1, kept, 0.0).bool()
        choice = members.masked_fill(shut.unsqueeze(-1), -math.inf).view_as(rated)
    else:
        choice = rated
    chosen = ranked(choice, routing.per_token)
    weights = (rated if routing.biased else scores).gather(1, chosen)
    if routing.normalized:
        total = weights[:, :1].clone()
        for place in range(1, routing.per_token):
            total += weights[:, place : place + 1]
        weights = weights / (total + _TINY)
    return chosen, weights * routing.scale


def through_experts(x: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """x [rows, hidden], each row through its own experts; results are added in expert order."""
    result = torch.zeros_like(x)
    logits = linear(x, weights.router, weights.router_bias)
    chosen, shares = route(logits, weights.bias, weights.routing)
    inner_bias, outer_bias, clamped = weights.gate_up_bias, weights.down_bias, weights.activation
    for expert in torch.unique(chosen).tolist():
        rows, place = torch.where(chosen == expert)
        inner = linear(
            pad(x[rows]),
            weights.gate_up[expert],
            None if inner_bias is None else inner_bias[expert],
        )
        gate, up = inner.chunk(2, dim=-1)
        gated = silu_mul(gate, up) if clamped is None else clamped_swiglu_mul(gate, up, clamped)
        bias = None if outer_bias is None else outer_bias[expert]
        found = linear(gated, weights.down[expert], bias)[: len(rows)]
        result.index_add_(0, rows, found * shares[rows, place, None])
    return result


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of [kv_heads, rows, head_dim] over the cache, as planned.

    `queries` are scaled already; `keys` are [kv_heads, slots, head_dim] and `values` the same with
    SPARE columns of ones. Rows that are not in the plan are zeros.
    cap: the soft cap of all logits. sinks: [kv_heads, rows], a logit that has no value.
    """
    heads, rows, size = queries.shape
    result = queries.new_zeros(heads, rows, size)
    for chunk in plan.chunks:
        q = queries.index_select(1, chunk.queries).view(-1, ROWS, size)
        k = keys.index_select(1, chunk.keys).view(-1, KEYS, size)
        scores = torch.bmm(q, k.transpose(1, 2)).view(heads, -1, ROWS, KEYS)
        if cap is not None:
            scores = softcap(scores, cap)
        if len(chunk.bias):
            scores[:, : len(chunk.bias)] += chunk.bias
        peaks = scores.amax(dim=-1).clamp_(min=_FLOOR)
        weights = scores.sub_(peaks.unsqueeze(-1)).exp_().view(-1, ROWS, KEYS)
        v = values.index_select(1, chunk.keys).view(-1, KEYS, size + SPARE)
        sums = torch.bmm(weights, v).view(heads, -1, size + SPARE)
        sums = sums.index_select(1, chunk.partials)
        peaks = peaks.view(heads, -1).index_select(1, chunk.partials)
        if chunk.levels:
            of_row = peaks.index_select(1, chunk.row_partials).view(heads, len(chunk.rows), -1)
            tops = of_row.amax(dim=-1)
            shift = peaks.sub_(tops.index_select(1, chunk.owners))
            sums *= shift.exp_().unsqueeze(-1)
            for level in chunk.levels:
                right = sums.index_select(1, level.right)
                sums = sums.index_select(1, level.left)
                if level.onto is None:
                    sums += right
                else:
                    right += sums.index_select(1, level.onto)
                    sums.index_copy_(1, level.onto, right)
        else:
            tops = peaks
        total = sums[..., size : size + 1]
        if sinks is not None:
            total = total + (sinks.index_select(1, chunk.rows) - tops).exp_().unsqueeze(-1)
        result.index_copy_(1, chunk.rows, sums[..., :size] / total)
    return result
