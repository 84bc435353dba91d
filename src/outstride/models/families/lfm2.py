"""LFM2: most layers are short convolutions, some have attention."""

from __future__ import annotations

from outstride.models.families.family import Config, Family, head_norms_always
from outstride.models.recurrent_layers import MIXER
from outstride.ops.recurrent import RecurrentKind, RecurrentShape
from outstride.ops.switches import Switches


def _config(config: Config) -> Config:
    inner = int(config.get("block_ff_dim") or config["intermediate_size"])
    if config.get("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        if (factor := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
            multiple = int(config.get("block_multiple_of", 256))
            inner = -(-int(float(factor) * inner) // multiple) * multiple
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    return {
        **config,
        "intermediate_size": inner,
        "rms_norm_eps": config.get("norm_eps", 1e-5),
        "tie_word_embeddings": tied,
    }


def _switches(config: Config) -> Switches:
    layers, listed = int(config["num_hidden_layers"]), config.get("layer_types")
    if listed is None:
        full = config.get("full_attn_idxs")
        listed = ["conv" if full is not None and i not in full else "" for i in range(layers)]
    if len(listed) < layers:
        raise ValueError(f"layer_types names {len(listed)} of {layers} layers")
    biased = bool(config.get("conv_bias", False))
    shape = RecurrentShape(
        kind=RecurrentKind.CONV,
        layers=tuple(name == "conv" for name in listed[:layers]),
        kernel=int(config.get("conv_L_cache", 3)),
        channels=int(config["hidden_size"]),
        conv_bias=biased,
        bias=biased,
    )
    return Switches(recurrent=shape if any(shape.layers) else None)


FAMILIES = {
    "lfm2": Family(
        classes=("Lfm2ForCausalLM",),
        common_config=_config,
        tensor_names={
            "model.norm.": "model.embedding_norm.",
            "input_layernorm.": "operator_norm.",
            "post_attention_layernorm.": "ffn_norm.",
            "self_attn.q_norm.": "self_attn.q_layernorm.",
            "self_attn.k_norm.": "self_attn.k_layernorm.",
            "self_attn.o_proj.": "self_attn.out_proj.",
            MIXER + "conv1d.": "conv.conv.",
            MIXER: "conv.",
            "mlp.gate_proj.": "feed_forward.w1.",
            "mlp.up_proj.": "feed_forward.w3.",
            "mlp.down_proj.": "feed_forward.w2.",
        },
        rope_theta=1e6,
        tied=True,
        head_norms=head_norms_always,
        switches=_switches,
    ),
}
