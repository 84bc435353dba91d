"""gpt-oss: attention sinks, windows in every second layer, biases, experts with a clamped SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outstride.models import experts
from outstride.models.families.family import Config, Family, Windows, listed_windows
from outstride.ops.switches import ClampedSwiglu, Switches

if TYPE_CHECKING:
    import torch


def _config(config: Config) -> Config:
    return {
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": config.get("experts_per_token", 4),
        "attention_bias": True,
        "sliding_window": 128,
        **config,
    }


def _windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    del rope_layers
    sliding = listed_windows(config, layers)
    if sliding is None:
        sliding = [layer % 2 == 0 for layer in range(layers)]
    return tuple(int(config["sliding_window"]) if flag else None for flag in sliding)


def _switches(config: Config) -> Switches:
    activation = ClampedSwiglu(
        alpha=float(config.get("swiglu_alpha", 1.702)),
        limit=float(config.get("swiglu_limit", 7.0)),
    )
    return Switches(sinks=True, expert_activation=activation)


def _gate_up(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """[experts, hidden, 2 * inner]; columns of gate and up alternate."""
    return _experts(tensor.transpose(1, 2), "weight")


def _gate_up_bias(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """[experts, 2 * inner]; those of gate and up alternate."""
    return _experts(tensor, "bias")


def _experts(alternating: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    found = {}
    for i, both in enumerate(alternating):
        found[f"mlp.experts.{i}.gate_proj.{kind}"] = both[0::2]
        found[f"mlp.experts.{i}.up_proj.{kind}"] = both[1::2]
    return found


def _down(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """[experts, inner, hidden]"""
    return {f"mlp.experts.{i}.down_proj.weight": part.t() for i, part in enumerate(tensor)}


def _down_bias(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """[experts, hidden]"""
    return {f"mlp.experts.{i}.down_proj.bias": part for i, part in enumerate(tensor)}


FAMILIES = {
    "gpt_oss": Family(
        classes=("GptOssForCausalLM",),
        common_config=_config,
        tensor_names={"mlp.gate.": "mlp.router."},
        kv_heads=8,
        head_dim=64,
        rope_theta=150000.0,
        attention_bias=True,
        windows=_windows,
        experts=experts.gpt_oss,
        switches=_switches,
        unfused={
            "mlp.experts.gate_up_proj": _gate_up,
            "mlp.experts.gate_up_proj_bias": _gate_up_bias,
            "mlp.experts.down_proj": _down,
            "mlp.experts.down_proj_bias": _down_bias,
        },
    ),
}
