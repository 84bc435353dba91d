"""Granite 4-H: most layers are Mamba-2, some have attention without positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from outstride.models import experts
from outstride.models.families.family import Config, Family, Unfuse
from outstride.models.families.granite import granite_config
from outstride.models.families.stacked_experts import stacked
from outstride.models.recurrent_layers import MIXER
from outstride.ops.recurrent import RecurrentKind, RecurrentShape
from outstride.ops.switches import Switches

if TYPE_CHECKING:
    import torch

    from outstride.models.config import DecoderConfig


def _config(config: Config) -> Config:
    return {
        **granite_config(config),
        "mixer_eps": config.get("rms_norm_eps", 1e-6),
        "intermediate_size": config["shared_intermediate_size"],
        "expert_intermediate_size": config["intermediate_size"],
    }


def _switches(config: Config) -> Switches:
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    listed = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * layers
    if len(listed) < layers:
        raise ValueError(f"layer_types names {len(listed)} of {layers} layers")
    heads, groups = int(config["mamba_n_heads"]), int(config.get("mamba_n_groups") or 1)
    inner, key_dim = int(config.get("mamba_expand") or 2) * hidden, int(config["mamba_d_state"])
    limits = config.get("time_step_limit") or (0.0, math.inf)
    # Some versions of transformers write infinity as {"__float__": "Infinity"}.
    low, high = (x["__float__"] if isinstance(x, dict) else x for x in limits)
    shape = RecurrentShape(
        kind=RecurrentKind.SSM,
        layers=tuple(name in ("mamba", "linear_attention") for name in listed[:layers]),
        kernel=int(config.get("mamba_d_conv") or 4),
        channels=inner + 2 * groups * key_dim,
        heads=heads,
        key_heads=groups,
        key_dim=key_dim,
        value_dim=inner // heads,
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        bias=bool(config.get("mamba_proj_bias", False)),
        eps=float(config["mixer_eps"]),
        step_limits=(float(low), float(high)),
    )
    return Switches(
        attention_scale=float(config.get("attention_multiplier", 1.0)),
        recurrent=shape if any(shape.layers) else None,
    )


def _rope_layers(config: Config, layers: int) -> tuple[bool, ...]:
    return (config.get("position_embedding_type") == "rope",) * layers


def _unfused(config: DecoderConfig) -> Mapping[str, Unfuse]:
    """Files order channels as values, keys, queries; here it is queries, keys, values."""
    shape = config.switches.recurrent
    if shape is None:
        return dict(_EXPERTS)
    import torch  # lists of families do without it

    wide = shape.key_heads * shape.key_dim

    def channels(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.split(rows, [shape.inner, wide, wide])[::-1])

    def projected(kind: str) -> Unfuse:
        def split(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
            sizes = [shape.inner, shape.channels, shape.heads]
            gate, mixed, steps = torch.split(tensor, sizes)
            return {
                f"{MIXER}in_proj_qkv.{kind}": channels(mixed),
                f"{MIXER}in_proj_z.{kind}": gate,
                f"{MIXER}in_proj_a.{kind}": steps,
            }

        return split

    def conv(kind: str) -> Unfuse:
        return lambda tensor: {f"{MIXER}conv1d.{kind}": channels(tensor)}

    return {
        "mamba.in_proj.weight": projected("weight"),
        "mamba.in_proj.bias": projected("bias"),
        "mamba.conv1d.weight": conv("weight"),
        "mamba.conv1d.bias": conv("bias"),
        **_EXPERTS,
    }


_EXPERTS: Mapping[str, Unfuse] = {
    **stacked("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    **stacked("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    "block_sparse_moe.router.weight": lambda tensor: {"mlp.gate.weight": tensor},
}
"""Published files have the first names, newer versions of transformers write the others."""


def _names(mlp: str) -> dict[str, str]:
    return {
        MIXER + "conv1d.": "unfused.conv1d.",
        MIXER: "mamba.",
        "mlp.gate.": "block_sparse_moe.router.layer.",
        f"{mlp}.gate_proj.": "shared_mlp.input_linear.",
        f"{mlp}.up_proj.": "shared_mlp.input_linear.",
        f"{mlp}.down_proj.": "shared_mlp.output_linear.",
    }


FAMILIES = {
    "granitemoehybrid": Family(
        classes=("GraniteMoeHybridForCausalLM",),
        common_config=_config,
        tensor_names={**_names("mlp.shared_experts"), **_names("mlp")},
        attention_bias=True,
        rope_layers=_rope_layers,
        experts=experts.granite_hybrid,
        switches=_switches,
        unfused_by_size=_unfused,
    ),
}
