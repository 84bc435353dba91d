"""Latent attention (MLA) in plain torch: attention over latent rows that are never expanded."""

from __future__ import annotations

import torch

from outstride.ops.arithmetic import linear, rms_norm, rope
from outstride.ops.weights import LatentWeights, LayerWeights, ModelShape

EPS = 1e-6
"""Epsilon of the norms of latent attention, whatever that of the others is."""


def project_latent(
    shape: ModelShape,
    weights: LayerWeights,
    x: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [rows, heads, rank + rope_dim], and what is cached: both [rows, 1, rank + rope_dim].

    What expands a latent row to keys is absorbed into the queries. Keys are latent rows with the
    rotated part, values are latent rows with zeros instead.
    """
    own, latent, heads = weights.latent, shape.switches.latent, shape.heads
    assert own is not None
    assert latent is not None
    normed = rms_norm(x, weights.attention_norm, shape.norm_eps)
    down = normed
    if own.query_down is not None and own.query_norm is not None:
        down = rms_norm(linear(normed, own.query_down), own.query_norm, EPS)
    q = linear(down, own.queries).view(len(x), heads, -1)
    absorbed = [
        linear(q[:, head, : latent.nope_dim].contiguous(), own.keys_up[head])
        for head in range(heads)
    ]
    rotated = rope(q[..., latent.nope_dim :], *tables)
    kv = linear(normed, own.kv_down)
    row = rms_norm(kv[:, : latent.rank].contiguous(), own.kv_norm, EPS)[:, None]
    key = rope(kv[:, None, latent.rank :], *tables)
    value = torch.cat([row, torch.zeros_like(key)], dim=-1)
    queries = torch.cat([torch.stack(absorbed, dim=1), rotated], dim=-1)
    return queries, torch.cat([row, key], dim=-1), value


def expanded(own: LatentWeights, attended: torch.Tensor, heads: int) -> torch.Tensor:
    """[rows, heads * value_dim] of attended latent rows [rows, heads * (rank + rope_dim)]."""
    by_head, rank = attended.view(len(attended), heads, -1), own.kv_norm.shape[0]
    found = [
        linear(by_head[:, head, :rank].contiguous(), own.values_up[head]) for head in range(heads)
    ]
    return torch.cat(found, dim=1)
