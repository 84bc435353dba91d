"""The layers of a decoder in torch, differentiable and compilable: whole rows of text at once.

Everything that trains in this package runs through `layer`, and so do the frozen teachers. The
engine's own operations compute the same function node by node, with bits that do not depend on the
batch; here speed counts and rounding may differ.
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
class LayerShape:
    """The sizes that a layer needs besides its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, config: DecoderConfig) -> LayerShape:
        return cls(config.heads, config.kv_heads, config.head_dim, config.norm_eps)


def rope_tables(config: DecoderConfig, length: int, device: str) -> Pair:
    """RoPE cosines and sines for the first positions: two tensors [length, head_dim]."""
    angles = torch.arange(length)[:, None] * torch.tensor(config.frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    cos, sin = (config.rope_scale * value for value in (angles.cos(), angles.sin()))
    return cos.to(device), sin.to(device)


def within(weights: Weights, prefix: str) -> dict[str, torch.Tensor]:
    """Weights whose names start with a prefix, under the rest of their names."""
    size = len(prefix)
    return {name[size:]: value for name, value in weights.items() if name.startswith(prefix)}


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm in float32."""
    return fn.rms_norm(x.float(), x.shape[-1:], weight, eps)


def product(own: Weights, name: str, y: torch.Tensor) -> torch.Tensor:
    """A linear layer, with its bias and its LoRA adapter where it has them."""
    found = fn.linear(y, own[f"{name}.weight"], own.get(f"{name}.bias"))
    if (low := own.get(f"{name}.low")) is not None:
        found = found + fn.linear(y, low) @ own[f"{name}.high"]
    return found


def project_heads(
    shape: LayerShape, own: Weights, y: torch.Tensor, kind: str, rope: Pair | None
) -> torch.Tensor:
    """Queries (`q`), keys (`k`) or values (`v`) of normalized hidden states: [batch, heads, nodes,
    head_dim].

    rope: cosines and sines for each node, [nodes, head_dim] or [batch, nodes, head_dim]; None: no
    RoPE.
    """
    y = product(own, f"self_attn.{kind}_proj", y)
    y = y.view(*y.shape[:-1], -1, shape.head_dim)
    if kind != "v":
        if (scale := own.get(f"self_attn.{kind}_norm.weight")) is not None:
            y = norm(y, scale, shape.eps)
        if rope is not None:
            cos, sin = (part.unsqueeze(-2) for part in rope)
            one, other = y.chunk(2, dim=-1)
            y = y * cos + torch.cat([-other, one], dim=-1) * sin
    return y.transpose(1, 2)


def layer(
    shape: LayerShape,
    own: Weights,
    x: torch.Tensor,
    rope: Pair | None,
    mask: torch.Tensor | None,
    past_kv: Pair | None = None,
) -> torch.Tensor:
    """One layer over hidden states [batch, nodes, width].

    mask: which node sees which, broadcast to [batch, heads, nodes, keys]; None: causal. past_kv:
    keys and values that precede those of the nodes.
    """
    y = norm(x, own["input_layernorm.weight"], shape.eps)
    q, k, v = (project_heads(shape, own, y, kind, rope) for kind in "qkv")
    if past_kv is not None:
        k, v = (
            torch.cat([old.to(new), new], dim=2) for old, new in zip(past_kv, (k, v), strict=True)
        )
    if shape.kv_heads != shape.heads:  # kernels that take a mask take no groups
        k, v = (part.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for part in (k, v))
    kept = fn.scaled_dot_product_attention(
        q.to(v), k.to(v), v, attn_mask=mask, is_causal=mask is None
    )
    kept = kept.transpose(1, 2).flatten(-2)
    x = x + product(own, "self_attn.o_proj", kept)
    y = norm(x, own["post_attention_layernorm.weight"], shape.eps)
    y = fn.silu(product(own, "mlp.gate_proj", y)) * product(own, "mlp.up_proj", y)
    return x + product(own, "mlp.down_proj", y)
