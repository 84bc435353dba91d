"""Qwen3-Next and Qwen3.5: most layers are gated delta nets, the others have gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outstride.models import experts
from outstride.models.families.family import Config, Family, Unfuse, head_norms_always
from outstride.models.families.stacked_experts import stacked
from outstride.models.recurrent_layers import MIXER
from outstride.ops.recurrent import RecurrentKind, RecurrentShape
from outstride.ops.switches import Switches

if TYPE_CHECKING:
    import torch

    from outstride.models.config import DecoderConfig


def _text_config(config: Config) -> Config:
    """The text part of a config; models that also see images nest it."""
    text = {**config, **(config.get("text_config") or {})}
    return {"intermediate_size": 0, "partial_rotary_factor": 0.25, **text}


def recurrent_layers(config: Config, kind: str) -> tuple[bool, ...]:
    """Which layers are of a kind, by `layer_types` or by the interval of full attention."""
    layers = int(config["num_hidden_layers"])
    listed = config.get("layer_types")
    if listed is None:
        every = int(config.get("full_attention_interval", 4))
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    if len(listed) < layers:
        raise ValueError(f"layer_types names {len(listed)} of {layers} layers")
    return tuple(name == kind for name in listed[:layers])


def _switches(config: Config) -> Switches:
    key_heads, heads = (int(config[f"linear_num_{n}_heads"]) for n in ("key", "value"))
    key_dim, value_dim = (int(config[f"linear_{n}_head_dim"]) for n in ("key", "value"))
    return Switches(
        attention_gate=True,
        recurrent=RecurrentShape(
            kind=RecurrentKind.DELTA,
            layers=recurrent_layers(config, "linear_attention"),
            kernel=int(config.get("linear_conv_kernel_dim", 4)),
            channels=2 * key_heads * key_dim + heads * value_dim,
            heads=heads,
            key_heads=key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            eps=float(config.get("rms_norm_eps", 1e-6)),
        ),
    )


def _unfused(config: DecoderConfig) -> Mapping[str, Unfuse]:
    """Queries and their gates alternate by head; Qwen3-Next stores delta nets by key head."""
    shape = config.switches.recurrent
    assert shape is not None
    import torch  # lists of families do without it

    groups = shape.heads // shape.key_heads
    values = groups * shape.value_dim

    def gated(kind: str) -> Unfuse:
        def split(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
            heads = tensor.reshape(config.heads, 2, config.head_dim, *tensor.shape[1:])
            names = (f"self_attn.q_proj.{kind}", f"self_attn.gate_proj.{kind}")
            return {name: heads[:, i].flatten(0, 1) for i, name in enumerate(names)}

        return split

    def by_key_head(tensor: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
        heads = tensor.reshape(shape.key_heads, sum(sizes), -1)
        return [part.flatten(0, 1) for part in torch.split(heads, list(sizes), dim=1)]

    def qkvz(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        *qkv, z = by_key_head(tensor, shape.key_dim, shape.key_dim, values, values)
        return {MIXER + "in_proj_qkv.weight": torch.cat(qkv), MIXER + "in_proj_z.weight": z}

    def numbers(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        b, a = by_key_head(tensor, groups, groups)
        return {MIXER + "in_proj_b.weight": b, MIXER + "in_proj_a.weight": a}

    return {
        "self_attn.q_proj.weight": gated("weight"),
        "self_attn.q_proj.bias": gated("bias"),
        MIXER + "in_proj_qkvz.weight": qkvz,
        MIXER + "in_proj_ba.weight": numbers,
        **stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    }


_NAMES = {
    "self_attn.q_proj.": "self_attn.gated_q_proj.",  # the file's own q_proj is taken apart
    "mlp.shared_experts.": "mlp.shared_expert.",
}
_SKIPPED = ("mtp.", "model.visual.", "visual.")


def _family(*classes: str) -> Family:
    return Family(
        classes=classes,
        common_config=_text_config,
        tensor_names=_NAMES,
        head_dim=256,
        attention_bias=True,
        partial_rope=True,
        head_norms=head_norms_always,
        experts=experts.qwen3_next,
        switches=_switches,
        norm_offset=1.0,
        prefixes={"model.language_model.": "model."},
        skipped=_SKIPPED,
        unfused_by_size=_unfused,
    )


FAMILIES = {
    "qwen3_next": _family("Qwen3NextForCausalLM"),
    "qwen3_5_text": _family("Qwen3_5ForCausalLM"),
    "qwen3_5": _family("Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_text": _family("Qwen3_5MoeForCausalLM"),
    "qwen3_5_moe": _family("Qwen3_5MoeForConditionalGeneration"),
}
