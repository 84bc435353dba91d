"""The layers of a decoder as torch differentiates and compiles them: whole rows of text at once.

What trains in this package runs through `layer`, and so do the frozen models that it learns from. The
engine's own operations compute the same function, node by node, with bits that do not depend on
company; here, speed counts and rounding may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as fn

from outstride.models.config import DecoderConfig

Weights = Mapping[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer needs to know of its model besides its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, config: DecoderConfig) -> Shape:
        return cls(config.heads, config.kv_heads, config.head_dim, config.norm_eps)


def turns(config: DecoderConfig, length: int, device: str) -> Pair:
    """Cosines and sines of each dimension of a head, for each of the first positions."""
    angles = torch.arange(length)[:, None] * torch.tensor(config.frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    cos, sin = (config.rope_scale * value for value in (angles.cos(), angles.sin()))
    return cos.to(device), sin.to(device)


def within(weights: Weights, prefix: str) -> dict[str, torch.Tensor]:
    """The weights whose names begin so, under what is left of their names."""
    size = len(prefix)
    return {name[size:]: value for name, value in weights.items() if name.startswith(prefix)}


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divided by its root mean square, in float32."""
    return fn.rms_norm(x.float(), x.shape[-1:], weight, eps)


def product(own: Weights, name: str, y: torch.Tensor) -> torch.Tensor:
    """Rows times a matrix, with its bias and what an adapter of low rank adds, where there are."""
    found = fn.linear(y, own[f"{name}.weight"], own.get(f"{name}.bias"))
    if (low := own.get(f"{name}.low")) is not None:
        found = found + fn.linear(y, low) @ own[f"{name}.high"]
    return found


def heads(
    shape: Shape, own: Weights, y: torch.Tensor, kind: str, turn: Pair | None
) -> torch.Tensor:
    """The queries (`q`), keys (`k`) or values (`v`) of normalised states: [batch, heads, nodes, size].

    turn: cosines and sines for each node, [nodes, size] or [batch, nodes, size]; None: not turned.
    """
    y = product(own, f"self_attn.{kind}_proj", y)
    y = y.view(*y.shape[:-1], -1, shape.head_dim)
    if kind != "v":
        if (scale := own.get(f"self_attn.{kind}_norm.weight")) is not None:
            y = norm(y, scale, shape.eps)
        if turn is not None:
            cos, sin = (part.unsqueeze(-2) for part in turn)
            one, other = y.chunk(2, dim=-1)
            y = y * cos + torch.cat([-other, one], dim=-1) * sin
    return y.transpose(1, 2)


def layer(
    shape: Shape,
    own: Weights,
    x: torch.Tensor,
    turn: Pair | None,
    sees: torch.Tensor | None,
    before: Pair | None = None,
) -> torch.Tensor:
    """One layer over states [batch, nodes, width].

    sees: which node sees which, broadcast to [batch, heads, nodes, keys]; None: those up to itself.
    before: keys and values from elsewhere, which stand in front of those of the nodes.
    """
    y = norm(x, own["input_layernorm.weight"], shape.eps)
    q, k, v = (heads(shape, own, y, kind, turn) for kind in "qkv")
    if before is not None:
        k, v = (
            torch.cat([old.to(new), new], dim=2) for old, new in zip(before, (k, v), strict=True)
        )
    if shape.kv_heads != shape.heads:  # kernels that take a mask take no groups
        k, v = (part.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for part in (k, v))
    kept = fn.scaled_dot_product_attention(
        q.to(v), k.to(v), v, attn_mask=sees, is_causal=sees is None
    )
    kept = kept.transpose(1, 2).flatten(-2)
    x = x + product(own, "self_attn.o_proj", kept)
    y = norm(x, own["post_attention_layernorm.weight"], shape.eps)
    y = fn.silu(product(own, "mlp.gate_proj", y)) * product(own, "mlp.up_proj", y)
    return x + product(own, "mlp.down_proj", y)
