"""The probe pass: what each layer asks of attention, and whether it can have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outstride.errors import UnsupportedModel
from outstride.models.bridge.attention import window_of

_HARMLESS = frozenset(
    {
        *("dropout", "is_causal", "sliding_window", "use_cache", "training", "deterministic"),
        *("output_attentions", "output_hidden_states", "return_dict", "head_mask", "layer_idx"),
        *("position_ids", "position_embeddings", "cache", "cache_position"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    }
)
"""Options of an attention call that ask for nothing beyond scaled attention under a mask."""
_OTHER_RULE = -1.0
"""Fills masks of other rules; a model may make one that no layer uses."""
SINKS = "s_aux"
"""The option that holds attention sinks, [heads]."""
_REFUSED = {
    "position_bias": "it adds a bias by position to attention scores",
    "alibi": "it adds a bias by position to attention scores (ALiBi)",
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one layer."""

    module: torch.nn.Module
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    cap: float | None = None
    """The soft cap of attention scores."""

    @property
    def width(self) -> int:
        """Columns of cached keys and values: the wider of the two, the other is padded with zeros."""
        return max(self.key_dim, self.value_dim)


class Probe:
    """Handles the attention of one pass of positions 0, 1, …: records it and returns zeros.

    A mask is [1, 1, rows, rows] filled with its window (0: none), so that a layer that adds
    something to it is found out.
    """

    def __init__(self, rows: int, context: int) -> None:
        self._rows, self._context = rows, context
        self.layers: list[AttentionShape] = []

    def mask(self, visible: Callable[..., torch.Tensor] | None, rows: int) -> torch.Tensor:
        window = None if visible is None else window_of(visible, self._context)
        return torch.full((1, 1, rows, rows), float(_OTHER_RULE if window is None else window))

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        if any(len(s) != 4 or s[0] != 1 or s[2] != self._rows for s in shapes):
            raise UnsupportedModel(
                f"a layer attends with queries, keys and values of shapes {shapes}, not with one key "
                "for each row (cross-attention, or a cache of its own)"
            )
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % kv_heads or value.shape[1] != kv_heads or key.shape[3] != query.shape[3]:
            raise UnsupportedModel(f"its heads do not fit together: {shapes}")
        _check_options(options, heads)
        scale = options.get("scaling")
        self.layers.append(
            AttentionShape(
                module=module,
                heads=heads,
                kv_heads=kv_heads,
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                window=_window_in(mask),
                cap=None if options.get("softcap") is None else float(options["softcap"]),
            )
        )
        return query.new_zeros(1, self._rows, heads, value.shape[3])


def _window_in(mask: torch.Tensor | None) -> int | None:
    """The window that a mask of the probe stands for."""
    if mask is None:
        raise UnsupportedModel("a layer attends without a mask")
    code = float(mask.reshape(-1)[0])
    if code == _OTHER_RULE:
        raise UnsupportedModel(
            "its attention is neither causal nor a sliding window (chunked, or bidirectional)"
        )
    if code < 0 or code != int(code) or not bool((mask == code).all()):
        raise UnsupportedModel(
            "it changes its attention mask (ALiBi or another bias by position, or a mask of its own)"
        )
    return int(code) or None


def _check_options(options: Mapping[str, Any], heads: int) -> None:
    """Raises UnsupportedModel for options that change attention in a way that is not implemented."""
    for name, value in options.items():
        if value is None or name in ("scaling", "softcap"):
            continue
        if name == SINKS and isinstance(value, torch.Tensor) and value.numel() == heads:
            continue
        if name in _REFUSED:
            raise UnsupportedModel(_REFUSED[name])
        if name not in _HARMLESS and isinstance(value, torch.Tensor):
            raise UnsupportedModel(f"it hands {name!r} to attention, which is not known here")
    if options.get("is_causal") is False:
        raise UnsupportedModel("it has a layer that does not attend causally")
