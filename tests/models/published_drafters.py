"""Drafters in published layouts with random weights, and oracles that compute the same plainly.

The oracles follow the published code: whole sequences at once, positions from 0 as there, no KV cache.
They get the target's hidden states and nothing else of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outstride.models.config import DecoderConfig

Tensors = dict[str, torch.Tensor]


class Random:
    """Random tensors, large enough that attention and logits are not flat.

    Matrices are exact in int8: each row is a multiple of 1/127 of its maximum.
    """

    def __init__(self, seed: int = 7) -> None:
        self._source = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(shape, generator=self._source)
        values = values * 1.3 * shape[-1] ** -0.5
        step = values.abs().amax(dim=-1, keepdim=True) / 127
        return (values / step).round() * step

    def norm(self, width: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(width, generator=self._source)
        return 1 + 0.1 * values

    def layer(
        self,
        at: str,
        config: DecoderConfig,
        inner: int,
        *,
        reads: int = 1,
        head_norms: bool = False,
    ) -> Tensors:
        size = config.hidden_size
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        found = {f"{at}post_attention_layernorm.weight": self.norm(size)}
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            found[f"{at}self_attn.{name}_proj.weight"] = self.matrix(rows, reads * size)
        found[f"{at}self_attn.o_proj.weight"] = self.matrix(size, wide)
        found[f"{at}mlp.gate_proj.weight"] = self.matrix(inner, size)
        found[f"{at}mlp.up_proj.weight"] = self.matrix(inner, size)
        found[f"{at}mlp.down_proj.weight"] = self.matrix(size, inner)
        if head_norms:
            found[f"{at}self_attn.q_norm.weight"] = self.norm(config.head_dim)
            found[f"{at}self_attn.k_norm.weight"] = self.norm(config.head_dim)
        return found


def config_of(config: DecoderConfig, inner: int, theta: float, **more: Any) -> dict[str, Any]:
    """A config.json as Hugging Face writes it."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": inner,
        "max_position_embeddings": 512,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": theta,
        "vocab_size": config.vocab_size,
        **more,
    }


def write(folder: Path, about: Mapping[str, Any], tensors: Tensors, file: str = "") -> Path:
    """Writes a folder; the suffix of the file decides the format of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about))
    name = folder / (file or "model.safetensors")
    if name.suffix == ".safetensors":
        save_file({key: value.contiguous() for key, value in tensors.items()}, str(name))
    else:
        torch.save(tensors, name)
    return folder


# --- oracles ---------------------------------------------------------------------------------------


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    size = x.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.cat([positions[:, None] * inverse] * 2, dim=-1)[:, None]
    half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1)
    return x * angles.cos() + half * angles.sin()


def attended(
    part: Tensors,
    at: str,
    config: DecoderConfig,
    theta: float,
    queries: torch.Tensor,
    seen: torch.Tensor,
    sees: torch.Tensor,
) -> torch.Tensor:
    """Attention of the last rows, `queries`, over `seen`, positions from 0; sees: [queries, seen]."""
    size, group = config.head_dim, config.heads // config.kv_heads
    q, k, v = (
        (x @ part[f"{at}self_attn.{name}_proj.weight"].T).view(len(x), -1, size)
        for name, x in (("q", queries), ("k", seen), ("v", seen))
    )
    if f"{at}self_attn.q_norm.weight" in part:
        q = rms(q, part[f"{at}self_attn.q_norm.weight"], config.norm_eps)
        k = rms(k, part[f"{at}self_attn.k_norm.weight"], config.norm_eps)
    positions = torch.arange(len(seen), dtype=torch.float32)
    q, k = _rotated(q, positions[-len(queries) :], theta), _rotated(k, positions, theta)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
    shares = scores.masked_fill(~sees, -math.inf).softmax(-1)
    gathered = torch.einsum("hqk,khd->qhd", shares, v).reshape(len(queries), -1)
    return gathered @ part[f"{at}self_attn.o_proj.weight"].T


def mlp(part: Tensors, at: str, config: DecoderConfig, x: torch.Tensor) -> torch.Tensor:
    y = rms(x, part[f"{at}post_attention_layernorm.weight"], config.norm_eps)
    gate = torch.nn.functional.silu(y @ part[f"{at}mlp.gate_proj.weight"].T)
    up = y @ part[f"{at}mlp.up_proj.weight"].T
    return x + (gate * up) @ part[f"{at}mlp.down_proj.weight"].T


class Eagle:
    """Reads pairs of a token and the hidden state before it; each output is the next hidden state."""

    def __init__(
        self,
        config: DecoderConfig,
        part: Tensors,
        theta: float,
        embedding: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.config, self.part, self.theta = config, part, theta
        self.embedding, self.head = embedding, head

    def outputs(self, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def said(
        self, tokens: Sequence[int], features: torch.Tensor, path: Sequence[int]
    ) -> torch.Tensor:
        """Logits after a path of drafted tokens; each reads the output of the one before."""
        read, hidden = list(tokens[1:]), features
        out = self.outputs(read, hidden)[-1:]
        for token in path:
            read, hidden = [*read, token], torch.cat([hidden, self.fed(out)])
            out = self.outputs(read, hidden)[-1:]
        return self.head(out)[0]

    def fed(self, out: torch.Tensor) -> torch.Tensor:
        return out


class EagleFirst(Eagle):
    """The layer has no norm before attention; its input is projected from embedding and feature."""

    def outputs(self, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        part, at = self.part, "layers.0."
        x = torch.cat([self.embedding[list(tokens)], hidden], dim=-1) @ part["fc.weight"].T
        x = x + part.get("fc.bias", torch.zeros(1))
        sees = torch.ones(len(x), len(x)).tril().bool()
        x = x + attended(part, at, self.config, self.theta, x, x, sees)
        return mlp(part, at, self.config, x)


class EagleThird(Eagle):
    """QKV reads embedding and hidden state concatenated; the residual is the hidden state alone."""

    early = False
    again = False

    def outputs(self, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        part, at, eps = self.part, "layers.0.", self.config.norm_eps
        embedded = rms(self.embedding[list(tokens)], part[f"{at}input_layernorm.weight"], eps)
        normed = rms(hidden, part[f"{at}hidden_norm.weight"], eps)
        both = torch.cat([embedded, normed], dim=-1)
        sees = torch.ones(len(both), len(both)).tril().bool()
        found = attended(part, at, self.config, self.theta, both, both, sees)
        return mlp(part, at, self.config, (normed if self.early else hidden) + found)

    def fed(self, out: torch.Tensor) -> torch.Tensor:
        return rms(out, self.part["norm.weight"], self.config.norm_eps) if self.again else out


def dflash(
    config: DecoderConfig,
    part: Tensors,
    theta: float,
    layers: int,
    features: torch.Tensor,
    block: torch.Tensor,
) -> torch.Tensor:
    """The final hidden states of a block of embeddings after features of the target."""
    eps = config.norm_eps
    context = rms(features @ part["fc.weight"].T, part["hidden_norm.weight"], eps)
    x = block
    for i in range(layers):
        at = f"layers.{i}."
        normed = rms(x, part[f"{at}input_layernorm.weight"], eps)
        seen = torch.cat([context, normed])
        sees = torch.ones(len(x), len(seen)).bool()
        x = x + attended(part, at, config, theta, normed, seen, sees)
        x = mlp(part, at, config, x)
    return rms(x, part["norm.weight"], eps)
